"""Extra negatives in stage 2: metrics against K, K*(C), and what the training loss says."""

from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Points, View
from habitus.reporting.format import format_number, join_words, power_of_ten, reason, sentence, significant
from habitus.reporting.powers import power_law_exhibit
from habitus.reporting.study import Study
from habitus.reporting.valleys import (
    best_row,
    describe_optima,
    make_views,
    optimum_table,
    run_sheet,
    run_tip,
    valley_panel,
)
from habitus.store import RunRow, direction_of

_KNOBS = ("num_negatives", "params", "slots_seen", "steps", "batch_sequences")


def _negatives_axis(study: Study) -> PlotAxis:
    """K on a logarithmic axis, with K = 0 at its left end where it was run."""
    values = [row.knobs["num_negatives"] for row in study.best_rate_runs("negatives", needs=["num_negatives"])]
    positive = [v for v in values if v > 0]
    zero = min(positive) / 3 if positive and 0 in values else None
    return PlotAxis("extra negatives K", log=True, kind="count", zero_at=zero)


def negatives_curves(study: Study) -> Exhibit | None:
    """Metrics against K with the two-term fits."""
    metrics = _metrics(study)
    axis = _negatives_axis(study)

    def view(metric: str) -> View | None:
        panel = valley_panel(study, "negatives", "num_negatives", metric, "negatives_optimum", axis)
        laws = study.laws_by_budget("negatives_optimum", metric)
        reading = describe_optima(study, laws, metric, "number of extra negatives", "count", "negatives_optimum")
        return None if panel is None else View(reading, metric, (panel,))

    views = make_views(metrics, view)
    sheet = run_sheet(study.best_rate_runs("negatives"), metrics, _KNOBS)
    how = "Catalogue regime only. K = 0 has no logarithm and is kept out of the fit; it stands at the left end."
    return Exhibit("negatives", "Metrics against extra negatives K", views, sheet, how) if views else None


def negatives_law(study: Study) -> Exhibit | None:
    return power_law_exhibit(
        study, "negatives-law", "Best number of negatives against compute, K*(C)", "negatives_optimum", "negatives_law",
        "K*", PlotAxis("K*", log=True, kind="count"),
    )  # fmt: skip


def negatives_table(study: Study) -> Exhibit | None:
    metrics = [m for m in study.metrics if study.laws_by_budget("negatives_optimum", m)]
    if not metrics:
        return None
    table, sheet = optimum_table(study, "negatives_optimum", metrics, "count")
    identified = sum(1 for m in metrics for law in study.laws_by_budget("negatives_optimum", m).values() if law.ok)
    shared = [
        m for m in metrics if any(v.ok for v in study.laws_by_budget("negatives_shared_alpha_optimum", m).values())
    ]
    reading = f"{identified} of {len(sheet.rows)} optima of K are identified with free exponents"
    if not identified:
        reading += f": {reason(next(iter(study.laws_by_budget('negatives_optimum', metrics[0]).values())))}"
    more = f"with one α for all budgets, as in the paper, some are for {join_words(shared)}" if shared else ""
    return Exhibit(
        "negatives-table", "Best number of negatives K*", (View(sentence(reading, more), table=table),), sheet
    )


