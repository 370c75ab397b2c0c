"""From a CSV or a store to laws.json, and the command that does it."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.errors import FitError, RunError
from habitus.laws import (
    allocation_pipeline,
    fit,
    format_summary,
    format_tables,
    hierarchical_bootstrap,
    power_law,
    read_runs,
    select,
)
from habitus.laws.law_builders import law_without_values
from habitus.recipe import Recipe
from habitus.record import Metric, Params, Record, TrainLosses
from habitus.store import Law, LawEntry, Laws, LawStatus, direction_of
from tests.sealing import seal_store

ALLOCATION = ("allocation",)


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> Laws:
    """The laws of a whole planted study, fitted once."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("planted_runs", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = module.write_csv(tmp_path_factory.mktemp("csv") / "runs.csv", module.planted_rows(0.001))
    return fit(path, ["batch/loss", "catalogue/recall@10"])


def test_every_planted_law_is_found(laws: Laws, planted: Any) -> None:
    size = laws.find("size_law", "batch/loss")
    assert size.ok
    low, high = size.interval("exponent")
    assert low < 0.37 / 0.82 < high
    surface = laws.find("surface", "batch/loss")
    for name, true in planted.surface.items():
        low, high = surface.interval(name)
        assert low < true < high, name
    for c in planted.budgets[:4]:
        assert laws.find("share_optimum", "batch/loss", c)["x_opt"] == pytest.approx(planted.share_opt, rel=0.1)
        assert laws.find("depth_optimum", "batch/loss", c)["x_opt"] == pytest.approx(0.02, rel=0.1)
        best = laws.find("negatives_optimum", "catalogue/recall@10", c)
        assert best["x_opt"] == pytest.approx(planted.k_opt, rel=0.2)
    assert laws.find("both_approaches", "batch/loss").status == "ok"
    low, high = laws.find("share_law", "batch/loss").interval("exponent")
    assert low < 0 < high


def test_the_critical_batch_comes_with_its_target_and_rule(laws: Laws) -> None:
    law = laws.find("critical_batch", "batch/loss", 1e17)
    assert law.points["batch"] == (64, 128, 256, 512, 1024, 2048)
    assert "strictest value that every batch size reaches" in law.details["target_rule"]
    # Smoothing lags by a fixed number of evaluations, which adds to S_min and lowers B_crit from 400.
    assert 250 < law["b_crit"] < 420


def test_roll_outs_forms_correlations_and_drift_are_there(laws: Laws) -> None:
    (size,) = [r for r in laws.rollouts if r.name == "size_law" and r.metric == "batch/loss"]
    assert size.rollout.at(4, 1e19).ratio == pytest.approx(1, abs=0.1)
    assert len(size.leave_one_out.forecasts) == 5
    assert {f.name for f in laws.forms} == {"iso-FLOP curve", "L*(C)"}
    assert {t.name for t in laws.correlations} >= {"slices:batch/loss"}
    assert {t.runs for t in laws.correlations} == {"best learning rate only", "all evaluations"}
    assert laws.learning_rate_drift["mup_lr"].span_decades < laws.learning_rate_drift["default"].span_decades
    assert laws.surrogacy and laws.regimes


def test_the_file_holds_what_figures_need_and_reads_back(laws: Laws, tmp_path: Path) -> None:
    laws.write(tmp_path / "laws.json")
    assert Laws.read(tmp_path / "laws.json") == laws
    axes = {row.axis for row in laws.runs}
    assert axes == {"share", "depth", "batch", "allocation", "negatives", "init"}
    assert any(row.trajectory for row in laws.runs if row.axis == "batch")
    assert json.loads((tmp_path / "laws.json").read_text())["schema_version"] == 1


def test_the_learning_rate_is_chosen_by_training_loss_and_neighbours_are_kept(planted: Any, tmp_path: Path) -> None:
    rows = planted.rows(axes=ALLOCATION)
    for row in rows:  # validation would choose 4e-3, training loss says 2e-3
        row["batch/loss"] -= 0.5 if row["learning_rate"] == 4e-3 else 0.0
    selection = select(read_runs(planted.write(tmp_path / "runs.csv", rows)))
    assert {choice.learning_rate for choice in selection.choices} == {2e-3}
    assert [t.learning_rate for t in selection.choices[0].tried] == [1e-3, 2e-3, 4e-3]
    assert not selection.choices[0].at_edge
    for row in rows:
        row["train/loss"] -= 0.5 if row["learning_rate"] == 4e-3 else 0.0
    edge = fit(planted.write(tmp_path / "edge.csv", rows), ["batch/loss"])
    assert all(choice.at_edge for choice in edge.learning_rates)
    assert "edge" in edge.notes[0]


