"""The batch that trains fastest among those that lose nothing, by runs of several batch sizes at equal compute."""

import math
from collections.abc import Sequence
from statistics import mean, median

from habitus.planning.knobs import LADDER_EXPONENT
from habitus.sizing import StepSpeed
from habitus.store import Laws, Quantity, RunRow, direction_of

LOSS = "batch/loss"
_SAME = 1e-3  # of the FLOPs of a step
AS_GOOD = 0.005  # of the metric: batches within it of the best are as good


def choose_fastest(
    B: Quantity, laws: Laws, speeds: Sequence[StepSpeed], metric: str = LOSS, compute: float | None = None
) -> Quantity:
    """The fastest batch of those as good as the best one; B as it is, and said, where none can be compared.

    Where batch sizes were compared at equal compute, it is the fastest of them for the metric, carried on to `compute`
    as the ladder goes. Else B is that of the sizes' runs, and the batch axis says what faster ones lose of the loss.
    """
    compared = any(run.axis == "batch_size" and run.chosen and metric in run.metrics for run in laws.runs)
    axis, metric = ("batch_size", metric) if compared else ("batch", LOSS)
    by_batch = _runs_by_batch(laws, axis, metric)
    rates = {b: _rate(seeds[0], speeds) for b, seeds in by_batch.items()}
    runs = {b: seeds for b, seeds in by_batch.items() if rates[b] is not None}
    values = {b: mean(run.metrics[metric] for run in seeds) for b, seeds in runs.items()}
    best = max if direction_of(metric) == "max" else min
    own = _own_batch(laws, next(iter(runs.values()))[0].budget) if runs else None
    if runs and compared:
        own = best(values, key=lambda b: values[b])  # only to say how much faster another one is
    if len(runs) < 3 or own not in runs:
        return B.model_copy(update={"how": f"{B.how}; no batch axis with speeds around it to choose a faster one by"})
    top = best(values.values())
    as_good = [b for b, value in values.items() if abs(value - top) <= AS_GOOD * abs(top)]
    fastest = max(as_good, key=lambda b: rates[b] or 0.0)
    gain = (rates[fastest] or 0.0) / (rates[own] or 1.0)
    where = f"of {', '.join(f'{b:g}' for b in as_good)}, all within {AS_GOOD:.1%} of the best {metric} at "
    where += f"{runs[own][0].budget:.3g} FLOPs, {fastest:g} trains fastest ({gain:.2f} times the speed of {own:g})"
    wanted, how = B.value * fastest / own, B.how
    if compared:
        budget = runs[own][0].budget
        wanted = fastest * ((compute or budget) / budget) ** LADDER_EXPONENT
        how = "the fastest batch as good as the best one, carried on as the ladder goes"
        B = Quantity(value=wanted, source="this study", how=how)  # whatever gave B, and what that warned of
    value = max(1.0, 2.0 ** round(math.log2(wanted)))
    return B.model_copy(update={"value": value, "low": None, "high": None, "how": f"{how}; {where}"})


def _runs_by_batch(laws: Laws, axis: str, metric: str) -> dict[float, list[RunRow]]:
    """The runs of the axis at its largest budget, all seeds of each size: those of one budget's compute."""
    needs = ("batch_sequences", "flops_nominal", "steps", "slots_seen")
    runs = [
        run
        for run in laws.runs
        if run.axis == axis and run.chosen and metric in run.metrics and "pool_sequences" not in run.knobs
        and all(name in run.knobs for name in needs)
    ]  # fmt: skip
    top = max((run.budget for run in runs), default=0.0)
    by_batch: dict[float, list[RunRow]] = {}
    for run in sorted((run for run in runs if run.budget == top), key=lambda run: run.knobs["slots_seen"]):
        seeds = by_batch.setdefault(run.knobs["batch_sequences"], [])
        if not seeds or run.knobs["slots_seen"] == seeds[0].knobs["slots_seen"]:
            seeds.append(run)  # longer ones went on to reach a target
    return dict(sorted(by_batch.items()))


def _rate(run: RunRow, speeds: Sequence[StepSpeed]) -> float | None:
    """Nominal FLOP/s of the runs with steps of this size, which tells batches of one model apart."""
    step_flops = run.knobs["flops_nominal"] / run.knobs["steps"]
    rates = [s.flops_per_second for s in speeds if s.stage == 1 and abs(s.step_flops / step_flops - 1) < _SAME]
    return median(rates) if rates else None


def _own_batch(laws: Laws, budget: float) -> float | None:
    """The batch of the runs whose sizes were compared, at the nearest budget."""
    sized = [run for run in laws.runs if run.axis == "allocation" and "batch_sequences" in run.knobs]
    if not sized:
        return None
    return min(sized, key=lambda run: abs(math.log(run.budget / budget))).knobs["batch_sequences"]
