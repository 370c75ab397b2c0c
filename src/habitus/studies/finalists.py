"""The last fifth of an envelope that ends before its log: the plan's model at what it pays, at three rates."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.planning import PlanOptions
from habitus.planning import plan as make_plan
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.store import LAWS_FILE, Plan, direction_of
from habitus.studies.progress import interruption
from habitus.sweeps import RecipeRunner

SHARE = 0.2  # of an envelope
_FACTORS = (1.0, 0.5, 2.0)  # of the plan's learning rate
_SEEDS = 2


@dataclass(frozen=True)
class RateChoice:
    """Which multiple of the plan's rate is best, and how that was found."""

    factor: float = 1.0
    how: str = ""

    def apply(self, plan: Plan) -> Plan:
        """The plan with its learning rate of stage 1 times the factor."""
        if self.factor == 1:
            return plan
        rate = plan["learning_rate"]
        train = plan.stage1.train.model_copy(
            update={"learning_rate": float(f"{self.factor * plan.stage1.train.learning_rate:.4g}")}
        )
        quantity = rate.model_copy(update={"value": train.learning_rate, "how": f"{rate.how}; {self.how}"})
        return plan.model_copy(
            update={
                "stage1": plan.stage1.model_copy(update={"train": train}),
                "quantities": {**plan.quantities, "learning_rate": quantity},
            }
        )


def choose_rate(
    runner: RecipeRunner, dataset: Dataset, metric: str, flops: float, seconds_left: float | None, out: Path, note: Note
) -> RateChoice:
    """Train the plan for a part of `flops` at several rates and seeds; the rate with the best mean on validation."""
    budget = flops / (len(_FACTORS) * _SEEDS)
    options = PlanOptions(laws=runner.path / LAWS_FILE, dataset=dataset, stage2_share=0.0)
    try:
        recipe = make_plan(budget, metric, options).stage1
    except ConfigError as refused:
        note(f"no finalists: {refused.problem}")
        return RateChoice()
    runs = [(factor, _changed(recipe, factor, seed)) for seed in range(_SEEDS) for factor in _FACTORS]
    records = runner.run("finalists", [one for _, one in runs], seconds_left)
    if any(record is None for record in records):
        raise interruption(out, "finalists", "time is up")
    sign = 1.0 if direction_of(metric) == "max" else -1.0
    values: dict[float, list[float]] = {}
    for (factor, _), record in zip(runs, records, strict=True):
        if record is not None and record.status == "done" and metric in record.metrics:
            values.setdefault(factor, []).append(record.metrics[metric].value)
    complete = {factor: fmean(found) for factor, found in values.items() if len(found) == _SEEDS}
    if not complete:
        return RateChoice()
    best = max(complete, key=lambda factor: sign * complete[factor])
    table = ", ".join(f"{value:.4f} at {factor:g}" for factor, value in sorted(complete.items()))
    how = f"times {best:g}, by finalists of {budget:.3g} FLOPs with {_SEEDS} seeds"
    note(f"finalists around the plan, {budget:.3g} FLOPs each: {metric} {table} times its learning rate")
    return RateChoice(best, how)


def _changed(recipe: Recipe, factor: float, seed: int) -> Recipe:
    rate = factor * recipe.train.learning_rate
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": rate, "seed": seed})})
