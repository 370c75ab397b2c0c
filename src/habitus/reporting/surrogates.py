"""Can a cheap signal stand in for an expensive one? Batch regime for catalogue, training loss for metrics."""

from collections.abc import Sequence

import numpy as np

from habitus.laws import spearman_matrix
from habitus.reporting.correlations import bare, stage_title, tables_of
from habitus.reporting.figure import Exhibit, Heat, Mark, Panel, PlotAxis, Sheet, Table, View
from habitus.reporting.format import join_words, plural, power_of_ten, sentence
from habitus.reporting.runs import make_views, run_points, run_sheet
from habitus.reporting.study import Study
from habitus.store import CORRELATED_REGIMES, CorrelationStage, correlated_axes, direction_of


def regimes(study: Study) -> Exhibit | None:
    """Each run's metric in the batch regime against the same metric over the catalogue."""
    names = sorted({bare(p.first) for r in study.laws.regimes for p in r.pairs})
    names = [n for n in names if any(m.endswith("/" + n) for m in study.metrics)]

    def view(name: str) -> View | None:
        batch, catalogue = f"batch/{name}", f"catalogue/{name}"
        panels, rhos = [], []
        for axis in sorted({r.axis for r in study.laws.regimes}):
            marks: list[Mark] = []
            for budget in study.budgets:
                rows = study.best_rate_runs(axis, budget, [batch, catalogue])
                if rows:
                    label = power_of_ten(budget)
                    marks.append(run_points(study, rows, batch, catalogue, batch, catalogue, label=label))
            if marks:
                panels.append(
                    Panel(f"{name}, {axis} axis", PlotAxis(batch), PlotAxis(catalogue), tuple(marks), labels="margin")
                )
            for r in study.laws.regimes:
                for p in r.pairs:
                    if r.axis == axis and bare(p.first) == name and p.rho is not None:
                        rhos.append((p.rho, r.budget, axis, p.n, p.beyond_chance))
        if not panels:
            return None
        reading = "no ρ could be computed"
        if rhos:
            low = min(rhos)
            reading = (
                f"within a budget the two regimes rank runs by {name} with ρ from {low[0]:+.2f} "
                f"({low[2]} axis at {power_of_ten(low[1])}, n = {low[3]}) to {max(rhos)[0]:+.2f}; "
                f"{sum(r[4] for r in rhos)} of {len(rhos)} are beyond chance"
            ).replace("-", "−")
        return View(sentence(reading), f"batch/{name} catalogue/{name}", tuple(panels))

    views = make_views(names, view)
    raw = [
        (r.axis, r.budget, bare(p.first), p.n, p.rho, p.chance_low, p.chance_high)
        for r in study.laws.regimes
        for p in r.pairs
    ]
    sheet = Sheet(("axis", "flops_budget", "metric", "n", "rho", "chance_low", "chance_high"), tuple(raw))
    how = "One dot per run. A rising cloud within one colour means that the cheap batch regime picks the same winners."
    return Exhibit("regimes", "Batch-local against catalogue", views, sheet, how) if views else None


