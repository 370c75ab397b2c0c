"""The schema of an event log: which columns play which role, and of what kind the fields are."""

from typing import Literal, Self

from pydantic import Field, model_validator

from habitus.events.world.config import WorldConfig
from habitus.typed import Typed

Kind = Literal["text", "category", "number", "vector", "time"]
EventKind = Literal["category", "number", "time"]
TimeUnit = Literal["datetime", "s", "ms", "us", "order"]

# Event fields that every log with real times gets: how long since the user's last event, and the clock.
GAP, HOUR, WEEKDAY = "time_gap", "hour", "weekday"


class EventColumns(Typed):
    user: str = Field(description="Column that names the user.")
    item: str | tuple[str, ...] = Field(
        description="Column of the item, or [item column, event column] to predict item×value pairs."
    )
    timestamp: str = Field(description="Column of the time.")
    time_unit: TimeUnit = Field("datetime", description="'order' when the column is only a position.")
    fields: dict[str, EventKind] = Field(default_factory=dict, description="Event fields and their kinds.")

    @model_validator(mode="after")
    def _roles_are_not_fields(self) -> Self:
        if isinstance(self.item, tuple) and len(self.item) < 2:
            raise ValueError("item is a list of fewer than two columns; write one column as a plain string")
        roles = [self.user, self.item_column, *self.pair_columns, self.timestamp]
        if len(set(roles)) < len(roles):
            raise ValueError(f"user, item and timestamp must be different columns, not {roles}")
        taken = {self.user, self.item_column} & set(self.fields)
        if taken:
            raise ValueError(f"{sorted(taken)} already play a role and cannot be event fields too")
        reserved = {GAP, HOUR, WEEKDAY} & set(self.fields)
        if reserved and self.time_unit != "order":
            raise ValueError(f"{sorted(reserved)} are made from the timestamp; rename these columns")
        return self

    @property
    def item_column(self) -> str:
        return self.item if isinstance(self.item, str) else self.item[0]

    @property
    def pair_columns(self) -> tuple[str, ...]:
        """Columns that together with the item make up what is predicted; empty for plain items."""
        return () if isinstance(self.item, str) else self.item[1:]


class ItemColumns(Typed):
    item: str = Field(description="Column of the item, one row each.")
    fields: dict[str, Kind] = Field(default_factory=dict, description="Item fields and their kinds.")

    @model_validator(mode="after")
    def _some_field(self) -> Self:
        kind = self.fields.get(self.item, "category")
        if kind != "category":
            raise ValueError(f"{self.item!r} is the item's id: as an item field it can only be a category, not {kind}")
        if not self.fields:
            raise ValueError("no item fields: the embedder would have nothing to read")
        return self


class Schema(Typed):
    """Roles and kinds of an event table and an item table; the file schema.toml."""

    events: EventColumns
    items: ItemColumns
    world: WorldConfig | None = Field(
        None, description="The synthetic world behind the log; 'habitus world' writes it."
    )

    @model_validator(mode="after")
    def _pairs_do_not_hide_item_fields(self) -> Self:
        taken = set(self.events.pair_columns) & {self.items.item, *self.items.fields}
        if taken:
            raise ValueError(f"{sorted(taken)} is a column of both tables; rename it in one of them")
        return self
