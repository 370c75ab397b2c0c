"""Sweep manifests: which runs an axis consists of, and what was left out. `fit` reads them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from habitus.errors import RunError
from habitus.sizing import cell_of_recipe
from habitus.sweeps.cells import Design, Facts, LeftOut, Planned, Row
from habitus.sweeps.preset import Preset
from habitus.sweeps.rates import Rates
from habitus.sweeps.store import Store, write_once
from habitus.typed import Typed, content_hash


class Manifest(Typed):
    """sweeps/<axis>-<n>.json (protocol §3), with the request that it answers."""

    axis: str
    preset: str
    cells: tuple[Row, ...]
    parents: tuple[Row, ...] = Field((), description="Stage-1 runs trained only so that cells can continue them.")
    left_out: tuple[LeftOut, ...] = ()
    decided: tuple[str, ...] = Field((), description="What was taken from the store or the preset, in words.")
    request: dict[str, Any] = Field(default_factory=dict, description="What was asked for, budgets apart.")

    def budgets(self) -> set[float]:
        return {row.flops_budget for row in self.cells} | {out.flops_budget for out in self.left_out}


class ManifestFile:
    """A manifest with its place in the store."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def extend(self, cells: Iterable[Planned], left_out: Iterable[LeftOut] = ()) -> None:
        """Add rows, keeping what another machine may have added meanwhile."""
        held = Manifest.read(self.path)
        rows = {row.recipe_hash: row for row in (*held.cells, *(planned.row for planned in cells))}
        outs = list(dict.fromkeys([o.to_json() for o in (*held.left_out, *left_out)]))
        self.manifest = held.model_copy(
            update={
                "cells": tuple(rows.values()),
                "left_out": tuple(LeftOut.parse(json.loads(text), "left_out") for text in outs),
            }
        )
        self.manifest.write(self.path)

    def design(self, store: Store, facts: Facts, budgets: Iterable[float]) -> Design:
        """The part of the manifest that lies at some budgets, with the recipes that the store holds."""
        wanted = set(budgets)

        def planned(rows: Iterable[Row]) -> tuple[Planned, ...]:
            found = []
            for row in rows:
                if row.flops_budget in wanted:
                    recipe = store.recipe(row.recipe_hash)
                    found.append(Planned(row, recipe, cell_of_recipe(recipe, facts.inputs)))
            return tuple(found)

        return Design(
            self.manifest.axis,
            planned(self.manifest.cells),
            tuple(out for out in self.manifest.left_out if out.flops_budget in wanted),
            planned(self.manifest.parents),
            self.manifest.decided,
        )


def request_of(preset: Preset, learning_rates: Rates, seeds: int | None, allow_repeats: bool) -> dict[str, Any]:
    """What makes two sweeps of an axis the same, budgets apart."""
    rates = learning_rates if learning_rates is None or isinstance(learning_rates, int | str) else list(learning_rates)
    return {
        "preset_hash": content_hash(preset.to_values()),
        "learning_rates": rates,
        "seeds": seeds,
        "allow_repeats": allow_repeats,
    }


def manifests(store: Path, axis: str | None = None) -> list[ManifestFile]:
    """The manifests of a store in their order."""
    found = []
    for path in sorted((store / "sweeps").glob("*.json"), key=_place):
        try:
            manifest = Manifest.read(path)
        except Exception as error:
            raise RunError(
                f"{path} is no sweep manifest: {error}", next_step="bring the file back, or remove it"
            ) from None
        if axis is None or manifest.axis == axis:
            found.append(ManifestFile(path, manifest))
    return found


def write_manifest(store: Store, design: Design, preset: Preset, request: dict[str, Any]) -> ManifestFile:
    """Write a design under the next free number of its axis, and its cells into the store."""
    for planned in design.distinct():
        store.add(planned.hash, planned.recipe)
    manifest = Manifest(
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
        path = store.path / "sweeps" / f"{design.axis}-{number}.json"
        if write_once(path, manifest.to_json().encode()):
            return ManifestFile(path, manifest)
        held = Manifest.read(path)
        if held.request == request and held.budgets() == manifest.budgets():
            return ManifestFile(path, held)  # another machine had the same idea a moment ago
        number += 1


def _place(path: Path) -> tuple[str, int]:
    axis, _, number = path.stem.rpartition("-")
    return axis, int(number) if number.isdigit() else 0
