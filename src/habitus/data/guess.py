"""A proposed schema for two tables, from the names, types and first values of their columns."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.category_lists import guess_separator
from habitus.data.columns import COMMA_PATTERN
from habitus.data.kinds import KINDS, ColumnSample
from habitus.data.sources import SourceTable, open_table
from habitus.errors import ConfigError, DataError
from habitus.events import GAP, HOUR, ITEM_KINDS, USER_KINDS, WEEKDAY, Schema
from habitus.interrupts import hold_interrupts
from habitus.typed import suggest_name

_USER = ("user_id", "user", "customer_id", "customer", "client_id", "visitor_id", "session_id", "account_id", "uid")
_ITEM = ("item_id", "item", "product_id", "product", "movie_id", "sku", "article_id", "merchant_id", "asin", "iid")
_TIME = ("timestamp", "time", "datetime", "date", "ts", "created_at", "event_time")
_BARE_TIMES = tuple(name.replace("_", "") for name in _TIME)
_NAMES = ("title", "name", "itemname", "productname", "label", "description")
_UNKNOWN = "COLUMN"
_DATE = r"^\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})\b"
_DAY_AND_MONTH = (
    r"^\s*(?P<first>\d{1,2})(?P<mark>[-/.])(?P<second>\d{1,2})[-/.]\d{4}(?P<clock>(?: \d{1,2}:\d{2}(?::\d{2})?)?)\s*$"
)
_ISO_DATE = r"^\s*\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}(:?\d{2})?)?)?\s*$"
_ISO, _DECIMAL_COMMA = r"^\s*\d{4}[-/]?\d{1,2}", r"^\s*[+-]?\d{1,3}(\.?\d{3})*,\d+\s*$"
_NOT_THOUSANDS = r",(\d{1,2}|\d{4,})\s*$"  # 1,234 may be a thousand and some
_SHORT = 100  # characters of a name, on average
_SAMPLE_ROWS = 20_000
_EVENT_KINDS = (*USER_KINDS, "text")  # lists of numbers may be anything: vectors are for a person to name


def guess_schema(
    events: str,
    items: str,
    users: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    roles: Mapping[str, str] | None = None,
) -> Schema:
    """The likeliest schema; a person should look it over. `note` is told which columns it leaves out, and why.

    `roles` names columns of the events whose names do not say what they are: user, item or timestamp.
    """
    with hold_interrupts():
        import duckdb

    with tempfile.TemporaryDirectory() as scratch, duckdb.connect(":memory:") as con:
        event_table = open_table("events", events, con, Path(scratch))
        item_table = open_table("items", items, con, Path(scratch))
        (event_rows, event_decimal), (item_rows, item_decimal) = _sample(event_table), _sample(item_table)
        user_table = None if users is None else open_table("users", users, con, Path(scratch))
        user_rows, user_decimal = (None, {}) if user_table is None else _sample(user_table)
    usual = {"user": _USER, "item": _ITEM, "timestamp": _TIME}
    given = _check_roles(dict(roles or {}), usual, event_table)
    seen = _shared_key(event_table, item_table, item_rows, "item") | _only_times(event_rows)
    if user_table is not None and user_rows is not None:
        seen |= _shared_key(event_table, user_table, user_rows, "user")
    user, item, time = _roles(event_table, usual, seen, given)
    item_key = item if item in item_table.types else _roles(item_table, {"item": _ITEM})[0]
    unit = _time_unit(event_rows[time])
    reserved = {GAP, HOUR, WEEKDAY} if unit != "order" else set()
    event_fields = {
        name: kind
        for name in event_rows.column_names
        if name not in {user, item, time} | reserved and (kind := _kind(name, event_rows[name], _EVENT_KINDS))
    }
    of_one_user = [
        name for name, kind in event_fields.items() if kind != "text" and _values_have_one_user(event_rows, name, user)
    ]
    for name in of_one_user:  # such as the number of a basket
        del event_fields[name]
    _note_left_out(note, "events", event_table, {user, item, time, *event_fields}, of_one_user)
    if without_item := event_rows[item].null_count:
        note(
            f"{without_item:,} of the first {event_rows.num_rows:,} events have no {item}: name them with no_item "
            "under [events], and say in [targets] what is predicted (docs/event-text.md)"
        )
    item_fields = {
        name: _with_separator(name, kind, item_rows[name])
        for name in item_rows.column_names
        if name != item_key and (kind := _kind(name, item_rows[name], ITEM_KINDS))
    }
    _note_left_out(note, "items", item_table, {item_key, *item_fields})
    form = _time_form(event_rows[time])
    _note_forms(
        note,
        "events",
        event_rows if form is None else event_rows.drop_columns(time),
        time if unit == "datetime" else None,
    )
    _note_forms(note, "items", item_rows)
    found = {"user": user, "item": item, "timestamp": time, "time_unit": unit}
    if form is not None:
        found["time_format"] = form
    item_values: dict[str, Any] = {"item": item_key, **item_decimal, "fields": item_fields}
    name = _name(item_rows, item_fields)
    if name is not None:
        item_values["display"] = (name,)
    values: dict[str, Any] = {"events": {**found, **event_decimal, "fields": event_fields}, "items": item_values}
    if user_table is not None and user_rows is not None:
        users_section = _guess_users(user_table, user_rows, user, unit) | user_decimal
        values["users"] = users_section
        known = users_section.get("timestamp")
        _note_forms(note, "users", user_rows.drop_columns(known) if known is not None else user_rows)
    return Schema.parse(values, f"the schema guessed from {events} and {items}")


def _values_have_one_user(rows: pa.Table, name: str, user: str) -> bool:
    """Whether a column of integers or text numbers something within users, so that nobody else ever has its values."""
    if not (pa.types.is_integer(rows[name].type) or pa.types.is_string(rows[name].type)):
        return False
    pairs = rows.select([name, user]).drop_null().group_by([name, user]).aggregate([])
    num_values, num_users = (pc.count_distinct(pairs[column]).as_py() for column in (name, user))
    return num_users > 1 and num_values > num_users and pairs.num_rows <= 1.01 * num_values


def _note_left_out(
    note: Callable[[str], None], role: str, table: SourceTable, used: set[str], of_one_user: list[str] | None = None
) -> None:
    for name in table.types:
        if name not in used:
            one_user = "each of its values belongs to one user"
            why = one_user if name in (of_one_user or ()) else "one value only, too many, or a type of no field"
            note(f"left out of the {role}: {name} ({why})")


def _note_forms(note: Callable[[str], None], role: str, rows: pa.Table, time: str | None = None) -> None:
    """Say which texts are times or numbers in a form that is not read."""
    for name in rows.column_names:
        values = rows[name].drop_null()
        if not len(values) or not pa.types.is_string(values.type):
            continue
        first = values[0].as_py()
        if name == time and not pc.all(pc.match_substring_regex(values, _ISO)).as_py():
            note(f"the times of the {role} in {name}, as {first}, are not all in ISO form, as 2025-03-01 10:00:00")
        elif name != time and _has_other_dates(values):
            note(f"dates in {name} of the {role}, as {first}? Fields are read in ISO form only, as 2025-03-01")
        elif pc.all(pc.match_substring_regex(values, _DECIMAL_COMMA)).as_py():
            note(
                f"numbers in {name} of the {role}, as {first}? They are read with a decimal point, or all of the table "
                f'with a comma: decimal = "," under [{role}]'
            )


def _guess_users(table: SourceTable, rows: pa.Table, user: str, event_unit: str) -> dict[str, Any]:
    """The section [users]: its times count where some user has several rows."""
    key = user if user in table.types else _roles(table, {"user": _USER})[0]
    values: dict[str, Any] = {"user": key}
    times = [name for name, type_ in table.types.items() if _can_be("timestamp", type_) and _bare(name) in _BARE_TIMES]
    if times and pc.count_distinct(rows[key]).as_py() < rows.num_rows:
        unit = _time_unit(rows[times[0]])
        if (unit == "order") == (event_unit == "order"):  # positions and times cannot be compared
            values["timestamp"] = times[0]
            values |= {} if unit == event_unit else {"time_unit": unit}
            form = _time_form(rows[times[0]])
            values |= {} if form is None else {"time_format": form}
    others = [name for name in rows.column_names if name not in (key, values.get("timestamp"))]
    values["fields"] = {name: kind for name in others if (kind := _kind(name, rows[name], USER_KINDS))}
    return values


def _sample(table: SourceTable) -> tuple[pa.Table, dict[str, str]]:
    """The first rows, text that is all numbers as numbers, and the key of the schema that a decimal comma needs."""
    readable = [name for name, kind in table.types.items() if not isinstance(kind, str) and _has_values(kind)]
    batches, rows = [], 0
    for batch in table.batches(readable):
        batches.append(batch)
        rows += batch.num_rows
        if rows >= _SAMPLE_ROWS:
            break
    texts = pa.Table.from_batches(batches)
    rows = pa.table({name: _as_numbers(texts[name]) for name in texts.column_names})
    has_points = any(texts[n].type != rows[n].type and pa.types.is_floating(rows[n].type) for n in rows.column_names)
    if has_points or not any(_has_decimal_comma(rows[name]) for name in rows.column_names):
        return rows, {}
    return pa.table({name: _with_points(rows[name]) for name in rows.column_names}), {"decimal": ","}


def _has_decimal_comma(column: pa.ChunkedArray) -> bool:
    """Whether all texts are numbers with a decimal comma where they have a fraction, as most do: 12,50 and 7.

    As 1,234 they may be thousands.
    """
    texts = column.drop_null()
    if not pa.types.is_string(texts.type) or not len(texts):
        return False
    fractions = pc.match_substring_regex(texts, _DECIMAL_COMMA)
    return (
        pc.all(pc.match_substring_regex(texts, COMMA_PATTERN)).as_py()
        and 2 * pc.sum(fractions).as_py() >= len(texts)
        and pc.any(pc.match_substring_regex(texts, _NOT_THOUSANDS)).as_py()
    )


def _with_points(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts that are all numbers, some of them with a decimal comma, as numbers."""
    if not pa.types.is_string(column.type) or not pc.any(pc.match_substring(column, ",")).as_py():
        return column
    if not pc.all(pc.match_substring_regex(column, COMMA_PATTERN)).as_py():
        return column
    points = pc.replace_substring(pc.replace_substring(column, ".", ""), ",", ".")
    return pc.utf8_trim_whitespace(points).cast(pa.float64())


