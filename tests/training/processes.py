"""Run by torchrun from the tests: train some jobs, all processes together, and leave run folders behind."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from habitus.data import Dataset
from habitus.errors import DataError, HabitusError
from habitus.evaluation.ranks import Ranks, join_ranks, wait_for_file
from habitus.model import BehaviorModel
from habitus.model.bundle import load_bundle
from habitus.model.cache import EmbeddingCache
from habitus.recipe import Recipe
from habitus.softmax import Latch, extras_softmax, negative_keys
from habitus.training import TrainOptions, loss, train
from habitus.training.batches import WindowOrder
from habitus.training.cuda_graph import CapturedStage1, CapturedStage2
from habitus.training.device_batches import DeviceEvents, DeviceItems, share_batch
from habitus.training.items import FrozenVectors
from habitus.training.parallel import GradientExchange, sum_over_ranks

CPU = torch.device("cpu")
FIXED_STEP = 3


def main(jobs: Path) -> None:
    """Each job: recipe, dataset, out, parent, options, double_loss, stop_at (step after which a save is given up),
    killed_at (step at whose save the second process is killed).

    A job with `fixed_shapes` computes one step in the way of a captured one instead. In one with `even_candidates` only
    every second item is ever drawn. One that asks to `meet` has the processes fail and wait for each other.
    """
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group("gloo")  # a group of one, which nobody sets up otherwise
    with join_ranks("cpu"):
        for job in json.loads(jobs.read_text()):
            if job.get("meet"):
                meet(Path(job["out"]))
                continue
            dataset = Dataset.open(job["dataset"], verify=False)
            if job.get("even_candidates"):
                dataset.candidate_rows = np.arange(0, dataset.num_items, 2)
            recipe = Recipe.parse(job["recipe"], "the test's recipe")
            parent = Path(job["parent"]) if job.get("parent") else None
            if job.get("fixed_shapes"):
                fixed_shapes(recipe, dataset, parent, Path(job["out"]))
                continue
            options = TrainOptions(device="cpu", threads=1, **job.get("options", {}))

            def fence(
                step: int, limit: int | None = job.get("stop_at"), killed_at: int | None = job.get("killed_at")
            ) -> None:
                if step == killed_at and Ranks().rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if limit is not None and step > limit:
                    raise InterruptedError

            try:
                with doubled_loss() if job.get("double_loss") else nullcontext():
                    train(recipe, dataset, Path(job["out"]), parent=parent, options=options, on_save=fence)
            except InterruptedError:
                continue


def meet(out: Path) -> None:
    """Write what each process hears where one of them fails, is slow or has other files before it."""
    ranks, said = Ranks(), {}
    try:
        with ranks.together():
            if ranks.rank == 1:
                raise DataError("a file is gone")
    except HabitusError as error:
        said["refused"] = error.problem
    queries, no_extra = torch.full((2, 4), 1e15), torch.zeros(2, dtype=torch.bool)
    targets = torch.full((2, 4), -1e30 if ranks.rank == 1 else 1.0)  # finite, and on one process their scores overflow
    try:
        extras_softmax(queries, torch.ones(3, 4), targets, no_extra, group=dist.group.WORLD)
    except HabitusError as error:
        said["softmax"] = error.problem
    said["answer"] = ranks.answer_of_first(ranks.is_first)
    late = out.with_name("late")
    writer = threading.Timer(0.5, late.write_text, ("",))
    if ranks.is_first:
        writer.start()
    began = time.monotonic()
    ranks.barrier(late)
    said["waited"] = 0.2 < time.monotonic() - began < 60
    try:
        wait_for_file(out.with_name("never"), seconds=0.0)
    except HabitusError as error:
        said["never"] = error.problem
    out.with_name(f"{out.name}-{ranks.rank}").write_text(json.dumps(said))
    if ranks.is_first:
        writer.join()


def fixed_shapes(recipe: Recipe, dataset: Dataset, parent: Path | None, out: Path) -> None:
    """Write the loss, the scores and the gradients of one step of all processes, computed as a captured one would."""
    ranks, settings = Ranks(), recipe.train
    items = DeviceItems.of(dataset, recipe, CPU, features=settings.stage == 1, ranks=ranks)
    events, order = DeviceEvents(dataset, CPU), WindowOrder(dataset, settings.batch_sequences, settings.seed)
    batch = events.assemble(torch.from_numpy(order.windows(FIXED_STEP)), items.lengths)
    if ranks.world > 1:
        batch = share_batch(batch, items.lengths, dataset.num_items, ranks)
    model, stage = BehaviorModel(dataset.fields, recipe.model), None
    if parent is None:
        stage = CapturedStage1(model, dataset, recipe, items, events.names, ranks=ranks)
        size = len(batch.rows), 2000
    else:
        bundle = load_bundle(parent)
        model = bundle.model.freeze().train()
        cache = EmbeddingCache.open(parent / "catalogue", bundle, dataset, verify=False)
        table = FrozenVectors(cache, CPU, ranks=ranks).table
        assert table is not None and len(table) == len(range(ranks.rank, dataset.num_items, ranks.world))
        stage = CapturedStage2(model, dataset, recipe, table, events.names, ranks=ranks)
        size = len(batch.rows) - 7, len(batch.rows)
    latch = Latch("cpu")
    latch.state[0] = FIXED_STEP
    exchange = GradientExchange([p for p in model.parameters() if p.requires_grad], overlapped=True)
    losses = stage.losses(batch, negative_keys(settings.seed, FIXED_STEP), size, latch)
    losses.loss.backward()
    exchange.finish()
    total = sum_over_ranks(losses.loss.detach(), ranks)
    assert bool(latch.ok)
    if ranks.is_first:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        save_file({**gradients, "loss": total, "scores": batch.counts[4] * losses.num_candidates}, out)


@contextmanager
def doubled_loss() -> Iterator[None]:
    """Within the block the one function that turns queries into losses returns twice what it should."""
    original = loss.query_losses

    def doubled(*arguments: Any, **options: Any) -> Any:
        return 2 * original(*arguments, **options)

    loss.query_losses = doubled
    try:
        yield
    finally:
        loss.query_losses = original


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # All is written. Threads of the process group that are still about when the interpreter ends have been seen, once
    # in many runs on a busy machine, to abort a process that had done its work.
    os._exit(0)
