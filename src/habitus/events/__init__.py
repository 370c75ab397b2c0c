"""The event log: its schema, and the synthetic world with its oracle."""

from habitus.events.schema import (
    EVENT_KINDS,
    GAP,
    HOUR,
    ITEM_KINDS,
    USER_KINDS,
    WEEKDAY,
    Schema,
    TimeUnit,
    UserColumns,
    comma_numbers,
    user_field,
)
from habitus.events.targets import Targets
from habitus.events.world import Likeness, MixtureWeights, World, WorldConfig
from habitus.events.world.queries import Queries
from habitus.events.world.views import ViewQueries
from habitus.events.world.writing import WORLD_SCHEMA, schema_of, write_world

__all__ = [
    "EVENT_KINDS",
    "GAP",
    "HOUR",
    "ITEM_KINDS",
    "USER_KINDS",
    "WEEKDAY",
    "WORLD_SCHEMA",
    "Likeness",
    "MixtureWeights",
    "Queries",
    "Schema",
    "Targets",
    "TimeUnit",
    "UserColumns",
    "ViewQueries",
    "World",
    "WorldConfig",
    "comma_numbers",
    "schema_of",
    "user_field",
    "write_world",
]
