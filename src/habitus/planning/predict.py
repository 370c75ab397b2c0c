"""What the planned run should measure: at its own size and data, by laws that are identified, for one more run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from habitus.errors import FitError
from habitus.laws import (
    RealisedCost,
    RecipeLaws,
    RunValue,
    predict_recipe,
    predict_saturating,
    realised_cost,
    why_untold,
)
from habitus.planning.facts import ParentMetrics, StageTwoKey
from habitus.planning.foresight import allowance, error_of_gain, foreseen_by, widened
from habitus.planning.knobs import study_batch
from habitus.planning.measured import ALIKE, SIZED_AXES, SMALLER, better_for_less, comparable_runs
from habitus.planning.ranking_link import follows_loss
from habitus.planning.sources import RECIPE_SURFACE, SourcedLaws, stage1_metrics
from habitus.sizing import Cell
from habitus.store import STUDY_RECIPE, Law, LawEntry, Prediction, RunRow, direction_of

_READINGS = {
    "loss_law": "L*(C) and its valley of {metric} at the planned N and D",
    "surface": "L(N, D) of {metric} at the planned N and D",
    STUDY_RECIPE: "one law of {metric} over size, share, data, batch and rate, at the planned recipe",
    RECIPE_SURFACE: "one law of {metric} over size, share, data, batch and rate, at the planned recipe",
}
_WHOLE_RECIPE = (RECIPE_SURFACE, STUDY_RECIPE)


_SAME_BATCH = math.log(1.5)


@dataclass(frozen=True)
class PlannedRun:
    """What a prediction depends on: stage 1's compute, size and data, and the slots of one pass over the log.

    Without its parts, `embedder_params`, `batch_sequences` and `rate_at_512`, no law over the whole recipe is asked.
    A batch is counted in windows of `seq_len` events, which are those of the runs behind the laws.
    """

    flops: float
    params: float
    slots: float
    one_pass: float | None = None
    embedder_params: float = 0.0
    batch_sequences: float = 0.0
    seq_len: float = 0.0
    rate_at_512: float = 0.0

    @classmethod
    def of(
        cls, flops: float, cell: Cell, rate: float, one_pass: float | None, batch_scale: float = 1.0
    ) -> "PlannedRun":
        """A cell at a learning rate, with so many windows for each that the laws mean."""
        batch = cell.batch_sequences / batch_scale
        return cls(
            flops,
            cell.params,
            cell.slots_seen,
            one_pass,
            cell.embedder_params,
            batch,
            cell.seq_len * batch_scale,
            rate / math.sqrt(batch / 512),
        )

    def knobs(self, slots: float) -> dict[str, list[float]]:
        """The columns of the law of a recipe, for a run of as many slots."""
        return {
            "embedder_params": [self.embedder_params],
            "contextualizer_params": [self.params - self.embedder_params],
            "slots_seen": [slots],
            "steps": [slots / (self.batch_sequences * self.seq_len)],
            "batch_sequences": [self.batch_sequences],
            "rate_at_512": [self.rate_at_512],
        }


def predict_metrics(
    run: PlannedRun,
    C2: float,
    metric: str,
    sources: Sequence[SourcedLaws],
    parents: Mapping[StageTwoKey, ParentMetrics],
) -> tuple[tuple[Prediction, ...], list[str]]:
    """After stage 1 (the metric, or its twin, and the loss) and after stage 2; and why there is no more."""
    laws = sources[0]  # heights belong to one dataset: the published ones say nothing about another
    if laws.source == "published":
        return tuple(_published(run.flops, metric, laws)), []
    after_stage1: list[Prediction] = []
    why_not = []
    for name in dict.fromkeys([metric, *stage1_metrics(metric)]):
        prediction = _stage1_or_by_loss(run, name, laws)
        if isinstance(prediction, Prediction):
            after_stage1.append(prediction)
        else:
            why_not.append(f"{name} is not predicted: {prediction}")
    first = next((p for p in after_stage1 if p.metric == metric), None)
    if not C2 or not metric.startswith("catalogue/") or first is None:
        return tuple(after_stage1), why_not
    gains = _stage2_gains(metric, laws, parents)
    batches = sorted({parent.batch_sequences for parent in parents.values() if parent.batch_sequences})
    unknown = ""
    if len(gains) < 2:
        unknown = f"at {'one budget, which gives it no interval' if gains else 'no budget'}"
    elif batches and not any(_is_same_batch(run.batch_sequences, batch) for batch in batches):
        of = " and ".join(f"{batch:,}" for batch in batches)
        unknown = f"on parents of {of} windows per step, and the plan's has {run.batch_sequences:g}"
    if unknown:
        told = "what stage 2 adds to its parent is measured"
        return tuple(after_stage1), [*why_not, f"{metric} after stage 2 is not predicted: {told} {unknown}"]
    return (*after_stage1, _stage2(first, C2 / run.flops, gains, laws)), why_not


def _published(C: float, metric: str, laws: SourcedLaws) -> list[Prediction]:
    """The heights of the published laws, for what they are worth on another dataset."""
    predictions = []
    for name in dict.fromkeys([metric, *stage1_metrics(metric), "train/loss"]):
        law = next((e.law for e in laws.entries("loss_law", [name]) if e.law.values), None)
        if law is not None:
            value, low, high = _one_more_run(law, C)
            how = f"L*(C) of {name} over {law.residuals.n} budgets, status {law.status.replace('_', ' ')}"
            predictions.append(_prediction(name, 1, value, low, high, laws, how))
    return predictions


def _stage1_or_by_loss(run: PlannedRun, metric: str, laws: SourcedLaws) -> Prediction | str:
    """By a law of its own; a ranking metric without one as it follows the loss of its regime."""
    prediction = _stage1(run, metric, laws)
    loss_name = f"{metric.partition('/')[0]}/loss"
    if isinstance(prediction, Prediction) or direction_of(metric) == "min" or not run.batch_sequences:
        return prediction
    loss = _stage1(run, loss_name, laws)
    if isinstance(loss, str):
        return prediction
    linked = follows_loss(laws.file.runs, metric, loss, run.batch_sequences, run.rate_at_512, run.flops)
    if isinstance(linked, Prediction) and (
        why := better_for_less(metric, linked.value, _comparable_flops(run, laws), laws.file.runs)
    ):
        return why
    return linked if isinstance(linked, Prediction) else f"{prediction}, and {linked}"


def _stage1(run: PlannedRun, metric: str, laws: SourcedLaws) -> Prediction | str:
    """The metric at the planned size and data; else why there is no prediction."""
    readings = _readings(run, metric, laws)
    rollouts = {name: foreseen_by(laws.file.rollouts, name, metric) for name in readings}
    errors = {name: error_of_gain(rollouts[name]) for name in readings}
    for name in _WHOLE_RECIPE:
        if (missed := errors.get(name, 0.0)) is None or missed >= 1:
            # A form this free counts only where it foresaw a budget better than the budget before does.
            del readings[name]
    if not readings:
        return _why_unread(run, metric, laws)
    # The reading whose roll-outs missed less; the first where there were none.
    reading = min(readings, key=lambda name: math.inf if errors[name] is None else errors[name] or 0.0)
    error, reached = errors[reading], _best_measured(metric, laws)
    share, allowed = allowance(rollouts[reading], run.flops / reached[0] if reached is not None else 1.0)

    def told(slots: float) -> RunValue:
        value, low, high = readings[reading](slots)
        if reached is None or run.flops <= reached[0]:
            return RunValue(value, low, high)
        # What the same estimator missed before, of the gain that it promises now.
        return RunValue(value, *widened(value, low, high, 2 * share * abs(value - reached[1])))

    value, low, high = told(run.slots)
    how = _READINGS[reading].format(metric=metric)
    if reached is not None and run.flops > reached[0]:
        foresaw = "no roll-out judged it" if error is None else f"its roll-outs missed {error:.0%} of the gain"
        how += f"; {foresaw}, and {allowed}"
    if run.one_pass is not None and run.slots > run.one_pass:
        once = told(run.one_pass)
        low, high = min(low, once.low), max(high, once.high)
        how += f"; {run.slots / run.one_pass:.1f} passes, so the interval reaches to what one pass would give"
    if why := better_for_less(metric, value, _comparable_flops(run, laws), laws.file.runs):
        return why
    # One size with the plan's batch moves no law of another: where it is better than all that is forecast, none holds.
    best = low if direction_of(metric) == "min" else high
    if why := better_for_less(metric, best, run.flops, _alike(run, laws), ALIKE, "the best end of its interval"):
        return why
    return _prediction(metric, 1, value, low, high, laws, how)


def _readings(run: PlannedRun, metric: str, laws: SourcedLaws) -> dict[str, Callable[[float], RunValue]]:
    """The laws that are identified, each as the value of the planned run with so many slots."""
    readings: dict[str, Callable[[float], RunValue]] = {}
    fitted = recipe_laws(run, metric, laws) if _has_batch_of_runs(run, laws) else None
    for name in fitted.identified if fitted is not None else ():
        assert fitted is not None
        readings[name] = partial(fitted.predict, name, run.params)
    for name in _WHOLE_RECIPE:
        law = next((e.law for e in laws.entries(name, [metric]) if e.law.ok), None)
        if law is not None and run.batch_sequences and not why_untold(law, run.knobs(run.slots)):
            readings[name] = partial(_by_recipe, law, run)
    return readings


def _has_batch_of_runs(run: PlannedRun, laws: SourcedLaws) -> bool:
    """Whether the plan has the batch of the runs whose sizes were compared: L*(C) and L(N, D) know no other."""
    B = study_batch(run.flops, laws.file)
    if not run.batch_sequences or B.source == "default":
        return True
    return _is_same_batch(run.batch_sequences, B.value)


def _is_same_batch(one: float, other: float) -> bool:
    """Whether laws of one hold for the other."""
    return not one or abs(math.log(one / other)) < _SAME_BATCH


def _by_recipe(law: Law, run: PlannedRun, slots: float) -> RunValue:
    return RunValue(*(float(column[0]) for column in predict_recipe(law, run.knobs(slots))))


def _why_unread(run: PlannedRun, metric: str, laws: SourcedLaws) -> str:
    whole = next((e.law for name in _WHOLE_RECIPE for e in laws.entries(name, [metric]) if e.law.values), None)
    height = next((e.law for e in laws.entries("loss_law", [metric])), None)
    if height is None:
        return "no law of its height" if whole is None else f"the law over the whole recipe {_doubt(run, whole)}"
    why = f"neither L*(C) ({height.status.replace('_', ' ')}) nor a surface of it is identified"
    if not _has_batch_of_runs(run, laws):
        why = f"L*(C) and its surface are of runs with another batch than the plan's {run.batch_sequences:g}"
    return why if whole is None else f"{why}, and the law over the whole recipe {_doubt(run, whole)}"


def _doubt(run: PlannedRun, whole: Law) -> str:
    """Why a law over the whole recipe was not asked."""
    if not whole.ok:
        return f"is refused ({whole.status})"
    untold = why_untold(whole, run.knobs(run.slots)) if run.batch_sequences else ""
    return untold or "foresaw no budget better than the one before"


def recipe_laws(run: PlannedRun, metric: str, laws: SourcedLaws) -> RecipeLaws | None:
    """The laws of the metric that say what a run of some size and data measures; None where it has none."""
    heights, sizes = laws.entries("loss_law", [metric]), laws.entries("size_law", [metric])
    if not heights or not sizes:
        return None
    optima: list[LawEntry] = laws.entries("size_optimum", [metric])
    surfaces = laws.entries("surface", [metric])
    return RecipeLaws(
        direction_of(metric),
        heights[0].law,
        sizes[0].law,
        tuple(entry.law for entry in optima),
        _cost(run, laws),
        surfaces[0].law if surfaces else None,
    )


def _cost(run: PlannedRun, laws: SourcedLaws) -> RealisedCost:
    """What the study's runs paid for N and D; the plan's own price where they do not say."""
    runs = [r for r in laws.file.runs if r.axis in SIZED_AXES and r.chosen and {"params", "slots_seen"} <= set(r.knobs)]
    try:
        return realised_cost(
            [r.knobs["params"] for r in runs], [r.knobs["slots_seen"] for r in runs], [r.budget for r in runs]
        )
    except FitError:
        return RealisedCost(run.flops / (run.params * run.slots), 1.0, 1.0)


def _comparable_flops(run: PlannedRun, laws: SourcedLaws) -> float:
    """What the study's runs would have paid for the planned size and data, at most the plan's own budget.

    A plan that pays more for its scores or its texts than they did has fewer slots than runs of its budget.
    """
    return min(run.flops, _cost(run, laws).flops(run.params, run.slots))


def _alike(run: PlannedRun, laws: SourcedLaws) -> list[RunRow]:
    """Runs of the plan's own budget and batch, of axes whose sizes were compared; none if they paid for less data."""
    if _comparable_flops(run, laws) < SMALLER * run.flops:
        return []
    known = [r for r in comparable_runs(laws.file.runs) if r.axis in SIZED_AXES and "batch_sequences" in r.knobs]
    near = [r for r in known if 1 / ALIKE < r.budget / run.flops < ALIKE]
    return [r for r in near if _is_same_batch(run.batch_sequences, r.knobs["batch_sequences"])]


