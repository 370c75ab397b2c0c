"""Sweep manifests, `sweeps/<axis>-<n>.json`: which runs an axis consists of, and what was left out."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from habitus.recipe import Recipe
from habitus.store.folder import is_recipe_hash
from habitus.typed import Sealed, Typed


class ManifestRow(Typed):
    """One run of one cell."""

    cell_id: str = Field(description="Shared by all learning rates and seeds of a cell.")
    flops_budget: float = Field(gt=0)
    wanted: dict[str, Any]
    realised: dict[str, Any]
    learning_rate: float = Field(gt=0)
    seed: int
    recipe_hash: str

    @field_validator("recipe_hash")
    @classmethod
    def _hash_names_a_folder(cls, recipe_hash: str) -> str:
        if not is_recipe_hash(recipe_hash):
            raise ValueError("the hash of a recipe has 64 hexadecimal digits")
        return recipe_hash


class LeftOut(Typed):
    """A cell that was asked for and will not be run."""

    flops_budget: float = Field(gt=0)
    wanted: dict[str, Any]
    reason: str


class SweepManifest(Sealed):
    """The runs of an axis, with the request that they answer."""

    axis: str
    preset: str
    cells: tuple[ManifestRow, ...]
    parents: tuple[ManifestRow, ...] = Field(
        (), description="Stage-1 runs trained only so that cells can continue them."
    )
    recipes: dict[str, Recipe] = Field(
        default_factory=dict,
        description="By cell_id, at one of its learning rates and seeds: enough to run a cell again whose folder is "
        "gone. Absent from manifests of earlier versions.",
    )
    left_out: tuple[LeftOut, ...] = ()
    decided: tuple[str, ...] = Field((), description="What was taken from the store or the preset, in words.")
    request: dict[str, Any] = Field(default_factory=dict, description="What was asked for, budgets apart.")

    def budgets(self) -> set[float]:
        return {row.flops_budget for row in self.cells} | {out.flops_budget for out in self.left_out}


def manifest_path(store: Path, axis: str, number: int) -> Path:
    return store / "sweeps" / f"{axis}-{number}.json"


def manifest_paths(store: Path) -> list[Path]:
    """The manifests of a store, by axis and number."""
    return sorted((store / "sweeps").glob("*.json"), key=_axis_and_number)


def _axis_and_number(path: Path) -> tuple[str, int]:
    axis, _, number = path.stem.rpartition("-")
    return axis, int(number) if number.isdigit() else 0
