"""The window length of a plan and the history to serve with, where the study swept them."""

from pathlib import Path

import pytest

from habitus.laws.context_axis import describe_history, fit_context
from habitus.laws.runs import MeasuredRun
from habitus.planning import PlanOptions, plan
from habitus.store import Laws, RunRow
from tests.sealing import seal_store

METRIC = "catalogue/recall@10"
RECALLS = {10: 0.300, 50: 0.360, 200: 0.3988, 1000: 0.400}
SECONDS = {10: 0.002, 50: 0.0025, 200: 0.004, 1000: 0.012}


def make_run(budget: float, seq_len: int, best: float) -> MeasuredRun:
    """A valley of recall around the best length; the same gains from history in all runs."""
    u = seq_len / best
    metrics = {METRIC: 0.45 - 0.02 * (u**0.6 + u**-0.6), "train/loss": 5.0}
    metrics |= {f"{METRIC}/context={n}": value for n, value in RECALLS.items()}
    metrics |= {f"{METRIC}/beyond={n}": 0.4 - value for n, value in RECALLS.items() if n < 1000}
    metrics |= {f"query_seconds/context={n}": value for n, value in SECONDS.items()}
    errors = {f"{METRIC}/beyond={n}": 0.0004 for n in RECALLS}
    knobs = {"seq_len": float(seq_len)}
    return MeasuredRun("context", f"L={seq_len}", budget, 1e-3, 0, knobs=knobs, metrics=metrics, errors=errors)


@pytest.fixture(scope="module")
def with_context(laws_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [
        make_run(budget, seq_len, best)
        for budget, best in ((1e11, 250.0), (1e12, 350.0), (1e13, 500.0))
        for seq_len in (32, 64, 128, 256, 512, 1024, 2048)
    ]
    laws = Laws.read(laws_path)
    rows = tuple(
        RunRow(axis=r.axis, budget=r.budget, cell_id=r.cell_id, learning_rate=r.learning_rate, seed=0, init="default",
               chosen=True, knobs=dict(r.knobs), metrics=dict(r.metrics))
        for r in runs
    )  # fmt: skip
    entries = (*laws.entries, *fit_context(runs, METRIC).entries)
    path = tmp_path_factory.mktemp("context") / "laws.json"
    laws.model_copy(update={"entries": entries, "runs": (*laws.runs, *rows)}).write(path)
    return path


def test_windows_have_the_nearest_length_that_was_run_and_batches_keep_their_slots(
    laws_path: Path, with_context: Path
) -> None:
    before = plan(1e13, METRIC, PlanOptions(laws=laws_path, stage2_share=0.2))
    after = plan(1e13, METRIC, PlanOptions(laws=with_context, stage2_share=0.2))
    assert "seq_len" not in before.quantities and before.stage1.data.seq_len == 256
    length = after["seq_len"]
    assert length.value == 512 and length.source == "this study"  # about 483 at 8e12
    assert length.low is not None and length.high is not None and length.low < 483 < length.high
    assert after.stage1.data.seq_len == 512
    assert after.stage1.train.batch_sequences == before.stage1.train.batch_sequences // 2
    assert after["params"].value == pytest.approx(before["params"].value, rel=0.05)
    assert after.stage1.train.learning_rate == pytest.approx(before.stage1.train.learning_rate, rel=0.01)
    assert after.stage2 is not None and after.stage2.data.seq_len == 512
    # The pool of batch-local candidates has as many slots, and predictions are said to be of other windows.
    assert after.stage1.evaluate.batch_sequences == before.stage1.evaluate.batch_sequences // 2
    assert any(w.startswith("predictions are those of windows of 256 events") for w in after.warnings)
    assert not any("predictions are those of windows" in w for w in before.warnings)


def test_the_plan_says_how_much_of_a_history_to_serve_with(with_context: Path) -> None:
    served = plan(1e13, METRIC, PlanOptions(laws=with_context))["serve_history"]
    assert served.value == 200 and served.low is not None and 50 < served.low <= 200
    assert plan(1e13, METRIC, PlanOptions(laws=with_context)).stage1.evaluate.contexts == (10, 50, 200, 1000)
    assert "train with 512, serve with 200: -0.3% recall@10 at 0.33 of the time of a query" in served.how


def test_a_history_that_was_measured_with_other_windows_says_so(with_context: Path) -> None:
    made = plan(1e11, METRIC, PlanOptions(laws=with_context))
    assert made["seq_len"].value == 256
    assert "serve_history: measured with windows of 512, where the plan has 256" in made.warnings


def test_where_only_the_longest_will_do_nothing_shorter_is_named() -> None:
    steep = {10: 0.1, 200: 0.2, 1000: 0.4}
    metrics = {f"{METRIC}/context={n}": value for n, value in steep.items()} | {METRIC: 0.4, "train/loss": 1.0}
    metrics |= {f"{METRIC}/beyond={n}": 0.4 - value for n, value in steep.items() if n < 1000}
    run = MeasuredRun("context", "L=2048", 1e15, 1e-3, 0, knobs={"seq_len": 2048}, metrics=metrics)
    (law,) = [e.law for e in fit_context([run], METRIC).entries if e.name == "context_gain"]
    assert describe_history(law, METRIC) == (
        "train with 2048, serve with all of it: shorter histories lose more than 1% recall@10"
    )


def test_published_laws_say_nothing_of_windows() -> None:
    assert not {"seq_len", "serve_history"} & set(plan(1e17, METRIC).quantities)


def test_a_sealed_store_of_another_axis_lends_no_recipe(tmp_path: Path) -> None:
    """What context, shape and regularisation vary is no common setting of the other runs."""
    from habitus.planning.facts import read_store_facts
    from habitus.store import ManifestRow, SweepManifest

    from .planted import example_recipe, record_of

    usual = example_recipe()
    longer = usual.model_copy(update={"data": usual.data.model_copy(update={"seq_len": 1024})})
    manifests = {"allocation": usual, "context": longer}
    for axis, recipe in manifests.items():
        record = record_of(recipe, "c" * 64)
        if axis == "context":
            record = record.model_copy(update={"flops_budget": 10 * (record.flops_budget or 1e13)})
        cell = tmp_path / "cells" / record.recipe_hash
        cell.mkdir(parents=True)
        record.write(cell / "record.json")
        row = ManifestRow(
            cell_id=axis, flops_budget=1e13, learning_rate=1e-3, seed=0, recipe_hash=record.recipe_hash,
            wanted={}, realised={},
        )  # fmt: skip
        (tmp_path / "sweeps").mkdir(exist_ok=True)
        SweepManifest(axis=axis, preset="tiny", cells=(row,)).write(tmp_path / "sweeps" / f"{axis}-1.json")
    seal_store(tmp_path, "c" * 64)
    facts = read_store_facts(tmp_path / "laws.json")
    assert facts.recipe is not None and facts.recipe.data.seq_len == usual.data.seq_len
