"""Runs of several lengths from one trunk: the same bits as each of them alone."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.record import Record
from habitus.training import TrainOptions, train
from habitus.training.journal import read_journal

ONE = TrainOptions(device="cpu", threads=1)
WSD: dict[str, Any] = {
    "schedule": "wsd", "warmup_steps": 3, "dropout": 0.1, "item_dropout": 0.1, "log_q": True, "batch_sequences": 4,
    "evaluate": {"every": 7, "queries": 50},
}  # fmt: skip


def same(one: Record, other: Record) -> bool:
    """Whether two Records agree in everything but times."""
    times = ("seconds", "throughput", "memory")
    return one.model_dump(exclude=set(times)) == other.model_dump(exclude=set(times))


def weights(run: Path) -> bytes:
    return (run / "bundle" / "model.safetensors").read_bytes()


def states(trunk: Path) -> list[str]:
    return sorted(path.name for path in (trunk / "checkpoints").iterdir())


def test_a_branch_of_the_trunk_is_the_run_trained_alone_to_the_bit(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    options = replace(ONE, trunk=str(tmp_path / "trunk"))  # as Python's users may give it
    begun: dict[int, int] = {}
    for steps, share in ((10, 0.2), (20, 0.2), (25, 0.4), (30, 0.2)):
        recipe = recipe_of(steps=steps, decay_share=share, **WSD)
        alone = train(recipe, dataset, tmp_path / f"alone-{steps}", options=ONE)
        notes: list[str] = []
        branch = train(recipe, dataset, tmp_path / f"branch-{steps}", options=options, note=notes.append)
        begun[steps] = next((int(text.rpartition("step ")[2]) for text in notes if "going on" in text), 0)
        assert same(branch, alone)
        assert weights(tmp_path / f"branch-{steps}") == weights(tmp_path / f"alone-{steps}")
        journals = [read_journal(tmp_path / f"{name}-{steps}" / "journal.jsonl") for name in ("branch", "alone")]
        assert journals[0] == journals[1]
    # 25 steps with a decay of 10 are stable for 15: less than the trunk's 16, so they are trained from the beginning.
    assert begun == {10: 0, 20: 8, 25: 0, 30: 16}
    assert states(tmp_path / "trunk") == ["step-00000024"]


def test_a_shorter_run_leaves_the_trunk_as_it_is_and_a_resumed_one_prefers_what_is_further(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    options = replace(ONE, trunk=tmp_path / "trunk")
    train(recipe_of(steps=20, **WSD), dataset, tmp_path / "long", options=options)
    train(recipe_of(steps=10, **WSD), dataset, tmp_path / "short", options=options)
    assert states(tmp_path / "trunk") == ["step-00000016"]
    alone = train(recipe_of(steps=30, **WSD), dataset, tmp_path / "alone", options=ONE)

    def fence(step: int) -> None:
        if step > 21:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(
            recipe_of(steps=30, **WSD), dataset, tmp_path / "run", options=replace(options, save_every=7), on_save=fence
        )
    notes: list[str] = []
    resumed = train(
        recipe_of(steps=30, **WSD), dataset, tmp_path / "run", options=replace(options, resume=True), note=notes.append
    )
    assert any("step-00000021 at step 21" in text for text in notes)
    assert same(resumed, alone)
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")


def test_a_run_that_ends_before_its_first_checkpoint_begins_at_the_trunk_again(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Its journal, which it took from the trunk, is then that of a run trained alone."""
    options, recipe = replace(ONE, trunk=tmp_path / "trunk"), recipe_of(steps=30, **WSD)
    train(recipe_of(steps=20, **WSD), dataset, tmp_path / "shorter", options=options)
    train(recipe, dataset, tmp_path / "alone", options=ONE)

    def fence(step: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train(recipe, dataset, tmp_path / "run", options=options, on_save=fence)
    assert not (tmp_path / "run" / "checkpoints").exists()
    train(recipe, dataset, tmp_path / "run", options=replace(options, resume=True))
    journals = [read_journal(tmp_path / name / "journal.jsonl") for name in ("run", "alone")]
    assert journals[0] == journals[1]
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")


def test_trunks_of_other_recipes_and_other_schedules_are_refused_and_damaged_ones_passed_over(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    options = replace(ONE, trunk=tmp_path / "trunk")
    with pytest.raises(ConfigError, match="schedule 'cosine'"):
        train(recipe_of(steps=4), dataset, tmp_path / "cosine", options=options)
    first = train(recipe_of(steps=10, **WSD), dataset, tmp_path / "first", options=options)
    for number, change in enumerate(({"seed": 1}, {"learning_rate": 1e-3}, {"dropout": 0.2}, {"warmup_steps": 2})):
        with pytest.raises(RunError, match="trunk of another recipe or dataset"):
            train(recipe_of(**{"steps": 20, **WSD, **change}), dataset, tmp_path / f"other-{number}", options=options)
    damaged = tmp_path / "trunk" / "checkpoints" / "step-00000008" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    notes: list[str] = []
    again = train(recipe_of(steps=10, **WSD), dataset, tmp_path / "again", options=options, note=notes.append)
    assert any("passed over" in text and "model.safetensors" in text for text in notes)
    assert same(again, first)
    shutil.rmtree(tmp_path / "trunk")
    assert same(train(recipe_of(steps=10, **WSD), dataset, tmp_path / "fresh", options=options), first)


def test_recipes_of_one_trunk_differ_in_their_length_alone(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    base = recipe_of(steps=20, **WSD)
    trunk = base.trunk_hash(dataset.checksum)
    assert recipe_of(steps=90, decay_share=0.1, **WSD).trunk_hash(dataset.checksum) == trunk
    others = [recipe_of(**{"steps": 20, **WSD, **change}) for change in ({"seed": 1}, {"batch_sequences": 8})]
    others.append(base.model_copy(update={"data": base.data.model_copy(update={"user_share": 0.5})}))
    assert len({trunk, *(other.trunk_hash(dataset.checksum) for other in others)}) == 4
    assert base.trunk_hash("another") != trunk
