"""The depth axis: layers moved between text encoder and contextualizer at a constant sum."""

from habitus.laws import Run
from habitus.reporting.curves import parabola, told
from habitus.reporting.figure import Axis, Block, Mark, Panel, Points, Sheet, Table, View
from habitus.reporting.format import listed, percent, power_of_ten, sentence, significant, state, value_of
from habitus.reporting.share import FLOP_SHARE, SHARE
from habitus.reporting.study import Study
from habitus.reporting.valleys import (
    best_row,
    better,
    optimum_reading,
    run_sheet,
    run_tip,
    valley_panel,
    views,
)

KNOBS = ("embedder_share", "embedder_flop_share", "depth", "text_depth", "params", "slots_seen")


def depth_parabolas(study: Study) -> Block | None:
    """The metric against share along the depth diagonal, with parabolas in log s."""
    metrics = study.fitted_metrics("depth", "embedder_share")

    def view(metric: str) -> View | None:
        panel = valley_panel(study, "depth", "embedder_share", metric, "depth_optimum", SHARE, parabola)
        laws = study.by_budget("depth_optimum", metric)
        words = optimum_reading(study, laws, metric, "share along the depth axis", "percent", "depth_optimum")
        return None if panel is None else View(words, metric, (panel,))

    found = views(metrics, view)
    sheet = run_sheet(study.chosen("depth"), metrics, KNOBS)
    return (
        Block("depth", "Depth parabolas", found, sheet, "Parabolas in the logarithm of the share.") if found else None
    )


def depth_metrics(study: Study) -> Block | None:
    """Metrics against s and against f, off-diagonal cells hollow."""
    metrics = study.fitted_metrics("depth", "embedder_share")
    aside = [r for r in _depth_runs(study) if not r.on_diagonal]

    def view(metric: str) -> View | None:
        panels = []
        for knob, axis in (("embedder_share", SHARE), ("embedder_flop_share", FLOP_SHARE)):
            marks = _dots(study, metric, knob, aside)
            if marks:
                panels.append(Panel(better(metric), axis, Axis(metric), tuple(marks)))
        best = {}
        for budget in study.budgets:
            rows = study.chosen("depth", budget, ["depth", metric])
            if rows:
                best[budget] = best_row(rows, metric).knobs["depth"]
        words = listed(f"{d:g} layers at {power_of_ten(b)}" for b, d in best.items())
        if len(best) > 1 and len(set(best.values())) == 1:
            words = f"{next(iter(best.values())):g} layers at every budget"
        reading = sentence(f"The best contextualizer for {metric} has {words}" if words else "No depth was recorded")
        return View(reading, metric, tuple(panels)) if panels else None

    found = views(metrics, view)
    how = "Hollow squares lie off the constant-sum diagonal and are in no fit." if aside else ""
    sheet = run_sheet(study.chosen("depth"), metrics, KNOBS)
    return Block("depth-metrics", "Depth: metrics against s and f", found, sheet, how) if found else None


def depth_tables(study: Study) -> list[Block]:
    """Summary, parabola, grid and evaluation."""
    blocks = [_summary(study), _grid(study), _evaluation(study)]
    return [block for block in blocks if block is not None]


def _dots(study: Study, metric: str, knob: str, aside: list[Run]) -> list[Mark]:
    marks: list[Mark] = []
    for budget in study.budgets:
        rows = study.chosen("depth", budget, [knob, metric])
        colour = study.colour(budget)
        if rows:
            xs, ys = [r.knobs[knob] for r in rows], [r.metrics[metric] for r in rows]
            marks.append(Points(xs, ys, colour, [run_tip(study, r, metric) for r in rows], label=power_of_ten(budget)))
        off = [r for r in aside if r.budget == budget and knob in r.knobs and metric in r.metrics]
        if off:
            tips = [
                f"{power_of_ten(budget)} · {r.cell_id}, off the diagonal: {significant(r.metrics[metric])}" for r in off
            ]
            xs, ys = [r.knobs[knob] for r in off], [r.metrics[metric] for r in off]
            marks.append(Points(xs, ys, colour, tips, hollow=True, shape="square"))
    return marks


def _summary(study: Study) -> Block | None:
    rows, raw = [], []
    extra = [m for m in ("batch/recall@10", "batch/ndcg@10") if m in study.metrics]
    for budget, law in study.by_budget("depth_optimum", "batch/loss").items():
        runs = study.chosen("depth", budget, ["batch/loss", "embedder_share"])
        if not runs:
            continue
        best = best_row(runs, "batch/loss")
        paper = study.paper("depth_optimum", "batch/loss", budget)
        printed = "–" if paper is None else (told(paper, "percent") if paper.values else state(paper))
        rows.append(
            (
                power_of_ten(budget),
                f"{best.knobs['depth']:g}" if "depth" in best.knobs else best.cell_id,
                percent(best.knobs["embedder_share"]),
                significant(best.metrics["batch/loss"]),
                *(significant(best.metrics.get(m)) for m in extra),
                told(law, "percent") if "x_opt" in law.values else state(law),
                significant(value_of(law, "y_opt")),
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
    words = (
        f"choosing a share of 2% costs at most {max(gaps):.3f} nat" if gaps else "no parabola has an optimum that holds"
    )
    sheet = Sheet(
        ("flops_budget", "best_depth", "share", "loss", "parabola_share", "parabola_loss", "gap_at_2pct", "status"),
        tuple(raw),
    )
    view = View(sentence(words), table=Table(header, tuple(rows)))
    return Block("depth-summary", "Depth: winners and parabolas", (view,), sheet)


def _depth_runs(study: Study) -> list[Run]:
    """All finished depth runs at their cell's best learning rate by training loss, off-diagonal ones included."""
    done = [r for r in study.runs if r.axis == "depth" and r.status == "done" and "train/loss" in r.metrics]
    best: dict[tuple[float, str], Run] = {}
    for run in done:
        key = (run.budget, run.cell_id)
        if key not in best or run.metrics["train/loss"] < best[key].metrics["train/loss"]:
            best[key] = run
    rates = {key: run.learning_rate for key, run in best.items()}
    rates |= {(c.budget, c.cell_id): c.learning_rate for c in study.laws.learning_rates if c.axis == "depth"}
    return [r for r in done if "depth" in r.knobs and r.learning_rate == rates[(r.budget, r.cell_id)]]


def _grid(study: Study) -> Block | None:
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
    words = f"batch/loss of {len(raw)} depth cells over {len(budgets)} budgets"
    return Block(
        "depth-grid", "Depth: loss of every cell", (View(sentence(words), table=Table(header, tuple(rows))),), sheet
    )


def _evaluation(study: Study) -> Block | None:
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
    words = f"all metrics of the depth cells at {power_of_ten(top)}, the largest budget of this axis"
    view = View(sentence(words), table=Table(("depth", *metrics), rows))
    return Block("depth-evaluation", "Depth: evaluation at the largest budget", (view,), sheet)
