"""One dataset, windows of several lengths: training, evaluation and what the Record says of shorter histories."""

from collections.abc import Callable
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs
from habitus.recipe import DataRecipe, Recipe
from habitus.serving import Retriever
from habitus.sizing import cell_of_recipe
from habitus.sizing.structure import Inputs
from habitus.training import TrainOptions, train

CPU = TrainOptions(device="cpu", threads=1)


@pytest.mark.parametrize("seq_len", [16, 64])
def test_a_run_has_the_windows_of_its_recipe_from_training_to_serving(
    dataset: Dataset, recipe_of: Callable[..., Recipe], tmp_path: Path, seq_len: int
) -> None:
    recipe = recipe_of(
        steps=6,
        batch_sequences=512 // seq_len,
        attention_flops=True,
        evaluate={"regimes": ["batch", "catalogue"], "contexts": [1, 4, 20]},
    ).model_copy(update={"data": DataRecipe(seq_len=seq_len)})
    assert dataset.seq_len == 32
    record = train(recipe, dataset, tmp_path / "run", options=CPU)
    assert record.slots_seen == 6 * 512
    assert record.flops_nominal == cell_of_recipe(recipe, Inputs.of(dataset.fields)).flops
    counts = dataset.with_seq_len(seq_len).counts("train")
    assert counts.fill(seq_len) > 0.96 and record.epochs == pytest.approx(6 * 512 / seq_len / counts.windows)
    seen = {n: record.metrics[f"catalogue/loss/context={n}"] for n in (1, 4, 20)}
    assert len({metric.n for metric in seen.values()}) == 1
    assert record.metrics["catalogue/loss/beyond=4"].value == pytest.approx(seen[20].value - seen[4].value)
    assert record.throughput["query_seconds/context=4"] > 0
    options = EvaluateOptions(queries=400, batch_sequences=16)
    (again,) = evaluate_runs([tmp_path / "run"], dataset, options, ComputeOptions(device="cpu"))
    for name, metric in again.metrics.items():
        assert metric == record.metrics[name], name
    assert Retriever.open(tmp_path / "run", data=dataset.path, device="cpu").window == seq_len


def test_contexts_that_cannot_be_measured_are_refused_before_training(
    dataset: Dataset, recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = recipe_of(evaluate={"regimes": ["catalogue"], "contexts": [5, 3000]})
    with pytest.raises(ConfigError, match=r"a history of 3,000 events[\s\S]*leave the longer ones out"):
        train(recipe, dataset, tmp_path / "run", options=CPU)
    with pytest.raises(ConfigError, match='add "catalogue" to regimes'):
        recipe_of(evaluate={"contexts": [5]})
    for contexts in ([0], [-2]):
        with pytest.raises(ConfigError, match="contexts"):
            recipe_of(evaluate={"regimes": ["catalogue"], "contexts": contexts})
    with pytest.raises(ConfigError, match="seq_len"):
        Recipe.parse({**recipe.to_values(), "data": {"seq_len": 1}}, "windows of one event")
