"""Checkpoints: safetensors and JSON in a folder that appears whole; checked before anything is taken from it.

A checkpoint also holds the files of a bundle, so that `habitus evaluate RUN/checkpoints/step-00001000` scores it.
"""

import shutil
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import HabitusError, RunError
from habitus.files import sha256_of, staged_folder, write_atomic
from habitus.model import BundleManifest
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import TrajectoryPoint
from habitus.typed import Typed

FORMAT_VERSION = 1
_STATE = "state.json"


class Best(Typed):
    """The best evaluation so far of the metric that chooses a checkpoint."""

    metric: str
    value: float
    step: int


class State(Typed):
    """state.json: where the run was. The order of data and every random draw follow from the step."""

    format_version: int = FORMAT_VERSION
    step: int = Field(description="Optimizer steps done; the position in the data is the same number.")
    recipe_hash: str
    dataset_checksum: str
    work: dict[str, int] = Field(description="Totals of what the steps computed.")
    trajectory: tuple[TrajectoryPoint, ...] = ()
    best: Best | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict, description="SHA-256 of the other files.")


class Checkpoint(Typed):
    """A checkpoint that was read and found whole."""

    model_config = Typed.model_config | {"arbitrary_types_allowed": True}

    path: Path
    state: State
    weights: dict[str, Any]
    tensors: dict[str, Any]


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    run: Path, state: State, weights: dict[str, Tensor], tensors: dict[str, Tensor], recipe: Recipe, dataset: Dataset
) -> Path:
    """Write a checkpoint; whatever fails, what was there before stays, and no part of the new one does."""
    final = checkpoint_folder(run, state.step)
    if final.exists():  # of a run that went on from an older one: the same numbers, or damaged ones
        shutil.rmtree(final)
    try:
        with staged_folder(final) as stage:
            save_file({name: _on_host(tensor) for name, tensor in weights.items()}, stage / "model.safetensors")
            save_file({name: _on_host(tensor) for name, tensor in tensors.items()}, stage / "optimizer.safetensors")
            recipe.write(stage / "recipe.toml")
            for name in ("model.safetensors", "optimizer.safetensors"):
                shutil.copymode(stage / "recipe.toml", stage / name)
            for name in ("schema.toml", "encoders.json", "tokenizer.json"):
                if (dataset.path / name).exists():
                    write_atomic(stage / name, (dataset.path / name).read_bytes())
            files = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
            bundle = {name: sha256 for name, sha256 in files.items() if name != "optimizer.safetensors"}
            BundleManifest(dataset_checksum=dataset.checksum, files=bundle).write(stage / "bundle.json")
            state.model_copy(update={"files": files}).write(stage / _STATE)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint {final} could not be written: {error}",
            expected="a disk with room, and a folder that can be written to",
            next_step="make room, then run again with --resume; earlier checkpoints are as they were",
        ) from error
    return final


def newest_good(run: Path, note: Note) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are passed over and named. None where there is none at all."""
    folder = run / "checkpoints"
    names = sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True) if folder.is_dir() else []
    for path in names:
        try:
            return read_checkpoint(path)
        except HabitusError as error:
            note(f"{error.problem}; the next older checkpoint is tried")
    if names:
        raise RunError(
            f"none of the {len(names)} checkpoints in {folder} is whole",
            next_step=f"remove {folder} to start again, or bring the files back",
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, once every file is known to be as it was written."""
    state = State.read(path / _STATE)
    if state.format_version != FORMAT_VERSION:
        raise RunError(f"{path} has format version {state.format_version}", expected=f"version {FORMAT_VERSION}")
    for name in ("model.safetensors", "optimizer.safetensors"):
        if name not in state.files or not (path / name).exists():
            raise RunError(f"{path / name} is missing")
        if sha256_of(path / name) != state.files[name]:
            raise RunError(f"{path / name} is cut short or has changed: its checksum is not the one in {_STATE}")
    try:
        weights, tensors = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    except SafetensorError as error:
        raise RunError(f"{path} holds no safetensors: {error}") from error
    return Checkpoint(path=path, state=state, weights=weights, tensors=tensors)


def prune(run: Path, keep: int, best: Best | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    folder = run / "checkpoints"
    held = sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []
    spared = None if best is None else checkpoint_folder(run, best.step)
    for path in held[: max(0, len(held) - keep)]:
        if path != spared:
            shutil.rmtree(path, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
