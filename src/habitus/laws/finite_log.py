"""The law of a log that ends: a metric over size, unique events and passes, and what more users would bring.

Two forms of the surface (`finite_forms`) are compared by runs that they were not fitted to. What more users bring is
forecast by one of them, by a learning curve through the best runs of each share or, for a ranking metric, through the
loss, whichever forecast shares that were left out best. The largest share is also forecast from the smaller ones: where
that misses by more than its interval, intervals beyond the log are widened by as much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

from habitus.errors import FitError
from habitus.laws.checks import Numbers, all_equal, as_columns, check_positive, num_distinct, sign_of
from habitus.laws.finite_fit import FiniteFit, LogRuns
from habitus.laws.finite_forms import FiniteForm, Place, learning_curve, penalty, repetition
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.store import LEVELS, Direction, Law
from habitus.units import pluralize

NAME = "finite_log"
FORM = "metric over N, U unique events and R passes"
LEARNING_CURVE, THROUGH_LOSS = "learning_curve", "through_loss"
_LEAST_SHARES = 3
_FOLDS = 6  # into which runs are put to be left out
_AS_GOOD = 2.0  # times the best way's error on shares left out
_TOO_FAR = 3.0  # times its interval: a largest share missed by more is not forecast by this law


def finite_log(
    size: Numbers,
    events: Numbers,
    passes: Numbers,
    metric: Numbers,
    *,
    share: Numbers | None = None,
    part: Sequence[str] | None = None,
    loss: Numbers | None = None,
    direction: Direction = "min",
) -> Law:
    """The law of runs with N parameters, U unique events and R passes over them.

    `share` is the share of the log's users that a run saw (that of the events where it is not given), `part` a name
    that runs on the same users have in common, `loss` the loss of the same runs, through which a ranking metric may be
    forecast.
    """
    N, U, R, y = as_columns(size=size, events=events, passes=passes, metric=metric)
    check_positive(size=N, events=U, passes=R)
    if not len(y):
        return law_without_values(NAME, FORM, "too_few", 0, "no runs")
    (shares,) = as_columns(share=U / U.max() if share is None else share)
    check_positive(share=shares)
    details: dict[str, Any] = {"direction": direction, "share": shares.tolist()}
    if part is not None:
        details["part"] = [str(name) for name in part]
    if loss is not None:
        details["loss"] = as_columns(loss=loss)[0].tolist()
    points = {"N": tuple(N), "U": tuple(U), "R": tuple(R), "y": tuple(y)}
    sign_of(direction)
    if all_equal(y):
        return law_without_values(NAME, FORM, "flat", len(y), "all values are equal: neither data nor passes matter")
    runs = _runs(points, details)
    candidates = [form for form in _surfaces(runs) if len(y) >= 2 + _num_values(form)]
    if not candidates and num_distinct(shares) < _LEAST_SHARES:
        why = (
            f"{pluralize(len(y), 'run')} on {pluralize(num_distinct(shares), 'share')} of the users with "
            f"{num_distinct(R)} numbers of passes: train on three shares, or for more numbers of passes"
        )
        return law_without_values(NAME, FORM, "too_few", len(y), why)
    details |= _choose_surface(runs, candidates)
    details |= _choose_forecast(runs, candidates, details)
    fitted = FiniteLog(points, details)
    return _law(fitted, points, details)


def open_finite_log(law: Law) -> "FiniteLog":
    """The law ready to answer, from what laws.json holds of it."""
    if law.law != NAME or not law.points:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted law of a finite log")
    return FiniteLog(law.points, law.details)


class FiniteLog:
    """A fitted law that answers in the metric's own direction."""

    def __init__(self, points: dict[str, tuple[float, ...]], details: dict[str, Any]) -> None:
        self.runs = _runs(points, details)
        self.sign = sign_of(details["direction"])
        self.details = details
        self._surfaces: dict[str, FiniteFit] = {}

    @cached_property
    def surface(self) -> FiniteFit | None:
        """The better of the forms over N, U and R; absent where there are too few runs for any."""
        return None if "surface" not in self.details else self.surface_of(self.details["surface"])

    def surface_of(self, name: str) -> FiniteFit:
        """One of the forms over N, U and R, fitted once."""
        if name not in self._surfaces:
            self._surfaces[name] = FiniteFit(_form(name, self.runs), self.runs)
        return self._surfaces[name]

    @cached_property
    def curve(self) -> FiniteFit:
        """The learning curve through the best runs of each share."""
        return FiniteFit(learning_curve(), self.runs.where(best_rows(self.runs)))

    @cached_property
    def loss_law(self) -> "FiniteLog":
        details: dict[str, Any] = {**self.details["of_loss"], "direction": "min"}
        points = {"N": self.runs.place.N, "U": self.runs.place.U, "R": self.runs.place.R, "y": self.details["loss"]}
        details |= {name: column for name, column in self.details.items() if name in ("share", "part")}
        return FiniteLog(points, details)

    @property
    def largest_events(self) -> float:
        return float(self.runs.place.U.max())

    def predict(
        self, N: float, U: float, R: float, level: float = 0.95, new_runs: float = 0.0
    ) -> tuple[float, float, float]:
        """(value, low, high) of the metric at one size, log and number of passes, by the surface."""
        if self.surface is None:
            raise FitError("too few runs for a law over passes", expected="runs for several numbers of passes")
        return self._told(self.surface.predict(_place(N, U, R), level, new_runs=new_runs), U)

    def forecast(
        self, N: float, U: float, R: float, level: float = 0.95, new_runs: float = 0.0
    ) -> tuple[float, float, float]:
        """(value, low, high) of the metric with U unique events, by whatever forecast left out shares best.

        `new_runs` asks for the interval of a mean over so many runs rather than of the law.
        """
        place = _place(N, U, R)
        value, low, high = _forecaster(self.details["forecast_by"], self)(place, level, new_runs)
        # Ways that did nearly as well on what was left out may be right where they say otherwise; so may the second.
        for way in self.details.get("as_good", ()):
            _, other_low, other_high = _forecaster(way, self)(place, level, new_runs)
            low, high = min(low, other_low), max(high, other_high)
        return self._told((value, low, high), U)

    def _told(self, answer: tuple[float, float, float], U: float) -> tuple[float, float, float]:
        value, low, high = answer
        widen = self.details.get("widen", 1.0) if 1.02 * self.largest_events < U else 1.0
        ends = sorted(float(self.sign * (value + widen * (end - value))) for end in (low, high))
        return float(self.sign * value), ends[0], ends[1]


