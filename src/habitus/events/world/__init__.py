"""A synthetic shop whose best possible prediction is known exactly."""

from habitus.events.world.config import Likeness, MixtureWeights, WorldConfig
from habitus.events.world.queries import Estimate, Queries
from habitus.events.world.world import World

__all__ = ["Estimate", "Likeness", "MixtureWeights", "Queries", "World", "WorldConfig"]
