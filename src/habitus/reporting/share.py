"""The embedder's share of the parameters: cross-checks of the share axis. Its curves are in `valleys.py`."""

from collections.abc import Sequence

import numpy as np

from habitus.laws import two_term
from habitus.reporting.curves import two_term as two_term_curve
from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Sheet, Table, View
from habitus.reporting.format import format_number, join_words, percent, power_of_ten, sentence, significant
from habitus.reporting.runs import (
    best_row,
    better,
    joined_runs,
    make_views,
    run_line,
    run_points,
    run_sheet,
    values_of_runs,
)
from habitus.reporting.study import Study
from habitus.reporting.valleys import SHARE, SHARE_AXIS
from habitus.store import RunRow, direction_of

FLOP_SHARE = PlotAxis("embedder's share of FLOPs f", kind="percent")


def share_zoom(study: Study) -> Exhibit | None:
    """Loss only, small shares, as nats above the best of each budget."""
    metric = "batch/loss"
    marks: list[Mark] = []
    near = []
    for budget in study.budgets:
        rows = study.best_rate_runs("share", budget, ["embedder_share", metric])
        if len(rows) < 3:
            continue
        least = min(row.metrics[metric] for row in rows)
        small = [row for row in rows if row.knobs["embedder_share"] <= 0.12]
        if not small:
            continue
        above = [row.metrics[metric] - least for row in small]
        xs = values_of_runs(small, "embedder_share")
        marks += [
            run_line(xs, above, study.colour(budget), power_of_ten(budget)),
            run_points(study, small, xs, above, metric),
        ]
        inside = [a for a, s in zip(above, xs, strict=True) if 0.0195 <= s <= 0.0605]
        near += [max(inside) - min(inside)] if len(inside) > 1 else []
    if not marks:
        return None
    reading = f"within 2% to 6% the loss changes by at most {significant(max(near), 2)} nat" if near else ""
    paper = "the paper: at most 0.06 nat"
    panel = Panel(
        "batch/loss above the best of each budget", PlotAxis("embedder share s", kind="percent", low=0.0),
        PlotAxis("nats above best", low=0.0), tuple(marks),
    )  # fmt: skip
    reading = sentence(reading or "Fewer than two cells lie between 2% and 6%", paper if near else "")
    sheet = run_sheet(study.best_rate_runs("share", needs=[metric]), [metric], SHARE.knobs)
    return Exhibit("share-zoom", "Small shares, loss only", (View(reading, panels=(panel,)),), sheet)


def flop_share(study: Study) -> Exhibit | None:
    """Metrics against f, the cross-check axis."""
    metrics = study.fitted_metrics("share", "embedder_flop_share")

    def view(metric: str) -> View | None:
        marks: list[Mark] = []
        best = {}
        optima: dict[float, float] = {}
        for budget in study.budgets:
            rows = study.best_rate_runs("share", budget, ["embedder_flop_share", metric])
            if rows:
                marks += joined_runs(study, rows, "embedder_flop_share", metric)
                best[budget] = best_row(rows, metric).knobs["embedder_flop_share"]
                if metric in ("batch/loss", study.metric):
                    marks += _flop_share_fit(study, rows, metric, optima)
        if not marks:
            return None
        shares = join_words(f"{percent(f)} at {power_of_ten(b)}" for b, f in best.items())
        reading = (
            f"The best cells for {metric} spend this share of their FLOPs on the embedder and its softmax: {shares}"
        )
        fitted = join_words(f"{percent(f)} at {power_of_ten(b)}" for b, f in optima.items())
        more = f"the two-term form fitted in f (dashed) has its optimum at {fitted}" if fitted else ""
        return View(
            sentence(reading, more), metric, (Panel(better(metric), FLOP_SHARE, PlotAxis(metric), tuple(marks)),)
        )

    views = make_views(metrics, view)
    sheet = run_sheet(study.best_rate_runs("share"), metrics, SHARE.knobs)
    how = "f = (t·p_e + 3·B·L·h) / (t·p_e + p + 3·B·L·h): the same runs on the axis of compute instead of parameters."
    return Exhibit("flop-share", "Metrics against the embedder's share of FLOPs", views, sheet, how) if views else None


def _flop_share_fit(study: Study, rows: Sequence[RunRow], metric: str, optima: dict[float, float]) -> list[Mark]:
    """The two-term curve of one budget over f; its optimum goes to `optima` where it is one."""
    shares = values_of_runs(rows, "embedder_flop_share")
    if len(set(shares)) < 6:
        return []
    points = sorted(set(zip(shares, values_of_runs(rows, metric), strict=True)))  # a cell may stand in two sweeps
    law = two_term([x for x, _ in points], [y for _, y in points], direction_of(metric))
    curve = two_term_curve(law, min(shares), max(shares))
    if law.ok:
        optima[rows[0].budget] = float(law["x_opt"])
    return [Line(*curve, study.colour(rows[0].budget), dashed=True)] if curve else []


