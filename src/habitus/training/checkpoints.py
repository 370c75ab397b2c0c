"""Checkpoints: how they are saved and verified, and from which one a run goes on.

A checkpoint is safetensors and JSON in a folder that appears complete or not at all. It also holds the files of a
bundle, so that `habitus evaluate RUN/checkpoints/step-00001000` scores it.

A run begins at its newest checkpoint, at the state of a trunk, or at step 0; all processes at the same. The trunk of
runs with schedule wsd is what they share: until they decay, runs of every length are the same run. Its folder holds the
state at the end of a stable part. A longer run begins there, and leaves its own when it comes to the end of its stable
part; so several lengths cost the longest one and the decays of the others.
"""

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import HabitusError, RunError
from habitus.evaluation import Ranks
from habitus.files import sha256_of, staged_folder, write_atomic
from habitus.model import BundleManifest
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import TrajectoryPoint
from habitus.typed import Typed, content_hash

_FORMAT_VERSION = 2
_UNSEALED_VERSION = 1  # of code that wrote no state_sha256; still read
_STATE = "state.json"
# How long a process looks for the state that the first one found: see `Ranks.barrier`.
_FOUND_WITHIN = 120.0


class BestCheckpoint(Typed):
    """The best evaluation so far of the metric that chooses a checkpoint."""

    metric: str
    value: float
    step: int


class CheckpointState(Typed):
    """state.json: where the run was. The order of data and every random draw follow from the step."""

    format_version: int = _FORMAT_VERSION
    step: int = Field(ge=0, description="Optimizer steps done; the position in the data is the same number.")
    recipe_hash: str
    dataset_checksum: str
    work: dict[str, int] = Field(description="Totals of what the steps computed.")
    trajectory: tuple[TrajectoryPoint, ...] = ()
    best: BestCheckpoint | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    threads: int | None = Field(None, description="Of the run so far, on a CPU: another number rounds differently.")
    files: dict[str, str] = Field(default_factory=dict, description="SHA-256 of the other files.")
    state_sha256: str | None = Field(None, description="Of everything else in this file.")

    def seal(self) -> "CheckpointState":
        """The same state with its checksum."""
        return self.model_copy(update={"state_sha256": self._content_sha256()})

    def check(self, path: Path) -> None:
        """Refuse a state that is not as it was saved, or that lies in the folder of another step."""
        if self.format_version not in (_FORMAT_VERSION, _UNSEALED_VERSION):
            raise RunError(
                f"{path} has format version {self.format_version}", expected=f"version {_FORMAT_VERSION} or less"
            )
        sealed = self.format_version != _UNSEALED_VERSION or self.state_sha256 is not None
        if sealed and self.state_sha256 != self._content_sha256():
            raise RunError(f"{path / _STATE} has changed since it was saved: its checksum is not that of its content")
        if path.name != _folder_name(self.step):
            raise RunError(
                f"{path / _STATE} says step {self.step:,}, which is not the step that its folder is named after"
            )
        if any(point.step > self.step for point in self.trajectory):
            raise RunError(f"{path / _STATE} says step {self.step:,} and holds evaluations of later ones")

    def _content_sha256(self) -> str:
        values = self.to_values()
        values.pop("state_sha256", None)
        return content_hash(values)


class Checkpoint(Typed):
    """A checkpoint that was read and verified."""

    model_config = Typed.model_config | {"arbitrary_types_allowed": True}

    path: Path
    state: CheckpointState
    weights: dict[str, Any]
    tensors: dict[str, Any]


def _checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / _folder_name(step)


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _step_in_name(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def save_checkpoint(
    run: Path,
    state: CheckpointState,
    weights: dict[str, Tensor],
    tensors: dict[str, Tensor],
    recipe: Recipe,
    dataset: Dataset,
) -> Path:
    """Write a checkpoint; whatever fails, earlier ones stay as they are, and no part of the new one does."""
    final = _checkpoint_folder(run, state.step)
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
            update = {"format_version": _FORMAT_VERSION, "files": files}  # the run may go on from an older checkpoint
            state.model_copy(update=update).seal().write(stage / _STATE)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint {final} could not be written: {error}",
            expected="a disk with room, and a folder that can be written to",
            next_step="make room, then run again with --resume; earlier checkpoints are as they were",
        ) from error
    return final


def _newest_checkpoint(run: Path, note: Note) -> Checkpoint | None:
    """The newest checkpoint that is intact; damaged ones are skipped and named. None where there is none at all."""
    paths = _checkpoint_paths(run)
    for path in reversed(paths):
        try:
            return _read_checkpoint(path)
        except HabitusError as error:
            note(f"{error.problem}; trying the next older checkpoint")
    if paths:
        raise RunError(
            f"none of the {len(paths)} checkpoints in {run / 'checkpoints'} is intact",
            next_step=f"remove {run / 'checkpoints'} to start again, or restore the files",
        )
    return None


