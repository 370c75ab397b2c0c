"""Helpers compile exactly what a run will ask for: the same pieces, given the same inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from habitus.data import Dataset
from habitus.evaluate.ranks import Ranks
from habitus.model import BehaviorModel
from habitus.train.feeding import Feeder
from habitus.train.precompiling import inputs_of, pieces_of, run_there_and_back
from habitus.train.stages import JointStage

CPU = torch.device("cpu")


def compiled_pieces(model: BehaviorModel) -> set[tuple[str, str]]:
    """What `compile_blocks` marks, by module (of equal layers the first) and method; nothing is compiled before use."""
    model.compile_blocks()
    found = set()
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            found.add((name, "forward"))
        found |= {(name, method) for method in ("enter", "layout", "leave") if method in module.__dict__}
    return {(name, method) for name, method in found if not name.split(".")[-1].isdigit() or name.endswith(".0")}


def test_the_groups_hold_what_is_compiled(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    model = BehaviorModel(dataset.fields, recipe_of().model)
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    listed = [(names[owner], method) for pieces in pieces_of(model).values() for owner, method in pieces]
    assert len(listed) == len(set(listed))
    assert set(listed) == compiled_pieces(model)


def test_pieces_are_given_what_a_step_gives_them(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    recipe = recipe_of()
    model = BehaviorModel(dataset.fields, recipe.model)
    stage = JointStage(model, dataset, recipe, Feeder(dataset, recipe, CPU, Ranks(), 1))

    def step() -> None:
        feed = stage.feeder.feed(0)
        stage._micro_loss(feed, feed.micros[0], model.embed_items(stage.reader.tensors(feed.items)))

    for group, pieces in pieces_of(model).items():
        calls = inputs_of(pieces, step)
        assert [piece for piece, _ in calls] == pieces, group
        assert not any(method in owner.__dict__ for owner, method in pieces), "a listener was left behind"
        for (owner, method), (arguments, named) in calls:
            run_there_and_back(getattr(owner, method), arguments, named)
    # Every part of the model was asked for its gradient; equal layers count once, and looked-up tables are no piece.
    missing = [name for name, p in model.named_parameters() if p.grad is None and ".blocks.1." not in name]
    assert all(name.endswith((".tokens", "categories.weight")) for name in missing), missing
