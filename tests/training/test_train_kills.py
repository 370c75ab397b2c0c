"""A run that is killed at random moments ends with the same bits as one that is left alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from habitus.data import Dataset
from habitus.record import Record
from habitus.training.journal import read_journal

SCRIPT = Path(__file__).with_name("killing.py")
TIMES = ("seconds", "throughput", "memory")


def ends_of(recipe: Any, dataset: Dataset, folder: Path, kills: int, seed: int) -> list[str]:
    """How the processes ended, the last one with a Record."""
    job = folder / "job.json"
    values = {"recipe": recipe.to_values(), "dataset": str(dataset.path), "kills": kills, "seed": seed}
    values |= {"straight": str(folder / "straight"), "killed": str(folder / "killed")}
    job.write_text(json.dumps(values))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(job)], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ends: list[str] = json.loads(done.stdout)
    return ends


def check_same(folder: Path, steps: int) -> None:
    straight, killed = folder / "straight", folder / "killed"
    names = ["bundle/model.safetensors"]
    names += [f"checkpoints/step-{steps:08d}/{name}.safetensors" for name in ("model", "optimizer")]
    for name in names:
        assert (straight / name).read_bytes() == (killed / name).read_bytes(), name
    one, two = (Record.read(run / "record.json").model_dump(exclude=set(TIMES)) for run in (straight, killed))
    assert one == two
    lines = [read_journal(run / "journal.jsonl") for run in (straight, killed)]
    assert lines[0] == lines[1]


def test_a_killed_run_ends_with_the_same_bits(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    recipe = recipe_of(steps=40, evaluate={"every": 7, "queries": 100}, model={"copying": True}, dropout=0.2)
    ends = ends_of(recipe, dataset, tmp_path, kills=5, seed=1)
    assert "killed" in ends
    check_same(tmp_path, 40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_fifty_kills(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    recipe = recipe_of(steps=80, optimizer="muon" if seed % 2 else "adamw", evaluate={"every": 7, "queries": 100})
    ends = ends_of(recipe, dataset, tmp_path, kills=5, seed=100 + seed)
    # A machine that has become faster meanwhile may finish before the last of them.
    assert len([end for end in ends if end != "done"]) >= 4
    check_same(tmp_path, 80)
