"""Do the optimizer and the start of the weights move the best size? Sizes × learning rates under each pair of them.

    python benchmarks/optimizer_init.py --data DATASET --preset benchmarks/log_axes.toml --budgets 2.2e11,5e11 --out OUT
    python benchmarks/optimizer_init.py --preset docs/studies/paper-range/preset.toml --budgets 1e15 --out OUT  # a GPU

The sizes are those of the allocation axis. Each size of each pair has three rates, half, once and twice the pair's
usual one, and rates are added until the best one has a neighbour on both sides; then it gets more seeds. All runs are
cells of the allocation axis in OUT/store, where `habitus fit` fits each pair apart. Exits with 3 while more is left.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from habitus.data import Dataset
from habitus.recipe import Recipe
from habitus.store import ManifestRow, SweepManifest, manifest_path, pack_store
from habitus.sweeps import Preset, RecipeRunner, design_axis, load_preset, preset_dataset

PAIRS = (("muon", "default"), ("adamw", "default"), ("adamw", "plain"))
ADAMW_RATE = 0.2  # of the preset's, which is Muon's: 0.004 of 0.02 at 10¹⁵ FLOPs
RATES = (-1, 0, 1)  # powers of two of the usual rate, to begin with
MOST_ADDED = 5  # rates beyond those at either end


@dataclass
class SizeCell:
    """One size at one budget under one optimizer and start, and the tail training loss of each rate so far."""

    recipe: Recipe  # at the usual rate, first seed
    row: ManifestRow
    losses: dict[int, float] = field(default_factory=dict)  # by power of two

    def at(self, power: int, seed: int = 0) -> Recipe:
        train = self.recipe.train.model_copy(
            update={"learning_rate": float(f"{self.recipe.train.learning_rate * 2.0**power:.4g}"), "seed": seed}
        )
        return self.recipe.model_copy(update={"train": train})

    @property
    def best(self) -> int:
        return min(self.losses, key=self.losses.__getitem__)

    def wanted(self) -> list[int]:
        """Rates to run next: those to begin with, then one beyond an end where the best one lies."""
        if not self.losses:
            return list(RATES)
        ends = {min(self.losses): -1, max(self.losses): 1}
        step = ends.get(self.best)
        if step is None or abs(self.best) >= RATES[-1] + MOST_ADDED:
            return []
        return [self.best + step]


def size_cells(runner: RecipeRunner, preset: Preset, budget: float) -> list[SizeCell]:
    """The sizes of the allocation axis at a budget, under each optimizer and start."""
    cells = []
    for optimizer, init in PAIRS:
        common = preset.common.model_copy(update={"optimizer": optimizer})
        if optimizer == "adamw":
            common = common.model_copy(update={"learning_rate": ADAMW_RATE * common.learning_rate})
        allocation = preset.allocation.model_copy(
            update={"learning_rates": (1.0,), "top_rates": (), "budgets": (budget,), "replicates": 1}
        )
        variant = preset.model_copy(update={"common": common, "allocation": allocation})
        for planned in design_axis("allocation", runner.facts, variant).cells:
            model = planned.recipe.model.model_copy(update={"init": init})
            row = planned.row.model_copy(update={"cell_id": f"{optimizer}-{init}-{planned.row.cell_id}"})
            cells.append(SizeCell(planned.recipe.model_copy(update={"model": model}), row))
    return cells


def run_cells(runner: RecipeRunner, cells: Sequence[SizeCell], seeds: int, end: float) -> list[ManifestRow]:
    """Run rates until each cell's best is inside its grid, then that one's seeds; the rows of all runs that ended."""
    while wanted := [(cell, power) for cell in cells for power in cell.wanted()]:
        records = runner.run("rates", [cell.at(power) for cell, power in wanted], end - time.monotonic())
        for (cell, power), record in zip(wanted, records, strict=True):
            if record is not None:
                loss = None if record.train is None else record.train.loss
                cell.losses[power] = math.inf if record.status != "done" or loss is None else loss
        if None in records:
            break
    ran = [(cell, power, 0) for cell in cells for power in sorted(cell.losses)]
    repeats = [(cell, cell.best, seed) for cell in cells if cell.losses for seed in range(1, seeds)]
    records = runner.run("seeds", [cell.at(*rest) for cell, *rest in repeats], end - time.monotonic())
    ran += [one for one, record in zip(repeats, records, strict=True) if record is not None]
    checksum = runner.dataset.checksum
    rows = []
    for cell, power, seed in ran:
        recipe = cell.at(power, seed)
        update = {"learning_rate": recipe.train.learning_rate, "seed": seed, "recipe_hash": recipe.hash(checksum)}
        rows.append(cell.row.model_copy(update=update))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", required=True, help="Sizes, share, batch and Muon's rate are its own.")
    parser.add_argument("--data", type=Path, help="A prepared dataset, instead of the preset's world.")
    parser.add_argument("--budgets", required=True, help="FLOPs, as in 2.2e11,5e11.")
    parser.add_argument("--shapes", type=int, default=7, help="Sizes per budget.")
    parser.add_argument("--share", type=float, help="Of the embedder; else the preset's.")
    parser.add_argument("--seeds", type=int, default=2, help="Of each size's best rate.")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    o = parser.parse_args()
    end = time.monotonic() + 60 * o.minutes
    preset = load_preset(o.preset)
    dataset = Dataset.open(o.data) if o.data else preset_dataset(preset, o.out / "dataset")
    preset = preset.for_catalogue(dataset.num_candidates)
    common = preset.common if o.share is None else preset.common.model_copy(update={"share": o.share})
    allocation = preset.allocation.model_copy(update={"num_shapes": o.shapes})
    preset = preset.model_copy(update={"common": common, "allocation": allocation})
    runner = RecipeRunner(dataset, o.out / "store", preset.evaluate, device=o.device, workers=o.workers, note=print)
    cells = [cell for budget in o.budgets.split(",") for cell in size_cells(runner, preset, float(budget))]
    rows = run_cells(runner, cells, o.seeds, end)
    if not rows:
        sys.exit(3)
    manifest = SweepManifest(
        axis="allocation", preset=preset.name, cells=tuple(rows), request={"benchmark": "optimizer_init"}
    )
    path = manifest_path(o.out / "store", "allocation", 90)
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest.write(path)
    for cell in cells:
        losses = " ".join(f"{2.0**power:g}×:{loss:.4f}" for power, loss in sorted(cell.losses.items()))
        print(f"{cell.row.flops_budget:.2g} {cell.row.cell_id}: {losses}")
    complete = all(not cell.wanted() for cell in cells) and len(rows) >= sum(
        len(cell.losses) + o.seeds - 1 for cell in cells
    )
    pack_store(o.out / "store", o.out / "runs.store.xz")
    print(f"{len(rows)} runs;", "complete" if complete else "run it again to go on")
    sys.exit(0 if complete else 3)


if __name__ == "__main__":
    main()
