"""What the laws would have said earlier, and how often their intervals held values that they had not seen."""

from typing import Any

from habitus.reporting.figure import Exhibit, Mark, Panel, PlotAxis, Points, Rule, Sheet, Table, View
from habitus.reporting.format import count, percent, power_of_ten, sentence, significant, typeset_minus
from habitus.reporting.runs import make_views
from habitus.reporting.study import Study
from habitus.reporting.valleys import compute_axis
from habitus.store import STUDY_RECIPE, Forecast, NamedRollout

_VERDICTS = {True: "yes", False: "no", None: "–"}
_LETTERS = {
    "size_law": "N*",
    "loss_law": "L*",
    "surface": "L(N, D)",
    "recipe_surface": "the recipe's law",
    STUDY_RECIPE: "the recipe's law",
}


def rollout_figure(study: Study) -> Exhibit | None:
    """What each law fitted to the lowest k budgets said of the later ones."""
    raw: list[tuple[Any, ...]] = []
    metrics = [m for m in study.metrics if any(r.metric == m and r.rollout.forecasts for r in study.laws.rollouts)]

    def view(metric: str) -> View | None:
        panels, clauses = [], []
        for item in (r for r in study.laws.rollouts if r.metric == metric and r.rollout.forecasts):
            letter = _LETTERS.get(item.name, item.name)
            marks = _forecast_marks(item, letter)
            axis = PlotAxis("forecast / observed")
            panels.append(Panel(f"{letter}: forecast / observed", compute_axis(study), axis, marks))
            raw.extend((item.name, metric, "rollout", *_numbers(f)) for f in item.rollout.forecasts)
            clauses.append(_describe_last_forecast(item, letter, metric))
        return View(sentence(*clauses), metric, tuple(panels)) if panels else None

    views = make_views(metrics, view)
    header = ("law", "metric", "kind", *_COLUMNS)
    sheet = Sheet(header, tuple(raw))
    how = (
        "Each colour is a law that saw only the budgets named; 1 is a perfect forecast, bars are its own 95% interval."
    )
    return Exhibit("rollout", "Roll-out: what the laws would have said earlier", views, sheet, how) if views else None


def _forecast_marks(item: NamedRollout, letter: str) -> tuple[Mark, ...]:
    """A colour per number of budgets fitted, from three on; their points stand side by side."""
    marks: list[Mark] = [Rule(1.0, "y", "soft", "observed")]
    for k in sorted({len(f.fitted_budgets) for f in item.rollout.forecasts}):
        forecasts = [f for f in item.rollout.forecasts if len(f.fitted_budgets) == k]
        marks.append(
            Points(
                [f.budget * 1.07 ** (k - 3) for f in forecasts],
                [f.ratio for f in forecasts],
                f"s{(k - 3) % 8}",
                [_forecast_tip(f, letter) for f in forecasts],
                [(f.low or 0) / f.observed for f in forecasts],
                [_over(f.high, f.observed) for f in forecasts],
                large=True,
                label=f"up to {power_of_ten(forecasts[0].fitted_budgets[-1])}",
            )
        )
    return tuple(marks)


_COLUMNS = (
    "fitted_up_to", "flops_budget", "predicted", "low95", "high95", "observed", "ratio", "error_of_gain",
    "error_of_gain_log_line",
)  # fmt: skip


def _numbers(f: Forecast) -> tuple[float | None, ...]:
    by_line = None if f.log_line is None else f.error_of_gain(f.log_line)
    return (f.fitted_budgets[-1], f.budget, f.predicted, f.low, f.high, f.observed, f.ratio, f.error_of_gain(), by_line)


def rollout_table(study: Study) -> Exhibit | None:
    rows, raw = [], []
    for item in study.laws.rollouts:
        kind = "count" if item.name == "size_law" else "plain"
        for f in item.rollout.forecasts:
            form = count if kind == "count" else significant
            low, high = ("open" if end is None else form(end) for end in (f.low, f.high))
            rows.append(
                (
                    _LETTERS.get(item.name, item.name), item.metric, power_of_ten(f.fitted_budgets[-1]),
                    power_of_ten(f.budget), form(f.predicted), f"[{low}, {high}]", form(f.observed),
                    f"{f.ratio:.2f}×" if item.name == "size_law" else _signed(f.miss),
                    "–" if f.error_of_gain() is None else _signed(f.error_of_gain() or 0.0),
                    "–" if f.log_line is None else _signed(f.error_of_gain(f.log_line) or 0.0), _VERDICTS[_inside(f)],
                )
            )  # fmt: skip
            raw.append((item.name, item.metric, *_numbers(f)))
    if not rows:
        return None
    last = [
        _describe_last_forecast(r, _LETTERS.get(r.name, r.name), r.metric)
        for r in study.laws.rollouts
        if r.metric == study.metric and r.rollout.forecasts
    ]
    header = ("law", "metric", "fitted up to", "budget", "forecast", "95%", "observed", "miss", "of the gain",
              "log line's", "inside")  # fmt: skip
    sheet = Sheet(("law", "metric", *_COLUMNS), tuple(raw))
    paper = (
        "the paper's own training losses up to 10¹⁸ miss its 10¹⁹ by +7.6% although their R² is .999; its N* by 0.64×"
    )
    view = View(sentence(*last, paper), table=Table(header, tuple(rows)))
    return Exhibit("rollout-table", "Roll-out table", (view,), sheet)