def _best_measured(metric: str, laws: SourcedLaws) -> tuple[float, float] | None:
    """The largest budget whose sizes were compared, and the best run there."""
    runs = [r for r in laws.file.runs if r.axis in SIZED_AXES and r.chosen and metric in r.metrics]
    if not runs:
        return None
    top = max(r.budget for r in runs)
    values = [r.metrics[metric] for r in runs if r.budget == top]
    return top, min(values) if direction_of(metric) == "min" else max(values)


def _stage2_gains(
    metric: str, laws: SourcedLaws, parents: Mapping[StageTwoKey, ParentMetrics]
) -> dict[float, tuple[float, float]]:
    """By budget: what the K best by the mean of its seeds added to its parent's metric, and stage 2's compute over its
    parent's."""
    sign = 1 if direction_of(metric) == "min" else -1
    cells: dict[tuple[float, float, float], list[tuple[float, float, float]]] = {}  # by budget, K and rate
    for run in laws.file.runs:
        if run.axis != "negatives" or not run.chosen or metric not in run.metrics:
            continue
        num_negatives = run.knobs.get("num_negatives", 0.0)
        parent = parents.get((run.budget, num_negatives, run.learning_rate, run.seed))
        if parent is None or metric not in parent.metrics:
            continue
        value = run.metrics[metric]
        gained = value, value - parent.metrics[metric], run.budget / parent.budget
        cells.setdefault((run.budget, num_negatives, run.learning_rate), []).append(gained)
    means = {cell: np.mean(seeds, axis=0) for cell, seeds in cells.items()}
    best = {}
    for budget in sorted({budget for budget, _, _ in means}):
        _, gain, ratio = min(
            (mean for cell, mean in means.items() if cell[0] == budget), key=lambda mean: sign * mean[0]
        )
        best[budget] = float(gain), float(ratio)
    return best


