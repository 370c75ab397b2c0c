"""Speed of training on a GPU: whole steps of both stages, as `habitus train` runs them.

Run: python benchmarks/train.py [--cells 1e15 1e16 1e17 1e18 stage2] [--steps N] [--profile] [--data DIR] [--out FILE]
Cells are made by `sizing` for an embedder share of 2% and D/N = 15, on world data of 10^6 items, made on the spot.
Each cell is trained twice for a slice of its steps, each time in a process of its own: first with an empty compile
cache, then with the one that the first left behind. Nominal rates are Equation 1's; executed ones count what was
multiplied. Stage 2 has a table of random vectors with 4M rows instead of a cache, since K = 2M needs more items than
the world has. Prints rows as they come and ends with one JSON line; kept results are benchmarks/results/train-*.json.
"""

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CELLS = {"1e15": (1e15, 64), "1e16": (1e16, 128), "1e17": (1e17, 256), "1e18": (1e18, 512)}
GOALS = {"1e15": 100, "1e16": 250, "1e17": 400, "1e18": 500}  # nominal TFLOP/s
SLICES = {"1e15": 600, "1e16": 300, "1e17": 150, "1e18": 60}
STAGE2 = ("524288-248", "2097152-248", "2097152-96")  # K and joint_dim; 248 is the widest that a bias leaves fused
TABLE_ROWS = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=[*CELLS, "stage2"])
    parser.add_argument("--steps", type=int, help="instead of the slice of each cell")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=40_000)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "habitus-train-benchmark")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--profile", action="store_true", help="the dearest kernels of each cell as well")
    parser.add_argument("--no-compile", action="store_true", help="captured steps without compiled kernels")
    parser.add_argument("--once", action="store_true", help="leave the second run, with the warm cache, out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(child(arguments.child, arguments)), flush=True)
        return
    make_data(arguments.data, arguments.items, arguments.users)
    result: dict[str, Any] = {"benchmark": "train", "date": datetime.date.today().isoformat(), "rows": []}
    result |= in_process("machine", arguments, {})
    print(json.dumps(result), flush=True)
    names = [n for c in arguments.cells for n in ([f"stage2-{k}" for k in STAGE2] if c == "stage2" else [c])]
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            row = in_process(name, arguments, caches)
            if "error" not in row and not arguments.once:
                again = in_process(name, arguments, caches)
                row["warmup_cached_s"] = again.get("warmup_s", again.get("error"))
                row["step_ms"] = min(row["step_ms"], again.get("step_ms", row["step_ms"]))
        show(row, result.get("matrix_tflops"))
        result["rows"].append(row)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def in_process(name: str, arguments: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """The row of one cell, measured in a fresh process."""
    command = [sys.executable, __file__, "--child", name, "--data", str(arguments.data)]
    command += ["--device", arguments.device, "--optimizer", arguments.optimizer]
    command += ["--steps", str(arguments.steps)] if arguments.steps else []
    command += ["--no-compile"] if arguments.no_compile else []
    command += ["--profile"] if arguments.profile and "TORCHINDUCTOR_CACHE_DIR" in environment else []
    # As in an installation that its user may write to: modules are compiled to bytecode once, not in every process.
    environment = {"PYTHONPYCACHEPREFIX": str(arguments.data) + "-bytecode"} | environment
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    return {"cell": name, "error": (done.stderr or done.stdout)[-1500:]}


def child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell, in this process."""
    if name == "machine":
        return machine(arguments.device)
    if name.startswith("stage2-"):
        num_negatives, joint_dim = map(int, name.removeprefix("stage2-").split("-"))
        return stage2(num_negatives, joint_dim, arguments)
    return stage1(name, arguments)


def stage1(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from habitus.data import Dataset
    from habitus.training import TrainOptions, train

    dataset = Dataset.open(arguments.data, verify=False)
    recipe = recipe_of(name, dataset, arguments)
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        compiled = None if arguments.device == "cpu" else not arguments.no_compile
        options = TrainOptions(device=arguments.device, compile=compiled)
        record = train(recipe, dataset, Path(out) / "run", options=options)
        total = time.perf_counter() - began
    assert record.seconds is not None
    assert record.train is not None
    rates, steps = record.throughput, record.steps
    row = {
        "cell": name,
        "model": recipe.model.to_values(),
        "batch_sequences": recipe.train.batch_sequences,
        "params": record.params.total if record.params else None,
        "steps": steps,
        "engine": record.hardware.get("engine"),
        "compiled": record.hardware.get("compiled"),
        "step_ms": round(1e3 / rates["steps_per_second"], 3),
        "events_per_s": round(rates["events_per_second"]),
        "nominal_tflops": round(rates["nominal_flops_per_second"] / 1e12, 1),
        "executed_tflops": round(rates["executed_flops_per_second"] / 1e12, 1),
        "wanted_nominal_tflops": GOALS[name],
        "device_gib": round(record.memory.get("device_peak", 0) / 2**30, 2),
        "warmup_s": round(record.seconds.warmup, 2),
        "total_s": round(total, 2),
        "loss": round(record.train.loss, 4),
    }
    if arguments.profile:
        row["compile_s"] = compile_seconds()
        row["kernels_us"] = kernels(engine_of(recipe, dataset, arguments, None))
    return row


def stage2(num_negatives: int, joint_dim: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Stage 2 of the 10^17 cell's contextualizer with a batch of 64, on a table of random vectors."""
    import torch

    from habitus.data import Dataset
    from habitus.sizing import Inputs
    from habitus.training.journal import executed_flops

    began = time.perf_counter()
    dataset = Dataset.open(arguments.data, verify=False)
    recipe = recipe_of("1e17", dataset, arguments)
    steps = arguments.steps or 40
    update = {"stage": 2, "parent": "0" * 64, "batch_sequences": 64, "steps": steps}
    update["num_negatives"] = min(num_negatives, dataset.num_items)
    train, model = recipe.train.model_copy(update=update), recipe.model.model_copy(update={"joint_dim": joint_dim})
    recipe = recipe.model_copy(update={"train": train, "model": model})
    generator = torch.Generator(arguments.device).manual_seed(0)
    shape = (TABLE_ROWS, recipe.model.joint_dim)
    table = torch.randn(shape, generator=generator, device=arguments.device, dtype=torch.bfloat16)
    engine = engine_of(recipe, dataset, arguments, table)
    draw_from_table(engine.stage, TABLE_ROWS, num_negatives)
    engine.step(0)
    engine.results(wait=True)
    warmup = time.perf_counter() - began
    before, mark = engine.work().scores, time.perf_counter()
    for step in range(1, steps):
        engine.step(step)
    last = engine.results(wait=True)[-1]
    spent = time.perf_counter() - mark
    work = engine.work()
    work.scores -= before
    slots = (steps - 1) * 64 * dataset.seq_len
    counts = engine.order.totals(1, steps - 1)
    flops = executed_flops(recipe, Inputs.of(dataset.fields), work, slots, counts, torch.device(arguments.device))
    row = {
        "cell": f"stage2-{num_negatives}-{joint_dim}",
        "model": recipe.model.to_values(),
        "batch_sequences": 64,
        "num_negatives": num_negatives,
        "steps": steps,
        "step_ms": round(1e3 * spent / (steps - 1), 3),
        "events_per_s": round(counts["events"] / spent),
        "executed_tflops": round(flops / spent / 1e12, 1),
        "device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "warmup_s": round(warmup, 2),
        "loss": round(last.loss, 4),
        "problem": last.problem,
    }
    if arguments.profile:
        row["kernels_us"] = kernels(engine, first=steps)
    return row


def draw_from_table(stage: Any, rows: int, num_negatives: int) -> None:
    """Have a captured stage 2 draw its extras from a table with more rows than the dataset has items."""
    stage.num_items = stage.num_candidates = rows
    stage.num_negatives, stage.full_catalogue = num_negatives, False


def engine_of(recipe: Any, dataset: Any, arguments: argparse.Namespace, table: Any) -> Any:
    import torch

    from habitus.model import BehaviorModel
    from habitus.training.cuda_graph import CapturedEngine

    device = torch.device(arguments.device, 0)
    model = BehaviorModel(dataset.fields, recipe.model).to(device)
    if table is not None:
        model.freeze()
    return CapturedEngine(model, dataset, recipe, device, table, compiled=not arguments.no_compile)


def compile_seconds(most: int = 10) -> dict[str, float]:
    """Where the compiler spent its time in this process; phases lie within each other."""
    from torch._dynamo.utils import compilation_time_metrics

    totals = {name: sum(times) for name, times in compilation_time_metrics.items()}
    dearest = sorted(totals.items(), key=lambda pair: -pair[1])[:most]
    return {f"{name} x{len(compilation_time_metrics[name])}": round(seconds, 2) for name, seconds in dearest}


def kernels(engine: Any, first: int = 0, most: int = 25) -> dict[str, float]:
    """Microseconds per step of the dearest kernels, dearest first."""
    import torch

    for step in range(first, first + 3):
        engine.step(step % engine.recipe.steps)
    torch.cuda.synchronize()
    times = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for step in range(first + 3, first + 3 + times):
            engine.step(step % engine.recipe.steps)
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    micros = {f"{r.key[:100]} x{r.count // times}": round(r.self_device_time_total / times, 1) for r in rows[:most]}
    return {"total": round(sum(r.self_device_time_total for r in rows) / times, 1), **micros}


def recipe_of(name: str, dataset: Any, arguments: argparse.Namespace) -> Any:
    from habitus.recipe import Recipe
    from habitus.sizing import CellRequest, Inputs, solve

    flops, batch = CELLS[name]
    request = CellRequest(
        batch_sequences=batch, flops=flops, share=0.02, data_ratio=15, seq_len=dataset.seq_len,
        text_len=dataset.fields.text_len,
    )  # fmt: skip
    cell = solve(request, Inputs.of(dataset.fields))
    train = {
        "batch_sequences": batch,
        "steps": min(cell.steps, arguments.steps or SLICES[name]),
        "learning_rate": 2e-3 * math.sqrt(batch / 512),
        "optimizer": arguments.optimizer,
    }
    values = {"data": {"seq_len": dataset.seq_len}, "model": cell.model.to_values(), "train": train}
    return Recipe.parse({**values, "evaluate": {"queries": 2_000}}, name)


def machine(device: str) -> dict[str, Any]:
    """The device, and what a large matrix product reaches on it."""
    import torch

    if device != "cuda":
        return {"hardware": "cpu", "torch": torch.__version__}
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(10):
        a @ b
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(100):
        a @ b
    end.record()
    end.synchronize()
    rate = 100 * 2 * 8192**3 / (begin.elapsed_time(end) * 1e-3) / 1e12
    return {
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matrix_tflops": round(rate, 1),
    }


def make_data(path: Path, items: int, users: int) -> None:
    if (path / "manifest.json").exists():
        return
    from habitus.data import PrepareOptions
    from habitus.data.from_world import prepare_world
    from habitus.events.world import World, WorldConfig
    from habitus.events.world.writing import WORLD_SCHEMA

    began = time.perf_counter()
    shutil.rmtree(path, ignore_errors=True)
    world = World(WorldConfig(num_users=users, num_items=items, events_per_user=256, seed=1))
    schema = WORLD_SCHEMA.model_copy(update={"world": world.config})
    options = PrepareOptions(seq_len=256, test_share=0, threads=max(1, (os.cpu_count() or 1) - 1))
    prepare_world(world, schema, path, options, lambda phase, share: None)
    print(f"data: {items:,} items, {users:,} users in {time.perf_counter() - began:.1f} s", flush=True)


def show(row: dict[str, Any], matrix: float | None) -> None:
    if "error" in row:
        print(f"{row['cell']}: {row['error']}", flush=True)
        return
    if matrix:
        row["share_of_matrix_rate"] = round(row["executed_tflops"] / matrix, 3)
    shown = {name: value for name, value in row.items() if name not in ("kernels_us", "compile_s", "model")}
    print(json.dumps(shown), flush=True)
    for phase, seconds in row.get("compile_s", {}).items():
        print(f"    {seconds:>10.2f} s   {phase}", flush=True)
    for kernel, micros in row.get("kernels_us", {}).items():
        print(f"    {micros:>10.1f} us  {kernel}", flush=True)


if __name__ == "__main__":
    main()
