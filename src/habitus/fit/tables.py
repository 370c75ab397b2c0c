"""The laws as plain tables, in the paper's order."""

import math
from collections.abc import Iterable, Sequence

from habitus.fit.laws_file import LawsFile
from habitus.fit.result import Law


def tables(laws: LawsFile) -> str:
    """Everything a reader of the paper looks for, as text."""
    parts = [
        _by_budget(laws, "share_optimum", "Embedder share s* (%)", scale=100),
        _laws(laws, ("share_law",), "s*(C)"),
        _by_budget(laws, "depth_optimum", "Depth axis: s* of the parabola (%)", scale=100),
        _critical_batch(laws),
        _by_budget(laws, "size_optimum", "Model size N*: valleys of one shape"),
        _by_budget(laws, "size_parabola", "Model size N*: parabolas"),
        _laws(laws, ("size_law", "size_law_parabola", "data_law", "data_law_6nd"), "Allocation laws"),
        _laws(laws, ("loss_law", "surface", "surface_optimum_10x", "both_approaches"), "Loss laws"),
        _by_budget(laws, "negatives_optimum", "Negatives K*"),
        _laws(laws, ("negatives_law", "negatives_shared_alpha_law"), "K*(C)"),
        _rollouts(laws),
        _correlations(laws),
        _drift(laws),
        _exclusions(laws),
        _warnings(laws),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def number(value: float) -> str:
    """Four significant digits, and a word for an open end."""
    if not math.isfinite(value):
        return "open"
    return f"{value:.4g}"


def with_interval(law: Law, name: str, scale: float = 1.0) -> str:
    """'2.1 [1.6, 2.9]' for a value with its 95% interval; the status where there is no value."""
    if name not in law.values:
        return law.status
    mark = "" if law.ok else f" ({law.status})"
    if name not in law.intervals.get("0.95", {}):
        return f"{number(law[name] * scale)}{mark}"
    low, high = law.interval(name)
    return f"{number(law[name] * scale)} [{number(low * scale)}, {number(high * scale)}]{mark}"


def _by_budget(laws: LawsFile, name: str, title: str, scale: float = 1.0) -> str:
    entries = [e for e in laws.entries if e.name == name]
    budgets = sorted({e.budget for e in entries if e.budget is not None})
    rows = []
    for metric in dict.fromkeys(e.metric for e in entries):
        of_metric = {e.budget: e.law for e in entries if e.metric == metric}
        rows.append([metric, *(with_interval(of_metric[c], "x_opt", scale) if c in of_metric else "" for c in budgets)])
    return grid(title, ["metric", *(f"{c:.3g}" for c in budgets)], rows)


def _laws(laws: LawsFile, names: Sequence[str], title: str) -> str:
    rows = []
    for entry in laws.entries:
        if entry.name in names:
            law = entry.law
            told = "; ".join(f"{name} {with_interval(law, name)}" for name in law.values if name != "exponent_se")
            rows.append([entry.name, entry.metric, law.status, str(law.residuals.n), told or "-"])
    return grid(title, ["law", "metric", "status", "n", "values [95%]"], rows)


def _critical_batch(laws: LawsFile) -> str:
    rows = []
    for entry in (e for e in laws.entries if e.name == "critical_batch"):
        law = entry.law
        steps = " ".join(
            f"{b:g}:{s:g}" for b, s in zip(law.points.get("batch", ()), law.points.get("steps", ()), strict=True)
        )
        r2 = f"{law['r2']:.2f}" if "r2" in law.values else "-"
        rows.append(
            [entry.metric, number(law.details.get("target", math.nan)), steps, with_interval(law, "b_crit"), r2]
        )
    return grid("Critical batch size", ["metric", "target", "steps by batch", "B_crit [95%]", "R2"], rows)


def _rollouts(laws: LawsFile) -> str:
    rows = []
    for item in laws.rollouts:
        for f in item.rollout.forecasts:
            rows.append(
                [
                    item.name,
                    item.metric,
                    f"{f.fitted_budgets[-1]:.3g}",
                    f"{f.budget:.3g}",
                    number(f.predicted),
                    number(f.observed),
                    f"{f.ratio:.2f}x" if item.name == "size_law" else f"{f.miss:+.1%}",
                ]
            )
    header = ["law", "metric", "fitted up to", "budget", "predicted", "observed", "miss"]
    return grid("Roll-out: fit the lowest budgets, predict the rest", header, rows)


def _correlations(laws: LawsFile) -> str:
    rows = []
    for named in laws.correlations:
        for table in named.tables:
            worst = table.worst()
            if worst is not None:
                pair = f"{worst.first} ~ {worst.second}"
                rows.append([named.name, named.runs, table.label, str(worst.n), pair, f"{worst.rho:+.2f}"])
    header = ["set", "runs", "budget", "n", "pair that agrees least", "rho"]
    return grid("Spearman correlations: the lowest of each table", header, rows)


def _drift(laws: LawsFile) -> str:
    rows = [
        [
            init,
            ", ".join(f"{b.size:.3g}: {b.learning_rate:g}{'' if b.bracketed else ' (edge)'}" for b in drift.best),
            f"{drift.span_decades:.2f}",
        ]
        for init, drift in laws.learning_rate_drift.items()
    ]
    return grid("Best learning rate by size", ["init", "size: rate", "span (decades)"], rows)


def _exclusions(laws: LawsFile) -> str:
    counts: dict[tuple[str, str], int] = {}
    for e in laws.exclusions:
        counts[(e.axis, e.reason)] = counts.get((e.axis, e.reason), 0) + 1
    return grid(
        "Left out", ["axis", "reason", "runs"], [[axis, why, str(n)] for (axis, why), n in sorted(counts.items())]
    )


def _warnings(laws: LawsFile) -> str:
    told = [*laws.notes, *laws.warnings()]
    return "\n".join(["Warnings", *(f"- {line}" for line in told)]) if told else ""
