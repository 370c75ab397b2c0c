"""Cells that scatter about their valleys by more than seeds differ: noise of cells, or the wrong form?

Models of one size differ in more than their size: in how many heads they have, in which share comes out at a coarse
joint_dim, in how well a rule's rate suits them. A few seeds agree so well that any such difference is a lack of fit.
Where it goes with the place in the valley, or with one budget, the form is wrong and its optimum is refused. Where it
does not, and is small beside what the valley spans, it is noise like that of seeds, of cells instead of runs: the
curve is fitted to the means of cells, and intervals count their scatter.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from habitus.laws.pure_error import PureError
from habitus.laws.residual_structure import residual_structure
from habitus.store import Law

_WRONG = 0.05  # p value of residuals that go with the place in the valley
_ALONE = 0.01  # p value of a budget that misses by more than the others: several are asked
_MOST = 0.12  # of what a valley spans: up to there planted optima and exponents are held (decision 0143)
LEAST_DOF = 8  # of the scatter: fewer cells do not show whether it has a structure


class CellScatter(NamedTuple):
    """The scatter of the means of cells about the curves of several budgets."""

    error: PureError
    p_value: float

    def noted(self, law: Law) -> Law:
        """The law of cells' means, with what was counted as noise."""
        scatter = self.error.relative_variance**0.5
        own = {"cell_scatter": scatter, "cell_scatter_dof": self.error.dof, "structure_p_value": self.p_value}
        details = {**law.details, **own}
        why = (
            f"cells scatter about the curves by {scatter:.2g} of the metric, more than seeds do and at random "
            f"(p = {self.p_value:.2g}): counted as noise of cells"
        )
        return law.model_copy(update={"details": details, "warnings": (*law.warnings, why)})


def cell_scatter(laws: Mapping[float, Law], *, shared: bool) -> CellScatter | None:
    """The scatter of cells about the valleys of some budgets; None where it is no noise of cells.

    `shared`: the budgets have their exponents in common.
    """
    valleys = [_Valley.of(law) for law in laws.values() if law.status in ("ok", "misfit") and "x_opt" in law.values]
    if not valleys or not any(law.status == "misfit" for law in laws.values()):
        return None
    missed = np.concatenate([v.missed for v in valleys])
    design = _tangents(valleys, shared)
    dof = len(missed) - design.shape[1]
    if dof < LEAST_DOF:
        return None
    variance = float(missed @ missed) / dof
    if variance**0.5 > _MOST * float(np.median([v.span for v in valleys])):
        return None
    left = np.eye(len(missed)) - design @ np.linalg.pinv(design)
    places = np.concatenate([v.place for v in valleys])
    if any(_stands_out(missed, first, last, dof) for first, last in _spans(valleys)):
        return None
    p_value = residual_structure(missed, left, places[:, None], np.arange(len(missed))).p_value
    if p_value < _WRONG:
        return None
    return CellScatter(PureError(variance, min(dof, _num_places(laws) - 1), len(missed)), p_value)


def _num_places(laws: Mapping[float, Law]) -> int:
    """How many sizes (or shares) were run: one that is off alike at every budget tells of the scatter once only."""
    return len({x for law in laws.values() for x in law.points.get("x", ())})


def _spans(valleys: Sequence["_Valley"]) -> Iterator[tuple[int, int]]:
    """Where the cells of each budget begin and end."""
    ends = np.cumsum([len(v.missed) for v in valleys])
    yield from zip([0, *map(int, ends[:-1])], map(int, ends), strict=True)


def _stands_out(missed: np.ndarray, first: int, last: int, dof: int) -> bool:
    """Whether the cells of one budget miss their curve by more than those of the others, as where it alone bends."""
    own = missed[first:last]
    own_dof = dof * len(own) / len(missed)
    rest, rest_dof = float(missed @ missed - own @ own), dof - own_dof
    if rest_dof < 1 or rest <= 0:
        return False
    return float(stats.f.sf(float(own @ own) / own_dof / (rest / rest_dof), own_dof, rest_dof)) < _ALONE


def cell_means(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cells of one budget, and the mean of each over its seeds."""
    places = np.unique(x)
    return places, np.array([y[x == place].mean() for place in places])


class _Valley(NamedTuple):
    """The cells of one budget: misses as shares of the metric's level, places in the valley, and tangents of its curve
    by floor, a, b, α and β."""

    missed: np.ndarray
    place: np.ndarray
    span: float
    tangents: np.ndarray

    @classmethod
    def of(cls, law: Law) -> "_Valley":
        found = {**law.details, **law.values}
        sign = 1.0 if law.details["direction"] == "min" else -1.0
        x, y = cell_means(np.asarray(law.points["x"]), np.asarray(law.points["y"]))
        u = np.log(x / found["x_opt"])
        # Relative to the optimum, where powers of x are numbers of ordinary size.
        rise = sign * found["a"] * x ** found["alpha"]
        fall = sign * found["b"] * x ** -found["beta"]
        level = float(np.abs(y).mean())
        tangents = np.stack([np.ones_like(u), rise, fall, rise * u, fall * u], axis=1)
        curve = found["floor"] + rise + fall
        return cls((y - curve) / level, u, float(np.ptp(y)) / level, tangents)


def _tangents(valleys: list[_Valley], shared: bool) -> np.ndarray:
    """The columns that the fit had, [cells, values]: exponents once where budgets share them."""
    rows = []
    for number, valley in enumerate(valleys):
        own, exponents = valley.tangents[:, :3], valley.tangents[:, 3:]
        blocks = [np.zeros((len(own), 3)) for _ in valleys]
        blocks[number] = own
        if not shared:
            others = [np.zeros((len(own), 2)) for _ in valleys]
            others[number] = exponents
            blocks += others
        rows.append(np.hstack([*blocks, exponents] if shared else blocks))
    return np.vstack(rows)
