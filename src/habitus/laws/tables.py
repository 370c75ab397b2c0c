"""The laws as plain tables, in the paper's order."""

import math
import textwrap
from collections.abc import Iterable, Sequence

from habitus.laws.power_law import NO_TREND, trend
from habitus.store import LAW_NAMES, Law, Laws
from habitus.units import pluralize

WIDTH = 80


def format_tables(laws: Laws) -> str:
    """Everything a reader of the paper looks for, as text."""
    parts = [
        *(_table_of_laws(laws, title) for title in dict.fromkeys(law.table for law in LAW_NAMES.values()) if title),
        _rollouts(laws),
        _correlations(laws),
        _drift(laws),
        _exclusions(laws),
        _warnings(laws),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table_of_laws(laws: Laws, title: str) -> str:
    """The laws that share a heading: optima as a row per budget, laws with their values."""
    names = [law for law in LAW_NAMES.values() if law.table == title]
    if names[0].name == "critical_batch":
        return _critical_batch(laws, title)
    if names[0].per_budget:
        return _by_budget(laws, names[0].name, title, scale=100 if names[0].percent else 1.0)
    return _laws(laws, [law.name for law in names], title)


def grid(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A title and aligned columns; empty without rows."""
    body = [list(row) for row in rows]
    if not body:
        return ""
    widths = [max(len(row[i]) for row in [list(header), *body]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [list(header), *body]
    ]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])


def _number(value: float) -> str:
    """Four significant digits, and a word for an open end."""
    if not math.isfinite(value):
        return "open"
    return f"{value:.4g}"


def _interval(law: Law, name: str, scale: float = 1.0) -> str:
    """'[1.6, 2.9]', the 95% interval of a value; '-' where there is none."""
    if name not in law.intervals.get("0.95", {}):
        return "-"
    low, high = law.interval(name)
    beyond = scale == 100 and 1 < high < math.inf  # a share ends at 100%, an interval may not
    return f"[{_number(low * scale)}, {'>100' if beyond else _number(high * scale)}]"


def _value(law: Law, name: str, scale: float = 1.0) -> str:
    return _number(law[name] * scale) if name in law.values else "-"


def bullets(title: str, lines: Iterable[str]) -> str:
    """A title and sentences, folded to the width of a terminal; empty without sentences."""
    bulleted = [textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines]
    return "\n".join([title, *bulleted]) if bulleted else ""


def _by_budget(laws: Laws, name: str, title: str, scale: float = 1.0) -> str:
    rows = [
        [e.metric, f"{e.budget:.3g}", _value(e.law, "x_opt", scale), _interval(e.law, "x_opt", scale), e.law.status]
        for e in laws.entries
        if e.name == name and e.budget is not None
    ]
    return grid(title, ["metric", "budget", "optimum", "95%", "status"], rows)


def _laws(laws: Laws, names: Sequence[str], title: str) -> str:
    """Each law with its values below it, since five values with intervals fill no readable line."""
    lines = []
    for entry in laws.entries:
        if entry.name in names:
            law = entry.law
            lines.append(f"{entry.name} of {entry.metric}: {law.status}, n = {law.residuals.n}")
            lines += [f"    {NO_TREND}"] if trend(law) == "none" else []
            for name in law.values:
                if name != "exponent_se":
                    lines.append(f"    {name:<14}  {_value(law, name):<10}  {_interval(law, name)}".rstrip())
    return "\n".join([f"{title}: values and 95% intervals", *lines]) if lines else ""


def _critical_batch(laws: Laws, title: str) -> str:
    rows, steps = [], []
    for entry in (e for e in laws.entries if e.name.startswith("critical_batch")):
        law = entry.law
        pool = law.details.get("pool_sequences")
        metric = entry.metric if pool is None else f"{entry.metric}, pools of {pool:g}"
        r2 = f"{law['r2']:.2f}" if "r2" in law.values else "-"
        target = _number(law.details.get("target", math.nan))
        rows.append([metric, target, _value(law, "b_crit"), _interval(law, "b_crit"), r2, law.status])
        by_batch = zip(law.points.get("batch", ()), law.points.get("steps", ()), strict=True)
        steps.append(f"{metric}: steps by batch " + " ".join(f"{b:g}:{s:g}" for b, s in by_batch))
    header = ["metric", "target", "B_crit", "95%", "R2", "status"]
    return "\n".join(part for part in (grid(title, header, rows), bullets("", steps).strip()) if part)


def _rollouts(laws: Laws) -> str:
    """N* as a ratio; the metric's errors as shares of the gain since the largest fitted budget."""
    rows = []
    for item in laws.rollouts:
        for f in item.rollout.forecasts:
            error = f.error_of_gain()
            rows.append(
                [
                    {"size_law": "N*", "loss_law": "L*"}.get(item.name, item.name),
                    item.metric,
                    f"{f.fitted_budgets[-1]:.3g}",
                    f"{f.budget:.3g}",
                    _number(f.predicted),
                    _number(f.observed),
                    f"{f.ratio:.2f}x" if error is None else f"{error:+.0%}",
                    "-" if f.log_line is None else f"{f.error_of_gain(f.log_line) or 0.0:+.0%}",
                ]
            )
    title = "Roll-out: fit the lowest budgets, predict the rest; errors of a metric are\n"
    title += "shares of its gain, beside those of a line in log C (persistence: +100%)"
    return grid(title, ["law", "metric", "up to", "budget", "forecast", "observed", "miss", "line"], rows)


def _correlations(laws: Laws) -> str:
    parts = []
    for name in dict.fromkeys(named.name for named in laws.correlations):
        rows = []
        for named in (n for n in laws.correlations if n.name == name):
            for table in named.tables:
                worst = table.worst()
                if worst is not None:
                    # All columns of a table are of one regime, which its set stands for.
                    pair = " ~ ".join(
                        c.removeprefix("batch/").removeprefix("catalogue/") for c in (worst.first, worst.second)
                    )
                    rows.append([named.runs, table.label, str(worst.n), pair, f"{worst.rho:+.2f}"])
        header = ["runs", "budget", "n", "pair that agrees least", "rho"]
        parts.append(grid(f"Spearman correlations, {name}: the lowest of each table", header, rows))
    return "\n\n".join(part for part in parts if part)


def _drift(laws: Laws) -> str:
    rows = [
        [init, f"{b.size:.3g}", f"{b.learning_rate:g}", "no" if b.bracketed else "yes", f"{drift.span_decades:.2f}"]
        for init, drift in laws.learning_rate_drift.items()
        for b in drift.best
    ]
    return grid("Best learning rate by size", ["init", "size", "rate", "at edge", "span (decades)"], rows)


def _exclusions(laws: Laws) -> str:
    counts: dict[tuple[str, str], int] = {}
    for e in laws.exclusions:
        counts[(e.axis, e.reason)] = counts.get((e.axis, e.reason), 0) + 1
    return bullets("Left out", (f"{axis}, {pluralize(n, 'run')}: {why}" for (axis, why), n in sorted(counts.items())))


def _warnings(laws: Laws) -> str:
    return bullets("Warnings", [*laws.notes, *laws.warnings()])