def surrogate(study: Study) -> Exhibit | None:
    """Whether the in-batch training loss ranks K as the metrics do."""
    cells = study.laws.surrogacy
    if not cells:
        return None
    budgets = sorted({c.budget for c in cells})
    metrics = [m for m in study.metrics if any(c.metric == m for c in cells)]
    at = {(c.metric, c.budget): c for c in cells}
    values, tips, faded = [], [], []
    for m in metrics:
        row = [at.get((m, b)) for b in budgets]
        values.append(tuple(None if c is None else c.correlation.rho for c in row))
        tips.append(
            tuple(
                "" if c is None else f"{m} at {power_of_ten(c.budget)}: "
                f"ρ = {c.correlation.rho or 0:+.2f}, n = {c.correlation.n}, "
                f"spread over K {100 * c.spread:.1f}%{', too small to rank' if c.faded else ''}"
                for c in row
            )
        )  # fmt: skip
        faded.append(tuple(bool(c and c.faded) for c in row))
    heat = Heat(
        tuple(bare(m) for m in metrics),
        tuple(power_of_ten(b) for b in budgets),
        tuple(values),
        tuple(tips),
        tuple(faded),
    )
    strong = [c for c in cells if not c.faded and c.correlation.rho is not None]
    agree = sum(_agrees(c.metric, c.correlation.rho or 0.0) for c in strong)
    reading = (
        f"In {agree} of {plural(len(strong), 'cell')} training loss and metric rank K alike, with |ρ| at least 0.5"
    )
    pale = len(cells) - len(strong)
    more = f"{plural(pale, 'cell')} {'varies' if pale == 1 else 'vary'} too little over K to rank" if pale else ""
    reading = "; ".join(part for part in (reading, more) if part)
    sheet = Sheet(
        ("metric", "flops_budget", "n", "rho", "spread", "faded"),
        tuple(
            (c.metric, c.budget, c.correlation.n, c.correlation.rho, c.spread, "yes" if c.faded else "no")
            for c in cells
        ),
    )
    how = "ρ between in-batch training loss and each metric over K; pale cells vary by less than 2% over K."
    panel = Panel("in-batch training loss against catalogue metrics", heat=heat)
    return Exhibit(
        "surrogacy", "Is the training loss a surrogate?", (View(sentence(reading), panels=(panel,)),), sheet, how
    )


def training_loss_table(study: Study) -> Exhibit | None:
    """ρ of the training loss with every metric: median over budgets in stage 1, pooled in stage 2."""
    stage1 = {m: _rhos(study, correlated_axes("stage1"), m) for m in study.metrics if m.startswith("batch/")}
    stage2 = {
        m: _rhos(study, correlated_axes("stage2"), m, pooled=True) for m in study.metrics if m.startswith("catalogue/")
    }
    names = list(dict.fromkeys(bare(m) for m, r in {**stage1, **stage2}.items() if r))
    rows, raw = [], []
    for name in names:
        first, second = stage1.get(f"batch/{name}", []), stage2.get(f"catalogue/{name}", [])
        median = float(np.median([r for r, _ in first])) if first else None
        pooled = second[0] if second else None
        rows.append(
            (
                name,
                "–" if median is None else f"{median:+.3f}".replace("-", "−"),
                str(len(first)),
                "–" if pooled is None else f"{pooled[0]:+.2f}".replace("-", "−"),
                "–" if pooled is None else str(pooled[1]),
            )
        )
        raw.append(
            (name, median, len(first), None if pooled is None else pooled[0], None if pooled is None else pooled[1])
        )
    if not rows:
        return None
    header = ("metric", "stage 1: median ρ", "budgets", "stage 2: ρ", "n")
    sheet = Sheet(("metric", "stage1_median_rho", "stage1_budgets", "stage2_rho", "stage2_n"), tuple(raw))
    strong = [r for r in raw if r[1] is not None and abs(r[1]) >= 0.9]
    reading = (
        f"in stage 1 the training loss ranks runs as {len(strong)} of {plural(len(raw), 'metric')} do (|ρ| over 0.9)"
    )
    view = View(sentence(reading), table=Table(header, tuple(rows)))
    return Exhibit("training-loss", "Training loss against metrics", (view,), sheet)