def _check_roles(given: dict[str, str], roles: Mapping[str, Any], table: SourceTable) -> dict[str, str]:
    for role, column in given.items():
        if role not in roles:
            raise ConfigError(f"{role} is no role ({suggest_name(role, list(roles))})", expected=", ".join(roles))
        if column not in table.types:
            raise DataError(
                f"{table.role}: {role} was said to be {column!r}, which is no column "
                f"({suggest_name(column, list(table.types))})",
                expected=", ".join(table.types),
            )
    return given


def _only_times(rows: pa.Table) -> dict[str, str]:
    """The time, whatever it is called, where one column alone holds dates."""
    times = []
    for name in rows.column_names:
        kind, values = rows[name].type, rows[name].drop_null()
        if pa.types.is_string(kind):
            dated = len(values) and pc.all(pc.match_substring_regex(values, _DATE)).as_py()
        else:
            dated = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        if dated:
            times.append(name)
    return {"timestamp": times[0]} if len(times) == 1 else {}


def _roles(
    table: SourceTable,
    roles: dict[str, tuple[str, ...]],
    seen: Mapping[str, str] | None = None,
    given: Mapping[str, str] | None = None,
) -> list[str]:
    """The column of each role, as `given`, by usual names, or as `seen` in the values; those that are not found are
    refused all at once."""
    columns = {_bare(column): column for column in table.types}  # userId, User ID and user_id are one name
    found = dict(given or {})
    for role, names in roles.items():
        if role in found:
            continue
        usual = [columns[name] for name in map(_bare, names) if name in columns]
        able = [column for column in usual if _can_be(role, table.types[column]) and column not in found.values()]
        if able or role in (seen or {}):
            found[role] = able[0] if able else (seen or {})[role]
    missing = [role for role in roles if role not in found]
    if missing:
        examples = [f"a column called {', '.join(roles[role][:4])} or the like" for role in missing]
        lines = [f'{role} = "{found.get(role, _UNKNOWN)}"' for role in roles]
        name = f"with {', '.join(lines)} under [{table.role}] (docs/prepare.md shows one)"
        by_hand = f"rename the column{'' if len(missing) == 1 else 's'}, or write schema.toml by hand, {name}"
        if given is not None:
            by_hand = f"name it: --guess {' '.join(f'--role {role}={_UNKNOWN}' for role in missing)}; or {by_hand}"
        raise DataError(
            f"{table.role}: none of the columns {', '.join(table.types)} looks like the {' or the '.join(missing)}",
            expected=", and ".join(examples),
            next_step=by_hand,
        )
    return [found[role] for role in roles]


