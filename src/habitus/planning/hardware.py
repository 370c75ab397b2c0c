"""Hours and memory: what a plan costs on a GPU, or at the speed of the study's own runs.

Nominal FLOP/s, the unit of every budget. Only the H200's rates are measured; another GPU's range is wider, and the plan
says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from habitus.errors import ConfigError
from habitus.planning.facts import StoreFacts
from habitus.planning.several_gpus import SharedStep, Sharing
from habitus.planning.sources import assumed
from habitus.sizing import H200_RATES, NEAR_FACTOR, SHARD_ABOVE, Cell, StepSpeed, nearest_speeds, step_rate
from habitus.store import Gpu, MemoryEstimate, Quantity
from habitus.units import format_seconds

_GIB = 1024**3
# A run reaches between half and all of the step's own rate: data, evaluation, checkpoints and start-up.
_LOWER, _UPPER = 0.5, 1.0
_SCALED_LOWER = 0.3  # another GPU than the measured one
# Bytes that the driver, the allocator's gaps and the compiler's buffers take; and headroom for what the count by
# structure leaves out.
_USABLE = 0.88
_BUSY = 1.3  # times as long, from which on a user should know


@dataclass(frozen=True)
class RateRange:
    """Nominal FLOP/s that a run may reach at a budget."""

    slow: float
    fast: float
    how: str
    measured: bool


def rate_on(gpu: Gpu, gpus: int, flops: float, stages: Sequence[tuple[float, Cell]] = ()) -> RateRange:
    """The rate of so many GPUs at a budget: the H200's measured steps, scaled where it is another GPU.

    Several GPUs exchange what the steps of the stages, (FLOPs, cell) each, send; without stages, those of the measured
    step of the nearest budget.
    """
    rate = step_rate(gpu, flops)
    measured = gpu.name == "h200"
    lower = _LOWER if measured else _SCALED_LOWER
    how = (
        "steps measured on one H200 that runs nothing else"
        if measured
        else "an H200's measured steps, scaled by the vendor's peak"
    )
    slow = fast = rate * gpus
    if gpus > 1:
        shares = [(spent, SharedStep.of_cell(cell)) for spent, cell in stages if spent > 0]
        shares = shares or [(flops, SharedStep.measured_near(flops))]
        parts = [(spent, Sharing(step, gpu, gpus, rate)) for spent, step in shares]
        total = math.fsum(spent for spent, _ in parts)
        slow = total / math.fsum(spent / part.step.flops * part.slow_seconds for spent, part in parts)
        fast = total / math.fsum(spent / part.step.flops * part.fast_seconds for spent, part in parts)
        how += f"; {parts[0][1].describe()}"
    if flops > 10 * max(H200_RATES) or flops < min(H200_RATES) / 10:
        how += "; no step of this budget was measured"
    return RateRange(lower * slow, _UPPER * fast, how, measured and gpus == 1)


def affordable_flops(gpu: Gpu, gpus: int, hours: float) -> float:
    """The budget that the hours pay at the middle of the rate's range."""
    if not hours > 0 or not math.isfinite(hours):
        raise ConfigError(f"--hours {hours:g}", expected="a positive number of hours")
    flops = 1e17
    for _ in range(50):  # the rate depends on the budget; the map is a contraction, since rates grow slowly
        rate = rate_on(gpu, gpus, flops)
        flops = math.sqrt(rate.slow * rate.fast) * hours * 3600
    return flops


def hours_at(rate: RateRange, flops: float) -> Quantity:
    """The hours of a budget at a rate; the value is the middle of their range on a logarithmic scale."""
    low, high = flops / rate.fast / 3600, flops / rate.slow / 3600
    return assumed(math.sqrt(low * high), low, high, "default", rate.how)


class PlannedSteps(NamedTuple):
    """What a planned stage does, for its hours."""

    stage: int
    flops: float  # nominal
    step_flops: float
    executed_share: float | None = None  # executed FLOPs of a nominal one


def hours_of_runs(stages: Sequence[PlannedSteps], facts: StoreFacts) -> Quantity | None:
    """The hours at the rates of this study's runs whose steps are nearest.

    The range is that of all of them, by nominal and by executed FLOPs: another depth or share has more or less to do
    for the same nominal FLOPs.
    """
    if not facts.speeds:
        return None
    low = value = high = 0.0
    used, farthest = 0, 1.0
    for planned in stages:
        near = nearest_speeds(facts.speeds, planned.stage, planned.step_flops)
        hours = [planned.flops / speed.flops_per_second / 3600 for speed in near]
        ends = [*hours, *(by * _executed_ratio(planned, speed) for by, speed in zip(hours, near, strict=True))]
        used += len(near)
        farthest = max(farthest, *(planned.step_flops / speed.step_flops for speed in near))
        low += min(ends)
        high += max(ends)
        value += math.exp(math.fsum(map(math.log, hours)) / len(hours))
    where = f" on {facts.hardware}" if facts.hardware else ""
    how = f"the {used} run{'s' * (used != 1)} of this study{where} whose steps are nearest in FLOPs"
    if farthest > NEAR_FACTOR:
        how += f"; the planned steps are up to {farthest:.2g} times theirs"
    if facts.threads is not None:  # a sweep's workers share the cores, which a run alone has for itself
        how += f"; they had {facts.threads} thread{'s' * (facts.threads != 1)} each"
        how += "; a run that has the cores to itself may take less"
    return assumed(value, -math.inf if facts.threads is not None else low, high, "this study", how)


def _executed_ratio(planned: PlannedSteps, speed: StepSpeed) -> float:
    """How many times the executed FLOPs of a run a planned step has, for the same nominal ones."""
    if planned.executed_share is None or speed.executed_share is None:
        return 1.0
    return planned.executed_share / speed.executed_share


def busy_note(hours: Quantity, slowdown: float) -> str | None:
    """What the hours of a study's own runs become while others use the cores; None where that hardly shows."""
    if hours.source != "this study" or slowdown < _BUSY:
        return None
    longer = format_seconds(3600 * hours.value * slowdown)
    return f"Other processes are using the cores: started now, it takes about {slowdown:.1f} times as long, {longer}."


def memory_of(cell: Cell, gpu: Gpu | None, gpus: int) -> MemoryEstimate:
    """The step's bytes against one GPU. Several share the batch, candidates and items, and weights that are sharded."""
    parts = dict(cell.bytes)
    cache = parts.get("item_cache", 0) if cell.stage == 2 else 0
    stage = cell.stage
    if gpu is None:
        return MemoryEstimate(stage=stage, bytes=parts)
    room = int(gpu.gibibytes * _GIB * _USABLE)
    fixed = parts["weights"] + parts["gradients"] + parts["optimizer"]
    divided = parts["total"] - fixed + cache
    needed = divided / gpus + (fixed / gpus if cell.params + cell.vocabulary_params > SHARD_ABOVE else fixed)
    fits = needed <= room
    change = None if fits else _change(parts, cache, room * gpus)
    return MemoryEstimate(stage=stage, bytes=parts, device=gpu.name, device_bytes=room, fits=fits, change=change)


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
