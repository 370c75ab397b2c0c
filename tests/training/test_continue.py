"""Stage 1 that begins with the weights of another run, on the same log and on one whose categories have grown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from habitus.data import Dataset, Field, Fields
from habitus.model import BehaviorModel, item_tensors, load_bundle
from habitus.record import Record
from habitus.training import TrainOptions, train

ONE = TrainOptions(device="cpu", threads=1)


def test_a_run_begins_with_its_parents_weights_and_another_identity(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path
) -> None:
    before = Record.read(parent / "record.json")
    common = {"steps": 2, "learning_rate": 1e-9, "weight_decay": 0.0}
    recipe = recipe_of(parent=before.recipe_hash, **common)
    record = train(recipe, dataset, tmp_path / "more", parent=parent, options=ONE)
    fresh = train(recipe_of(**common), dataset, tmp_path / "fresh", options=ONE)
    assert record.parent_hash == before.recipe_hash
    assert record.recipe_hash != fresh.recipe_hash
    # At a rate of nearly nothing, the model is still the parent's.
    ours, theirs = (load_bundle(folder).model.state_dict() for folder in (tmp_path / "more", parent))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
    assert abs(record.metrics["batch/loss"].value - before.metrics["batch/loss"].value) < 1e-4
    assert fresh.metrics["batch/loss"].value > before.metrics["batch/loss"].value + 0.1


def test_new_categories_begin_as_unknown_ones(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    model = recipe_of().model
    small = BehaviorModel(dataset.fields, model, seed=1)
    grown_fields = grow(dataset.fields)
    assert grown_fields != dataset.fields
    large = BehaviorModel(grown_fields, model, seed=2).begin_with(small)
    ours, theirs = large.embedder.categories, small.embedder.categories
    assert ours is not None
    assert theirs is not None
    rows, first, first_there = ours.weight.detach(), 0, 0
    for size, size_there in zip(ours.sizes, theirs.sizes, strict=True):
        table = rows[first : first + size]
        assert torch.equal(table[:size_there], theirs.weight[first_there : first_there + size_there])
        assert torch.equal(table[size_there:], table[:1].expand(size - size_there, -1))
        first, first_there = first + size, first_there + size_there
    for name, tensor in small.state_dict().items():
        if "categories" not in name:
            assert torch.equal(large.state_dict()[name], tensor), name
    # An item with values that are new has the vector that it had when they were unknown.
    features = dataset.item_features(np.arange(5))
    for spec in grown_fields.item:
        if spec.kind == "category":
            features.fields[spec.name][3] = spec.size - 1
    before, after = (one.eval().embed_items(item_tensors(features, model)) for one in (small, large))
    torch.testing.assert_close(after, before)


def grow(fields: Fields) -> Fields:
    """Two more values of every category."""

    def larger(field: Field) -> Field:
        return field.model_copy(update={"size": field.size + 2}) if field.kind == "category" else field

    return fields.model_copy(
        update={"item": tuple(map(larger, fields.item)), "event": tuple(map(larger, fields.event))}
    )