Forecaster = Callable[[Place, float, float], tuple[float, float, float]]  # place, level, new runs


def _forecaster(name: str, fitted: FiniteLog) -> Forecaster:
    """One way to forecast, in y that falls where the metric improves."""
    if name == LEARNING_CURVE:
        return lambda place, level, new: fitted.curve.predict(place, level, new_runs=new)
    if name == THROUGH_LOSS:
        return _through_loss(fitted)
    return lambda place, level, new: fitted.surface_of(name).predict(place, level, new_runs=new)


def _through_loss(fitted: FiniteLog) -> Forecaster:
    """A straight line from loss to y, at the loss that its own law forecasts; both uncertainties count."""
    loss_law = fitted.loss_law
    rows = best_rows(fitted.runs)
    x, y = loss_law.runs.y[rows], fitted.runs.y[rows]
    slope, level_at = np.polyfit(x - x.mean(), y, 1)
    dof = max(len(y) - 2, 1)
    s2 = float(((y - level_at - slope * (x - x.mean())) ** 2).sum()) / dof
    spread = max(float(((x - x.mean()) ** 2).sum()), 1e-300)
    by_loss = _forecaster(loss_law.details["forecast_by"], loss_law)

    def forecast(place: Place, level: float, new_runs: float) -> tuple[float, float, float]:
        loss, low, high = by_loss(place, level, 0.0)
        value = level_at + slope * (loss - x.mean())
        variance = s2 * (1 / len(y) + (loss - x.mean()) ** 2 / spread + (1 / new_runs if new_runs else 0.0))
        own = stats.t.ppf(0.5 + level / 2, dof) * np.sqrt(variance)
        ends = sorted(slope * (end - loss) for end in (low, high))
        return float(value), float(value - np.hypot(ends[0], own)), float(value + np.hypot(ends[1], own))

    return forecast


def best_rows(runs: LogRuns) -> np.ndarray:
    """The runs of each share at the size and passes whose mean is best."""
    keep = np.zeros(len(runs.y), bool)
    cell = _cells(runs)
    for level in np.unique(runs.level):
        here = runs.level == level
        means = {c: runs.y[here & (cell == c)].mean() for c in np.unique(cell[here])}
        # A cell that one part of many happened to see is no mean to choose by.
        counts = {c: int((here & (cell == c)).sum()) for c in means}
        usual = [c for c in means if counts[c] >= 0.5 * max(counts.values())]
        keep |= here & (cell == min(usual, key=lambda c: means[c]))
    return np.flatnonzero(keep)


