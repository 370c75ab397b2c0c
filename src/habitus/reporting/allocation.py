"""Size against data: the frontiers N*, D*, D/N and L*. Iso-FLOP curves are in `valleys.py`."""

from typing import Any

from habitus.laws import NO_TREND, trend
from habitus.reporting.curves import frontier_marks, law_points, optima, power_line, reach
from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Points, Sheet, View
from habitus.reporting.format import (
    format_exponent,
    format_number,
    power_of_ten,
    reason,
    sentence,
    significant,
    superscript,
)
from habitus.reporting.runs import make_views
from habitus.reporting.study import Study
from habitus.reporting.valleys import compute_axis, paper_marks, paper_optima, why_no_law
from habitus.store import Law


def frontiers(study: Study) -> Exhibit | None:
    """N*(C), D*(C), D/N(C) and the metric along the frontier."""
    metrics = [m for m in study.metrics if study.laws_by_budget("size_optimum", m)]
    raw: list[tuple[Any, ...]] = []
    views = make_views(metrics, lambda metric: _frontier_view(study, metric, raw))
    header = (
        "metric",
        "flops_budget",
        "size",
        "low95",
        "high95",
        "status",
        "size_by_parabola",
        "data_6nd",
        "best_metric",
    )
    printed = any(paper_optima(study, "size_parabola", metric) for metric in metrics)
    how = (
        "Solid: this store's law and its 95% band; dashed: the paper's reading of these runs (parabolas, D = C/6N)"
        + ("; grey diamonds: the paper's own optima" if printed else "")
        + ". C = 6ND overstates D wherever compute is not 6ND."
    )
    return Exhibit("frontiers", "Frontiers: N*, D*, D/N", views, Sheet(header, tuple(raw)), how) if views else None


def _frontier_view(study: Study, metric: str, raw: list[tuple[Any, ...]]) -> View | None:
    laws = {b: law for b, law in study.laws_by_budget("size_optimum", metric).items() if "x_opt" in law.values}
    parabolas = study.laws_by_budget("size_parabola", metric)
    size, data, by_6nd = (study.law(n, metric) for n in ("size_law", "data_law", "data_law_6nd"))
    if not laws:
        return View(sentence(f"Not identified for {metric}: {why_no_law(size)}"), metric)
    low, high = reach(list(laws))
    for b, law in laws.items():
        ends = law.interval("x_opt")
        parabola = parabolas.get(b)
        raw.append(
            (metric, b, float(law["x_opt"]), *ends, law.status, parabola.values.get("x_opt") if parabola else None,
             b / (6 * float(law["x_opt"])), law.values.get("y_opt"))
        )  # fmt: skip
    printed = paper_optima(study, "size_parabola", metric)
    by_parabola = study.law("size_law_parabola", metric)
    panels = [
        Panel(
            "model size N*", compute_axis(study), PlotAxis("N*", log=True, kind="count"),
            (*power_line(by_parabola, low, high, "muted", "parabolas", dashed=True),
             *power_line(size, low, high, "main"), *optima(laws, "main", "count"), *paper_marks(printed, "count")),
        )
    ]  # fmt: skip
    realised = law_points(data)
    six = law_points(by_6nd)
    paper_data = {b: b / (6 * n) for b, n in printed.items()}
    data_marks = power_line(by_6nd, low, high, "muted", "C/6N", dashed=True) + power_line(data, low, high, "main")
    data_marks += _dots(six, "muted", "count", "D = C/(6N*)", hollow=True)
    data_marks += [*_dots(realised, "main", "count", "D realised"), *paper_marks(paper_data, "count")]
    if data_marks:
        panels.append(
            Panel("data D* (slots)", compute_axis(study), PlotAxis("D*", log=True, kind="count"), tuple(data_marks))
        )
    ratios = {b: d / float(laws[b]["x_opt"]) for b, d in realised.items() if b in laws}
    ratios_six = {b: d / float(laws[b]["x_opt"]) for b, d in six.items() if b in laws}
    paper_ratio = {b: d / printed[b] for b, d in paper_data.items()}
    ratio_marks: list[Mark] = []
    for values, colour, label, dashed in ((ratios_six, "muted", "C/6N", True), (ratios, "main", "realised", False)):
        if values:
            ratio_marks.append(Line(list(values), list(values.values()), colour, label, dashed))
            ratio_marks += _dots(values, colour, "plain", f"D/N {label}", hollow=dashed)
    ratio_marks += paper_marks(paper_ratio, "plain")
    if ratio_marks:
        panels.append(
            Panel("data per parameter D/N", compute_axis(study), PlotAxis("D/N", log=True), tuple(ratio_marks))
        )
    height = (*frontier_marks(study, metric, beyond=False), *optima(laws, "main", "plain", "y_opt"))
    panels.append(Panel(f"best {metric}", compute_axis(study), PlotAxis(metric), height))
    return View(_describe_frontier(study, metric, ratios), metric, tuple(panels))


def _dots(values: dict[float, float], colour: str, kind: str, label: str, hollow: bool = False) -> list[Mark]:
    if not values:
        return []
    tips = [f"{power_of_ten(b)}: {label} {format_number(v, kind)}" for b, v in values.items()]
    return [Points(list(values), list(values.values()), colour, tips, hollow=hollow)]


def _grows(law: Law) -> str:
    """'grows as C to the power 0.617', or that there is no trend above its error."""
    if trend(law) == "none":
        return f"shows {NO_TREND}: exponent {format_exponent(law)}"
    return f"{'falls' if trend(law) == 'falls' else 'grows'} as C to the power {format_exponent(law)}"


def _describe_frontier(study: Study, metric: str, ratios: dict[float, float]) -> str:
    law, paper = study.law("size_law", metric), study.paper_law("size_law", metric)
    printed = ""
    if paper is not None:
        numbers = paper.details.get("printed", paper.values)
        printed = f"the paper: {numbers['exponent']:.3f} ± {numbers['exponent_se']:.3f} (1 SE)"
    if law is None or "exponent" not in law.values:
        return sentence(f"N*(C) is not identified for {metric}: {why_no_law(law)}", printed)
    clauses = [f"N* for {metric} {_grows(law)}, from {law.residuals.n} budgets"]
    data = study.law("data_law", metric)
    if data is not None and "exponent" in data.values:
        clauses.append(f"D* as realised {_grows(data)}")
    if ratios:
        first, last = min(ratios), max(ratios)
        clauses.append(
            f"D/N goes from {significant(ratios[first], 3)} at {power_of_ten(first)} to "
            f"{significant(ratios[last], 3)} at {power_of_ten(last)}"
        )
    height = study.law("loss_law", metric)
    if height is not None and height.ok:
        sign = "+" if height.details.get("direction") == "min" else "−"
        falling = f"{significant(float(height['coefficient']), 3)}·C{superscript(-height['exponent'])}"
        clauses.append(f"along the frontier {metric} is {significant(float(height['floor']))} {sign} {falling}")
    elif height is not None:
        clauses.append(f"how {metric} continues along the frontier is not identified: {reason(height)}")
    return sentence(*clauses, printed)
