"""The answer on top: what the laws say at the largest budget and beyond, next to the paper's guidance."""

import math
from dataclasses import dataclass, field
from typing import Any

from habitus.laws import NO_TREND, predict_power_law, predict_saturating, trend
from habitus.planning import stage1_metrics, stage2_metrics
from habitus.reporting.curves import law_points
from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import (
    describe_optimum,
    format_number,
    join_words,
    law_value,
    percent,
    power_of_ten,
    pretty,
    rate,
    reason,
    sentence,
    significant,
)
from habitus.reporting.runs import make_views
from habitus.reporting.study import Study
from habitus.reporting.valleys import why_no_law
from habitus.store import Law


def answer(study: Study) -> Exhibit | None:
    """For every metric: what this study says at its largest budget and ten times beyond."""
    raw: list[tuple[Any, ...]] = []
    views = make_views(study.metrics, lambda metric: _answer_view(study, metric, raw))
    if not raw:
        return None
    header = ("metric", "quantity", "at_largest_budget", "low95", "high95", "status", "at_10x")
    how = "Each value is read from the law named, for the metric chosen above; open or missing values say why below."
    return Exhibit("answer", "What these runs say", views, Sheet(header, tuple(raw)), how)


def recipe_table(study: Study) -> Exhibit | None:
    """What the laws of this store recommend, per metric, next to the paper's guidance."""
    printed = {k: pretty(str(v)) for k, v in study.published.extra.get("recipe", {}).items()}
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        rows = [
            ("initialisation", _best_init(study), printed.get("initialization", "–")),
            ("embedder share", _optimum(study, "share_optimum", metric, "percent"), _printed_share(printed)),
            ("batch (sequences)", _critical(study, metric), printed.get("batch_sequences", "–")),
            ("learning rate", _rates(study), printed.get("learning_rate", "–")),
            ("data per parameter", _ratio(study, metric), printed.get("data_over_params", "–")),
            (
                "extra negatives K",
                _optimum(study, "negatives_optimum", metric, "count"),
                printed.get("num_negatives", "–"),
            ),
        ]
        raw.extend((metric, *row) for row in rows)
        answered = [row[0] for row in rows if not row[1].startswith(("not ", "–"))]
        reading = f"for {metric} this store answers {len(answered)} of {len(rows)} knobs" + (
            f": {join_words(answered)}" if answered else ""
        )
        table = Table(("knob", "this store, at its largest budget", "paper's guidance"), tuple(rows))
        return View(sentence(reading), metric, table=table)

    views = make_views(study.metrics, view)
    if all(row[2] == "not measured" for row in raw):
        return None
    return Exhibit("recipe", "Recipe table", views, Sheet(("metric", "knob", "this_store", "paper"), tuple(raw)))


@dataclass
class _Answer:
    """The table of one metric as it is filled, and what its sentence will say."""

    metric: str
    rows: list[tuple[str, ...]] = field(default_factory=list)
    raw: list[tuple[Any, ...]] = field(default_factory=list)
    own: list[str] = field(default_factory=list)  # as in 'model size N* = 60k'
    stand_ins: dict[str, list[str]] = field(default_factory=dict)  # the same, by the metric that stands in


def _answer_view(study: Study, metric: str, raw: list[tuple[Any, ...]]) -> View:
    answer = _Answer(metric)
    _add_optima(study, answer)
    _add_critical_batch(study, answer)
    _add_frontier(study, answer)
    raw += answer.raw
    if answer.own:
        reading = f"For {metric} at up to {power_of_ten(study.budgets[-1])} FLOPs: {join_words(answer.own)}"
    else:
        more = " of its own" if answer.stand_ins else ": the sections below say why, axis by axis"
        reading = f"For {metric} these runs identify no optimum{more}"
    others = [
        f"{other}, which stands in for it in a plan, has {join_words(optima)}"
        for other, optima in answer.stand_ins.items()
    ]
    header = ("quantity", "at budget", "value [95%]", "ten times beyond [95%]", "axis")
    table = Table(header, tuple(answer.rows) or (("–",) * len(header),))
    return View(sentence(reading, *others), metric, table=table)


def _add_optima(study: Study, answer: _Answer) -> None:
    for label, optimum, law_name, kind, axis in (
        ("model size N*", "size_optimum", "size_law", "count", "allocation"),
        ("embedder share s*", "share_optimum", "share_law", "percent", "share"),
        ("batch size B*", "batch_size_optimum", "batch_size_law", "count", "batch_size"),
        ("extra negatives K*", "negatives_optimum", "negatives_law", "count", "negatives"),
    ):
        for metric in _metric_and_stand_in(study, optimum, law_name, answer.metric):
            laws = study.laws_by_budget(optimum, metric)
            budget = max(laws)
            law = laws[budget]
            beyond = _at_ten_times(study.law(law_name, metric), budget, kind)
            name = label if metric == answer.metric else f"{label} (by {metric})"
            answer.rows.append((name, power_of_ten(budget), _describe(law, kind), beyond, axis))
            low, high = law.interval("x_opt") if "x_opt" in law.values else (None, None)
            answer.raw.append((answer.metric, name, law.values.get("x_opt"), low, high, law.status, beyond))
            if law.ok:
                optima = answer.own if metric == answer.metric else answer.stand_ins.setdefault(metric, [])
                optima.append(f"{label} = {format_number(float(law['x_opt']), kind)}")