def _cells(runs: LogRuns) -> np.ndarray:
    """One id per share, size and number of passes; steps are whole, so that equal passes differ a little."""
    cell, order = np.zeros(len(runs.y), int), np.lexsort((runs.place.R, runs.place.N, runs.level))
    key = np.stack([2.0 * runs.level, np.log(runs.place.N) / 0.05, np.log(runs.place.R) / 0.15], axis=1)[order]
    cell[order] = np.concatenate([[0], np.cumsum((np.abs(np.diff(key, axis=0)) > 1).any(1))])
    return cell


def _surfaces(runs: LogRuns) -> list[FiniteForm]:
    """The forms over passes that these runs could tell apart from one over events alone."""
    if len(best_rows(runs)) == len(runs.y):
        return []
    return [_form(name, runs) for name in ("penalty", "repetition")]


def _form(name: str, runs: LogRuns) -> FiniteForm:
    sizes_differ = num_distinct(runs.place.N) > 1
    return {"penalty": penalty, "repetition": repetition}[name](sizes_differ)


def _num_values(form: FiniteForm) -> int:
    return 1 + len(form.coefs) + len(form.exponents)


@dataclass(frozen=True)
class _Left:
    """One group left out: what was measured and what a form forecast."""

    measured: float
    forecast: float
    half: float  # of the 95% interval


def _choose_surface(runs: LogRuns, forms: Sequence[FiniteForm]) -> dict[str, Any]:
    """The form over N, U and R, by what each made of runs that it had not seen."""
    scores = {form.name: _surface_score(form, runs) for form in forms}
    return {"surface": min(scores, key=lambda name: scores[name]), "held_out": scores} if scores else {}


def _choose_forecast(runs: LogRuns, forms: Sequence[FiniteForm], details: dict[str, Any]) -> dict[str, Any]:
    """The way to forecast more users, by what each made of shares that it had not seen."""
    chosen: dict[str, Any] = {}
    if len(np.unique(runs.level)) < _LEAST_SHARES:
        return {"forecast_by": details.get("surface", LEARNING_CURVE)}
    ways = [*(form.name for form in forms), LEARNING_CURVE]
    seen = {level: _without(runs, np.flatnonzero(runs.level != level), details) for level in np.unique(runs.level)}
    if "loss" in details:
        of_loss = LogRuns(runs.place, np.asarray(details["loss"]), runs.part, runs.level)
        names = {k: v for k, v in details.items() if k in ("share", "part")}
        chosen["of_loss"] = _choose_forecast(of_loss, forms, names)
        for fitted in seen.values():
            fitted.details["of_loss"] = chosen["of_loss"]
        ways.append(THROUGH_LOSS)
    left = {way: _forecast_shares(way, runs, seen) for way in ways}
    errors = {way: _rms([x.forecast - x.measured for x in rows]) for way, rows in left.items()}
    best, *others = sorted(errors, key=lambda way: errors[way])
    top = left[best][-1]
    return chosen | {
        "forecast_by": best,
        "as_good": [way for way in others if way == others[0] or errors[way] <= _AS_GOOD * errors[best]],
        "forecast_held_out": errors,
        "largest_share": {"measured": top.measured, "forecast": top.forecast, "half_width": top.half},
        "widen": max(1.0, abs(top.forecast - top.measured) / max(top.half, 1e-300)),
    }


def _without(runs: LogRuns, rest: np.ndarray, details: dict[str, Any]) -> FiniteLog:
    """The law of some of the runs, which may be asked for any form; y falls where the metric improves."""
    kept: dict[str, Any] = {k: [details[k][i] for i in rest] for k in ("share", "part", "loss") if k in details}
    points = {name: tuple(column[rest]) for name, column in zip("NUR", runs.place, strict=True)}
    return FiniteLog(points | {"y": tuple(runs.y[rest])}, {"direction": "min", **kept})


def _surface_score(form: FiniteForm, runs: LogRuns) -> float:
    """The root mean square error of a form on runs that it was not fitted to, each left out once.

    What the other runs of their part missed in common is known, as it is for one more run on the same users.
    """
    order = np.lexsort((runs.place.R, runs.part))
    folds = np.empty(len(order), int)
    folds[order] = np.arange(len(order)) % min(_FOLDS, len(order))
    missed, whole = np.zeros(len(order)), FiniteFit(form, runs)
    for fold in np.unique(folds):
        at = np.flatnonzero(folds == fold)
        fit = FiniteFit(form, runs.where(np.flatnonzero(folds != fold)), whole.log_theta)
        missed[at] = runs.y[at] - fit.value(runs.where(at).place) - fit.common_miss(runs.part[at])
    return _rms(missed)


