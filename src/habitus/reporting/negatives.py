"""Extra negatives in stage 2: loss against ranking, and what the training loss says. Its curves are in `valleys.py`."""

from habitus.reporting.figure import Exhibit, Mark, Panel, PlotAxis, View
from habitus.reporting.format import format_number, join_words, power_of_ten, sentence, significant
from habitus.reporting.runs import (
    best_row,
    joined_runs,
    make_views,
    run_line,
    run_points,
    run_sheet,
    values_of_runs,
)
from habitus.reporting.study import Study
from habitus.reporting.valleys import NEGATIVES, axis_of
from habitus.store import RunRow, direction_of


def loss_and_recall(study: Study) -> Exhibit | None:
    """Whether the loss and a ranking metric prefer the same K: both as gains over the smallest K, better is up."""
    metrics = NEGATIVES.metrics(study)
    ranking = [m for m in metrics if direction_of(m) == "max"]
    if "catalogue/loss" not in metrics or not ranking:
        return None
    axis = axis_of(study, NEGATIVES)

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
                xs, gains = values_of_runs(rows, "num_negatives"), _gains(rows, name)
                marks += [
                    run_line(xs, gains, colour, name.removeprefix("catalogue/")),
                    run_points(study, rows, xs, gains, name, colour=colour),
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
    sheet = run_sheet(study.best_rate_runs("negatives"), metrics, NEGATIVES.knobs)
    how = "Both lines are scaled so that up is better: they part where loss and ranking metric prefer different K."
    return Exhibit("loss-recall", "Loss and ranking against K", views, sheet, how) if views else None


def channels(study: Study) -> Exhibit | None:
    """Both training channels against K, and their mean, which is what training minimises."""
    axis = axis_of(study, NEGATIVES)
    panels, clauses = [], []
    top = max((row.budget for row in study.best_rate_runs("negatives", needs=["num_negatives"])), default=0.0)
    for name, title in _CHANNELS.items():
        marks: list[Mark] = []
        for budget in study.budgets:
            rows = study.best_rate_runs("negatives", budget, ["num_negatives", name])
            rows.sort(key=lambda row: row.knobs["num_negatives"])
            if not rows:
                continue
            xs, ys = values_of_runs(rows, "num_negatives"), values_of_runs(rows, name)
            marks += joined_runs(study, rows, "num_negatives", name)
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
    sheet = run_sheet(study.best_rate_runs("negatives"), list(_CHANNELS), NEGATIVES.knobs)
    view = View(sentence(*clauses), panels=tuple(panels))
    how = (
        "The pool of the second channel grows with K, so its loss, and with it the mean, rises by itself and ranks "
        "nothing across K. With K = 0 there is one channel, which is the mean."
    )
    return Exhibit("channels", "Training-loss channels against K", (view,), sheet, how)


_CHANNELS = {
    "train/in_batch_loss": "in-batch channel",
    "train/extra_loss": "channel with extras",
    "train/loss": "mean of both, which is minimised",
}


def _gains(rows: list[RunRow], metric: str) -> list[float]:
    first = rows[0].metrics[metric]
    sign = -1 if direction_of(metric) == "min" else 1
    return [100 * sign * (row.metrics[metric] - first) / (abs(first) or 1.0) for row in rows]
