"""The verb `train`: one stage of one run, from a Recipe to a Record."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from traceback import clear_frames

import torch

from habitus.data import Dataset
from habitus.errors import Interrupted, OutOfMemory, RunError
from habitus.evaluation import Ranks, resolve_device
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import read_run_record
from habitus.training.environment import StopRequest, check_memory, training_environment, with_threads
from habitus.training.journal import Meter, TrainingProgress
from habitus.training.options import (
    TrainOptions,
    check_best,
    check_folder,
    check_parent,
    check_processes,
    check_recipe,
    check_trunk,
    hold_folder,
)
from habitus.training.run import TrainingRun
from habitus.training.step import StepResult


def train(
    recipe: Recipe,
    dataset: Dataset,
    out: Path,
    *,
    parent: Path | None = None,
    options: TrainOptions = TrainOptions(),  # noqa: B008 (frozen)
    progress: Callable[[TrainingProgress], None] | None = None,
    on_save: Callable[[int], None] | None = None,
    note: Note | None = None,
) -> Record:
    """Train one stage into the folder `out` and return its Record, which is written there as well.

    A loss that is not finite ends in a Record with status 'failed'. `on_save` is called with the step before every
    checkpoint and before the Record is written; what it raises abandons the run. `note` is called with what a user
    should know. SIGTERM or SIGUSR1 saves a checkpoint and raises Interrupted.
    """
    out, ranks = Path(out), Ranks()
    with ranks.together():
        options.check()
        dataset = dataset.training_view(recipe.data)
        check_recipe(recipe, dataset)
        check_processes(dataset, ranks.world)
        parent_run = check_parent(recipe, dataset, parent)
        device = resolve_device(options.device)
        check_best(recipe, options.best)
        check_trunk(recipe, options.trunk)
        if not options.force:
            check_memory(recipe, dataset, device, accumulate=options.accumulate, processes=ranks.world)
        check_folder(out, resume=options.resume)
    if _is_finished(out, ranks):
        return _read_finished(out, recipe, dataset)
    options = with_threads(options, recipe, dataset, device, out)
    meter = Meter(recipe, dataset, device, progress)
    with ExitStack() as stack:
        with ranks.together():
            if ranks.is_first:
                stack.enter_context(hold_folder(out))
        stop = stack.enter_context(training_environment(options, device))
        if _is_finished(out, ranks):  # by a trainer that has ended a moment ago
            return _read_finished(out, recipe, dataset)
        try:
            run = TrainingRun(
                recipe, dataset, out, parent_run, options,
                device=device, meter=meter, on_save=on_save or (lambda _: None), note=note or (lambda _: None),
            )  # fmt: skip
            with closing(run):
                return _loop(run, stop)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            clear_frames(error.__traceback__)  # they hold the tensors that were too large
            raise OutOfMemory(
                f"{device} does not have enough memory for this recipe: {(str(error) or 'none left').splitlines()[0]}",
                next_step="pass --accumulate 2 or more (the same numbers in smaller parts), or use a smaller batch",
            ) from error


def _loop(run: TrainingRun, stop: StopRequest) -> Record:
    """Step after step: train, note, evaluate, save; then the end."""
    steps = run.recipe.train.steps
    step = saved = run.state.step  # steps done; the position in the data is the same number
    stopping = run.any_rank(stop.received)
    while True:
        if run.must_evaluate(step):
            run.evaluate(step)
        if stopping:
            run.save(step)
            raise Interrupted(
                f"stopped by a signal; saved after step {step:,} of {steps:,} in {run.out}",
                next_step="run the same command with --resume to go on",
            )
        if run.must_save(step) and saved < step < steps:
            run.save(step)
            saved = step
        if run.ends_trunk(step):
            run.save_trunk(step)
        if step == steps:
            return run.finish(step)
        run.engine.step(step)
        step += 1
        stopping = run.any_rank(stop.received)
        # On a GPU results come in blocks, some steps late, unless something is about to depend on them.
        wait = stopping or step == steps or run.must_evaluate(step) or run.must_save(step) or run.ends_trunk(step)
        for result in run.engine.results(wait=wait):
            if result.problem:
                return run.fail(result.step, _explain(run, result))
            run.journal.write(result.to_values())
            run.meter.count_step(result)


def _is_out_of_memory(error: Exception) -> bool:
    """On a CPU PyTorch says it in words only."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _explain(run: TrainingRun, result: StepResult) -> str:
    size = run.recipe.train.batch_sequences
    return (
        f"{result.problem} at step {result.step} (learning rate {result.learning_rate:.6g}; batch position "
        f"{result.step}: windows {result.step * size} to {(result.step + 1) * size - 1} of the order that seed "
        f"{run.recipe.train.seed} draws)"
    )


def _is_finished(out: Path, ranks: Ranks) -> bool:
    """Whether the run is done; where it is, every process sees its Record."""
    finished = ranks.answer_of_first((out / "record.json").exists())
    if finished:
        ranks.barrier(out / "record.json")
    return finished


def _read_finished(out: Path, recipe: Recipe, dataset: Dataset) -> Record:
    """The Record of a run that is done; refused where it is another run's."""
    record = read_run_record(out)
    if record.recipe_hash != recipe.hash(dataset.checksum):
        raise RunError(
            f"{out} holds the finished run {record.recipe_hash[:12]}, and this one is "
            f"{recipe.hash(dataset.checksum)[:12]}",
            expected="the recipe and the dataset of the run in the folder",
            next_step="name another folder",
        )
    return record