def test_runs_are_left_out_with_their_reasons(planted: Any, tmp_path: Path) -> None:
    rows = planted.rows(axes=("allocation", "depth"))
    rows[0] |= {"status": "failed", "reason": "non-finite loss at step 12"}
    rows[3]["epochs"] = 3.0
    rows[6]["train/loss"] = ""
    next(r for r in rows if r["axis"] == "depth")["on_diagonal"] = "no"
    path = planted.write(tmp_path / "runs.csv", rows)
    reasons = " | ".join(e.reason for e in select(read_runs(path)).exclusions)
    for part in ("non-finite loss at step 12", "3.00 epochs", "no tail training loss", "off the depth-sum diagonal"):
        assert part in reasons
    assert "epochs" not in " | ".join(e.reason for e in select(read_runs(path), allow_repeats=True).exclusions)


def test_a_metric_missing_in_half_the_records_is_law_without_values(planted: Any, tmp_path: Path) -> None:
    rows = planted.rows(axes=ALLOCATION)
    cells = sorted({(r["flops_budget"], r["cell_id"]) for r in rows})
    for row in rows:
        if cells.index((row["flops_budget"], row["cell_id"])) % 2:
            row["batch/loss"] = ""
    laws = fit(planted.write(tmp_path / "runs.csv", rows), ["batch/loss"])
    law = laws.find("allocation_fit", "batch/loss")
    assert law.status == "not_identified"
    assert "missing in 20 of 40 runs" in law.warnings[0]


def test_a_few_missing_values_are_said(planted: Any, tmp_path: Path) -> None:
    rows = planted.rows(axes=ALLOCATION)
    for row in rows[:3]:
        row["batch/loss"] = ""
    laws = fit(planted.write(tmp_path / "runs.csv", rows), ["batch/loss"])
    assert any("missing in 1 of 40 runs" in w for w in laws.find("size_optimum", "batch/loss", 1e15).warnings)
    assert laws.find("size_law", "batch/loss").ok


def test_the_bootstrap_runs_through_the_whole_pipeline(planted: Any, tmp_path: Path) -> None:
    runs = read_runs(planted.write(tmp_path / "runs.csv", planted.rows(0.002, axes=ALLOCATION)))
    pipeline = allocation_pipeline("batch/loss")
    first = hierarchical_bootstrap(runs, pipeline, times=40, seed=5)
    assert first == hierarchical_bootstrap(runs, pipeline, times=40, seed=5)
    assert first != hierarchical_bootstrap(runs, pipeline, times=40, seed=6)
    low, high = first.intervals["0.95"]["size_exponent"].ends()
    assert low < 0.37 / 0.82 < high
    assert high - low < 0.2
    low, high = first.intervals["0.95"]["size_at_10x"].ends()
    assert low < planted.size(1e20) < high


def test_metrics_keep_the_order_of_their_columns(tmp_path: Path) -> None:
    names = ["batch/loss", "train/loss", *(f"catalogue/recall@{k}" for k in (100, 50, 20, 10, 5, 1))]
    header = ["axis", "cell_id", "flops_budget", "learning_rate", "seed", *names]
    (tmp_path / "runs.csv").write_text(f"{','.join(header)}\nshare,a,1e9,0.1,0,{','.join('3' for _ in names)}\n")
    (run,) = read_runs(tmp_path / "runs.csv")
    assert list(run.metrics) == names


def test_the_command_writes_the_same_bytes_twice_and_prints_tables(planted: Any, tmp_path: Path) -> None:
    path = planted.write(tmp_path / "runs.csv", planted.rows(0.002, axes=("allocation", "negatives")))
    arguments = ["fit", str(path), "--metric", "batch/loss", "--bootstrap", "3", "--seed", "4"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "a.json")])
    assert result.exit_code == 0, result.output
    assert "Laws by metric" in result.output and "Roll-out" not in result.output
    full = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "a.json"), "--verbose"])
    assert "Model size N*" in full.output and "Roll-out" in full.output
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "b.json"), "--json"])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads(again.stdout) == json.loads((tmp_path / "b.json").read_text())


