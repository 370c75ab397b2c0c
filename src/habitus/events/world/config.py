"""What decides a synthetic world: sizes, mixture weights, shapes of the parts."""

import math
import tomllib
from operator import not_
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from habitus.errors import ConfigError
from habitus.typed import Typed

# A draw is keyed by user * 2^20 + position, which must stay below 2^63.
POSITION_BITS = 20
# An item's successors are keyed by item * 2^10 + number.
SUCCESSOR_BITS = 10
_WEIGHTS_TOLERANCE = 1e-9


Likeness = Literal["shop", "logs"]
# Knobs under which `describe --structure` finds what it finds in real logs; docs/world.md has the table.
_LIKE_LOGS: dict[str, Any] = {
    "topic_sharpness": 12.0,
    "features_tell": 0.9,
    "taste_prior": 3.0,
    "copy_window": 64,
    "copy_exponent": 0.5,
    "weights": {
        "copy_recent": 0.12,
        "item_successor": 0.04,
        "kind_successor": 0.04,
        "kind_taste": 0.05,
        "group_taste": 0.03,
        "brand_taste": 0.03,
        "popular": 0.04,
        "topic_taste": 0.40,
        "topic_recent": 0.25,
    },
}
# Larger catalogues have more kinds of items, and more of their events on few of them.
_SMALL = {"zipf_exponent": 0.78, "zipf_offset": 0.002, "num_groups": 60, "num_brands": 60, "num_topics": 32}
_LARGE = {"zipf_exponent": 0.92, "zipf_offset": 0.001, "num_groups": 120, "num_brands": 600, "num_topics": 64}
_LARGE_CATALOGUE = 50_000  # items


class MixtureWeights(Typed):
    """How much each part contributes to the next event; non-negative, summing to 1."""

    copy_recent: float = Field(0.15, ge=0, le=1, description="copying from the recent past")
    item_successor: float = Field(0.20, ge=0, le=1, description="what follows the last item itself")
    kind_successor: float = Field(0.10, ge=0, le=1, description="what follows the last item's kind")
    kind_taste: float = Field(0.40, ge=0, le=1, description="the user's urn over kinds: group and brand at once")
    group_taste: float = Field(0.05, ge=0, le=1, description="the user's urn over groups")
    brand_taste: float = Field(0.05, ge=0, le=1, description="the user's urn over brands")
    popular: float = Field(0.05, ge=0, le=1, description="global popularity")
    # Younger than worlds on disk: absent at their default, and last, so that older worlds stay as they are.
    topic_taste: float = Field(0.0, ge=0, le=1, exclude_if=not_, description="topics of all the user's items")
    topic_recent: float = Field(0.0, ge=0, le=1, exclude_if=not_, description="topics of the user's recent items")

    @model_validator(mode="after")
    def _sum_to_one(self) -> "MixtureWeights":
        total = math.fsum(self.values())
        if abs(total - 1.0) > _WEIGHTS_TOLERANCE:
            raise ValueError(f"weights sum to {total:.10g}, not to 1")
        return self

    def values(self) -> list[float]:
        """The weights in their order, which is the order of the parts everywhere."""
        return [value for _, value in self]


