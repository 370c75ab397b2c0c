"""Where a run begins: at its newest checkpoint, at the state of a trunk, or at step 0; all processes at the same.

The trunk of runs with schedule wsd is what they share: until they decay, runs of every length are the same run. Its
folder holds the state at the end of a stable part. A longer run begins there, and leaves its own when it comes to the
end of its stable part; so several lengths cost the longest one and the decays of the others.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from habitus.errors import ConfigError, HabitusError, RunError
from habitus.evaluation import Ranks
from habitus.files import write_atomic
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.training.checkpoints import Checkpoint, checkpoint_paths, newest_checkpoint, read_checkpoint

_JOURNAL = "journal.jsonl"
# Going on with a run whose log has grown, by what was measured (docs/guides/tomorrow.md): at the full rate a model
# first loses what it knew, at a tenth it hardly moves, and a tenth of the steps bring nothing.
RATE_SHARE, STEP_SHARE = 0.25, 0.3
# How long a process looks for the state that the first one found: see `Ranks.barrier`.
_FOUND_WITHIN = 120.0


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
        begins_with_trunk = self.trunk is not None and checkpoint and checkpoint.path.is_relative_to(self.trunk)
        if begins_with_trunk and ranks.is_first:
            assert self.trunk is not None
            copy_journal(self.trunk, self.out)
        return checkpoint

    def _newest(self) -> Checkpoint | None:
        """The run's own checkpoint, or the state of the trunk where that is further."""
        own = self._own()
        if self.trunk is None:
            return own
        state = find_trunk_state(self.trunk, self.recipe, self.dataset_checksum, self.note)
        return own if state is None or _step_of(own) >= state.state.step else state

    def _own(self) -> Checkpoint | None:
        """The run's newest checkpoint; refused where it is of another recipe or dataset."""
        checkpoint = newest_checkpoint(self.out, self.note) if self.resume else None
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


# The trunk ------------------------------------------------------------------------------------------------------------


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
    return any(_step_in_name(path) >= step for path in checkpoint_paths(trunk))


def copy_journal(source: Path, target: Path) -> None:
    """Copy a journal where there is one; lines of later steps are dropped when it is opened."""
    if (source / _JOURNAL).exists():
        write_atomic(target / _JOURNAL, (source / _JOURNAL).read_bytes())


def prune_trunk(trunk: Path, step: int) -> None:
    """Remove the states before a step: every run that is longer begins there."""
    for path in checkpoint_paths(trunk):
        if _step_in_name(path) < step:
            shutil.rmtree(path, ignore_errors=True)


def _step_in_name(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# A log that has grown -------------------------------------------------------------------------------------------------


def continuing_recipe(record: Record, run: Path) -> Recipe:
    """The recipe of a stage-1 run, for as long and at such a rate as continuing it takes."""
    train = record.recipe.train
    if train.stage != 1:
        raise ConfigError(
            f"{run} is a run of stage 2, whose rate and steps are not those of both parts",
            expected="a stage-1 run to continue, or a recipe",
            next_step="name the stage-1 run before it: stage1, or refit-stage1",
        )
    changes = {
        "parent": record.recipe_hash,
        "steps": max(1, round(STEP_SHARE * train.steps)),
        "learning_rate": RATE_SHARE * train.learning_rate,
        "schedule": "cosine",
        "warmup_steps": None,
    }
    return record.recipe.model_copy(update={"train": train.model_copy(update=changes)})
