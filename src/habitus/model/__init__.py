"""The two-part model: embedder, contextualizer, the two together, and how they start."""

from habitus.model.behavior import BehaviorModel
from habitus.model.start import ParameterInfo
from habitus.model.tensors import BatchTensors, ItemTensors, batch_tensors, item_tensors

__all__ = ["BatchTensors", "BehaviorModel", "ItemTensors", "ParameterInfo", "batch_tensors", "item_tensors"]
