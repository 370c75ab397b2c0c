"""Forecasts from Records alone: the law of a surface's cells, its roll-outs, and plans for larger budgets, registered.

The dataset that the runs saw need not be at hand: its fields come from a small world of the same kind, held against
the parameters and FLOPs of every Record; windows, checksum and hardware are in the Records.
"""

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from habitus.errors import ConfigError, FitError
from habitus.laws.loss_link import LossLink, loss_link
from habitus.laws.recipe_cost import SlotCost, slot_cost
from habitus.laws.recipe_optimum import recipe_optimum
from habitus.laws.recipe_surface import (
    columns_of,
    predict_recipe,
    recipe_rate,
    recipe_surface,
)
from habitus.planning import register_plan
from habitus.planning.facts import DatasetProfile
from habitus.planning.hardware import hours_at, memory_of, rate_on
from habitus.planning.shape import FixedSettings, stage1_cell
from habitus.recipe import DataRecipe, EvaluateRecipe, Recipe, TrainRecipe
from habitus.record import Record
from habitus.sizing import Cell, Inputs, cell_of_recipe
from habitus.store import Extrapolation, Law, Plan, Prediction, Quantity, RegisteredPlan, direction_of, gpu_named
from habitus.sweeps import Preset, preset_dataset
from habitus.typed import content_hash

LOSS = "batch/loss"
FOLLOWING = ("catalogue/loss", "batch/recall@10", "batch/ndcg@10", "catalogue/recall@10", "catalogue/ndcg@10")
SIZES = {"": 1.0, "-half": 0.5, "-twice": 2.0}  # of the first budget's plans


def surface_records(records: Iterable[Record]) -> list[Record]:
    """Runs of one pass that a surface is fitted to: stage 1, cosine, the optimizer and start of most of them."""
    usable = [
        r for r in records
        if r.status == "done" and r.params is not None and r.flops_nominal and LOSS in r.metrics
        and (r.epochs or 0) <= 1.001
        and (r.recipe.train.stage, r.recipe.train.schedule, r.recipe.train.pool_sequences) == (1, "cosine", None)
    ]  # fmt: skip
    groups = [(r.recipe.train.optimizer, r.recipe.model.init, r.recipe.model.text_depth) for r in usable]
    most = max(set(groups), key=groups.count) if groups else None
    return [r for r, group in zip(usable, groups, strict=True) if group == most]


@dataclass(frozen=True)
class SurfaceData:
    """Runs of a surface as columns."""

    records: Sequence[Record]

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        return columns_of([_row(r) for r in self.records])

    @cached_property
    def cells(self) -> np.ndarray:
        """A number for each cell; runs that differ in their seed alone share it."""
        names = [r.recipe.model_copy(update={"train": r.recipe.train.model_copy(update={"seed": 0})}).to_json()
                 for r in self.records]  # fmt: skip
        return np.unique(names, return_inverse=True)[1]

    @property
    def budgets(self) -> np.ndarray:
        """Of each run, rounded: cells of one budget differ by a step."""
        return np.array([float(f"{r.flops_nominal:.1e}") for r in self.records])

    def metric(self, name: str) -> np.ndarray:
        return np.array([r.metrics[name].value for r in self.records])

    def law(self, name: str = LOSS) -> Law:
        return recipe_surface(self.table, self.metric(name), self.cells)

    def link(self, name: str) -> LossLink:
        """How another metric follows the loss."""
        rows = [k for k, r in enumerate(self.records) if name in r.metrics and r.metrics[name].value > 0]
        columns = (self.metric(LOSS), self.table["batch_sequences"], self.table["rate_at_512"], self.metric(name))
        return loss_link(*(column[rows] for column in columns))

    def cost(self) -> SlotCost:
        return slot_cost(self.table)

    def below(self, budget: float) -> "SurfaceData":
        return SurfaceData([r for r, b in zip(self.records, self.budgets, strict=True) if b < 0.9 * budget])

    def best(self, budget: float, name: str = LOSS) -> Record:
        sign = 1 if "loss" in name else -1
        at = [r for r, b in zip(self.records, self.budgets, strict=True) if abs(math.log(b / budget)) < 0.1]
        return min(at, key=lambda r: sign * r.metrics[name].value)


def _row(r: Record) -> dict[str, float]:
    assert r.params is not None and r.flops_nominal is not None
    train = r.recipe.train
    return {
        "embedder_params": r.params.embedder, "contextualizer_params": r.params.contextualizer,
        "slots_seen": r.slots_seen, "steps": r.steps, "batch_sequences": train.batch_sequences,
        "rate_at_512": train.learning_rate / math.sqrt(train.batch_sequences / 512), "compute": r.flops_nominal,
        "joint_dim": r.recipe.model.joint_dim, "seq_len": r.recipe.data.seq_len,
    }  # fmt: skip


