"""The manifest of a surface's cells, so that `habitus fit` and `habitus report` read its store."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from habitus.laws.recipe_surface import budget_numbers
from habitus.record import Record
from habitus.store import SURFACE_AXIS, ManifestRow, SweepManifest, manifest_path, manifest_paths, read_records


def write_surface_manifest(store: Path, preset: str = "paper_range") -> int:
    """List the runs of stage 1 that stand in no other manifest as cells of the surface; returns how many."""
    path = manifest_path(store, SURFACE_AXIS, 1)
    others = [SweepManifest.read(other) for other in manifest_paths(store) if other != path]
    known = {row.recipe_hash for manifest in others for row in (*manifest.cells, *manifest.parents)}
    runs = [r for r in read_records(store) if r.recipe_hash not in known and is_of_surface(r)]
    if not runs:
        return 0
    rows = [_row(run, budget) for run, budget in zip(runs, surface_budgets(runs), strict=True)]
    rows.sort(key=lambda row: (row.flops_budget, row.cell_id, row.seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    SweepManifest(axis=SURFACE_AXIS, preset=preset, cells=tuple(rows), request={"piece": "surface"}).write(path)
    return len(rows)


def is_of_surface(record: Record) -> bool:
    """Whether a run is one of stage 1 with the usual schedule and the candidates of its own batch."""
    train = record.recipe.train
    return bool(record.flops_nominal) and (train.stage, train.schedule, train.pool_sequences) == (1, "cosine", None)


def surface_budgets(runs: Sequence[Record]) -> list[float]:
    """The budget of each run, rounded: cells of one budget differ by a step."""
    compute = np.array([run.flops_nominal or 0.0 for run in runs])
    numbers = budget_numbers(compute)
    return [float(f"{np.median(compute[numbers == number]):.0e}") for number in numbers]


def _row(run: Record, budget: float) -> ManifestRow:
    train = run.recipe.train
    same = run.recipe.model_copy(update={"train": train.model_copy(update={"seed": 0})})
    return ManifestRow(cell_id=same.hash(run.dataset_checksum)[:10], flops_budget=budget, wanted={}, realised={},
                       learning_rate=train.learning_rate, seed=train.seed, recipe_hash=run.recipe_hash)  # fmt: skip