def _stage2(
    first: Prediction, ratio: float, gains: Mapping[float, tuple[float, float]], laws: SourcedLaws
) -> Prediction:
    """Stage 1's prediction and the mean gain; both errors together. One more gain has Student's t about the mean.

    A stage 2 with less compute than those measured may add less: its interval reaches down to no gain at all.
    """
    added = np.array([gain for gain, _ in gains.values()])
    ratios = [r for _, r in gains.values()]
    n, mean = len(added), float(added.mean())
    half = float(stats.t.ppf(0.975, n - 1) * added.std(ddof=1) * math.sqrt(1 + 1 / n))
    less = ratio < 0.99 * min(ratios)
    gain_low, gain_high = (min(mean - half, 0.0), max(mean + half, 0.0)) if less else (mean - half, mean + half)
    value = first.value + mean
    below = math.inf if first.low is None else math.hypot(first.value - first.low, mean - gain_low)
    above = math.inf if first.high is None else math.hypot(first.high - first.value, gain_high - mean)
    compute = " to ".join(dict.fromkeys(f"{r:.2g}" for r in (min(ratios), max(ratios))))
    how = (
        f"stage 1's prediction and what the best K added to its parent at {n} budgets, {added.min():+.3g} to "
        f"{added.max():+.3g}; stage 2 had {compute} times its parent's compute there, {ratio:.2g} times here"
    )
    return _prediction(first.metric, 2, value, value - below, value + above, laws, how)


def _one_more_run(law: Law, C: float) -> tuple[float, float, float]:
    """The curve's interval, widened by the scatter about it: a run is compared with it, not another curve."""
    value, low, high = predict_saturating(law, C)
    residuals = law.residuals
    if residuals.rmse is None or residuals.dof < 1:
        return value, low, high
    scatter = float(stats.t.ppf(0.975, residuals.dof)) * residuals.rmse * math.sqrt(residuals.n / residuals.dof)
    return value, value - math.hypot(value - low, scatter), value + math.hypot(high - value, scatter)


def _prediction(
    metric: str, stage: int, value: float, low: float, high: float, laws: SourcedLaws, how: str
) -> Prediction:
    return Prediction(
        metric=metric,
        stage=1 if stage == 1 else 2,
        value=value,
        low=max(low, 0.0) if math.isfinite(low) else None,  # no metric is below zero
        high=high if math.isfinite(high) else None,
        source=laws.source,
        how=how,
    )
