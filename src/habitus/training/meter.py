"""Clocks of a run: what it spent where, across resumptions, and what a progress bar should say."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from habitus.data import Dataset
from habitus.recipe import Recipe
from habitus.sizing import Inputs, cell_of_recipe
from habitus.training.engine import StepResult
from habitus.training.environment import peak_flops
from habitus.training.options import Progress

_SHOW_SECONDS = 0.2


class Meter:
    """Seconds by purpose. Warm-up lasts until the first step of this process is done."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, device: torch.device, show: Callable[[Progress], None] | None
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
        self._mark: float | None = None  # since when steps are being timed; None before the first one
        self._shown = 0.0

    def take_over(self, earlier: dict[str, float]) -> None:
        """Add what the run spent before it was resumed."""
        for name, value in earlier.items():
            self.spent[name] = self.spent.get(name, 0.0) + value

    def stepped(self, result: StepResult) -> None:
        """A step is done."""
        now = time.perf_counter()
        if self._mark is None:
            self.spent["warmup"] += now - self.began
        else:
            self.spent["train"] += now - self._mark
            self.spent["timed_steps"] += 1
        self._mark = now
        if self.show is not None and now - self._shown > _SHOW_SECONDS:
            self._shown = now
            self.show(self._progress(result))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What happens in the block is evaluation, not training."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.spent["evaluate"] += time.perf_counter() - before
            if self._mark is not None:
                self._mark = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """What was spent so far."""
        return dict(self.spent)

    def phase(self, name: str, share: float) -> None:
        """Show something that is not a step."""
        if self.show is not None:
            self.show(Progress(phase=name, step=0, steps=self.steps, share=share))

    def _progress(self, result: StepResult) -> Progress:
        done = result.step + 1
        rate = self.spent["timed_steps"] / self.spent["train"] if self.spent["train"] else None
        return Progress(
            phase="training",
            step=done,
            steps=self.steps,
            share=done / self.steps,
            loss=result.loss,
            events_per_second=None if rate is None else rate * self.events_per_step,
            share_of_peak=None if rate is None or self.peak is None else rate * self.flops_per_step / self.peak,
            seconds_left=None if rate is None else (self.steps - done) / rate,
        )
