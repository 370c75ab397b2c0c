"""The critical batch size: steps to a target, and the trajectories they are read from."""

from typing import Any

import numpy as np

from habitus.laws import EWMA_HALF_LIFE, smooth, steps_to_target
from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Points, Rule, Sheet, Table, View
from habitus.reporting.format import (
    describe_status,
    format_interval,
    format_number,
    join_words,
    plural,
    power_of_ten,
    reason,
    sentence,
    significant,
)
from habitus.reporting.runs import better, make_views
from habitus.reporting.study import Study
from habitus.store import Law, direction_of

_MAX_POINTS = 160  # of a drawn trajectory; a screen shows no more
_OWN = "of the batch"  # whose targets are candidates, in the arm that has no fixed pool
_MAX_LINES = 24  # of a panel; of many seeds some are drawn


def batch_fits(study: Study) -> Exhibit | None:
    """Steps to target against batch size with S_min·(1 + B_crit/B)."""
    views = make_views(_metrics(study), lambda metric: _fit_view(study, metric))
    raw: list[tuple[Any, ...]] = []
    for metric in _metrics(study):
        for budget, law in study.laws_by_budget("critical_batch", metric).items():
            pairs = zip(law.points.get("batch", ()), law.points.get("steps", ()), strict=True)
            raw += [(metric, budget, law.details.get("target"), b, s) for b, s in pairs]
    sheet = Sheet(("metric", "flops_budget", "target", "batch_sequences", "steps_to_target"), tuple(raw))
    how = "Right of the dashed line doubling the batch saves less than half of the steps it could save."
    return Exhibit("batch", "Critical batch size", views, sheet, how) if any(v.panels for v in views) else None


def batch_table(study: Study) -> Exhibit | None:
    rows, raw = [], []
    metrics = _metrics(study)
    sizes = sorted({b for m in metrics for _, _, law in _arms(study, m) for b in law.points.get("batch", ())})
    for metric in metrics:
        for budget, arm, law in _arms(study, metric):
            paper = study.paper_law("critical_batch", metric, 1e17)
            printed = "–" if paper is None else _printed_b_crit(paper)
            steps = dict(zip(law.points.get("batch", ()), law.points.get("steps", ()), strict=True))
            others = law.details.get("other_conventions", {})
            lines = [f"{'none' if v is None else f'{v:,.0f}'} {k.replace('_', ' ')}" for k, v in others.items()]
            rows.append(
                (
                    metric if arm == _OWN else f"{metric}, candidates {arm}",
                    power_of_ten(budget),
                    significant(law.details.get("target"), 4),
                    *(f"{steps[b]:,.0f}" if b in steps else "–" for b in sizes),
                    "\n".join([_b_crit(law), *lines]),
                    f"{law['r2']:.2f}" if "r2" in law.values else "–",
                    printed,
                )
            )
            low, high = law.interval("b_crit") if "b_crit" in law.values else (None, None)
            raw.append(
                (metric, budget, arm, law.details.get("target"), law.values.get("b_crit"), low, high,
                 law.values.get("s_min"), law.values.get("r2"), law.status)
            )  # fmt: skip
    if not rows:
        return None
    header = (
        "metric", "budget", "target", *(f"B {b:g}" for b in sizes), "B_crit [95%]", "R²", "paper",
    )  # fmt: skip
    sheet = Sheet(
        ("metric", "flops_budget", "candidates", "target", "b_crit", "low95", "high95", "s_min", "r2", "status"),
        tuple(raw),
    )
    identified = [law for m in metrics for _, _, law in _arms(study, m) if law.ok]
    reading = f"{len(identified)} of {plural(len(rows), 'critical batch size')} are identified"
    if not identified:
        reading += f": {reason(study.laws_by_budget('critical_batch', metrics[0]).popitem()[1])}"
    rules = {str(law.details["target_rule"]) for law in identified if "target_rule" in law.details}
    notes = tuple(f"Target: {rule}." for rule in sorted(rules))
    return Exhibit(
        "batch-table",
        "Critical batch sizes",
        (View(sentence(reading), table=Table(header, tuple(rows), notes)),),
        sheet,
    )


