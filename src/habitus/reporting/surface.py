"""One law over the recipe: each knob as a slice of it, the best recipe by both costs, and how it moves with compute."""

from typing import Any

from habitus.reporting.figure import Band, Exhibit, Line, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import describe_status, format_number, power_of_ten, sentence, significant
from habitus.reporting.runs import better, make_views, run_points, run_sheet
from habitus.reporting.study import Study
from habitus.store import SURFACE_AXIS, Law

_AXES = {
    "params": PlotAxis("model size N (parameters without vocabulary)", log=True, kind="count"),
    "share": PlotAxis("embedder share s", log=True, kind="percent"),
    "batch": PlotAxis("batch B (windows per step)", log=True, kind="count"),
}
_RUN_KNOBS = {"params": "params", "share": "embedder_share", "batch": "batch_sequences"}
_WORDS = {"params": "N*", "share": "s*", "batch": "B*", "rate": "rate at 512 windows", "slots": "D* (slots)"}
_KINDS = {"params": "count", "share": "percent", "batch": "count", "rate": "rate", "slots": "count"}
_EXPONENTS = {"params": "N*", "share": "s*", "batch": "B*", "rate": "rate", "slots": "D*", "slots_per_param": "D*/N*"}
_PAPER = {"params": "size_law", "share": "share_law"}
_SHEET = (
    "params", "embedder_share", "batch_sequences", "slots_seen", "steps", "joint_dim", "width", "depth",
    "flops_nominal", "flops_executed",
)  # fmt: skip
_ABOVE = 1.0  # a panel shows runs up to half as much again as its lines span


def slices(study: Study) -> Exhibit | None:
    """The metric over size, share and batch, all else at its best: the paper's one-axis figures from one law."""

    def view(metric: str) -> View | None:
        optima = study.laws_by_budget("recipe_optimum", metric)
        if not optima:
            return None
        panels = tuple(_slice_panel(study, metric, knob, optima) for knob in _AXES)
        return View(_describe_slices(metric, optima), metric, panels)

    views = make_views(study.metrics, view)
    rows = study.best_rate_runs(SURFACE_AXIS)
    sheet = run_sheet(rows, study.metrics, _SHEET)
    how = (
        "Lines: the law with everything else at its best for that value, with 95% bands; diamonds: its optima. Dots "
        "are runs, each with other knobs, and so mostly worse than the line; the worst are not shown."
    )
    return Exhibit("surface-slices", "Size, share and batch as slices of one law", views, sheet, how) if views else None


def _slice_panel(study: Study, metric: str, knob: str, optima: dict[float, Law]) -> Panel:
    bands: list[Mark] = []
    marks: list[Mark] = []
    best: list[Mark] = []
    every = [y for law in optima.values() for y in law.details["slices"][knob]["y"]]
    low, high = min(every), max(every)
    reach = (low - _ABOVE * (high - low) / 2, high + _ABOVE * (high - low) / 2)
    for budget, law in optima.items():
        colour, one = study.colour(budget), law.details["slices"][knob]
        rows = [row for row in study.best_rate_runs(SURFACE_AXIS, budget, [_RUN_KNOBS[knob], metric])
                if reach[0] <= row.metrics[metric] <= reach[1]]  # fmt: skip
        bands.append(Band(one["x"], one["low"], one["high"], colour))
        if rows:
            marks.append(run_points(study, rows, _RUN_KNOBS[knob], metric, metric))
        marks.append(Line(one["x"], one["y"], colour, power_of_ten(budget)))
        ends = law.interval(knob)
        kind = _KINDS[knob]
        tip = f"{_WORDS[knob]} at {power_of_ten(budget)}: {_value(law, knob, kind)}"
        best.append(Points([law[knob]], [law["metric"]], colour, [tip], [ends[0]], [ends[1]], "x", hollow=not law.ok,
                           shape="diamond", large=True))  # fmt: skip
    return Panel(better(metric), _AXES[knob], PlotAxis(metric), (*bands, *marks, *best))