def test_the_tables_fit_a_terminal(planted: Any, tmp_path: Path) -> None:
    rows = planted.rows(0.002)
    rows[0] |= {"status": "failed", "reason": "the loss was not finite at step 12 and did not become so again later"}
    text = format_tables(fit(planted.write(tmp_path / "runs.csv", rows)))
    assert max(len(line) for line in text.splitlines()) <= 80
    for title in ("Embedder share", "Critical batch", "Loss laws", "Spearman", "Best learning rate", "Left out"):
        assert title in text


def test_the_summary_is_one_line_per_metric_with_how_every_law_ended() -> None:
    def entry(name: str, budget: float | None, law: Law) -> LawEntry:
        return LawEntry(name=name, metric="batch/loss", axis="x", budget=budget, law=law)

    ended = {status: law_without_values("x", "", status, 3, "why") for status in get_args(LawStatus)}
    swallowed = power_law([1e11, 1e12, 1e13], [2e4, 6e4, 2.1e4])
    laws = Laws(
        source="x", seed=0, metrics=("batch/loss", "batch/mrr@10"), notes=("a note",), entries=(
            entry("size_optimum", 1e11, ended["ok"]), entry("size_optimum", 1e12, ended["ok"]),
            entry("size_optimum", 1e13, ended["boundary"]), entry("size_law", None, swallowed),
            entry("share_optimum", 1e11, ended["flat"]), entry("share_law", None, ended["too_few"]),
            entry("loss_law", None, ended["not_identified"]), entry("critical_batch", 1e12, ended["too_few"]),
        ),
    )  # fmt: skip
    lines = format_summary(laws).splitlines()
    assert lines[1].split() == ["metric", "s*", "B_crit", "B*", "N*", "L*(C)", "K*"]
    assert lines[3].split() == ["batch/loss", "0/1", "few", "-", "2/3", "no", "trend", "open", "-"]
    assert lines[4].split() == ["batch/mrr@10", "-", "-", "-", "-", "-", "-"]
    assert "- open: not identified, these runs allow a whole family" in lines and "- a note" in lines
    assert not any(line.startswith("- edge") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_store_is_read_from_manifests_and_records(planted: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", planted)
    runs = read_runs(store)
    assert len(runs) == 22
    assert [run.status for run in runs].count("failed") == 1
    assert [run.status for run in runs].count("missing") == 1
    done = next(run for run in runs if run.status == "done")
    assert done.knobs["params"] > 0 and "batch/loss" in done.metrics and "train/loss" in done.metrics
    laws = fit(store)
    assert {e.reason for e in laws.exclusions} == {"failed: out of memory", "missing: no Record yet"}
    assert laws.find("size_law", "batch/loss").residuals.n == 4
    result = CliRunner().invoke(app, ["fit", str(store)])
    assert result.exit_code == 0, result.output
    assert (store / "laws.json").exists()


def test_a_changed_record_is_refused_by_name(planted: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", planted)
    path = next(p for p in sorted((store / "cells").glob("*/record.json")) if "f" * 64 not in str(p))
    values = json.loads(path.read_text())
    values["metrics"]["batch/loss"]["value"] -= 0.5
    path.write_text(json.dumps(values))
    for change in (lambda: None, (store / "cells" / path.parent.name / "seal.json").unlink):
        change()
        result = CliRunner().invoke(app, ["fit", str(store)])
        assert result.exit_code == 1 and not (store / "laws.json").exists()
        assert path.parent.name in str(result.exception)


def test_a_record_in_the_folder_of_another_is_refused(planted: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", planted)
    one, other, *_ = sorted((store / "cells").iterdir())
    for name in ("record.json", "seal.json"):
        shutil.copy(one / name, other / name)
    with pytest.raises(RunError, match=f"{other.name}.*not the one that the folder is named after"):
        fit(store)


def test_a_store_of_another_version_is_not_fitted(planted: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", planted)
    info = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**info, "version": 2}))
    with pytest.raises(RunError, match=r"is a store of version 2"):
        fit(store)
    (store / "store.json").unlink()
    with pytest.raises(RunError, match=r"holds no store\.json"):
        fit(store)


def test_laws_of_a_flat_file_are_labelled_unsealed(planted: Any, tmp_path: Path) -> None:
    flat = fit(planted.write(tmp_path / "runs.csv", planted.rows(axes=ALLOCATION)), ["batch/loss"])
    assert any(note.startswith("unsealed: the runs come from runs.csv") for note in flat.notes)
    assert not any("unsealed" in note for note in fit(write_store(tmp_path / "store", planted)).notes)


def test_records_of_two_datasets_do_not_mix(planted: Any, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", planted)
    path = next(p for p in sorted((store / "cells").glob("*/record.json")) if "f" * 64 not in str(p))
    path.write_text(path.read_text().replace('"dataset_checksum": "data"', '"dataset_checksum": "other"'))
    seal_store(store, "data")
    with pytest.raises(FitError, match="Records of 2 datasets"):
        read_runs(store)


def test_optimizers_are_named_and_others_fitted_apart(planted: Any, tmp_path: Path) -> None:
    rows = [{**row, "optimizer": "adamw"} for row in planted.rows(axes=ALLOCATION)]
    laws = fit(planted.write(tmp_path / "one.csv", rows), ["batch/loss"])
    assert laws.definitions["optimizer"] == "adamw"
    rows[1]["optimizer"] = "muon"
    mixed = fit(planted.write(tmp_path / "two.csv", rows), ["batch/loss"])
    assert any("laws are of adamw/default" in note and "muon/default: fitted apart" in note for note in mixed.notes)


def test_the_page_names_every_status_option_and_entry(laws: Laws) -> None:
    page = (Path(__file__).parents[2] / "docs" / "laws.md").read_text(encoding="utf-8")
    for status in get_args(LawStatus):
        assert f"`{status}`" in page
    for entry in laws.entries:
        assert f"`{entry.name}`" in page, entry.name
    help_text = CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for option in ("--out", "--metric", "--json", "--seed", "--bootstrap", "--allow-repeats", "--verbose"):
        assert f"`{option}" in page and option in help_text


def test_bad_sources_are_explained(planted: Any, tmp_path: Path) -> None:
    with pytest.raises(FitError, match="nothing does not exist"):
        read_runs(tmp_path / "nothing")
    with pytest.raises(FitError, match="no sweep manifests"):
        read_runs(tmp_path)
    rows = planted.rows(axes=ALLOCATION)
    bad = [{**row, "batch_loss": 3} for row in rows]
    with pytest.raises(FitError, match="column 'batch_loss' is unknown"):
        read_runs(planted.write(tmp_path / "bad.csv", bad))
    with pytest.raises(FitError, match="lacks columns: seed"):
        read_runs(planted.write(tmp_path / "bad.csv", [{k: v for k, v in r.items() if k != "seed"} for r in rows]))
    with pytest.raises(FitError, match="line 2: batch/loss = 'nan'"):
        read_runs(planted.write(tmp_path / "bad.csv", [{**rows[0], "batch/loss": "nan"}]))
    with pytest.raises(FitError, match="more than once, with different results"):
        read_runs(planted.write(tmp_path / "bad.csv", [rows[0], {**rows[0], "batch/loss": 1.0}]))
    with pytest.raises(FitError, match="did you mean 'batch/loss'"):
        fit(planted.write(tmp_path / "good.csv", rows), ["batch/los"])
    failed = [{**row, "status": "failed", "reason": "out of memory"} for row in rows]
    with pytest.raises(FitError, match="none of 120 runs can be used"):
        fit(planted.write(tmp_path / "failed.csv", failed))


def test_a_spreadsheet_is_read_and_its_slips_are_named(planted: Any, tmp_path: Path) -> None:
    rows = planted.rows(axes=ALLOCATION)
    good = planted.write(tmp_path / "good.csv", rows)
    marked = tmp_path / "marked.CSV"
    marked.write_text("\ufeff" + good.read_text())
    assert read_runs(marked) == read_runs(good)
    header, first, *_ = good.read_text().splitlines()
    for name, text, match in (
        ("latin", None, "UTF-8"),
        ("twice", f"{header},batch/loss\n{first},1\n", "more than once"),
        ("long", f"{header}\n{first},1\n", "more cells than"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_bytes(b"caf\xe9\n" if text is None else text.encode())
        with pytest.raises(FitError, match=match):
            read_runs(path)
    for slip in ({"flops_budget": 0}, {"learning_rate": 0}, {"params": -1}, {"slots_seen": 0}, {"seed": 0.5}):
        with pytest.raises(FitError, match=f"line 2: {next(iter(slip))}"):
            read_runs(planted.write(tmp_path / "slip.csv", [{**rows[0], **slip}]))
    with pytest.raises(FitError, match="cell_id is empty"):
        read_runs(planted.write(tmp_path / "slip.csv", [{**rows[0], "cell_id": ""}]))
    nll = planted.write(tmp_path / "nll.csv", [{**row, "batch/nll": row["batch/loss"]} for row in rows])
    with pytest.raises(FitError, match="fall or rise"):
        fit(nll, ["batch/nll"])
    with pytest.raises(FitError, match="resamplings"):
        fit(good, bootstrap=1)


@pytest.mark.parametrize(
    "slip",
    [
        [1],
        {"axis": "allocation", "cells": None},
        {"axis": "allocation", "cells": ["a0"]},
        {"flops_budget": "much"},
        {"flops_budget": -1e15},
        {"learning_rate": 0},
        {"seed": "first"},
        {"wanted": [1]},
        {"recipe_hash": "../../../elsewhere"},
        {"recipe_hash": "F" * 64},
    ],
)
def test_a_damaged_manifest_is_one_clear_error(planted: Any, tmp_path: Path, slip: Any) -> None:
    store = write_store(tmp_path / "store", planted)
    path = store / "sweeps" / "allocation-1.json"
    manifest = json.loads(path.read_text())
    if isinstance(slip, list) or "axis" in slip:
        manifest = slip
    else:
        manifest["cells"][0] |= slip
    path.write_text(json.dumps(manifest))
    with pytest.raises(FitError, match=r"allocation-1\.json"):
        read_runs(store)


def test_seeds_that_agree_to_the_last_digit_do_not_stop_the_drift(tmp_path: Path, planted: Any) -> None:
    rows = [row for row in planted.rows() if row["axis"] == "init"]
    laws = fit(planted.write(tmp_path / "runs.csv", [*rows, *({**row, "seed": 1} for row in rows)]))
    assert laws.learning_rate_drift["default"].span_decades == pytest.approx(np.log10(5))


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("batch/loss", "min"),
        ("catalogue/entropy", "min"),
        ("batch/perplexity/history=5", "min"),
        ("train/in_batch_loss", "min"),
        ("catalogue/recall@10", "max"),
        ("batch/ndcg@100/history=3", "max"),
        ("batch/coverage_union@10", "max"),
    ],
)
def test_directions_of_metrics(metric: str, direction: str) -> None:
    assert direction_of(metric) == direction


def write_store(store: Path, planted: Any) -> Path:
    """A store of one allocation sweep: four budgets of five sizes, one run failed, one without a Record."""
    cells: list[dict[str, Any]] = []
    for c in planted.budgets[:4]:
        for i, n in enumerate(planted.size(c) * np.geomspace(1 / 6, 6, 5)):
            recipe = Recipe.parse(
                {
                    "model": {"joint_dim": 16, "width": 64, "depth": 2 + i},
                    "train": {"batch_sequences": 64, "steps": 100, "learning_rate": 2e-3, "seed": int(np.log10(c))},
                },
                "test",
            )
            digest = recipe.hash("data")
            slots = int(c / (6 * n))
            loss = float(planted.loss(n, c / (6 * n)))
            record = Record(
                recipe=recipe,
                recipe_hash=digest,
                dataset_checksum="data",
                status="done",
                params=Params(embedder=int(0.02 * n), contextualizer=int(n) - int(0.02 * n), vocabulary=10),
                slots_seen=slots,
                steps=100,
                epochs=0.2,
                train=TrainLosses(in_batch_loss=loss, loss=loss),
                metrics={"batch/loss": Metric(value=loss * (1 + 1e-4 * (-1) ** i), n=1000)},
                seed=0,
            )
            (store / "cells" / digest).mkdir(parents=True)
            record.write(store / "cells" / digest / "record.json")
            cells.append(cell_of(f"a{i}", c, digest))
    broken = Record(
        recipe=recipe, recipe_hash="f" * 64, dataset_checksum="data", status="failed", reason="out of memory", seed=0
    )
    (store / "cells" / ("f" * 64)).mkdir(parents=True)
    broken.write(store / "cells" / ("f" * 64) / "record.json")
    cells += [cell_of("broken", 1e15, "f" * 64), cell_of("late", 1e16, "0" * 64)]
    (store / "sweeps").mkdir()
    manifest = {"axis": "allocation", "preset": "test", "cells": cells}
    (store / "sweeps" / "allocation-1.json").write_text(json.dumps(manifest))
    return seal_store(store, "data")


def cell_of(name: str, budget: float, digest: str) -> dict[str, Any]:
    return {
        "cell_id": name, "flops_budget": budget, "wanted": {}, "realised": {}, "learning_rate": 2e-3, "seed": 0,
        "recipe_hash": digest,
    }  # fmt: skip
