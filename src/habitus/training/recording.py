"""The Record of a run, put together from what was counted and measured, and published once."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from habitus.cards import CardFacts, write_run_card
from habitus.data import Dataset, data_facts
from habitus.errors import ConfigError, RunError
from habitus.evaluation import Evaluation
from habitus.files import write_once
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Metric, Record, Seconds, TrainLosses, TrajectoryPoint
from habitus.sizing import (
    Inputs,
    Workload,
    breakdown,
    cell_of_recipe,
    executed_step_flops,
    item_cache_flops,
    tokens_per_item,
)
from habitus.store import QUERY_SECONDS, SEAL_FILE, Seal
from habitus.training.batches import WindowOrder
from habitus.training.environment import hardware, memory, softmax_backend, versions
from habitus.training.options import ParentRun, TrainOptions
from habitus.training.step import Work


@dataclass
class TrainingOutcome:
    """What a Record says of a run that does not follow from recipe and dataset."""

    steps: int
    work: Work
    tail: tuple[float, float | None, float] | None
    seconds: dict[str, float]
    trajectory: list[TrajectoryPoint] = field(default_factory=list)
    evaluation: Evaluation | None = None
    problem: str | None = None
    built_cache: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


def make_record(
    recipe: Recipe,
    dataset: Dataset,
    parent: ParentRun | None,
    outcome: TrainingOutcome,
    options: TrainOptions,
    device: torch.device,
    world: int,
) -> Record:
    """The Record of a run that is over, well or badly."""
    inputs = Inputs.of(dataset.fields)
    parts = breakdown(recipe.model, inputs)
    cell = cell_of_recipe(recipe, inputs)
    order = WindowOrder(dataset, recipe.train.batch_sequences, recipe.train.seed)
    counts = order.totals(0, outcome.steps)
    slots = outcome.steps * recipe.train.batch_sequences * recipe.data.seq_len
    executed = executed_flops(recipe, inputs, outcome.work, slots, counts, device)
    timed = {} if outcome.evaluation is None else outcome.evaluation.seconds
    train = None
    if outcome.tail is not None:
        in_batch, extra, loss = outcome.tail
        train = TrainLosses(in_batch_loss=in_batch, extra_loss=extra, loss=loss)
    metrics: dict[str, Metric] = {}
    evaluation = None
    if outcome.evaluation is not None:
        metrics = dict(outcome.evaluation.metrics)
        evaluation = outcome.evaluation.specification[recipe.evaluate.regimes[-1]]
    seconds = Seconds(**{name: outcome.seconds.get(name, 0.0) for name in ("warmup", "train", "evaluate")})
    return Record(
        recipe=recipe,
        recipe_hash=recipe.hash(dataset.checksum),
        parent_hash=None if parent is None else parent.record.recipe_hash,
        dataset_checksum=dataset.checksum,
        status="done" if outcome.problem is None else "failed",
        reason=outcome.problem,
        params=parts.as_record(),
        embedder_share=parts.share,
        embedder_flop_share=cell.embedder_flop_share,
        flops_budget=options.flops_budget,
        flops_nominal=float(cell.flops_per_step * outcome.steps),
        flops_executed=executed,
        flops_item_cache=_cache_flops(recipe, inputs, dataset.num_items) if outcome.built_cache else None,
        steps=outcome.steps,
        slots_seen=slots,
        events_seen=counts["events"],
        queries_seen=counts["queries"],
        unique_events=order.unique_events(outcome.steps),
        unique_targets=None if dataset.target_weight is None else order.unique_targets(outcome.steps),
        epochs=outcome.steps * recipe.train.batch_sequences / order.num_windows,
        trained_until=dataset.trained_until,
        train=train,
        metrics=metrics,
        evaluation=evaluation,
        trajectory=tuple(outcome.trajectory),
        throughput=_throughput(outcome, slots, counts["events"], cell.flops_per_step, executed)
        | {name: seconds for name, seconds in timed.items() if name.startswith(QUERY_SECONDS)},
        memory=memory(device),
        hardware=hardware(device, options, world)
        | {"precision": recipe.train.precision}
        | {"softmax": softmax_backend(device, recipe.model.joint_dim, recipe.train.precision)}
        | outcome.engine,
        versions=versions(),
        seed=recipe.train.seed,
        seconds=seconds,
    )


def executed_flops(
    recipe: Recipe, inputs: Inputs, work: Work, slots: int, counts: dict[str, int], device: torch.device
) -> float:
    """FLOPs as run. All counts but the scores enter linearly, so the totals of the run stand for its steps."""
    pairs = slots * recipe.data.seq_len  # under a mask, on CPU, every slot meets every slot of its window
    linear = Workload(
        slots=slots,
        items=work.items,
        text_tokens=work.text_tokens,
        text_pairs=work.text_pairs,
        context_pairs=counts["pairs"] if device.type == "cuda" else pairs,
        queries=work.scores,
        candidates=1,
        copied_pairs=pairs,
    )
    return sum(executed_step_flops(recipe.model, inputs, linear).values())


def publish_record(record: Record, path: Path) -> None:
    """Write record.json and its seal; where one is there already, the first one wins and this is an error."""
    content = record.to_json().encode()
    if not write_once(path, content):
        raise RunError(f"{path} was written by another process meanwhile", expected="one process per run folder")
    Seal(record_sha256=hashlib.sha256(content).hexdigest(), worker="train", claims=1).write(path.with_name(SEAL_FILE))


def write_card(record: Record, dataset: Dataset, folder: Path, note: Note) -> None:
    """README.md of the run. A card that cannot be written, say on a full disk, is no reason to lose a run."""
    try:
        write_run_card(folder, record, CardFacts(data=data_facts(dataset.manifest)))
    except (OSError, ConfigError) as error:
        note(f"no card was written: {error}")


def _throughput(
    outcome: TrainingOutcome, slots: int, events: int, step_flops: int, executed: float
) -> dict[str, float]:
    """Rates over the time spent in steps, the first one (which compiles and warms up) left out."""
    spent = outcome.seconds.get("train", 0.0)
    timed = outcome.seconds.get("timed_steps", 0.0)
    if spent <= 0 or timed <= 0 or not outcome.steps:
        return {}
    share = timed / outcome.steps
    return {
        "steps_per_second": timed / spent,
        "slots_per_second": slots * share / spent,
        "events_per_second": events * share / spent,
        "nominal_flops_per_second": step_flops * timed / spent,
        "executed_flops_per_second": executed * share / spent,
    }


def _cache_flops(recipe: Recipe, inputs: Inputs, num_items: int) -> float:
    parts = breakdown(recipe.model, inputs)
    return float(
        item_cache_flops(parts.embedder_params, t=tokens_per_item(recipe.model.text_len, inputs), items=num_items)
    )
