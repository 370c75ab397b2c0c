"""The loss along the frontier: L*(C) = E + A·C^−g, by variable projection in g and least squares in L."""

from typing import Any

import numpy as np
from scipy import stats

from habitus.errors import FitError
from habitus.laws.checks import (
    Numbers,
    all_equal,
    as_columns,
    check_positive,
    check_positive_number,
    check_rows_differ,
    num_distinct,
    sign_of,
)
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of
from habitus.laws.separable import Curve, SeparableFit, fit_separable, region
from habitus.store import LEVELS, Direction, Law
from habitus.units import pluralize

FORM = "sign*y = floor + coefficient * x^-exponent"
EXPONENT = (0.005, 2.0)


def saturating(
    compute: Numbers,
    loss: Numbers,
    fixed_floor: float | None = None,
    direction: Direction = "min",
    se: Numbers | None = None,
    se_dof: float = 1e6,
) -> Law:
    """floor, coefficient and exponent of L*(C) = floor + coefficient·C^−exponent.

    `fixed_floor` pins E (an oracle's irreducible loss, say). `se` are the standard errors of the losses, known
    from the fits that gave them with `se_dof` degrees of freedom: points then count by them, and the scatter
    about the curve is pooled with what they say.
    """
    x, y = as_columns(compute=compute, loss=loss)
    check_positive(compute=x)
    check_rows_differ(compute=x, loss=y)
    needed = 3 if fixed_floor is None else 2
    if num_distinct(x) < needed:
        why = f"{pluralize(num_distinct(x), 'distinct budget')}; the curve has {needed} values"
        return law_without_values("saturating", FORM, "too_few", len(x), why)
    if all_equal(y):
        return law_without_values("saturating", FORM, "flat", len(x), "all losses are equal: nothing scales")
    sign = sign_of(direction)
    errors = None if se is None else _checked_errors(se, len(y))
    floor_known = None if fixed_floor is None else sign * fixed_floor
    best, middle = _best(x, sign * y, floor_known, errors, se_dof)
    if best.linear[0][1] <= 0:
        why = "the metric does not improve with compute: no saturating law"
        return law_without_values("saturating", FORM, "monotone", len(x), why)
    g = float(best.theta[0])
    floor, a = (float(v) for v in best.linear[0])
    values = {
        "floor": sign * floor,
        "coefficient": a * float(np.exp(g * middle)),
        "exponent": g,
    }
    fitted = sign * (floor + a * np.exp(-g * (np.log(x) - middle)))
    details: dict[str, Any] = {"direction": direction}
    if fixed_floor is not None:
        details["fixed_floor"] = fixed_floor
    if errors is not None:
        details |= {"se": errors.tolist(), "se_dof": se_dof, "lack_of_fit_p_value": _lack_of_fit(best, se_dof)}
    status, warnings, intervals = _uncertainty(best, middle, sign)
    if details.get("lack_of_fit_p_value", 1.0) < 0.05:
        warnings.append(
            "the points scatter about the curve more than their own errors allow "
            f"(p = {details['lack_of_fit_p_value']:.3f}): the form is wrong or the budgets differ in something else"
        )
    return Law(
        law="saturating",
        form=FORM,
        status=status,
        values=values,
        intervals=intervals,
        residuals=residuals_of(y, fitted, needed),
        warnings=tuple(warnings),
        points={"x": tuple(x), "y": tuple(y)},
        details=details,
    )


def predict_saturating(law: Law, compute: float, level: float = 0.95) -> tuple[float, float, float]:
    """(value, low, high) of L* at a budget, by profile likelihood; open ends where nothing is left to judge."""
    if law.law != "saturating" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted saturating law")
    check_positive_number(compute=compute)
    sign = sign_of(law.details["direction"])
    value = law["floor"] + sign * law["coefficient"] * compute ** -law["exponent"]
    x, y = (np.asarray(law.points[k]) for k in ("x", "y"))
    fixed, se = law.details.get("fixed_floor"), law.details.get("se")
    best, middle = _best(
        x,
        sign * y,
        None if fixed is None else sign * fixed,
        None if se is None else np.asarray(se),
        law.details.get("se_dof", 0.0),
    )
    if best.dof <= 0:
        return value, -np.inf, np.inf
    u = float(np.log(compute)) - middle
    ends = region(best, level).range_of(lambda theta, c: c[:, 0] + c[:, 1] * np.exp(-theta[:, 0] * u))
    low, high = sorted(sign * end for end in ends)
    return value, low, high


def _best(
    x: np.ndarray, y: np.ndarray, floor: float | None, se: np.ndarray | None, se_dof: float
) -> tuple[SeparableFit, float]:
    middle = float(np.log(x).mean())
    weight = np.ones(len(y)) if se is None else 1 / se
    curve = Curve(decay_terms, np.log(x) - middle, y, weight)
    # In units of the standard errors the known variance is one.
    return fit_separable([curve], [EXPONENT], None if se is None else (1.0, se_dof), floor), middle


def _checked_errors(se: Numbers, n: int) -> np.ndarray:
    (errors,) = as_columns(se=se)
    check_positive(se=errors)
    if len(errors) != n:
        raise FitError(f"{len(errors)} standard errors for {n} losses", expected="one per loss")
    return errors


def _lack_of_fit(best: SeparableFit, se_dof: float) -> float:
    """The chance of so much scatter about the curve if the standard errors are right."""
    own_dof = best.dof - se_dof
    return float(stats.f.sf(best.rss / own_dof, own_dof, se_dof)) if own_dof > 0 else 1.0


def decay_terms(log_theta: np.ndarray, log_x: np.ndarray) -> np.ndarray:
    """x^−g, for many log g at once."""
    (exponent,) = np.exp(log_theta).T
    return np.exp(-exponent * log_x)


def _uncertainty(best: SeparableFit, middle: float, sign: float) -> tuple[Any, list[str], dict[str, Any]]:
    if best.dof <= 0:
        why = "as many points as values: the curve passes through them and nothing is left to judge it by"
        return "not_identified", [why], {}
    by_level, open_end = {}, False
    for level in LEVELS:
        allowed = region(best, level)
        low, high = sorted(sign * end for end in allowed.range_of(lambda _, c: c[:, 0]))
        by_level[level] = {
            "floor": (low, high),
            "coefficient": allowed.range_of(lambda t, c: c[:, 1] * np.exp(t[:, 0] * middle)),
            "exponent": allowed.range_of(lambda t, _: t[:, 0]),
        }
        open_end = allowed.touches_bounds
    intervals = make_intervals(by_level)
    if open_end:
        why = (
            f"the exponent is not bounded within {EXPONENT[0]}..{EXPONENT[1]} at 95%: floor and exponent "
            "cannot be told apart; add budgets or pin the floor"
        )
        return "not_identified", [why], intervals
    low, high = by_level[0.95]["exponent"]
    if high > 10 * low:
        why = (
            f"floor and exponent trade off: at 95% the exponent lies anywhere from {low:.3g} to {high:.3g}; "
            "predictions are steadier than the values"
        )
        return "ok", [why], intervals
    return "ok", [], intervals