def _checkpoint_paths(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, the oldest first."""
    folder = run / "checkpoints"
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def saved_threads(run: Path) -> int | None:
    """The threads that the newest checkpoint was trained with, where it says."""
    for path in reversed(_checkpoint_paths(run)):
        with contextlib.suppress(HabitusError):
            return CheckpointState.read(path / _STATE).threads
    return None


def _read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, once every file is verified."""
    state = CheckpointState.read(path / _STATE)
    state.check(path)
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


def prune_checkpoints(run: Path, keep: int, best: BestCheckpoint | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    folder, paths = run / "checkpoints", _checkpoint_paths(run)
    best_path = None if best is None else _checkpoint_folder(run, best.step)
    for path in paths[: max(0, len(paths) - keep)]:
        if path != best_path:
            shutil.rmtree(path, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


# Where a run begins ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """What may be gone on from."""

    out: Path
    recipe: Recipe
    dataset_checksum: str
    trunk: Path | None
    resume: bool
    note: Note

    def find(self, ranks: Ranks) -> Checkpoint | None:
        """The state to go on from; None at step 0. The first process decides, others look until they see the same."""
        checkpoint = None
        with ranks.together():
            if ranks.is_first:
                checkpoint = self._newest()
        agreed = ranks.number_of_first(_step_of(checkpoint))
        with ranks.together():
            if not ranks.is_first:
                checkpoint = self._of_step(agreed, ranks.rank)
        return checkpoint

    def _newest(self) -> Checkpoint | None:
        """The run's own checkpoint, or the state of the trunk where that is further."""
        own = self._own()
        if self.trunk is None:
            return own
        state = _find_trunk_state(self.trunk, self.recipe, self.dataset_checksum, self.note)
        return own if state is None or _step_of(own) >= state.state.step else state

    def _own(self) -> Checkpoint | None:
        """The run's newest checkpoint; refused where it is of another recipe or dataset."""
        checkpoint = _newest_checkpoint(self.out, self.note) if self.resume else None
        expected = self.recipe.hash(self.dataset_checksum)
        if checkpoint and checkpoint.state.recipe_hash != expected:
            raise RunError(
                f"{checkpoint.path} belongs to the run {checkpoint.state.recipe_hash[:12]}, "
                f"and this recipe on this dataset is {expected[:12]}",
                expected="the recipe and the dataset that the run was started with",
                next_step=f"see {self.out / 'recipe.toml'}, or name another folder",
            )
        if checkpoint and checkpoint.state.step > self.recipe.train.steps:
            raise RunError(
                f"{checkpoint.path} is beyond the recipe's {self.recipe.train.steps:,} steps",
                expected="checkpoints as the run saved them",
                next_step=f"remove {checkpoint.path}; the one before it is used",
            )
        return checkpoint

    def _of_step(self, step: int, rank: int) -> Checkpoint | None:
        """The state of a step, once this process sees it."""
        until = time.monotonic() + _FOUND_WITHIN
        while _step_of(checkpoint := self._newest()) != step:
            if time.monotonic() > until:
                raise RunError(
                    f"process 0 goes on from step {max(0, step):,}, and process {rank} finds step "
                    f"{max(0, _step_of(checkpoint)):,} in {self.out}",
                    expected="a folder on a file system that all processes share",
                    next_step="name a folder on shared storage with --out; see docs/cluster.md",
                )
            time.sleep(1.0)
        return checkpoint


def _step_of(checkpoint: Checkpoint | None) -> int:
    return -1 if checkpoint is None else checkpoint.state.step


def _find_trunk_state(trunk: Path, recipe: Recipe, dataset_checksum: str, note: Note) -> Checkpoint | None:
    """The newest state of the trunk that lies within the run's own stable part, as a state of that run."""
    for path in reversed(_checkpoint_paths(trunk)):
        try:
            checkpoint = _read_checkpoint(path)
            other = Recipe.read(path / "recipe.toml")
        except (HabitusError, OSError) as error:  # damaged, or removed by a longer run a moment ago
            note(f"{path} is passed over: {error.problem if isinstance(error, HabitusError) else error}")
            continue
        if other.trunk_hash(checkpoint.state.dataset_checksum) != recipe.trunk_hash(dataset_checksum):
            raise RunError(
                f"{trunk} is the trunk of another recipe or dataset",
                expected="recipes that differ in train.steps and train.decay_share alone",
                next_step="name another folder",
            )
        if checkpoint.state.step <= recipe.train.stable_steps:
            own = {"recipe_hash": recipe.hash(dataset_checksum), "best": None}
            return checkpoint.model_copy(update={"state": checkpoint.state.model_copy(update=own)})
    return None


def trunk_reaches(trunk: Path, step: int) -> bool:
    """Whether the trunk has a state at this step or a later one."""
    return any(_step_in_name(path) >= step for path in _checkpoint_paths(trunk))


def prune_trunk(trunk: Path, step: int) -> None:
    """Remove the states before a step: every run that is longer begins there."""
    for path in _checkpoint_paths(trunk):
        if _step_in_name(path) < step:
            shutil.rmtree(path, ignore_errors=True)
