"""The response surface of the paper's range on a log of one's own, in one pass, on one core.

    habitus prepare EVENTS ITEMS --schema SCHEMA --seq-len 64 --text-len 8 --out DATASET
    python benchmarks/log_surface.py DATASET --out out/log --minutes 60    # again until it is complete
    python benchmarks/log_surface.py DATASET --out out/log --foresee 1e13 --budgets 1e12,3e12,1e13 --cells 14,12,8
    habitus fit out/log/records.store.xz --out out/log/fits

Cells are points of a Halton sequence over size, share, batch and rate that fit the budget, make enough steps and see
the log at most once, taken until each budget has its count; of the middle budget the three that lie nearest to the
centre of the ranges have three seeds, chosen before anything ran. Budgets take turns, so that a part of the runs is a
smaller surface. `--list` prints the cells and runs nothing. `--foresee` writes what the law of the runs below a budget
says of that budget's cells, before they run or once they have: neither they nor larger ones are read. Exits with 3
while something is left.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from paper_plan import SurfaceData, describe_cell, foresee_cells, surface_records
from paper_range import Experiment, usual_size
from scipy.stats import qmc
from surface_manifest import write_surface_manifest

from habitus.errors import ConfigError
from habitus.files import write_atomic
from habitus.planning.shape import stage1_cell
from habitus.recipe import Recipe
from habitus.sizing import Cell, cell_of_recipe
from habitus.store import pack_store, read_records
from habitus.sweeps import load_preset

RANGES = {"size": (0.25, 4.0), "share": (0.015, 0.6), "batch": (0.25, 2.0), "rate": (0.25, 2.0)}  # of the usual but s
SEEDED, SEEDS = 3, 3
MOST_STEPS, MOST_POINTS = 4_000, 400
PER_WAVE = 3  # cells of each budget
FORESEEN = ("batch/loss", "catalogue/recall@10", "catalogue/ndcg@10")


class LogSurface(Experiment):
    def cells(self, budget: float, count: int) -> list[tuple[float, Recipe]]:
        """Recipes of a budget, each with its distance from the centre of the ranges."""
        found: dict[str, tuple[float, Recipe]] = {}
        for point in qmc.Halton(len(RANGES), seed=int(math.log10(budget) * 10)).random(MOST_POINTS):
            if len(found) == count:
                break
            recipe = self.recipe_at(budget, point)
            if recipe is not None:
                found.setdefault(recipe.hash(self.dataset.checksum), (float(np.sum((point - 0.5) ** 2)), recipe))
        return list(found.values())

    def recipe_at(self, budget: float, point: Sequence[float]) -> Recipe | None:
        """The recipe of a point of the unit cube; None where it makes no run of one pass."""
        n, share, b, r = (float(np.exp(np.interp(u, [0, 1], np.log(ends)))) for u, ends in
                          zip(point, RANGES.values(), strict=True))  # fmt: skip
        batch = max(1, 2 ** round(math.log2(self.preset.batch_sequences(budget) * b)))
        try:
            cell = self.cell_of(budget, n * usual_size(self.preset, budget), share, batch)
        except ConfigError:
            return None  # no model of that size and share fits the budget
        batch = cell.batch_sequences
        if cell.steps < self.preset.common.min_steps or self.runner.facts.epochs(batch, cell.steps) > 1.001:
            return None
        return self.recipe(cell, float(f"{r * self.preset.rule_rate(batch, budget):.4g}"))

    def cell_of(self, budget: float, size: float, share: float, batch: int) -> Cell:
        cell = stage1_cell(budget, size, share, batch, self.fixed)
        while cell.steps > MOST_STEPS:
            batch *= 2
            cell = stage1_cell(budget, size, share, batch, self.fixed)
        return cell

    def waves(self, budgets: Sequence[float], counts: Sequence[int]) -> Iterator[list[Recipe]]:
        """A few cells of each budget at a time; the other seeds with the second wave."""
        by_budget = [self.cells(budget, count) for budget, count in zip(budgets, counts, strict=True)]
        middle = sorted(by_budget[len(budgets) // 2], key=lambda pair: pair[0])[:SEEDED]
        seeds = [r.model_copy(update={"train": r.train.model_copy(update={"seed": seed})})
                 for _, r in middle for seed in range(1, SEEDS)]  # fmt: skip
        for start in range(0, max(counts), PER_WAVE):
            wave = [recipe for cells in by_budget for _, recipe in cells[start : start + PER_WAVE]]
            yield wave + (seeds if start == PER_WAVE else [])


def foresee(one: LogSurface, budget: float, count: int) -> dict[str, object]:
    """What the law of the runs below a budget says of its cells."""
    below = SurfaceData(surface_records(read_records(one.out / "store"))).below(budget)
    inputs = one.runner.facts.inputs
    found = [(cell_of_recipe(recipe, inputs), recipe) for _, recipe in one.cells(budget, count)]
    return foresee_cells(below, found, budget, one.dataset.checksum, FORESEEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="A prepared dataset.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--budgets", default="1e11,3e11,1e12")
    parser.add_argument("--cells", default="16,16,14")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--earlier", type=Path, help="Records of earlier calls.")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--foresee", type=float, help="A budget of --budgets: OUT/foreseen.json, nothing is run.")
    o = parser.parse_args()
    one = LogSurface(o.out, load_preset(o.preset), o.minutes, o.device, o.workers, o.earlier, o.data)
    budgets, counts = [float(b) for b in o.budgets.split(",")], [int(n) for n in o.cells.split(",")]
    if o.foresee is not None:
        foreseen = foresee(one, o.foresee, dict(zip(budgets, counts, strict=True))[o.foresee])
        write_atomic(o.out / "foreseen.json", (json.dumps(foreseen, indent=1) + "\n").encode())
        print(f"{foreseen['hash']} {o.out / 'foreseen.json'}")
        return
    waves = list(one.waves(budgets, counts))
    if o.list:
        inputs = one.runner.facts.inputs
        print("\n".join(describe_cell(cell_of_recipe(r, inputs), r) for wave in waves for r in wave))
        return
    complete = True
    for number, wave in enumerate(waves, start=1):
        complete = one.run(f"wave {number} of {len(waves)}", wave) and complete
        if any(read_records(o.out / "store")):
            write_surface_manifest(o.out / "store", preset="log_surface")
            pack_store(o.out / "store", o.out / "records.store.xz")
    print("complete" if complete else "run it again to go on")
    sys.exit(0 if complete else 3)


if __name__ == "__main__":
    main()