def loss_and_recall_regimes(study: Study) -> Exhibit | None:
    """Loss against a ranking metric in both regimes."""
    ranking = list(dict.fromkeys(bare(m) for m in study.metrics if "@" in m))

    def view(name: str) -> View | None:
        panels, clauses = [], []
        for stage, regime in CORRELATED_REGIMES.items():
            loss, other = f"{regime}/loss", f"{regime}/{name}"
            marks: list[Mark] = []
            for budget in study.budgets:
                rows = [r for axis in correlated_axes(stage) for r in study.best_rate_runs(axis, budget, [loss, other])]
                if rows:
                    marks.append(run_points(study, rows, loss, other, loss, other, label=power_of_ten(budget)))
            if marks:
                panels.append(Panel(stage_title(stage), PlotAxis(loss), PlotAxis(other), tuple(marks), labels="margin"))
            rhos = [
                (power_of_ten(float(t.label)), rho)
                for t in tables_of(study, stage)
                if t.label != "pooled" and {loss, other} <= set(t.names) and (rho := t.rho(loss, other)) is not None
            ]
            if rhos:
                clauses.append(
                    f"{stage_title(stage)}: ρ of loss and {name} is " + join_words(f"{r:+.2f} at {b}" for b, r in rhos)
                )
        for stage in CORRELATED_REGIMES:
            across, clause = _batch_loss_panel(study, stage, f"catalogue/{name}")
            panels += across
            clauses += clause
        reading = sentence(*clauses).replace("-0", "−0").replace("-1", "−1") or "Too few runs to correlate."
        return View(reading, f"batch/{name} catalogue/{name}", tuple(panels)) if panels else None

    views = make_views(ranking, view)
    metrics = [m for m in study.metrics if bare(m) == "loss" or "@" in m]
    rows = [r for stage in CORRELATED_REGIMES for axis in correlated_axes(stage) for r in study.best_rate_runs(axis)]
    return (
        Exhibit("loss-metric", "Loss against ranking, in both regimes", views, run_sheet(rows, metrics, ()))
        if views
        else None
    )


def _batch_loss_panel(study: Study, stage: CorrelationStage, catalogue: str) -> tuple[list[Panel], list[str]]:
    """What is cheap to watch, batch/loss, against what is served, over the catalogue, for runs that have both: cells
    of stage 1, and the numbers of extra negatives of stage 2."""
    loss, where = "batch/loss", {"stage1": "across regimes", "stage2": "across regimes, over K"}[stage]
    marks: list[Mark] = []
    clauses = []
    for budget in study.budgets:
        rows = [r for axis in correlated_axes(stage) for r in study.best_rate_runs(axis, budget, [loss, catalogue])]
        if rows:
            marks.append(run_points(study, rows, loss, catalogue, loss, catalogue, label=power_of_ten(budget)))
        if len(rows) >= 3:
            columns = {metric: [r.metrics[metric] for r in rows] for metric in (loss, catalogue)}
            pair = spearman_matrix(columns, seed=study.laws.seed).pairs[0]
            if pair.rho is not None:
                clauses.append(f"{pair.rho:+.2f} at {power_of_ten(budget)}")
    panel = Panel(where, PlotAxis(loss), PlotAxis(catalogue), tuple(marks), labels="margin")
    told = [f"{where}: ρ of {loss} and {catalogue} is {join_words(clauses)}"] if clauses else []
    return ([panel] if marks else []), told


def _agrees(metric: str, rho: float) -> bool:
    return rho >= 0.5 if direction_of(metric) == "min" else rho <= -0.5


def _rhos(study: Study, axes: Sequence[str], metric: str, pooled: bool = False) -> list[tuple[float, int]]:
    """Spearman's ρ of the training loss with a metric, per budget or pooled."""
    rows = [row for axis in axes for row in study.best_rate_runs(axis, needs=["train/loss", metric])]
    groups = [rows] if pooled else [[r for r in rows if r.budget == b] for b in study.budgets]
    rhos = []
    for group in groups:
        if len(group) >= 3:
            name = "train/in_batch_loss" if pooled else "train/loss"
            columns = {name: [r.metrics.get(name, np.nan) for r in group], metric: [r.metrics[metric] for r in group]}
            pair = spearman_matrix(columns, seed=study.laws.seed).pairs[0]
            if pair.rho is not None:
                rhos.append((pair.rho, pair.n))
    return rhos
