"""Each axis of the paper by itself, at the learning rates that a law of earlier runs gives each size; in pieces.

    python benchmarks/paper_axes.py --data DATASET --out OUT --minutes 20 --workers 6 batch share,depth init
    python benchmarks/paper_axes.py --data DATASET --out OUT --minutes 20 allocation:5.5e14,1.3e15 negatives:5.5e14

A piece is one axis or several, with budgets after a colon, else the preset's; what is done is not run again, and two
calls may work on one store. Cells of share, depth and allocation have the rate that the law of `--rates-of` (Records
of a surface, docs/studies/paper-range) gives their embedder and contextualizer, since one rate for a budget would be
out of tune at both ends of the sizes. `negatives` continue the best size of each budget by `batch/loss`. Exits with 3
while something is left.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from packing import Packer
from paper_plan import SurfaceData, surface_records

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.laws.recipe_surface import recipe_rate
from habitus.store import Law, open_store, pack_store, read_records
from habitus.sweeps import DatasetFacts, Preset, RecipeRunner, design_axis, load_preset, sweep
from habitus.sweeps.cells import Design, PlannedRun
from habitus.sweeps.manifest import load_manifests, write_manifest
from habitus.sweeps.prior_results import LOSS
from habitus.sweeps.request import SweepRequest

PRESET = Path(__file__).with_name("paper_axes.toml")
TUNED = ("share", "depth", "allocation")


class Axes:
    """The axes of one store."""

    def __init__(self, o: argparse.Namespace) -> None:
        self.began, self.minutes = time.monotonic(), o.minutes
        self.dataset, self.path = Dataset.open(o.data, verify=False), o.out / "store"
        self.preset = fewer_cells(load_preset(o.preset), o.shapes, o.negatives).for_catalogue(
            self.dataset.num_candidates
        )
        self.facts = DatasetFacts.of(self.dataset)
        self.rates_of, self.device, self.workers = o.rates_of, o.device, o.workers
        packer = None if o.pack is None else Packer(self.path, o.pack)
        self.runner = RecipeRunner(self.dataset, self.path, self.preset.evaluate, device=o.device, workers=o.workers,
                                   progress=packer, note=print)  # fmt: skip

    def seconds_left(self) -> float:
        return max(0.0, 60 * self.minutes - (time.monotonic() - self.began))

    @cached_property
    def law(self) -> Law:
        with open_store(self.rates_of) as folder:
            return SurfaceData(surface_records(read_records(folder))).law()

    def run(self, axes: Sequence[str], budgets: Sequence[float]) -> bool:
        """Whether the axes are complete."""
        if "batch" in axes:  # which goes on until targets are reached
            result = sweep("batch", self.dataset, self.path, budgets=budgets, preset=self.preset, device=self.device,
                           workers=self.workers, max_hours=max(1.0, self.seconds_left()) / 3600,
                           note=print)  # fmt: skip
            return result.complete and self.run([a for a in axes if a != "batch"], budgets)
        designs = [self.design(axis, budgets) for axis in axes]
        recipes = [planned.recipe for design in designs for planned in design.cells]
        records = self.runner.run("+".join(axes), recipes, self.seconds_left()) if recipes else []
        done = sum(record is not None for record in records)
        print(f"{'+'.join(axes)}: {done} of {len(records)} runs, {self.minutes * 60 - self.seconds_left():.0f} s")
        return done == len(records)

    def design(self, axis: str, budgets: Sequence[float]) -> Design:
        """The cells of an axis at some budgets, as a manifest has them, or a new one."""
        wanted = set(budgets or self.preset.budgets_of(axis))
        runs: list[PlannedRun] = []
        for file in load_manifests(self.path, axis):
            runs += file.design(self.runner.store, self.facts, wanted & file.manifest.budgets()).cells
            wanted -= file.manifest.budgets()
        if wanted:
            winners = {b: self.winner(b) for b in wanted} if axis == "negatives" else {}
            request = SweepRequest(tuple(sorted(wanted)))
            made = design_axis(axis, self.facts, self.preset, request=request, winners=winners)
            if axis in TUNED:
                made = replace(made, cells=tuple(map(self.tuned, made.cells)))
            for out in made.left_out:
                print(f"{axis}: left out: {out.wanted} at {out.flops_budget:.1e}: {out.reason}")
            write_manifest(self.runner.store, made, self.preset, {"piece": axis, "budgets": sorted(wanted)})
            runs += made.cells
        return Design(axis, tuple(runs))

    def add_seeds(self, axis: str, count: int) -> None:
        """Every cell of an axis with so many seeds, in the manifests that have it."""
        for file in load_manifests(self.path, axis):
            cells = file.design(self.runner.store, self.facts, file.manifest.budgets()).cells
            wanted = [p.with_seed(seed, self.facts) for p in cells if p.row.seed == 0 for seed in range(count)]
            known = {p.hash for p in cells}
            added = {p.hash: p for p in wanted if p.hash not in known}
            for planned in added.values():
                self.runner.store.add(planned.hash, planned.recipe)
            file.extend(added.values())

    def tuned(self, planned: PlannedRun) -> PlannedRun:
        """The run at the rate that the law gives its size."""
        cell = planned.cell
        rate = recipe_rate(self.law, cell.embedder_params, cell.contextualizer_params)
        rate *= math.sqrt(cell.batch_sequences / 512)
        return planned.with_learning_rate(float(f"{rate:.4g}"), self.facts)

    def winner(self, budget: float) -> PlannedRun:
        """The best size of a budget among the runs that are done."""
        runs = self.design("allocation", [budget]).cells
        losses = {p.hash: r.metrics[LOSS].value for p in runs for r in [self.runner.store.record(p.hash)]
                  if r is not None and r.status == "done"}  # fmt: skip
        if not losses:
            raise ConfigError(f"no size at {budget:.2g} FLOPs is trained", expected="runs that stage 2 can continue",
                              next_step=f"run allocation:{budget:.2g} first")  # fmt: skip
        return min((p for p in runs if p.hash in losses), key=lambda p: losses[p.hash])


def fewer_cells(preset: Preset, shapes: int | None, negatives: str) -> Preset:
    """The preset with so many sizes per budget, and these K once each."""
    if shapes is not None:
        preset = preset.model_copy(
            update={"allocation": preset.allocation.model_copy(update={"num_shapes": shapes, "replicates": 1})}
        )
    if negatives:
        counts = tuple(int(count) for count in negatives.split(","))
        update = {"num_negatives": counts, "replicates": 1}
        preset = preset.model_copy(update={"negatives": preset.negatives.model_copy(update=update)})
    return preset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="+", help="share,depth or allocation:1e14,3e14: axes, and budgets.")
    parser.add_argument("--data", type=Path, required=True, help="A prepared dataset.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default=str(PRESET))
    parser.add_argument("--rates-of", type=Path, default=Path("docs/studies/paper-range/runs.store.xz"))
    parser.add_argument("--shapes", type=int, help="Sizes per budget; else the preset's.")
    parser.add_argument("--negatives", default="", help="K, as in 0,16384,1000000; else the preset's, with its seeds.")
    parser.add_argument("--earlier", type=Path, help="Packed runs of an earlier call, which are not run again.")
    parser.add_argument("--seeds", type=int, default=1, help="Of every cell of axes that have been designed.")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--pack", type=Path, help="Leave all Records of the store there, once a minute and at the end.")
    o = parser.parse_args()
    if o.earlier is not None and not (o.out / "store").exists():
        with open_store(o.earlier) as folder:
            shutil.copytree(folder, o.out / "store")
    one, complete = Axes(o), True
    for piece in o.pieces:
        axes, _, budgets = piece.partition(":")
        for axis in axes.split(",") if o.seeds > 1 else ():
            one.add_seeds(axis, o.seeds)
        complete &= one.run(axes.split(","), [float(b) for b in budgets.split(",") if b])
    if o.pack:
        pack_store(one.path, o.pack)
    print("complete" if complete else "run it again to go on")
    sys.exit(0 if complete else 3)


if __name__ == "__main__":
    main()
