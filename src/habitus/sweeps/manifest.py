"""Sweep manifests: which runs an axis consists of, and what was left out. `fit` reads them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError, RunError
from habitus.files import write_once
from habitus.recipe import Recipe
from habitus.sizing import cell_of_recipe
from habitus.store import LeftOut, ManifestRow, SweepManifest, manifest_path, manifest_paths
from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun
from habitus.sweeps.preset import Preset
from habitus.sweeps.store import Store

# What a row says of its recipe, by section.
_ROW_SETTINGS = {
    "model": ("joint_dim", "text_depth", "width", "depth"),
    "train": ("batch_sequences", "num_negatives", "steps"),
}


class ManifestFile:
    """A manifest with its place in the store."""

    def __init__(self, path: Path, manifest: SweepManifest) -> None:
        self.path = path
        self.manifest = manifest

    def extend(self, cells: Iterable[PlannedRun], left_out: Iterable[LeftOut] = ()) -> None:
        """Add rows, keeping what another machine may have added meanwhile."""
        current, added = SweepManifest.read(self.path), list(cells)
        rows = {row.recipe_hash: row for row in (*current.cells, *(planned.row for planned in added))}
        listed = {out.to_json(): out for out in (*current.left_out, *left_out)}
        update = {
            "cells": tuple(rows.values()),
            "recipes": _recipes_by_cell(added) | current.recipes,
            "left_out": tuple(listed.values()),
        }
        self.manifest = current.model_copy(update=update)
        self.manifest.write(self.path)

    def design(self, store: Store, facts: DatasetFacts, budgets: Iterable[float]) -> Design:
        """The part of the manifest that lies at some budgets."""
        chosen = set(budgets)

        def planned_runs(rows: Iterable[ManifestRow]) -> tuple[PlannedRun, ...]:
            return tuple(self.load_run(store, row, facts) for row in rows if row.flops_budget in chosen)

        return Design(
            self.manifest.axis,
            planned_runs(self.manifest.cells),
            tuple(out for out in self.manifest.left_out if out.flops_budget in chosen),
            planned_runs(self.manifest.parents),
            self.manifest.decided,
        )

    def load_run(self, store: Store, row: ManifestRow, facts: DatasetFacts) -> PlannedRun:
        """A row with its recipe: the cell's own, or the manifest's where the cell's folder is gone."""
        digest = row.recipe_hash
        recipe = store.recipe(digest) if store.has_recipe(digest) else self._rebuild_recipe(store, row)
        return PlannedRun(row, recipe, cell_of_recipe(recipe, facts.inputs))

    def _rebuild_recipe(self, store: Store, row: ManifestRow) -> Recipe:
        """The recipe of a row without a folder; it must hash to the name that the folder had."""
        for template in self._templates(store, row):
            recipe = _recipe_at(template, row)
            if recipe is not None and recipe.hash(store.info.dataset_checksum) == row.recipe_hash:
                return recipe
        raise RunError(
            f"{store.cell(row.recipe_hash)} is gone, and {self.path} does not hold the recipe of {row.cell_id}",
            expected="the folder, or a manifest with recipes, as this version writes them",
            next_step=f"restore the folder, or delete {self.path} and run the sweep again: finished runs are kept",
        )

    def _templates(self, store: Store, row: ManifestRow) -> Iterator[Recipe]:
        """Recipes that may differ from the row's only in what the row says itself, the likeliest first."""
        if row.cell_id in self.manifest.recipes:
            yield self.manifest.recipes[row.cell_id]
        # Earlier versions wrote no recipes: those of the same cell at other rates, then those of other cells.
        others = [*self.manifest.cells, *self.manifest.parents]
        for other in sorted(others, key=lambda other: other.cell_id != row.cell_id):
            if store.has_recipe(other.recipe_hash):
                yield store.recipe(other.recipe_hash)


def _recipes_by_cell(runs: Iterable[PlannedRun]) -> dict[str, Recipe]:
    return {planned.row.cell_id: planned.recipe for planned in runs}


def _recipe_at(template: Recipe, row: ManifestRow) -> Recipe | None:
    """The template with the sizes, learning rate and seed of a row; None where they do not go together."""
    values = template.to_values()
    for section, names in _ROW_SETTINGS.items():
        values[section] |= {name: row.realised[name] for name in names if name in row.realised}
    values["train"] |= {"learning_rate": row.learning_rate, "seed": row.seed}
    if "seq_len" in row.realised:
        values["data"]["seq_len"] = row.realised["seq_len"]
    if "init" in row.wanted:
        values["model"]["init"] = row.wanted["init"]
    try:
        return Recipe.parse(values, row.cell_id)
    except ConfigError:
        return None


def load_manifests(store: Path, axis: str | None = None) -> list[ManifestFile]:
    """The manifests of a store in their order."""
    files = []
    for path in manifest_paths(store):
        try:
            manifest = SweepManifest.read(path)
        except ConfigError as error:
            raise RunError(
                f"{path} is not a sweep manifest: {error.problem}", next_step="restore the file, or delete it"
            ) from None
        if axis is None or manifest.axis == axis:
            files.append(ManifestFile(path, manifest))
    return files


def write_manifest(store: Store, design: Design, preset: Preset, request: dict[str, Any]) -> ManifestFile:
    """Write a design under the next free number of its axis, and its cells into the store."""
    for planned in design.distinct_runs():
        store.add(planned.hash, planned.recipe)
    manifest = SweepManifest(
        axis=design.axis,
        preset=preset.name,
        cells=tuple(planned.row for planned in design.cells),
        parents=tuple(planned.row for planned in design.parents),
        recipes=_recipes_by_cell(design.distinct_runs()),
        left_out=design.left_out,
        decided=design.decided,
        request=request,
    )
    number = 1
    while True:
        path = manifest_path(store.path, design.axis, number)
        if write_once(path, manifest.to_json().encode()):
            return ManifestFile(path, manifest)
        other = SweepManifest.read(path)
        if other.request == request and other.budgets() == manifest.budgets():
            return ManifestFile(path, other)  # another machine had the same idea a moment ago
        number += 1