def profile_of(records: Sequence[Record], preset: Preset) -> DatasetProfile:
    """The profile of the dataset that the runs saw: fields of a small world of its kind, sizes by the Records."""
    small = preset.world.model_copy(update={"num_items": 2_000, "num_users": 500})
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Inputs.of(preset_dataset(preset.model_copy(update={"world": small}), Path(scratch) / "world").fields)
    for r in records:
        cell = cell_of_recipe(r.recipe, inputs)
        assert r.params is not None
        counted = (cell.embedder_params, cell.contextualizer_params, cell.flops)
        if counted != (r.params.embedder, r.params.contextualizer, r.flops_nominal):
            raise ConfigError(f"run {r.recipe_hash[:12]} has other sizes than a world of preset {preset.name} gives it",
                              expected="Records of that preset's own world")  # fmt: skip
    first = records[0]
    windows = first.recipe.train.batch_sequences * first.steps / (first.epochs or math.nan)
    return DatasetProfile(inputs, first.recipe.data.seq_len, first.recipe.model.text_len, preset.world.num_items,
                          round(windows) * first.recipe.data.seq_len, first.dataset_checksum,
                          preset.world.num_items)  # fmt: skip


def rollout(data: SurfaceData, budget: float) -> dict[str, float]:
    """The best run of a budget, foreseen from the budgets below at its own recipe; misses as shares of the gain."""
    below, best = data.below(budget), data.best(budget)
    measured = best.metrics[LOSS].value
    value, low, high = (float(v[0]) for v in predict_recipe(below.law(), columns_of([_row(best)])))
    known = sorted(set(below.budgets))
    near, far = (below.best(c).metrics[LOSS].value for c in (known[-1], known[-2]))
    line = near + (near - far) * math.log(budget / known[-1]) / math.log(known[-1] / known[-2])
    gain = near - measured
    return {"budget": budget, "measured": measured, "predicted": value, "low": low, "high": high, "gain": gain,
            "law": (value - measured) / gain, "persistence": (near - measured) / gain,
            "log line": (line - measured) / gain}  # fmt: skip


def foresee_cells(
    below: SurfaceData, found: Sequence[tuple[Cell, Recipe]], budget: float, checksum: str, metrics: Sequence[str]
) -> dict[str, object]:
    """What laws of the runs below a budget say of cells, [value, low, high] of one more run of each by metric."""
    columns = [planned_columns(cell, recipe.train.learning_rate) for cell, recipe in found]
    table = columns_of(columns)
    rows: list[dict[str, object]] = [
        {"recipe": recipe.hash(checksum), "what": describe_cell(cell, recipe)} for cell, recipe in found
    ]
    statuses: dict[str, str] = {}
    told: dict[str, tuple[np.ndarray, ...]] = {}
    for metric in metrics:
        law = recipe_surface(below.table, below.metric(metric), below.cells, direction_of(metric))
        if not law.values:
            raise FitError(
                f"no law of {metric} below {budget:g} FLOPs: {law.warnings[0]}",
                expected="smaller budgets whose runs have a law",
                next_step="run more of their cells first",
            )
        statuses[metric], told[metric] = law.status, predict_recipe(law, table)
    for metric, values in told.items():
        for row, *value in zip(rows, *values, strict=True):
            row[metric] = [float(f"{v:.6g}") for v in value]
    foreseen: dict[str, object] = {"budget": budget, "runs": len(below.records), "status": statuses, "cells": rows}
    return {**foreseen, "hash": content_hash(foreseen)}


def planned_columns(cell: Cell, rate: float) -> dict[str, float]:
    """A cell as the law of a recipe has it."""
    return {"embedder_params": cell.embedder_params, "contextualizer_params": cell.contextualizer_params,
            "slots_seen": cell.slots_seen, "steps": cell.steps, "batch_sequences": cell.batch_sequences,
            "rate_at_512": rate / math.sqrt(cell.batch_sequences / 512)}  # fmt: skip


def describe_cell(cell: Cell, recipe: Recipe) -> str:
    train = recipe.train
    return (f"{cell.flops:.2g} FLOPs  N {cell.params}  s {cell.embedder_share:.3f}  B {train.batch_sequences}"
            f"  rate {train.learning_rate:.3g}  steps {train.steps}  seed {train.seed}")  # fmt: skip


def register_forecasts(
    records: Sequence[Record], preset: Preset, budgets: Sequence[float], out: Path, metric: str = LOSS
) -> list[tuple[Path, RegisteredPlan]]:
    """Plans of the budgets beside each other: of the first at three sizes, of the others at the best one."""
    data = SurfaceData(surface_records(records))
    profile = profile_of(data.records, preset)
    law, cost = data.law(), data.cost()
    tops = sorted(set(data.budgets))[2:]
    missed = [rollout(data, budget) for budget in tops if len(set(data.below(budget).cells)) >= 20]
    for row in missed:
        print("roll-out", {name: float(f"{value:.4g}") for name, value in row.items()})
    error = math.sqrt(float(np.mean([row["law"] ** 2 for row in missed]))) if missed else 0.5
    written = []
    for budget in budgets:
        for suffix, factor in SIZES.items() if budget == min(budgets) else (("", 1.0),):
            path = out / f"plan-{budget:.0e}{suffix}.json".replace("+", "")
            if path.exists():
                continue
            made = make_plan(data, law, cost, profile, budget, factor, error, metric)
            written.append((path, register_plan(made, path)))
    return written


