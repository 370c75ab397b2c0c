"""A ten-line loop and a plain softmax: the model memorises a little, and learns a world up to its floor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from habitus.data import Batch, Dataset, Field, Fields, ItemFeatures, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.events.world import Queries, World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.recipe import ModelRecipe


def loss_of(model: BehaviorModel, catalogue: ItemFeatures, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy in nats over the whole catalogue, of every slot that has a next item."""
    windows = batch_tensors(batch)
    vectors = model.embed_items(item_tensors(catalogue, model.recipe))
    queries = model.queries(windows, vectors[windows.items])
    has_target = windows.targets >= 0
    return F.cross_entropy(queries[has_target] @ vectors.T, windows.targets[has_target])


def optimizer_of(model: BehaviorModel, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {
                "params": [info.parameter],
                "lr": learning_rate * info.lr_multiplier,
                "weight_decay": 0.01 * info.weight_decay,
            }
            for info in model.parameter_groups()
        ]
    )


def test_it_memorises_64_windows() -> None:
    rng = np.random.default_rng(0)
    num_items, B, L = 100, 64, 12
    items = rng.integers(0, num_items, (B, L + 1))
    items[:, 0] = np.arange(B)  # the first item names its window, so that every next item can be known
    batch = Batch(
        items=items[:, :-1],
        targets=items[:, 1:],
        positions=np.tile(np.arange(L, dtype=np.int32), (B, 1)),
        segments=np.zeros((B, L), np.int32),
        boundaries=np.arange(B + 1, dtype=np.int32) * L,
        users=np.arange(B)[:, None],
        fields={},
    )
    features = ItemFeatures(rng.integers(1, 60, (num_items, 6)).astype(np.int32), {})
    fields = Fields(item=(Field(name="title", kind="text", size=60),), event=(), text_len=6)
    recipe = ModelRecipe(joint_dim=32, text_len=6, text_depth=1, width=64, depth=2, head_dim=32)
    model = BehaviorModel(fields, recipe)
    optimizer = optimizer_of(model, 4e-3)
    first = loss_of(model, features, batch).item()
    assert first == pytest.approx(np.log(num_items), abs=0.5)
    for _ in range(200):
        loss = loss_of(model, features, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def oracle_loss(world: World, batch: Batch) -> float:
    """What the world's own law loses on the same queries, in nats."""
    starts = batch.boundaries[np.searchsorted(batch.boundaries, np.arange(batch.items.size), side="right") - 1]
    asked = np.flatnonzero(batch.targets.ravel() >= 0)
    queries = Queries(
        items=batch.items.ravel(),
        starts=starts[asked].astype(np.int64),
        ends=asked + 1,
        targets=batch.targets.ravel()[asked],
    )
    return -float(world.oracle.log_probs(queries).mean())


def test_on_a_world_validation_falls_towards_the_floor_and_never_under_it(tmp_path: Path) -> None:
    config = WorldConfig(
        num_users=3_000,
        num_items=150,
        events_per_user=20,
        min_events_per_user=8,
        max_events_per_user=32,  # a user fits a window, so that model and oracle see the same history
        num_groups=6,
        num_brands=12,
        num_words=60,
        image_dim=4,
        seed=3,
    )
    world = World(config)
    options = PrepareOptions(seq_len=32, text_len=12, validation_share=0.1, test_share=0)
    prepare_world(world, schema_of(world), tmp_path / "dataset", options, lambda _what, _share: None)
    dataset = Dataset.open(tmp_path / "dataset")
    catalogue = dataset.item_features(np.arange(dataset.num_items))
    validation = dataset.batch("validation", 128, seed=0)
    floor = oracle_loss(world, validation)

    recipe = ModelRecipe(joint_dim=32, text_len=12, text_depth=1, width=64, depth=2, head_dim=32)
    model = BehaviorModel(dataset.fields, recipe)
    optimizer = optimizer_of(model, 3e-3)
    losses = []
    for step in range(241):
        if step % 40 == 0:
            with torch.no_grad():
                losses.append(loss_of(model, catalogue, validation).item())
        loss = loss_of(model, catalogue, dataset.batch("train", 16, seed=1, position=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert losses[0] == pytest.approx(np.log(150), abs=0.5)
    assert min(losses) > floor
    assert losses[-1] < losses[1] < losses[0]
    # Most of what can be learned is: between knowing nothing and knowing the law.
    assert (losses[0] - losses[-1]) / (losses[0] - floor) > 0.75
    print(f"floor {floor:.3f}, validation " + " ".join(f"{loss:.3f}" for loss in losses))
