"""Run by torchrun from the tests: train some jobs, all processes together, and leave run folders behind."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from habitus.data import Dataset
from habitus.evaluation.ranks import join_ranks
from habitus.recipe import Recipe
from habitus.training import TrainOptions, loss, train


def main(jobs: Path) -> None:
    """Each job: recipe, dataset, out, parent, options, double_loss, stop_at (step after which a save is given up)."""
    with join_ranks("cpu"):
        for job in json.loads(jobs.read_text()):
            dataset = Dataset.open(job["dataset"], verify=False)
            recipe = Recipe.parse(job["recipe"], "the test's recipe")
            parent = Path(job["parent"]) if job.get("parent") else None
            options = TrainOptions(device="cpu", threads=1, **job.get("options", {}))

            def fence(step: int, limit: int | None = job.get("stop_at")) -> None:
                if limit is not None and step > limit:
                    raise InterruptedError

            try:
                with doubled_loss() if job.get("double_loss") else nullcontext():
                    train(recipe, dataset, Path(job["out"]), parent=parent, options=options, on_save=fence)
            except InterruptedError:
                continue


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
