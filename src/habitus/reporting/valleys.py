"""Axes with an optimum: one description each, and the curves, the law over compute and the table drawn from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from habitus.laws import NO_TREND, trend
from habitus.reporting.curves import optima, parabola, power_line, reach, two_term
from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import (
    describe_optimum,
    describe_status,
    format_exponent,
    format_number,
    format_range,
    join_words,
    plural,
    power_of_ten,
    reason,
    sentence,
)
from habitus.reporting.runs import better, make_views, run_points, run_sheet
from habitus.reporting.study import Study
from habitus.store import AXES, Law

_Curve = Callable[[Law, float, float], tuple[list[float], list[float]] | None]
_TRENDS = {
    "rises": "rises with compute", "falls": "falls with compute", "none": f"shows {NO_TREND}",
    "unknown": "has no interval",
}  # fmt: skip


@dataclass(frozen=True)
class Valley:
    """An axis of a study along which metrics have an optimum: what it is called and which laws were fitted to it."""

    key: str  # of its exhibits
    axis: str
    x: PlotAxis
    title: str
    what: str  # that is best, as in 'At 10¹⁸ FLOPs the best embedder share is'
    optimum: str  # the law of a budget
    knobs: tuple[str, ...]  # in its sheet
    how: str
    curve: _Curve = two_term
    letter: str = ""  # of the optimum
    law: str = ""  # of the optima over compute
    paper: str = ""  # the paper's optimum, where it is of another name
    regime: str = ""  # the only one that is measured
    law_title: str = ""
    table_title: str = ""
    table_words: str = ""  # as in '3 of 4 share optima are identified'

    @property
    def knob(self) -> str:
        return AXES[self.axis].knob

    def metrics(self, study: Study) -> list[str]:
        return [m for m in study.fitted_metrics(self.axis, self.knob) if m.startswith(self.regime)]


SHARE_AXIS = PlotAxis("embedder share s = p_e / N", log=True, kind="percent")
SHARE = Valley(
    "share", "share", SHARE_AXIS, "Metrics against embedder share", "embedder share", "share_optimum",
    ("embedder_share", "embedder_flop_share", "params", "slots_seen", "joint_dim", "width", "depth"),
    "Dots are runs, lines two-term fits, diamonds optima with 95% intervals; hollow where they do not hold.",
    letter="s*", law="share_law", law_title="Best share against compute, s*(C)",
    table_title="Best embedder share s*", table_words="share optima are identified",
)  # fmt: skip
DEPTH = Valley(
    "depth", "depth", SHARE_AXIS, "Depth parabolas", "share along the depth axis", "depth_optimum",
    ("embedder_share", "embedder_flop_share", "depth", "text_depth", "params", "slots_seen"),
    "Parabolas in the logarithm of the share.", curve=parabola,
)  # fmt: skip
BATCH_SIZE = Valley(
    "batch-size", "batch_size", PlotAxis("batch B (windows per step)", log=True, kind="count"),
    "Metrics against batch size at equal compute", "batch size", "batch_size_optimum",
    ("batch_sequences", "steps", "slots_seen", "params", "embedder_share", "flops_nominal"),
    "One model per budget. For the same compute a larger batch has more candidates, fewer steps and less data. "
    "Lines are valleys whose shape all budgets share; diamonds are optima with 95% intervals.",
    letter="B*", law="batch_size_law", law_title="Best batch size against compute, B*(C)",
    table_title="Best batch size B*", table_words="batch sizes are identified",
)  # fmt: skip
SIZE = Valley(
    "isoflop", "allocation", PlotAxis("model size N (parameters without vocabulary)", log=True, kind="count"),
    "Iso-FLOP curves", "model size", "size_optimum",
    ("params", "slots_seen", "embedder_share", "width", "depth", "joint_dim", "batch_sequences", "steps",
     "flops_nominal"),
    "Lines are valleys whose shape all budgets share; diamonds are optima with 95% intervals; the thick bar at the "
    "bottom of a valley holds all sizes within 0.1% of the best.",
    letter="N*", paper="size_parabola",
)  # fmt: skip
NEGATIVES = Valley(
    "negatives", "negatives", PlotAxis("extra negatives K", log=True, kind="count"),
    "Metrics against extra negatives K", "number of extra negatives", "negatives_optimum",
    ("num_negatives", "params", "slots_seen", "steps", "batch_sequences"),
    "Catalogue regime only. K = 0 has no logarithm and is kept out of the fit; it stands at the left end.",
    letter="K*", law="negatives_law", regime="catalogue/",
    law_title="Best number of negatives against compute, K*(C)", table_title="Best number of negatives K*",
    table_words="optima of K are identified with free exponents",
)  # fmt: skip


def _two_term_or_parabola(law: Law, low: float, high: float) -> tuple[list[float], list[float]] | None:
    return two_term(law, low, high) or parabola(law, low, high)


CONTEXT = Valley(
    "context", "context", PlotAxis("events per window L", log=True, kind="count"),
    "Metrics against the length of windows", "window length", "context_optimum",
    ("seq_len", "params", "slots_seen", "batch_sequences", "steps", "flops_nominal", "flops_executed"),
    "One model per budget; equal compute, attention's own included, and equal slots per step. All runs answer the same "
    "queries, with the longest history that these were shown.",
    curve=_two_term_or_parabola, letter="L*", law="context_law", regime="catalogue/",
    law_title="Best window length against compute, L*(C)", table_title="Best window length L*",
    table_words="window lengths are identified",
)  # fmt: skip


def curves(study: Study, valley: Valley) -> Exhibit | None:
    """Metrics against the knob of an axis, with a fitted curve per budget."""
    metrics = valley.metrics(study)

    def view(metric: str) -> View | None:
        marks = _draw_valleys(study, valley, metric)
        laws = study.laws_by_budget(valley.optimum, metric)
        reading = describe_optima(study, laws, metric, valley.what, valley.x.kind, valley.paper or valley.optimum)
        panel = Panel(better(metric), axis_of(study, valley), PlotAxis(metric), tuple(marks))
        return View(reading, metric, (panel,)) if marks else None

    views = make_views(metrics, view)
    sheet = run_sheet(study.best_rate_runs(valley.axis), metrics, valley.knobs)
    return Exhibit(valley.key, valley.title, views, sheet, valley.how) if views else None


def axis_of(study: Study, valley: Valley) -> PlotAxis:
    """The axis of the knob; a zero that was run stands at the left end of a logarithmic one."""
    values = {row.knobs[valley.knob] for row in study.best_rate_runs(valley.axis, needs=[valley.knob])}
    positive = [v for v in values if v > 0]
    return replace(valley.x, zero_at=min(positive) / 3) if positive and 0 in values else valley.x


def _draw_valleys(study: Study, valley: Valley, metric: str) -> list[Mark]:
    """All runs of an axis for one metric, a fitted curve per budget, and the optima with their intervals."""
    laws = study.laws_by_budget(valley.optimum, metric)
    flat: list[Mark] = []
    marks: list[Mark] = []
    best: list[Mark] = []
    for budget in study.budgets:
        rows = study.best_rate_runs(valley.axis, budget, [valley.knob, metric])
        if not rows:
            continue
        colour, label = study.colour(budget), power_of_ten(budget)
        law = laws.get(budget)
        positive = [row.knobs[valley.knob] for row in rows if row.knobs[valley.knob] > 0]
        line = valley.curve(law, *reach(positive)) if law is not None and positive else None
        if line:
            marks.append(Line(*line, colour, label))
        marks.append(run_points(study, rows, valley.knob, metric, metric, label="" if line else label))
        if law is not None and law.ok and "flat_range" in law.values:
            flat.append(Line(list(law["flat_range"]), [law["y_opt"]] * 2, colour, thick=True))
        if law is not None and {"x_opt", "y_opt"} <= set(law.values) and positive:
            low, high = reach(positive)
            if low <= law["x_opt"] <= high:
                ends = law.interval("x_opt")
                tips = [f"optimum at {label}: {describe_optimum(law, valley.x.kind)}"]
                best.append(
                    Points(
                        [law["x_opt"]], [law["y_opt"]], colour, tips, [ends[0]], [ends[1]], "x",
                        hollow=not law.ok, shape="diamond", large=True,
                    )
                )  # fmt: skip
    return [*flat, *marks, *best]


def describe_optima(
    study: Study, laws: dict[float, Law], metric: str, what: str, kind: str, paper_name: str = ""
) -> str:
    """The optima in one or two sentences: where they hold, where not and why, and what the paper has."""
    identified = {b: law for b, law in laws.items() if law.ok and "x_opt" in law.values}
    refused = {b: law for b, law in laws.items() if b not in identified}
    parts = []
    if identified:
        top = max(identified)
        reading = (
            f"At {power_of_ten(top)} FLOPs the best {what} for {metric} is {describe_optimum(identified[top], kind)}"
        )
        if len(identified) > 1:
            where = format_range([float(law["x_opt"]) for law in identified.values()], kind)
            reading += f"; over {len(identified)} budgets it lies at {where}"
        parts.append(reading)
    if refused:
        by_reason: dict[tuple[str, str], list[float]] = {}  # reasons hold numbers of their own budget
        for b, law in refused.items():
            by_reason.setdefault((describe_status(law), reason(law).rstrip(".")), []).append(b)
        reading = "; ".join(
            f"{join_words(power_of_ten(b) for b in at)}: {status} ({why})" for (status, why), at in by_reason.items()
        )
        parts.append(f"{'No optimum is read at ' if identified else f'Not identified for {metric}: '}{reading}")
    if not laws:
        parts.append(f"No law was fitted for {metric}")
    parts.append(_describe_paper_optima(study, laws, metric, kind, paper_name) if paper_name else "")
    return sentence(*parts)


def _describe_paper_optima(study: Study, laws: Iterable[float], metric: str, kind: str, paper_name: str) -> str:
    """What the paper prints: at the same budgets, or over its own."""
    printed = {
        e.budget: e.law for e in study.published.entries if (e.name, e.metric) == (paper_name, metric) and e.budget
    }
    values = {b: float(law["x_opt"]) for b, law in printed.items() if "x_opt" in law.values}
    if not values:
        return ""
    same = [b for b in laws if b in values]
    if same:
        top = max(same)
        return f"the paper prints {format_number(values[top], kind)} at {power_of_ten(top)}"
    return (
        f"the paper prints {format_range(list(values.values()), kind)} at {power_of_ten(min(values))} to "
        f"{power_of_ten(max(values))}"
    )


def optimum_table(study: Study, valley: Valley) -> Exhibit | None:
    """Metrics against budgets: optimum and interval; below it the best cell, the exponents and the paper's value."""
    name, kind = valley.optimum, valley.x.kind
    laws = {metric: found for metric in study.metrics if (found := study.laws_by_budget(name, metric))}
    if not laws:
        return None
    budgets = sorted({budget for by_budget in laws.values() for budget in by_budget})
    rows, raw = [], []
    for metric, by_budget in laws.items():
        cells = []
        for budget in budgets:
            law = by_budget.get(budget)
            if law is None:
                cells.append("–")
                continue
            printed = _printed(study.paper_law(name, metric, budget), kind)
            low, high = law.interval("x_opt") if "x_opt" in law.values else (None, None)
            grid = law.details.get("best_on_grid")
            below = [
                f"best cell {format_number(grid, kind)}" if grid is not None else "",
                ", ".join(f"{letter} {law[n]:.2f}" for n, letter in _EXPONENTS if n in law.values),
                printed and f"paper {printed}",
            ]
            first = describe_optimum(law, kind) if "x_opt" in law.values else describe_status(law)
            cells.append("\n".join([first, *(line for line in below if line)]))
            raw.append((metric, budget, law.values.get("x_opt"), low, high, law.status, grid, law.values.get("alpha"),
                        law.values.get("beta"), printed))  # fmt: skip
        rows.append((metric, *cells))
    header = (
        "metric", "flops_budget", "optimum", "low95", "high95", "status", "best_on_grid", "alpha", "beta", "paper",
    )  # fmt: skip
    view = View(
        _describe_table(study, valley, laws), table=Table(("metric", *(power_of_ten(b) for b in budgets)), tuple(rows))
    )
    return Exhibit(f"{valley.key}-table", valley.table_title, (view,), Sheet(header, tuple(raw)))


