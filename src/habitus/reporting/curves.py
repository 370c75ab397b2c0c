"""Fitted curves as points to draw: valleys, parabolas, power laws with their intervals. Nothing is fitted here."""

import math
from collections.abc import Sequence

import numpy as np

from habitus.laws import predict_power_law, sign_of
from habitus.reporting.figure import Band, Line, Mark, Points
from habitus.reporting.format import describe_optimum, power_of_ten
from habitus.reporting.study import Study
from habitus.store import Law

_STEPS = 36


def two_term(law: Law, low: float, high: float) -> tuple[list[float], list[float]] | None:
    """The two-term curve of a law between two x; None where it has none."""
    terms = {**law.details, **law.values}
    if not {"alpha", "beta", "a", "b", "floor"} <= set(terms):
        return None
    sign = sign_of(law.details.get("direction", "min"))
    x = np.geomspace(low, high, _STEPS)
    y = terms["floor"] + sign * (terms["a"] * x ** terms["alpha"] + terms["b"] * x ** -terms["beta"])
    return x.tolist(), y.tolist()


def parabola(law: Law, low: float, high: float) -> tuple[list[float], list[float]] | None:
    """The parabola in log x of a law; None where it has none."""
    if "coefficients" not in law.details:
        return None
    sign = sign_of(law.details.get("direction", "min"))
    x = np.geomspace(low, high, _STEPS)
    c0, c1, c2 = law.details["coefficients"]
    u = np.log(x)
    return x.tolist(), (sign * (c0 + c1 * u + c2 * u * u)).tolist()


def power_line(
    law: Law | None, low: float, high: float, colour: str, label: str = "", dashed: bool = False
) -> list[Mark]:
    """A power law and its 95% band between two budgets; nothing where there is no law."""
    if law is None or not law.values or "coefficient" not in law.values:
        return []
    x = np.geomspace(low, high, 24).tolist()
    if {"log_x", "log_y", "weights"} <= set(law.points):
        curve = [predict_power_law(law, value) for value in x]
        band: list[Mark] = [Band(x, [t[1] for t in curve], [t[2] for t in curve], colour)] if not dashed else []
        return [*band, Line(x, [t[0] for t in curve], colour, label, dashed)]
    y = [law["coefficient"] * value ** law["exponent"] for value in x]
    return [Line(x, y, colour, label, dashed)]


def frontier_marks(study: Study, metric: str, beyond: bool = True) -> list[Mark]:
    """L*(C) and its 95% band: solid where it was measured, dashed beyond it."""
    curve = study.frontier(metric)
    law = study.law("loss_law", metric)
    holds = beyond and law is not None and law.ok
    largest = max(study.laws_by_budget("size_optimum", metric), default=0.0) * 1.0001
    inside = [at for at in curve if at[0] <= largest]
    outside = [at for at in curve if at[0] >= largest / 1.0002] if beyond else []
    marks: list[Mark] = []
    for part, dashed in ((inside, False), (outside, True)):
        if len(part) > 1:
            x, y, low, high = (list(column) for column in zip(*part, strict=True))
            if all(map(math.isfinite, low + high)):
                marks.insert(0, Band(x, low, high, "main", whole=holds))
            marks.append(Line(x, y, "main", dashed=dashed))
    return marks


def optima(laws: dict[float, Law], colour: str, kind: str, name: str = "x_opt") -> list[Mark]:
    """Optima over budgets with their 95% intervals; those that do not hold are hollow."""
    marks: list[Mark] = []
    for holds in (True, False):
        shown = [(b, law) for b, law in laws.items() if name in law.values and law.ok is holds]
        if not shown:
            continue
        ends = [law.interval(name) for _, law in shown]
        marks.append(
            Points(
                [b for b, _ in shown],
                [float(law[name]) for _, law in shown],
                colour,
                [f"{power_of_ten(b)}: {describe_optimum(law, kind, name)}" for b, law in shown],
                [low for low, _ in ends],
                [high for _, high in ends],
                hollow=not holds,
                large=True,
            )
        )
    return marks


def reach(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and largest positive value."""
    positive = [v for v in values if v > 0]
    return min(positive), max(positive)


def law_points(law: Law | None) -> dict[float, float]:
    """The points that a law over budgets was fitted to; none where there is no law."""
    return dict(zip(law.points.get("x", ()), law.points.get("y", ()), strict=True)) if law is not None else {}
