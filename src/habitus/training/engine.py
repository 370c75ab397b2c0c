"""One optimizer step after another, in plain operations: on CPU, across processes, and on CUDA where a step is not
captured."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.model import BehaviorModel
from habitus.recipe import Recipe
from habitus.training.gathering import summed_gradients
from habitus.training.optimizers import build_optimizer, clip_gradients
from habitus.training.schedule import learning_rate_at
from habitus.training.sharding import is_spread, spread_like
from habitus.training.stages import FrozenStage, JointStage, Work

TAIL = 100  # steps over which the training losses of a Record are averaged


@dataclass(frozen=True)
class StepResult:
    """What the host knows of a step once it is done."""

    step: int
    learning_rate: float
    in_batch: float
    extra: float | None
    loss: float
    gradient_norm: float
    problem: str | None = None  # why the run cannot go on

    def to_values(self) -> dict[str, float | int]:
        """The line of the journal."""
        values = {
            "step": self.step,
            "loss": self.loss,
            "in_batch_loss": self.in_batch,
            "extra_loss": self.extra,
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
        }
        return {name: value for name, value in values.items() if value is not None}


class Engine:
    """Steps whose result the host knows at once."""

    description = {"engine": "eager", "compiled": False}  # noqa: RUF012

    def __init__(self, model: BehaviorModel, recipe: Recipe, stage: JointStage | FrozenStage) -> None:
        self.model = model
        self.recipe = recipe.train
        self.stage = stage
        self.optimizer = build_optimizer(model, recipe.train)
        self.parameters = [info.parameter for info in self.optimizer.infos]
        self.repeated = [parameter for parameter in self.parameters if not is_spread(parameter)]
        self.tail = np.full((TAIL, 3), np.nan)  # in_batch, extra, loss of the last steps, by step modulo TAIL
        self._results: list[StepResult] = []

    def step(self, step: int) -> None:
        """Train on the batch of one step."""
        rate = learning_rate_at(step, self.recipe)
        try:
            channels = self.stage.backward(step)
        except ModelError as error:  # NaN or infinity among the vectors
            self._results.append(StepResult(step, rate, math.nan, None, math.nan, math.nan, error.problem.rstrip(".")))
            return
        if self.stage.ranks.world > 1:
            summed_gradients(self.repeated)
        norm = float(clip_gradients(self.parameters, self.recipe.clip))
        loss, in_batch = float(channels.loss), float(channels.in_batch)
        extra = None if channels.extra is None else float(channels.extra)
        problem = None
        if not math.isfinite(loss):
            problem = f"the loss is {loss}"
        elif not math.isfinite(norm):
            problem = f"the gradient's norm is {norm}"
        else:
            self.optimizer.step(rate)
            self.tail[step % TAIL] = in_batch, math.nan if extra is None else extra, loss
        self.optimizer.zero_grad()
        self._results.append(StepResult(step, rate, in_batch, extra, loss, norm, problem))

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """The steps that have ended since the last call; `wait` for all that were begun."""
        found, self._results = self._results, []
        return found

    def work(self) -> Work:
        """What all steps so far have multiplied."""
        return self.stage.work

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything but the model's weights that the next step depends on, or that the Record will show."""
        return {"tail": torch.from_numpy(self.tail.copy()), **self.optimizer.state_tensors()}

    def load_state(self, tensors: dict[str, Tensor], work: Work) -> None:
        """Go on from a checkpoint whose weights the model holds already."""
        tensors = dict(tensors)
        self.tail = tensors.pop("tail").numpy().copy()
        self.optimizer.load_state_tensors(spread_like(tensors, self.optimizer.state_tensors()))
        self.stage.work = work

    def tail_means(self) -> tuple[float, float | None, float] | None:
        """Means over the last steps of the in-batch, extra and whole loss; None before the first step."""
        return tail_means(self.tail)


def tail_means(tail: np.ndarray) -> tuple[float, float | None, float] | None:
    """The means of the rows that were written."""
    seen = tail[np.isfinite(tail[:, 2])]
    if not len(seen):
        return None
    in_batch, extra, loss = (math.fsum(column) / len(seen) for column in seen.T)
    return in_batch, None if math.isnan(extra) else extra, loss
