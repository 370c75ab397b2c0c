"""An allocation sweep of 6 cells × 3 learning rates, packed against one at a time, in one run.

    python benchmarks/sweep.py --scale 0.2 --workers 4 --out sweep-h200.json          one H200, about five minutes
    python benchmarks/sweep.py --device cpu --preset tiny --flops 1e8 --rates 1       the machinery alone, on a CPU

Every cell has the shape, batch and rates of its budget; --scale shortens its steps alone. Phases, in this order:
`cold` fills the compile caches with one rate per cell and as many workers as are packed, `packed` and `serial` run
the same sweep into fresh stores. After each phase a line is printed and --out is written. Equal Records are checked
at the end.

`busy` is the sum of training seconds over the wall-clock time: of one worker the share that is not machinery
(start-up, claims, evaluation), of several how many train at once. GPU utilisation is what nvidia-smi samples.
"""

import argparse
import json
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from habitus.data import Dataset
from habitus.sweeps import Preset, Store, SweepResult, load_preset, preset_dataset, sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--flops", type=float, default=1e15)
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps of every cell")
    parser.add_argument("--shapes", type=int, default=6)
    parser.add_argument("--rates", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[4], help="of the packed phases, one after the other")
    parser.add_argument("--phases", nargs="+", default=["cold", "packed", "serial"])
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--users", type=int, default=60_000)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--phase-minutes", type=float, default=10.0, help="a phase stops then, and says so")
    parser.add_argument("--data", type=Path, help="a prepared dataset, made there where it does not exist")
    parser.add_argument("--folder", type=Path, help="where the stores go; a temporary folder unless said")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="habitus-sweep-"))
    folder.mkdir(parents=True, exist_ok=True)
    preset = shortened(arguments)
    began = time.monotonic()
    dataset = preset_dataset(preset, arguments.data or folder / "dataset", seed=1, threads=8)
    results = {
        "benchmark": "sweep",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device_name(arguments.device),
        "flops": arguments.flops,
        "scale": arguments.scale,
        "dataset_seconds": round(time.monotonic() - began, 1),
        "phases": [],
    }
    phases = [("cold", max(arguments.workers))] if "cold" in arguments.phases else []
    phases += [("packed", workers) for workers in arguments.workers] if "packed" in arguments.phases else []
    phases += [("serial", 1)] if "serial" in arguments.phases else []
    stores = {}
    for name, workers in phases:
        store = folder / f"store-{name}-{workers}"
        shutil.rmtree(store, ignore_errors=True)
        figures = phase(name, workers, store, dataset, preset, arguments)
        results["phases"].append(figures)
        stores[f"{name}-{workers}"] = store
        print(json.dumps(figures), flush=True)
        write(results, arguments.out)
    results["comparison"] = compared(results["phases"], stores)
    write(results, arguments.out)
    print(json.dumps(results["comparison"]))
    print(json.dumps(results))


def shortened(arguments: argparse.Namespace) -> Preset:
    """The preset with one allocation budget whose cells keep the batch and shapes of the full one."""
    preset = load_preset(arguments.preset)
    budget, short = arguments.flops, arguments.flops * arguments.scale
    allocation = preset.allocation.model_copy(
        update={
            "num_shapes": arguments.shapes,
            "extend": 0,
            "widen": 0,
            "centres": ((short, min(preset.allocation.centres, key=lambda row: abs(row[0] / budget - 1))[1]),),
        }
    )
    world = preset.world
    if arguments.preset != "tiny":
        world = world.model_copy(update={"num_items": arguments.items, "num_users": arguments.users})
    evaluate = preset.evaluate
    if arguments.preset != "tiny":
        evaluate = evaluate.model_copy(update={"queries": arguments.queries})
    return preset.model_copy(
        update={
            "name": "benchmark",
            "budgets": (short,),
            "batch_by_budget": ((short, preset.batch_sequences(budget)),),
            "allocation": allocation,
            "common": preset.common.model_copy(update={"min_steps": 1}),
            "world": world,
            "evaluate": evaluate,
        }
    )


