"""How long windows should be: sweeps of the context axis on a world of long histories and on logs, and what steps cost.

    python benchmarks/context.py --out context.json
    python benchmarks/context.py --parts logs --logs completejourney git_touches_small --workers 1 \
        --preset benchmarks/context_logs.toml --lengths 32,64,128,256,512,1024 --log-budget 1e12 --out logs.json

Three parts. `speed`: steps of one model with windows of 256, 1,024 and 2,048 events and equal slots, beside what the
executed FLOPs say. `world`: the axis at --budgets on a synthetic world like logs with --events-per-user. `logs`: the
axis on prepared datasets at the largest budget of which every window length is one pass or less. A store, its laws and
a report are left in --store. Prints tables and ends with one JSON line.
"""

import argparse
import json
import math
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prepare import hardware

METRICS = ("catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10")
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
HISTORIES = (3, 10, 30, 100, 300, 1000)
LOG_BUDGETS = tuple(digit * 10.0**power for power in range(15, 10, -1) for digit in (5, 2, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="speed,world", help="some of speed, world, logs")
    parser.add_argument("--logs", type=Path, nargs="*", default=[], help="prepared datasets of the part logs")
    parser.add_argument("--budgets", default="1e14,1e15")
    parser.add_argument("--log-budget", type=float, help="of the logs; else the largest of at most one pass")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="of windows")
    parser.add_argument("--users", type=int, default=150_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--events-per-user", type=float, default=1000.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--queries", type=int, help="that the runs answer; the preset's unless given")
    parser.add_argument("--preset", default="standard")
    parser.add_argument("--slots", type=int, default=65_536, help="per step, of the part speed")
    parser.add_argument("--steps", type=int, default=400, help="of the part speed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--store", type=Path, help="folder of data, stores and reports; else a temporary one")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    parts = given.parts.split(",")
    given.lengths = tuple(int(text) for text in given.lengths.split(","))
    result: dict[str, Any] = {
        "benchmark": "context", "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), "device": _gpu(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.store or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if "speed" in parts or "world" in parts:
            world = _world(given, folder / "world")
        if "speed" in parts:
            result["speed"] = measure_speed(world, given)
        if "world" in parts:
            budgets = tuple(float(text) for text in given.budgets.split(","))
            result["world"] = sweep_contexts(world, given, folder / "store-world", budgets)
        for path in given.logs if "logs" in parts else ():
            from habitus.data import Dataset

            dataset = Dataset.open(path, verify=False)
            budget = given.log_budget or one_pass_budget(dataset, given)
            begun, cpu = time.perf_counter(), _cpu_seconds()
            result[path.name] = sweep_contexts(dataset, given, folder / f"store-{path.name}", (budget,))
            spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": _cpu_seconds() - cpu}
            result[path.name] |= {"events": dataset.num_events, "items": dataset.num_items, **spent}
            print(f"{path.name}: {spent['seconds']:.0f} s, {spent['cpu_seconds']:.0f} s of CPU", flush=True)
            _write(result, given.out)
    _write(result, given.out)
    print(json.dumps(result))


def _write(result: dict[str, Any], out: Path | None) -> None:
    """Keep what is known so far, the whole of it or nothing."""
    if out is not None:
        stage = out.with_suffix(".partial")
        stage.write_text(json.dumps(result) + "\n", encoding="utf-8")
        stage.replace(out)


def _world(given: argparse.Namespace, path: Path) -> Any:
    """The world of long histories, prepared."""
    from habitus.sweeps import load_preset, preset_dataset

    preset = load_preset(given.preset)
    size = preset.world.model_copy(
        update={"num_users": given.users, "num_items": given.items, "events_per_user": given.events_per_user}
    )
    dataset = preset_dataset(preset.model_copy(update={"world": size}), path, threads=8)
    print(f"world: {dataset.num_events:,} events of {dataset.num_users:,} users on {dataset.num_items:,} items")
    return dataset


def measure_speed(dataset: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a step with windows of different lengths, against the executed FLOPs' ratio to 256."""
    from habitus.recipe import Recipe
    from habitus.training import TrainOptions, train

    rows: list[dict[str, Any]] = []
    print(
        f"\n{'L':>6} {'windows':>8} {'ms a step':>10} {'TFLOP a step':>13} {'time ratio':>11} {'FLOPs':>11} {'over':>6}"
    )
    for seq_len in (256, 1024, 2048):
        recipe = Recipe.parse(
            {
                "data": {"seq_len": seq_len},
                "model": {"joint_dim": 64, "width": 256, "depth": 6, "text_len": dataset.fields.text_len},
                "train": {
                    "batch_sequences": given.slots // seq_len, "steps": given.steps, "learning_rate": 2e-3,
                },
                "evaluate": {"queries": 100, "batch_sequences": 2},
            },
            "the benchmark",
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as run:
            record = train(recipe, dataset, Path(run) / "run", options=TrainOptions(device=given.device))
        seconds = 1 / record.throughput["steps_per_second"]
        flops = (record.flops_executed or 0.0) / record.steps
        row = {"seq_len": seq_len, "seconds": seconds, "executed_flops": flops}
        first = rows[0] if rows else row
        row |= {"time_ratio": seconds / first["seconds"], "flop_ratio": flops / first["executed_flops"]}
        rows.append(row)
        print(
            f"{seq_len:>6} {given.slots // seq_len:>8} {1e3 * seconds:>10.2f} {flops / 1e12:>13.3f} "
            f"{row['time_ratio']:>11.3f} {row['flop_ratio']:>11.3f} {row['time_ratio'] / row['flop_ratio']:>6.3f}"
        )
    return rows


def sweep_contexts(dataset: Any, given: argparse.Namespace, store: Path, budgets: tuple[float, ...]) -> dict[str, Any]:
    """The axis at some budgets, its laws, and the sentence of the largest."""
    from habitus.laws import describe_history, fit
    from habitus.reporting import report
    from habitus.sweeps import sweep

    preset = _preset(given)
    swept = sweep(
        "context", dataset, store, budgets=budgets, preset=preset, seeds=given.seeds, device=given.device,
        workers=given.workers, note=print,
    )  # fmt: skip
    for out in swept.design.left_out:
        print(f"left out at {out.flops_budget:.3g}: {out.wanted}: {out.reason}")
    laws = fit(store)
    laws.write(store / "laws.json")
    report(store, store / "report.html")
    rows = []
    print(f"\n{store.name}\n{'budget':>8} {'L':>6} {'steps':>8}" + "".join(f" {name:>20}" for name in METRICS))
    for run in sorted(laws.runs, key=lambda run: (run.budget, run.knobs["seq_len"])):
        values = {name: run.metrics[name] for name in METRICS if name in run.metrics}
        rows.append({"budget": run.budget, "seed": run.seed, **run.knobs, "metrics": dict(run.metrics)})
        print(
            f"{run.budget:>8.3g} {run.knobs['seq_len']:>6.0f} {run.knobs['steps']:>8.0f}"
            + "".join(f" {values.get(name, float('nan')):>20.4f}" for name in METRICS)
        )
    entries = []
    for entry in laws.entries:
        if entry.metric in METRICS and entry.name.startswith("context"):
            values = {name: [entry.law[name], *_finite(entry.law.interval(name))] for name in entry.law.values}
            said = describe_history(entry.law, entry.metric) if entry.name == "context_gain" else ""
            entries.append({
                "name": entry.name, "metric": entry.metric, "budget": entry.budget, "status": entry.law.status,
                "values": values, "says": said, "warnings": entry.law.warnings,
            })  # fmt: skip
            at = f" at {entry.budget:.3g}" if entry.budget else ""
            optimum = f" {entry.law['x_opt']:.0f}" if "x_opt" in entry.law.values else ""
            print(f"{entry.name} of {entry.metric}{at}: {entry.law.status}{optimum} {said}")
    return {"runs": rows, "laws": entries}


def _finite(interval: tuple[float, float]) -> list[float | None]:
    """The ends of an interval; None where it has none."""
    return [end if math.isfinite(end) else None for end in interval]


def _preset(given: argparse.Namespace) -> Any:
    """The preset with the benchmark's windows and histories."""
    from habitus.sweeps import load_preset

    preset = load_preset(given.preset)
    axis = preset.context.model_copy(update={"seq_lens": given.lengths, "histories": HISTORIES})
    queries = given.queries or preset.evaluate.queries
    evaluate = preset.evaluate.model_copy(update={"queries": queries})
    return preset.model_copy(update={"context": axis, "evaluate": evaluate})


def one_pass_budget(dataset: Any, given: argparse.Namespace) -> float:
    """The largest budget of which no window length passes over the log more than once."""
    from habitus.sweeps import DatasetFacts, SweepRequest, design_axis

    preset = _preset(given).for_catalogue(dataset.num_items)
    facts = DatasetFacts.of(dataset, (), given.lengths)
    for budget in LOG_BUDGETS:
        design = design_axis("context", facts, preset, request=SweepRequest(budgets=(budget,)))
        if design.cells and not any("epoch" in out.reason or "steps of" in out.reason for out in design.left_out):
            print(f"{dataset.path}: {budget:g} FLOPs are within one pass")
            return budget
    raise SystemExit(f"{dataset.path} is too short for any budget of {', '.join(f'{b:g}' for b in LOG_BUDGETS)}")


def _cpu_seconds() -> float:
    """CPU time of this process and of the workers that ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
