"""Whether a metric wants another size than the loss does: a test over users at the largest budget."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from habitus.laws.checks import sign_of
from habitus.laws.law_builders import law_without_values
from habitus.laws.paired_users import PairedUsers
from habitus.laws.pure_error import SIGNIFICANT, PureError
from habitus.laws.runs import MeasuredRun
from habitus.store import SURFACE_AXIS, Law, LawEntry, Residuals, direction_of

LOSS = "batch/loss"
FORM = "difference of the metric between its own best size and the loss's"


def is_loss(metric: str) -> bool:
    """Whether a metric is the loss itself, in whatever regime, slice or evaluation."""
    return metric.split("/")[1:2] == ["loss"]


def size_tests(
    runs: Sequence[MeasuredRun],
    metrics: Sequence[str],
    error_of: Callable[[str, str], PureError | None],
    paired: PairedUsers,
) -> Iterator[LawEntry]:
    """For each metric but losses, at the largest budget of each axis that compares sizes; `error_of` takes an axis and
    a metric."""
    for axis in ("allocation", SURFACE_AXIS):
        sized = [run for run in runs if run.axis == axis]
        for metric in metrics if sized else ():
            law = None if is_loss(metric) else size_test(sized, metric, error_of(axis, metric), paired)
            if law is not None:
                yield LawEntry(name="size_test", axis=axis, metric=metric, law=law)


class ComparedCells(NamedTuple):
    """The runs of the best cell by the loss and of the best by a metric, of so many cells of one budget."""

    by_loss: list[MeasuredRun]
    by_metric: list[MeasuredRun]
    num_cells: int


def compared_cells(runs: Sequence[MeasuredRun], metric: str) -> ComparedCells | None:
    """The cells that the test compares, by means over seeds, at the largest budget that measured both metrics; None
    where none did."""
    runs = [
        run for run in runs if {LOSS, metric} <= set(run.metrics) and metric in run.errors and "params" in run.knobs
    ]
    largest = max((run.budget for run in runs), default=0.0)
    cells: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        if run.budget == largest:
            cells.setdefault(run.cell_id, []).append(run)
    if not cells:
        return None
    sign = sign_of(direction_of(metric))
    by_loss = min(cells.values(), key=lambda cell: _mean(cell, LOSS))
    by_metric = min(cells.values(), key=lambda cell: sign * _mean(cell, metric))
    return ComparedCells(by_loss, by_metric, len(cells))


def size_test(
    runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None, paired: PairedUsers | None = None
) -> Law | None:
    """'ok' where the cell that is best by the metric beats the cell that is best by the loss, beyond chance.

    Where the store holds values per query, users are paired. Else the errors of the two cells over users are taken as
    independent, which is cautious, since both answered the same queries. The difference from seed to seed is added
    where it is known; few seeds tell it badly, hence Student's t, with the degrees of freedom of Welch and
    Satterthwaite. The best of several cells is picked by the very numbers that are tested, hence Bonferroni's
    correction. None where errors or the loss are missing.
    """
    compared = compared_cells(runs, metric)
    if compared is None:
        return None
    by_loss, by_metric, num_cells = compared
    if num_cells < 2:
        return law_without_values("size_test", FORM, "too_few", num_cells, "one cell: nothing to compare")
    gain = sign_of(direction_of(metric)) * (_mean(by_loss, metric) - _mean(by_metric, metric))
    over_users = None if paired is None else paired.error(by_loss[0].recipe_hash, by_metric[0].recipe_hash, metric)
    if over_users is None:
        variance = sum(run.errors[metric] ** 2 / len(cell) ** 2 for cell in (by_loss, by_metric) for run in cell)
    else:
        variance = over_users**2
    dof = np.inf  # over users
    if error is not None:
        level = abs(_mean(by_loss, metric))
        by_seed = error.relative_variance * level**2 * (1 / len(by_loss) + 1 / len(by_metric))
        variance += by_seed
        dof = error.dof * (variance / by_seed) ** 2 if by_seed > 0 else np.inf
    chance = float(stats.t.sf(gain / np.sqrt(variance), dof)) if gain > 0 and variance > 0 else 1.0
    p_value = min(1.0, 2 * chance * (num_cells - 1))
    differs = p_value < SIGNIFICANT
    what = "recipe" if by_loss[0].axis == SURFACE_AXIS else "size"
    verdict = f"another {what} than the loss's" if differs else f"no other {what} than the loss's"
    return Law(
        law="size_test",
        form=FORM,
        status="ok" if differs else "flat",
        values={
            "size_by_loss": by_loss[0].knobs["params"],
            "size_by_metric": by_metric[0].knobs["params"],
            "gain": gain,
            "p_value": p_value,
        },
        residuals=Residuals(n=num_cells, dof=num_cells - 1),
        details={
            "budget": by_loss[0].budget,
            "paired": over_users is not None,
            "verdict": f"{metric} wants {verdict} (p = {p_value:.2g})",
        },
    )


def _mean(cell: Sequence[MeasuredRun], metric: str) -> float:
    return float(np.mean([run.metrics[metric] for run in cell]))