def _shared_key(events: SourceTable, others: SourceTable, rows: pa.Table, role: str) -> dict[str, str]:
    """The item or user, whatever it is called, where one column alone is in both tables and tells rows apart."""
    keys = [
        name
        for name in events.types
        if name in rows.column_names
        and all(_can_be(role, table.types[name]) for table in (events, others))
        and pc.count_distinct(rows[name]).as_py() >= 0.9 * rows.num_rows
    ]
    return {role: keys[0]} if len(keys) == 1 else {}


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _can_be(role: str, kind: Any) -> bool:
    """Whether a column of that type can play the role at all."""
    if isinstance(kind, str) or pa.types.is_null(kind) or pa.types.is_boolean(kind) or pa.types.is_nested(kind):
        return False
    return role == "timestamp" or pa.types.is_integer(kind) or pa.types.is_string(kind)


def _time_unit(column: pa.ChunkedArray) -> Any:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "datetime"
    if pa.types.is_string(kind):
        return "datetime"
    largest = pc.max(pc.abs(column)).as_py() or 0
    for unit, least in (("us", 1e14), ("ms", 1e11), ("s", 1e8)):  # 1973 in each unit
        if largest >= least:
            return unit
    return "order"


def _time_form(column: pa.ChunkedArray) -> str | None:
    """The form of times such as 01.03.2025 10:00; None in ISO form, and where day and month cannot be told apart."""
    values = column.drop_null()
    if not (pa.types.is_string(column.type) and len(values)):
        return None
    parts = pc.extract_regex(values, _DAY_AND_MONTH)
    if parts.null_count:
        return None
    first, mark, second, clock = (pc.struct_field(parts, name) for name in ("first", "mark", "second", "clock"))
    marks, colons = pc.unique(mark).to_pylist(), pc.unique(pc.count_substring(clock, ":")).to_pylist()
    if len(marks) > 1 or len(colons) > 1:
        return None
    one, other = (pc.max(pc.cast(part, pa.int8())).as_py() for part in (first, second))
    if max(one, other) <= 12 and marks != ["."]:
        return None  # 03/04/2025 is in March in one country and in April in another
    if one > 12 and other > 12:
        return None
    date = "%m{0}%d{0}%Y" if other > 12 else "%d{0}%m{0}%Y"
    return date.format(marks[0]) + ("", " %H:%M", " %H:%M:%S")[colons[0]]


