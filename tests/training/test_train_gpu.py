"""Captured steps on a GPU: the same numbers as steps that are not, both stages, resumed or not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from habitus.data import Dataset
from habitus.record import Record
from habitus.training import TrainOptions, train
from habitus.training.journal import read_journal
from habitus.training.prefetch import Buckets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def run_of(recipe: Any, dataset: Dataset, out: Path, **options: Any) -> tuple[Record, list[dict[str, Any]]]:
    """The Record and the journal's steps of a run on the GPU."""
    parent = options.pop("parent", None)
    record = train(recipe, dataset, out, parent=parent, options=TrainOptions(**{"device": "cuda"} | options))
    return record, [line for line in read_journal(out / "journal.jsonl") if "loss" in line]


def losses(lines: list[dict[str, Any]], name: str = "loss") -> torch.Tensor:
    return torch.tensor([line[name] for line in lines], dtype=torch.float64)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group with NCCL in which this process exchanges with itself."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage, extra_pool", [(1, "union"), (2, "union"), (2, "extras")])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_group_of_one_is_captured_and_trains_as_no_group_does(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path, group_of_one: None, stage: int,
    extra_pool: str, compiled: bool,
) -> None:  # fmt: skip
    recipe, run = recipe_of(steps=40, dropout=0.1, evaluate={"every": 15}), None
    if stage == 2:
        run = parent
        negatives = {"num_negatives": 64, "extra_pool": extra_pool, "log_q": True}
        parent_hash = Record.read(parent / "record.json").recipe_hash
        recipe = recipe_of(steps=40, stage=2, parent=parent_hash, **negatives)
    record, lines = run_of(recipe, dataset, tmp_path / "group", parent=run, compile=compiled, save_every=10)
    assert (record.hardware["engine"], record.hardware["compiled"]) == ("captured", compiled)
    _, cpu_lines = run_of(recipe, dataset, tmp_path / "cpu", parent=run, device="cpu")
    torch.testing.assert_close(losses(lines), losses(cpu_lines), rtol=2e-3, atol=0)
    # On a CPU every slot meets every slot of its window: only runs on a GPU multiply the same.
    plain, plain_lines = run_of(recipe, dataset, tmp_path / "plain", parent=run, capture=False)
    assert plain.hardware["engine"] == "eager"
    torch.testing.assert_close(losses(lines), losses(plain_lines), rtol=2e-3, atol=0)
    assert record.flops_executed == plain.flops_executed


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_group_of_one_shards_its_weights(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, group_of_one: None, optimizer: str
) -> None:
    recipe = recipe_of(steps=10, optimizer=optimizer)
    record, lines = run_of(recipe, dataset, tmp_path / "sharded", shard=True)
    assert record.hardware["engine"] == "eager"
    _, plain = run_of(recipe, dataset, tmp_path / "plain", shard=False, capture=False)
    torch.testing.assert_close(losses(lines), losses(plain), rtol=1e-5 if optimizer == "adamw" else 5e-3, atol=0)


