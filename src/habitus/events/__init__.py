"""The event log: its schema, and the synthetic world with its oracle."""

from habitus.events.schema import GAP, HOUR, WEEKDAY, EventKind, Kind, Schema, TimeUnit
from habitus.events.world import MixtureWeights, World, WorldConfig
from habitus.events.world.queries import Queries
from habitus.events.world.writing import WORLD_SCHEMA, schema_of, write_world

__all__ = [
    "GAP",
    "HOUR",
    "WEEKDAY",
    "WORLD_SCHEMA",
    "EventKind",
    "Kind",
    "MixtureWeights",
    "Queries",
    "Schema",
    "TimeUnit",
    "World",
    "WorldConfig",
    "schema_of",
    "write_world",
]
