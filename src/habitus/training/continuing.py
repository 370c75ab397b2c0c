"""A recipe for going on with a run when its log has grown, where none is given.

A quarter of the peak rate for three tenths of the steps, by what was measured (docs/guides/tomorrow.md): at the full
rate a model first loses what it knew, at a tenth it hardly moves, and a tenth of the steps bring nothing.
"""

from pathlib import Path

from habitus.errors import ConfigError
from habitus.recipe import Recipe
from habitus.record import Record

RATE_SHARE, STEP_SHARE = 0.25, 0.3


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