def test_two_processes_on_one_gpu_train_as_one_does(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe_of(steps=10).write(tmp_path / "recipe.toml")
    files = [str(tmp_path / "recipe.toml"), "--data", str(dataset.path), "--out", str(tmp_path / "two")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "habitus", "train", *files, "--device", "cuda"], capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert Record.read(tmp_path / "two" / "record.json").hardware["processes"] == 2
    two = [line for line in read_journal(tmp_path / "two" / "journal.jsonl") if "loss" in line]
    _, one = run_of(recipe_of(steps=10), dataset, tmp_path / "one", capture=False)
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-4, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("log_q, compiled", [(False, True), (False, False), (True, False)])
def test_captured_steps_train_as_plain_ones_do(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, optimizer: str, log_q: bool, compiled: bool
) -> None:
    recipe = recipe_of(optimizer=optimizer, log_q=log_q)
    record, lines = run_of(recipe, dataset, tmp_path / "captured", compile=compiled)
    plain, plain_lines = run_of(recipe, dataset, tmp_path / "plain", capture=False)
    assert (record.hardware["engine"], record.hardware["compiled"]) == ("captured", compiled)
    assert plain.hardware["engine"] == "eager"
    # Muon multiplies in bfloat16, so its updates round more coarsely.
    tolerance = 2e-4 if optimizer == "adamw" else 5e-3
    torch.testing.assert_close(losses(lines), losses(plain_lines), rtol=tolerance, atol=0)
    assert abs(lines[0]["loss"] - plain_lines[0]["loss"]) < 1e-5 * lines[0]["loss"]
    assert record.flops_executed == plain.flops_executed
    assert record.events_seen == plain.events_seen
    assert record.train is not None
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision, compiled", [("fp32", True), ("fp32", False), ("bf16", True)])
def test_captured_steps_copy_too(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, stage: int, precision: str, compiled: bool
) -> None:
    copying: dict[str, Any] = {"model": {"copying": True}, "precision": precision, "log_q": True, "dropout": 0.2}
    parent = None
    recipe = recipe_of(**copying, optimizer="adamw")
    if stage == 2:
        parent = tmp_path / "parent"
        run_of(recipe, dataset, parent)
        parent_hash = Record.read(parent / "record.json").recipe_hash
        recipe = recipe_of(**copying, optimizer="adamw", stage=2, parent=parent_hash, num_negatives=64)
    record, lines = run_of(recipe, dataset, tmp_path / "captured", compile=compiled, parent=parent)
    plain, plain_lines = run_of(recipe, dataset, tmp_path / "plain", capture=False, parent=parent)
    assert (record.hardware["engine"], record.hardware["compiled"]) == ("captured", compiled)
    torch.testing.assert_close(losses(lines), losses(plain_lines), rtol=5e-4 if precision == "fp32" else 2e-2, atol=0)
    assert record.flops_executed == plain.flops_executed
    loss = record.metrics["batch/loss"].value
    assert loss == pytest.approx(plain.metrics["batch/loss"].value, rel=2e-3 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("precision, compiled", [("fp32", True), ("fp32", False), ("bf16", True)])
def test_captured_steps_drop_the_same_of_the_same_items(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, precision: str, compiled: bool
) -> None:
    knobs = {"token_dropout": 0.3, "field_dropout": 0.3, "item_dropout": 0.2, "dropout": 0.2}
    recipe = recipe_of(optimizer="adamw", precision=precision, **knobs)
    record, lines = run_of(recipe, dataset, tmp_path / "captured", compile=compiled)
    _, plain = run_of(recipe, dataset, tmp_path / "plain", capture=False)
    assert (record.hardware["engine"], record.hardware["compiled"]) == ("captured", compiled)
    torch.testing.assert_close(losses(lines), losses(plain), rtol=5e-4 if precision == "fp32" else 2e-2, atol=0)
    _, on_cpu = run_of(recipe, dataset, tmp_path / "cpu", device="cpu")
    torch.testing.assert_close(losses(lines), losses(on_cpu), rtol=2e-3 if precision == "fp32" else 2e-2, atol=0)


def test_a_share_of_the_users_lives_on_the_device(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(optimizer="adamw", log_q=True)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"user_share": 0.25, "user_part": 2})})
    record, lines = run_of(recipe, dataset, tmp_path / "captured")
    on_cpu, cpu_lines = run_of(recipe, dataset, tmp_path / "cpu", device="cpu")
    assert record.hardware["engine"] == "captured"
    assert (record.unique_events, record.epochs) == (on_cpu.unique_events, on_cpu.epochs)
    torch.testing.assert_close(losses(lines), losses(cpu_lines), rtol=1e-3, atol=0)


