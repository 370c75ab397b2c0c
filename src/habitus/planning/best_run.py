"""The plan of a run that was measured already: its recipe, with every number from this study."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from habitus.data import Dataset
from habitus.errors import RunError
from habitus.planning.hardware import memory_of
from habitus.planning.neighbours import passes_of
from habitus.planning.regime import log_regime
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.sizing import Inputs, cell_of_recipe
from habitus.store import (
    LAWS_FILE,
    LOG_AXIS,
    Laws,
    Plan,
    Prediction,
    Quantity,
    direction_of,
    read_record,
    read_records,
)

_ENDS = 0.5  # of a budget: a best run below it says that the log has ended
_PREVIOUS = "previous"  # as train.parent: the stage-1 run that stage 2 follows
_REGULARISERS = ("dropout", "token_dropout", "field_dropout", "item_dropout", "weight_decay")


def plan_of_run(
    first: Record,
    second: Record | None,
    dataset: Dataset,
    metric: str,
    *,
    how: str,
    values: Sequence[float] = (),
    laws: str = "this study",
    warnings: Sequence[str] = (),
) -> Plan:
    """The recipes of a run, or of both of its stages; `how` says why it was chosen, `values` are of its seeds."""
    inputs = Inputs.of(dataset.fields)
    records = [first] if second is None else [first, second]
    cells = [cell_of_recipe(record.recipe, inputs, catalogue_items=dataset.num_items) for record in records]
    memory = tuple(memory_of(cell, None, 1) for cell in cells)
    flops = [float(cell.flops) for cell in cells]
    recipe, cell = first.recipe, cells[0]

    def quantity(value: float, words: str = how) -> Quantity:
        return Quantity(value=value, source="this study", how=words)

    quantities = {
        "params": quantity(cell.params),
        "embedder_share": quantity(cell.embedder_share),
        "batch_sequences": quantity(recipe.train.batch_sequences),
        "learning_rate": quantity(recipe.train.learning_rate),
        "passes": quantity(passes_of(recipe, dataset)),
        **{name: quantity(value) for name, value in _regularisation(recipe).items()},
        "slots_seen": quantity(cell.slots_seen, "steps, batch and window length"),
        "data_ratio": quantity(cell.data_ratio, "D/N as paid"),
        "steps": quantity(recipe.train.steps),
        "joint_dim": quantity(recipe.model.joint_dim),
        "width": quantity(recipe.model.width),
        "depth": quantity(recipe.model.depth),
    }
    if second is not None:
        better = "stage 2 was better on validation"
        quantities |= {
            "num_negatives": quantity(second.recipe.train.num_negatives, better),
            "stage2_steps": quantity(second.recipe.train.steps, better),
            "stage2_learning_rate": quantity(second.recipe.train.learning_rate, better),
        }
    seconds = [r.seconds.warmup + r.seconds.train + r.seconds.evaluate for r in records if r.seconds is not None]
    if seconds:
        quantities["hours"] = quantity(math.fsum(seconds) / 3600, "as this run took, beside others")
    most = max(sum(value for name, value in m.bytes.items() if name == "total") for m in memory)
    quantities["memory_gib"] = Quantity(value=most / 1024**3, source="default", how="counted by structure")
    return Plan(
        metric=metric,
        flops=sum(flops),
        stage1_flops=flops[0],
        stage2_flops=sum(flops[1:]),
        flops_item_cache=cell.flops_item_cache,
        optimizer=recipe.train.optimizer,
        laws=laws,
        dataset_checksum=dataset.checksum,
        quantities=quantities,
        predictions=tuple(_predict(records, metric, values)),
        memory=memory,
        warnings=tuple(warnings),
        stage1=recipe,
        stage2=None if second is None else _after_previous(second.recipe),
    )


def plan_best_run(
    store: Path, metric: str, dataset: Dataset, *, flops: float = math.inf, warnings: Sequence[str] = ()
) -> Plan:
    """The plan of a store's best run by the metric within a budget, with the stage that it continues."""
    runs = []
    for record in read_records(store):
        parent = None if record.parent_hash is None else read_record(store, record.parent_hash)
        whole = record.recipe.data.user_share == 1 and not record.recipe.data.include_validation
        if record.status != "done" or metric not in record.metrics or not whole:
            continue
        if record.recipe.train.stage == 2 and parent is None:
            continue
        pair = (record, None) if parent is None else (parent, record)
        if sum(one.flops_nominal or 0.0 for one in pair if one is not None) <= flops:
            runs.append((record.metrics[metric].value, pair))
    if not runs:
        raise RunError(
            f"no run of {store} measured {metric} within {flops:.3g} FLOPs",
            expected="a run that is done, or more FLOPs",
        )
    sign = 1.0 if direction_of(metric) == "max" else -1.0
    _, (first, second) = max(runs, key=lambda run: sign * run[0])
    how = f"best of {len(runs)} runs by {metric} on validation"
    return plan_of_run(first, second, dataset, metric, how=how, laws=str(store / LAWS_FILE), warnings=warnings)


def plan_within_log(store: Path, laws: Laws, metric: str, dataset: Dataset, flops: float) -> Plan | None:
    """The best run of a search on this log, where the budget outlasts the log; None where laws of one pass hold."""
    searched = [run for run in laws.runs if run.axis == LOG_AXIS and metric in run.metrics]
    swept = any(run.axis != LOG_AXIS for run in laws.runs)
    if not searched or not (store / "cells").is_dir() or (swept and log_regime(dataset, flops).kind != "data-limited"):
        return None
    plan = plan_best_run(store, metric, dataset, flops=flops)
    if plan.flops > _ENDS * flops:
        return plan
    ends = (
        f"the log ends at {plan.flops:.3g} FLOPs, {plan['passes'].value:.3g} passes, the best of the runs on it: the "
        f"rest of {flops:.3g} FLOPs would only overfit. More users would help"
    )
    return plan.model_copy(update={"warnings": (ends, *plan.warnings)})


def _predict(records: Sequence[Record], metric: str, values: Sequence[float]) -> list[Prediction]:
    """The metric after each stage; after stage 1 with Student's t for one more seed, where there were several."""
    predictions = []
    for record in records:
        measured = record.metrics.get(metric)
        if measured is None:
            continue
        low = high = None
        value, how = measured.value, "measured by this very recipe on validation"
        if record.recipe.train.stage == 1 and len(values) > 1:
            value = fmean(values)
            half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) * math.sqrt(1 + 1 / len(values))
            low, high, how = value - half, value + half, f"mean of {len(values)} seeds, 95% for one more"
        predictions.append(
            Prediction(
                metric=metric, stage=record.recipe.train.stage, value=value, low=low, high=high, source="this study",
                how=how,
            )
        )  # fmt: skip
    return predictions


def _regularisation(recipe: Recipe) -> dict[str, float]:
    """Dropout always, the others where they are on."""
    values = {name: float(getattr(recipe.train, name, 0.0) or 0.0) for name in _REGULARISERS}
    return {name: value for name, value in values.items() if value or name == "dropout"}


def _after_previous(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"parent": _PREVIOUS})})
