"""Two-stage training: a Recipe and a dataset in, a run folder and its Record out."""

from habitus.train.loop import train
from habitus.train.options import Progress, TrainOptions

__all__ = ["Progress", "TrainOptions", "train"]
