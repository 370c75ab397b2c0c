"""Two-stage training: a Recipe and a dataset in, a run folder and its Record out."""

from habitus.training.checks import check_recipe
from habitus.training.loop import train
from habitus.training.options import Progress, TrainOptions
from habitus.training.resident import events_kept

__all__ = [
    "Progress",
    "TrainOptions",
    "check_recipe",
    "events_kept",
    "train",
]
