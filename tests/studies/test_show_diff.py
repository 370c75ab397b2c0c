"""`habitus show` and `habitus diff`: where values came from, what they cost, and what differs by how much."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.errors import ConfigError
from habitus.recipe import Recipe
from habitus.record import EvaluationSpec, Record
from habitus.store import StoreEvaluation
from habitus.studies import SEARCH_FILE, SearchState, compare, explain_recipe, open_subject
from habitus.studies.comparison import Differing
from habitus.sweeps import device_kind
from tests.reporting.make_store import small_plan
from tests.sealing import seal_records

from .live_store import CHECKSUM, LiveStore

HAND = """\
[model]
joint_dim = 32
width = 64
depth = 2
[train]
batch_sequences = 128
steps = 100
learning_rate = 1e-3
weight_decay = 0.2
"""


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    path = tmp_path / "hand.toml"
    path.write_text(HAND, encoding="utf-8")
    return path


@pytest.fixture
def store(tmp_path: Path) -> LiveStore:
    store = LiveStore(tmp_path / "study" / "store")
    store.end(0)
    store.end(1)
    return store


def cell(store: LiveStore, number: int) -> Path:
    return store.path / "cells" / store.digests[number]


def origins(path: Path) -> dict[str, str]:
    return {knob.name: knob.origin for knob in explain_recipe(open_subject(path))}


def test_a_recipe_by_hand_says_what_is_default_rule_and_by_hand(by_hand: Path) -> None:
    knobs = {knob.name: knob for knob in explain_recipe(open_subject(by_hand))}
    assert knobs["train.schedule"].origin == "default"
    assert knobs["train.learning_rate"].origin == "rule: 0.002·√(B/512)"  # 0.002·√(128/512)
    assert knobs["train.weight_decay"].origin == "by hand"
    assert knobs["model.width"].meaning == "Width of the contextualizer."
    assert all(knob.meaning for knob in knobs.values())
    steps = knobs["train.steps"].change
    assert steps is not None and (steps.value, steps.params, steps.flops) == (200, 1.0, 2.0)
    # Time assumed for an H200: 0.0047 s per step, and the step's own FLOPs.
    assert 100 * 0.0047 < steps.seconds < 2 * 100 * 0.0047
    depth = knobs["model.depth"].change
    assert depth is not None and 1 < depth.params < 2 and 1 < depth.flops < 2
    assert knobs["train.learning_rate"].change is None and knobs["train.num_negatives"].change is None


def test_a_cell_names_its_sweep_and_the_search_that_tried_it(store: LiveStore) -> None:
    assert origins(cell(store, 0))["model.width"] == "sweep: share s0 at 1e+12 FLOPs"
    trial = {"change": "twice the width", "recipe_hash": store.digests[0], "passes": 1.0, "seconds": 1.0}
    rounds = [{"kind": "start", "trials": []}, {"kind": "explore", "trials": [trial]}]
    SearchState.parse({"metric": "batch/loss", "rounds": rounds}, "test").write(store.path.parent / SEARCH_FILE)
    assert origins(cell(store, 0))["model.width"] == "search: round 2 (explore) of the study's search: twice the width"
    assert origins(cell(store, 1))["model.width"].startswith("sweep: ")
    # A run knows how fast it was: 10 s for 100 steps, so twice the steps are 10 s more.
    change = next(k for k in explain_recipe(open_subject(cell(store, 0))) if k.name == "train.steps").change
    assert change is not None and change.seconds == pytest.approx(10.0)


def test_a_planned_recipe_says_which_law_gave_each_number(tmp_path: Path) -> None:
    quantity = {"value": 96.0, "source": "this study", "how": "shape near width/depth = 40"}
    plan = small_plan(quantities={"width": quantity, "num_negatives": quantity})
    plan.write(tmp_path / "plan.json")
    [first] = plan.write_recipes(tmp_path / "recipe")
    found = origins(first)
    assert found["model.width"] == "plan: shape near width/depth = 40 (this study)"
    assert found["train.learning_rate"] == "plan: as the runs that it rests on"
    assert found["train.num_negatives"] == "default"  # stage 1 has none
    Recipe.read(first).model_copy(update={"model": plan.stage1.model.model_copy(update={"depth": 9})}).write(first)
    assert origins(first)["model.width"] == "by hand"  # not the plan's any more


def test_the_command_prints_a_table_and_json(by_hand: Path, store: LiveStore) -> None:
    shown = CliRunner().invoke(app, ["show", str(by_hand), "--device", "cuda"])
    assert shown.exit_code == 0, shown.output
    assert "assumed for one H200" in shown.output and "rule: 0.002·√(B/512)" in shown.output
    assert "200: N ×1, FLOPs ×2, +" in shown.output
    here = {"cpu": "assumed for one CPU thread", "cuda": "assumed for one H200"}[device_kind("auto")]
    assert here in CliRunner().invoke(app, ["show", str(by_hand)]).output
    values = json.loads(CliRunner().invoke(app, ["show", str(cell(store, 0)), "--json"]).output)
    assert values["seconds"] > 0 and {knob["name"] for knob in values["knobs"]} >= {"train.steps", "model.width"}


@pytest.mark.parametrize("command", ["show", "diff"])
def test_what_is_neither_recipe_nor_run_is_one_clear_error(command: str, tmp_path: Path, store: LiveStore) -> None:
    def refusal(path: object) -> str:
        arguments = [str(path)] * (1 if command == "show" else 2)
        error = CliRunner().invoke(app, [command, *arguments]).exception
        assert isinstance(error, ConfigError)
        return str(error)

    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "holds neither a Record nor a recipe" in refusal(tmp_path)
    assert "is a store of runs" in refusal(store.path) and "cells/HASH" in refusal(store.path)
    (tmp_path / "broken.toml").write_text("[model]\nwidth = 'wide'\n", encoding="utf-8")
    assert "model.width" in refusal(tmp_path / "broken.toml")


def test_recipes_differ_in_knobs_and_cost_and_have_no_metrics(by_hand: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(HAND.replace("steps = 100", "steps = 300"), encoding="utf-8")
    compared = compare(open_subject(by_hand), open_subject(other))
    assert [(one.name, one.first, one.second, one.ratio) for one in compared.knobs] == [("train.steps", 100, 300, 3.0)]
    assert {one.name: one.ratio for one in compared.sizes}["FLOPs, nominal"] == 3.0
    assert Differing("train.seed", 1, 2).ratio is None  # a label, not an amount
    assert compared.metrics == () and compared.remarks == ("no metrics: neither has a Record",)
    same = CliRunner().invoke(app, ["diff", str(by_hand), str(by_hand)])
    assert "The recipes are the same." in same.output
    with pytest.raises(ConfigError, match="cannot be evaluated"):
        compare(open_subject(by_hand), open_subject(other), dataset=object())  # type: ignore[arg-type]


def test_flops_and_seconds_are_those_of_the_records_where_both_have_one(store: LiveStore, by_hand: Path) -> None:
    for number in (0, 1):
        path = cell(store, number) / "record.json"
        record = Record.read(path)
        assert record.seconds is not None
        seconds = record.seconds.model_copy(update={"train": 10.0 + number})
        record.model_copy(update={"flops_executed": (2 + number) * 1e12, "seconds": seconds}).write(path)
    seal_records(store.path)
    runs = [open_subject(cell(store, number)) for number in (0, 1)]
    sizes = {one.name: (one.first, one.second) for one in compare(*runs).sizes}
    assert sizes["FLOPs, as run"] == (2e12, 3e12) and sizes["seconds, measured"] == (12.0, 13.0)
    assert not [name for name in sizes if "estimated" in name]
    mixed = {one.name for one in compare(runs[0], open_subject(by_hand)).sizes}
    assert {"FLOPs, as run, estimated", "seconds, estimated"} < mixed and "FLOPs, as run" not in mixed
    shown = CliRunner().invoke(app, ["diff", *(str(run.path) for run in runs)]).output
    assert re.search(r"FLOPs, as run +2e\+12 +3e\+12 +1.5", shown)


def test_how_to_evaluate_needs_a_dataset(by_hand: Path) -> None:
    refused = CliRunner().invoke(app, ["diff", str(by_hand), str(by_hand), "--other-dataset", "--queries", "9"])
    assert "--other-dataset and --queries without --data" in str(refused.exception)


def test_means_of_records_are_compared_without_pairs_and_said_so(store: LiveStore) -> None:
    compared = compare(open_subject(cell(store, 0)), open_subject(cell(store, 1)))
    rows = {one.metric: one for one in compared.metrics}
    loss = rows["batch/loss"]
    gap = (0.05 - 0.1) ** 2 - (0.02 - 0.1) ** 2
    assert loss.difference == pytest.approx(gap) and loss.how == "unpaired"
    assert (loss.low, loss.high) == (
        pytest.approx(gap - 1.959964 * 0.05),
        pytest.approx(gap + 1.959964 * 0.05),
    )  # 3-4-5
    recall = rows["catalogue/recall@10"]
    assert recall.difference == pytest.approx(-0.03) and recall.how == "one figure" and recall.low is None
    assert any("too wide" in remark for remark in compared.remarks)
    shown = CliRunner().invoke(app, ["diff", str(cell(store, 0)), str(cell(store, 1))])
    assert "model.joint_dim" in shown.output and "one figure" in shown.output


def test_values_per_query_in_the_store_give_paired_intervals(store: LiveStore) -> None:
    keep(store, {0: [1, 20, 20, 1], 1: [1, 5, 20, 1]})
    [row] = compare(open_subject(cell(store, 0)), open_subject(cell(store, 1))).metrics
    # Differences of users 1, 2, 3: (0, 1), 0, 0, with mean 1/4. Sums less the mean: 1/2, -1/4, -1/4.
    error = ((0.25 + 0.0625 + 0.0625) * 3 / 2) ** 0.5 / 4
    assert (row.metric, row.how, row.difference) == ("catalogue/recall@10", "paired", 0.25)
    assert row.low == pytest.approx(0.25 - 1.959964 * error) and row.high == pytest.approx(0.25 + 1.959964 * error)


def test_runs_that_failed_or_saw_other_data_are_not_compared(store: LiveStore) -> None:
    store.end(2, "out of memory")
    failed = compare(open_subject(cell(store, 0)), open_subject(cell(store, 2)))
    assert failed.metrics == () and "failed" in failed.remarks[0]
    elsewhere = store.path.parent / "run"
    elsewhere.mkdir()
    record = Record.read(cell(store, 1) / "record.json").model_copy(update={"dataset_checksum": "ab" * 32})
    record.write(elsewhere / "record.json")
    other = compare(open_subject(cell(store, 0)), open_subject(elsewhere))
    assert other.metrics == () and "different datasets" in other.remarks[0]


def keep(store: LiveStore, ranks: dict[int, list[int]]) -> None:
    """What `habitus evaluate STORE --keep big` leaves, for four queries of three users."""
    (store.path / "evaluations").mkdir()
    tables, runs = [], {}
    for number, of_run in ranks.items():
        columns: dict[str, Any] = {
            "scorer": [f"store/cells/{store.digests[number]}"] * 4, "regime": ["catalogue"] * 4,
            "user": [1, 1, 2, 3], "event": [10, 11, 12, 13], "rank": of_run, "loss": [1.0] * 4,
        }  # fmt: skip
        tables.append(pa.table(columns))
        value = sum(rank <= 10 for rank in of_run) / 4
        runs[store.digests[number]] = {"catalogue/recall@10": {"value": value, "n": 4}}
    pq.write_table(pa.concat_tables(tables), store.path / "evaluations" / "big.parquet")
    spec = EvaluationSpec(queries=4, query_set_checksum="q", batch_sequences=8, candidates=100)
    StoreEvaluation.parse(
        {"name": "big", "dataset_checksum": CHECKSUM, "specification": {"catalogue": spec.to_values()}, "runs": runs},
        "test",
    ).write(store.path / "evaluations" / "big.json")