def batch_targets(study: Study) -> Exhibit | None:
    """B_crit as a function of the target, at equal steps of one reference run, in both arms."""
    rows, raw = [], []
    for metric in _metrics(study):
        for budget, arm, law in _arms(study, metric):
            for at in law.details.get("by_target", ()):
                low, high = at["low"], at["high"]
                ends = "" if at["b_crit"] is None else f" [{_end(low)}, {_end(high)}]"
                b_crit = "none" if at["b_crit"] is None else f"{at['b_crit']:,.0f}"
                verdict = "" if at["status"] == "ok" else f" ({at['status'].replace('_', ' ')})"
                steps = f"{at['reference_steps']:,.0f} of B {at['reference_batch']:g}"
                rows.append((metric, power_of_ten(budget), arm, steps, significant(at["target"], 4),
                             f"{b_crit}{ends}{verdict}"))  # fmt: skip
                raw.append((metric, budget, arm, at["reference_batch"], at["reference_steps"], at["target"],
                            at["b_crit"], low, high, at["status"]))  # fmt: skip
    if not rows:
        return None
    header = ("metric", "budget", "candidates", "reference steps", "target", "B_crit [95%]")
    columns = ("metric", "flops_budget", "candidates", "reference_batch", "reference_steps", "target", "b_crit",
               "low95", "high95", "status")  # fmt: skip
    known = [row for row in raw if row[-1] == "ok"]
    reading = f"{len(known)} of {plural(len(raw), 'critical batch size')} at equal reference steps are identified"
    notes = (
        "Two metrics differ in B_crit only where they differ in one row of equal steps: it grows during training.",
        "With the candidates of a fixed number of windows, steps measure the noise of gradients alone.",
    )
    view = View(sentence(reading), table=Table(header, tuple(rows), notes))
    return Exhibit("batch-targets", "Critical batch size by target", (view,), Sheet(columns, tuple(raw)))


def _arms(study: Study, metric: str) -> list[tuple[float, str, Law]]:
    """(budget, whose targets are candidates, law) of both arms."""
    arms = [(c, _OWN, law) for c, law in study.laws_by_budget("critical_batch", metric).items()]
    for c, law in study.laws_by_budget("critical_batch_fixed_pool", metric).items():
        arms.append((c, f"of {law.details['pool_sequences']:g} windows", law))
    return arms


def _end(value: float | None) -> str:
    return "open" if value is None else f"{value:,.0f}"


def trajectories(study: Study) -> Exhibit | None:
    """Smoothed metric against steps for every batch size, with the target."""
    metrics = [
        m
        for m in study.metrics
        if any(name == m for row in study.best_rate_runs("batch") for _, name, _ in row.trajectory)
    ]
    raw: list[tuple[Any, ...]] = []
    views = make_views(metrics, lambda metric: _trajectory_view(study, metric, raw))
    sheet = Sheet(("metric", "flops_budget", "batch_sequences", "seed", "step", "smoothed"), tuple(raw))
    means = f"Exponentially weighted means, half-life {EWMA_HALF_LIFE:g} evaluations"
    how = f"{means}; a dot marks the first one at the target."
    return Exhibit("trajectories", "Trajectories per batch size", views, sheet, how) if views else None


def _metrics(study: Study) -> list[str]:
    return [m for m in study.metrics if study.laws_by_budget("critical_batch", m)]


def _printed_b_crit(paper: Law) -> str:
    printed = paper.details.get("printed", {})
    if not printed.get("b_crit"):
        return describe_status(paper)
    return f"{format_number(printed['b_crit'])} (R² {printed['r2']:g})".replace(".0 (", " (")


def _b_crit(law: Law) -> str:
    if "b_crit" not in law.values:
        above = law.details.get("b_crit_above")
        return f"{describe_status(law)}, likely above {above:,.0f}" if above else describe_status(law)
    value, ends = f"{law['b_crit']:,.0f}", format_interval(law, "b_crit", "count")
    return f"{value} {ends}" + ("" if law.ok else f" ({describe_status(law)})")