def _describe_table(study: Study, valley: Valley, laws: dict[str, dict[float, Law]]) -> str:
    """How many optima are identified, and for which metrics one α for all budgets finds some."""
    every = [law for by_budget in laws.values() for law in by_budget.values()]
    identified = sum(law.ok for law in every)
    reading = f"{identified} of {len(every)} {valley.table_words}"
    if not identified:
        reading += f": {reason(every[0])}"
    shared_alpha = valley.optimum.replace("_optimum", "_shared_alpha_optimum")
    shared = [m for m in laws if any(law.ok for law in study.laws_by_budget(shared_alpha, m).values())]
    more = f"with one α for all budgets, as in the paper, some are for {join_words(shared)}" if shared else ""
    return sentence(reading, more)


_EXPONENTS = (("alpha", "α"), ("beta", "β"))


def _printed(paper: Law | None, kind: str) -> str:
    if paper is None:
        return ""
    return format_number(float(paper["x_opt"]), kind) if "x_opt" in paper.values else describe_status(paper)


def compute_axis(study: Study) -> PlotAxis:
    """Compute, with a tick at every budget of the store where that is not too many."""
    ticks = study.budgets if 1 < len(study.budgets) <= 7 else ()
    return PlotAxis("compute C (FLOPs)", log=True, kind="flops", ticks=ticks)


