"""Events sorted in parts by user: the same bytes as at once, whatever the ids are and however a log is skewed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import PrepareOptions
from habitus.data.partitions import (
    EventQuery,
    choose_bounds,
    count_parts,
    part_files,
    rows_within,
    scan_files,
    sort_part,
    sort_parts,
    write_parts,
)

from .tables import SMALL, make_events, prepared

Table = dict[str, list[Any]]


def with_users(name: Callable[[int], Any]) -> Table:
    events = make_events(12)
    return {**events, "user_id": [name(int(user[1:])) for user in events["user_id"]]}


@pytest.mark.parametrize(
    "name",
    [
        lambda user: user - 5,
        lambda user: ["", "it's", "É", "e", "Z", "z%", "10", "9", "a\0b", "ab", "雪", " "][user] + "x",
        lambda user: np.datetime64("2024-01-01", "D").item().replace(day=user + 1),
        lambda user: 7,  # one user has all events, and is never cut
    ],
    ids=["numbers", "texts", "dates", "one user"],
)
def test_the_number_of_parts_changes_no_byte(tmp_path: Path, name: Callable[[int], Any]) -> None:
    events = with_users(name)
    checksums = [
        prepared(tmp_path / str(parts), events, options=replace(SMALL, parts=parts)).checksum for parts in (1, 2, 5)
    ]
    assert len(set(checksums)) == 1


def test_a_log_gets_the_parts_that_its_memory_demands() -> None:
    rows = rows_within(6 * 2**30, 7)
    assert rows == 6 * 2**30 // 112
    assert count_parts(rows // 2, rows) == 1
    assert count_parts(rows // 2 + 1, rows) == 2
    assert count_parts(10**9, rows) == 35
    assert PrepareOptions().parts is None


def test_parts_hold_whole_users_in_order_from_several_readers(tmp_path: Path) -> None:
    """1,000 users of 1 to 40 events, which two readers partition one half each."""
    draw = np.random.default_rng(0)
    users = np.repeat(np.arange(1000), draw.integers(1, 41, 1000))
    table = pa.table({"u": draw.permutation(users), "t": draw.integers(0, 50, len(users)), "origin": range(len(users))})
    pq.write_table(table, tmp_path / "events.parquet")
    source = f"read_parquet('{tmp_path}/events.parquet')"
    with duckdb.connect() as con:
        bounds = choose_bounds(con, f"SELECT u FROM {source}", table.num_rows, 4)
        assert len(bounds) == 3
        folders = [tmp_path / "even", tmp_path / "odd"]
        for remainder, folder in enumerate(folders):
            events = EventQuery(f"SELECT * FROM {source} WHERE origin % 2 = {remainder}", ("u", "t", "origin"))
            write_parts(con, events, bounds, folder, rows_in_memory=10**6)
        sizes = [sum(pq.read_metadata(file).num_rows for file in part_files(folders, number)) for number in range(4)]
        assert sum(sizes) == table.num_rows
        assert max(sizes) < table.num_rows // 2
        sort_part(con, EventQuery(scan_files(part_files(folders, 1)), ("u",)), tmp_path / "one.parquet")
        parts = [pq.read_table(path) for path in sort_parts(con, folders, 4, events.columns, tmp_path / "part.parquet")]
    expected = table.sort_by([("u", "ascending"), ("t", "ascending"), ("origin", "ascending")])
    assert pa.concat_tables(parts).to_pydict() == expected.to_pydict()
    assert pq.read_table(tmp_path / "one.parquet")["u"].to_pylist() == parts[1]["u"].to_pylist()
    assert not any(part_files(folders, number) for number in range(4)), "each part is removed once it is sorted"
