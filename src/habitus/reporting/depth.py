"""The depth axis: layers moved between text encoder and contextualizer at a constant sum."""

from habitus.laws import MeasuredRun
from habitus.reporting.figure import Exhibit, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import (
    describe_optimum,
    describe_status,
    join_words,
    law_value,
    percent,
    power_of_ten,
    sentence,
    significant,
)
from habitus.reporting.runs import best_row, better, make_views, run_points, run_sheet
from habitus.reporting.share import FLOP_SHARE
from habitus.reporting.study import Study
from habitus.reporting.valleys import DEPTH, SHARE_AXIS


def depth_metrics(study: Study) -> Exhibit | None:
    """Metrics against s and against f, off-diagonal cells hollow."""
    metrics = study.fitted_metrics("depth", "embedder_share")
    off_diagonal = [r for r in _depth_runs(study) if not r.on_diagonal]

    def view(metric: str) -> View | None:
        panels = []
        for knob, axis in (("embedder_share", SHARE_AXIS), ("embedder_flop_share", FLOP_SHARE)):
            marks = _dots(study, metric, knob, off_diagonal)
            if marks:
                panels.append(Panel(better(metric), axis, PlotAxis(metric), tuple(marks)))
        best = {}
        for budget in study.budgets:
            rows = study.best_rate_runs("depth", budget, ["depth", metric])
            if rows:
                best[budget] = best_row(rows, metric).knobs["depth"]
        depths = join_words(f"{d:g} layers at {power_of_ten(b)}" for b, d in best.items())
        if len(best) > 1 and len(set(best.values())) == 1:
            depths = f"{next(iter(best.values())):g} layers at every budget"
        reading = sentence(f"The best contextualizer for {metric} has {depths}" if depths else "No depth was recorded")
        return View(reading, metric, tuple(panels)) if panels else None

    views = make_views(metrics, view)
    how = "Hollow squares lie off the constant-sum diagonal and are in no fit." if off_diagonal else ""
    sheet = run_sheet(study.best_rate_runs("depth"), metrics, DEPTH.knobs)
    return Exhibit("depth-metrics", "Depth: metrics against s and f", views, sheet, how) if views else None


def depth_tables(study: Study) -> list[Exhibit]:
    """Summary, parabola, grid and evaluation."""
    exhibits = [_summary(study), _grid(study), _evaluation(study)]
    return [exhibit for exhibit in exhibits if exhibit is not None]


def _dots(study: Study, metric: str, knob: str, off_diagonal: list[MeasuredRun]) -> list[Mark]:
    marks: list[Mark] = []
    for budget in study.budgets:
        rows = study.best_rate_runs("depth", budget, [knob, metric])
        if rows:
            marks.append(run_points(study, rows, knob, metric, metric, label=power_of_ten(budget)))
        off = [r for r in off_diagonal if r.budget == budget and knob in r.knobs and metric in r.metrics]
        if off:
            tips = [
                f"{power_of_ten(budget)} · {r.cell_id}, off the diagonal: {significant(r.metrics[metric])}" for r in off
            ]
            xs, ys = [r.knobs[knob] for r in off], [r.metrics[metric] for r in off]
            marks.append(Points(xs, ys, study.colour(budget), tips, hollow=True, shape="square"))
    return marks


