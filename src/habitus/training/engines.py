"""Which engine trains a run: captured steps where they can be, plain ones elsewhere, and why is said aloud."""


import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation import Ranks
from habitus.model import BehaviorModel, EmbeddingCache
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.training.compiling import is_worth_it
from habitus.training.cuda_graph import CapturedEngine
from habitus.training.engine import Engine
from habitus.training.feeding import Feeder
from habitus.training.options import TrainOptions
from habitus.training.resident import resident_bytes
from habitus.training.stages import FrozenStage, JointStage
from habitus.training.vectors import FrozenVectors
from habitus.units import format_bytes

_SHARE_FOR_DATA = 0.5  # of the free device memory


def build_engine(
    model: BehaviorModel,
    dataset: Dataset,
    recipe: Recipe,
    options: TrainOptions,
    cache: EmbeddingCache | None,
    device: torch.device,
    ranks: Ranks,
    note: Note,
) -> Engine | CapturedEngine:
    """The engine of a run. On a GPU steps are captured unless something stands against it."""
    vectors = None if cache is None else FrozenVectors(cache, device, recipe.train.precision)
    reason = _obstacle(dataset, options, vectors, device, ranks)
    if (options.compile or options.capture) and reason:
        raise ConfigError(f"steps cannot be captured: {reason}", next_step="leave --compile and --capture out")
    if not reason:
        table: Tensor | None = None if vectors is None else vectors.table
        compiled = is_worth_it(recipe, dataset, device, options.compile)
        note("steps are captured" + (" and compiled" if compiled else "; compiling would take longer than it gains"))
        return CapturedEngine(model, dataset, recipe, device, table, compiled=compiled)
    if device.type == "cuda":
        note(f"steps are run one operation at a time, several times slower: {reason}")
    feeder = Feeder(dataset, recipe, device, ranks, options.accumulate)
    if vectors is None:
        return Engine(model, recipe, JointStage(model, dataset, recipe, feeder))
    return Engine(model, recipe, FrozenStage(model, dataset, recipe, feeder, vectors))


def _obstacle(
    dataset: Dataset, options: TrainOptions, vectors: FrozenVectors | None, device: torch.device, ranks: Ranks
) -> str:
    """Why steps are not captured; empty where they are."""
    if device.type != "cuda":
        return "the device is no GPU"
    if options.capture is False:
        return "it was asked for (--no-capture)"
    if ranks.world > 1:
        return f"{ranks.world} processes share the batch"
    if options.accumulate > 1:
        return f"the batch comes in {options.accumulate} parts"
    if vectors is not None and vectors.table is None:
        return "the item vectors do not fit the device"
    needed, free = resident_bytes(dataset), torch.cuda.mem_get_info(device)[0]
    if needed > _SHARE_FOR_DATA * free:
        return f"the data takes {format_bytes(needed)} of the {format_bytes(free)} that are free on the device"
    return ""
