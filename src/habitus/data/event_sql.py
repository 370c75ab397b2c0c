"""The columns of the event table in SQL: roles, fields and the weight of an event as a target."""

from collections.abc import Callable, Mapping

import pyarrow as pa

from habitus.data.event_contents import CONTENT_KINDS, content_sql
from habitus.data.kinds import KINDS
from habitus.data.sql import id_sql, name_sql, no_item_sql, printable_sql, time_sql
from habitus.events import Schema, Targets


def event_columns(schema: Schema) -> list[str]:
    """The columns of the event table that are read."""
    roles = schema.events
    weighted = [schema.targets.column] if schema.targets else []
    return list(
        dict.fromkeys([roles.user, roles.item_column, *roles.pair_columns, roles.timestamp, *roles.fields, *weighted])
    )


def select_events(
    schema: Schema, types: Mapping[str, pa.DataType], same_item_types: bool, field: Callable[[str], str]
) -> list[str]:
    """Roles and fields under names of our own, so that no column of the log can stand in for another.

    `field` is the name of an event field; `same_item_types`: the ids of events and items can be compared as they are.
    """
    roles = schema.events
    time = name_sql(roles.timestamp)
    selected = [
        f"{id_sql(roles.user, types[roles.user], True)} AS u",
        f"{_item_sql(schema, types[roles.item_column], same_item_types)} AS i",
        *(f"CAST({name_sql(name)} AS VARCHAR) AS pair_{n}" for n, name in enumerate(roles.pair_columns)),
        f"{printable_sql(time, types[roles.timestamp])} AS t_raw",
        f"{time_sql(time, types[roles.timestamp], roles.time_unit, roles.time_format)} AS t_parsed",
    ]
    for name, kind in roles.fields.items():
        column, alias = name_sql(name), field(name)
        number = KINDS[kind].event_sql(column, types[name])
        if kind in CONTENT_KINDS:
            selected.append(f"{content_sql(kind, column, types[name])} AS {alias}")
        elif number is None:
            selected.append(f"{column} AS {alias}")
        else:
            selected += [f"{column} AS {alias}_raw", f"{number} AS {alias}"]
    if schema.targets is not None:
        column = name_sql(schema.targets.column)
        selected += [f"CAST({column} AS VARCHAR) AS w_raw", f"{_weight_sql(column, schema.targets)} AS w"]
    return selected


def _item_sql(schema: Schema, type_: pa.DataType, same_types: bool) -> str:
    """The item of an event; where it has none, what the schema says stands for that."""
    item, no_item = id_sql(schema.events.item_column, type_, same_types), schema.events.no_item
    return item if no_item is None else f"coalesce({item}, {no_item_sql(no_item, type_, same_types)})"


def _weight_sql(column: str, targets: Targets) -> str:
    """The weight of an event as a target."""
    if targets.weights is None:
        return f"coalesce(CAST({column} AS FLOAT), 0)"
    quoted = {value.replace("'", "''"): weight for value, weight in targets.weights.items()}
    cases = " ".join(f"WHEN '{value}' THEN {weight!r}" for value, weight in quoted.items())
    return f"CAST(CASE CAST({column} AS VARCHAR) {cases} ELSE 0 END AS FLOAT)"
