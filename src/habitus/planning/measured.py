"""What runs measured already: a forecast that is worse than a smaller budget's best run is not to be believed."""

from collections.abc import Sequence
from statistics import fmean

from habitus.laws import RECIPE_AXES, sign_of
from habitus.store import SURFACE_AXIS, RunRow, direction_of

SIZED_AXES = ("allocation", SURFACE_AXIS)  # whose sizes were compared
PLANNED_AXES = (*RECIPE_AXES, SURFACE_AXIS)  # whose runs spent a budget on a recipe, as a plan does
_SMALLER = 0.99  # of the planned budget


def better_for_less(metric: str, value: float, flops: float, runs: Sequence[RunRow]) -> str:
    """Why a forecast of a run of so many FLOPs is not to be believed; '' where no smaller budget measured better.

    `flops` are those that the study's runs would have paid for such a run.

    Means over the seeds of a cell, of the text depth whose sizes were compared.
    """
    sign = sign_of(direction_of(metric))
    cells: dict[tuple[str, float, str, float], list[float]] = {}
    for run in comparable_runs(runs):
        if metric in run.metrics and run.budget < _SMALLER * flops:
            key = (run.axis, run.budget, run.cell_id, run.learning_rate)
            cells.setdefault(key, []).append(run.metrics[metric])
    if not cells:
        return ""
    (_, budget, _, _), values = min(cells.items(), key=lambda item: sign * fmean(item[1]))
    best = fmean(values)
    if sign * value <= sign * best:
        return ""
    return (
        f"its forecast, {value:.4g}, is worse than the {best:.4g} that runs of {budget:.3g} FLOPs measured: "
        "the laws do not hold at the planned recipe"
    )


def comparable_runs(runs: Sequence[RunRow]) -> list[RunRow]:
    """Those of stage 1 that spent a budget on a recipe, of the text depth of most of the sizes."""
    depths = [run.knobs.get("text_depth", 0.0) for run in runs if run.axis in SIZED_AXES]
    common = max(sorted(set(depths)), key=depths.count, default=0.0)
    return [run for run in runs if run.axis in PLANNED_AXES and run.knobs.get("text_depth", 0.0) == common]


def usual_lengths(runs: Sequence[RunRow]) -> dict[str, int]:
    """`seq_len`, `text_len` and `text_depth` of most runs whose sizes were compared, as far as they say."""
    sized = [run.knobs for run in runs if run.axis in SIZED_AXES]
    lengths = {}
    for name in ("seq_len", "text_len", "text_depth"):
        values = [int(knobs[name]) for knobs in sized if knobs.get(name)]
        if values:
            lengths[name] = max(sorted(set(values)), key=values.count)
    return lengths
