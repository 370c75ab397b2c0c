"""How far to trust it: both approaches to N*, flat ranges, learning rates at the edge of their grid."""

from collections import Counter

from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import (
    count,
    describe_status,
    join_words,
    law_value,
    plural,
    power_of_ten,
    sentence,
    significant,
    superscript,
)
from habitus.reporting.study import Study
from habitus.store import Law, RateChoice


def both_approaches(study: Study) -> Exhibit | None:
    rows, raw = [], []
    for metric in study.metrics:
        law = study.law("both_approaches", metric)
        surface = study.law("surface", metric)
        if law is None and surface is None:
            continue
        cost = study.law("surface_optimum_10x", metric)
        paper = study.paper_law("both_approaches", metric)
        from_surface = "–" if surface is None or surface.values else describe_status(surface)
        rows.append(
            (
                metric,
                f"{law['from_optima']:.3f} {_ends(law, 'from_optima')}" if law else "–",
                f"{law['from_surface']:.3f} {_ends(law, 'from_surface')}" if law else from_surface,
                ("agree" if law.ok else "disagree") if law else "–",
                _describe_surface(surface),
                str(cost.details.get("cost", "–")).replace("*", "·") if cost else "–",
                f"{paper['from_optima']:.3f} and {paper['from_surface']:.3f}" if paper else "–",
            )
        )
        raw.append(
            (metric, law_value(law, "from_optima"), law_value(law, "from_surface"), law.status if law else "",
             *(law_value(surface, n) for n in _SURFACE))
        )  # fmt: skip
    if not rows:
        return None
    reading = _compare_approaches(study)
    header = (
        "metric",
        "N* exponent from optima [95%]",
        "from L(N, D) [95%]",
        "verdict",
        "L(N, D)",
        "cost on these runs",
        "paper",
    )
    sheet = Sheet(("metric", "from_optima", "from_surface", "status", *_SURFACE), tuple(raw))
    view = View(sentence(reading), table=Table(header, tuple(rows)))
    return Exhibit("both", "Two approaches to N*(C)", (view,), sheet)


def _compare_approaches(study: Study) -> str:
    """The verdict for the metric shown first (or the first compared), and how many metrics disagree."""
    compared = {m: law for m in study.metrics if (law := study.law("both_approaches", m)) is not None}
    if not compared:
        return "not identified: no L(N, D) surface could be compared with the optima"
    metric = study.metric if study.metric in compared else next(iter(compared))
    law = compared[metric]
    verdict = "the intervals meet" if law.ok else "the intervals do not meet"
    reading = (
        f"for {metric} N* ∝ C^b has b = {law['from_optima']:.3f} by the optima and {law['from_surface']:.3f} by L(N, D)"
    )
    apart = [m for m, other in compared.items() if not other.ok]
    names = f" ({join_words(apart)})" if apart else ""
    return f"{reading}; {verdict}. Of {plural(len(compared), 'metric')} compared, {len(apart)} disagree{names}"


def flat_ranges(study: Study) -> Exhibit | None:
    """All sizes within 0.1% of the best, where there is a best."""
    laws = {m: study.laws_by_budget("size_optimum", m) for m in study.metrics}
    budgets = sorted({budget for by_budget in laws.values() for budget in by_budget})
    if not budgets:
        return None
    rows, raw = [], []
    for metric, by_budget in laws.items():
        identified = {b: law for b, law in by_budget.items() if law.ok and "flat_range" in law.values}
        if by_budget:
            cells = [_flat_cell(identified[b]) if b in identified else "–" for b in budgets]
            rows.append((metric, *cells))
        raw += [(metric, b, float(law["x_opt"]), *law["flat_range"]) for b, law in identified.items()]
    shown = [r for r in raw if r[0] == study.metric] or raw
    reading = "no budget has an interior optimum, so no range can be called flat"
    if shown:
        widths = [r[4] / r[3] for r in shown]
        factors = f"{min(widths):.1f} to {max(widths):.1f}"
        reading = f"for {shown[0][0]} all sizes within a factor {factors} lie within 0.1% of the best"
    header = ("metric", *(power_of_ten(b) for b in budgets))
    sheet = Sheet(("metric", "flops_budget", "optimum_size", "flat_low", "flat_high"), tuple(raw))
    return Exhibit(
        "flat", "Flat ranges", (View(sentence(reading), table=Table(header, tuple(rows) if raw else ())),), sheet
    )


def _flat_cell(law: Law) -> str:
    low, high = law["flat_range"]
    return f"{count(low)} to {count(high)}\nfactor {high / low:.1f} about {count(float(law['x_opt']))}"


def rate_choices(study: Study) -> Exhibit | None:
    """The learning rate of every cell, and which stand at the edge of their grid."""
    choices = [c for c in study.laws.learning_rates if len(c.tried) > 1]
    if not choices:
        return None
    edges = [c for c in choices if c.at_edge]
    by_axis: dict[tuple[str, float], list[RateChoice]] = {}
    for c in choices:
        by_axis.setdefault((c.axis, c.budget), []).append(c)
    rows = tuple(
        (
            axis, power_of_ten(budget), str(len(group)),
            _rates(group),
            str(sum(c.at_edge for c in group)),
        )
        for (axis, budget), group in sorted(by_axis.items())
    )  # fmt: skip
    raw = tuple(
        (
            c.axis,
            c.budget,
            c.cell_id,
            t.learning_rate,
            t.loss,
            t.num_seeds,
            "yes" if t.learning_rate == c.learning_rate else "no",
            "yes" if c.at_edge else "no",
        )
        for c in choices
        for t in c.tried
    )
    reading = f"{len(edges)} of {plural(len(choices), 'cell')} have their best learning rate at the edge of its grid"
    header = ("axis", "budget", "cells", "chosen rates (cells)", "at an edge")
    sheet = Sheet(("axis", "flops_budget", "cell_id", "learning_rate", "tail_loss", "seeds", "chosen", "at_edge"), raw)
    how = "Chosen by the mean training loss of the last 100 steps, never by validation."
    return Exhibit("rates", "Learning rates chosen", (View(sentence(reading), table=Table(header, rows)),), sheet, how)


def _rates(group: list[RateChoice]) -> str:
    counts = Counter(c.learning_rate for c in group)
    return join_words(f"{power_of_ten(r)} ({n})" for r, n in sorted(counts.items()))


_SURFACE = ("floor", "size_coef", "size_exponent", "data_coef", "data_exponent")


def _describe_surface(law: Law | None) -> str:
    if law is None:
        return "–"
    if not law.values:
        return describe_status(law)
    e, a, alpha, b, beta = (float(law[n]) for n in _SURFACE)
    reading = (
        f"{significant(e, 4)} + {significant(a, 3)}/N{superscript(alpha)} + {significant(b, 3)}/D{superscript(beta)}"
    )
    return reading + ("" if law.ok else f" ({describe_status(law)})")


def _ends(law: Law, name: str) -> str:
    interval = law.intervals.get("0.95", {}).get(name)
    if interval is None:
        return ""
    low, high = interval.ends()
    return f"[{significant(low, 3)}, {significant(high, 3)}]"
