"""Several processes train as one does: same losses, both stages, replicated or sharded weights, any world size."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from habitus.data import Dataset
from habitus.evaluation.ranks import Ranks
from habitus.model import BehaviorModel
from habitus.model.bundle import load_bundle
from habitus.model.cache import EmbeddingCache
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.training import TrainOptions, train
from habitus.training.batches import HostBatches
from habitus.training.items import FrozenVectors
from habitus.training.journal import read_journal
from habitus.training.step import EagerStage1, EagerStage2
from tests.training.processes import CPU, FIXED_STEP

SCRIPT = Path(__file__).with_name("processes.py")


def launch(count: int, jobs: list[dict[str, Any]], folder: Path) -> None:
    """Train the jobs with so many processes."""
    path = folder / f"jobs-{count}.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*command, str(SCRIPT), str(path)], capture_output=True, text=True, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_journal(run / "journal.jsonl") if "loss" in line]


def furthest(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == 20
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def jobs_of(
    recipe_of: Callable[..., Any], dataset: Dataset, parent: Path, folder: Path, only: tuple[str, ...] = ()
) -> dict[str, dict[str, Any]]:
    """What every world size trains: 20 steps of 17 windows, a number that neither 2 nor 3 divides."""
    parent_hash = Record.read(parent / "record.json").recipe_hash
    one = recipe_of(steps=20, batch_sequences=17).to_values()
    two = recipe_of(steps=20, batch_sequences=17, stage=2, parent=parent_hash, num_negatives=64).to_values()
    apart = recipe_of(
        steps=20, batch_sequences=17, stage=2, parent=parent_hash, num_negatives=64, extra_pool="extras", log_q=True
    ).to_values()
    few = recipe_of(steps=20, batch_sequences=2, dropout=0.2).to_values()  # a process may have no window, or few items
    muon = recipe_of(steps=20, batch_sequences=17, optimizer="muon").to_values()
    copying = recipe_of(steps=20, batch_sequences=17, model={"copying": True}, log_q=True, dropout=0.2).to_values()
    half = recipe_of(
        steps=20, batch_sequences=17, log_q=True, token_dropout=0.2, field_dropout=0.2, item_dropout=0.1
    ).to_values()
    half["data"] |= {"user_share": 0.5, "user_part": 1}
    common = {"dataset": str(dataset.path)}
    jobs = {
        "joint": {"recipe": one},
        "half": {"recipe": half},
        "frozen": {"recipe": two, "parent": str(parent)},
        "extras": {"recipe": apart, "parent": str(parent)},
        "copying": {"recipe": copying},
        "copying-parts": {"recipe": copying, "options": {"accumulate": 3, "shard": True}},
        "parts": {"recipe": one, "options": {"accumulate": 3}},
        "few": {"recipe": few, "options": {"accumulate": 16, "shard": True}},
        "sharded": {"recipe": one, "options": {"shard": True}},
        "sharded-muon": {"recipe": muon, "options": {"shard": True}},
        "sharded-frozen": {"recipe": two, "parent": str(parent), "options": {"shard": True}},
    }
    return {n: {**common, **job, "out": str(folder / n)} for n, job in jobs.items() if not only or n in only}


def alone(job: dict[str, Any], out: Path) -> list[float]:
    """The same job in this process, in the plainest way."""
    parent = Path(job["parent"]) if job.get("parent") else None
    recipe = Recipe.parse(job["recipe"], "the test's recipe")
    dataset = Dataset.open(job["dataset"], verify=False)
    train(recipe, dataset, out, parent=parent, options=TrainOptions(device="cpu", threads=1))
    return losses(out)


def fixed_jobs(
    recipe_of: Callable[..., Any], dataset: Dataset, parent: Path, folder: Path
) -> dict[str, dict[str, Any]]:
    """Single steps as a GPU's graph holds them: rows, places and pools of fixed sizes; 18 windows, for 1, 2 and 3."""
    stage2 = {"stage": 2, "parent": "p", "log_q": True, "batch_sequences": 18}
    recipes = {
        "fixed": recipe_of(batch_sequences=18, dropout=0.2, item_dropout=0.2, token_dropout=0.2, log_q=True),
        "fixed-frozen": recipe_of(**stage2),
        "fixed-union": recipe_of(**stage2, num_negatives=64),
        "fixed-extras": recipe_of(**stage2, num_negatives=64, extra_pool="extras"),
        "fixed-catalogue": recipe_of(**stage2, num_negatives=dataset.num_items),
        "fixed-even": recipe_of(**stage2, num_negatives=100),
        "fixed-even-extras": recipe_of(**stage2, num_negatives=100, extra_pool="extras"),
    }
    common = {"dataset": str(dataset.path), "fixed_shapes": True}
    return {
        name: {"recipe": recipe.to_values(), "out": str(folder / name), **common, "even_candidates": "even" in name}
        | ({"parent": str(parent)} if recipe.train.stage == 2 else {})
        for name, recipe in recipes.items()
    }