def law_over_compute(study: Study, valley: Valley) -> Exhibit | None:
    """Optima of every budget with their power law, per metric, next to the paper's."""
    metrics = [m for m in study.metrics if study.laws_by_budget(valley.optimum, m)]
    y = PlotAxis(valley.letter, log=True, kind=valley.x.kind)
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        laws = {b: law for b, law in study.laws_by_budget(valley.optimum, metric).items() if "x_opt" in law.values}
        law = study.law(valley.law, metric)
        printed = paper_optima(study, valley.optimum, metric)
        for b, one in laws.items():
            low, high = one.interval("x_opt")
            raw.append((metric, b, float(one["x_opt"]), low, high, one.status, printed.get(b)))
        if not laws:
            return View(sentence(f"Not identified for {metric}: {why_no_law(law)}"), metric)
        marks = [
            *power_line(law, *reach(list(laws)), "main"), *optima(laws, "main", y.kind), *paper_marks(printed, y.kind),
        ]  # fmt: skip
        panel = Panel(f"{valley.letter} for {metric}", compute_axis(study), y, tuple(marks))
        return View(_describe_power_law(study, valley, metric), metric, (panel,))

    views = make_views(metrics, view)
    header = ("metric", "flops_budget", "optimum", "low95", "high95", "status", "paper")
    how = "Dots: optima with 95% intervals, hollow where they do not hold; the band is the law's"
    how += "; grey: the paper's." if any(row[-1] is not None for row in raw) else "."
    return Exhibit(f"{valley.key}-law", valley.law_title, views, Sheet(header, tuple(raw)), how) if views else None


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


def _describe_power_law(study: Study, valley: Valley, metric: str) -> str:
    law, paper = study.law(valley.law, metric), study.paper_law(valley.law, metric)
    printed = f"the paper: exponent {paper['exponent']:.2f}" if paper is not None else ""
    if law is None or "exponent" not in law.values:
        return sentence(f"No law {valley.letter}(C) is identified for {metric}: {why_no_law(law)}", printed)
    reading = f"{valley.letter} for {metric} {_TRENDS[trend(law)]}"
    return sentence(f"{reading}: exponent {format_exponent(law)} from {law.residuals.n} interior budgets", printed)
