"""Do metrics rank the runs alike? Correlations by stage, budget, regime; surrogacy of the training loss."""

from collections.abc import Sequence
from typing import Any

from habitus.reporting.figure import Axis, Block, Heat, Line, Mark, Panel, Points, Sheet, Table, View
from habitus.reporting.format import minus, power_of_ten, sentence
from habitus.reporting.powers import compute_axis
from habitus.reporting.study import Study
from habitus.store import CorrelationTable, NamedTables

BEST = "best learning rate only"
STAGE_AXES = {"stage1": ("share", "depth", "allocation"), "stage2": ("negatives",)}
STAGE_WORDS = {"stage1": "stage 1, batch regime", "stage2": "stage 2, catalogue regime"}


def bare(metric: str) -> str:
    """The metric without its regime."""
    return metric.split("/", 1)[1] if "/" in metric else metric


def tables_of(study: Study, name: str, runs: str = BEST) -> tuple[CorrelationTable, ...]:
    for named in study.laws.correlations:
        if named.name == name and named.runs == runs:
            return named.tables
    return ()


def matrix(table: CorrelationTable, title: str) -> Panel:
    """A correlation table as a heat map: the lower triangle."""
    names = sorted(table.names, key=_length) if "all" in table.names else list(table.names)
    rows, columns = names[1:], names[:-1]
    pairs = {frozenset((p.first, p.second)): p for p in table.pairs}
    values, tips = [], []
    for i, row in enumerate(rows):
        line: list[float | None] = []
        words = []
        for j, column in enumerate(columns):
            pair = pairs.get(frozenset((row, column))) if j <= i else None
            line.append(None if pair is None else pair.rho)
            if pair is None or pair.rho is None:
                words.append("")
            else:
                chance = "" if pair.beyond_chance else ", within chance"
                words.append(f"{bare(column)} and {bare(row)}: ρ = {pair.rho:+.2f}, n = {pair.n}{chance}")
        values.append(tuple(line))
        tips.append(tuple(words))
    return Panel(
        title, heat=Heat(tuple(_short(r) for r in rows), tuple(_short(c) for c in columns), tuple(values), tuple(tips))
    )


def _short(name: str) -> str:
    return bare(name).removeprefix("history=")


def _length(name: str) -> float:
    """The history length of a slice, 'all' last."""
    digits = name.rpartition("=")[2]
    return float(digits) if digits.isdigit() else float("inf")


def correlation_matrices(study: Study) -> Block | None:
    """Stage 1 and stage 2 matrices over all budgets."""
    panels, words = [], []
    for stage, where in STAGE_WORDS.items():
        tables = tables_of(study, stage)
        pooled = next((t for t in tables if t.label == "pooled"), None)
        if pooled is None:
            continue
        panels.append(matrix(pooled, f"{where}, pooled, n = {pooled.num_rows}"))
        words.append(_least(pooled, where))
    if not panels:
        return None
    sheet = pairs_sheet([n for n in study.laws.correlations if n.name in STAGE_WORDS], "pooled")
    how = (
        "Spearman's ρ. Losses fall where ranking metrics rise, so −1 is agreement between a loss and a ranking metric."
    )
    return Block("correlations", "Correlation of metrics", (View(sentence(*words), panels=tuple(panels)),), sheet, how)


def correlation_by_budget(study: Study) -> Block | None:
    """ρ of the loss with every other metric, budget by budget."""
    panels, words = [], []
    raw: list[tuple[Any, ...]] = []
    for stage, where in STAGE_WORDS.items():
        tables = [t for t in tables_of(study, stage) if t.label != "pooled"]
        if not tables:
            continue
        loss = "batch/loss" if stage == "stage1" else "catalogue/loss"
        others = [n for n in tables[0].names if n != loss]
        if loss not in tables[0].names:
            continue
        marks: list[Mark] = []
        for i, other in enumerate(others):
            known = [(float(t.label), t.rho(loss, other), t.num_rows) for t in tables if other in t.names]
            there = [(b, r, n) for b, r, n in known if r is not None]
            if there:
                xs, ys = [b for b, _, _ in there], [r for _, r, _ in there]
                tips = [f"{power_of_ten(b)}: loss and {bare(other)} ρ = {r:+.2f}, n = {n}" for b, r, n in there]
                colour = f"s{i % 8}"
                marks += [Line(xs, ys, colour, bare(other)), Points(xs, ys, colour, tips)]
                raw += [(stage, b, other, n, r) for b, r, n in there]
        if marks:
            panels.append(
                Panel(
                    where,
                    compute_axis(study),
                    Axis("ρ with the loss", low=-1.08, high=1.08, ticks=(-1, -0.5, 0, 0.5, 1)),
                    tuple(marks),
                )
            )
            words.append(_wandering(tables, loss, others, where))
    if not panels:
        return None
    sheet = Sheet(("set", "flops_budget", "metric", "n", "rho"), tuple(raw))
    return Block(
        "correlations-budget", "Correlation with the loss by budget",
        (View(sentence(*words), panels=tuple(panels)),), sheet,
        "Within a budget, where compute does not help every metric at once.",
    )  # fmt: skip


