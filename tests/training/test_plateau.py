"""The default recipe leaves the popularity plateau at every size: an iso-FLOP line that a CPU can run."""

from pathlib import Path

import numpy as np
import pytest

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.evaluation import EvaluateOptions, evaluate
from habitus.evaluation.baselines import Popularity
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.recipe import DataRecipe, EvaluateRecipe, Recipe, TrainRecipe
from habitus.sizing import CellRequest, Inputs, solve
from habitus.training import TrainOptions, train

BUDGET = 1e12
SHAPES = ((16, 1), (32, 1), (32, 2), (48, 2), (96, 2))  # (width, depth): N from 12 to 240 thousand
QUERIES, EVALUATION_BATCH = 4_000, 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("plateau")
    world = World(WorldConfig(num_users=20_000, num_items=2_000, seed=1))
    options = PrepareOptions(
        seq_len=64, text_len=24, vocabulary_size=1_024, validation_share=0.05, test_share=0, threads=1
    )
    prepare_world(world, schema_of(world), folder / "dataset", options, lambda _what, _share: None)
    return Dataset.open(folder / "dataset")


def loss_of(dataset: Dataset, width: int, depth: int, out: Path) -> tuple[int, float]:
    """(N, validation loss) of one cell."""
    request = CellRequest(
        batch_sequences=32, flops=BUDGET, joint_dim=16, width=width, depth=depth, seq_len=64, text_len=24, text_depth=2
    )
    cell = solve(request, Inputs.of(dataset.fields))
    recipe = Recipe(
        data=DataRecipe(seq_len=64),
        model=cell.model,
        train=TrainRecipe(
            batch_sequences=32, steps=cell.steps, optimizer="muon", learning_rate=1.4e-2, precision="fp32"
        ),
        evaluate=EvaluateRecipe(queries=QUERIES, batch_sequences=EVALUATION_BATCH),
    )
    record = train(recipe, dataset, out, options=TrainOptions(device="cpu", threads=1))
    assert record.status == "done"
    assert record.epochs < 1.0
    return cell.params, record.metrics["batch/loss"].value


@pytest.mark.slow
def test_losses_along_a_line_are_smooth_in_size_with_a_minimum_inside(dataset: Dataset, tmp_path: Path) -> None:
    options = EvaluateOptions(regimes=("batch",), queries=QUERIES, batch_sequences=EVALUATION_BATCH)
    popularity = evaluate(dataset, Popularity(dataset), options).metrics["batch/loss"].value
    line = [loss_of(dataset, *shape, tmp_path / f"{shape[0]}-{shape[1]}") for shape in SHAPES]
    print(f"popularity {popularity:.4f}, line", [(size, round(loss, 4)) for size, loss in line])
    sizes, losses = np.array(line).T
    best = losses.argmin()
    assert 0 < best < len(line) - 1
    # On the plateau a run has learned how popular items are and nothing else.
    assert (popularity - losses > 0.4 * (popularity - losses[best])).all()
    near = (sizes > sizes[best] / 5) & (sizes < sizes[best] * 5)
    assert near.sum() >= 4
    x = np.log(sizes[near])
    residuals = losses[near] - np.polyval(np.polyfit(x, losses[near], 2), x)
    assert np.abs(residuals).max() < 0.03
