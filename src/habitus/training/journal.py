"""What a run says while it lasts: a journal on disk, and how far and how fast it is for a bar on a screen.

journal.jsonl has one line per step and one per evaluation, as they happen; trackers read it, analysis does not.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from habitus.data import Dataset
from habitus.files import write_atomic
from habitus.recipe import Recipe
from habitus.sizing import Inputs, cell_of_recipe
from habitus.training.environment import peak_flops
from habitus.training.step import StepResult

_FLUSH_SECONDS = 1.0
_SHOW_SECONDS = 0.2


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
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            values = json.loads(text)
        except ValueError:  # not JSON, or not UTF-8
            continue
        if isinstance(values, dict):
            lines.append(values)
    return lines


def _drop_later_lines(path: Path, step: int) -> None:
    """Leave what belongs to the first `step` steps. An evaluation's step counts those done before it."""
    lines = [line for line in read_journal(path) if line.get("step", 0) < step + ("metrics" in line)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomic(path, text.encode())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value


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