def correlation_tables(study: Study) -> list[Block]:
    """The same as tables, with n, for the best rate only and for all evaluations."""
    blocks = []
    for stage, where in STAGE_WORDS.items():
        named = [n for n in study.laws.correlations if n.name == stage]
        if not named:
            continue
        loss = "batch/loss" if stage == "stage1" else "catalogue/loss"
        others = [m for m in named[0].tables[0].names if m != loss]
        rows = []
        for group in named:
            for table in group.tables:
                if loss not in table.names or (group is not named[0] and table in named[0].tables):
                    continue  # with one learning rate per cell, all evaluations are those of the best rate
                cells = [table.rho(loss, m) for m in others]
                label = table.label if table.label == "pooled" else power_of_ten(float(table.label))
                rows.append(
                    (
                        label,
                        group.runs,
                        str(table.num_rows),
                        *("–" if c is None else f"{c:+.2f}".replace("-", "−") for c in cells),
                    )
                )
        if not rows:
            continue
        header = ("budget", "runs", "n", *(f"ρ(loss, {bare(m)})" for m in others))
        reading = sentence(_least(named[0].tables[-1], where))
        view = View(reading, table=Table(header, tuple(rows)))
        blocks.append(Block(f"correlations-{stage}", f"Correlations, {where}", (view,), pairs_sheet(named)))
    return blocks


def pairs_sheet(named: Sequence[NamedTables], only: str = "") -> Sheet:
    """One line per pair of columns; `only` keeps the tables of that label."""
    raw = [
        (n.name, n.runs, t.label, p.first, p.second, p.n, p.rho, p.chance_low, p.chance_high)
        for n in named
        for t in n.tables
        for p in t.pairs
        if only in ("", t.label)
    ]
    return Sheet(("set", "runs", "budget", "first", "second", "n", "rho", "chance_low", "chance_high"), tuple(raw))


def _least(table: CorrelationTable, where: str) -> str:
    """The pair of a table that agrees least, in absolute value."""
    known = [p for p in table.pairs if p.rho is not None]
    if not known:
        return f"{where}: no pair could be correlated"
    if len(known) == 1:
        (p,) = known
        return minus(f"{where} ({table.label}): ρ of {bare(p.first)} and {bare(p.second)} is {p.rho:+.2f}, n = {p.n}")
    low = min(known, key=lambda p: abs(p.rho or 0.0))
    high = max(known, key=lambda p: abs(p.rho or 0.0))
    return (
        f"{where} ({table.label}): {bare(low.first)} and {bare(low.second)} agree least "
        f"(ρ = {low.rho:+.2f}, n = {low.n}), "
        f"{bare(high.first)} and {bare(high.second)} most ({high.rho:+.2f})"
    ).replace("-0.", "−0.").replace("-1.", "−1.")  # fmt: skip


def _wandering(tables: Sequence[CorrelationTable], loss: str, others: Sequence[str], where: str) -> str:
    spans = {}
    for other in others:
        known = [r for t in tables if other in t.names and (r := t.rho(loss, other)) is not None]
        if known:
            spans[other] = (min(known), max(known))
    if not spans:
        return f"{where}: nothing could be correlated"
    worst = max(spans, key=lambda m: spans[m][1] - spans[m][0])
    low, high = spans[worst]
    words = (
        f"{where}: the loss's correlation changes most over budgets for {bare(worst)}, from {low:+.2f} to {high:+.2f}"
    )
    return words.replace("-0.", "−0.").replace("-1.", "−1.")
