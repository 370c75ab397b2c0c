"""Whether the columns of the two tables can serve the roles and kinds that a schema gives them."""

import pyarrow as pa

from habitus.data.sources import SourceTable, is_list
from habitus.errors import DataError
from habitus.events import Schema


def check_kinds(schema: Schema, events: SourceTable, items: SourceTable) -> None:
    """Refuse columns whose type cannot serve the role or kind that the schema gives them."""
    roles = schema.events
    for table, name in ((events, roles.user), (events, roles.item_column), (items, schema.items.item)):
        kind = table.types[name]
        if isinstance(kind, pa.BaseExtensionType):
            _refuse_type(table, name, kind, "an id: integers or text")
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_nested(kind):
            _refuse_type(table, name, kind, "an id: integers or text (fractions lose digits)")
    kind = events.types[roles.timestamp]
    has_clock = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    if roles.time_unit == "datetime" and not (has_clock or pa.types.is_string(kind)):
        _refuse_type(events, roles.timestamp, kind, "a datetime; for numbers set time_unit to s, ms, us or order")
    if roles.time_unit != "datetime" and (has_clock or pa.types.is_nested(kind)):
        _refuse_type(events, roles.timestamp, kind, "a number, as time_unit says; for times set it to 'datetime'")
    for table, fields in ((events, roles.fields), (items, schema.items.fields)):
        for name, wanted in fields.items():
            _check_field(table, name, wanted)


def _check_field(table: SourceTable, name: str, wanted: str) -> None:
    kind = table.types[name]
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        _refuse_type(table, name, kind, f"a {wanted} as text, a number or a timestamp")
    text = pa.types.is_string(kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    numbers = is_list(kind) and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))
    if wanted == "vector" and not (text or numbers or pa.types.is_null(kind)):
        _refuse_type(table, name, kind, "a vector: a list of numbers")
    if wanted in ("text", "category") and (pa.types.is_nested(kind) or pa.types.is_binary(kind)):
        _refuse_type(table, name, kind, f"a {wanted}: text, integers or booleans")
    if wanted == "number" and not (number or text or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        _refuse_type(table, name, kind, "a number")
    if wanted == "time" and not (
        text or pa.types.is_null(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    ):
        _refuse_type(table, name, kind, "a time: a timestamp, a date or text in ISO form")


def _refuse_type(table: SourceTable, name: str, kind: pa.DataType, expected: str) -> None:
    raise DataError(
        f"{table.role}: column {name!r} of {table.sources[0].name} has type {kind} in all {table.num_rows:,} rows",
        expected=expected,
        next_step="cast the column, or change its role or kind in the schema",
    )