def _describe_slices(metric: str, optima: dict[float, Law]) -> str:
    top = max(optima)
    law = optima[top]
    if not law.ok:
        return sentence(f"At {power_of_ten(top)} the law of {metric} has no optimum inside: {describe_status(law)}")
    words = [f"{_WORDS[knob]} = {_value(law, knob, _KINDS[knob])}" for knob in ("params", "share", "batch", "rate")]
    reached = f"{metric} {significant(law['metric'])}"
    return sentence(
        f"At {power_of_ten(top)} the best recipe for {metric} has {', '.join(words)}, and reaches {reached}"
    )


def optimum_table(study: Study) -> Exhibit | None:
    """The best recipe of every budget with joint intervals, by nominal and by executed FLOPs."""
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        rows = []
        for name, cost in (("recipe_optimum", "nominal"), ("recipe_optimum_executed", "executed")):
            for budget, law in study.laws_by_budget(name, metric).items():
                cells = [_value(law, knob, _KINDS[knob]) for knob in _WORDS]
                reached = _value(law, "metric", "plain")
                ratio = f"{significant(law['slots'] / law['params'], 2)}"
                rows.append((power_of_ten(budget), cost, *cells, ratio, reached))
                for knob in (*_WORDS, "metric"):
                    raw.append((metric, budget, cost, knob, law[knob], *law.interval(knob), law.status))
        if not rows:
            return None
        whole = study.law("recipe_surface", metric)
        told = "" if whole is None else f"one law of {whole.residuals.n} runs, {whole.details.get('cells', 0)} cells"
        notes = () if whole is None else whole.warnings
        header = ("nominal FLOPs", "cost", *_WORDS.values(), "D*/N*", metric)
        how = "under executed FLOPs each row spends what the nominal optimum of its budget executes"
        return View(sentence(told, how), metric, table=Table(header, tuple(rows), tuple(notes)))

    views = make_views(study.metrics, view)
    sheet = Sheet(("metric", "flops_budget", "cost", "quantity", "value", "low95", "high95", "status"), tuple(raw))
    return (
        Exhibit("surface-table", "Best recipe by budget, nominal and executed FLOPs", views, sheet) if views else None
    )


def exponent_table(study: Study) -> Exhibit | None:
    """How the best recipe moves with compute, metric by metric, beside the paper's exponents."""
    rows, raw = [], []
    for metric in study.metrics:
        law = study.law("recipe_exponents", metric)
        if law is None or not law.values:
            continue
        cells = []
        for name in _EXPONENTS:
            low, high = law.interval(name)
            cells.append(f"{law[name]:.2f} [{low:.2f}, {high:.2f}]")
            raw.append((metric, name, law[name], low, high, law.status))
        rows.append((metric, describe_status(law), *cells))
        printed = {name: study.paper_law(_PAPER[name], metric) for name in _PAPER}
        if any(paper is not None for paper in printed.values()):
            shown = ["–" if paper is None else f"{paper['exponent']:.2f}" for paper in printed.values()]
            rows.append((f"{metric}, the paper", "–", *shown, *["–"] * (len(_EXPONENTS) - len(shown))))
    if not rows:
        return None
    first, last = law_ends(study)
    reading = f"between {power_of_ten(first)} and {power_of_ten(last)} FLOPs, x* as C to the power of"
    table = Table(("metric", "status", *_EXPONENTS.values()), tuple(rows))
    sheet = Sheet(("metric", "quantity", "exponent", "low95", "high95", "status"), tuple(raw))
    view = View(sentence(reading), table=table)
    return Exhibit("surface-exponents", "How the best recipe moves with compute", (view,), sheet)


def law_ends(study: Study) -> tuple[float, float]:
    """The budgets that exponents are between."""
    laws = [study.law("recipe_exponents", metric) for metric in study.metrics]
    first = next(law for law in laws if law is not None and law.values)
    return float(first.details["first"]), float(first.details["last"])


def _value(law: Law, name: str, kind: str) -> str:
    low, high = law.interval(name)
    ends = ["open" if not 0 < end < float("inf") else _format(end, kind) for end in (low, high)]
    return f"{_format(law[name], kind)} [{', '.join(ends)}]"


def _format(value: float, kind: str) -> str:
    return (
        significant(value, 3 if kind == "plain" and value < 1 else 4) if kind == "plain" else format_number(value, kind)
    )
