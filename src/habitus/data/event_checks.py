"""What may be wrong with events: columns that cannot serve their role, and rows that cannot be used."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from habitus.data.kinds import KINDS, Number
from habitus.data.sources import SourceTable
from habitus.data.sql import check_field_types, check_id_type, check_time_type, refuse_type
from habitus.events import Schema

_ISO = "times in ISO form, as 2025-03-01 10:00:00"


@dataclass(frozen=True)
class EventCheck:
    """One thing that may be wrong with an event: a condition in SQL, and what an error says of it."""

    column: str
    condition: str
    value: str  # what to show of an offending row
    what: str
    expected: str
    drops_row: bool = True


def list_checks(schema: Schema, field: Callable[[str], str], last: int | None) -> list[EventCheck]:
    """Everything that may be wrong, in the order in which an error lists it.

    `field` is the column of an event field in SQL, `last` the time of the last event that a dataset has already.
    """
    roles = schema.events
    checks = [
        EventCheck(roles.user, "u IS NULL", "NULL", "no user id", "an id in every row"),
        EventCheck(
            roles.item_column,
            "i IS NULL",
            "NULL",
            "no item id",
            "an id in every row, or no_item in [events] where events such as searches have none (docs/event-text.md)",
        ),
        EventCheck(
            roles.item_column,
            "i IS NOT NULL AND item_row IS NULL",
            "i",
            "an item that the item table lacks",
            "items of the item table only",
        ),
        EventCheck(roles.timestamp, "t_raw IS NULL", "NULL", "no time", "a time in every row"),
        EventCheck(
            roles.timestamp,
            "t_raw IS NOT NULL AND t_parsed IS NULL",
            "t_raw",
            "a time that cannot be read",
            _time_form(schema, is_update=last is not None),
        ),
        EventCheck(
            roles.timestamp,
            "t_parsed IS NOT NULL AND t IS NULL",
            "t_raw",
            "a time out of range",
            "times from 1900 to 2199 (is time_unit right?)",
        ),
    ]
    if last is not None:
        until = "each user's last" if roles.time_unit == "order" else np.datetime64(last, "us")
        what = "a time that is not after the events that the dataset has"
        expected = f"events after {until}; perhaps this update is in it already"
        checks.append(EventCheck(roles.timestamp, "coalesce(t <= last_t, false)", "t_raw", what, expected))
    for number, name in enumerate(roles.pair_columns):
        checks.append(
            EventCheck(
                name,
                f"pair_{number} IS NULL",
                "NULL",
                "no value, though it is part of the item",
                "a value",
            )
        )
    for name, kind_name in roles.fields.items():
        kind = KINDS[kind_name]
        if isinstance(kind, Number):
            column, what = field(name), kind.fault.what
            condition = f"{column}_raw IS NOT NULL AND NOT coalesce(isfinite({column}), false)"
            expected = kind.fault.expected
            checks.append(EventCheck(name, condition, f"{column}_raw", what, expected, drops_row=False))
    if schema.targets is not None:
        what, expected = "a target weight that is no finite number", "finite weights; missing ones count as 0"
        checks.append(EventCheck(schema.targets.column, "NOT isfinite(w)", "w_raw", what, expected))
    return checks


def _time_form(schema: Schema, *, is_update: bool) -> str:
    roles = schema.events
    if roles.time_format is not None:
        return f"times as time_format = {roles.time_format!r} says, or in ISO form"
    if roles.time_unit == "datetime":
        return _ISO if is_update else f"{_ISO}, or time_format under [events], as in '%d.%m.%Y'"
    return f"{'whole numbers' if roles.time_unit == 'order' else 'numbers'}, as time_unit = {roles.time_unit!r} says"


def check_types(schema: Schema, events: SourceTable, items: SourceTable) -> None:
    """Refuse columns whose type cannot serve the role or kind that the schema gives them."""
    roles = schema.events
    for table, name in ((events, roles.user), (events, roles.item_column), (items, schema.items.item)):
        check_id_type(table, name)
    check_time_type(events, roles.timestamp, roles.time_unit)
    check_field_types(events, roles.fields)
    check_field_types(items, {n: kind for n, kind in schema.items.kinds.items() if n not in schema.items.separators})
    if schema.targets is not None:
        type_ = events.types[schema.targets.column]
        is_weight = KINDS["number"].accepts(type_) and not pa.types.is_string(type_)
        if schema.targets.weights is None and not is_weight:
            refuse_type(
                events,
                schema.targets.column,
                "a boolean or a number, as the weight of a target; for other columns [targets] lists the weights of "
                "their values, as in weights = { purchase = 1.0 }",
            )
        if schema.targets.weights is not None and not KINDS["category"].accepts(type_):
            refuse_type(events, schema.targets.column, KINDS["category"].expected)
    for name, separator in schema.items.separators.items():
        if not (pa.types.is_string(items.types[name]) or pa.types.is_null(items.types[name])):
            refuse_type(items, name, f'a text that {separator!r} divides; for a list write {name} = "categories"')
    for name in schema.items.display or ():
        if not KINDS["text"].accepts(items.types[name]):
            refuse_type(items, name, "a column that can be shown: text, numbers, booleans or times")
