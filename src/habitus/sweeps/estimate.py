"""What cells will take: seconds from measured rates of this store where there are any, bytes from their structure."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from habitus.recipe import Recipe
from habitus.sizing import Cell, Inputs, cell_of_recipe
from habitus.sweeps.cells import PlannedRun
from habitus.sweeps.store import Store

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Speeds:
    """seconds = start + steps · per_step + executed FLOPs / flops_per_second + evaluations."""

    start: float
    per_step: float
    flops_per_second: float
    evaluate: float  # the first of a run
    again: float  # a further one, as a share of the first
    source: str

    def seconds(self, cell: Cell, evaluations: int = 1) -> float:
        """The time of one cell, alone on its device."""
        train = cell.steps * self.per_step + cell.executed_flops / self.flops_per_second
        return self.start + train + _evaluations(evaluations, self.again) * self.evaluate


def _evaluations(count: int, again: float) -> float:
    """So many evaluations in first ones."""
    return 1 + (count - 1) * again


_BESIDE = 0.4  # seconds of a run that its Record does not count: claim, bundle, publication

# Before a store has Records. CUDA: one H200 with a warm compile cache (benchmarks/results/train-h200.json); there the
# first evaluation of a run loads and traces, and each of 30 further ones took a twentieth (docs/studies/h200-minutes).
_ASSUMED = {
    "cpu": Speeds(0.3, 0.008, 1.5e10, 0.5, 1.0, "assumed for one CPU thread"),
    "cuda": Speeds(3.0, 0.0047, 2.9e14, 2.0, 0.05, "assumed for one H200"),
}


def speeds_of(store: Store | None, device: str, inputs: Inputs) -> Speeds:
    """Speeds by non-negative least squares over the store's finished Records on such a device."""
    assumed = _ASSUMED[device]
    rows: list[tuple[int, float, float]] = []
    start: list[float] = []
    evaluate: list[float] = []
    for digest in store.digests() if store else ():
        record = store.record(digest) if store else None
        if record is None or record.seconds is None or record.status != "done" or record.steps < 1:
            continue
        if ("cpu" in str(record.hardware.get("device", "cpu"))) != (device == "cpu"):
            continue
        executed = cell_of_recipe(record.recipe, inputs).executed_flops
        rows.append((record.steps, executed, record.seconds.train))
        start.append(record.seconds.warmup)
        evaluate.append(record.seconds.evaluate / _evaluations(evaluations_of(record.recipe), assumed.again))
    if len(rows) < 3:
        return assumed
    import numpy as np

    steps, work, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    # Relative errors count: a cell of an hour and one of a second should both be right to a tenth.
    per_step, per_flop = _non_negative(np.stack([steps, work], axis=1) / seconds[:, None], np.ones(len(rows)))
    return Speeds(
        float(np.median(start)) + _BESIDE,
        float(per_step),
        1 / float(per_flop) if per_flop > 0 else 1e30,
        float(np.median(evaluate)),
        assumed.again,
        f"measured on {len(rows)} Records of this store",
    )


def _non_negative(columns: "np.ndarray", target: "np.ndarray") -> tuple[float, float]:
    """Least squares with two coefficients of which none may be negative."""
    import numpy as np

    both = np.linalg.lstsq(columns, target, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [(column @ target) / (column @ column) for column in columns.T]
    errors = [float(((column * k - target) ** 2).sum()) for column, k in zip(columns.T, alone, strict=True)]
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))


def evaluations_of(recipe: Recipe) -> int:
    """How often a run is evaluated, the end included."""
    every = recipe.evaluate.every
    return 1 + ((recipe.train.steps - 1) // every if every else 0)


def seconds_of(speeds: Speeds, cells: Iterable[PlannedRun]) -> dict[str, float]:
    """Estimated seconds of each run, by its hash."""
    return {p.hash: speeds.seconds(p.cell, evaluations_of(p.recipe)) for p in cells}


def wall_seconds(seconds: Sequence[float], workers: int) -> float:
    """The time that all runs take on so many workers: even shares, but no shorter than the longest run."""
    return max([sum(seconds) / max(1, workers), *seconds], default=0.0)


def device_kind(device: str) -> str:
    """cpu or cuda; `auto` looks for a GPU without loading torch where there cannot be one."""
    if device.startswith("cuda"):
        return "cuda"
    if device == "cpu" or not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usual_workers(kind: str) -> int:
    """How many workers a machine gets where the user does not say: one per core, or a few on a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return cores if kind == "cpu" else min(4, cores)


def device_bytes(kind: str) -> int:
    """Memory that cells may share: the GPU's, or what the machine has free."""
    if kind == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory * 0.92)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0  # unknown: no limit
    return int(kib * 1024 * 0.9)
