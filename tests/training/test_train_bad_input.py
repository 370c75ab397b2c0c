"""What cannot be trained is refused by name, before anything is lost."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.errors import ConfigError, DataError, HabitusError, ModelError, RunError
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.files import sha256_of
from habitus.record import Record
from habitus.training import TrainOptions, train
from habitus.training.checkpoints import CheckpointState

ONE = TrainOptions(device="cpu", threads=1)
SAVING = TrainOptions(device="cpu", threads=1, save_every=4, keep=9, keep_checkpoints_at_end=True)
RESUMING = TrainOptions(device="cpu", threads=1, save_every=4, keep=9, keep_checkpoints_at_end=True, resume=True)


class StopHereError(Exception):
    """Raised by the tests' fence."""


@pytest.fixture
def halved(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> Path:
    """A run of 12 steps that was abandoned after its checkpoints at steps 4 and 8."""

    def fence(step: int) -> None:
        if step > 8:
            raise StopHereError

    with pytest.raises(StopHereError):
        train(recipe_of(steps=12), dataset, tmp_path / "halved", options=SAVING, on_save=fence)
    return tmp_path / "halved"


def bundle_of(run: Path) -> bytes:
    return (run / "bundle" / "model.safetensors").read_bytes()


def test_recipes_for_another_dataset_are_refused(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="stores 6"):
        train(recipe_of(model={"text_len": 24}), dataset, tmp_path / "run", options=ONE)
    assert not (tmp_path / "run").exists()


def test_more_negatives_than_items_are_refused(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path
) -> None:
    parent_hash = Record.read(parent / "record.json").recipe_hash
    with pytest.raises(ConfigError, match=r"301, and the catalogue has 300 items"):
        train(recipe_of(stage=2, parent=parent_hash, num_negatives=301), dataset, tmp_path / "run", parent=parent)


@pytest.mark.parametrize("share, message", [(1e-9, "no validation windows"), (1 - 1e-9, "no training windows")])
def test_an_empty_split_is_refused(recipe_of: Callable[..., Any], tmp_path: Path, share: float, message: str) -> None:
    world = World(WorldConfig(num_users=20, num_items=50, events_per_user=12))
    options = PrepareOptions(
        seq_len=32, text_len=6, vocabulary_size=300, validation_share=share, test_share=0, threads=1
    )
    schema = WORLD_SCHEMA.model_copy(update={"world": world.config})
    prepare_world(world, schema, tmp_path / "dataset", options, lambda *_: None)
    with pytest.raises(DataError, match=message):
        train(recipe_of(), Dataset.open(tmp_path / "dataset"), tmp_path / "run", options=ONE)


def test_parents_that_do_not_fit_are_refused(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path
) -> None:
    parent_hash = Record.read(parent / "record.json").recipe_hash
    cases: list[tuple[Any, Path | None, type[HabitusError], str]] = [
        (recipe_of(stage=2, parent=parent_hash), None, ConfigError, "--from"),
        (recipe_of(stage=2, parent=parent_hash), tmp_path, RunError, "holds no record.json"),
        (recipe_of(stage=2, parent="0" * 64), parent, ConfigError, "continues 000000000000"),
        (recipe_of(stage=2, parent=parent_hash, model={"width": 64}), parent, ConfigError, "width 32 there, 64 here"),
        (recipe_of(stage=2, parent=parent_hash, precision="bf16"), parent, ConfigError, "precision bf16"),
        (recipe_of(), parent, ConfigError, "the recipe names no parent"),
        (recipe_of(parent=parent_hash), None, ConfigError, "--from"),
        (recipe_of(parent="0" * 64), parent, ConfigError, "continues 000000000000"),
        (recipe_of(parent=parent_hash, model={"depth": 3}), parent, ConfigError, "depth 2 there, 3 here"),
    ]
    for recipe, folder, kind, message in cases:
        with pytest.raises(kind, match=message):
            train(recipe, dataset, tmp_path / "run", parent=folder, options=ONE)
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_used_are_refused(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    for out in (tmp_path / "file", Path("/proc/habitus-run")):
        with pytest.raises(RunError, match="cannot be written to"):
            train(recipe_of(), dataset, out, options=ONE)
    with pytest.raises(RunError, match=r"holds a run already \(checkpoints\)"):
        train(recipe_of(steps=12), dataset, halved, options=ONE)


def test_options_that_mean_nothing_are_refused(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    for name, value in (("keep", 0), ("accumulate", 0), ("save_every", -1), ("threads", 0)):
        with pytest.raises(ConfigError, match=name):
            train(recipe_of(), dataset, tmp_path / "run", options=TrainOptions(**{name: value}))
    with pytest.raises(ConfigError, match="the device is not a GPU"):
        train(recipe_of(), dataset, tmp_path / "run", options=TrainOptions(device="cpu", compile=True))


def test_a_checkpoint_of_another_recipe_is_refused(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path
) -> None:
    with pytest.raises(RunError, match="belongs to the run"):
        train(recipe_of(steps=12, seed=5), dataset, halved, options=RESUMING)


def test_weights_of_another_shape_are_refused(dataset: Dataset, recipe_of: Callable[..., Any], halved: Path) -> None:
    for path in (halved / "checkpoints").iterdir():
        weights = load_file(path / "model.safetensors")
        weights["contextualizer.input.weight"] = torch.zeros(3, 3)
        save_file(weights, path / "model.safetensors")
        state = CheckpointState.read(path / "state.json")
        files = state.files | {"model.safetensors": sha256_of(path / "model.safetensors")}
        state.model_copy(update={"files": files}).seal().write(path / "state.json")
    with pytest.raises(ModelError, match="does not fit the recipe's model"):
        train(recipe_of(steps=12), dataset, halved, options=RESUMING)


@pytest.mark.parametrize("damage", ["flip a byte", "cut it short", "remove the state", "pickle"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path, tmp_path: Path, damage: str
) -> None:
    newest = halved / "checkpoints" / "step-00000008"
    file = newest / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip a byte":
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "cut it short":
        file.write_bytes(content[:-100])
    elif damage == "remove the state":
        (newest / "state.json").unlink()
    else:
        torch.save({"weights": torch.zeros(3)}, file)
    notes: list[str] = []
    train(recipe_of(steps=12), dataset, halved, options=RESUMING, note=notes.append)
    assert "step-00000008" in notes[0]
    assert "next older checkpoint" in notes[0]
    assert "step-00000004 at step 4" in notes[1]
    train(recipe_of(steps=12), dataset, tmp_path / "straight", options=ONE)
    assert bundle_of(halved) == bundle_of(tmp_path / "straight")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "edit",
    [{"step": 11}, {"step": -5}, {"step": 4}, {"trajectory": [{"step": 11, "metric": "batch/loss", "value": 1.0}]}],
)
def test_a_state_that_was_edited_gives_way_to_the_checkpoint_before(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path, tmp_path: Path, edit: dict[str, Any], version: int
) -> None:
    edit_state(halved / "checkpoints" / "step-00000008", version, edit)
    notes: list[str] = []
    record = train(recipe_of(steps=12), dataset, halved, options=RESUMING, note=notes.append)
    assert "step-00000008" in notes[0] and "next older checkpoint" in notes[0]
    assert "step-00000004 at step 4" in notes[1]
    straight = train(recipe_of(steps=12), dataset, tmp_path / "straight", options=ONE)
    assert (record.metrics, record.trajectory) == (straight.metrics, straight.trajectory)


@pytest.mark.parametrize("edit", [{"work": {"items": 1}}, {"seconds": {"train": 1e9}}, {"state_sha256": None}])
def test_the_whole_state_is_sealed(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path, edit: dict[str, Any]
) -> None:
    edit_state(halved / "checkpoints" / "step-00000008", 2, edit)
    notes: list[str] = []
    train(recipe_of(steps=12), dataset, halved, options=RESUMING, note=notes.append)
    assert "step-00000008/state.json has changed since it was saved" in notes[0]


def edit_state(checkpoint: Path, version: int, edit: dict[str, Any]) -> None:
    """Change state.json by hand; version 1 is that of code that sealed nothing."""
    values = json.loads((checkpoint / "state.json").read_text())
    if version == 1:
        del values["state_sha256"]
    values = values | {"format_version": version} | edit
    (checkpoint / "state.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_a_checkpoint_of_an_earlier_version_is_resumed(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path
) -> None:
    edit_state(halved / "checkpoints" / "step-00000008", 1, {})
    notes: list[str] = []
    train(recipe_of(steps=12), dataset, halved, options=RESUMING, note=notes.append)
    assert "step-00000008 at step 8" in notes[0]
    state = CheckpointState.read(halved / "checkpoints" / "step-00000012" / "state.json")
    assert state.format_version == 2 and state.state_sha256 is not None


def test_without_one_whole_checkpoint_a_run_is_not_resumed(
    dataset: Dataset, recipe_of: Callable[..., Any], halved: Path
) -> None:
    for path in (halved / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match="none of the 2 checkpoints"):
        train(recipe_of(steps=12), dataset, halved, options=RESUMING)


def test_a_disk_that_fills_up_while_saving_loses_nothing(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int) -> None:
        if step == 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, before[1]))

    try:
        with pytest.raises(RunError, match=r"step-00000008 could not be written") as error:
            train(recipe_of(steps=12), dataset, out, options=SAVING, on_save=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "--resume" in error.value.next_step
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000004"]
    train(recipe_of(steps=12), dataset, out, options=RESUMING)
    train(recipe_of(steps=12), dataset, tmp_path / "straight", options=ONE)
    assert bundle_of(out) == bundle_of(tmp_path / "straight")


def test_a_run_that_is_done_is_not_overwritten_by_another(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(parent, copy)
    with pytest.raises(RunError, match="holds the finished run"):
        train(recipe_of(), dataset, copy, options=RESUMING)
    assert bundle_of(copy) == bundle_of(parent)
