"""Power laws of optima against compute: s*(C), K*(C), next to the paper's."""

from typing import Any

from habitus.laws import NO_TREND, trend
from habitus.reporting.curves import optima, power_line, reach
from habitus.reporting.figure import Exhibit, Mark, Panel, PlotAxis, Points, Sheet, View
from habitus.reporting.format import format_exponent, format_number, plural, power_of_ten, reason, sentence
from habitus.reporting.study import Study
from habitus.reporting.valleys import make_views
from habitus.store import Law

_TRENDS = {
    "rises": "rises with compute", "falls": "falls with compute", "none": f"shows {NO_TREND}",
    "unknown": "has no interval",
}  # fmt: skip


def compute_axis(study: Study) -> PlotAxis:
    """Compute, with a tick at every budget of the store where that is not too many."""
    ticks = study.budgets if 1 < len(study.budgets) <= 7 else ()
    return PlotAxis("compute C (FLOPs)", log=True, kind="flops", ticks=ticks)


def power_law_exhibit(
    study: Study, key: str, title: str, optimum: str, law_name: str, letter: str, y: PlotAxis
) -> Exhibit | None:
    """Optima of every budget with their power law, per metric, next to the paper's."""
    metrics = [m for m in study.metrics if study.laws_by_budget(optimum, m)]
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        laws = {b: law for b, law in study.laws_by_budget(optimum, metric).items() if "x_opt" in law.values}
        law = study.law(law_name, metric)
        printed = paper_optima(study, optimum, metric)
        for b, one in laws.items():
            low, high = one.interval("x_opt")
            raw.append((metric, b, float(one["x_opt"]), low, high, one.status, printed.get(b)))
        if not laws:
            why = why_no_law(law)
            return View(sentence(f"Not identified for {metric}: {why}"), metric)
        low, high = reach(list(laws))
        marks = [*power_line(law, low, high, "main"), *optima(laws, "main", y.kind), *paper_marks(printed, y.kind)]
        panel = Panel(f"{letter} for {metric}", compute_axis(study), y, tuple(marks))
        return View(_describe_power_law(study, law_name, metric, letter), metric, (panel,))

    views = make_views(metrics, view)
    header = ("metric", "flops_budget", "optimum", "low95", "high95", "status", "paper")
    how = "Dots: optima with 95% intervals, hollow where they do not hold; the band is the law's"
    how += "; grey: the paper's." if any(row[-1] is not None for row in raw) else "."
    return Exhibit(key, title, views, Sheet(header, tuple(raw)), how) if views else None


def paper_optima(study: Study, name: str, metric: str) -> dict[float, float]:
    """The paper's printed optima of a metric, by budget, as far as they lie within ten times the store's budgets."""
    low, high = study.budgets[0] / 10.001, study.budgets[-1] * 10.001
    return {
        e.budget: float(e.law["x_opt"])
        for e in study.published.entries
        if (e.name, e.metric) == (name, metric) and e.budget and "x_opt" in e.law.values and low <= e.budget <= high
    }


def paper_marks(printed: dict[float, float], kind: str) -> tuple[Mark, ...]:
    """The paper's optima, drawn last so that they ring ours where both agree."""
    if not printed:
        return ()
    tips = [f"paper at {power_of_ten(b)}: {format_number(v, kind)}" for b, v in printed.items()]
    points = Points(
        list(printed), list(printed.values()), "paper", tips, shape="diamond", ring=True, large=True, label="paper"
    )  # fmt: skip
    return (points,)


def why_no_law(law: Law | None) -> str:
    """Why there is no power law through the optima."""
    if law is None:
        return "no law was fitted"
    if law.status == "too_few":
        return f"{plural(law.residuals.n, 'budget')} with an interior optimum, where a law needs three"
    return reason(law)


def _describe_power_law(study: Study, name: str, metric: str, letter: str) -> str:
    law, paper = study.law(name, metric), study.paper_law(name, metric)
    printed = f"the paper: exponent {paper['exponent']:.2f}" if paper is not None else ""
    if law is None or "exponent" not in law.values:
        return sentence(f"No law {letter}(C) is identified for {metric}: {why_no_law(law)}", printed)
    reading = f"{letter} for {metric} {_TRENDS[trend(law)]}"
    return sentence(f"{reading}: exponent {format_exponent(law)} from {law.residuals.n} interior budgets", printed)
