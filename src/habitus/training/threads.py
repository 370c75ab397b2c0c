"""How many threads a run on a CPU gets, where the user does not say.

Threads meet after every operation, hundreds of times in a step. Where a step is small, or another process has a core,
they wait for each other longer than they work; one thread waits for nobody.
"""

from dataclasses import replace
from pathlib import Path

import torch

from habitus.data import Dataset
from habitus.machine import idle_cores, usable_cores
from habitus.recipe import Recipe
from habitus.sizing import Inputs, cell_of_recipe
from habitus.training.checkpoints import saved_threads
from habitus.training.options import TrainOptions

# Executed FLOPs of a step that each thread should have: some tens of milliseconds of work.
_STEP_FLOPS_PER_THREAD = 1e9


def with_threads(
    options: TrainOptions, recipe: Recipe, dataset: Dataset, device: torch.device, out: Path
) -> TrainOptions:
    """The options with a number of threads: those of the checkpoint that is resumed, or as step and machine allow."""
    if options.threads is not None or device.type != "cpu":
        return options
    saved = saved_threads(out) if options.resume else None  # a resumed run is the same to the bit
    return replace(options, threads=saved or choose_threads(recipe, dataset))


def choose_threads(recipe: Recipe, dataset: Dataset) -> int:
    """As many threads as the step feeds and idle cores carry; one at least."""
    most = min(torch.get_num_threads(), usable_cores())  # OMP_NUM_THREADS is the former
    cell = cell_of_recipe(recipe, Inputs.of(dataset.fields))
    threads = min(most, int(cell.executed_flops / cell.steps / _STEP_FLOPS_PER_THREAD))
    if threads <= 1:
        return 1
    return max(1, min(threads, round(idle_cores())))