def _forecast_shares(way: str, runs: LogRuns, seen: dict[int, FiniteLog]) -> list[_Left]:
    """Each share but the smallest, to which nothing is extrapolated, forecast from the others; the largest last."""
    rows = []
    for level in np.unique(runs.level)[1:]:
        left = runs.where(np.flatnonzero(runs.level == level))
        left = left.where(best_rows(left))
        place, parts = _place(*(float(x) for x in left.middle)), float(len(np.unique(left.part)))
        value, low, high = _forecaster(way, seen[level])(place, 0.95, parts)
        rows.append(_Left(float(left.y.mean()), value, (high - low) / 2))
    return rows


def _law(fitted: FiniteLog, points: dict[str, tuple[float, ...]], details: dict[str, Any]) -> Law:
    """The values of the surface, or of the learning curve, with their intervals."""
    fit = fitted.surface or fitted.curve
    theta, linear = fit.theta[None], fit.linear[None]
    values = {name: float(quantity(theta, linear)[0]) for name, quantity in _quantities(fit, fitted.sign).items()}
    intervals = {
        level: {name: fit.range_of(quantity, level) for name, quantity in _quantities(fit, fitted.sign).items()}
        for level in LEVELS
    }
    status, warnings = _verdict(fitted, fit)
    return Law(
        law=NAME,
        form=fit.form.equation,
        status=status,
        values=values,
        intervals=make_intervals(widen_to_values(intervals, values)),
        residuals=residuals_of(fit.runs.y, fit.value(fit.runs.place), _num_values(fit.form)),
        warnings=tuple(warnings),
        points=points,
        details=details,
    )


def _quantities(fit: FiniteFit, sign: float) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    middle = fit.runs.middle

    def coef(k: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return lambda theta, linear: linear[:, k + 1] * fit.form.scale(theta, middle)[:, k]

    def exponent(k: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return lambda theta, _linear: theta[:, k]

    named: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"floor": lambda _, linear: sign * linear[:, 0]}
    named |= {name: coef(k) for k, name in enumerate(fit.form.coefs)}
    return named | {e.name: exponent(k) for k, e in enumerate(fit.form.exponents)}


def _verdict(fitted: FiniteLog, fit: FiniteFit) -> tuple[Any, list[str]]:
    """Whether the law may be asked, and what to know of it."""
    details, warnings = fitted.details, []
    if num_distinct(np.asarray(details["share"])) < _LEAST_SHARES:
        warnings.append("fewer than three shares of the users: nothing shows what more users would bring")
    if fit.form.name != LEARNING_CURVE and num_distinct(fit.runs.place.N) == 1:
        warnings.append("all runs have one size: nothing shows what another would bring")
    if details.get("widen", 1.0) > _TOO_FAR:
        top = details["largest_share"]
        warnings.append(
            f"the largest share, forecast from the smaller ones, is {abs(top['forecast'] - top['measured']):.3g} off, "
            f"{details['widen']:.1f} times its interval: this law does not forecast more users"
        )
        return "disagree", warnings
    if details.get("widen", 1.0) > 1:
        warnings.append(
            f"the largest share, forecast from the smaller ones, misses by {details['widen']:.1f} times its interval: "
            "intervals beyond the log are widened by as much"
        )
    place = Place(
        *(np.array([float(x)]) for x in (fit.runs.middle.N, 2 * fitted.largest_events, fit.runs.place.R.max()))
    )
    _, low, high = fitted.forecast(*(float(x[0]) for x in place))
    if high - low > 2 * float(np.ptp(fitted.runs.y)):
        warnings.append("at twice the events the interval is wider than all that was measured: no forecast")
        return "not_identified", warnings
    if not fit.linear[1:].any():
        warnings.append("the metric does not improve with the events")
        return "monotone", warnings
    return "ok", warnings


def _runs(points: Any, details: dict[str, Any]) -> LogRuns:
    place = Place(*(np.asarray(points[name], dtype=np.float64) for name in "NUR"))
    y = sign_of(details["direction"]) * np.asarray(points["y"], dtype=np.float64)
    shares = np.round(np.log(np.asarray(details["share"])) / 0.1)
    names = details.get("part", list(range(len(y))))
    part = np.unique(np.asarray([str(name) for name in names]), return_inverse=True)[1]
    return LogRuns(place, y, part, np.unique(shares, return_inverse=True)[1])


def _place(N: float, U: float, R: float) -> Place:
    return Place(np.array([float(N)]), np.array([float(U)]), np.array([float(R)]))


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
