"""Sweep manifests: which runs an axis consists of, and what was left out. `fit` reads them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError, RunError
from habitus.files import write_once
from habitus.sizing import cell_of_recipe
from habitus.store import LeftOut, ManifestRow, SweepManifest, manifest_path, manifest_paths
from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun
from habitus.sweeps.preset import Preset
from habitus.sweeps.store import Store


class ManifestFile:
    """A manifest with its place in the store."""

    def __init__(self, path: Path, manifest: SweepManifest) -> None:
        self.path = path
        self.manifest = manifest

    def extend(self, cells: Iterable[PlannedRun], left_out: Iterable[LeftOut] = ()) -> None:
        """Add rows, keeping what another machine may have added meanwhile."""
        current = SweepManifest.read(self.path)
        rows = {row.recipe_hash: row for row in (*current.cells, *(planned.row for planned in cells))}
        listed = {out.to_json(): out for out in (*current.left_out, *left_out)}
        self.manifest = current.model_copy(update={"cells": tuple(rows.values()), "left_out": tuple(listed.values())})
        self.manifest.write(self.path)

    def design(self, store: Store, facts: DatasetFacts, budgets: Iterable[float]) -> Design:
        """The part of the manifest that lies at some budgets, with the recipes that the store holds."""
        chosen = set(budgets)

        def planned_runs(rows: Iterable[ManifestRow]) -> tuple[PlannedRun, ...]:
            return tuple(load_run(store, row, facts) for row in rows if row.flops_budget in chosen)

        return Design(
            self.manifest.axis,
            planned_runs(self.manifest.cells),
            tuple(out for out in self.manifest.left_out if out.flops_budget in chosen),
            planned_runs(self.manifest.parents),
            self.manifest.decided,
        )


def load_run(store: Store, row: ManifestRow, facts: DatasetFacts) -> PlannedRun:
    """A row of a manifest with the recipe that the store holds for it."""
    recipe = store.recipe(row.recipe_hash)
    return PlannedRun(row, recipe, cell_of_recipe(recipe, facts.inputs))


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