def assert_as_alone(job: dict[str, Any], dataset: Dataset) -> None:
    """One step of fixed shapes has the loss and the gradients of the plain one."""
    recipe = Recipe.parse(job["recipe"], "the test's recipe")
    if job["even_candidates"]:
        dataset = Dataset.open(dataset.path, verify=False)
        dataset.candidate_rows = np.arange(0, dataset.num_items, 2)
    model, batches = BehaviorModel(dataset.fields, recipe.model), HostBatches(dataset, recipe, CPU, Ranks(), 1)
    stage: EagerStage1 | EagerStage2 = EagerStage1(model, dataset, recipe, batches)
    if recipe.train.stage == 2:
        bundle = load_bundle(job["parent"])
        model = bundle.model.freeze().train()
        vectors = FrozenVectors(EmbeddingCache.open(Path(job["parent"]) / "catalogue", bundle, dataset), CPU)
        stage = EagerStage2(model, dataset, recipe, batches, vectors)
    expected = stage.backward(FIXED_STEP).loss
    written = load_file(job["out"])
    torch.testing.assert_close(written.pop("loss"), expected)
    assert int(written.pop("scores")) == stage.work.scores
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == written.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(written[name], gradient, rtol=1e-4, atol=1e-6)


def assert_met(said: dict[str, Any], rank: int, count: int) -> None:
    """Nobody waits for a process that has failed, and all go by what the first one sees."""
    alone = "a file is gone"
    assert said["refused"] == (alone if rank == 1 else f"process 1 of {count} could not begin, so this one stops too")
    assert "cannot be taken" in said["softmax"]
    assert said["answer"] is True
    assert said["waited"] is (rank > 0)
    assert "was written by the first process" in said["never"]


@pytest.mark.parametrize(
    "count, only",
    [
        pytest.param(1, ("joint", "extras", "sharded", "sharded-frozen"), id="a group of one", marks=pytest.mark.slow),
        pytest.param(2, ("joint", "half", "frozen", "sharded", "copying"), id="two"),
        pytest.param(3, (), id="three, everything", marks=pytest.mark.slow),
        pytest.param(2, (), id="two, everything", marks=pytest.mark.soak),
    ],
)
def test_several_processes_train_as_one_does(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path, count: int, only: tuple[str, ...]
) -> None:
    jobs, fixed = jobs_of(recipe_of, dataset, parent, tmp_path, only), fixed_jobs(recipe_of, dataset, parent, tmp_path)
    launch(count, [*jobs.values(), *fixed.values(), {"meet": True, "out": str(tmp_path / "met")}], tmp_path)
    for rank in range(count) if count > 1 else ():
        assert_met(json.loads((tmp_path / f"met-{rank}").read_text()), rank, count)
    for job in fixed.values():
        assert_as_alone(job, dataset)
    for name, job in jobs.items():
        expected = alone(job, tmp_path / f"{name}-alone")
        assert furthest(losses(tmp_path / name), expected) < 1e-5, name
        ours, theirs = (Record.read(tmp_path / folder / "record.json") for folder in (name, f"{name}-alone"))
        assert ours.recipe_hash == theirs.recipe_hash
        assert ours.hardware["processes"] == count
        assert ours.flops_executed == theirs.flops_executed
        assert ours.metrics["batch/loss"].value == pytest.approx(theirs.metrics["batch/loss"].value, abs=1e-4)


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_world_size(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(steps=20)
    common = {"recipe": recipe.to_values(), "dataset": str(dataset.path)}
    kinds = {"replicated": {"save_every": 5, "shard": False}, "sharded": {"save_every": 5, "shard": True}}

    def jobs(stop_at: int, **more: bool) -> list[dict[str, Any]]:
        return [
            {**common, "out": str(tmp_path / name), "options": {**options, **more}, "stop_at": stop_at}
            for name, options in kinds.items()
        ]

    launch(2, jobs(5), tmp_path)
    for name in kinds:
        assert [path.name for path in (tmp_path / name / "checkpoints").iterdir()] == ["step-00000005"]
    launch(3, jobs(10, resume=True), tmp_path)
    straight = TrainOptions(device="cpu", threads=1, save_every=5, keep_checkpoints_at_end=True)
    train(recipe, dataset, tmp_path / "alone", options=straight)
    for name in kinds:
        train(recipe, dataset, tmp_path / name, options=replace(straight, resume=True))
        assert furthest(losses(tmp_path / name), losses(tmp_path / "alone")) < 1e-5, name
        one, two = (load_file(tmp_path / run / "bundle" / "model.safetensors") for run in (name, "alone"))
        assert all(torch.allclose(one[key], two[key], atol=1e-4) for key in two), name


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    """The second process kills itself when it would save; torchrun is done long before anybody's patience ends."""
    job = {"recipe": recipe_of(steps=5000).to_values(), "dataset": str(dataset.path), "out": str(tmp_path / "run")}
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{**job, "options": {"save_every": 5}, "killed_at": 5}]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(SCRIPT), str(path)], capture_output=True, text=True, timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1 and "SIGKILL" in done.stderr, done.stderr[-3000:]
    assert time.monotonic() - began < 180
    assert not (tmp_path / "run" / "record.json").exists()
