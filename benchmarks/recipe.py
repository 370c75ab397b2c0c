"""Which recipe leaves the popularity plateau: starts, gains, warm-ups, rates and optimizers at equal compute.

    python benchmarks/recipe.py compare --out recipe-cpu.json                  # minutes on one core, 2,000 items
    python benchmarks/recipe.py lines   --out lines-cpu.json                   # an iso-FLOP line of the default recipe
    python benchmarks/recipe.py lines   --size h200 --seconds 360 --out ...    # 3e13, 3e14, 1e15; N = 0.1M…8M
    python benchmarks/recipe.py compare --size h200 --seconds 360 --out ...
    python benchmarks/recipe.py rates   --size h200 --seconds 90 --workers 4 --out ...    # which rate, before the rest

`lines` trains one recipe over sizes at fixed budgets and asks: is the loss smooth in N, is its minimum inside, does a
quadratic in log N fit, is any size still on the plateau? `compare` changes one thing at a time at the same budgets and
states how much more compute the plain truncated-normal recipe needs for the loss of the default.

Runs already in --out are not run again. Cells run --workers at a time, each on one CPU thread or sharing the GPU; when
--seconds are over, what is still running is dropped. The last line is JSON.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1  # of the rows in --out
FOLD = 5.0  # cells within this factor of the best size enter the quadratic
RESIDUAL = 0.03  # nats
MIN_STEPS = 200
# A size has left the plateau when it has made at least this share of the way from popularity to the line's best.
LEFT = 0.25


@dataclass(frozen=True)
class Size:
    """A world and the cells on it."""

    items: int
    users: int
    seq_len: int
    text_len: int
    text_depth: int
    vocabulary: int
    queries: int
    eval_sequences: int
    budgets: tuple[float, ...]
    compare_at: tuple[float, ...]  # budgets of `compare`; the plain recipe goes further up
    shapes: tuple[tuple[int, int], ...]  # (width, depth)
    compare_shape: tuple[int, int]
    joint_dim: int | None  # None: by share
    device: str
    precision: str
    batches: int | dict[float, int]  # windows per step, by budget; the ladder's where a budget is not named
    compile_from: float  # budgets at which steps are compiled: one core does that while others train
    base_rate: float  # learning rate at 512 windows per step; the rule is base_rate·√(B/512)
    rate_cells: tuple[tuple[float, int, int], ...]  # of `rates`: (budget, width, depth)


SIZES = {
    "cpu": Size(
        items=2_000, users=60_000, seq_len=64, text_len=12, text_depth=2, vocabulary=1_024, queries=10_000,
        eval_sequences=64, budgets=(1e12,), compare_at=(1e11, 3e11),
        shapes=((16, 1), (32, 1), (48, 2), (80, 2), (128, 3), (192, 4)), compare_shape=(32, 1),
        joint_dim=16, device="cpu", precision="fp32", batches=16, compile_from=math.inf, base_rate=5.6e-2,
        rate_cells=((1e11, 32, 1), (1e11, 64, 2), (3e11, 32, 1), (3e11, 96, 2)),
    ),
    "h200": Size(
        items=100_000, users=1_000_000, seq_len=256, text_len=24, text_depth=4, vocabulary=8_192, queries=10_000,
        eval_sequences=64, budgets=(3e13, 3e14, 1e15), compare_at=(3e13, 1e14, 3e14),
        shapes=((32, 1), (32, 2), (48, 2), (64, 4), (96, 4), (128, 5), (192, 4), (224, 5), (256, 6), (320, 6)),
        compare_shape=(192, 4), joint_dim=32, device="cuda", precision="bf16", batches={3e13: 8, 3e14: 32, 1e15: 64},
        compile_from=1e16, base_rate=2e-2,
        rate_cells=((3e13, 64, 4), (3e13, 192, 4), (3e14, 320, 6)),
    ),
}  # fmt: skip
SHARE = 0.02


@dataclass(frozen=True)
class Variant:
    """What `compare` changes."""

    name: str = "default"
    start: str = "ours"  # "apart": the output matrix is drawn by itself
    # "plain": truncated normal of 0.02 everywhere, no normalised vectors, gain 1
    gain: float | None = None  # the model's own where None
    optimizer: str = "muon"
    warmup: float = 0.05
    rate: float = 1.0  # times the size's rule
    seed: int = 0


DEFAULT = Variant()
PLAIN = Variant("plain start, AdamW", start="plain", optimizer="adamw")
VARIANTS = (
    DEFAULT,
    replace(DEFAULT, name="gain 0.3", gain=0.3),
    replace(DEFAULT, name="gain 1", gain=1.0),
    replace(DEFAULT, name="way out drawn by itself", start="apart"),
    replace(DEFAULT, name="warm-up 2%", warmup=0.02),
    replace(DEFAULT, name="warm-up 10%", warmup=0.1),
    replace(DEFAULT, name="rate / 2", rate=0.5),
    replace(DEFAULT, name="rate x 2", rate=2.0),
    replace(DEFAULT, name="rate x 4", rate=4.0),
    replace(DEFAULT, name="AdamW", optimizer="adamw"),
    replace(DEFAULT, name="AdamW, rate / 2", optimizer="adamw", rate=0.5),
    replace(DEFAULT, name="AdamW, rate x 2", optimizer="adamw", rate=2.0),
    replace(DEFAULT, name="plain start, Muon", start="plain"),
    PLAIN,
    replace(PLAIN, name="plain start, AdamW, rate / 2", rate=0.5),
    replace(PLAIN, name="plain start, AdamW, rate x 2", rate=2.0),
)
OWN_RATES = (DEFAULT.name, "rate / 2", "rate x 2", "rate x 4")  # of the default recipe
PLAIN_NAMES = tuple(v.name for v in VARIANTS if v.start == "plain" and v.optimizer == "adamw")
PLAIN_FURTHER = (2.0, 4.0)  # times the largest budget of `compare`, at the best of its rates


@dataclass(frozen=True)
class Cell:
    """One run: a shape at a budget under a variant."""

    size: str
    budget: float
    width: int
    depth: int
    variant: Variant
    share: float | None = None  # of the embedder; None: as the size says

    def key(self) -> str:
        values = asdict(self)
        if self.share is None:
            del values["share"]
        return json.dumps([VERSION, values], sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lines", "compare", "rates"])
    parser.add_argument("--size", choices=list(SIZES), default="cpu")
    parser.add_argument("--lines", type=float, nargs="+", help="budgets, instead of the size's own")
    parser.add_argument("--shapes", nargs="+", help="width/depth, as in 64/2")
    parser.add_argument("--variants", nargs="+", help="names, for `compare`")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], help="for `lines`: instead of the default's")
    parser.add_argument("--rate", type=float, default=1.0, help="for `lines`: times the size's rule")
    parser.add_argument("--share", type=float, help="for `lines`: size the embedder by share, as in 0.06")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--mps", action="store_true", help="try to let processes share the GPU at the same time")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--folder", type=Path, help="where the dataset is kept (default: a temporary folder)")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        baselines = prepare_size(given.size, folder)
        print(f"dataset and baselines after {time.monotonic() - began:.0f} s: {baselines}", flush=True)
        keep = Results(given.out, given.size, baselines)
        if given.mps:
            from habitus.sweeps import mps_environment

            os.environ.update(mps_environment(print))
        cells = {"lines": line_cells, "compare": compare_cells, "rates": rate_cells}[given.what](given, folder)
        run_cells(cells, keep, folder, given.workers, began + given.seconds)
        if given.what == "compare":
            run_cells(further_cells(given, keep), keep, folder, given.workers, began + given.seconds)
    summary = {"lines": lines_summary, "compare": compare_summary, "rates": rates_summary}[given.what](keep)
    keep.write({given.what: summary, "wall_seconds": round(time.monotonic() - began, 1)})
    print(json.dumps({k: v for k, v in keep.document.items() if k != "rows"}))


# The cells ----------------------------------------------------------------------------------------------------------


def line_cells(given: argparse.Namespace, folder: Path) -> list[Cell]:
    """Every shape at every budget that leaves at least MIN_STEPS steps; the cheapest first."""
    size = SIZES[given.size]
    variant = replace(DEFAULT, rate=given.rate, optimizer=given.optimizer or DEFAULT.optimizer)
    if variant != DEFAULT or given.share:
        share = f", share {given.share:g}" if given.share else ""
        variant = replace(variant, name=f"{variant.optimizer}, rate x {variant.rate:g}{share}")
    shapes = [tuple(int(n) for n in shape.split("/")) for shape in given.shapes or ()] or size.shapes
    cells = [
        Cell(given.size, budget, width, depth, replace(variant, seed=seed), given.share)
        for budget in given.lines or size.budgets
        for seed in range(given.seeds)
        for width, depth in shapes
    ]
    return [cell for cell in cells if sized(cell, folder).steps >= MIN_STEPS]


def compare_cells(given: argparse.Namespace, _folder: Path) -> list[Cell]:
    """Every variant at every budget, on one shape."""
    size = SIZES[given.size]
    return [
        Cell(given.size, budget, *size.compare_shape, replace(variant, seed=seed))
        for budget in given.lines or size.compare_at
        for seed in range(given.seeds)
        for variant in VARIANTS
        if given.variants is None or variant.name in given.variants
    ]


def rate_cells(given: argparse.Namespace, _folder: Path) -> list[Cell]:
    """A few shapes over learning rates a factor two apart, Muon and AdamW."""
    factors = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    return [
        Cell(
            given.size, budget, width, depth, replace(DEFAULT, name=f"{optimizer} x {f:g}", rate=f, optimizer=optimizer)
        )
        for budget, width, depth in SIZES[given.size].rate_cells
        for optimizer in ([given.optimizer] if given.optimizer else ["muon", "adamw"])
        for f in factors
    ]


def further_cells(given: argparse.Namespace, keep: "Results") -> list[Cell]:
    """The plain recipe, at its best rate so far, at larger budgets: until it reaches the default's loss."""
    size = SIZES[given.size]
    top = max(given.lines or size.compare_at)
    losses = {r["variant"]: r["loss"] for r in keep.rows if r["budget"] == top and r["variant"] in PLAIN_NAMES}
    if not losses:
        return []
    best = next(v for v in VARIANTS if v.name == min(losses, key=lambda name: losses[name]))
    return [Cell(given.size, top * factor, *size.compare_shape, best) for factor in PLAIN_FURTHER]