def proxy(study: Study) -> Exhibit | None:
    """N/D against share, and loss against N/D with R²: whether the share axis moves another knob by accident."""
    metric = "batch/loss"
    left: list[Mark] = []
    right: list[Mark] = []
    explained = {}
    for budget in study.budgets:
        rows = study.best_rate_runs("share", budget, ["embedder_share", "params", "slots_seen", metric])
        if len(rows) < 3:
            continue
        ratio = [row.knobs["params"] / row.knobs["slots_seen"] for row in rows]
        loss = [row.metrics[metric] for row in rows]
        label = power_of_ten(budget)
        left.append(run_points(study, rows, "embedder_share", ratio, metric, label=label))
        right.append(run_points(study, rows, ratio, loss, metric, label=label))
        if np.ptp(np.log(ratio)) > 1e-6 and np.ptp(loss) > 0:
            explained[budget] = float(np.corrcoef(np.log(ratio), loss)[0, 1] ** 2)
            slope, level = np.polyfit(np.log(ratio), loss, 1)
            ends = [min(ratio), max(ratio)]
            heights = [float(level + slope * np.log(end)) for end in ends]
            right.append(Line(ends, heights, study.colour(budget), dashed=True))
    if not left:
        return None
    ratio_axis = PlotAxis("N / D", log=True)
    panels = (
        Panel("N/D of the cells", SHARE_AXIS, ratio_axis, tuple(left)),
        Panel("batch/loss against N/D", ratio_axis, PlotAxis(metric), tuple(right)),
    )
    by_budget = join_words(f"{significant(r, 2)} at {power_of_ten(b)}" for b, r in explained.items())
    reading = (
        "N/D alone, by least squares in its logarithm (dashed), explains this share (R²) of the loss along the share "
        f"axis: {by_budget}"
    ) if by_budget else (
        "N/D is the same in all cells of a budget, so it explains nothing along the share axis"
    )  # fmt: skip
    sheet = run_sheet(study.best_rate_runs("share"), [metric], SHARE.knobs)
    return Exhibit("proxy", "Is it the share, or N/D?", (View(sentence(reading), panels=panels),), sheet)


def why_small(study: Study) -> Exhibit | None:
    """The paper's reasons for a small embedder: what its parameters cost, and how often it sees the same item."""
    metric = "batch/loss"
    needs = ["embedder_params", "contextualizer_params", "text_len", "slots_seen", "embedder_share", metric]
    rows, raw, clauses = [], [], []
    for budget in study.budgets:
        runs = study.best_rate_runs("share", budget, needs)
        least = min((run.metrics[metric] for run in runs), default=0.0)
        for run in sorted(runs, key=lambda run: run.knobs["embedder_share"]):
            effective = effective_size(run)
            of_compute = 1 - run.knobs["contextualizer_params"] / effective
            repeats = repeats_per_item(run)
            above = run.metrics[metric] - least
            passes = run.knobs.get("epochs")
            raw.append((budget, run.cell_id, run.knobs["embedder_share"], run.knobs["params"], effective, of_compute,
                        run.knobs["slots_seen"] / effective, passes, repeats, above))  # fmt: skip
            rows.append(
                (
                    power_of_ten(budget), percent(run.knobs["embedder_share"]), format_number(effective),
                    f"{effective / run.knobs['params']:.2f}", percent(of_compute),
                    significant(run.knobs["slots_seen"] / effective, 3), significant(passes, 2),
                    "–" if repeats is None else significant(repeats, 3), f"{above:.3f}",
                )
            )  # fmt: skip
            if above == 0.0:
                seen = "" if repeats is None else f", sees an item {significant(repeats, 2)} times"
                clauses.append(
                    f"at {power_of_ten(budget)} the best cell has {percent(run.knobs['embedder_share'])} of its "
                    f"parameters in the embedder and {percent(of_compute)} of N_eff{seen}"
                )
    if not rows:
        return None
    header = (
        "budget",
        "s",
        "N_eff",
        "N_eff/N",
        "embedder's part",
        "D/N_eff",
        "passes",
        "repeats per item",
        "nats above",
    )
    columns = ("flops_budget", "cell_id", "embedder_share", "params", "n_eff", "embedder_of_n_eff", "slots_over_n_eff",
               "epochs", "repeats_per_item", "nats_above_best")  # fmt: skip
    notes = (
        "N_eff = p + t·p_e: a parameter of the embedder works on every one of the t tokens of an item.",
        "Repeats are events over items of the catalogue; a popular item is seen far more often. Passes are how often "
        "the contextualizer sees a window.",
    )
    view = View(sentence(*clauses), table=Table(header, tuple(rows), notes))
    return Exhibit("why-small", "Why a small embedder: N_eff and repetition", (view,), Sheet(columns, tuple(raw)))


def effective_size(run: RunRow) -> float:
    """N_eff = p + t·p_e."""
    return run.knobs["contextualizer_params"] + run.knobs["text_len"] * run.knobs["embedder_params"]


def repeats_per_item(run: RunRow) -> float | None:
    """Events seen over the items there are; None where a run does not say how many."""
    if "catalogue_items" not in run.knobs or "events_seen" not in run.knobs:
        return None
    return run.knobs["events_seen"] / run.knobs["catalogue_items"]
