"""What a step reads: the dataset's own batches, distinct items, fixed shapes; and losses that agree in every form."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from habitus.data import Dataset
from habitus.evaluation.ranks import Ranks
from habitus.model import BehaviorModel
from habitus.model.bundle import load_bundle
from habitus.model.cache import EmbeddingCache
from habitus.softmax import Latch, negative_keys
from habitus.training import keep_events_on_device
from habitus.training.batches import HostBatches, ItemFinder, WindowOrder
from habitus.training.cuda_graph import CapturedStage1, CapturedStage2
from habitus.training.device_batches import DeviceBatch, DeviceEvents, DeviceItems, distinct_items, load_events
from habitus.training.items import FrozenVectors, HostItems
from habitus.training.loss import LogQ
from habitus.training.prefetch import Buckets
from habitus.training.step import EagerStage1, EagerStage2
from tests.training.conftest import prepared

CPU = torch.device("cpu")
ITEM_DROPOUT = {"token_dropout": 0.3, "field_dropout": 0.3, "item_dropout": 0.2}


def host_batches(dataset: Dataset, recipe: Any, num_parts: int = 1) -> HostBatches:
    return HostBatches(dataset, recipe, CPU, Ranks(), num_parts)


def device_batch(dataset: Dataset, recipe: Any, step: int) -> DeviceBatch:
    windows = torch.from_numpy(host_batches(dataset, recipe).order.windows(step))
    return DeviceEvents(dataset, CPU).assemble(windows, DeviceItems.of(dataset, recipe, CPU).lengths)


def gradients(model: BehaviorModel) -> dict[str, torch.Tensor]:
    copies = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return copies


def test_windows_come_in_the_order_of_the_datasets_batches(dataset: Dataset) -> None:
    order = WindowOrder(dataset, 16, seed=3)
    epoch = dataset.counts("train").windows // 16
    for step in (0, 1, epoch, epoch + 1, 3 * epoch):  # the second last crosses into the next epoch
        batch = dataset.batch("train", 16, seed=3, position=step)
        assert np.array_equal(dataset.gather("train", order.windows(step)).items, batch.items)


def test_counts_of_steps_are_those_of_their_batches(dataset: Dataset) -> None:
    order = WindowOrder(dataset, 16, seed=0)
    steps = 2 * dataset.counts("train").windows // 16 + 3  # into the third epoch
    batches = [dataset.batch("train", 16, position=step) for step in range(steps)]
    totals = order.totals(0, steps)
    assert totals["events"] == sum(int((batch.segments >= 0).sum()) for batch in batches)
    assert totals["queries"] == sum(int((batch.targets >= 0).sum()) for batch in batches)
    assert order.unique_events(steps) == dataset.counts("train").events
    assert order.unique_events(0) == 0  # a run that failed at its first step
    assert order.unique_events(2) == sum(int((batch.segments >= 0).sum()) for batch in batches[:2])


def test_distinct_items_by_hand() -> None:
    # Targets 5, 2, 5; events 7, 5, 2, 9: the targets 2 and 5 come first, then 7 and 9.
    targets, events = np.array([5, 2, 5]), np.array([[7, 5], [2, 9]])
    table, by_sorting = ItemFinder(10), ItemFinder(10)
    by_sorting.place = np.zeros(0, np.int64)
    for finder in (table, by_sorting):
        items, num_targets, of_targets, of_events = finder.find(targets, events)
        assert items.tolist() == [2, 5, 7, 9]
        assert num_targets == 2
        assert of_targets.tolist() == [1, 0, 1]
        assert of_events.tolist() == [[2, 1], [0, 3]]
    padded = torch.tensor([[5, 2], [5, 5]])  # as many targets as events
    rows, places, target_places, distinct_targets, num_items = distinct_items(torch.from_numpy(events), padded, 10)
    assert rows[: int(num_items)].tolist() == [2, 5, 7, 9]
    assert int(distinct_targets) == 2
    assert target_places.tolist() == [[1, 0], [1, 1]]
    assert places.tolist() == [[2, 1], [0, 3]]


@pytest.mark.parametrize("step", [0, 5, 60, 61])
def test_a_batch_made_on_a_device_is_the_datasets(dataset: Dataset, recipe_of: Callable[..., Any], step: int) -> None:
    recipe = recipe_of(steps=100)
    host_step = host_batches(dataset, recipe).read(step)
    (part,) = host_step.parts
    batch = device_batch(dataset, recipe, step)
    for name in ("items", "positions", "segments"):
        assert torch.equal(getattr(batch, name), getattr(part.inputs, name)), name
    assert torch.equal(batch.has_query, part.inputs.targets >= 0)
    assert torch.equal(batch.targets[batch.has_query], part.inputs.targets[batch.has_query])
    assert torch.equal(batch.boundaries.unique(), part.inputs.boundaries.unique())
    assert bool((batch.boundaries.diff() >= 0).all())
    assert batch.rows[: len(host_step.items)].tolist() == host_step.items.tolist()
    assert torch.equal(batch.event_places.long(), part.event_places)
    assert torch.equal(batch.target_places.flatten()[part.slots], part.target_places)
    assert torch.equal(batch.targets.flatten()[part.slots], part.target_rows)
    fields = batch.step_batch(DeviceEvents(dataset, CPU).names).inputs.fields
    for name, values in part.inputs.fields.items():
        torch.testing.assert_close(fields[name].float(), values.float(), rtol=0, atol=0, equal_nan=True)
    tokens, pairs = HostItems(dataset, recipe, CPU).text_counts(host_step.items)
    expected = [host_step.num_targets, len(host_step.items), tokens, pairs, host_step.num_queries]
    assert batch.counts.tolist() == expected


@pytest.mark.parametrize("log_q", [False, True])
@pytest.mark.parametrize("copying, dropout", [(False, {}), (True, {}), (True, {"dropout": 0.3}), (False, ITEM_DROPOUT)])
def test_fixed_shapes_change_no_loss_and_no_gradient(
    dataset: Dataset, recipe_of: Callable[..., Any], log_q: bool, copying: bool, dropout: dict[str, float]
) -> None:
    recipe = recipe_of(log_q=log_q, model={"copying": copying}, **dropout)
    model = with_copy_scores(BehaviorModel(dataset.fields, recipe.model))
    stage = EagerStage1(model, dataset, recipe, host_batches(dataset, recipe))
    expected = stage.backward(3)
    expected_gradients = gradients(model)
    items, batch = DeviceItems.of(dataset, recipe, CPU), device_batch(dataset, recipe, 3)
    captured = CapturedStage1(model, dataset, recipe, items, DeviceEvents(dataset, CPU).names)
    losses = captured.losses(batch, torch.empty(0), (300, 2000), at_step(3))
    losses.loss.backward()
    torch.testing.assert_close(losses.loss.detach(), expected.loss)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)
    assert int(batch.counts[4] * losses.num_candidates) == stage.work.scores


@pytest.mark.parametrize("log_q, copying", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("num_negatives, extra_pool", [(0, "union"), (64, "union"), (64, "extras"), (300, "union")])
def test_fixed_shapes_of_stage_2(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, num_negatives: int, extra_pool: str, log_q: bool,
    copying: bool,
) -> None:  # fmt: skip
    recipe = recipe_of(
        stage=2, parent="p", num_negatives=num_negatives, extra_pool=extra_pool, log_q=log_q, seed=7,
        model={"copying": copying}, dropout=0.2 if copying else 0.0,
    )  # fmt: skip
    bundle = load_bundle(parent)
    model = with_copy_scores(BehaviorModel(dataset.fields, recipe.model))
    model.load_state_dict(bundle.model.state_dict(), strict=False)
    model.freeze().train()
    vectors = FrozenVectors(EmbeddingCache.open(parent / "catalogue", bundle, dataset), CPU)
    stage = EagerStage2(model, dataset, recipe, host_batches(dataset, recipe), vectors)
    expected = stage.backward(3)
    expected_gradients = gradients(model)
    assert vectors.table is not None
    captured = CapturedStage2(model, dataset, recipe, vectors.table, DeviceEvents(dataset, CPU).names)
    batch = device_batch(dataset, recipe, 3)
    losses = captured.losses(batch, negative_keys(7, 3), (300, 0), at_step(3))
    losses.loss.backward()
    torch.testing.assert_close(losses.loss.detach(), expected.loss)
    assert (losses.extra is None) == (expected.extra is None)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)
    assert int(batch.counts[4] * losses.num_candidates) == stage.work.scores


def test_a_stage_2_that_is_over_gives_its_table_back_at_once(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    """Without waiting for the garbage collector: the next run of a sweep needs the room."""
    recipe = recipe_of(stage=2, parent="p", num_negatives=8)
    model, names = BehaviorModel(dataset.fields, recipe.model), DeviceEvents(dataset, CPU).names
    table = torch.zeros(dataset.num_items, recipe.model.joint_dim)
    stage, held = CapturedStage2(model, dataset, recipe, table, names), weakref.ref(table)
    gc.disable()
    try:
        del stage, table
        assert held() is None
    finally:
        gc.enable()


def at_step(step: int) -> Latch:
    """A latch that has counted so many steps."""
    latch = Latch("cpu")
    latch.state[0] = step
    return latch


def with_copy_scores(model: BehaviorModel) -> BehaviorModel:
    """The model with copy scores that differ from event to event; at the start they do not."""
    if model.contextualizer.copying is not None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.contextualizer.copying.parameters():
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


@pytest.mark.parametrize("num_parts", [2, 3, 20])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_parts_keep_the_candidates_and_masks_of_the_full_batch(
    dataset: Dataset, recipe_of: Callable[..., Any], num_parts: int, dropout: float
) -> None:
    recipe = recipe_of(dropout=dropout)
    model = BehaviorModel(dataset.fields, recipe.model)
    full = EagerStage1(model, dataset, recipe, host_batches(dataset, recipe)).backward(2)
    expected_gradients = gradients(model)
    parts = EagerStage1(model, dataset, recipe, host_batches(dataset, recipe, num_parts)).backward(2)
    torch.testing.assert_close(parts.loss, full.loss)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_how_likely_an_item_is_a_candidate(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    recipe = recipe_of(stage=2, parent="p", num_negatives=30, log_q=True)  # 30 of 300 items: one in ten
    log_q, items = LogQ.of(dataset, recipe, CPU), [0, 7, 123]
    counts = dataset.item_train_counts
    shares = [int(counts[item]) / int(counts.sum()) for item in items]
    in_batch = [1 - (1 - share) ** (16 * 32) for share in shares]
    union = [1 - (1 - q) * 0.9 for q in in_batch]
    assert log_q.in_batch[items].exp().tolist() == pytest.approx(in_batch, rel=1e-5)
    assert log_q.union[items].exp().tolist() == pytest.approx(union, rel=1e-5)
    assert log_q.extras[items].exp().tolist() == pytest.approx([0.1] * 3)


def test_buckets_grow_by_the_root_of_two_and_cut_nothing() -> None:
    buckets = Buckets(items=640, tokens=6400, most_items=1500, most_tokens=9000)
    assert buckets.size(0) == (640, 6400)
    assert buckets.size(1) == (960, 9000)  # 905 rounded up to a multiple of 64; tokens at their most
    assert buckets.size(2) == (1280, 9000)
    assert buckets.size(3) == (1500, 9000)
    assert buckets.holding(640, 100) == 0
    assert buckets.holding(641, 100) == 1
    assert buckets.holding(10, 6401) == 1
    assert buckets.holding(1500, 9000) == 3


def test_the_first_bucket_has_room_beyond_what_was_seen() -> None:
    fitted = Buckets.fitted([(1000, 9000), (1100, 9900)], 100_000, 1_000_000)
    # 1.01 · 1100 + 100 = 1211, rounded up to a multiple of 64; 1.01 · 9900 + 900 = 10,899, to one of 8192 / 32 = 256.
    assert fitted.size(0) == (1216, 11_008)


def test_batches_a_little_larger_or_smaller_find_the_same_buckets() -> None:
    one = Buckets.fitted([(66_000, 400_000), (66_300, 402_000)], 1 << 20, 1 << 24)
    other = Buckets.fitted([(66_100, 400_900), (66_350, 402_500)], 1 << 20, 1 << 24)
    assert one.size(0) == other.size(0) == (67_584, 409_600)  # multiples of 2048 and of 8192
    assert one.size(1) == other.size(1)


def test_events_stay_on_the_device_from_run_to_run_only_where_that_is_asked_for(
    dataset: Dataset, tmp_path: Path
) -> None:
    other = prepared(tmp_path / "other", seed=5)
    assert load_events(dataset, CPU) is not load_events(dataset, CPU)
    with keep_events_on_device():
        events = load_events(dataset, CPU)
        assert load_events(dataset, CPU) is events
        assert np.array_equal(load_events(other, CPU).item.numpy(), other.items)
        assert load_events(dataset, CPU) is not events  # one dataset at a time
        for view in (dataset.with_seq_len(16), dataset.with_users(0.5), dataset.with_users(0.5, 1)):
            assert len(load_events(view, CPU).offsets) == view.counts("train").windows + 1
    assert load_events(dataset, CPU) is not load_events(dataset, CPU)
