"""Threads by the size of the step and what the machine has idle; a resumed run keeps its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from habitus.data import Dataset
from habitus.errors import Interrupted
from habitus.planning.hardware import busy_note
from habitus.recipe import Recipe
from habitus.store import Quantity
from habitus.training import TrainOptions, environment, train
from habitus.training.environment import choose_threads, with_threads
from habitus.training.loop import _is_out_of_memory


def recipe_of(dataset: Dataset, width: int, batch: int, steps: int = 2) -> Recipe:
    values = {
        "data": {"seq_len": dataset.seq_len},
        "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": width, "depth": 2},
        "train": {"batch_sequences": batch, "steps": steps, "learning_rate": 0.01},
        "evaluate": {"queries": 20, "regimes": ["batch"]},
    }
    return Recipe.parse(values, "test")


@pytest.fixture
def eight_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight cores, of which 5.7 are idle."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    monkeypatch.setattr(environment, "idle_cores", lambda: 5.7)


@pytest.mark.usefixtures("eight_threads")
def test_small_steps_get_one_thread_and_large_ones_the_idle_cores(dataset: Dataset) -> None:
    assert choose_threads(recipe_of(dataset, width=32, batch=4), dataset) == 1
    assert choose_threads(recipe_of(dataset, width=1024, batch=256), dataset) == 6


def test_a_busy_machine_gives_one_thread(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    monkeypatch.setattr(environment, "idle_cores", lambda: 0.2)
    assert choose_threads(recipe_of(dataset, width=1024, batch=256), dataset) == 1


def test_what_the_user_says_counts(dataset: Dataset, tmp_path: Path) -> None:
    options = TrainOptions(threads=3)
    assert with_threads(options, recipe_of(dataset, 32, 4), dataset, torch.device("cpu"), tmp_path) == options


def test_a_resumed_run_keeps_the_threads_of_its_checkpoint(dataset: Dataset, tmp_path: Path) -> None:
    recipe = recipe_of(dataset, width=32, batch=4, steps=6)

    def stop(step: int) -> None:
        if step == 4:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        train(recipe, dataset, tmp_path, options=TrainOptions(threads=2, save_every=2, keep=9), on_save=stop)
    (newest,) = tmp_path.glob("checkpoints/step-*")
    assert json.loads((newest / "state.json").read_text())["threads"] == 2
    assert train(recipe, dataset, tmp_path, options=TrainOptions(resume=True)).hardware["threads"] == 2


def test_memory_that_a_cpu_does_not_have_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**16)
    assert _is_out_of_memory(refused.value)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not _is_out_of_memory(other.value)


def test_the_command_line_lets_threads_sleep() -> None:
    code = "import os, sys; sys.argv = ['habitus', '--help']\n"
    code += "from habitus import cli\ntry: cli.main()\nexcept SystemExit: pass\nprint(os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, expected in ((environment, "PASSIVE"), (environment | {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        shown = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
        assert shown.stdout.splitlines()[-1] == expected


def test_hours_of_a_study_are_told_for_a_busy_machine() -> None:
    hours = Quantity(value=0.1, low=None, high=None, source="this study", how="runs")
    assert busy_note(hours, 1.1) is None
    assert busy_note(hours, 4.0) == (
        "Other processes are using the cores: started now, it takes about 4.0 times as long, 24 min."
    )
