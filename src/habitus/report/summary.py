"""The answer on top: what to train for a budget and a metric, from the plan or from the laws."""

import math
from typing import Any

from habitus.fit.power_law import predict_power_law
from habitus.fit.result import Law
from habitus.fit.saturating import predict_saturating
from habitus.report.marks import Block, Sheet, Table, View
from habitus.report.powers import why_no_law
from habitus.report.study import Study
from habitus.report.valleys import views
from habitus.report.words import (
    count,
    listed,
    number,
    percent,
    power_of_ten,
    rate,
    reason,
    sentence,
    significant,
    value_of,
)

_KINDS = {
    "params": "count", "slots_seen": "count", "slots": "count", "num_negatives": "count", "embedder_share": "percent",
    "share": "percent", "learning_rate": "rate", "flops": "flops", "stage1_flops": "flops", "stage2_flops": "flops",
    "batch_sequences": "count", "steps": "count", "stage1_steps": "count", "stage2_steps": "count",
    "stage1_learning_rate": "rate", "stage2_learning_rate": "rate", "events_seen": "count",
}  # fmt: skip


def answer(study: Study) -> Block:
    """For every metric: what this study says at its largest budget and ten times beyond."""
    raw: list[tuple[Any, ...]] = []
    found = views(study.metrics, lambda metric: _answer_view(study, metric, raw))
    header = ("metric", "quantity", "at_largest_budget", "low95", "high95", "status", "at_10x")
    how = "Each value is read from the law named, for the metric chosen above; open or missing values say why below."
    return Block("answer", "What these runs say", found, Sheet(header, tuple(raw)), how)


def plan_block(study: Study) -> Block | None:
    """The plan's recipe with intervals and sources."""
    plan = study.plan
    if plan is None:
        return None
    rows, raw = [], []
    for name, q in _quantities(plan):
        kind = _kind(name)
        ends = "–"
        if q.get("low") is not None or q.get("high") is not None:
            ends = f"[{_end(q.get('low'), kind)}, {_end(q.get('high'), kind)}]"
        rows.append(
            (
                name.replace("_", " "),
                number(float(q["value"]), kind),
                ends,
                str(q.get("source", "–")),
                str(q.get("how", "")),
            )
        )
        raw.append((name, q["value"], q.get("low"), q.get("high"), q.get("source"), q.get("how")))
    for stage in ("stage1", "stage2"):
        recipe = plan.get(stage)
        if isinstance(recipe, dict):
            told = _recipe_words(recipe)
            rows.append((f"{stage[:5]} {stage[5:]} recipe", told, "–", "plan", f"{stage}.toml"))
            raw.append((f"{stage}_recipe", told, None, None, "plan", f"{stage}.toml"))
    for p in plan.get("predictions", ()):
        name = f"predicted {p['metric']}"
        rows.append(
            (
                name,
                significant(p["value"]),
                f"[{_end(p.get('low'))}, {_end(p.get('high'))}]",
                str(p.get("source", "")),
                str(p.get("how", "")),
            )
        )
        raw.append((name, p["value"], p.get("low"), p.get("high"), p.get("source"), p.get("how")))
    notes = [str(w) for w in plan.get("warnings", ())]
    table = Table(("knob", "value", "95%", "source", "how"), tuple(rows), tuple(notes))
    sheet = Sheet(("knob", "value", "low95", "high95", "source", "how"), tuple(raw))
    return Block(
        "plan",
        f"Recipe for {power_of_ten(float(plan.get('flops', 0)))} FLOPs",
        (View(plan_words(plan), table=table),),
        sheet,
    )


def plan_words(plan: dict[str, Any]) -> str:
    """The plan in one sentence."""
    known = dict(_quantities(plan))

    def told(name: str, word: str) -> str:
        return f"{word} {number(float(known[name]['value']), _kind(name))}" if name in known else ""

    knobs = [
        told("params", "N ="), told("slots_seen", "D =") or told("slots", "D ="), told("embedder_share", "share"),
        told("batch_sequences", "batch"), told("learning_rate", "rate"), told("num_negatives", "K ="),
    ]  # fmt: skip
    budget = power_of_ten(float(plan.get("flops", 0)))
    words = f"For {plan.get('metric')} at {budget} FLOPs: train {listed(k for k in knobs if k)}"
    expected = [p for p in plan.get("predictions", ()) if p.get("metric") == plan.get("metric")]
    more = ""
    if expected:
        p = expected[-1]
        more = f"expect {significant(p['value'])} [{_end(p.get('low'))}, {_end(p.get('high'))}]"
    reach = plan.get("extrapolation")
    far = ""
    if isinstance(reach, dict) and reach.get("factor", 0) > 1.01:
        far = f"this is {reach['factor']:.3g} times the largest budget measured here"
    return sentence(words, more, far)


def recipe_table(study: Study) -> Block | None:
    """What the laws of this store recommend, per metric, beside the paper's guidance."""
    printed = study.published.extra.get("recipe", {})
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
    for label, optimum, law_name, kind, axis in (
        ("model size N*", "size_optimum", "size_law", "count", "allocation"),
        ("embedder share s*", "share_optimum", "share_law", "percent", "share"),
        ("extra negatives K*", "negatives_optimum", "negatives_law", "count", "negatives"),
    ):
        shown = metric if study.by_budget(optimum, metric) else _other_regime(study, optimum, metric)
        laws = study.by_budget(optimum, shown)
        if not laws:
            continue
        budget = max(laws)
        law = laws[budget]
        beyond = _at_ten_times(study.law(law_name, shown), budget, kind)
        name = label if shown == metric else f"{label} (by {shown})"
        rows.append((name, power_of_ten(budget), _told(law, kind), beyond, axis))
        low, high = law.interval("x_opt") if "x_opt" in law.values else (None, None)
        raw.append((metric, name, law.values.get("x_opt"), low, high, law.status, beyond))
        if law.ok:
            said.append(f"{label} = {number(float(law['x_opt']), kind)}")
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
    words = f"For {metric} at up to {power_of_ten(top)} FLOPs: {listed(said)}" if said else (
        f"For {metric} these runs identify no optimum: the sections below say why, axis by axis"
    )  # fmt: skip
    header = ("quantity", "at budget", "value [95%]", "ten times beyond [95%]", "axis")
    table = Table(header, tuple(rows) or (("–",) * len(header),))
    return View(sentence(words), metric, table=table)


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
    return f"{number(value, kind)} {_bracket(low, high, kind)}"


def _bracket(low: float, high: float, kind: str = "plain") -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "[open]"
    return f"[{number(low, kind)}, {number(high, kind)}]"


def _told(law: Law, kind: str) -> str:
    from habitus.report.curves import told

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


def _quantities(plan: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = plan.get("quantities", {})
    return [(str(k), v) for k, v in found.items() if isinstance(v, dict) and isinstance(v.get("value"), int | float)]


def _kind(name: str) -> str:
    return _KINDS.get(name, "plain")


def _end(value: float | None, kind: str = "plain") -> str:
    return "open" if value is None else number(float(value), kind)


def _recipe_words(recipe: dict[str, Any]) -> str:
    model, train = recipe.get("model", {}), recipe.get("train", {})
    names = (("joint_dim", model), ("width", model), ("depth", model), ("batch_sequences", train), ("steps", train),
             ("learning_rate", train), ("num_negatives", train))  # fmt: skip
    parts = [
        f"{n} {number(float(g[n]), _kind(n)) if n == 'learning_rate' else count(g[n])}" for n, g in names if n in g
    ]
    return ", ".join(parts)
