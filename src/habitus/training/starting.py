"""Where a run begins: at its newest checkpoint, at the state of a trunk, or at step 0; all processes at the same."""

import time
from dataclasses import dataclass
from pathlib import Path

from habitus.errors import RunError
from habitus.evaluation import Ranks
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.training.checkpoints import Checkpoint, newest_checkpoint
from habitus.training.trunk import copy_journal, find_trunk_state

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