def calibration(study: Study) -> Exhibit | None:
    """How many observed values lay inside the 95% intervals of forecasts that had not seen them.

    Forecasts without an interval are not judged.
    """
    rows, raw, num_inside, num_judged = [], [], 0, 0
    for item in study.laws.rollouts:
        for kind, rollout in (("roll-out", item.rollout), ("leave one out", item.leave_one_out)):
            n = len(rollout.forecasts)
            if not n:
                continue
            verdicts = [_inside(f) for f in rollout.forecasts]
            inside, judged = verdicts.count(True), n - verdicts.count(None)
            misses = [abs(f.miss) for f in rollout.forecasts]
            rows.append(
                (
                    _LETTERS.get(item.name, item.name),
                    item.metric,
                    kind,
                    f"{inside} of {judged}" if judged else "no interval",
                    percent(sum(misses) / n),
                    percent(max(misses)),
                )
            )
            raw.append((item.name, item.metric, kind, n, judged, inside, sum(misses) / n, max(misses)))
            num_inside, num_judged = num_inside + inside, num_judged + judged
    if not rows:
        return None
    reading = "no forecast of this store has an interval"
    if num_judged:
        share = f"{100 * num_inside / num_judged:.0f}%"
        reading = f"{num_inside} of {num_judged} values that a law had not seen lie inside its 95% interval ({share})"
    notes = (
        "Intervals of L* are for one more run, those of N* for the curve, and a store's forecasts share their points: "
        "read the share as a warning light. docs/laws.md says where simulated coverage of each law is kept.",
    )
    header = ("law", "metric", "kind", "inside 95%", "mean miss", "largest miss")
    sheet = Sheet(("law", "metric", "kind", "n", "with_interval", "inside", "mean_miss", "largest_miss"), tuple(raw))
    return Exhibit(
        "calibration",
        "Calibration on this store",
        (View(sentence(reading), table=Table(header, tuple(rows), notes)),),
        sheet,
    )


def _inside(f: Forecast) -> bool | None:
    """Whether the interval holds what was observed; None where it has no ends, and would hold anything."""
    if f.low is None and f.high is None:
        return None
    return (f.low is None or f.observed >= f.low) and (f.high is None or f.observed <= f.high)


def _over(high: float | None, observed: float) -> float:
    return float("inf") if high is None else high / observed


def _forecast_tip(f: Forecast, letter: str) -> str:
    return (
        f"{letter} at {power_of_ten(f.budget)} from {len(f.fitted_budgets)} budgets up to "
        f"{power_of_ten(f.fitted_budgets[-1])}: "
        f"forecast {significant(f.predicted)}, observed {significant(f.observed)}, ratio {f.ratio:.3f}"
    )


def _describe_last_forecast(item: NamedRollout, letter: str, metric: str) -> str:
    """The forecast of the largest budget from all the others."""
    top = max(f.budget for f in item.rollout.forecasts)
    f = max((f for f in item.rollout.forecasts if f.budget == top), key=lambda f: len(f.fitted_budgets))
    miss = f"{f.ratio:.2f} times the observed value" if item.name == "size_law" else f"a miss of {_signed(f.miss)}"
    quality = f" (its own R² was {f.r2:.3f})" if f.r2 is not None else ""
    where = {True: "inside its 95% interval", False: "outside its 95% interval", None: "without an interval"}
    return (
        f"{letter} of {metric} fitted up to {power_of_ten(f.fitted_budgets[-1])} forecasts {power_of_ten(top)} "
        f"with {miss}, {where[_inside(f)]}{quality}"
    )


def _signed(miss: float) -> str:
    return typeset_minus(f"{round(100 * miss, 1) + 0.0:+.1f}%")  # + 0.0: no sign of minus before a zero
