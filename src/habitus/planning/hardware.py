"""Devices: how much they hold, how fast they were seen to train, and what that means in hours.

Nominal FLOP/s, the unit of every budget. Only the H200's rates are measured; another card is scaled by its vendor's
dense bf16 peak against the H200's, and its range is widened, which the plan says.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from habitus.errors import ConfigError
from habitus.planning.facts import Speed, StoreFacts
from habitus.sizing import Cell
from habitus.store import GPUS, Gpu, MemoryEstimate, Quantity

_GIB = 1024**3

# Whole stage-1 steps on one H200, nominal FLOP/s by budget (docs/notebook.md, `benchmarks/train.py`, 2026-11-15).
# Evaluation, warm-up and checkpoints are not in them.
H200_RATES = {1e15: 84e12, 1e16: 233e12, 1e17: 437e12, 1e18: 626e12}
# A run reaches between half and all of the step's own rate: data, evaluation, checkpoints and start-up.
_LOWER, _UPPER = 0.5, 1.0
_SCALED_LOWER = 0.3  # another card
_SEVERAL_LOWER = 0.6  # several cards: exchange of gradients and candidates; not measured
# Bytes that the driver, the allocator's gaps and the compiler's buffers take; and headroom for what the count by
# structure leaves out.
_USABLE = 0.88
_NEAR = 2.0  # a run's step is near a planned one within this factor of FLOPs
_AS_NEAR = 1.25  # where none is, runs within this factor of the nearest one's distance count as well


@dataclass(frozen=True)
class Rate:
    """Nominal FLOP/s at a budget, as an honest range."""

    slow: float
    fast: float
    how: str
    measured: bool


def rate_on(device: Gpu, gpus: int, flops: float) -> Rate:
    """The rate of so many devices at a budget: the H200's measured steps, scaled where it is another card."""
    step_rate = _interpolated(H200_RATES, flops) * device.peak_tflops / GPUS["h200"].peak_tflops
    measured = device.name == "h200"
    lower = _LOWER if measured else _SCALED_LOWER
    how = "steps measured on one H200" if measured else "an H200's measured steps, scaled by the vendor's peak"
    if gpus > 1:
        lower *= _SEVERAL_LOWER
        how += f"; {gpus} devices are taken at 60 to 100% of their sum, not measured"
    if flops > 10 * max(H200_RATES) or flops < min(H200_RATES) / 10:
        how += "; no step of this budget was measured"
    return Rate(lower * step_rate * gpus, _UPPER * step_rate * gpus, how, measured and gpus == 1)


def hours_of_runs(stages: Sequence[tuple[int, float, float]], facts: StoreFacts) -> Quantity | None:
    """The time of (stage, FLOPs, FLOPs per step) at the rates of this study's runs whose steps are nearest."""
    if not facts.speeds:
        return None
    low = value = high = 0.0
    used, farthest = 0, 1.0
    for stage, flops, step_flops in stages:
        near = nearest_speeds(facts.speeds, stage, step_flops)
        rates = [speed.flops_per_second for speed in near]
        used += len(rates)
        farthest = max(farthest, *(step_flops / speed.step_flops for speed in near))
        low += flops / max(rates) / 3600
        high += flops / min(rates) / 3600
        value += flops / math.exp(math.fsum(map(math.log, rates)) / len(rates)) / 3600
    where = f" on {facts.hardware}" if facts.hardware else ""
    how = f"the {used} run{'s' * (used != 1)} of this study{where} whose steps are nearest in FLOPs"
    if farthest > _NEAR:
        how += f"; the planned steps are up to {farthest:.2g} times theirs"
    if facts.threads is not None:  # a sweep's workers share the cores, which a run alone has for itself
        how += f"; they had {facts.threads} thread{'s' * (facts.threads != 1)} each"
        how += "; a run that has the cores to itself may take less"
    return Quantity(
        value=value, low=None if facts.threads is not None else low, high=high, source="this study", how=how
    )


def nearest_speeds(speeds: Sequence[Speed], stage: int, step_flops: float) -> list[Speed]:
    """The runs of the stage (of any, where it has none) within twice or half the FLOPs per step; else the nearest."""
    known = [speed for speed in speeds if speed.stage == stage] or list(speeds)

    def far(speed: Speed) -> float:
        return abs(math.log(speed.step_flops / step_flops))

    within = max(math.log(_NEAR), min(map(far, known)) + math.log(_AS_NEAR))
    return [speed for speed in known if far(speed) <= within]


def affordable_flops(device: Gpu, gpus: int, hours: float) -> float:
    """The budget that the hours pay at the middle of the rate's range."""
    if not hours > 0 or not math.isfinite(hours):
        raise ConfigError(f"--hours {hours:g}", expected="a positive number of hours")
    flops = 1e17
    for _ in range(50):  # the rate depends on the budget; the map is a contraction, since rates grow slowly
        rate = rate_on(device, gpus, flops)
        flops = math.sqrt(rate.slow * rate.fast) * hours * 3600
    return flops


def _interpolated(rates: dict[float, float], flops: float) -> float:
    """Straight lines in logarithms between the budgets, level beyond them."""
    budgets = sorted(rates)
    at = min(max(flops, budgets[0]), budgets[-1])
    for low, high in itertools.pairwise(budgets):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(rates[low]) + share * math.log(rates[high]))
    return rates[budgets[-1]]


def memory_of(cell: Cell, device: Gpu | None, gpus: int) -> MemoryEstimate:
    """The step's bytes against one device. Several devices share the batch and, sharded, weights and optimizer."""
    parts = dict(cell.bytes)
    cache = parts.get("item_cache", 0) if cell.stage == 2 else 0
    stage = cell.stage
    if device is None:
        return MemoryEstimate(stage=stage, bytes=parts)
    room = int(device.gibibytes * _GIB * _USABLE)
    needed = (parts["total"] + cache) / gpus
    fits = needed <= room
    change = None if fits else _change(parts, cache, room * gpus)
    return MemoryEstimate(stage=stage, bytes=parts, device=device.name, device_bytes=room, fits=fits, change=change)


def _change(parts: dict[str, int], cache: int, room: int) -> str:
    """The setting that frees enough, the cheapest first."""
    fixed = parts["weights"] + parts["gradients"] + parts["optimizer"]
    if fixed > room:
        return "weights and optimizer alone are too large: more devices (torchrun shards them), or a smaller budget"
    moving = parts["activations"]
    rest = fixed + parts["candidates"] + cache
    if rest < room:
        micro = math.ceil(moving / max(room - rest, 1))
        return f"train with --accumulate {micro}: micro-batches keep the step and its candidates as they are"
    if cache > parts["candidates"]:
        return "the item cache is the largest part: more devices, or a smaller joint_dim"
    return "num_negatives: candidates are the largest part"