@cache
def sized(cell: Cell, folder: Path) -> Any:
    """The cell as `habitus.sizing` builds it for the dataset."""
    from habitus.data import Dataset
    from habitus.sizing import CellRequest, Inputs, ladder_batch_sequences, solve

    size = SIZES[cell.size]
    share = {"joint_dim": size.joint_dim} if size.joint_dim and not cell.share else {"share": cell.share or SHARE}
    batch = size.batches if isinstance(size.batches, int) else size.batches.get(cell.budget)
    batch = batch or ladder_batch_sequences(cell.budget)
    request = CellRequest(
        batch_sequences=batch, flops=cell.budget, width=cell.width, depth=cell.depth, seq_len=size.seq_len,
        text_len=size.text_len, text_depth=size.text_depth, **share,
    )  # fmt: skip
    return solve(request, Inputs.of(Dataset.open(dataset_of(cell.size, folder), verify=False).fields))


def dataset_of(size: str, folder: Path) -> Path:
    return folder / f"dataset-{size}"


# One run ------------------------------------------------------------------------------------------------------------


def prepare_size(name: str, folder: Path) -> dict[str, float]:
    """Prepare the size's world in the folder, unless it is there; what popularity and the oracle lose on it."""
    from habitus.data import Dataset, PrepareOptions
    from habitus.data.from_world import prepare_world
    from habitus.evaluation import EvaluateOptions, evaluate
    from habitus.evaluation.baselines import OracleScorer, Popularity
    from habitus.events.world import World, WorldConfig
    from habitus.events.world.writing import schema_of

    size = SIZES[name]
    out = dataset_of(name, folder)
    if not out.exists():
        world = World(WorldConfig(num_users=size.users, num_items=size.items, seed=1))
        options = PrepareOptions(
            seq_len=size.seq_len,
            text_len=size.text_len,
            vocabulary_size=size.vocabulary,
            validation_share=0.05,
            test_share=0,
            threads=max(1, (os.cpu_count() or 1) // 2),
        )
        prepare_world(world, schema_of(world), out, options, lambda _what, _share: None)
    levels = folder / f"levels-{name}.json"
    if not levels.exists():
        dataset = Dataset.open(out, verify=False)
        options = EvaluateOptions(regimes=("batch",), queries=size.queries, batch_sequences=size.eval_sequences)
        losses = {
            scorer.name: evaluate(dataset, scorer, options).metrics["batch/loss"].value
            for scorer in (Popularity(dataset), OracleScorer(dataset))
        }
        levels.write_text(json.dumps(losses), encoding="utf-8")
    return json.loads(levels.read_text(encoding="utf-8"))


def run_one(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train one cell in this process."""
    import torch

    from habitus.data import Dataset
    from habitus.recipe import DataRecipe, EvaluateRecipe, Recipe, TrainRecipe
    from habitus.training import TrainOptions, train

    torch.compiler.reset()  # another shape: what was compiled for the last one only counts against the limit
    size, variant, built = SIZES[cell.size], cell.variant, sized(cell, folder)
    use_init(variant)
    recipe = Recipe(
        data=DataRecipe(seq_len=size.seq_len),
        model=built.model,
        train=TrainRecipe(
            batch_sequences=built.batch_sequences,
            steps=built.steps,
            optimizer=variant.optimizer,  # type: ignore[arg-type]
            learning_rate=variant.rate * size.base_rate * math.sqrt(built.batch_sequences / 512),
            warmup=variant.warmup,
            precision=size.precision,  # type: ignore[arg-type]
            seed=variant.seed,
        ),
        evaluate=EvaluateRecipe(queries=size.queries, batch_sequences=size.eval_sequences),
    )
    dataset = Dataset.open(dataset_of(cell.size, folder), verify=False)
    run = Path(tempfile.mkdtemp(dir=folder))
    options = TrainOptions(
        device=size.device,
        threads=1 if size.device == "cpu" else None,
        compile=None if size.device == "cpu" else cell.budget >= size.compile_from,
    )
    began = time.monotonic()
    try:
        record = train(recipe, dataset, run / "run", options=options)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    metric = record.metrics.get("batch/loss")
    return {
        "key": cell.key(), "budget": cell.budget, "variant": variant.name, "seed": variant.seed, "width": cell.width,
        "depth": cell.depth, "joint_dim": built.model.joint_dim, "params": built.params, "steps": built.steps,
        "batch_sequences": built.batch_sequences, "learning_rate": recipe.train.learning_rate,
        "loss": None if metric is None else metric.value, "loss_se": None if metric is None else metric.se,
        "train_loss": None if record.train is None else record.train.loss, "epochs": round(record.epochs, 3),
        "status": record.status, "reason": record.reason, "seconds": round(time.monotonic() - began, 1),
        "steps_per_second": round(record.throughput.get("steps_per_second", 0.0), 2),
    }  # fmt: skip


def use_init(variant: Variant) -> None:
    """Make models of this process begin as the variant says. Only a benchmark may reach in like this."""
    from habitus.model import contextualizer, embedder, init

    if not hasattr(init, "_unpatched"):
        init._unpatched = (init._distribution, init.INITIAL_GAIN, init._TRANSPOSED_FROM, embedder.unit_rms)  # type: ignore[attr-defined]
    init._distribution, init.INITIAL_GAIN, init._TRANSPOSED_FROM, embedder.unit_rms = init._unpatched  # type: ignore[attr-defined]
    contextualizer.unit_rms = embedder.unit_rms
    if variant.gain is not None:
        init.INITIAL_GAIN = variant.gain
    if variant.start != "ours":
        init._TRANSPOSED_FROM = {}  # the output matrix is drawn by itself
    if variant.start == "plain":
        init._distribution = lambda name, _: (0.0, 0.02) if init.role_of(name) not in ("norm", "gain") else (1.0, 0.0)
        embedder.unit_rms = contextualizer.unit_rms = lambda x: x.float()


# Many runs ----------------------------------------------------------------------------------------------------------


class Results:
    """The rows so far, on disk after every one of them."""

    def __init__(self, out: Path, size: str, baselines: dict[str, float]) -> None:
        self.out = out
        self.document: dict[str, Any] = {"rows": []}
        if out.exists():
            self.document = json.loads(out.read_text(encoding="utf-8"))
        self.document |= {
            "benchmark": "recipe", "date": datetime.date.today().isoformat(), "hardware": hardware(size),
            "command": " ".join(sys.argv[1:]), "popularity": baselines["popularity"], "oracle": baselines["oracle"],
        }  # fmt: skip

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.document["rows"]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write({})

    def write(self, more: dict[str, Any]) -> None:
        self.document |= more
        beside = self.out.with_suffix(".part")
        beside.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.out)


def run_cells(cells: list[Cell], keep: Results, folder: Path, workers: int, until: float) -> None:
    """Run what is missing, `workers` at a time, until the time is over."""
    there = {row["key"] for row in keep.rows}
    missing = [cell for cell in cells if cell.key() not in there]
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    running: dict[Future[dict[str, Any]], Cell] = {pool.submit(run_one, cell, folder): cell for cell in missing}
    while running and time.monotonic() < until:
        left = min(5.0, max(0.0, until - time.monotonic()))
        done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
        for future in done:
            cell = running.pop(future)
            if future.exception() is not None:
                print(f"{cell}: {future.exception()!r}", file=sys.stderr, flush=True)
                continue
            row = future.result()
            keep.add(row)
            print(
                f"{row['budget']:.0e} {row['variant']:30} {row['width']:>4}/{row['depth']} N = {row['params']:>9,} "
                f"steps {row['steps']:>6} rate {row['learning_rate']:.1e} loss {row['loss'] or math.nan:.4f} "
                f"train {row['train_loss'] or math.nan:.4f} epochs {row['epochs']} {row['seconds']} s {row['status']}",
                flush=True,
            )
    for process in list(pool._processes.values()):  # running cells are dropped: their rows would come too late
        if running:
            process.kill()  # asked politely, a run would save first
    pool.shutdown(wait=True, cancel_futures=True)
    for cell in running.values():
        print(f"not run, the time was over: {cell}", flush=True)


# What the rows say ----------------------------------------------------------------------------------------------------


def lines_summary(keep: Results) -> list[dict[str, Any]]:
    """Per variant and budget: the minimum, the quadratic around it, who is still on the plateau."""
    lines = []
    for variant, budget in sorted({(row["variant"], row["budget"]) for row in keep.rows}):
        rows = [r for r in keep.rows if (r["variant"], r["budget"]) == (variant, budget) and r["loss"] is not None]
        by_size: dict[int, list[float]] = {}
        for row in rows:
            by_size.setdefault(row["params"], []).append(row["loss"])
        if len(by_size) >= 3:
            line = line_of(by_size, keep.document["popularity"])
            lines.append({"variant": variant, "budget": budget, "cells": len(by_size)} | line)
            print(f"{budget:.0e} {variant}: {line}")
    return lines


def line_of(by_size: dict[int, list[float]], popularity: float) -> dict[str, Any]:
    """One line: losses over sizes (means where there are several seeds)."""
    sizes = np.array(sorted(by_size), float)
    losses = np.array([np.mean(by_size[int(size)]) for size in sizes])
    best = int(losses.argmin())
    near = (sizes >= sizes[best] / FOLD) & (sizes <= sizes[best] * FOLD)
    x = np.log(sizes[near])
    line: dict[str, Any] = {
        "best_params": int(sizes[best]),
        "best_loss": round(float(losses[best]), 4),
        "interior": bool(0 < best < len(sizes) - 1),
        "on_plateau": [int(n) for n in sizes[popularity - losses < LEFT * (popularity - losses[best])]],
        "largest_step": round(float(np.abs(np.diff(losses)).max()), 4),
    }
    if near.sum() > 3:
        quadratic = np.polyfit(x, losses[near], 2)
        residuals = losses[near] - np.polyval(quadratic, x)
        line |= {
            "cells_near": int(near.sum()),
            "largest_residual": round(float(np.abs(residuals).max()), 4),
            "convex": bool(quadratic[0] > 0),
            "vertex_params": int(np.exp(-quadratic[1] / (2 * quadratic[0]))) if quadratic[0] > 0 else None,
        }
        line["passes"] = line["interior"] and not line["on_plateau"] and line["largest_residual"] < RESIDUAL
    return line


def rates_summary(keep: Results) -> list[dict[str, Any]]:
    """Per cell and optimizer: the loss at every rate, and the best."""
    losses_of: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in keep.rows:
        if row["loss"] is not None:
            cell = (row["budget"], row["width"], row["depth"], row["params"], row["variant"].split()[0])
            losses_of.setdefault(cell, {})[f"{row['learning_rate']:.2g}"] = round(row["loss"], 4)
    rows = []
    for (budget, width, depth, params, optimizer), losses in sorted(losses_of.items()):
        best = min(losses, key=lambda rate: losses[rate])
        print(f"{budget:.0e} {width}/{depth} N = {params:,} {optimizer}: best {best}; {losses}")
        rows.append({"budget": budget, "params": params, "optimizer": optimizer, "best": float(best), "losses": losses})
    return rows


def compare_summary(keep: Results) -> dict[str, Any]:
    """Losses by variant and budget, and the compute multiplier of the default over the plain recipe."""
    table: dict[str, dict[str, float]] = {}
    for row in keep.rows:
        if row["loss"] is not None:
            table.setdefault(row["variant"], {})[f"{row['budget']:.3g}"] = round(row["loss"], 4)
    budgets = sorted({key for losses in table.values() for key in losses}, key=float)
    print(f"{'variant':32}" + "".join(f"{budget:>9}" for budget in budgets))
    for name, losses in table.items():
        print(f"{name:32}" + "".join(f"{losses[b]:9.4f}" if b in losses else f"{'–':>9}" for b in budgets))
    curve = best_curve(keep, PLAIN_NAMES)
    multipliers = {f"{budget:.3g}": multiplier(budget, loss, curve) for budget, loss in best_curve(keep, OWN_RATES)}
    print(f"compute multiplier of the default over the plain recipe, each at the best of its rates: {multipliers}")
    return {"losses": table, "compute_multiplier": multipliers}


def best_curve(keep: Results, names: tuple[str, ...]) -> list[tuple[float, float]]:
    """(budget, loss) at the best of the named variants, rising in budget."""
    best: dict[float, float] = {}
    for row in keep.rows:
        if row["variant"] in names and row["loss"] is not None:
            best[row["budget"]] = min(row["loss"], best.get(row["budget"], math.inf))
    return sorted(best.items())


def multiplier(budget: float, loss: float, curve: list[tuple[float, float]]) -> dict[str, float] | None:
    """How many times the budget the plain recipe needs for this loss: interpolated in log compute.

    `at_least` where even its largest budget does not reach it; `at_most` where its smallest does.
    """
    if not curve:
        return None
    if curve[0][1] <= loss:
        return {"at_most": round(curve[0][0] / budget, 2)}
    for (low, high_loss), (high, low_loss) in pairwise(curve):
        if low_loss <= loss:
            share = (high_loss - loss) / (high_loss - low_loss)
            return {"times": round(math.exp(math.log(low) + share * math.log(high / low)) / budget, 2)}
    return {"at_least": round(curve[-1][0] / budget, 2)}


def hardware(size: str) -> str:
    if SIZES[size].device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
