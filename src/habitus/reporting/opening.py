"""The picture that the page begins with: the runs, the frontier below or above them, its forecast, and the plan."""

from habitus.laws import predict_saturating
from habitus.reporting.curves import frontier_marks, optima
from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Points, Rule, View
from habitus.reporting.format import power_of_ten, reason, sentence, significant
from habitus.reporting.runs import best_row, better, make_views, run_points, run_sheet
from habitus.reporting.study import Study
from habitus.store import LOG_AXIS, SURFACE_AXIS, TRAIN, Prediction, RunRow, direction_of

_AXES = ("allocation", "share", "depth", SURFACE_AXIS, LOG_AXIS)  # of stage 1, the first that was run


def opening(study: Study) -> Exhibit | None:
    """Metric against compute: every run, the frontier with its band up to the plan, and the planned point."""
    axis = next((a for a in _AXES if study.best_rate_runs(a)), None)
    if axis is None:
        return None
    metrics = study.fitted_metrics(axis)
    views = make_views(metrics, lambda metric: _view(study, axis, metric))
    sheet = run_sheet(study.best_rate_runs(axis), metrics, ("params", "slots_seen", "epochs", "flops_nominal"))
    how = "Dots are runs, coloured by budget; the line is the law and its 95% band, or the best so far without a law."
    return Exhibit("opening", "What compute buys, and what is planned", views, sheet, how) if views else None


def _view(study: Study, axis: str, metric: str) -> View | None:
    by_budget: dict[float, list[RunRow]] = {}
    for row in sorted(study.best_rate_runs(axis, needs=[metric]), key=lambda row: row.budget):
        by_budget.setdefault(row.budget, []).append(row)
    if not by_budget:
        return None
    several = 1 < len(by_budget) <= 10
    marks: list[Mark] = []
    for budget, rows in by_budget.items():
        marks.append(run_points(study, rows, [budget] * len(rows), metric, metric, colour="" if several else "main"))
    laws = {b: law for b, law in study.laws_by_budget("size_optimum", metric).items() if "y_opt" in law.values}
    curve = frontier_marks(study, metric)
    marks += [*curve, *optima(laws, "main", "plain", "y_opt")] if curve else _best_so_far(by_budget, metric)
    marks += _planned_points(study, metric)
    compute = PlotAxis("compute C (FLOPs)", log=True, kind="flops")
    return View(
        _describe(study, metric, by_budget), metric, (Panel(better(metric), compute, PlotAxis(metric), tuple(marks)),)
    )


def _best_so_far(by_budget: dict[float, list[RunRow]], metric: str) -> list[Mark]:
    """A line through the best run of each budget that no smaller budget beats."""
    steps: list[tuple[float, float]] = []
    for budget, rows in by_budget.items():
        value = best_row(rows, metric).metrics[metric]
        if not steps or (value < steps[-1][1]) == (direction_of(metric) == "min"):
            steps.append((budget, value))
    return [Line([x for x, _ in steps], [y for _, y in steps], "main", "best so far" if len(steps) > 1 else "")]


def _planned(study: Study, metric: str) -> list[tuple[float, Prediction]]:
    """What the plan predicts for the metric, with the compute that each stage ends at."""
    plan = study.plan
    if plan is None:
        return []
    at = {1: plan.stage1_flops, 2: plan.flops}
    return [(at[p.stage], p) for p in plan.predictions if p.metric == metric]


def _planned_points(study: Study, metric: str) -> list[Mark]:
    marks: list[Mark] = []
    planned = _planned(study, metric)
    if study.plan is not None and not planned:
        marks.append(Rule(study.plan.flops, "x", "plan", "plan"))
    for flops, p in planned:
        low, high = (float("inf") * sign if end is None else end for end, sign in ((p.low, -1), (p.high, 1)))
        bars = ([low], [high]) if p.low is not None or p.high is not None else ([], [])
        tip = f"plan at {power_of_ten(flops)}, stage {p.stage}: {_value(p)}"
        label = "plan" if p.stage == 1 else "plan, stage 2"
        marks.append(Points([flops], [p.value], "plan", [tip], *bars, shape="diamond", large=True, label=label))
    return marks


def _value(p: Prediction) -> str:
    if p.low is None and p.high is None:
        return significant(p.value)
    return f"{significant(p.value)} [{', '.join('open' if e is None else significant(e) for e in (p.low, p.high))}]"


def _describe(study: Study, metric: str, by_budget: dict[float, list[RunRow]]) -> str:
    """The best run so far, and what the plan, or ten times the compute, is expected to bring."""
    rows = [row for group in by_budget.values() for row in group]
    best = best_row(rows, metric)
    parts = [
        f"the best of these runs has {metric} {significant(best.metrics[metric])}, at {power_of_ten(best.budget)} FLOPs"
    ]
    # Sizes were compared at one batch: another one may have reached more.
    others = [] if metric.startswith(f"{TRAIN}/") else study.best_rate_runs("batch_size", needs=[metric])
    top = best_row([best, *others], metric)
    if top.knobs.get("batch_sequences") != best.knobs.get("batch_sequences"):
        windows, reached = f"{top.knobs['batch_sequences']:g}", significant(top.metrics[metric])
        parts.append(f"with {windows} windows per step it reached {reached} at {power_of_ten(top.budget)}")
    planned = _planned(study, metric)
    law = study.law("loss_law", metric)
    if planned:
        flops, p = planned[-1]
        parts.append(f"the plan for {power_of_ten(flops)} expects {_value(p)}")
    elif law is not None and law.ok:
        far = 10 * max(by_budget)
        value, low, high = predict_saturating(law, far)
        batches = {row.knobs.get("batch_sequences") for row in rows}
        # Other batches may well reach more there (docs/studies/paper-axes): these runs cannot tell.
        of_one = f" of {batches.pop():g} windows per step" if len(batches) == 1 and None not in batches else ""
        parts.append(
            f"the frontier{of_one} reaches {significant(value)} [{significant(low)}, {significant(high)}] "
            f"at {power_of_ten(far)}"
        )
    elif law is not None:
        parts.append(f"how the frontier continues is not identified: {reason(law)}")
    return sentence(*parts)
