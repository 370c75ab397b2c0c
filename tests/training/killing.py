"""Run by the tests: train a run again and again, ended by signals at random moments, until it is done.

The parent imports everything and then forks, so that an attempt costs its steps and little more.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from habitus.data import Dataset
from habitus.errors import Interrupted
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train


def main(job: Path) -> None:
    """The job: recipe, dataset, straight, killed (folders), kills, seed. Prints how each attempt ended."""
    torch.set_num_threads(1)
    values = json.loads(job.read_text())
    dataset = Dataset.open(values["dataset"], verify=False)
    recipe = Recipe.parse(values["recipe"], "the test's recipe")
    began = time.perf_counter()
    assert attempt(recipe, dataset, Path(values["straight"]), resume=False) == "done"
    seconds = time.perf_counter() - began
    chance, ends = random.Random(values["seed"]), []
    out = Path(values["killed"])
    for number in range(values["kills"]):
        kind = signal.SIGKILL if chance.random() < 0.6 else signal.SIGTERM
        # Early enough that something is left to do after all of them, whatever was saved in between.
        after = chance.uniform(0.03, 0.17) * seconds
        ends.append(attempt(recipe, dataset, out, resume=number > 0, kill=kind, after=after))
        if ends[-1] == "done":
            break
    while ends[-1] != "done":
        ends.append(attempt(recipe, dataset, out, resume=True))
    print(json.dumps(ends))


def attempt(
    recipe: Recipe, dataset: Dataset, out: Path, *, resume: bool, kill: signal.Signals | None = None, after: float = 0
) -> str:
    """How one process ended: done, killed, or stopped (it saved and said so)."""
    child = os.fork()
    if child == 0:
        os._exit(_train(recipe, dataset, out, resume))
    if kill is not None:
        deadline = time.perf_counter() + after
        while time.perf_counter() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return _ending(status)
            time.sleep(0.002)
        os.kill(child, kill)
    return _ending(os.waitpid(child, 0)[1])


def _train(recipe: Recipe, dataset: Dataset, out: Path, resume: bool) -> int:
    options = TrainOptions(device="cpu", threads=1, save_every=2, keep_checkpoints_at_end=True, resume=resume)
    try:
        train(recipe, dataset, out, options=options)
    except Interrupted:
        return 143
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        return 1
    return 0


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else "terminated before it listened"
    return {0: "done", 143: "stopped"}[os.WEXITSTATUS(status)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
