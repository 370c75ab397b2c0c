"""What is known before the laws are asked: the dataset's fields, and the runs behind a laws.json."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.recipe import EvaluateRecipe, Recipe
from habitus.record import Record
from habitus.sizing import TYPICAL_INPUTS, Inputs
from habitus.store import Laws


@dataclass(frozen=True)
class Known:
    """The dataset's side of a plan, or what is assumed without one."""

    inputs: Inputs = TYPICAL_INPUTS
    seq_len: int = 256
    text_len: int = 24
    num_items: int | None = None
    train_slots: int | None = None  # of one epoch
    dataset_checksum: str | None = None

    @classmethod
    def of(cls, dataset: Dataset) -> "Known":
        return cls(
            inputs=Inputs.of(dataset.fields),
            seq_len=dataset.seq_len,
            text_len=dataset.fields.text_len or 24,
            num_items=dataset.num_items,
            train_slots=dataset.counts("train").windows * dataset.seq_len,
            dataset_checksum=dataset.checksum,
        )


StageTwo = tuple[float, float, float, int]  # budget, K, learning rate and seed of a stage-2 run


@dataclass(frozen=True)
class Parent:
    """The stage-1 run that a stage-2 run continued."""

    budget: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Speed:
    """How fast one run trained: small steps reach less of what a device can do."""

    stage: int
    step_flops: float  # nominal
    flops_per_second: float  # nominal


@dataclass(frozen=True)
class StoreFacts:
    """What the Records beside a laws.json say that the laws themselves do not."""

    dataset_checksum: str | None = None
    recipe: Recipe | None = None  # a stage-1 recipe of the largest budget: what all runs have in common
    stage2_batch: int | None = None
    hardware: str | None = None
    device_bytes: int | None = None
    threads: int | None = None  # of each run, where all ran on a CPU with as many
    speeds: tuple[Speed, ...] = ()
    parents: dict[StageTwo, Parent] = field(default_factory=dict)

    @property
    def evaluate(self) -> EvaluateRecipe | None:
        return None if self.recipe is None else self.recipe.evaluate


def facts_beside(laws_path: Path | None) -> StoreFacts:
    """The facts of the store that a laws.json lies in; empty where it lies elsewhere."""
    if laws_path is None:
        return StoreFacts()
    store = laws_path.parent
    checksum = _stated_checksum(store / "store.json")
    records = []
    for path in sorted((store / "cells").glob("*/record.json")):
        record = Record.read(path)
        if record.status == "done":
            records.append(record)
    if not records:
        return StoreFacts(dataset_checksum=checksum)
    stage1 = [r for r in records if r.recipe.train.stage == 1]
    stage2 = [r for r in records if r.recipe.train.stage == 2]
    typical = max(stage1, key=lambda r: (r.flops_budget or 0.0, r.recipe_hash), default=None)
    return StoreFacts(
        dataset_checksum=checksum or records[0].dataset_checksum,
        recipe=None if typical is None else typical.recipe,
        stage2_batch=max((r.recipe.train.batch_sequences for r in stage2), default=None),
        hardware=_hardware(records),
        threads=_threads(records),
        speeds=tuple(_speeds(records)),
        parents=_parents(stage1, stage2),
    )


def _stated_checksum(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        stated = json.loads(path.read_text(encoding="utf-8")).get("dataset_checksum")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", expected="a store's store.json") from None
    return stated if isinstance(stated, str) else None


def _hardware(records: list[Record]) -> str | None:
    names = [str(r.hardware.get("device_name") or r.hardware.get("device") or "") for r in records]
    names = [name for name in names if name]
    return max(sorted(set(names)), key=names.count) if names else None


def _parents(stage1: list[Record], stage2: list[Record]) -> dict[StageTwo, Parent]:
    """What each stage-2 run started from, as far as the parent's Record is in the store too."""
    known = {
        r.recipe_hash: Parent(r.flops_budget, {name: metric.value for name, metric in r.metrics.items()})
        for r in stage1
        if r.flops_budget
    }
    found = {}
    for record in stage2:
        train = record.recipe.train
        if record.flops_budget and record.parent_hash in known:
            key = (record.flops_budget, float(train.num_negatives), train.learning_rate, record.seed)
            found[key] = known[record.parent_hash]
    return found


def _threads(records: list[Record]) -> int | None:
    found = {r.hardware.get("threads") if r.hardware.get("device") == "cpu" else None for r in records}
    (only, *more) = found
    return only if not more and isinstance(only, int) else None


def _speeds(records: list[Record]) -> Iterator[Speed]:
    """Nominal FLOP/s of every run that says how long it trained."""
    for record in records:
        flops, steps = record.flops_nominal, record.recipe.train.steps
        if record.seconds is None or not flops or not math.isfinite(flops) or not record.seconds.train > 0:
            continue
        yield Speed(record.recipe.train.stage, flops / steps, flops / record.seconds.train)


def refuse_other_dataset(known: Known, facts: StoreFacts, laws: Laws, laws_path: Path | None) -> str | None:
    """Refuse laws of another dataset; a warning where nothing says which dataset they are of."""
    stated = facts.dataset_checksum or laws.extra.get("dataset_checksum")
    if known.dataset_checksum is None:
        return None
    if stated is None:
        return f"{laws_path} does not say which dataset its laws are of: whether they hold for --data cannot be checked"
    if stated != known.dataset_checksum:
        raise ConfigError(
            f"{laws_path} holds laws of another dataset: its checksum is {str(stated)[:12]}…, "
            f"that of --data {known.dataset_checksum[:12]}…",
            expected="laws that were measured on the dataset to be trained on",
            next_step="habitus study --data DATASET measures them; --published plans without",
        )
    return None
