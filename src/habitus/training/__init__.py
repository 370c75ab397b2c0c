"""Two-stage training: a Recipe and a dataset in, a run folder and its Record out."""

from habitus.training.device_batches import keep_events_on_device
from habitus.training.journal import TrainingProgress
from habitus.training.loop import train
from habitus.training.options import TrainOptions, check_best, check_recipe, continuing_recipe

__all__ = [
    "TrainOptions",
    "TrainingProgress",
    "check_best",
    "check_recipe",
    "continuing_recipe",
    "keep_events_on_device",
    "train",
]
