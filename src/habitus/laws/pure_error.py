"""How much a run's metric differs from seed to seed, and whether a curve misses its points by more than that.

A curve's own residuals cannot tell noise from a wrong form. Cells that were run with several seeds can: with s² their
variance (ν degrees of freedom) and RSS_lof what the residual sum of squares holds beyond the scatter within cells,

    F = (RSS_lof / d) / s²   follows   F(d, ν)   where the form is right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from habitus.laws.runs import MeasuredRun
from habitus.store import Law
from habitus.units import pluralize

SIGNIFICANT = 0.05
_ENOUGH_SEEDS = 3  # degrees of freedom
_ROUNDING = 1e-9  # of a metric's level: no curve is wrong by less


@dataclass(frozen=True)
class PureError:
    """The variance of a metric from seed to seed, as a share of its level, pooled over replicated cells."""

    relative_variance: float
    dof: int
    num_cells: int

    def variance(self, values: np.ndarray) -> float:
        """Of one run, at the level of these values."""
        return self.relative_variance * float(np.abs(values).mean()) ** 2


def pure_error(runs: Iterable[MeasuredRun], metric: str) -> PureError | None:
    """From the cells that have several seeds at one learning rate; None where there are none."""
    cells: dict[tuple[str, float, str, float], dict[int, float]] = {}
    for run in runs:
        if metric in run.metrics:
            key = (run.axis, run.budget, run.cell_id, run.learning_rate)
            cells.setdefault(key, {})[run.seed] = run.metrics[metric]
    squares, dof, num_cells = 0.0, 0, 0
    for by_seed in cells.values():
        values = np.array(list(by_seed.values()))
        if len(values) > 1 and values.mean() != 0:
            squares += float(((values / values.mean() - 1) ** 2).sum())
            dof += len(values) - 1
            num_cells += 1
    return PureError(squares / dof, dof, num_cells) if dof and squares else None


def axis_error(runs: Sequence[MeasuredRun], axis: str, metric: str) -> PureError | None:
    """By the seeds of an axis among all usable runs, or by those of all stage-1 axes where it has too few."""
    own = pure_error((run for run in runs if run.axis == axis), metric)
    if axis == "negatives" or (own is not None and own.dof >= _ENOUGH_SEEDS):
        return own  # a run of stage 2 has a noise of its own
    return pure_error((run for run in runs if run.axis != "negatives"), metric)


def untested(error: PureError | None) -> str:
    """Why a wrong form would go unseen, or nearly so; empty where seeds can show it."""
    if error is None:
        return "no cell was run with several seeds: whether the form misses its points is not tested"
    if error.dof < _ENOUGH_SEEDS:
        known = f"{pluralize(error.num_cells, 'cell')} with several seeds, {pluralize(error.dof, 'degree')} of freedom"
        return f"{known}: a form must miss its points by much to be refused"
    return ""


def judge_fit(law: Law, error: PureError | None) -> Law:
    """The law, refused ('misfit') where it misses its points x, y by more than seeds differ."""
    rss, dof = law.residuals.n * (law.residuals.rmse or 0.0) ** 2, law.residuals.dof
    if error is None or not {"x", "y"} <= set(law.points) or dof < 1 or not law.values:
        return law
    x, y = (np.asarray(law.points[name]) for name in ("x", "y"))
    within, own_dof = 0.0, 0
    for at in np.unique(x):
        values = y[x == at]
        within += float(((values - values.mean()) ** 2).sum())
        own_dof += len(values) - 1
    d = dof - own_dof
    variance = error.variance(y)
    if d < 1 or (law.residuals.rmse or 0.0) <= _ROUNDING * float(np.abs(y).mean()):
        return law
    p_value = float(stats.f.sf(max(rss - within, 0.0) / d / variance, d, error.dof))
    details = {**law.details, "lack_of_fit_p_value": p_value, "seed_sd": float(np.sqrt(variance))}
    law = law.model_copy(update={"details": details})
    if p_value >= SIGNIFICANT or not law.ok:
        return law
    why = (
        f"the curve misses its points by {law.residuals.rmse:.2g} (RMSE) where seeds differ by {np.sqrt(variance):.2g} "
        f"({pluralize(error.num_cells, 'cell')} with several seeds; p = {p_value:.2g}): the form is wrong here, and "
        "neither its optimum nor its interval is to be trusted"
    )
    return law.model_copy(update={"status": "misfit", "warnings": (why, *law.warnings)})
