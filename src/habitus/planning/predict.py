"""What the planned run should measure: the laws of the metric's height, with an interval for one more run."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from habitus.laws import predict_saturating
from habitus.planning.facts import ParentMetrics, StageTwoKey
from habitus.planning.knobs import SourcedLaws, stage1_metrics
from habitus.store import Law, Prediction, direction_of


def predict_metrics(
    C: float, C2: float, metric: str, sources: Sequence[SourcedLaws], parents: Mapping[StageTwoKey, ParentMetrics]
) -> tuple[tuple[Prediction, ...], list[str]]:
    """After stage 1 (the metric, or its twin, and the loss) and after stage 2; and why there is no more."""
    laws = sources[0]  # heights belong to one dataset: the published ones say nothing about another
    after_stage1: list[Prediction] = []
    names = [metric, *stage1_metrics(metric)] + (["train/loss"] if laws.source == "published" else [])
    for name in dict.fromkeys(names):
        law = next((e.law for e in laws.entries("loss_law", [name]) if e.law.values), None)
        if law is not None:
            value, low, high = _one_more_run(law, C)
            how = f"L*(C) of {name} over {law.residuals.n} budgets, status {law.status.replace('_', ' ')}"
            after_stage1.append(_prediction(name, 1, value, low, high, laws, how))
    first = next((p for p in after_stage1 if p.metric == metric), None)
    if not C2 or not metric.startswith("catalogue/") or laws.source == "published" or first is None:
        return tuple(after_stage1), []
    gains = _stage2_gains(metric, laws, parents)
    if len(gains) < 2:
        measured = "one budget, which gives it no interval" if gains else "no budget"
        return tuple(after_stage1), [
            f"{metric} after stage 2 is not predicted: what stage 2 adds to its parent is measured at {measured}"
        ]
    return (*after_stage1, _stage2(first, C2 / C, gains, laws)), []


def _stage2_gains(
    metric: str, laws: SourcedLaws, parents: Mapping[StageTwoKey, ParentMetrics]
) -> dict[float, tuple[float, float]]:
    """By budget: what the best K added to its parent's metric, and stage 2's compute over its parent's."""
    sign = 1 if direction_of(metric) == "min" else -1
    best: dict[float, tuple[float, float, float]] = {}
    for run in laws.file.runs:
        if run.axis != "negatives" or not run.chosen or metric not in run.metrics:
            continue
        parent = parents.get((run.budget, run.knobs.get("num_negatives", 0.0), run.learning_rate, run.seed))
        if parent is None or metric not in parent.metrics:
            continue
        value = run.metrics[metric]
        if run.budget not in best or sign * value < sign * best[run.budget][0]:
            best[run.budget] = value, value - parent.metrics[metric], run.budget / parent.budget
    return {budget: (gain, ratio) for budget, (_, gain, ratio) in sorted(best.items())}


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
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        source=laws.source,
        how=how,
    )