def phase(
    name: str, workers: int, store: Path, dataset: Dataset, preset: Preset, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One whole sweep and its figures."""
    with Utilisation(arguments.device) as utilisation:
        began = time.monotonic()
        result = sweep(
            "allocation",
            dataset,
            store,
            preset=preset,
            learning_rates=1 if name == "cold" else arguments.rates,
            workers=workers,
            device=arguments.device,
            allow_repeats=True,
            max_hours=arguments.phase_minutes / 60,
            note=lambda text: print("  " + text, flush=True),
        )
        wall = time.monotonic() - began
    return {"phase": name, "workers": workers, "wall_seconds": round(wall, 2), **figures_of(result, wall, arguments),
            **utilisation.figures()}  # fmt: skip


def figures_of(result: SweepResult, wall: float, arguments: argparse.Namespace) -> dict[str, Any]:
    store = Store.open(result.store)
    records = [record for run in result.runs if (record := store.record(run.planned.hash)) and record.seconds]
    parts = {name: sum(getattr(r.seconds, name) for r in records) for name in ("warmup", "train", "evaluate")}
    done = len(records)
    flops = sum(record.flops_nominal or 0.0 for record in records)
    machinery = wall - parts["train"] if result.workers == 1 else None
    figures = {
        "runs": len(result.runs),
        "done": result.number("done"),
        "failed": result.number("failed"),
        "missing": result.number("missing"),
        "reasons": sorted({run.reason for run in result.runs if run.reason}),
        "cells_per_hour": round(done / wall * 3600, 1),
        "nominal_tflops": round(flops / wall / 1e12, 3),
        "busy": round(parts["train"] / wall, 3),
        **{f"{name}_seconds_per_cell": round(value / max(1, done), 3) for name, value in parts.items()},
        "seconds_per_cell": [
            {
                "cell": f"{r.recipe.model.width}x{r.recipe.model.depth}",
                "rate": r.recipe.train.learning_rate,
                "steps": r.steps,
                **{name: round(getattr(r.seconds, name), 2) for name in ("warmup", "train", "evaluate")},
            }
            for r in records
        ],
    }
    if machinery is not None and done:
        full = (parts["train"] / arguments.scale + machinery) / done
        figures["machinery_share"] = round(machinery / wall, 3)
        figures["machinery_share_at_full_budget"] = round(machinery / done / full, 3)
        figures["seconds_per_cell_at_full_budget"] = round(full, 2)
    return figures


def compared(phases: list[dict[str, Any]], stores: dict[str, Path]) -> dict[str, Any]:
    """Throughput of every phase against one at a time, and how far the Records are apart."""
    found: dict[str, Any] = {}
    serial = next((p for p in phases if p["phase"] == "serial"), None)
    for one in phases:
        key = f"{one['phase']}-{one['workers']}"
        if serial is not None and one is not serial:
            found[key] = {
                "throughput_ratio": round(one["cells_per_hour"] / max(serial["cells_per_hour"], 1e-9), 3),
                "largest_difference": difference(stores[key], stores["serial-1"]),
            }
    return found


def difference(one: Path, other: Path) -> dict[str, float]:
    """Largest relative differences of losses between Records of the same recipe."""
    first, second = Store.open(one), Store.open(other)
    apart = {"train": 0.0, "validation": 0.0}
    for digest in set(first.digests()) & set(second.digests()):
        a, b = first.record(digest), second.record(digest)
        if a and b and a.train and b.train and "batch/loss" in a.metrics and "batch/loss" in b.metrics:
            loss_a, loss_b = a.metrics["batch/loss"].value, b.metrics["batch/loss"].value
            apart["train"] = max(apart["train"], abs(a.train.loss / b.train.loss - 1))
            apart["validation"] = max(apart["validation"], abs(loss_a / loss_b - 1))
    return {name: float(f"{value:.3g}") for name, value in apart.items()}


class Utilisation:
    """Samples nvidia-smi once a second while the block runs."""

    def __init__(self, device: str) -> None:
        self._wanted = device.startswith("cuda") and shutil.which("nvidia-smi") is not None
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(1.0):
            done = subprocess.run(query, capture_output=True, text=True, check=False)
            values = done.stdout.splitlines()[0].split(",") if done.returncode == 0 and done.stdout else []
            if len(values) == 2:
                self._samples.append((float(values[0]), float(values[1])))

    def __enter__(self) -> "Utilisation":
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._wanted:
            self._thread.join()

    def figures(self) -> dict[str, float]:
        if not self._samples:
            return {}
        return {
            "gpu_utilisation_mean": round(sum(u for u, _ in self._samples) / len(self._samples), 1),
            "gpu_memory_peak_mib": max(m for _, m in self._samples),
        }


def write(results: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(results) + "\n", encoding="utf-8")


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name()
    return f"cpu, {platform.machine()}"


if __name__ == "__main__":
    main()
