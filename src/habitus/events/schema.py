"""The schema of an event log: which columns play which role, and of what kind the fields are."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from habitus.events.targets import Targets
from habitus.events.world.config import WorldConfig
from habitus.typed import InlineTable, Typed, suggest_name, to_toml

_FORMAT_LETTERS = "aAdbBmyYHIpMSf%"  # of strptime, those that Python and DuckDB read alike

# What a schema may call a field. `habitus.data.kinds` says what each of them means.
ITEM_KINDS = ("text", "category", "categories", "number", "vector", "time")
USER_KINDS = ("category", "number", "time")
EVENT_KINDS = (*USER_KINDS, "text", "vector")


def _check_item_kind(kind: str) -> str:
    if kind not in ITEM_KINDS:
        raise ValueError(f"not a kind of item field ({suggest_name(kind, list(ITEM_KINDS))})")
    return kind


class SeparatedCategories(Typed):
    """Categories of one text: genres = { kind = "category", separator = "|" } reads 'Comedy|Drama' as two values."""

    kind: Literal["category", "categories"] = "category"
    separator: str = Field(min_length=1, description="What stands between two values.")


def _check_item_field(field: Any) -> str | SeparatedCategories:
    if isinstance(field, str):
        return _check_item_kind(field)
    if isinstance(field, SeparatedCategories):
        return field
    if not isinstance(field, Mapping):
        raise ValueError('not a kind; expected a name such as "category", or { kind = "category", separator = "|" }')
    unknown = set(field) - set(SeparatedCategories.model_fields)
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r} ({suggest_name(min(unknown), ['kind', 'separator'])})")
    separator = field.get("separator")
    if field.get("kind") not in ("category", "categories") or not isinstance(separator, str) or not separator:
        raise ValueError('only categories have a separator, a text: expected { kind = "category", separator = "|" }')
    return SeparatedCategories(kind=field["kind"], separator=separator)


def _check_event_kind(kind: str) -> str:
    if kind not in EVENT_KINDS:
        raise ValueError(f"not a kind of event field ({suggest_name(kind, list(EVENT_KINDS))})")
    return kind


def _check_user_kind(kind: str) -> str:
    if kind in EVENT_KINDS and kind not in USER_KINDS:
        raise ValueError(f"a user field cannot be a {kind}: expected one of {', '.join(USER_KINDS)}")
    return _check_event_kind(kind)


def _check_time_format(text: str) -> str:
    letters = re.findall("%(.?)", text)
    odd = [letter for letter in letters if letter not in _FORMAT_LETTERS or not letter]
    parts = [letter for letter in letters if letter != "%"]
    fault = ""
    if odd:
        fault = f"%{odd[0]} is no part of a time here"
    elif len(set(parts)) < len(parts):
        fault = "a part stands twice"
    elif not {"y", "Y"} & set(parts):
        fault = "no year in it"
    elif ("p" in parts) != ("I" in parts):
        fault = "%I and %p belong together"
    if fault:
        raise ValueError(f"{fault}: expected as in %d.%m.%Y %H:%M for 01.03.2025 10:00, of {_FORMAT_LETTERS}")
    return text


def _check_decimal(mark: str) -> str:
    if mark not in (".", ","):
        raise ValueError('expected "." for numbers as 12.50, or "," for numbers as 12,50 and 1.234,50')
    return mark


def _decimal_field() -> Any:
    return Field(
        ".",
        exclude_if=lambda mark: mark == ".",
        description="What stands before the fraction of numbers that are text: '.' as in 12.50, or ',' as in 12,50.",
    )


ItemField = Annotated[str | SeparatedCategories, BeforeValidator(_check_item_field)]
EventKind = Annotated[str, AfterValidator(_check_event_kind)]
UserKind = Annotated[str, AfterValidator(_check_user_kind)]
TimeUnit = Literal["datetime", "s", "ms", "us", "order"]
TimeFormat = Annotated[str, AfterValidator(_check_time_format)]
DecimalMark = Annotated[str, AfterValidator(_check_decimal)]

# Event fields that every log with real times gets: how long since the user's last event, and the clock.
GAP, HOUR, WEEKDAY = "time_gap", "hour", "weekday"


def user_field(name: str) -> str:
    """What a field of the users is called among those of the events."""
    return f"user.{name}"


class EventColumns(Typed):
    user: str = Field(description="Column that names the user.")
    item: str | tuple[str, ...] = Field(
        description="Column of the item, or [item column, event column] to predict item×value pairs."
    )
    timestamp: str = Field(description="Column of the time.")
    time_unit: TimeUnit = Field("datetime", description="'order' when the column is only a position.")
    time_format: TimeFormat | None = Field(
        None, description="Of times that are text and not in ISO form, as %d.%m.%Y %H:%M of 01.03.2025 10:00."
    )
    decimal: DecimalMark = _decimal_field()
    no_item: str | int | None = Field(
        None, description="Id that stands for events without an item, such as searches; absent: every event has one."
    )
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
        if self.time_format is not None and self.time_unit != "datetime":
            raise ValueError(f"time_format is of times that are text, and time_unit is {self.time_unit!r}")
        reserved = {GAP, HOUR, WEEKDAY} & set(self.fields)
        if reserved and self.time_unit != "order":
            raise ValueError(f"{sorted(reserved)} are derived from the timestamp; rename these columns")
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
    decimal: DecimalMark = _decimal_field()
    fields: dict[str, ItemField] = Field(default_factory=dict, description="Item fields and their kinds.")
    display: tuple[str, ...] | None = Field(
        None, description="Columns that people see beside the id, the item's name first; absent: ids only."
    )

    @model_validator(mode="after")
    def _display_is_a_choice(self) -> Self:
        names = self.display or ()
        if self.display == () or len(set(names)) < len(names):
            raise ValueError(f"display is {list(names)}: name columns of the item table, each once, or leave it out")
        if self.item in names:
            raise ValueError(f"display names {self.item!r}, the item's id, which is shown anyway")
        return self

    @model_validator(mode="after")
    def _some_field(self) -> Self:
        kind = self.fields.get(self.item, "category")
        if kind != "category":
            raise ValueError(f"{self.item!r} is the item's id: as an item field it can only be a category, not {kind}")
        if not self.fields:
            raise ValueError("no item fields: the embedder would have nothing to read")
        return self

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each item field by its plain name."""
        return {name: field if isinstance(field, str) else "categories" for name, field in self.fields.items()}

    @property
    def separators(self) -> dict[str, str]:
        """What stands between the values of the fields that are split."""
        return {name: field.separator for name, field in self.fields.items() if not isinstance(field, str)}