def _kind(name: str, values: pa.ChunkedArray, allowed: tuple[str, ...]) -> str | None:
    """The first of the allowed kinds that the column looks like; None for a column that is better left out."""
    texts = values.drop_null()
    if pa.types.is_string(texts.type) and len(texts):
        if pc.all(pc.match_substring_regex(texts, _ISO_DATE)).as_py():
            return "time"
        if _has_other_dates(texts) or pc.all(pc.match_substring_regex(texts, _DECIMAL_COMMA)).as_py():
            return None  # numbers and dates that would have to be written otherwise: categories would waste them
    sample = ColumnSample(name, values, of_events=allowed != ITEM_KINDS)
    return next((name for name, kind in KINDS.items() if name in allowed and kind.looks_like(sample)), None)


def _has_other_dates(texts: pa.ChunkedArray) -> bool:
    """Whether all texts are days that are not in ISO form."""
    return not pc.extract_regex(texts, _DAY_AND_MONTH).null_count


def _with_separator(name: str, kind: str, values: pa.ChunkedArray) -> Any:
    """The item field: its kind, or categories that a separator divides. What names an item is not divided."""
    is_divisible = kind in ("text", "category") and _bare(name) not in _NAMES
    separator = guess_separator(values) if is_divisible else None
    return kind if separator is None else {"kind": "category", "separator": separator}


def _name(rows: pa.Table, fields: dict[str, Any]) -> str | None:
    """The column that names an item to people: the first short text, else one whose name says so."""
    texts = [name for name, kind in fields.items() if kind == "text" and _is_short(rows[name])]
    labels = [name for name in fields if _bare(name) in _NAMES and _is_short(rows[name])]
    return next(iter(texts + labels), None)


def _is_short(column: pa.ChunkedArray) -> bool:
    """Whether a column's values are words of a line, and no addresses."""
    if not pa.types.is_string(column.type) or column.null_count == len(column):
        return False
    addresses = pc.mean(pc.match_substring_regex(column, r"^https?://").cast(pa.int8())).as_py()
    return bool(pc.mean(pc.utf8_length(column)).as_py() <= _SHORT and addresses < 0.5)


def _has_values(kind: pa.DataType) -> bool:
    """Whether a column's type is one that some field could have."""
    odd = (pa.types.is_null, pa.types.is_time, pa.types.is_duration, pa.types.is_binary, pa.types.is_large_binary)
    return not isinstance(kind, pa.BaseExtensionType) and not any(check(kind) for check in odd)


def _as_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text that all reads as numbers, as CSV columns arrive, becomes numbers; '007' stays text."""
    if pa.types.is_string(column.type) and column.null_count < len(column):
        for pattern, kind in (
            (r"^-?(0|[1-9]\d{0,17})$", pa.int64()),
            (r"^[+-]?\d*\.?\d+([eE][+-]?\d+)?$", pa.float64()),
        ):
            if pc.all(pc.match_substring_regex(column, pattern)).as_py() and not _has_leading_zeros(column):
                return column.cast(kind)
    return column


def _has_leading_zeros(column: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.match_substring_regex(column, r"^-?0\d")).as_py())