def _fit_view(study: Study, metric: str) -> View | None:
    marks: list[Mark] = []
    clauses = []
    laws = study.laws_by_budget("critical_batch", metric)
    ticks = tuple(sorted({b for law in laws.values() for b in law.points.get("batch", ())}))
    for budget, law in study.laws_by_budget("critical_batch", metric).items():
        batches, steps = law.points.get("batch", ()), law.points.get("steps", ())
        if batches:
            tips = [
                f"B {b:g}: {s:,.0f} steps to {significant(law.details.get('target'))}"
                for b, s in zip(batches, steps, strict=True)
            ]
            marks.append(Points(batches, steps, "main", tips))
            if "b_crit" in law.values:
                fine = np.geomspace(min(batches), max(batches), 40)
                curve = law["s_min"] * (1 + law["b_crit"] / fine)
                marks.append(Line(fine.tolist(), curve.tolist(), "main"))
                marks.append(Rule(law["b_crit"], "x", "main", f"B_crit {law['b_crit']:,.0f}"))
        clauses.append(_describe_fit(law, metric, budget))
    paper = study.paper_law("critical_batch", metric, 1e17)
    printed = ""
    if paper is not None:
        b_crit = paper.details.get("printed", {}).get("b_crit")
        printed = (
            f"the paper prints {b_crit:,.0f} at 10¹⁷" if b_crit else "the paper finds none for this metric at 10¹⁷"
        )
    panel = Panel(
        f"steps until {metric} reaches its target", PlotAxis("batch size B (sequences)", log=True, ticks=ticks),
        PlotAxis("optimizer steps S", log=True, kind="count"), tuple(marks),
    )  # fmt: skip
    return View(sentence(*clauses, printed), metric, (panel,) if marks else ())


def _describe_fit(law: Law, metric: str, budget: float) -> str:
    if law.ok:
        reading = (
            f"For {metric} at {power_of_ten(budget)} the critical batch size is {law['b_crit']:,.0f} sequences "
            f"{format_interval(law, 'b_crit', 'count')}, R² {significant(law['r2'], 2)}"
        )
        others = {k: v for k, v in law.details.get("other_conventions", {}).items() if v is not None}
        if others:
            reading += "; by other conventions " + join_words(
                f"{v:,.0f} ({k.replace('_', ' ')})" for k, v in others.items()
            )
        return reading
    return f"not identified for {metric} at {power_of_ten(budget)}: {reason(law)}"


def _trajectory_view(study: Study, metric: str, raw: list[tuple[Any, ...]]) -> View | None:
    panels, clauses = [], []
    for budget, law in study.laws_by_budget("critical_batch", metric).items():
        rows = [
            r for r in study.best_rate_runs("batch", budget, ["batch_sequences"]) if "pool_sequences" not in r.knobs
        ]
        longest = {(r.knobs["batch_sequences"], r.seed): r for r in sorted(rows, key=lambda r: r.trajectory[-1:])}
        rows = sorted(longest.values(), key=lambda row: row.knobs["batch_sequences"])
        sizes = sorted({row.knobs["batch_sequences"] for row in rows})
        target = law.details.get("target")
        reached: set[float] = set()
        marks: list[Mark] = []
        most = max(1, _MAX_LINES // max(len(sizes), 1))
        lines = dict.fromkeys(sizes, 0)
        for row in rows:
            path = [(step, value) for step, name, value in row.trajectory if name == metric]
            if not path:
                continue
            batch = row.knobs["batch_sequences"]
            steps, values = [p[0] for p in path], smooth(np.array([p[1] for p in path]), EWMA_HALF_LIFE).tolist()
            keep = sorted({round(i) for i in np.linspace(0, len(path) - 1, min(_MAX_POINTS, len(path)))})
            colour = f"s{sizes.index(batch) % 8}"
            xs, ys = [steps[i] for i in keep], [values[i] for i in keep]
            raw += [(metric, budget, batch, row.seed, x, y) for x, y in zip(xs, ys, strict=True)]
            first = None if target is None else steps_to_target(path, target, direction_of(metric))
            reached |= {batch} if first is not None else set()
            if lines[batch] == most:
                continue
            marks.append(Line(xs, ys, colour, "" if lines[batch] else f"B {batch:g}"))
            lines[batch] += 1
            if first is not None and target is not None:
                tip = f"B {batch:g} reaches {significant(target)} at step {first:,.0f}"
                marks.append(Points([first], [target], colour, [tip]))
        if not marks:
            continue
        if target is not None:
            marks.append(Rule(target, "y", "soft", f"target {significant(target)}"))
            clauses.append(
                f"{len(reached)} of {len(sizes)} batch sizes reach the target {significant(target)} of {metric}; "
                f"batch {law.details.get('limiting_batch', 0):g} limits it"
            )
        steps_axis = PlotAxis("optimizer step", log=True, kind="count")
        panels.append(Panel(better(metric), steps_axis, PlotAxis(metric), tuple(marks), labels="margin"))
    return View(sentence(*clauses), metric, tuple(panels)) if panels else None