class WorldConfig(Typed):
    """Everything that decides a world; the table [world] of a schema.toml holds exactly this."""

    num_users: int = Field(20_000, ge=1, le=1 << 42, description="users")
    num_items: int = Field(2_000, ge=2, le=100_000_000, description="items of the catalogue")
    events_per_user: float = Field(64.0, ge=1, description="mean history length, in events")
    min_events_per_user: int = Field(5, ge=1, description="shortest history")
    max_events_per_user: int = Field(4_096, ge=1, le=1 << POSITION_BITS, description="longest history")
    length_spread: float = Field(1.0, ge=0, le=3, description="sigma of the log-normal history lengths")
    seed: int = Field(0, ge=0, lt=1 << 32, description="one seed for the whole world")

    zipf_exponent: float = Field(1.0, ge=0, le=3, description="slope of popularity against rank")
    zipf_offset: float = Field(0.001, ge=0, le=10, description="flattening of the head, as a share of the catalogue")
    num_groups: int = Field(60, ge=1, le=10_000, description="groups (the category field)")
    num_brands: int = Field(600, ge=1, le=100_000, description="brands")
    groups_per_brand: int = Field(3, ge=1, le=100, description="groups a brand makes items in, at most")

    copy_window: int = Field(16, ge=1, le=1_024, description="events back that copying reaches")
    copy_exponent: float = Field(1.5, ge=0, le=5, description="how copying fades with the lag")
    num_successors: int = Field(8, ge=1, lt=1 << SUCCESSOR_BITS, description="successors of an item or kind")
    successor_exponent: float = Field(1.0, ge=0, le=5, description="how successor weights fall")
    taste_prior: float = Field(20.0, gt=0, description="balls in an urn before the first event")

    num_topics: int = Field(
        0, ge=0, le=1_024, exclude_if=not_, description="topics that kinds belong to: the rank of low-rank taste"
    )
    topic_sharpness: float = Field(
        3.0, ge=0, le=100, exclude_if=lambda value: value == 3.0, description="how few topics a kind belongs to"
    )
    features_tell: float = Field(
        1.0, ge=0, le=1, exclude_if=lambda value: value == 1.0,
        description="share of items whose fields show their kind; the others show another one's",
    )  # fmt: skip

    views_per_purchase: float = Field(
        0.0, ge=0, le=100, exclude_if=not_,
        description="views before a purchase, on average; above 0 the other knobs speak of purchases",
    )  # fmt: skip
    view_informs: float = Field(
        0.5, ge=0, lt=1, exclude_if=lambda value: value == 0.5,
        description="share of views that show what is bought next; the others are drawn by popularity",
    )  # fmt: skip

    num_words: int = Field(1_000, ge=1, le=1_000_000, description="descriptor words of titles")
    image_dim: int = Field(16, ge=1, le=1_024, description="length of the image-like vector")
    missing_rate: float = Field(0.01, ge=0, lt=1, description="share of missing values per item field")
    span_days: int = Field(365, ge=1, le=36_500, description="days that the log covers, about")

    weights: MixtureWeights = Field(default_factory=MixtureWeights)

    @classmethod
    def like(cls, likeness: Likeness, **knobs: Any) -> "WorldConfig":
        """The defaults ('shop'), or knobs under which the world has the structure of real logs ('logs')."""
        if likeness == "shop":
            return cls.parse(knobs, "the world's knobs")
        num_items = knobs.get("num_items", cls.model_fields["num_items"].default)
        sized = _LARGE if num_items >= _LARGE_CATALOGUE else _SMALL
        return cls.parse({**_LIKE_LOGS, **sized, **knobs}, "the world's knobs")

    @classmethod
    def find(cls, path: str | Path) -> "WorldConfig":
        """The config in a folder's schema.toml, in a schema.toml, or in a file of knobs alone."""
        path = Path(path)
        path = path / "schema.toml" if path.is_dir() else path
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist", expected="a folder that 'habitus world' or 'habitus prepare' wrote"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} cannot be parsed: {error}", expected="valid TOML") from None
        if "events" in values and "world" not in values:
            raise ConfigError(f"{path} describes a log that is no synthetic world", expected="a [world] table")
        return cls.parse(values.get("world", values), str(path))

    @model_validator(mode="after")
    def _topics_exist(self) -> "WorldConfig":
        if self.num_topics == 0 and (self.weights.topic_taste or self.weights.topic_recent):
            raise ValueError("weights.topic_taste or weights.topic_recent is above 0, but num_topics = 0")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> "WorldConfig":
        low, mean, high = self.min_events_per_user, self.events_per_user, self.max_events_per_user
        if not low <= mean <= high:
            raise ValueError(
                f"events_per_user = {mean:g} is not between min_events_per_user = {low} "
                f"and max_events_per_user = {high}"
            )
        return self
