"""`habitus diff RUN RUN --data DATASET`: both runs on the same queries, paired."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.events.world import World
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.studies import compare, open_subject


def test_two_runs_are_evaluated_and_paired(dataset: Dataset, make_run: Callable[[int], Path]) -> None:
    first, second = make_run(1), make_run(60)
    rows = {
        one.metric: one
        for one in compare(open_subject(first, dataset=dataset), open_subject(second), dataset=dataset).metrics
    }
    loss = rows["catalogue/loss"]
    assert loss.how == "paired" and loss.low is not None and loss.high is not None
    assert loss.low < loss.difference < loss.high < 0  # sixty steps are better than one
    assert loss.difference == pytest.approx(loss.second - loss.first)
    one, other = evaluate_runs([first, second], dataset, EvaluateOptions(regimes=("catalogue",)))
    errors = [evaluation.metrics["catalogue/loss"].se or 0.0 for evaluation in (one, other)]
    unpaired = 1.96 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    assert (loss.high - loss.low) / 2 < unpaired  # what pairing is for


def test_runs_of_another_dataset_are_compared_where_it_is_meant(
    world: World, make_run: Callable[[int], Path], tmp_path: Path
) -> None:
    schema = WORLD_SCHEMA.model_copy(update={"world": world.config})
    options = PrepareOptions(
        seq_len=32, text_len=6, vocabulary_size=400, validation_share=0.3, test_share=0.3, threads=1
    )
    prepare_world(world, schema, tmp_path / "other", options, lambda *_: None)
    runs = [
        shutil.copytree(make_run(steps) / "bundle", tmp_path / f"run-{steps}" / "bundle").parent for steps in (1, 60)
    ]
    command = ["diff", *map(str, runs), "--data", str(tmp_path / "other"), "--device", "cpu", "--json"]
    assert "--other-dataset" in str(CliRunner().invoke(app, command).exception)
    done = CliRunner().invoke(app, [*command, "--other-dataset", "--side", "test", "--queries", "50"])
    assert done.exit_code == 0, done.output
    rows = {one["metric"]: one for one in json.loads(done.stdout)["metrics"]}
    assert rows["catalogue/loss"]["how"] == "paired" and rows["catalogue/loss"]["difference"] < 0
    assert "is not a choice" in str(CliRunner().invoke(app, [*command, "--side", "train"]).exception)