def _add_critical_batch(study: Study, answer: _Answer) -> None:
    name = "critical batch B_crit"
    for budget, law in study.laws_by_budget("critical_batch", answer.metric).items():
        value = f"{law['b_crit']:,.0f}" if "b_crit" in law.values else f"not identified: {reason(law)}"
        answer.rows.append((name, power_of_ten(budget), value, "–", "batch"))
        answer.raw.append((answer.metric, name, law.values.get("b_crit"), None, None, law.status, None))
        if law.ok:
            answer.own.append(f"B_crit = {law['b_crit']:,.0f}")


def _add_frontier(study: Study, answer: _Answer) -> None:
    """The metric at its best size, and what is expected at ten times the budget."""
    law = study.law("loss_law", answer.metric)
    optima = study.laws_by_budget("size_optimum", answer.metric)
    if law is None or not optima:
        return
    budget = max(optima)
    here = law_value(optima[budget], "y_opt")
    beyond = "not identified"
    if law.values:
        expected, low, high = predict_saturating(law, 10 * budget)
        beyond = f"{significant(expected)} {_bracket(low, high)}" + ("" if law.ok else " (not identified)")
        if law.ok:
            answer.own.append(f"{significant(expected)} is expected at {power_of_ten(10 * budget)}")
    name = f"{answer.metric} on the frontier"
    answer.rows.append((name, power_of_ten(budget), significant(here), beyond, "allocation"))
    answer.raw.append((answer.metric, "frontier", here, None, None, law.status, beyond))


def _metric_and_stand_in(study: Study, optimum: str, law_name: str, metric: str) -> list[str]:
    """The metric and, where its own optimum does not hold, the one that stands in: with a law first, as in plans."""
    order = stage2_metrics(metric) if optimum == "negatives_optimum" else stage1_metrics(metric)
    measured = [m for m in dict.fromkeys([metric, *order]) if study.laws_by_budget(optimum, m)]
    identified = [m for m in measured if (laws := study.laws_by_budget(optimum, m))[max(laws)].ok]
    if not identified or identified[0] == measured[0]:
        return measured[:1]
    with_law = [m for m in identified if (law := study.law(law_name, m)) is not None and law.ok]
    return [measured[0], (with_law or identified)[0]]


def _other_regime(study: Study, name: str, metric: str) -> str:
    regime, _, rest = metric.partition("/")
    for other in ("catalogue", "batch"):
        if other != regime and study.laws_by_budget(name, f"{other}/{rest}"):
            return f"{other}/{rest}"
    return metric


def _at_ten_times(law: Law | None, budget: float, kind: str) -> str:
    if law is None or not law.values or "log_x" not in law.points:
        return f"not identified: {why_no_law(law)}" if law is not None else "–"
    value, low, high = predict_power_law(law, 10 * budget)
    note = f" ({NO_TREND})" if trend(law) == "none" else ""
    return f"{format_number(value, kind)} {_bracket(low, high, kind)}{note}"


def _bracket(low: float, high: float, kind: str = "plain") -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "[open]"
    return f"[{format_number(low, kind)}, {format_number(high, kind)}]"


def _describe(law: Law, kind: str) -> str:
    return describe_optimum(law, kind) if law.ok or "x_opt" in law.values else f"not identified: {reason(law)}"


def _optimum(study: Study, name: str, metric: str, kind: str) -> str:
    by = metric if study.laws_by_budget(name, metric) else _other_regime(study, name, metric)
    laws = study.laws_by_budget(name, by)
    if not laws:
        return "not measured"
    identified = {b: law for b, law in laws.items() if law.ok}
    if not identified:
        return f"not identified ({reason(laws[max(laws)])})"
    budget = max(identified)
    return f"{_describe(identified[budget], kind)} at {power_of_ten(budget)}" + ("" if by == metric else f", by {by}")


def _critical(study: Study, metric: str) -> str:
    laws = study.laws_by_budget("critical_batch", metric)
    if not laws:
        return "not measured"
    law = laws[max(laws)]
    return f"up to {law['b_crit']:,.0f}, the critical batch" if law.ok else f"not identified ({reason(law)})"


def _rates(study: Study) -> str:
    rows = [(c.budget, c.learning_rate) for c in study.laws.learning_rates if c.axis in ("allocation", "share")]
    if not rows:
        return "not measured"
    top = max(b for b, _ in rows)
    rates = sorted({r for b, r in rows if b == top})
    return f"{join_words(rate(r) for r in rates)} at {power_of_ten(top)}"


def _ratio(study: Study, metric: str) -> str:
    laws = {b: law for b, law in study.laws_by_budget("size_optimum", metric).items() if law.ok}
    realised = law_points(study.law("data_law", metric))
    if not laws:
        return "not identified" if study.laws_by_budget("size_optimum", metric) else "not measured"
    ratios = [
        f"{significant(realised[b] / float(law['x_opt']), 3)} at {power_of_ten(b)}"
        for b, law in laws.items()
        if b in realised
    ]
    if ratios:
        return f"{join_words(ratios)} (realised)"
    six = [f"{significant(b / (6 * float(law['x_opt']) ** 2), 3)} at {power_of_ten(b)}" for b, law in laws.items()]
    return f"{join_words(six)} (6ND convention)"


def _best_init(study: Study) -> str:
    drifts = study.laws.learning_rate_drift
    if len(drifts) < 2:
        return "not measured"
    return min(drifts, key=lambda init: min(b.loss for b in drifts[init].best)) + " has the lowest training loss"


def _printed_share(printed: dict[str, str]) -> str:
    text = printed.get("embedder_share", "–")
    try:
        return percent(float(text))
    except ValueError:
        return text
