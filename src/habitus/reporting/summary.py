"""The answer on top: what the laws say at the largest budget and beyond, and beside the paper's guidance."""

import math
from typing import Any

from habitus.laws import NO_TREND, predict_power_law, predict_saturating, trend
from habitus.planning import stage1_metrics, stage2_metrics
from habitus.reporting.figure import Block, Sheet, Table, View
from habitus.reporting.format import (
    listed,
    number,
    percent,
    power_of_ten,
    pretty,
    rate,
    reason,
    sentence,
    significant,
    value_of,
)
from habitus.reporting.powers import why_no_law
from habitus.reporting.study import Study
from habitus.reporting.valleys import views
from habitus.store import Law


def answer(study: Study) -> Block:
    """For every metric: what this study says at its largest budget and ten times beyond."""
    raw: list[tuple[Any, ...]] = []
    found = views(study.metrics, lambda metric: _answer_view(study, metric, raw))
    header = ("metric", "quantity", "at_largest_budget", "low95", "high95", "status", "at_10x")
    how = "Each value is read from the law named, for the metric chosen above; open or missing values say why below."
    return Block("answer", "What these runs say", found, Sheet(header, tuple(raw)), how)


def recipe_table(study: Study) -> Block | None:
    """What the laws of this store recommend, per metric, beside the paper's guidance."""
    printed = {k: pretty(str(v)) for k, v in study.published.extra.get("recipe", {}).items()}
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        rows = [
            ("initialisation", _best_init(study), printed.get("initialization", "–")),
            ("embedder share", _optimum(study, "share_optimum", metric, "percent"), _share_words(printed)),
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
        known = [row[0] for row in rows if not row[1].startswith(("not ", "–"))]
        words = f"for {metric} this store answers {len(known)} of {len(rows)} knobs" + (
            f": {listed(known)}" if known else ""
        )
        table = Table(("knob", "this store, at its largest budget", "paper's guidance"), tuple(rows))
        return View(sentence(words), metric, table=table)

    found = views(study.metrics, view)
    return (
        Block("recipe", "Recipe table", found, Sheet(("metric", "knob", "this_store", "paper"), tuple(raw)))
        if found
        else None
    )


def _answer_view(study: Study, metric: str, raw: list[tuple[Any, ...]]) -> View:
    top = study.budgets[-1]
    rows: list[tuple[str, ...]] = []
    said: list[str] = []
    lent: dict[str, list[str]] = {}  # by the metric that stands in
    for label, optimum, law_name, kind, axis in (
        ("model size N*", "size_optimum", "size_law", "count", "allocation"),
        ("embedder share s*", "share_optimum", "share_law", "percent", "share"),
        ("extra negatives K*", "negatives_optimum", "negatives_law", "count", "negatives"),
    ):
        for shown in _asked(study, optimum, law_name, metric):
            laws = study.by_budget(optimum, shown)
            budget = max(laws)
            law = laws[budget]
            beyond = _at_ten_times(study.law(law_name, shown), budget, kind)
            name = label if shown == metric else f"{label} (by {shown})"
            rows.append((name, power_of_ten(budget), _told(law, kind), beyond, axis))
            low, high = law.interval("x_opt") if "x_opt" in law.values else (None, None)
            raw.append((metric, name, law.values.get("x_opt"), low, high, law.status, beyond))
            if law.ok:
                into = said if shown == metric else lent.setdefault(shown, [])
                into.append(f"{label} = {number(float(law['x_opt']), kind)}")
    for budget, law in study.by_budget("critical_batch", metric).items():
        value = f"{law['b_crit']:,.0f}" if "b_crit" in law.values else f"not identified: {reason(law)}"
        rows.append(("critical batch B_crit", power_of_ten(budget), value, "–", "batch"))
        raw.append((metric, "critical batch B_crit", law.values.get("b_crit"), None, None, law.status, None))
        if law.ok:
            said.append(f"B_crit = {law['b_crit']:,.0f}")
    height = study.law("loss_law", metric)
    optimum_laws = study.by_budget("size_optimum", metric)
    if height is not None and optimum_laws:
        budget = max(optimum_laws)
        here = value_of(optimum_laws[budget], "y_opt")
        ahead = "not identified"
        if height.values:
            expected, low_end, high_end = predict_saturating(height, 10 * budget)
            ahead = f"{significant(expected)} {_bracket(low_end, high_end)}" + (
                "" if height.ok else " (not identified)"
            )
            if height.ok:
                said.append(f"{significant(expected)} is expected at {power_of_ten(10 * budget)}")
        rows.append((f"{metric} on the frontier", power_of_ten(budget), significant(here), ahead, "allocation"))
        raw.append((metric, "frontier", here, None, None, height.status, ahead))
    own = f"For {metric} at up to {power_of_ten(top)} FLOPs: {listed(said)}" if said else (
        f"For {metric} these runs identify no optimum"
        + (" of its own" if lent else ": the sections below say why, axis by axis")
    )  # fmt: skip
    others = [f"{other}, which stands in for it in a plan, has {listed(told)}" for other, told in lent.items()]
    header = ("quantity", "at budget", "value [95%]", "ten times beyond [95%]", "axis")
    table = Table(header, tuple(rows) or (("–",) * len(header),))
    return View(sentence(own, *others), metric, table=table)


def _asked(study: Study, optimum: str, law: str, metric: str) -> list[str]:
    """The metric and, where its own optimum does not hold, the one that stands in: with a law first, as in plans."""
    order = stage2_metrics(metric) if optimum == "negatives_optimum" else stage1_metrics(metric)
    known = [m for m in dict.fromkeys([metric, *order]) if study.by_budget(optimum, m)]
    held = [m for m in known if (laws := study.by_budget(optimum, m))[max(laws)].ok]
    if not held or held[0] == known[0]:
        return known[:1]
    with_law = [m for m in held if (found := study.law(law, m)) is not None and found.ok]
    return [known[0], (with_law or held)[0]]


def _other_regime(study: Study, name: str, metric: str) -> str:
    regime, _, rest = metric.partition("/")
    for other in ("catalogue", "batch"):
        if other != regime and study.by_budget(name, f"{other}/{rest}"):
            return f"{other}/{rest}"
    return metric


def _at_ten_times(law: Law | None, budget: float, kind: str) -> str:
    if law is None or not law.values or "log_x" not in law.points:
        return f"not identified: {why_no_law(law)}" if law is not None else "–"
    value, low, high = predict_power_law(law, 10 * budget)
    told = f" ({NO_TREND})" if trend(law) == "none" else ""
    return f"{number(value, kind)} {_bracket(low, high, kind)}{told}"


def _bracket(low: float, high: float, kind: str = "plain") -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "[open]"
    return f"[{number(low, kind)}, {number(high, kind)}]"


def _told(law: Law, kind: str) -> str:
    from habitus.reporting.curves import told

    return told(law, kind) if law.ok or "x_opt" in law.values else f"not identified: {reason(law)}"


def _optimum(study: Study, name: str, metric: str, kind: str) -> str:
    shown = metric if study.by_budget(name, metric) else _other_regime(study, name, metric)
    laws = study.by_budget(name, shown)
    if not laws:
        return "not measured"
    held = {b: law for b, law in laws.items() if law.ok}
    if not held:
        return f"not identified ({reason(laws[max(laws)])})"
    budget = max(held)
    return f"{_told(held[budget], kind)} at {power_of_ten(budget)}" + ("" if shown == metric else f", by {shown}")


def _critical(study: Study, metric: str) -> str:
    laws = study.by_budget("critical_batch", metric)
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
    return f"{listed(rate(r) for r in rates)} at {power_of_ten(top)}"


def _ratio(study: Study, metric: str) -> str:
    laws = {b: law for b, law in study.by_budget("size_optimum", metric).items() if law.ok}
    data = study.law("data_law", metric)
    realised = dict(zip(data.points.get("x", ()), data.points.get("y", ()), strict=True)) if data is not None else {}
    if not laws:
        return "not identified" if study.by_budget("size_optimum", metric) else "not measured"
    told = [
        f"{significant(realised[b] / float(law['x_opt']), 3)} at {power_of_ten(b)}"
        for b, law in laws.items()
        if b in realised
    ]
    if told:
        return f"{listed(told)} (realised)"
    six = [f"{significant(b / (6 * float(law['x_opt']) ** 2), 3)} at {power_of_ten(b)}" for b, law in laws.items()]
    return f"{listed(six)} (6ND convention)"


def _best_init(study: Study) -> str:
    drifts = study.laws.learning_rate_drift
    if len(drifts) < 2:
        return "not measured"
    return min(drifts, key=lambda init: min(b.loss for b in drifts[init].best)) + " has the lowest training loss"


def _share_words(printed: dict[str, str]) -> str:
    text = printed.get("embedder_share", "–")
    try:
        return percent(float(text))
    except ValueError:
        return text
