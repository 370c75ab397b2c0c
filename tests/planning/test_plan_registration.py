"""A prediction is registered once, with its hash, and compared with what the run measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from habitus.errors import ConfigError, RunError
from habitus.planning import PlanOptions, check_plan, plan, register_plan
from habitus.recipe import Recipe
from habitus.record import EvaluationSpec, Metric, TrainLosses
from habitus.store import Plan, RegisteredPlan

from .planted import record_of


@pytest.fixture(scope="module")
def made(laws_path: Path) -> Plan:
    made = plan(1e14, "catalogue/recall@10", PlanOptions(laws=laws_path))
    # Laws without their store know no gain of stage 2 over its parent: one is added, so that both stages are expected.
    after = next(p for p in made.predictions if p.metric == "catalogue/recall@10").model_copy(update={"stage": 2})
    return made.model_copy(update={"predictions": (*made.predictions, after)})


def run_of(made: Plan, folder: Path, **metrics: float) -> Path:
    """A finished stage 1 of the plan that measured what is given."""
    folder.mkdir(parents=True)
    named = {name: Metric(value=value, n=100) for name, value in metrics.items()}
    record_of(made.stage1, "a" * 64, metrics=named, train=TrainLosses(in_batch_loss=3.0, loss=3.0)).write(
        folder / "record.json"
    )
    return folder


def test_the_registered_file_carries_the_hash_of_its_content(made: Plan, tmp_path: Path) -> None:
    registered = register_plan(made, tmp_path / "plan.json")
    assert RegisteredPlan.read(tmp_path / "plan.json") == registered
    assert registered.unchanged()
    with pytest.raises(ConfigError, match="registered once"):
        register_plan(made, tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"ends in \.json"):
        register_plan(made, tmp_path / "nowhere" / "plan.json")


def test_measured_values_are_inside_or_outside(made: Plan, tmp_path: Path) -> None:
    register_plan(made, tmp_path / "plan.json")
    first = {p.metric: p for p in made.predictions if p.stage == 1}
    loss, recall = first["batch/loss"], first["catalogue/recall@10"]
    assert loss.high is not None
    run = run_of(
        made, tmp_path / "run" / "stage1", **{"batch/loss": loss.high + 0.1, "catalogue/recall@10": recall.value}
    )
    result = check_plan(run)
    by_name = {(c.name, c.stage): c for c in result.comparisons}
    assert by_name["batch/loss", 1].inside is False
    assert by_name["batch/loss", 1].measured == pytest.approx(loss.high + 0.1)
    assert by_name["catalogue/recall@10", 1].inside is True
    assert by_name["catalogue/recall@10", 2].measured is None
    assert result.same_recipe == {"stage 1": True}
    (note,) = result.notes  # laws of a CSV do not say how its runs were evaluated
    assert note.startswith("forecasts are of the evaluation that the laws' runs had, and ")
    assert check_plan(tmp_path / "run", tmp_path / "plan.json").comparisons == result.comparisons


def test_another_recipe_or_an_edited_plan_is_noticed(made: Plan, tmp_path: Path) -> None:
    register_plan(made, tmp_path / "plan.json")
    longer = made.stage1.model_copy(update={"train": made.stage1.train.model_copy(update={"steps": 7})})
    run = run_of(made.model_copy(update={"stage1": longer}), tmp_path / "run")
    assert check_plan(run).notes[1:] == ("stage 1 did not run the registered recipe",)
    values = json.loads((tmp_path / "plan.json").read_text())
    values["predictions"][0]["value"] = 0.0
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="changed after it was registered"):
        check_plan(run)


@pytest.mark.parametrize(
    ("asked", "own", "measured", "note"),
    [
        ({}, {}, {}, ""),
        ({"queries": 9000}, {"queries": 9000}, {"queries": 700}, ""),  # the dataset has no more of them
        ({"queries": 9000}, {"queries": 8000}, {"queries": 700}, ""),
        ({"queries": 9000}, {"queries": 700}, {"queries": 700}, "700 queries, not 9,000"),
        ({"queries": 90}, {}, {"queries": 500}, "500 queries, not 90"),
        ({}, {"seed": 3}, {}, "queries of seed 3, not 0"),
        ({}, {"batch_sequences": 8}, {"batch_sequences": 8}, "batches of 8 windows, not 64"),
        ({}, {"catalogue_items": 300}, {"candidates": 300}, "300 candidates, not the whole catalogue"),
        ({"catalogue_items": 300}, {}, {"candidates": 5000}, "5,000 candidates, not 300"),
        ({"catalogue_items": 300}, {"regimes": ("batch",)}, {"candidates": 64}, ""),  # those of a batch
    ],
)
def test_another_evaluation_than_planned_is_noticed(
    made: Plan, tmp_path: Path, asked: dict[str, Any], own: dict[str, Any], measured: dict[str, Any], note: str
) -> None:
    def evaluated(**changes: Any) -> Recipe:
        evaluate = made.stage1.evaluate.model_copy(update=changes)
        return made.stage1.model_copy(update={"evaluate": evaluate})

    register_plan(made.model_copy(update={"stage1": evaluated(**asked)}), tmp_path / "plan.json")
    spec = {"queries": 20_000, "batch_sequences": 64, "candidates": 5000, "query_set_checksum": "q"} | measured
    (tmp_path / "run").mkdir()
    record_of(evaluated(**{**asked, **own}), "a" * 64, evaluation=EvaluationSpec(**spec)).write(
        tmp_path / "run" / "record.json"
    )
    notes = [n for n in check_plan(tmp_path / "run").notes if "evaluated otherwise" in n]
    expected = f"stage 1 was evaluated otherwise than planned: {note}. Metrics are not comparable"
    assert notes == ([expected] if note else [])


def test_a_run_without_record_or_plan_says_what_is_missing(made: Plan, tmp_path: Path) -> None:
    run = run_of(made, tmp_path / "a" / "b" / "run")
    with pytest.raises(ConfigError, match=r"no plan\.json"):
        check_plan(run)
    register_plan(made, tmp_path / "plan.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"no record\.json"):
        check_plan(tmp_path / "empty", tmp_path / "plan.json")
