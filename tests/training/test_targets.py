"""Targets and weights: what is predicted, how much it counts, and that every engine agrees about it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.errors import ConfigError
from habitus.events import Targets, World, WorldConfig, schema_of
from habitus.model import BehaviorModel
from habitus.training import TrainOptions, train
from habitus.training.cuda_graph import CapturedStage1
from habitus.training.device_batches import DeviceEvents, DeviceItems
from habitus.training.loss import LogQ, TargetPool, batch_losses, weigh_losses
from habitus.training.options import check_recipe
from habitus.training.step import EagerStage1
from tests.training.test_train_feeding import at_step, device_batch, gradients, host_batches
from tests.training.test_train_processes import alone, furthest, launch, losses

STAGE_2 = {"stage": 2, "parent": "0" * 64}
WEIGHTS = {"purchase": 1.0, "cart": 0.25, "view": -0.5}


def prepared(folder: Path, targets: Targets | None) -> Dataset:
    world = World(WorldConfig(num_users=200, num_items=120, events_per_user=24, seed=2))
    options = PrepareOptions(seq_len=32, text_len=6, vocabulary_size=400, validation_share=0.2, test_share=0, threads=1)
    prepare_world(world, schema_of(world).model_copy(update={"targets": targets}), folder, options, lambda *_: None)
    return Dataset.open(folder)


@pytest.fixture(scope="module")
def purchases(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Every eighth event or so is predicted."""
    return prepared(
        tmp_path_factory.mktemp("targets") / "purchases", Targets(column="event_type", weights={"purchase": 1.0})
    )


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Purchases and carts count, a view says 'not this item'."""
    return prepared(tmp_path_factory.mktemp("targets") / "weighted", Targets(column="event_type", weights=WEIGHTS))


def test_the_loss_of_weighted_targets_by_hand() -> None:
    """Probabilities 1/4, 1/2 and 1/5; the second counts twice, and the third says that its item was wrong."""
    losses = -torch.tensor([0.25, 0.5, 0.2]).log()
    weighed = weigh_losses(losses, torch.tensor([1.0, 2.0, -0.5]))
    expected = [math.log(4), 2 * math.log(2), -0.5 * math.log(0.8)]
    torch.testing.assert_close(weighed, torch.tensor(expected))


def test_a_target_below_0_pushes_its_item_away_and_stays_finite_at_certainty() -> None:
    for loss in (0.0, 1e-9, 2.0):
        value = torch.tensor([loss], requires_grad=True)
        weighed = weigh_losses(value, torch.tensor([-1.0]))
        weighed.sum().backward()
        assert torch.isfinite(weighed).all() and torch.isfinite(value.grad).all()
        assert value.grad.item() <= 0  # the loss of −log p falls where p falls


def test_the_loss_of_a_batch_is_the_weighted_mean_over_its_targets(
    weighted: Dataset, recipe_of: Callable[..., Any]
) -> None:
    recipe = recipe_of()
    model = BehaviorModel(weighted.fields, recipe.model)
    host_step = host_batches(weighted, recipe).read(3)
    (part,) = host_step.parts
    full = weighted.gather("train", weighted.window_order("train", 3 * 16, 4 * 16, seed=recipe.train.seed))
    weights = torch.from_numpy(full.target_weights[full.targets >= 0])
    pool = np.unique(full.targets[full.targets >= 0])
    assert np.array_equal(host_step.own_targets, pool)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(len(host_step.items), recipe.model.joint_dim, generator=generator)
    events = table[part.event_places]
    queries = model.contextualize(part.inputs, events).queries[torch.from_numpy(full.targets >= 0)]
    log_p = (queries @ table[: len(pool)].T).log_softmax(1)
    log_p = log_p.gather(1, torch.from_numpy(np.searchsorted(pool, full.targets[full.targets >= 0]))[:, None])[:, 0]
    by_hand = torch.where(weights > 0, -weights * log_p, weights * torch.log1p(-log_p.exp()))
    candidates = TargetPool(table[: len(pool)], part.target_places, len(pool))
    found = batch_losses(model, part, events, [candidates]).loss
    torch.testing.assert_close(found, by_hand.sum() / weights.abs().sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["purchases", "weighted"])
def test_fixed_shapes_and_parts_change_no_loss_and_no_gradient(
    request: pytest.FixtureRequest, recipe_of: Callable[..., Any], name: str
) -> None:
    dataset, recipe = request.getfixturevalue(name), recipe_of(log_q=True, model={"copying": True})
    cpu = torch.device("cpu")
    model = BehaviorModel(dataset.fields, recipe.model)
    whole = EagerStage1(model, dataset, recipe, host_batches(dataset, recipe)).backward(2).loss
    expected = gradients(model)
    in_parts = EagerStage1(model, dataset, recipe, host_batches(dataset, recipe, 3)).backward(2).loss
    found = gradients(model)
    torch.testing.assert_close(in_parts, whole)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)

    stage = CapturedStage1(
        model, dataset, recipe, DeviceItems.of(dataset, recipe, cpu), DeviceEvents(dataset, cpu).names
    )
    batch = device_batch(dataset, recipe, 2)
    assert batch.weights is not None
    batch = batch.clone()  # as the batch in place is made
    torch.testing.assert_close(batch.tensors(), device_batch(dataset, recipe, 2).tensors(), equal_nan=True)
    captured = stage.losses(batch, torch.empty(0), (dataset.num_items, 2000), at_step(2)).loss
    captured.backward()
    found = gradients(model)
    torch.testing.assert_close(captured.detach(), whole)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_train_as_one_does(weighted: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    job = {
        "recipe": recipe_of(steps=20, batch_sequences=17, log_q=True).to_values(),
        "dataset": str(weighted.path),
        "out": str(tmp_path / "two"),
    }
    launch(2, [job], tmp_path)
    assert furthest(losses(tmp_path / "two"), alone(job, tmp_path / "one")) < 1e-5


def test_context_brings_no_candidates_and_windows_end_at_a_target(
    purchases: Dataset, recipe_of: Callable[..., Any]
) -> None:
    batches = host_batches(purchases, recipe_of())
    for step in range(3):
        batch = purchases.gather("train", batches.order.windows(step))
        rows = purchases.event_rows("train", batches.order.windows(step))
        bought = purchases.target_weight[rows] > 0
        bought &= (rows >= 0) & (batch.positions > 0)
        candidates = batches.read(step).own_targets.numpy()
        assert np.array_equal(candidates, np.unique(batch.items[bought]))
        assert set(candidates) < set(batch.items[rows >= 0])
    segments = purchases.windows("train").segments
    assert (purchases.target_weight[segments["start"] + segments["length"] - 1] > 0).all()
    assert purchases.counts("train").queries == int(purchases.queries_per_segment("train").sum())


def test_what_comes_after_an_event_changes_nothing_before_it(purchases: Dataset, recipe_of: Callable[..., Any]) -> None:
    """No leak through windows that end at a target: other items from slot 12 on move no query before it."""
    recipe = recipe_of()
    model = BehaviorModel(purchases.fields, recipe.model).eval()
    inputs = host_batches(purchases, recipe).read(0).parts[0].inputs
    table = torch.randn(purchases.num_items, recipe.model.joint_dim, generator=torch.Generator().manual_seed(0))
    items = inputs.items.clone()
    items[:, 12:] = (items[:, 12:] + 1) % purchases.num_items
    with torch.no_grad():
        one, two = (model.contextualize(inputs, table[these]).queries
                    for these in (inputs.items, items))  # fmt: skip
    assert torch.equal(one[:, :12], two[:, :12])
    assert not torch.isclose(one[:, 12:], two[:, 12:]).all(-1).any()


def test_how_likely_an_item_is_a_candidate_counts_targets(
    weighted: Dataset, purchases: Dataset, recipe_of: Callable[..., Any]
) -> None:
    recipe = recipe_of(log_q=True)
    draws = 16 * purchases.counts("train").queries / purchases.counts("train").windows
    share = purchases.item_target_counts / purchases.item_target_counts.sum()
    expected = np.log(-np.expm1(draws * np.log1p(-share[share > 0])))
    found = LogQ.of(purchases, recipe, torch.device("cpu")).in_batch.numpy()
    np.testing.assert_allclose(found[share > 0], expected, rtol=1e-5)
    # An item that was only refused is a candidate too.
    assert np.array_equal(weighted.item_trained_counts, weighted.item_train_counts)
    assert weighted.item_target_counts.sum() < weighted.item_train_counts.sum()


def test_the_record_counts_targets_beside_slots(
    purchases: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    windows = purchases.counts("train").windows
    steps = -(-windows // 16) + 1
    record = train(recipe_of(steps=steps), purchases, tmp_path / "run", options=TrainOptions(device="cpu", threads=1))
    assert record.slots_seen == steps * 16 * 32
    assert record.unique_targets == purchases.counts("train").queries < record.queries_seen < record.events_seen
    assert record.metrics["batch/loss"].n == min(400, purchases.counts("validation").queries)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_on_a_gpu_train_as_plain_ones_do(
    weighted: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, compiled: bool
) -> None:
    recipe = recipe_of(steps=20, log_q=True, model={"copying": True})
    for name, options in (("captured", {"compile": compiled}), ("plain", {"accumulate": 2})):
        record = train(recipe, weighted, tmp_path / name, options=TrainOptions(device="cuda", **options))
        assert record.hardware["engine"] == {"captured": "captured", "plain": "eager"}[name]
    assert furthest(losses(tmp_path / "captured"), losses(tmp_path / "plain")) < 1e-3


def test_extra_negatives_are_candidates_of_the_catalogue(purchases: Dataset, recipe_of: Callable[..., Any]) -> None:
    """Of 120 items those ever bought may be ranked: stage 2 draws from them alone, and log q knows it."""
    dataset = Dataset.open(purchases.path)
    rows = np.flatnonzero(purchases.item_target_counts)
    dataset.candidate_rows = rows  # as a schema's `candidates` would say
    count = len(rows) // 2
    recipe = recipe_of(**STAGE_2, num_negatives=count, log_q=True)
    drawn = np.concatenate([host_batches(dataset, recipe).read(step).drawn.numpy() for step in range(8)])
    assert count < len(np.unique(drawn)) and set(drawn) <= set(rows)
    log_q = LogQ.of(dataset, recipe, torch.device("cpu"))
    assert log_q.extras[0].item() == pytest.approx(math.log(count / len(rows)), rel=1e-6)
    never = np.setdiff1d(np.arange(dataset.num_items), rows)
    assert len(never) and torch.equal(log_q.union[never], log_q.in_batch[never])
    assert (log_q.union[rows] > log_q.in_batch[rows]).all()
    # As many as there are candidates is the exact softmax, and more are refused.
    exact = host_batches(dataset, recipe_of(**STAGE_2, num_negatives=len(rows))).read(0)
    assert sorted(exact.drawn.tolist()) == rows.tolist()
    with pytest.raises(ConfigError, match=f"{len(rows)} of them candidates"):
        check_recipe(recipe_of(**STAGE_2, num_negatives=len(rows) + 1), dataset)