def test_a_gpu_trains_as_a_cpu_does(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    _, lines = run_of(recipe_of(), dataset, tmp_path / "cuda")
    _, on_cpu = run_of(recipe_of(), dataset, tmp_path / "cpu", device="cpu")
    torch.testing.assert_close(losses(lines), losses(on_cpu), rtol=1e-3, atol=0)


def test_bfloat16_stays_near_float32(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    _, half = run_of(recipe_of(precision="bf16"), dataset, tmp_path / "half")
    _, full = run_of(recipe_of(), dataset, tmp_path / "full")
    torch.testing.assert_close(losses(half), losses(full), rtol=2e-2, atol=0)


@pytest.mark.parametrize("joint_dim", [28, 240, 256, 264])
@pytest.mark.parametrize("log_q", [False, True])
def test_vectors_of_odd_sizes_and_around_the_widest_that_fused_attention_takes(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, joint_dim: int, log_q: bool
) -> None:
    recipe = recipe_of(model={"joint_dim": joint_dim, "width": 256, "head_dim": 32}, log_q=log_q, precision="bf16")
    record, lines = run_of(recipe, dataset, tmp_path / "captured")
    _, plain = run_of(recipe, dataset, tmp_path / "plain", capture=False)
    assert record.status == "done" and record.hardware["engine"] == "captured"
    torch.testing.assert_close(losses(lines), losses(plain), rtol=2e-2, atol=0)


@pytest.mark.parametrize("num_negatives, extra_pool", [(0, "union"), (64, "union"), (64, "extras"), (300, "union")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_2_is_captured_too(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path, num_negatives: int,
    extra_pool: str, precision: str,
) -> None:  # fmt: skip
    if precision == "bf16":
        parent = tmp_path / "parent"
        run_of(recipe_of(precision="bf16"), dataset, parent)
    recipe = recipe_of(
        stage=2, parent=Record.read(parent / "record.json").recipe_hash, num_negatives=num_negatives,
        extra_pool=extra_pool, precision=precision,
    )  # fmt: skip
    record, lines = run_of(recipe, dataset, tmp_path / "captured", parent=parent)
    plain, plain_lines = run_of(recipe, dataset, tmp_path / "plain", parent=parent, capture=False)
    assert record.hardware["engine"] == "captured"
    tolerance = 2e-4 if precision == "fp32" else 2e-2
    for name in ("loss", "in_batch_loss", *(["extra_loss"] if num_negatives else [])):
        torch.testing.assert_close(losses(lines, name), losses(plain_lines, name), rtol=tolerance, atol=0)
    assert record.flops_executed == plain.flops_executed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, precision: str
) -> None:
    recipe = recipe_of(precision=precision)
    options: dict[str, Any] = {"deterministic": True, "save_every": 8, "keep": 9, "keep_checkpoints_at_end": True}
    straight, _ = run_of(recipe, dataset, tmp_path / "straight", **options)

    class EnoughError(Exception):
        pass

    def give_up(step: int) -> None:
        if step == 16:
            raise EnoughError

    with pytest.raises(EnoughError):
        train(recipe, dataset, tmp_path / "halved", options=TrainOptions(device="cuda", **options), on_save=give_up)
    resumed, lines = run_of(recipe, dataset, tmp_path / "halved", resume=True, **options)
    assert [line["step"] for line in lines] == list(range(24))
    for name in ("model", "optimizer"):
        file = f"checkpoints/step-00000024/{name}.safetensors"
        assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "halved" / file).read_bytes(), name
    assert straight.train == resumed.train
    assert straight.metrics == resumed.metrics


def test_a_branch_of_a_trunk_ends_with_the_bits_of_a_run_alone(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    wsd: dict[str, Any] = {"schedule": "wsd", "warmup_steps": 3, "dropout": 0.1, "item_dropout": 0.1}
    for steps in (20, 40):
        recipe = recipe_of(steps=steps, **wsd)
        alone, _ = run_of(recipe, dataset, tmp_path / f"alone-{steps}", deterministic=True)
        branch, lines = run_of(
            recipe, dataset, tmp_path / f"branch-{steps}", deterministic=True, trunk=tmp_path / "trunk"
        )
        assert branch.hardware["engine"] == "captured"
        assert [line["step"] for line in lines] == list(range(steps))
        assert (branch.train, branch.metrics) == (alone.train, alone.metrics)
        one, two = (tmp_path / f"{run}-{steps}" / "bundle" / "model.safetensors" for run in ("alone", "branch"))
        assert one.read_bytes() == two.read_bytes()


def test_a_batch_that_overflows_goes_to_the_next_bucket(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = run_of(recipe_of(), dataset, tmp_path / "fitted")
    # Buckets that hold half a batch: every step overflows twice, and nothing is lost.
    monkeypatch.setattr(Buckets, "fitted", lambda sizes, a, b: Buckets(64, sizes[0][1] // 2, a, b))
    record, tight = run_of(recipe_of(), dataset, tmp_path / "tight")
    assert record.hardware["engine"] == "captured"
    torch.testing.assert_close(losses(tight), losses(lines), rtol=2e-4, atol=0)


def test_a_loss_that_is_not_finite_ends_in_a_failed_record(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    record, _ = run_of(recipe_of(learning_rate=1e30, warmup=0.0, clip=1e30), dataset, tmp_path / "run")
    assert record.status == "failed"
    assert record.reason is not None
    assert "step" in record.reason
    assert "learning rate" in record.reason
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "bundle").exists()


def test_evaluation_within_a_captured_run_changes_nothing(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    _, lines = run_of(recipe_of(), dataset, tmp_path / "plain")
    record, watched = run_of(recipe_of(evaluate={"every": 5}), dataset, tmp_path / "watched")
    assert sorted({point.step for point in record.trajectory}) == [5, 10, 15, 20, 24]
    torch.testing.assert_close(losses(watched), losses(lines), rtol=1e-6, atol=0)
