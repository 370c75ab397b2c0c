"""How fast runs train: as measured on the runs of a store, and as assumed where there are none.

A sweep asks for the seconds of small runs, where start-up, steps and evaluations count: `SpeedModel`. A plan asks for
the hours of a large one, where only FLOP/s count: those of measured runs with similar steps (`StepSpeed`), or of an
H200's steps by budget (`step_rate`).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from habitus.recipe import Recipe
from habitus.record import Record
from habitus.sizing.cell import Cell, cell_of_recipe
from habitus.sizing.structure import Inputs
from habitus.store import GPUS, Gpu

if TYPE_CHECKING:
    import numpy as np

# Whole stage-1 steps on one H200, nominal FLOP/s by budget (benchmarks/results/train-h200.json, 2026-11-18).
# Evaluation, warm-up and checkpoints are not in them.
H200_RATES = {1e15: 110.2e12, 1e16: 257.5e12, 1e17: 455.9e12, 1e18: 642.4e12}
_PACE_SECONDS = 60.0
NEAR_FACTOR = 2.0  # a run's step is near a planned one within this factor of FLOPs
_AS_NEAR = 1.25  # where none is, runs within this factor of the nearest one's distance count as well
_UNRECORDED = 0.4  # seconds of a run that its Record does not count: claim, bundle, publication
_RUN_SCATTER, _PART_SCATTER = 0.15, 0.5  # of runs about their stated parts, and of the parts about the common pace
Parts = tuple[float, float, float]  # of a stated time: start and evaluations, steps, FLOPs


@dataclass(frozen=True)
class SpeedModel:
    """seconds = start + steps · per_step + executed FLOPs / flops_per_second + evaluations."""

    start: float
    per_step: float
    flops_per_second: float
    evaluate: float  # the first of a run
    again: float  # a further one, as a share of the first
    source: str
    evaluate_catalogue: float | None = None  # where the catalogue is ranked too; None: as long as without

    def seconds(self, cell: Cell, evaluations: int = 1) -> float:
        """The time of one cell, alone on its device."""
        return sum(self.parts(cell.steps, cell.executed_flops, evaluations))

    def parts(self, steps: int, executed_flops: float, evaluations: int = 1, catalogue: bool = False) -> Parts:
        """The time of one run in its parts."""
        evaluate = self.evaluate_catalogue if catalogue and self.evaluate_catalogue is not None else self.evaluate
        fixed = self.start + _first_evaluations(evaluations, self.again) * evaluate
        return fixed, steps * self.per_step, executed_flops / self.flops_per_second


# Before a store has Records. CUDA: one H200 with a warm compile cache (benchmarks/results/train-h200.json); there the
# first evaluation of a run loads and traces, and each of 30 further ones took a twentieth (docs/studies/h200-minutes).
_ASSUMED = {
    "cpu": SpeedModel(0.3, 0.008, 1.5e10, 0.5, 1.0, "assumed for one CPU thread"),
    "cuda": SpeedModel(3.0, 0.0047, 2.9e14, 2.0, 0.05, "assumed for one H200"),
}


def fit_speed(records: Iterable[Record], device: str, inputs: Inputs, before: SpeedModel | None = None) -> SpeedModel:
    """The speed of a kind of device (cpu or cuda) by non-negative least squares over its finished Records; `before`
    is what holds where there are too few of them.

    On a GPU those with several pools of candidates run one operation at a time, and tell nothing of the others.
    """
    assumed = _ASSUMED[device]
    rows: list[tuple[int, float, float]] = []
    start: list[float] = []
    evaluate: dict[bool, list[float]] = {False: [], True: []}  # with the catalogue or without
    for record in records:
        if record.seconds is None or record.status != "done" or record.steps < 1:
            continue
        if ("cpu" in str(record.hardware.get("device", "cpu"))) != (device == "cpu"):
            continue
        if device != "cpu" and record.recipe.train.pool_sequences is not None:
            continue
        executed = cell_of_recipe(record.recipe, inputs).executed_flops
        rows.append((record.steps, executed, record.seconds.train))
        start.append(record.seconds.warmup)
        count = _first_evaluations(count_evaluations(record.recipe), assumed.again)
        evaluate[ranks_catalogue(record.recipe)].append(record.seconds.evaluate / count)
    if len(rows) < 3:
        return before or assumed
    import numpy as np

    steps, work, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    # Relative errors count: a cell of an hour and one of a second should both be right to a tenth.
    per_step, per_flop = _non_negative(np.stack([steps, work], axis=1) / seconds[:, None], np.ones(len(rows)))
    return SpeedModel(
        float(np.median(start)) + _UNRECORDED,
        float(per_step),
        1 / float(per_flop) if per_flop > 0 else 1e30,
        float(np.median(evaluate[False] or evaluate[True])),
        assumed.again,
        f"measured on {len(rows)} Records of this store",
        _catalogue_seconds(evaluate, before),
    )


def _catalogue_seconds(evaluate: dict[bool, list[float]], before: SpeedModel | None) -> float | None:
    """Of an evaluation that ranks the catalogue too: as measured, else in the proportion that it had before."""
    import numpy as np

    if evaluate[True]:
        return float(np.median(evaluate[True]))
    if before is None or before.evaluate_catalogue is None or not before.evaluate:
        return None
    return before.evaluate_catalogue * float(np.median(evaluate[False])) / before.evaluate


def count_evaluations(recipe: Recipe) -> int:
    """How often a run is evaluated, the end included."""
    every = recipe.evaluate.every
    return 1 + ((recipe.train.steps - 1) // every if every else 0)


def ranks_catalogue(recipe: Recipe) -> bool:
    """Whether the evaluations of a run rank the whole catalogue."""
    return "catalogue" in recipe.evaluate.regimes


def wall_seconds(seconds: Sequence[float], workers: int) -> float:
    """The time that all runs take on so many workers: even shares, but no shorter than the longest run."""
    return max([sum(seconds) / max(1, workers), *seconds], default=0.0)


def pace(stated: Sequence[float], taken: Sequence[float]) -> float:
    """What finished work took over what was stated for it, to correct the rest by; 1 where nothing has finished.

    A minute of stated time is added to both sides, so that the first seconds of a study decide little.
    """
    return (sum(taken) + _PACE_SECONDS) / (sum(stated) + _PACE_SECONDS)


def pace_of_runs(stated: Sequence[float], taken: Sequence[float]) -> float:
    """What finished runs took over what was stated for them, with one more run that took what was stated."""
    more = sum(stated) / len(stated) if stated else 1.0
    return (sum(taken) + more) / (sum(stated) + more)


def part_factors(stated: Sequence[Parts], taken: Sequence[float]) -> Parts:
    """What each part of a stated time is to be multiplied by, going by the runs that have finished.

    Least squares of relative errors, held to the pace of all parts together: runs that are alike tell only that.
    """
    known = [(parts, seconds) for parts, seconds in zip(stated, taken, strict=True) if seconds > 0]
    stated, taken = [parts for parts, _ in known], [seconds for _, seconds in known]
    common = pace_of_runs([sum(parts) for parts in stated], taken)
    if not stated:
        return common, common, common
    import numpy as np

    held = _RUN_SCATTER / _PART_SCATTER / common
    columns = np.concatenate([np.asarray(stated) / np.asarray(taken)[:, None], held * np.eye(3)])
    target = np.concatenate([np.ones(len(taken)), np.full(3, held * common)])
    fixed, steps, work = np.maximum(np.linalg.lstsq(columns, target, rcond=None)[0], 0.1 * common).tolist()
    return fixed, steps, work


def seconds_taken(record: Record) -> float | None:
    """The time of a run that ended well, with what its Record does not count; None where it is not known."""
    if record.seconds is None or record.status != "done":
        return None
    return record.seconds.warmup + record.seconds.train + record.seconds.evaluate + _UNRECORDED


@dataclass(frozen=True)
class StepSpeed:
    """How fast one run trained: small steps reach less of what a device can do."""

    stage: int
    step_flops: float  # nominal
    flops_per_second: float  # nominal
    executed_share: float | None = None  # executed FLOPs of a nominal one; None where the Record does not say


def step_speeds(records: Iterable[Record]) -> Iterator[StepSpeed]:
    """The speed of every run whose Record says how long it trained.

    Those with several pools of candidates run one operation at a time on a GPU, as no planned run does.
    """
    for record in records:
        if record.recipe.train.pool_sequences is not None:
            continue
        flops, steps = record.flops_nominal, record.recipe.train.steps
        if record.seconds is None or not flops or not math.isfinite(flops) or not record.seconds.train > 0:
            continue
        executed = None if record.flops_executed is None else record.flops_executed / flops
        yield StepSpeed(record.recipe.train.stage, flops / steps, flops / record.seconds.train, executed)


def nearest_speeds(speeds: Sequence[StepSpeed], stage: int, step_flops: float) -> list[StepSpeed]:
    """The runs of the stage (of any, where it has none) within twice or half the FLOPs per step; else the nearest."""
    of_stage = [speed for speed in speeds if speed.stage == stage] or list(speeds)

    def distance(speed: StepSpeed) -> float:
        return abs(math.log(speed.step_flops / step_flops))

    within = max(math.log(NEAR_FACTOR), min(map(distance, of_stage)) + math.log(_AS_NEAR))
    return [speed for speed in of_stage if distance(speed) <= within]


def step_rate(gpu: Gpu, flops: float) -> float:
    """Nominal FLOP/s of stage-1 steps of a budget: the H200's as measured, another GPU's scaled by the vendor's peak.

    Straight lines in logarithms between the measured budgets, level beyond them.
    """
    return _interpolate(H200_RATES, flops) * gpu.peak_tflops / GPUS["h200"].peak_tflops


def _interpolate(rates: dict[float, float], flops: float) -> float:
    budgets = sorted(rates)
    at = min(max(flops, budgets[0]), budgets[-1])
    for low, high in itertools.pairwise(budgets):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(rates[low]) + share * math.log(rates[high]))
    return rates[budgets[-1]]


def _first_evaluations(count: int, again: float) -> float:
    """So many evaluations, counted in first ones."""
    return 1 + (count - 1) * again


def _non_negative(columns: "np.ndarray", target: "np.ndarray") -> tuple[float, float]:
    """Least squares with two coefficients of which none may be negative."""
    import numpy as np

    both = np.linalg.lstsq(columns, target, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [(column @ target) / (column @ column) for column in columns.T]
    errors = [float(((column * k - target) ** 2).sum()) for column, k in zip(columns.T, alone, strict=True)]
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))