def _summary(study: Study) -> Exhibit | None:
    rows, raw = [], []
    extra = [m for m in ("batch/recall@10", "batch/ndcg@10") if m in study.metrics]
    for budget, law in study.laws_by_budget("depth_optimum", "batch/loss").items():
        runs = study.best_rate_runs("depth", budget, ["batch/loss", "embedder_share"])
        if not runs:
            continue
        best = best_row(runs, "batch/loss")
        paper = study.paper_law("depth_optimum", "batch/loss", budget)
        printed = (
            "–" if paper is None else (describe_optimum(paper, "percent") if paper.values else describe_status(paper))
        )
        rows.append(
            (
                power_of_ten(budget),
                f"{best.knobs['depth']:g}" if "depth" in best.knobs else best.cell_id,
                percent(best.knobs["embedder_share"]),
                significant(best.metrics["batch/loss"]),
                *(significant(best.metrics.get(m)) for m in extra),
                describe_optimum(law, "percent") if "x_opt" in law.values else describe_status(law),
                significant(law_value(law, "y_opt")),
                f"{law.details['gap']:.3f}" if "gap" in law.details else "–",
                printed,
            )
        )
        raw.append((budget, best.knobs.get("depth"), best.knobs["embedder_share"], best.metrics["batch/loss"],
                    law.values.get("x_opt"), law.values.get("y_opt"), law.details.get("gap"), law.status))  # fmt: skip
    if not rows:
        return None
    header = (
        "budget",
        "best depth",
        "its s",
        "its loss",
        *extra,
        "parabola s* [95%]",
        "loss there",
        "gap at 2%",
        "paper s*",
    )
    gaps = [r[6] for r in raw if r[6] is not None and r[7] == "ok"]
    reading = (
        f"choosing a share of 2% costs at most {max(gaps):.3f} nat" if gaps else "no parabola has an optimum that holds"
    )
    sheet = Sheet(
        ("flops_budget", "best_depth", "share", "loss", "parabola_share", "parabola_loss", "gap_at_2pct", "status"),
        tuple(raw),
    )
    view = View(sentence(reading), table=Table(header, tuple(rows)))
    return Exhibit("depth-summary", "Depth: winners and parabolas", (view,), sheet)


def _depth_runs(study: Study) -> list[MeasuredRun]:
    """All finished depth runs at their cell's best learning rate by training loss, off-diagonal ones included."""
    done = [r for r in study.runs if r.axis == "depth" and r.status == "done" and "train/loss" in r.metrics]
    best: dict[tuple[float, str], MeasuredRun] = {}
    for run in done:
        key = (run.budget, run.cell_id)
        if key not in best or run.metrics["train/loss"] < best[key].metrics["train/loss"]:
            best[key] = run
    rates = {key: run.learning_rate for key, run in best.items()}
    rates |= {(c.budget, c.cell_id): c.learning_rate for c in study.laws.learning_rates if c.axis == "depth"}
    return [r for r in done if "depth" in r.knobs and r.learning_rate == rates[(r.budget, r.cell_id)]]


def _grid(study: Study) -> Exhibit | None:
    runs = [run for run in _depth_runs(study) if "batch/loss" in run.metrics]
    if not runs:
        return None
    depths = sorted({(run.knobs["depth"], not run.on_diagonal) for run in runs}, key=lambda d: (d[1], d[0]))
    budgets = sorted({run.budget for run in runs})
    rows, raw = [], []
    for depth, off in depths:
        cells = []
        for budget in budgets:
            at = [r for r in runs if r.budget == budget and r.knobs["depth"] == depth and r.on_diagonal is not off]
            loss = min((r.metrics["batch/loss"] for r in at), default=None)
            cells.append(significant(loss))
            if loss is not None:
                raw.append((depth, budget, loss, "no" if off else "yes"))
        rows.append((f"{depth:g}" + (" (off diagonal)" if off else ""), *cells))
    header = ("depth", *(power_of_ten(b) for b in budgets))
    sheet = Sheet(("depth", "flops_budget", "batch/loss", "on_diagonal"), tuple(raw))
    reading = f"batch/loss of {len(raw)} depth cells over {len(budgets)} budgets"
    return Exhibit(
        "depth-grid", "Depth: loss of every cell", (View(sentence(reading), table=Table(header, tuple(rows))),), sheet
    )


def _evaluation(study: Study) -> Exhibit | None:
    runs = _depth_runs(study)
    if not runs:
        return None
    top = max(run.budget for run in runs)
    at = sorted((r for r in runs if r.budget == top), key=lambda r: (not r.on_diagonal, r.knobs["depth"]))
    metrics = [m for m in study.metrics if any(m in r.metrics for r in at)]
    rows = tuple(
        (
            f"{r.knobs['depth']:g}" + ("" if r.on_diagonal else " (off)"),
            *(significant(r.metrics.get(m)) for m in metrics),
        )
        for r in at
    )
    sheet = Sheet(("depth", *metrics), tuple((r.knobs["depth"], *(r.metrics.get(m) for m in metrics)) for r in at))
    reading = f"all metrics of the depth cells at {power_of_ten(top)}, the largest budget of this axis"
    view = View(sentence(reading), table=Table(("depth", *metrics), rows))
    return Exhibit("depth-evaluation", "Depth: evaluation at the largest budget", (view,), sheet)
