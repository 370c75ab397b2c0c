"""What a run says of itself: its journal and progress while it lasts, and its Record at the end.

journal.jsonl has one line per step and one per evaluation, as they happen; trackers read it, analysis does not.
record.json is put together from what was counted and measured, and written once.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from habitus.cards import CardFacts, write_run_card
from habitus.data import Dataset, data_facts
from habitus.errors import ConfigError, RunError
from habitus.evaluation import Evaluation
from habitus.files import write_atomic, write_once
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
from habitus.training.environment import hardware, memory, peak_flops, versions
from habitus.training.options import ParentRun, TrainOptions
from habitus.training.step import StepResult, Work

JOURNAL_FILE = "journal.jsonl"
_FLUSH_SECONDS = 1.0
_SHOW_SECONDS = 0.2


# The journal ----------------------------------------------------------------------------------------------------------


class Journal:
    """The journal of a run, opened to go on after `step` steps; lines of later steps are dropped."""

    def __init__(self, path: Path, step: int, *, writes: bool) -> None:
        self._file: TextIO | None = None
        if not writes:  # only the first process does
            return
        if path.exists():
            _drop_later_lines(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def write(self, values: dict[str, Any]) -> None:
        """Append one line. Numbers that JSON does not know (NaN) are written as text."""
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(values, ensure_ascii=False) + "\n")
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; those that cannot be read, as a last one that a kill cut short, are left out."""
    lines = (parse_line(text) for text in path.read_bytes().splitlines())
    return [values for values in lines if values is not None]


def parse_line(text: str | bytes) -> dict[str, Any] | None:
    """The values of a line of the journal; None where it is damaged."""
    try:
        values = json.loads(text)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return values if isinstance(values, dict) else None


def copy_journal(source: Path, target: Path) -> None:
    """Copy the journal of a folder where there is one; lines of later steps are dropped when it is opened."""
    if (source / JOURNAL_FILE).exists():
        write_atomic(target / JOURNAL_FILE, (source / JOURNAL_FILE).read_bytes())


def _drop_later_lines(path: Path, step: int) -> None:
    """Leave what belongs to the first `step` steps. An evaluation's step counts those done before it."""
    lines = [line for line in read_journal(path) if line.get("step", 0) < step + ("metrics" in line)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomic(path, text.encode())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value


# Progress -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run is, for a bar on a screen."""

    phase: str  # starting, training, evaluating, embedding items
    step: int
    steps: int
    share: float  # of the phase
    loss: float | None = None
    events_per_second: float | None = None
    share_of_peak: float | None = None
    seconds_left: float | None = None


class Meter:
    """Seconds by purpose. Warm-up lasts until the first step of this process is done."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, device: torch.device, show: Callable[[TrainingProgress], None] | None
    ) -> None:
        self.began = time.perf_counter()
        self.steps = recipe.train.steps
        counts = dataset.counts("train")
        self.events_per_step = recipe.train.batch_sequences * counts.events / counts.windows
        # A share of peak is one of what is multiplied; nominal FLOPs count more than that.
        self.flops_per_step = cell_of_recipe(recipe, Inputs.of(dataset.fields)).executed_flops / recipe.train.steps
        self.peak = peak_flops(device)
        self.show = show
        self.spent = {"warmup": 0.0, "train": 0.0, "evaluate": 0.0, "timed_steps": 0.0}
        self._since: float | None = None  # since when steps are being timed; None before the first one
        self._last_shown = 0.0

    def add(self, earlier: dict[str, float]) -> None:
        """Add what the run spent before it was resumed."""
        for name, value in earlier.items():
            self.spent[name] = self.spent.get(name, 0.0) + value

    def count_step(self, result: StepResult) -> None:
        """Note that a step is done."""
        now = time.perf_counter()
        if self._since is None:
            self.spent["warmup"] += now - self.began
        else:
            self.spent["train"] += now - self._since
            self.spent["timed_steps"] += 1
        self._since = now
        if self.show is not None and now - self._last_shown > _SHOW_SECONDS:
            self._last_shown = now
            self.show(self._progress(result))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What happens in the block is evaluation, not training."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.spent["evaluate"] += time.perf_counter() - before
            if self._since is not None:
                self._since = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """What was spent so far."""
        return dict(self.spent)

    def show_phase(self, name: str, share: float) -> None:
        """Show a phase that has no steps."""
        if self.show is not None:
            self.show(TrainingProgress(phase=name, step=0, steps=self.steps, share=share))

    def _progress(self, result: StepResult) -> TrainingProgress:
        done = result.step + 1
        rate = self.spent["timed_steps"] / self.spent["train"] if self.spent["train"] else None
        return TrainingProgress(
            phase="training",
            step=done,
            steps=self.steps,
            share=done / self.steps,
            loss=result.loss,
            events_per_second=None if rate is None else rate * self.events_per_step,
            share_of_peak=None if rate is None or self.peak is None else rate * self.flops_per_step / self.peak,
            seconds_left=None if rate is None else (self.steps - done) / rate,
        )


# The Record -----------------------------------------------------------------------------------------------------------


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
    tokens = tokens_per_item(recipe.model.text_len, inputs)
    cache_flops = item_cache_flops(parts.embedder_params, t=tokens, items=dataset.num_items)
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
        flops_item_cache=float(cache_flops) if outcome.built_cache else None,
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
        hardware=hardware(recipe, options, device, world) | outcome.engine,
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
