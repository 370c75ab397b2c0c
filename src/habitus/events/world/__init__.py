"""A synthetic shop whose best possible prediction is known exactly."""

from habitus.events.world.config import MixtureWeights, WorldConfig
from habitus.events.world.queries import Estimate, Queries
from habitus.events.world.world import World

__all__ = ["Estimate", "MixtureWeights", "Queries", "World", "WorldConfig"]
