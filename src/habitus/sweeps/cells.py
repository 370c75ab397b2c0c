"""Planned cells: what a sweep will run, before anything has run."""

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from habitus.data import Dataset
from habitus.recipe import Recipe
from habitus.sizing import Cell, Inputs
from habitus.typed import Typed, content_hash


@dataclass(frozen=True)
class Facts:
    """What a dataset decides about cells."""

    checksum: str
    inputs: Inputs
    seq_len: int
    text_len: int
    num_items: int
    train_windows: int

    @classmethod
    def of(cls, dataset: Dataset) -> "Facts":
        return cls(
            checksum=dataset.checksum,
            inputs=Inputs.of(dataset.fields),
            seq_len=dataset.seq_len,
            text_len=max(1, dataset.fields.text_len),
            num_items=dataset.num_items,
            train_windows=dataset.counts("train").windows,
        )

    def epochs(self, batch_sequences: int, steps: int) -> float:
        """How often a run passes over the training windows."""
        return batch_sequences * steps / max(1, self.train_windows)


class Row(Typed):
    """One row of a manifest: one run of one cell."""

    cell_id: str = Field(description="Shared by all learning rates and seeds of a cell.")
    flops_budget: float
    wanted: dict[str, Any]
    realised: dict[str, Any]
    learning_rate: float
    seed: int
    recipe_hash: str


class LeftOut(Typed):
    """A cell that was asked for and will not be run."""

    flops_budget: float
    wanted: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Planned:
    """A row with the recipe behind it and what it costs."""

    row: Row
    recipe: Recipe
    cell: Cell

    @property
    def hash(self) -> str:
        return self.row.recipe_hash

    @property
    def parent(self) -> str | None:
        return self.recipe.train.parent


@dataclass(frozen=True)
class Design:
    """All cells of an axis at some budgets."""

    axis: str
    cells: tuple[Planned, ...]
    left_out: tuple[LeftOut, ...] = ()
    parents: tuple[Planned, ...] = ()  # stage-1 runs that cells continue and the store may not have yet
    decided: tuple[str, ...] = ()  # choices taken from the store or the preset, in words

    @property
    def flops(self) -> float:
        """Nominal FLOPs of every distinct run, the parents among them."""
        return float(sum(planned.cell.flops for planned in self.distinct()))

    @property
    def budgets(self) -> list[float]:
        return sorted({p.row.flops_budget for p in self.cells} | {out.flops_budget for out in self.left_out})

    def distinct(self) -> list[Planned]:
        """Every run once, parents first."""
        return list({planned.hash: planned for planned in (*self.parents, *self.cells)}.values())


def row_of(
    recipe: Recipe, cell: Cell, facts: Facts, *, budget: float, label: str, wanted: dict[str, Any] | None = None
) -> Planned:
    """The row of a recipe. Its cell_id tells apart cells that differ in anything but learning rate and seed."""
    realised = {
        "params": cell.params,
        "embedder_params": cell.embedder_params,
        "contextualizer_params": cell.contextualizer_params,
        "embedder_share": cell.embedder_share,
        "data_ratio": cell.data_ratio,
        "joint_dim": recipe.model.joint_dim,
        "text_depth": recipe.model.text_depth,
        "width": recipe.model.width,
        "depth": recipe.model.depth,
        "batch_sequences": recipe.train.batch_sequences,
        "num_negatives": recipe.train.num_negatives,
        "steps": recipe.train.steps,
        "slots_seen": cell.slots_seen,
        "epochs": facts.epochs(recipe.train.batch_sequences, recipe.train.steps),
        "flops": cell.flops,
    }
    if cell.embedder_flop_share is not None:
        realised["embedder_flop_share"] = cell.embedder_flop_share
    row = Row(
        cell_id=f"{label}-{_identity(recipe)}",
        flops_budget=budget,
        wanted={**cell.wanted, **(wanted or {})},
        realised=realised,
        learning_rate=recipe.train.learning_rate,
        seed=recipe.train.seed,
        recipe_hash=recipe.hash(facts.checksum),
    )
    return Planned(row, recipe, cell)


def _identity(recipe: Recipe) -> str:
    values = recipe.to_values()
    del values["train"]["learning_rate"], values["train"]["seed"]
    return content_hash(values)[:8]
