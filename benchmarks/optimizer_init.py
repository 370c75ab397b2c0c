"""Do the optimizer and the start of the weights move the best size? Sizes × learning rates under each pair of them.

    python benchmarks/optimizer_init.py --data DATASET --preset benchmarks/log_axes.toml --budgets 2.2e11,5e11 --out OUT
    python benchmarks/optimizer_init.py --preset benchmarks/paper_axes.toml --budgets 1e15 --out OUT \
        --ladder 112x3,144x3,176x3,224x3,288x3 --rates-of docs/studies/paper-range/runs.store.xz    # a GPU

The sizes are those of the allocation axis. Each size of each pair has three rates, half, once and twice the pair's
usual one, and rates are added until the best one has a neighbour on both sides; then it gets more seeds. The usual one
is a share of Muon's, which is the preset's or what the law of `--rates-of` (Records of a surface) gives the size. All
runs are cells of the allocation axis in OUT/store, where `habitus fit` fits each pair apart, and are packed into
OUT/runs.store.xz once a minute; `--earlier` goes on from such a file. Calls with other `--pairs`, each with sizes of
its own, may work on one store at a time. Exits with 3 while more is left.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packing import Packer
from paper_plan import SurfaceData, surface_records

from habitus.data import Dataset
from habitus.laws.recipe_surface import recipe_rate
from habitus.recipe import Recipe
from habitus.store import Law, ManifestRow, SweepManifest, manifest_path, open_store, read_records
from habitus.sweeps import Preset, RecipeRunner, design_axis, load_preset, preset_dataset

PAIRS = {"muon/default": 1.0, "adamw/default": 0.8, "adamw/plain": 0.15}  # rates, of Muon's
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


def size_cells(
    runner: RecipeRunner, preset: Preset, budget: float, law: Law | None, pairs: Sequence[str]
) -> list[SizeCell]:
    """The sizes of the allocation axis at a budget, under each optimizer and start."""
    cells = []
    for pair in pairs:
        optimizer, _, init = pair.partition("/")
        of_muon = PAIRS[pair]
        rate = of_muon * preset.common.learning_rate
        common = preset.common.model_copy(update={"optimizer": optimizer, "learning_rate": rate})
        allocation = preset.allocation.model_copy(
            update={"learning_rates": (1.0,), "top_rates": (), "budgets": (budget,), "replicates": 1}
        )
        variant = preset.model_copy(update={"common": common, "allocation": allocation})
        for planned in design_axis("allocation", runner.facts, variant).cells:
            if law is not None:
                cell = planned.cell
                rate = of_muon * recipe_rate(law, cell.embedder_params, cell.contextualizer_params)
                rate *= math.sqrt(cell.batch_sequences / 512)
                planned = planned.with_learning_rate(float(f"{rate:.4g}"), runner.facts)
            model = planned.recipe.model.model_copy(update={"init": init})
            row = planned.row.model_copy(update={"cell_id": f"{optimizer}-{init}-{planned.row.cell_id}"})
            cells.append(SizeCell(planned.recipe.model_copy(update={"model": model}), row))
    return cells


def run_cells(
    runner: RecipeRunner, cells: Sequence[SizeCell], seeds: int, end: float, save: Callable[[list[ManifestRow]], None]
) -> list[ManifestRow]:
    """Run rates until each cell's best is inside its grid, then that one's seeds; the rows of all runs that ended.

    `save` is given those so far whenever some ended.
    """
    ran: list[tuple[SizeCell, int, int]] = []
    while wanted := [(cell, power) for cell in cells for power in cell.wanted()]:
        records = runner.run("rates", [cell.at(power) for cell, power in wanted], end - time.monotonic())
        for (cell, power), record in zip(wanted, records, strict=True):
            if record is not None:
                loss = None if record.train is None else record.train.loss
                cell.losses[power] = math.inf if record.status != "done" or loss is None else loss
        ran = [(cell, power, 0) for cell in cells for power in sorted(cell.losses)]
        save(manifest_rows(runner, ran))
        if None in records:
            break
    repeats = [(cell, cell.best, seed) for cell in cells if cell.losses for seed in range(1, seeds)]
    records = runner.run("seeds", [cell.at(*rest) for cell, *rest in repeats], end - time.monotonic())
    rows = manifest_rows(
        runner, ran + [one for one, record in zip(repeats, records, strict=True) if record is not None]
    )
    save(rows)
    return rows


def manifest_rows(runner: RecipeRunner, ran: Sequence[tuple[SizeCell, int, int]]) -> list[ManifestRow]:
    """The rows of runs: a cell, the power of its rate, the seed."""
    rows = []
    for cell, power, seed in ran:
        recipe = cell.at(power, seed)
        update = {
            "learning_rate": recipe.train.learning_rate,
            "seed": seed,
            "recipe_hash": recipe.hash(runner.dataset.checksum),
        }
        rows.append(cell.row.model_copy(update=update))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", required=True, help="Sizes, share, batch and Muon's rate are its own.")
    parser.add_argument("--earlier", type=Path, help="Packed runs of an earlier call, which are not run again.")
    parser.add_argument("--data", type=Path, help="A prepared dataset, instead of the preset's world.")
    parser.add_argument("--budgets", required=True, help="FLOPs, as in 2.2e11,5e11.")
    parser.add_argument("--shapes", type=int, default=7, help="Sizes per budget.")
    parser.add_argument("--ladder", help="Widths and depths, as in 112x3,144x3; all of them are run.")
    parser.add_argument("--rates-of", type=Path, help="Records whose law gives Muon's rate for each size.")
    parser.add_argument("--share", type=float, help="Of the embedder; else the preset's.")
    parser.add_argument(
        "--pairs", default=",".join(PAIRS), help="Optimizers and starts, as in adamw/plain,muon/default."
    )
    parser.add_argument("--seeds", type=int, default=2, help="Of each size's best rate.")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    o = parser.parse_args()
    end = time.monotonic() + 60 * o.minutes
    pairs = o.pairs.split(",")
    if unknown := [pair for pair in pairs if pair not in PAIRS]:
        parser.error(f"--pairs: {unknown[0]} is none of {', '.join(PAIRS)}")
    preset = load_preset(o.preset)
    dataset = Dataset.open(o.data, verify=False) if o.data else preset_dataset(preset, o.out / "dataset")
    preset = preset.for_catalogue(dataset.num_candidates)
    common = preset.common if o.share is None else preset.common.model_copy(update={"share": o.share})
    allocation = preset.allocation.model_copy(update={"num_shapes": o.shapes})
    if o.ladder:
        ladder = tuple(tuple(map(int, shape.split("x"))) for shape in o.ladder.split(","))
        allocation = allocation.model_copy(update={"ladder": ladder, "num_shapes": len(ladder)})
    law = None
    if o.rates_of:
        with open_store(o.rates_of) as folder:
            law = SurfaceData(surface_records(read_records(folder))).law()
    preset = preset.model_copy(update={"common": common, "allocation": allocation})
    if o.earlier is not None and not (o.out / "store").exists():
        with open_store(o.earlier) as folder:
            shutil.copytree(folder, o.out / "store")
    packer = Packer(o.out / "store", o.out / "runs.store.xz")
    runner = RecipeRunner(
        dataset, o.out / "store", preset.evaluate, device=o.device, workers=o.workers, progress=packer, note=print
    )
    sized = [cell for budget in o.budgets.split(",") for cell in size_cells(runner, preset, float(budget), law, pairs)]

    def save(rows: list[ManifestRow]) -> None:
        """The runs of all rounds so far as one axis."""
        if rows:
            path = manifest_path(o.out / "store", "allocation", 90 + list(PAIRS).index(pairs[0]))  # calls may share it
            new = {row.recipe_hash for row in rows}
            old = SweepManifest.read(path).cells if path.exists() else ()  # of other sizes, say
            cells = (*(row for row in old if row.recipe_hash not in new), *rows)
            manifest = SweepManifest(
                axis="allocation", preset=preset.name, cells=cells, request={"benchmark": "optimizer_init"}
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.write(path)
            packer.pack()

    rows = run_cells(runner, sized, o.seeds, end, save)
    for cell in sized:
        losses = " ".join(f"{2.0**power:g}×:{loss:.4f}" for power, loss in sorted(cell.losses.items()))
        print(f"{cell.row.flops_budget:.2g} {cell.row.cell_id}: {losses}")
    complete = all(not cell.wanted() for cell in sized) and len(rows) >= sum(
        len(cell.losses) + o.seeds - 1 for cell in sized
    )
    print(f"{len(rows)} runs;", "complete" if complete else "run it again to go on")
    sys.exit(0 if complete else 3)


if __name__ == "__main__":
    main()
