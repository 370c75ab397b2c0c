"""The events of a log in parts by user, so that each part can be sorted within the memory limit.

A part is a range of user ids: the sorted parts, one after the other, are the sorted log, however many there are and
wherever their bounds lie. Together they are one compressed copy of the log, and each is removed once it is sorted.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from habitus.data.sources import quoted_path
from habitus.data.sql import parquet_sql

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_VALUE_BYTES = 16  # of one value while it is sorted
_MAX_PARTS = 1000  # each is an open file
_SAMPLED_USERS = 1 << 16
_GROUP_ROWS = 122_880  # DuckDB's own size of a row group


class EventQuery(NamedTuple):
    """Events in any order, as SQL: user (u), time (t), item_row and the fields, and their original row (origin)."""

    sql: str
    columns: tuple[str, ...]  # that are kept, which `origin` is not


def rows_within(memory: int, num_columns: int) -> int:
    """How many events of so many columns can be sorted in `memory` bytes."""
    return max(memory // (_VALUE_BYTES * num_columns), 1)


def count_parts(num_rows: int, rows_in_memory: int) -> int:
    """How many parts a log needs so that one of them takes half of the memory while it is sorted."""
    return min(-(-num_rows // max(rows_in_memory // 2, 1)), _MAX_PARTS)


def choose_bounds(con: "DuckDBPyConnection", users: str, num_rows: int, num_parts: int) -> list[str]:
    """Ids that cut about `num_rows` users (u of the query `users`) into parts of one size, ascending, as SQL literals.

    Fewer where some users have very many events: a user is never cut.
    """
    drawn = f"SELECT u FROM ({users}) WHERE u IS NOT NULL AND random() < {_SAMPLED_USERS / num_rows}"
    ranked = f"SELECT u, row_number() OVER (ORDER BY u) - 1 AS place, count(*) OVER () AS total FROM ({drawn})"
    crossed = f"place * {num_parts} // total > (place - 1) * {num_parts} // total"
    rows = con.execute(
        f"SELECT CAST(u AS VARCHAR), typeof(u) FROM ({ranked}) WHERE place > 0 AND {crossed} GROUP BY u ORDER BY u"
    ).fetchall()
    texts = ((text.replace("'", "''"), kind) for text, kind in rows if "\0" not in text)  # SQL cannot spell a NUL
    return [f"CAST('{text}' AS {kind})" for text, kind in texts]


def write_parts(
    con: "DuckDBPyConnection", events: EventQuery, bounds: Sequence[str], folder: Path, *, rows_in_memory: int
) -> None:
    """Write the events to Parquet files in folder/part=N.

    Readers of different rows may each write to a folder of their own; part_files() finds a part in all of them.
    """
    ((threads,),) = con.execute("SELECT current_setting('threads')").fetchall()
    held = max(rows_in_memory // (8 * threads), 2048)  # by each thread
    group = min(max(2 * held // (len(bounds) + 1), 2048), _GROUP_ROWS)
    con.execute(f"SET partitioned_write_flush_threshold = {held}")
    con.execute(f"SET partitioned_write_max_open_files = {len(bounds) + 1}")
    con.execute(
        f"COPY (SELECT *, {_part_sql(bounds)} AS part FROM ({events.sql})) TO '{quoted_path(folder)}' "
        f"(FORMAT parquet, PARTITION_BY (part), ROW_GROUP_SIZE {group}, COMPRESSION zstd, PARQUET_VERSION V2)"
    )


def part_files(folders: Sequence[Path], number: int) -> list[Path]:
    """The files that hold a part; none where it is empty."""
    return [file for folder in folders for file in sorted((folder / f"part={number}").glob("*.parquet"))]


def scan_files(files: Sequence[Path]) -> str:
    """The rows of Parquet files, as a query."""
    return f"SELECT * FROM {parquet_sql(files)}"


def sort_part(con: "DuckDBPyConnection", events: EventQuery, path: Path) -> None:
    """Write the columns of these events to one Parquet file, sorted by user, time and original row.

    A file, which is read back by row group: streaming a sorted result straight out of DuckDB doubled the memory.
    """
    con.execute(
        f"COPY (SELECT {', '.join(events.columns)} FROM ({events.sql}) ORDER BY u, t, origin) "
        f"TO '{quoted_path(path)}' (FORMAT parquet, ROW_GROUP_SIZE 262144, PARQUET_VERSION V2)"
    )


def sort_parts(
    con: "DuckDBPyConnection", folders: Sequence[Path], num_parts: int, columns: Sequence[str], path: Path
) -> Iterator[Path]:
    """Each part in order, sorted into the file `path`, which must be read before the next part is asked for."""
    for number in range(num_parts):
        if files := part_files(folders, number):
            sort_part(con, EventQuery(scan_files(files), tuple(columns)), path)
            for file in files:
                file.unlink()
            yield path
            path.unlink()


def _part_sql(bounds: Sequence[str], first: int = 0) -> str:
    """The number of the part that a user u is in: of its bounds, how many are not above it. A binary search."""
    if not bounds:
        return str(first)
    middle = len(bounds) // 2
    below, above = _part_sql(bounds[:middle], first), _part_sql(bounds[middle + 1 :], first + middle + 1)
    return f"CASE WHEN u < {bounds[middle]} THEN {below} ELSE {above} END"
