"""The paper's experiment in its own range, in pieces that continue one store.

    python benchmarks/paper_range.py --out out/paper-range --pieces surface --minutes 8    # again until it is complete
    python benchmarks/paper_range.py --out out/foresee --pieces foresee --earlier out/paper-range/records.store.xz
    python benchmarks/paper_range.py --out out/register --pieces register --earlier out/paper-range/records.store.xz
    python benchmarks/paper_range.py --out out/paper-range --pieces forecast --plans out/register
    python benchmarks/paper_range.py --out out/paper-range --pieces negatives,depth,init,batch
    python benchmarks/paper_range.py --out out/log --pieces surface --data DATASET --budgets 1e11,1e12,3e12,1e13

`surface`: cells spread over N, share, B and rate at each budget by a Latin hypercube; four of the last but one budget
with three seeds. `foresee`: what the law of the Records below the last budget says of its cells. `register`: the law
of these cells, and plans for larger budgets, with their hashes, beside OUT. Both need Records only, no dataset. Commit
what they write, then `forecast` runs the plans' recipes, the largest first, the first budget's with two seeds. Every
other piece is one axis of the paper by itself. Exits with 3 while something is left.
`--preset tiny --budgets 1e8,2e8,4e8 --cells 10,10,10 --forecast 4e9,4e10` does it all on a CPU in a minute.
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from packing import Packer
from paper_plan import (
    FOLLOWING,
    LOSS,
    SurfaceData,
    foresee_cells,
    planned_recipe,
    profile_of,
    register_forecasts,
    surface_records,
)
from scipy.stats import qmc
from surface_manifest import write_surface_manifest

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.files import write_atomic
from habitus.planning import check_plan
from habitus.planning.facts import DatasetProfile
from habitus.planning.shape import FixedSettings, stage1_cell
from habitus.recipe import DataRecipe, EvaluateRecipe, Recipe, TrainRecipe
from habitus.sizing import Cell, cell_of_recipe
from habitus.store import (
    RegisteredPlan,
    open_store,
    pack_store,
    read_records,
)
from habitus.sweeps import Preset, RecipeRunner, load_preset, preset_dataset, sweep

PRESET = Path(__file__).parents[1] / "docs" / "studies" / "paper-range" / "preset.toml"
AXES = ("negatives", "depth", "init", "batch", "share", "allocation")
SHARES, BATCHES, RATES, SIZES = (0.01, 0.6), (0.25, 4.0), (1 / 3, 3.0), (0.2, 5.0)  # ranges; of the usual but for s
SEEDED, SEEDS = 4, 3
MOST_STEPS = 6_000
NEGATIVES = (0, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_000_000)


@dataclass
class Experiment:
    out: Path
    preset: Preset
    minutes: float
    device: str
    workers: int | None
    earlier: Path | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        if self.earlier is not None and not (self.out / "store").exists():
            with open_store(self.earlier) as folder:
                shutil.copytree(folder, self.out / "store")

    @cached_property
    def dataset(self) -> Dataset:
        if self.data is not None:
            return Dataset.open(self.data)
        return preset_dataset(self.preset, self.out / "dataset", threads=os.cpu_count() or 1)

    @cached_property
    def packer(self) -> Packer:
        return Packer(self.out / "store", self.out / "records.store.xz")

    @cached_property
    def runner(self) -> RecipeRunner:
        return self.make_runner(compiled=False)

    @cached_property
    def long_runner(self) -> RecipeRunner:
        return self.make_runner(compiled=None)

    def make_runner(self, compiled: bool | None) -> RecipeRunner:
        evaluation = self.preset.for_catalogue(self.dataset.num_candidates).evaluate
        return RecipeRunner(self.dataset, self.out / "store", evaluation, device=self.device, workers=self.workers,
                            compile=compiled, progress=self.packer, note=print)  # fmt: skip

    @cached_property
    def fixed(self) -> FixedSettings:
        common = self.preset.common
        return FixedSettings(
            DatasetProfile.of(self.dataset), common.text_depth, common.head_dim, common.optimizer, common.precision
        )

    def seconds_left(self) -> float:
        return max(0.0, 60 * self.minutes - (time.monotonic() - self.began))

    def recipe(self, cell: Cell, rate: float, seed: int = 0) -> Recipe:
        common = self.preset.common
        return Recipe(
            data=DataRecipe(seq_len=self.dataset.seq_len),
            model=cell.model,
            train=TrainRecipe(
                batch_sequences=cell.batch_sequences, steps=cell.steps, optimizer=common.optimizer, learning_rate=rate,
                warmup=common.warmup, weight_decay=common.weight_decay, precision=common.precision, seed=seed,
            ),
            evaluate=EvaluateRecipe(**self.runner.evaluation.to_values(), regimes=("batch", "catalogue")),
        )  # fmt: skip

    def flops(self, recipe: Recipe) -> float:
        return float(cell_of_recipe(recipe, self.runner.facts.inputs).flops)

    def surface(self, budgets: Sequence[float], counts: Sequence[int]) -> bool:
        """Cells spread over N, share, B and rate; at the last but one budget some with several seeds."""
        recipes: list[Recipe] = []
        beyond = 0
        for budget, count in zip(budgets, counts, strict=True):
            for number, cell, rate in surface_cells(self.preset, self.fixed, budget, count):
                if self.data is not None and self.runner.facts.epochs(cell.batch_sequences, cell.steps) > 1.001:
                    beyond += 1
                    continue
                seeded = budget == budgets[-2] and number < SEEDED
                recipes += [self.recipe(cell, rate, seed) for seed in range(SEEDS if seeded else 1)]
        if beyond:
            print(f"{beyond} cells would pass over the log more than once: not run")
        distinct = {recipe.hash(self.dataset.checksum): recipe for recipe in recipes}
        largest = [r for r in distinct.values() if self.flops(r) > 0.6 * max(budgets)]
        others = [r for r in distinct.values() if self.flops(r) <= 0.6 * max(budgets)]
        return self.run("surface", others) and self.run("surface, largest budget", largest, self.long_runner)

    def foresee(self, budget: float, count: int) -> bool:
        """What the law of the Records below a budget says of its cells, before they run: OUT/foreseen-BUDGET.json."""
        data = SurfaceData(surface_records(read_records(self.out / "store"))).below(budget)
        profile, like = profile_of(data.records, self.preset), data.records[0].recipe
        common = self.preset.common
        fixed = FixedSettings(profile, common.text_depth, common.head_dim, common.optimizer, common.precision)
        found = [
            (cell, planned_recipe(cell, rate, like, common.warmup))
            for _, cell, rate in surface_cells(self.preset, fixed, budget, count)
        ]
        foreseen = foresee_cells(data, found, budget, str(profile.dataset_checksum), (LOSS, *FOLLOWING))
        path = self.out / f"foreseen-{budget:.0e}.json".replace("+", "")
        write_atomic(path, (json.dumps(foreseen, indent=1) + "\n").encode())
        print(f"{foreseen['hash']} {path}")
        return True

    def run(self, label: str, recipes: Sequence[Recipe], runner: RecipeRunner | None = None) -> bool:
        if self.seconds_left() <= 0:
            return False
        distinct = {r.hash(self.dataset.checksum): r for r in recipes}
        records = (runner or self.runner).run(label, list(distinct.values()), self.seconds_left())
        done = sum(record is not None for record in records)
        print(f"{label}: {done} of {len(records)} runs")
        return done == len(records)

    def axis(self, name: str, budgets: Sequence[float], share: float | None) -> bool:
        """One of the paper's axes by itself, around the usual size: at the last but one budget, stage 2 at three."""
        if self.seconds_left() <= 0:
            return False
        at = budgets[-2]
        preset = self.reduced_preset(at, share)
        own = tuple(budgets[:-1]) if name == "negatives" else (at,)
        if name in ("share", "allocation"):
            own = tuple(budgets)
        result = sweep(
            name, self.dataset, self.out / "store", budgets=own, preset=preset, device=self.device,
            workers=self.workers, max_hours=self.seconds_left() / 3600, note=print,
        )  # fmt: skip
        print(f"{name}: {len(result.runs)} runs, complete: {result.complete}")
        return result.complete

    def reduced_preset(self, at: float, share: float | None) -> Preset:
        """The preset with fewer cells per axis, around the usual model of a budget and a share."""
        preset = self.preset
        common = preset.common if share is None else preset.common.model_copy(update={"share": share})
        cell = stage1_cell(at, usual_size(self.preset, at), common.share, preset.batch_sequences(at), self.fixed)
        model, usual = cell.model, preset.batch_sequences(at)
        row = preset.depth.rows[0].model_copy(update={"budget": at, "joint_dim": model.joint_dim, "width": model.width})
        count = min(self.dataset.num_candidates, NEGATIVES[-1])
        size = preset.init.sizes[0].model_copy(update={"budget": at, "width": model.width, "depth": model.depth})
        changed = {
            "common": common,
            "negatives": {"num_negatives": tuple(dict.fromkeys(min(k, count) for k in NEGATIVES)),
                          "batch_sequences": 2 * preset.negatives.batch_sequences, "learning_rates": (1.0,),
                          "min_steps": min(100, preset.negatives.min_steps)},
            "depth": {"rows": (row,), "learning_rates": (1.0,)},
            "batch": {"batch_sequences": tuple(max(1, usual * m // 8) for m in (1, 2, 4, 8, 16)),
                      "pool_sequences": max(1, usual // 8), "evaluations": 20, "max_multiple": 2.0},
            "init": {"inits": ("default", "mup_lr"), "sizes": (size,)},
            "allocation": {"learning_rates": (1.0,), "replicates": 2, "top_rates": ()},
        }  # fmt: skip
        return preset.model_copy(
            update={n: c if n == "common" else getattr(preset, n).model_copy(update=c) for n, c in changed.items()}
        )

    def register(self, budgets: Sequence[float], metric: str) -> bool:
        """Plans for larger budgets from the Records alone: at the first three sizes, then the best one."""
        records = [r for r in read_records(self.out / "store") if r.status == "done"]
        for path, plan in register_forecasts(records, self.preset, budgets, self.out, metric):
            print(f"registered {plan.registered_hash[:16]} {path}")
            for p in plan.predictions:
                print(f"  {p.metric}: {p.value:.4g} [{p.low:.4g}, {p.high:.4g}]")
        return True

    def forecast(self, plans: Path, seeds: int) -> bool:
        """The recipes of the registered plans, the largest first; those of the first budget with several seeds."""
        registered = {path: RegisteredPlan.read(path) for path in sorted(plans.glob("plan-*.json"))}
        if not registered:
            raise ConfigError(f"{plans} has no plan-*.json", expected="plans that --pieces register wrote")
        first = min(plan.flops for plan in registered.values())
        recipes = []
        for plan in sorted(registered.values(), key=lambda plan: -plan.flops):
            train = plan.stage1.train
            for seed in range(seeds if plan.flops == first else 1):
                recipes.append(plan.stage1.model_copy(update={"train": train.model_copy(update={"seed": seed})}))
        complete = self.run("forecast", recipes, self.long_runner)
        for path, plan in registered.items():
            folder = self.long_runner.store.cell(plan.stage1.hash(self.dataset.checksum))
            if (folder / "record.json").exists():
                check = check_plan(folder, path)
                print(f"{path.name} {check.hash[:12]}: {'; '.join(check.notes) or 'as registered'}")
                for c in check.comparisons:
                    print(
                        f"  {c.name}: {c.measured} predicted {c.predicted:.4g} [{c.low}, {c.high}] inside: {c.inside}"
                    )
        return complete


def usual_size(preset: Preset, budget: float) -> float:
    near, size = min(preset.allocation.centres, key=lambda row: abs(math.log(row[0] / budget)))
    return size * math.sqrt(budget / near)


def surface_cells(preset: Preset, fixed: FixedSettings, budget: float, count: int) -> Iterator[tuple[int, Cell, float]]:
    """The cells of a budget with their numbers and rates: those that can be built and make enough steps."""
    size, usual = usual_size(preset, budget), preset.batch_sequences(budget)
    points = qmc.LatinHypercube(4, seed=int(math.log10(budget) * 10)).random(count)
    for number, point in enumerate(points):
        n, s, b, r = (float(np.exp(np.interp(u, [0, 1], np.log(ends)))) for u, ends in
                      zip(point, (SIZES, SHARES, BATCHES, RATES), strict=True))  # fmt: skip
        batch = max(1, 2 ** round(math.log2(usual * b)))
        try:
            cell = stage1_cell(budget, n * size, s, batch, fixed)
        except ConfigError:
            continue  # no model of that size and share fits the budget
        while cell.steps > MOST_STEPS:  # a chip that runs ten cells at once makes some 350 steps/s in all
            batch *= 2
            cell = stage1_cell(budget, n * size, s, batch, fixed)
        if cell.steps >= preset.common.min_steps:
            yield number, cell, float(f"{r * preset.rule_rate(batch, budget):.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default=str(PRESET), help="The one that the runs so far were designed by.")
    parser.add_argument("--data", type=Path, help="A prepared dataset, instead of the preset's world.")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--budgets", default="1e14,3e14,1e15,3e15")
    parser.add_argument("--cells", default="24,24,32,16")
    parser.add_argument("--share", type=float, help="Of the embedder, on the axes; else the preset's.")
    parser.add_argument("--forecast", default="1e16,1e17")
    parser.add_argument("--plans", type=Path, default=Path("docs/studies/paper-range"), help="Of --pieces forecast.")
    parser.add_argument("--seeds", type=int, default=2, help="Of the first forecast budget.")
    parser.add_argument("--metric", default="batch/loss")
    parser.add_argument("--pieces", default="surface", help=f"surface, foresee, register, forecast, {', '.join(AXES)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--earlier", type=Path, help="Records of earlier calls, as they are left in OUT/records.store.xz"
    )
    o = parser.parse_args()
    budgets = [float(b) for b in o.budgets.split(",")]
    one = Experiment(o.out, load_preset(o.preset), o.minutes, o.device, o.workers, o.earlier, o.data)
    steps = {
        "surface": lambda: one.surface(budgets, [int(n) for n in o.cells.split(",")]),
        "foresee": lambda: one.foresee(budgets[-1], int(o.cells.split(",")[-1])),
        "register": lambda: one.register([float(b) for b in o.forecast.split(",")], o.metric),
        "forecast": lambda: one.forecast(o.plans, o.seeds),
        **{name: lambda name=name: one.axis(name, budgets, o.share) for name in AXES},
    }
    complete = all(steps[piece]() for piece in o.pieces.split(","))
    count = sum(1 for _ in read_records(o.out / "store"))
    if count:
        write_surface_manifest(o.out / "store")
        pack_store(o.out / "store", o.out / "records.store.xz")
    print(f"{count} Records;", "complete" if complete else "run it again to go on")
    sys.exit(0 if complete else 3)


if __name__ == "__main__":
    main()