def loss_and_recall(study: Study) -> Exhibit | None:
    """Whether the loss and a ranking metric prefer the same K: both as gains over the smallest K, better is up."""
    metrics = _metrics(study)
    ranking = [m for m in metrics if direction_of(m) == "max"]
    if "catalogue/loss" not in metrics or not ranking:
        return None
    axis = _negatives_axis(study)

    def view(metric: str) -> View | None:
        panels: list[Panel] = []
        agree: list[tuple[float, float, float]] = []
        apart: list[tuple[float, float, float]] = []
        for budget in study.budgets:
            rows = study.best_rate_runs("negatives", budget, ["num_negatives", "catalogue/loss", metric])
            rows.sort(key=lambda row: row.knobs["num_negatives"])
            if len(rows) < 3:
                continue
            marks: list[Mark] = []
            for name, colour in (("catalogue/loss", "s0"), (metric, "s1")):
                xs = [row.knobs["num_negatives"] for row in rows]
                gains = _gains(rows, name)
                label = name.removeprefix("catalogue/")
                marks += [
                    Line(xs, gains, colour, label),
                    Points(xs, gains, colour, [run_tip(study, r, name) for r in rows]),
                ]
            panels.append(
                Panel(f"at {power_of_ten(budget)}", axis, PlotAxis("gain over the smallest K, %"), tuple(marks))
            )
            by_loss, by_rank = (best_row(rows, m).knobs["num_negatives"] for m in ("catalogue/loss", metric))
            (agree if by_loss == by_rank else apart).append((budget, by_loss, by_rank))
        if not panels:
            return None
        clauses = [f"at {join_words(power_of_ten(b) for b, _, _ in agree)} both pick the same K" if agree else ""]
        clauses += [
            f"at {power_of_ten(b)} the loss picks K = {format_number(by_loss, 'count')} "
            f"and {metric} K = {format_number(by_rank, 'count')}"
            for b, by_loss, by_rank in apart
        ]
        return View(sentence("; ".join(w for w in clauses if w)), metric, tuple(panels))

    views = make_views(ranking, view)
    sheet = run_sheet(study.best_rate_runs("negatives"), metrics, _KNOBS)
    how = "Both lines are scaled so that up is better: they part where loss and ranking metric prefer different K."
    return Exhibit("loss-recall", "Loss and ranking against K", views, sheet, how) if views else None


def channels(study: Study) -> Exhibit | None:
    """Both training channels against K."""
    axis = _negatives_axis(study)
    panels, clauses = [], []
    top = max((row.budget for row in study.best_rate_runs("negatives", needs=["num_negatives"])), default=0.0)
    for name, title in (("train/in_batch_loss", "in-batch channel"), ("train/extra_loss", "channel with extras")):
        marks: list[Mark] = []
        for budget in study.budgets:
            rows = study.best_rate_runs("negatives", budget, ["num_negatives", name])
            rows.sort(key=lambda row: row.knobs["num_negatives"])
            if not rows:
                continue
            xs, ys = [r.knobs["num_negatives"] for r in rows], [r.metrics[name] for r in rows]
            colour = study.colour(budget)
            marks += [
                Line(xs, ys, colour, power_of_ten(budget)),
                Points(xs, ys, colour, [run_tip(study, r, name) for r in rows]),
            ]
            if len(rows) > 1 and budget == top:
                change = ys[-1] - ys[0]
                first, last = (
                    f"{significant(y)} at K = {format_number(x, 'count')}"
                    for x, y in ((xs[0], ys[0]), (xs[-1], ys[-1]))
                )
                clauses.append(
                    f"at {power_of_ten(budget)} the {title} goes from {first} to {last} "
                    f"({'+' if change >= 0 else '−'}{abs(change):.3f})"
                )
        if marks:
            panels.append(Panel(f"{name}, {title}", axis, PlotAxis(name), tuple(marks)))
    if not panels:
        return None
    if not clauses:
        clauses = ["one K only: nothing to compare"]
    sheet = run_sheet(
        study.best_rate_runs("negatives"), ["train/in_batch_loss", "train/extra_loss", "train/loss"], _KNOBS
    )
    view = View(sentence(*clauses), panels=tuple(panels))
    how = "The pool of the second channel grows with K, so its loss rises by itself and ranks nothing across K."
    return Exhibit("channels", "Training-loss channels against K", (view,), sheet, how)


def _metrics(study: Study) -> list[str]:
    return [m for m in study.fitted_metrics("negatives", "num_negatives") if m.startswith("catalogue/")]


def _gains(rows: list[RunRow], metric: str) -> list[float]:
    first = rows[0].metrics[metric]
    sign = -1 if direction_of(metric) == "min" else 1
    return [100 * sign * (row.metrics[metric] - first) / (abs(first) or 1.0) for row in rows]
