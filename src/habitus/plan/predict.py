"""What the planned run should measure: the laws of the metric's height, with an interval for one more run."""

import math
from collections.abc import Sequence

from scipy import stats

from habitus.fit import Law, direction_of, predict_saturating, saturating
from habitus.plan.knobs import Laws, stage1_metrics
from habitus.plan.result import Prediction


def predictions(C: float, C2: float, metric: str, sources: Sequence[Laws]) -> tuple[Prediction, ...]:
    """After stage 1 (the metric, or its twin, and the loss) and after stage 2, as far as the laws say."""
    found: list[Prediction] = []
    for laws in sources[:1]:  # heights belong to one dataset: the published ones say nothing about another
        wanted = [metric, *stage1_metrics(metric)] + (["train/loss"] if laws.source == "published" else [])
        for name in dict.fromkeys(wanted):
            law = next((e.law for e in laws.entries("loss_law", [name]) if e.law.values), None)
            if law is not None:
                value, low, high = _one_more_run(law, C)
                how = f"L*(C) of {name} over {law.residuals.n} budgets, status {law.status.replace('_', ' ')}"
                found.append(_prediction(name, 1, value, low, high, laws, how))
        after = _stage2(C2, metric, laws) if C2 else None
        if after is not None:
            found.append(after)
    return tuple(found)


def _stage2(C2: float, metric: str, laws: Laws) -> Prediction | None:
    """The best value over K per budget, as a law of stage 2's budget; with too few budgets, the largest one's."""
    if not metric.startswith("catalogue/"):
        return None
    sign = 1 if direction_of(metric) == "min" else -1
    best: dict[float, float] = {}
    for run in laws.file.runs:
        if run.axis == "negatives" and run.chosen and metric in run.metrics:
            value = run.metrics[metric]
            if run.budget not in best or sign * value < sign * best[run.budget]:
                best[run.budget] = value
    if not best:
        return None
    law = saturating(list(best), list(best.values()), direction=direction_of(metric))
    if law.values:
        value, low, high = _one_more_run(law, C2)
        how = (
            f"best over K at {len(best)} budgets, as a law of stage 2's own budget; its parents had that budget too, "
            "where the plan's stage 1 has more"
        )
        return _prediction(metric, 2, value, low, high, laws, how)
    largest = max(best)
    how = f"best over K at {largest:.3g}; {'; '.join(law.warnings)}"
    return _prediction(metric, 2, best[largest], -math.inf, math.inf, laws, how)


def _one_more_run(law: Law, C: float) -> tuple[float, float, float]:
    """The curve's interval, widened by the scatter about it: a run is compared with it, not another curve."""
    value, low, high = predict_saturating(law, C)
    residuals = law.residuals
    if residuals.rmse is None or residuals.dof < 1:
        return value, low, high
    scatter = float(stats.t.ppf(0.975, residuals.dof)) * residuals.rmse * math.sqrt(residuals.n / residuals.dof)
    return value, value - math.hypot(value - low, scatter), value + math.hypot(high - value, scatter)


def _prediction(metric: str, stage: int, value: float, low: float, high: float, laws: Laws, how: str) -> Prediction:
    return Prediction(
        metric=metric,
        stage=1 if stage == 1 else 2,
        value=value,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        source=laws.source,
        how=how,
    )
