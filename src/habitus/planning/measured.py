"""What runs measured already: a forecast that is worse than what less compute measured is not to be believed."""

from collections.abc import Sequence
from statistics import fmean

from habitus.laws import RECIPE_AXES, is_loss, sign_of
from habitus.planning.sources import LOSS
from habitus.store import SURFACE_AXIS, RunRow, direction_of

SIZED_AXES = ("allocation", SURFACE_AXIS)  # whose sizes were compared
PLANNED_AXES = (*RECIPE_AXES, SURFACE_AXIS)  # whose runs spent a budget on a recipe, as a plan does
ALIKE = 1.02  # of the planned budget: cells of one budget differ by a step
SMALLER = 0.8  # of the planned budget: the best of many cells is lucky by as much as a few percent more compute buy


def better_for_less(
    metric: str,
    value: float,
    flops: float,
    runs: Sequence[RunRow],
    share: float = SMALLER,
    what: str = "its forecast",
) -> str:
    """Why a forecast of a run of so many FLOPs is not to be believed; '' where no smaller budget measured better.

    Smaller is below this share of the FLOPs; with ALIKE the plan's own budget counts too. `flops` are those that the
    study's runs would have paid for such a run; `what` names the value. Means over the seeds of a cell, of the text
    depth whose sizes were compared. A ranking metric is held against the cells that are best by the loss: a plan takes
    its recipe from the loss, and a smaller budget's best cell by such a metric may well be better.
    """
    ranked_by = metric if is_loss(metric) else LOSS
    cells: dict[tuple[str, float, str, float], list[RunRow]] = {}
    for run in comparable_runs(runs):
        if {metric, ranked_by} <= run.metrics.keys() and run.budget < share * flops:
            cells.setdefault((run.axis, run.budget, run.cell_id, run.learning_rate), []).append(run)
    best_cells: dict[float, list[RunRow]] = {}
    for (_, budget, _, _), cell in sorted(cells.items(), key=lambda item: _mean(item[1], ranked_by)):
        best_cells.setdefault(budget, cell)
    sign = sign_of(direction_of(metric))
    measured = {budget: _mean(cell, metric) for budget, cell in best_cells.items()}
    if not measured:
        return ""
    budget = min(measured, key=lambda c: sign * measured[c])
    if sign * value <= sign * measured[budget]:
        return ""
    return (
        f"{what}, {value:.4g}, is worse than the {measured[budget]:.4g} that runs of {budget:.3g} FLOPs "
        "measured: the laws do not hold at the planned recipe"
    )


def best_cell(runs: Sequence[RunRow], metric: str) -> RunRow:
    """The first run of the best cell by means over seeds: the best run is often one lucky seed of another cell."""
    cells: dict[tuple[str, float], list[RunRow]] = {}
    for run in runs:
        cells.setdefault((run.cell_id, run.learning_rate), []).append(run)
    sign = sign_of(direction_of(metric))
    return min(cells.values(), key=lambda cell: sign * _mean(cell, metric))[0]


def _mean(cell: Sequence[RunRow], metric: str) -> float:
    return fmean(run.metrics[metric] for run in cell)


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
