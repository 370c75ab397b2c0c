"""Which form the points prefer (AICc), and whether two approaches to one exponent agree."""

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive, num_distinct
from habitus.laws.saturating import EXPONENT, decay_terms
from habitus.laws.separable import Curve, fit_separable
from habitus.laws.two_term import EXPONENTS, valley_terms
from habitus.store import FormFit, Interval, Law, Residuals


def compare_valleys(x: Numbers, y: Numbers) -> tuple[FormFit, ...]:
    """Constant, parabola, cubic and two-term valley of one iso-FLOP curve, best AICc first."""
    x, y = as_columns(x=x, y=y)
    check_positive(x=x)
    if num_distinct(x) < 4:
        raise FitError(f"{num_distinct(x)} distinct x", expected="four or more, or a cubic passes through them all")
    u = np.log(x) - np.log(x).mean()
    forms = {
        "constant": (1, _polynomial_rss(u, y, 0)),
        "parabola": (3, _polynomial_rss(u, y, 2)),
        "cubic": (4, _polynomial_rss(u, y, 3)),
        "two_term": (5, fit_separable([Curve(valley_terms, u, y, np.ones(len(y)))], (EXPONENTS, EXPONENTS)).rss),
    }
    return _ranked(forms, len(y))


def compare_scaling(compute: Numbers, loss: Numbers) -> tuple[FormFit, ...]:
    """Saturating, plain power and straight-in-log-compute forms of L*(C), best AICc first."""
    C, y = as_columns(compute=compute, loss=loss)
    check_positive(compute=C)
    u = np.log(C) - np.log(C).mean()
    curve = Curve(decay_terms, u, y, np.ones(len(y)))
    forms = {
        "saturating": (3, fit_separable([curve], [EXPONENT]).rss),
        "power": (2, fit_separable([curve], [EXPONENT], floor=0.0).rss),
        "log_linear": (2, _polynomial_rss(u, y, 1)),
    }
    return _ranked(forms, len(y))


def compare_approaches(
    from_optima: float,
    from_surface: float,
    optima_interval: tuple[float, float] | None = None,
    surface_interval: tuple[float, float] | None = None,
    tolerance: float = 0.1,
) -> Law:
    """Whether N* ∝ C^b from the optima and from L(N, D) agree; a warning of its own where they do not.

    With both intervals they disagree when the intervals are disjoint; without, when they differ by more than
    `tolerance`. A difference of 0.1 in the exponent is a factor 1.6 in N* over two decades.
    """
    for name, value in (("from_optima", from_optima), ("from_surface", from_surface)):
        if not np.isfinite(value):
            raise FitError(f"{name} = {value}", expected="a finite exponent")
    gap = from_surface - from_optima
    apart = abs(gap) > tolerance
    if optima_interval is not None and surface_interval is not None:
        apart = surface_interval[0] > optima_interval[1] or surface_interval[1] < optima_interval[0]
    factor = 100 ** abs(gap)
    warnings: tuple[str, ...] = ()
    if apart:
        warnings = (
            f"two approaches to N* ∝ C^b disagree: {from_optima:.3f} from the optima of the iso-FLOP curves, "
            f"{from_surface:.3f} from L(N, D); over two decades of compute they differ {factor:.1f} times in N*",
        )
    intervals = {}
    for name, ends in (("from_optima", optima_interval), ("from_surface", surface_interval)):
        if ends is not None:
            intervals[name] = Interval(low=ends[0], high=ends[1])
    return Law(
        law="both_approaches",
        form="N* ∝ C^b, twice",
        status="disagree" if apart else "ok",
        values={"from_optima": from_optima, "from_surface": from_surface, "gap": gap},
        intervals={"0.95": intervals} if intervals else {},
        residuals=Residuals(n=2, dof=0),
        warnings=warnings,
    )


def _polynomial_rss(u: np.ndarray, y: np.ndarray, degree: int) -> float:
    X = np.vander(u, degree + 1, increasing=True)
    c, *_ = np.linalg.lstsq(X, y, rcond=None)
    return float(((y - X @ c) ** 2).sum())


def _ranked(forms: dict[str, tuple[int, float]], n: int) -> tuple[FormFit, ...]:
    """AICc = n·ln(RSS/n) + 2k + 2k(k+1)/(n−k−1), where k also counts the noise."""
    scored: dict[str, float] = {}
    for name, (values, rss) in forms.items():
        k = values + 1
        if n - k - 1 > 0:
            scored[name] = n * np.log(max(rss, 1e-300) / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    best = min(scored.values(), default=0.0)
    raw = {name: float(np.exp(-(score - best) / 2)) for name, score in scored.items()}
    total = sum(raw.values())
    fits = [
        FormFit(
            name=name,
            num_values=values,
            rss=rss,
            aicc=scored.get(name),
            weight=raw[name] / total if name in raw else None,
        )
        for name, (values, rss) in forms.items()
    ]
    return tuple(sorted(fits, key=lambda form: np.inf if form.aicc is None else form.aicc))
