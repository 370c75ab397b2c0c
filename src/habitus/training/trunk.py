"""The trunk of runs with schedule wsd: until they decay, runs of every length are the same run.

A folder holds the state at the end of a stable part. A longer run begins there, and leaves its own when it comes to the
end of its stable part; so several lengths cost the longest one and the decays of the others.
"""

import shutil
from pathlib import Path

from habitus.errors import ConfigError, HabitusError, RunError
from habitus.files import write_atomic
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.training.checkpoints import Checkpoint, checkpoint_paths, read_checkpoint

_JOURNAL = "journal.jsonl"


def check_trunk(recipe: Recipe, trunk: str | Path | None) -> None:
    """Refuse a trunk for a run that has none."""
    if trunk is not None and recipe.train.schedule != "wsd":
        raise ConfigError(
            f"the trunk {trunk} was given to a run with schedule {recipe.train.schedule!r}",
            expected="train.schedule = 'wsd': others decay from the beginning, or never",
        )


def find_trunk_state(trunk: Path, recipe: Recipe, dataset_checksum: str, note: Note) -> Checkpoint | None:
    """The newest state of the trunk that lies within the run's own stable part, as a state of that run."""
    for path in reversed(checkpoint_paths(trunk)):
        try:
            checkpoint = read_checkpoint(path)
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


def reaches(trunk: Path, step: int) -> bool:
    """Whether the trunk has a state at this step or a later one."""
    return any(_step_of(path) >= step for path in checkpoint_paths(trunk))


def copy_journal(source: Path, target: Path) -> None:
    """Copy a journal where there is one; lines of later steps are dropped when it is opened."""
    if (source / _JOURNAL).exists():
        write_atomic(target / _JOURNAL, (source / _JOURNAL).read_bytes())


def prune_trunk(trunk: Path, step: int) -> None:
    """Remove the states before a step: every run that is longer begins there."""
    for path in checkpoint_paths(trunk):
        if _step_of(path) < step:
            shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
