"""The paper's experiment in its own range, in pieces that continue one store.

    python benchmarks/paper_range.py --out out/paper-range --minutes 8                # again until it says 'complete'
    python benchmarks/paper_range.py --out out/tiny --preset tiny --budgets 1e8,2e8,4e8 --cells 4,4,4 --forecast 4e9

Pieces, in this order: `surface` (cells spread over N, share, B and rate at each budget by a Latin hypercube; four of
the last but one budget with three seeds), `axes` (the preset's own one-at-a-time sweeps), `optimizers` (AdamW plain,
AdamW, Muon at that budget, three rates), `forecast` (fit, plan, register; then the registered recipes). Run with
--pieces forecast only after the registered plans are committed. Exits with 3 while something is left.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import qmc

from habitus.errors import ConfigError
from habitus.laws import fit, response_optimum, response_surface
from habitus.planning import PlanOptions, plan, register_plan
from habitus.planning.facts import DatasetProfile
from habitus.planning.shape import FixedSettings, stage1_cell
from habitus.recipe import DataRecipe, EvaluateRecipe, Recipe, TrainRecipe
from habitus.sizing import cell_of_recipe
from habitus.store import ManifestRow, SweepManifest, manifest_path, open_store, pack_store, read_records
from habitus.sweeps import DatasetFacts, Preset, RecipeRunner, design_axis, load_preset, preset_dataset, sweep

PIECES = ("surface", "axes", "optimizers", "forecast")
AXES = ("share", "depth", "allocation", "negatives", "batch")
SHARES, BATCHES, RATES, SIZES = (0.01, 0.6), (0.25, 4.0), (1 / 3, 3.0), (0.2, 5.0)  # ranges; of the usual but for s
SEEDED, SEEDS = 4, 3
MOST_STEPS = 6_000
ADAMW_RATE = 4e-3  # at 512 windows


@dataclass
class Experiment:
    out: Path
    preset: Preset
    minutes: float
    device: str
    workers: int | None
    earlier: Path | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        if self.earlier is not None and not (self.out / "store").exists():
            with open_store(self.earlier) as folder:
                shutil.copytree(folder, self.out / "store")
        self.dataset = preset_dataset(self.preset, self.out / "dataset", threads=os.cpu_count() or 1)
        self.runner, self.long_runner = (
            RecipeRunner(
                self.dataset, self.out / "store", self.preset.evaluate, device=self.device, workers=self.workers,
                compile=compiled, note=print,
            )
            for compiled in (False, None)
        )  # fmt: skip

    def seconds_left(self) -> float:
        return max(0.0, 60 * self.minutes - (time.monotonic() - self.began))

    def recipe(self, cell, budget: float, rate: float, seed: int = 0) -> Recipe:  # type: ignore[no-untyped-def]
        common = self.preset.common
        return Recipe(
            data=DataRecipe(seq_len=self.dataset.seq_len),
            model=cell.model,
            train=TrainRecipe(
                batch_sequences=cell.batch_sequences, steps=cell.steps, optimizer=common.optimizer, learning_rate=rate,
                warmup=common.warmup, weight_decay=common.weight_decay, precision=common.precision, seed=seed,
            ),
            evaluate=EvaluateRecipe(**self.preset.evaluate.to_values(), regimes=("batch", "catalogue")),
        )  # fmt: skip

    def flops(self, recipe: Recipe) -> float:
        return float(cell_of_recipe(recipe, self.runner.facts.inputs).flops)

    def surface(self, budgets: Sequence[float], counts: Sequence[int]) -> bool:
        """Cells spread over N, share, B and rate; at the last but one budget some with several seeds."""
        recipes: list[Recipe] = []
        fixed = FixedSettings(
            DatasetProfile.of(self.dataset), self.preset.common.text_depth, self.preset.common.head_dim,
            self.preset.common.optimizer, self.preset.common.precision,
        )  # fmt: skip
        for budget, count in zip(budgets, counts, strict=True):
            near, size = min(self.preset.allocation.centres, key=lambda row: abs(math.log(row[0] / budget)))
            size *= math.sqrt(budget / near)
            usual = self.preset.batch_sequences(budget)
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
                if cell.steps < self.preset.common.min_steps:
                    continue
                rate = float(f"{r * self.preset.rule_rate(batch, budget):.4g}")
                seeded = budget == budgets[-2] and number < SEEDED
                recipes += [self.recipe(cell, budget, rate, seed) for seed in range(SEEDS if seeded else 1)]
        digests = {recipe.hash(self.dataset.checksum): recipe for recipe in recipes}
        largest = [r for r in digests.values() if self.flops(r) > 0.6 * max(budgets)]
        others = [r for r in digests.values() if self.flops(r) <= 0.6 * max(budgets)]
        complete = self.run("surface", others) and self.run("surface, largest budget", largest, self.long_runner)
        self.print_optima(recipes, budgets)
        return complete

    def print_optima(self, recipes: Sequence[Recipe], budgets: Sequence[float]) -> None:
        """The best size, share, batch and rate of each budget by one surface, and of ten times the largest."""
        records = [self.runner.store.record(recipe.hash(self.dataset.checksum)) for recipe in recipes]
        done = [r for r in records if r is not None and r.status == "done" and r.params and "batch/loss" in r.metrics]
        knobs = {
            "params": [r.params.total for r in done if r.params],
            "share": [r.embedder_share or 0.0 for r in done],
            "batch": [r.recipe.train.batch_sequences for r in done],
            "rate": [r.recipe.train.learning_rate / math.sqrt(r.recipe.train.batch_sequences / 512) for r in done],
        }
        law = response_surface(
            knobs, [r.flops_nominal or 0.0 for r in done], [r.metrics["batch/loss"].value for r in done]
        )
        print(f"surface: {law.status}, {len(done)} runs, RMSE {law.residuals.rmse}; {'; '.join(law.warnings)}")
        for budget in (*budgets, 10 * max(budgets)) if law.ok else ():
            best = response_optimum(law, budget)
            told = {name: (f"{best[name]:.4g}", *(f"{end:.4g}" for end in best.interval(name))) for name in best.values}
            print(f"  {budget:.3g}: {best.status} {told} {'; '.join(best.warnings)}")

    def run(self, label: str, recipes: Sequence[Recipe], runner: RecipeRunner | None = None) -> bool:
        if self.seconds_left() <= 0:
            return False
        distinct = {r.hash(self.dataset.checksum): r for r in recipes}
        records = (runner or self.runner).run(label, list(distinct.values()), self.seconds_left())
        done = sum(record is not None for record in records)
        print(f"{label}: {done} of {len(records)} runs")
        return done == len(records)

    def axes(self, budgets: Sequence[float]) -> bool:
        """The preset's own sweeps, one axis after the other."""
        for axis in AXES:
            if self.seconds_left() <= 0:
                return False
            own = tuple(b for b in self.preset.budgets_of(axis) if b <= max(budgets) * 1.001)
            result = sweep(
                axis, self.dataset, self.out / "store", budgets=own, preset=self.preset, device=self.device,
                workers=self.workers, max_hours=self.seconds_left() / 3600, note=print,
            )  # fmt: skip
            print(f"{axis}: {len(result.runs)} runs, complete: {result.complete}")
            if not result.complete:
                return False
        return True

    def optimizers(self, budget: float) -> bool:
        """The allocation sizes of one budget under three starts, each a group of its own in the laws."""
        facts, recipes = DatasetFacts.of(self.dataset), []
        rows: list[ManifestRow] = []
        for optimizer, init in (("adamw", "plain"), ("adamw", "default"), ("muon", "default")):
            common = self.preset.common.model_copy(update={"optimizer": optimizer})
            if optimizer == "adamw":
                common = common.model_copy(update={"learning_rate": ADAMW_RATE, "learning_rate_exponent": 0.0})
            allocation = self.preset.allocation.model_copy(
                update={"learning_rates": (0.5, 1.0, 2.0), "budgets": (budget,)}
            )
            variant = self.preset.model_copy(update={"common": common, "allocation": allocation})
            for planned in design_axis("allocation", facts, variant).cells:
                model = planned.recipe.model.model_copy(update={"init": init})
                recipe = planned.recipe.model_copy(update={"model": model})
                recipes.append(recipe)
                label = f"{optimizer}-{init}-{planned.row.cell_id}"
                rows.append(
                    planned.row.model_copy(update={"cell_id": label, "recipe_hash": recipe.hash(facts.checksum)})
                )
        path = manifest_path(self.out / "store", "allocation", 90)
        if not path.exists():
            manifest = SweepManifest(
                axis="allocation", preset="paper_range", cells=tuple(rows), request={"piece": "optimizers"}
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest.write(path)
        return self.run("optimizers", recipes)

    def forecast(self, budgets: Sequence[float], metric: str) -> bool:
        """Laws, plans registered beside the store, and their stage 1 with two seeds."""
        laws = self.out / "store" / "laws.json"
        fit(self.out / "store").write(laws)
        recipes = []
        for budget in budgets:
            path = self.out / f"plan-{budget:.0e}.json"
            options = PlanOptions(laws=laws, dataset=self.dataset, stage2_share=0.0)
            made = plan(budget, metric, options)
            if not path.exists():
                print(f"registered {register_plan(made, path).registered_hash[:16]} {path}")
                for p in made.predictions:
                    print(f"  {p.metric}: {p.value:.4g} [{p.low}, {p.high}]")
            recipes += [
                made.stage1.model_copy(update={"train": made.stage1.train.model_copy(update={"seed": seed})})
                for seed in (0, 1)
            ]
        return self.run("forecast", recipes, self.long_runner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="standard")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--budgets", default="1e14,3e14,1e15,3e15")
    parser.add_argument("--cells", default="24,24,32,16")
    parser.add_argument("--forecast", default="1e16,1e17")
    parser.add_argument("--metric", default="batch/loss")
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--earlier", type=Path, help="Records of earlier calls, as they are left in OUT/records.store.xz"
    )
    o = parser.parse_args()
    budgets = [float(b) for b in o.budgets.split(",")]
    one = Experiment(o.out, load_preset(o.preset), o.minutes, o.device, o.workers, o.earlier)
    steps = {
        "surface": lambda: one.surface(budgets, [int(n) for n in o.cells.split(",")]),
        "axes": lambda: one.axes(budgets),
        "optimizers": lambda: one.optimizers(budgets[-2]),
        "forecast": lambda: one.forecast([float(b) for b in o.forecast.split(",")], o.metric),
    }
    complete = all(steps[piece]() for piece in o.pieces.split(","))
    if any(True for _ in read_records(o.out / "store")):
        pack_store(o.out / "store", o.out / "records.store.xz")
    print(
        f"{sum(1 for _ in read_records(o.out / 'store'))} Records;", "complete" if complete else "run it again to go on"
    )
    sys.exit(0 if complete else 3)


if __name__ == "__main__":
    main()
