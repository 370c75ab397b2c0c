"""Run by torchrun from the tests: train some jobs, all processes together, and leave run folders behind."""

import json
import os
import sys
from pathlib import Path

from habitus.data import Dataset
from habitus.evaluation.ranks import joined_ranks
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train


def main(jobs: Path) -> None:
    """Each job: recipe, dataset, out, parent, options, stop_at (the step after which a save is given up)."""
    with joined_ranks("cpu"):
        for job in json.loads(jobs.read_text()):
            dataset = Dataset.open(job["dataset"], verify=False)
            recipe = Recipe.parse(job["recipe"], "the test's recipe")
            parent = Path(job["parent"]) if job.get("parent") else None
            options = TrainOptions(device="cpu", threads=1, **job.get("options", {}))

            def fence(step: int, limit: int | None = job.get("stop_at")) -> None:
                if limit is not None and step > limit:
                    raise InterruptedError

            try:
                train(recipe, dataset, Path(job["out"]), parent=parent, options=options, on_save=fence)
            except InterruptedError:
                continue


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # All is written. Threads of the process group that are still about when the interpreter ends have been seen, once
    # in many runs on a busy machine, to abort a process that had done its work.
    os._exit(0)
