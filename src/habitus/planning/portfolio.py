"""Recipes for a log that nobody has studied: a few shapes, and how many passes they usually want.

What stands here was found on seven real logs of 10⁵ to 10⁶ events, one knob at a time (docs/any-log.md,
benchmarks/results/any-log-grid-h200.json). It is a place to start a search from, not a law: the passes that a log
wants are found on its own validation users.
"""

import math
from dataclasses import dataclass
from typing import Literal

from habitus.data import Dataset
from habitus.recipe import DataRecipe, EvaluateRecipe, ModelRecipe, Recipe, TrainRecipe

DeviceKind = Literal["gpu", "cpu"]

# 800,000 events wanted 20 passes and 150,000 wanted 5; more passes than MOST were not tried.
_REFERENCE_EVENTS, _REFERENCE_PASSES, _PASSES_EXPONENT = 8e5, 20.0, 0.75
LEAST_PASSES, MOST_PASSES = 2.0, 24.0
_STEPS_PER_PASS = 20  # at least, where the log has the windows: a batch is a small part of it
_MANY_EVENTS = 5e5  # from here on half the learning rate was better, and twice the batch is twice as fast on a GPU
_STAGE2_SHARE, _STAGE2_RATE = 0.25, 0.25  # of stage 1's steps and learning rate
_STAGE2_NEGATIVES = 8192


@dataclass(frozen=True)
class Shape:
    """A model and how it is trained, apart from the log."""

    name: str
    joint_dim: int
    width: int
    depth: int
    batch_sequences: int
    rate: float  # learning rate at 512 windows per step; it goes with the root of the batch
    pass_factor: float = 1.0  # passes that it wants, times the usual ones
    dropout: float = 0.3
    text_depth: int = 1
    head_dim: int = 32


SHAPES: dict[DeviceKind, tuple[Shape, ...]] = {
    "gpu": (
        Shape("deep", joint_dim=128, width=256, depth=3, batch_sequences=16, rate=4e-2),
        # One layer at a high rate: sharper lists where the next item follows from the last one.
        Shape("shallow", joint_dim=128, width=128, depth=1, batch_sequences=16, rate=8e-2, pass_factor=2.0),
    ),
    "cpu": (
        Shape("small", joint_dim=64, width=128, depth=2, batch_sequences=8, rate=4e-2),
        Shape("shallow", joint_dim=64, width=128, depth=1, batch_sequences=8, rate=8e-2, pass_factor=2.0),
    ),
}


def usual_passes(dataset: Dataset) -> float:
    """How many passes logs of this size wanted."""
    return usual_passes_of(dataset.counts("train").events)


def usual_passes_of(events: float) -> float:
    """How many passes logs of so many training events wanted."""
    passes = _REFERENCE_PASSES * (events / _REFERENCE_EVENTS) ** _PASSES_EXPONENT
    return min(max(passes, LEAST_PASSES), MOST_PASSES)


def stage1_recipe(shape: Shape, dataset: Dataset, passes: float, device: DeviceKind, *, seed: int = 0) -> Recipe:
    """Stage 1 of a shape on this log. All copy and correct by log q: where that did not help, it cost nothing."""
    counts = dataset.counts("train")
    is_large = counts.events >= _MANY_EVENTS
    batch = shape.batch_sequences * (2 if is_large and device == "gpu" else 1)
    batch = min(batch, max(1, counts.windows // _STEPS_PER_PASS))
    rate = shape.rate * (0.5 if is_large else 1.0)
    return Recipe(
        data=DataRecipe(seq_len=dataset.seq_len),
        model=ModelRecipe(
            joint_dim=shape.joint_dim,
            text_len=dataset.fields.text_len or 24,
            text_depth=shape.text_depth,
            width=shape.width,
            depth=shape.depth,
            head_dim=shape.head_dim,
            copying=True,
        ),
        train=TrainRecipe(
            batch_sequences=batch,
            steps=max(1, round(passes * counts.windows / batch)),
            learning_rate=rate * math.sqrt(batch / 512),
            dropout=shape.dropout,
            log_q=True,
            precision="bf16" if device == "gpu" else "fp32",
            seed=seed,
        ),
        evaluate=EvaluateRecipe(queries=20_000, regimes=("catalogue",)),
    )


def stage2_recipe(first: Recipe, dataset: Dataset) -> Recipe:
    """Stage 2 after a stage-1 recipe: a quarter of its steps at a quarter of its rate, against extra negatives."""
    train = first.train.model_copy(
        update={
            "stage": 2,
            "parent": first.hash(dataset.checksum),
            "num_negatives": min(_STAGE2_NEGATIVES, dataset.num_candidates),
            "steps": max(1, round(_STAGE2_SHARE * first.train.steps)),
            "learning_rate": _STAGE2_RATE * first.train.learning_rate,
        }
    )
    return first.model_copy(update={"train": train})


def refit_recipe(first: Recipe, dataset: Dataset) -> Recipe:
    """A stage-1 recipe on training and validation events: the same number of passes, so somewhat more steps."""
    windows, whole = (view.counts("train").windows for view in (dataset, dataset.with_validation()))
    return first.model_copy(
        update={
            "data": first.data.model_copy(update={"include_validation": True}),
            "train": first.train.model_copy(update={"steps": round(first.train.steps * whole / windows)}),
        }
    )