def make_plan(
    data: SurfaceData, law: Law, cost: SlotCost, profile: DatasetProfile, C: float, factor: float, error: float,
    metric: str,
) -> Plan:  # fmt: skip
    """The best recipe of a budget, or one of another size beside it, and what it should measure."""
    typical = max(data.records, key=lambda r: r.flops_nominal or 0.0).recipe
    fixed = FixedSettings(profile, typical.model.text_depth, None, typical.train.optimizer, typical.train.precision)
    best = recipe_optimum(law, C, cost, profile.train_slots or math.inf)
    B = 2 ** round(math.log2(best["batch"]))
    cell = stage1_cell(C, factor * best["params"], best["share"], B, fixed)
    rate = recipe_rate(law, cell.embedder_params, cell.contextualizer_params) * math.sqrt(B / 512)
    rate = float(f"{rate:.4g}")
    recipe = planned_recipe(cell, rate, typical)
    passes = cell.slots_seen / (profile.train_slots or math.nan)
    how = f"least {LOSS} by one law over size, share, batch and rate, {law.residuals.n} runs"
    optimum = {knob: _quantity(best, name, value, how) for knob, name, value in (
        ("params", "params", cell.params), ("embedder_share", "share", cell.embedder_share),
        ("batch_sequences", "batch", B))}  # fmt: skip
    gpu = gpu_named("h200")
    return Plan(
        metric=metric, flops=C, stage1_flops=C, stage2_flops=0.0, flops_item_cache=cell.flops_item_cache,
        optimizer=fixed.optimizer, laws=f"recipe_surface of {law.residuals.n} runs",
        dataset_checksum=profile.dataset_checksum,
        quantities={**optimum,
                    "best_params": _quantity(best, "params", best["params"], how),
                    "learning_rate": Quantity(value=rate, source="this study", how=how),
                    "slots_seen": Quantity(value=cell.slots_seen, source="this study", how="what the budget pays"),
                    "passes": Quantity(value=passes, source="this study", how="over the training windows"),
                    "hours": hours_at(rate_on(gpu, 1, C), C)},
        predictions=tuple(_predictions(data, law, cell, rate, error)),
        memory=(memory_of(cell, gpu, 1),),
        extrapolation=Extrapolation(budget=C, smallest=float(data.budgets.min()), largest=float(data.budgets.max()),
                                    factor=C / float(data.budgets.max())),
        warnings=best.warnings, stage1=recipe,
    )  # fmt: skip


def _quantity(best: Law, name: str, value: float, how: str) -> Quantity:
    low, high = best.interval(name)
    low, high = min(low, value), max(high, value)
    ends = [end if math.isfinite(end) else None for end in (low, high)]
    return Quantity(value=value, low=ends[0], high=ends[1], source="this study", how=how)


def planned_recipe(cell: Cell, rate: float, typical: Recipe, warmup: float | None = None) -> Recipe:
    """The recipe of a cell, in all else like another one."""
    train = typical.train.model_copy(
        update={"batch_sequences": cell.batch_sequences, "steps": cell.steps, "learning_rate": rate, "seed": 0,
                "warmup": typical.train.warmup if warmup is None else warmup}
    )  # fmt: skip
    return Recipe(data=DataRecipe(seq_len=cell.seq_len), model=cell.model,
                  train=TrainRecipe(**train.to_values()),
                  evaluate=EvaluateRecipe(**typical.evaluate.to_values()))  # fmt: skip


def _predictions(data: SurfaceData, law: Law, cell: Cell, rate: float, error: float) -> list[Prediction]:
    """The loss by the law, with what its roll-outs missed; other metrics as they follow the loss."""
    row = planned_columns(cell, rate)
    B, rate_at_512 = cell.batch_sequences, row["rate_at_512"]
    value, low, high = (float(v[0]) for v in predict_recipe(law, columns_of([row])))
    reached = data.best(float(data.budgets.max())).metrics[LOSS].value
    miss = 2 * error * abs(reached - value)
    low, high = value - math.hypot(value - low, miss), value + math.hypot(high - value, miss)
    how = f"the law of {LOSS} at the planned recipe; its roll-outs missed {error:.0%} of the gain, held twice"
    made = [Prediction(metric=LOSS, stage=1, value=value, low=low, high=high, source="this study", how=how)]
    for name in FOLLOWING:
        link = data.link(name)
        at, se = link.at(value, B, rate_at_512)
        loss_error = (high - low) / 4
        half = 2 * math.hypot(se, float(link.coefficients[1]) * loss_error)
        made.append(Prediction(metric=name, stage=1, value=math.exp(at), low=math.exp(at - half),
                               high=math.exp(at + half), source="this study",
                               how=f"as it follows {LOSS}, the batch and the rate over {link.n} runs"))  # fmt: skip
    return made