class UserColumns(Typed):
    """The table of the users: one row each, or several rows that are known from a time on."""

    user: str = Field(description="Column that names the user, as the events do.")
    timestamp: str | None = Field(
        None, description="Column of the time from which a row is known; absent: one row per user, known always."
    )
    time_unit: TimeUnit | None = Field(None, description="Of the timestamp; absent: as the events' time_unit.")
    time_format: TimeFormat | None = Field(None, description="Of a timestamp that is text and not in ISO form.")
    decimal: DecimalMark = _decimal_field()
    fields: dict[str, UserKind] = Field(description="User fields and their kinds.")

    @model_validator(mode="after")
    def _fields_are_fields(self) -> Self:
        if not self.fields:
            raise ValueError("no user fields: name some under [users.fields], or leave [users] out")
        if self.user in self.fields or self.user == self.timestamp:
            raise ValueError(f"{self.user!r} names the user and cannot be a field or the time")
        if self.time_unit is not None and self.timestamp is None:
            raise ValueError("time_unit is given and timestamp is not")
        if self.time_format is not None and (self.timestamp is None or self.time_unit not in (None, "datetime")):
            raise ValueError("time_format is of a timestamp that is text")
        return self


def comma_numbers(columns: EventColumns | ItemColumns | UserColumns | None) -> tuple[str, ...]:
    """The fields of a table whose numbers have a decimal comma where they are text."""
    if columns is None or columns.decimal == ".":
        return ()
    return tuple(name for name, kind in columns.fields.items() if kind == "number")


class Schema(Typed):
    """Roles and kinds of an event table and an item table; the file schema.toml."""

    events: EventColumns
    items: ItemColumns
    users: UserColumns | None = Field(None, description="What is known of users; absent: their histories alone.")
    targets: Targets | None = Field(
        None, description="Which events are predicted and with what weight; absent: all, with weight 1."
    )
    world: WorldConfig | None = Field(
        None, description="The synthetic world behind the log; 'habitus world' writes it."
    )

    @model_validator(mode="after")
    def _targets_have_columns(self) -> Self:
        if self.targets is None:
            return self
        roles = {self.events.user, self.events.item_column, self.events.timestamp}
        if self.targets.column in roles:
            raise ValueError(f"targets.column is {self.targets.column!r}, which is the user, the item or the time")
        categories = {name for name, kind in self.items.kinds.items() if kind in ("category", "categories")}
        for name in self.targets.candidates or ():
            if name not in categories | set(self.events.pair_columns):
                raise ValueError(
                    f"targets.candidates names {name!r}, not a category field of the items "
                    f"({suggest_name(name, sorted(categories))})"
                )
        return self

    @model_validator(mode="after")
    def _events_without_an_item_are_context(self) -> Self:
        if self.events.no_item is not None and self.targets is None:
            raise ValueError(
                "events.no_item is given without [targets]: say which events are predicted, as in "
                'column = "event_type", weights = { view = 1.0 }'
            )
        return self

    @model_validator(mode="after")
    def _pairs_do_not_hide_item_fields(self) -> Self:
        columns = {self.items.item, *self.items.fields, *(self.items.display or ())}
        taken = set(self.events.pair_columns) & columns
        if taken:
            raise ValueError(f"{sorted(taken)} is a column of both tables; rename it in one of them")
        return self

    @model_validator(mode="after")
    def _rows_of_users_have_the_clock_of_the_events(self) -> Self:
        if self.users is None or self.users.timestamp is None or self.users.time_unit is None:
            return self
        units = self.users.time_unit, self.events.time_unit
        if (units[0] == "order") != (units[1] == "order"):
            raise ValueError(
                f"users.time_unit is {units[0]!r} and events.time_unit {units[1]!r}: positions and times have no order "
                "among each other; give both tables times, or both positions"
            )
        return self

    @model_validator(mode="after")
    def _user_fields_have_names_of_their_own(self) -> Self:
        names = {user_field(name) for name in self.users.fields} if self.users else set()
        taken = names & set(self.events.fields)
        if taken:
            raise ValueError(f"{sorted(taken)} are event fields, and so would fields of [users] be called; rename them")
        return self

    @property
    def event_fields(self) -> dict[str, str]:
        """Kinds of all that is known at an event: its own fields, then those of its user as user.NAME."""
        users = {} if self.users is None else self.users.fields
        return {**self.events.fields, **{user_field(name): kind for name, kind in users.items()}}

    def to_toml(self) -> str:
        """The file schema.toml; a field with a separator takes one line, as people write it."""
        values = self.to_values()
        fields = values["items"]["fields"]
        for name, field in fields.items():
            fields[name] = InlineTable(field) if isinstance(field, dict) else field
        return to_toml(values)
