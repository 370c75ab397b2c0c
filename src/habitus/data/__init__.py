"""The prepared dataset: catalogue, encoders, windows, batches."""

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.dataset import Dataset
from habitus.data.fields import Field, Fields
from habitus.data.prepare import PrepareOptions, prepare

__all__ = ["Batch", "Dataset", "Field", "Fields", "ItemFeatures", "PrepareOptions", "prepare"]
