"""Times of every type that pandas, polars, Spark and DuckDB write: the same moments make the same bytes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import DataError
from habitus.events.schema import Schema

from .tables import SMALL

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENTS = [EPOCH + timedelta(seconds=s) for s in (-1_262_304_001, -1, 0, 1, 951_782_399, 1_700_000_000, 7_258_118_399)]
DAYS = [EPOCH + timedelta(days=d) for d in (-14_610, -1, 0, 1, 11_016, 19_675, 84_005)]
FAR = [datetime(1600, 1, 1, tzinfo=UTC), datetime(2300, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]

SCHEMA = Schema.parse(
    {
        "events": {"user": "user_id", "item": "item_id", "timestamp": "t", "fields": {"seen_at": "time"}},
        "items": {"item": "item_id", "fields": {"title": "text", "released": "time"}},
    },
    "test",
)
Columns = dict[str, list[Any]]  # texts and moments, which are in UTC
Writer = Callable[[Columns, Path], None]


def with_arrow(kind: pa.DataType, **options: Any) -> Writer:
    def write(columns: Columns, path: Path) -> None:
        def convert(values: list[Any]) -> pa.Array:
            if isinstance(values[0], str):
                return pa.array(values)
            moments = pa.array(seconds(values), pa.timestamp("s"))
            return (
                moments.cast(kind)
                if pa.types.is_date(kind)
                else moments.cast(pa.int64()).cast(pa.timestamp("s", kind.tz)).cast(kind)
            )

        pq.write_table(pa.table({name: convert(values) for name, values in columns.items()}), path, **options)

    return write


def with_pandas(unit: str, zone: str | None) -> Writer:
    def write(columns: Columns, path: Path) -> None:
        def convert(values: list[Any]) -> Any:
            if isinstance(values[0], str):
                return values
            times = pd.Series(np.array(seconds(values), "datetime64[s]").astype(f"datetime64[{unit}]"))
            return times if zone is None else times.dt.tz_localize("UTC").dt.tz_convert(zone)

        pd.DataFrame({name: convert(values) for name, values in columns.items()}).to_parquet(path)

    return write


def with_polars(unit: Any, zone: str | None) -> Writer:
    def write(columns: Columns, path: Path) -> None:
        def convert(name: str, values: list[Any]) -> pl.Series:
            if isinstance(values[0], str):
                return pl.Series(name, values)
            times = pl.Series(name, [value.replace(tzinfo=None) for value in values], pl.Datetime(unit))
            return times if zone is None else times.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)

        pl.DataFrame([convert(name, values) for name, values in columns.items()]).write_parquet(path)

    return write


def with_duckdb(kind: str) -> Writer:
    def write(columns: Columns, path: Path) -> None:
        plain = {n: [v if isinstance(v, str) else f"{v:%Y-%m-%d %H:%M:%S}" for v in c] for n, c in columns.items()}
        casts = ", ".join(n if isinstance(c[0], str) else f"CAST({n} AS {kind}) AS {n}" for n, c in columns.items())
        with duckdb.connect() as con:
            con.execute("SET TimeZone = 'UTC'")
            con.register("plain", pa.table(plain))
            con.execute(f"COPY (SELECT {casts} FROM plain) TO '{path}' (FORMAT parquet)")

    return write


ZONES = (None, "UTC", "America/New_York", "+05:30")
WRITERS: dict[str, Writer] = {
    **{f"arrow-{u}-{zone}": with_arrow(pa.timestamp(u, zone)) for u in ("s", "ms", "us", "ns") for zone in ZONES},
    **{
        f"spark-int96-{zone}": with_arrow(pa.timestamp("us", zone), use_deprecated_int96_timestamps=True)
        for zone in (None, "UTC")
    },
    **{f"spark-{u}": with_arrow(pa.timestamp(u, "UTC"), version="1.0", store_schema=False) for u in ("ms", "us")},
    **{f"pandas-{u}-{zone}": with_pandas(u, zone) for u in ("s", "ms", "us", "ns") for zone in ZONES[:3]},
    **{f"polars-{u}-{zone}": with_polars(u, zone) for u in ("ms", "us", "ns") for zone in ZONES[:3]},
    **{
        f"duckdb-{kind}": with_duckdb(kind)
        for kind in ("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP", "TIMESTAMP_NS", "TIMESTAMPTZ")
    },
}


def seconds(moments: list[datetime]) -> list[int]:
    return [(moment - EPOCH) // timedelta(seconds=1) for moment in moments]


def prepare_moments(
    folder: Path,
    write: Writer,
    events: list[datetime],
    items: list[datetime] | None = None,
    options: PrepareOptions = SMALL,
) -> Dataset:
    """A dataset whose event times, event field and item field are the moments, as `write` stores them."""
    items = items or events
    folder.mkdir()
    ids = [f"i{n}" for n in range(len(items))]
    places = [ids[n % len(ids)] for n in range(len(events))]
    users = ["u"] * len(events)
    write({"user_id": users, "item_id": places, "t": events, "seen_at": events}, folder / "events.parquet")
    write({"item_id": ids, "title": ["x"] * len(ids), "released": items}, folder / "items.parquet")
    prepare(f"{folder}/events.parquet", f"{folder}/items.parquet", SCHEMA, folder / "dataset", options)
    return Dataset.open(folder / "dataset")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare_moments(tmp_path_factory.mktemp("times") / "us", WRITERS["arrow-us-None"], MOMENTS)


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_moments_are_the_same_dataset(name: str, reference: Dataset, tmp_path: Path) -> None:
    dataset = prepare_moments(tmp_path / "a", WRITERS[name], MOMENTS)
    assert dataset.manifest.files == reference.manifest.files
    assert dataset.manifest.checksum == reference.manifest.checksum
    assert dataset.manifest.time_span == (seconds(MOMENTS)[0] * 10**6, seconds(MOMENTS)[-1] * 10**6)


@pytest.mark.parametrize(
    "write",
    [
        with_arrow(pa.date32()),
        with_arrow(pa.date64()),
        with_duckdb("DATE"),
        with_arrow(pa.timestamp("ns", "UTC")),
    ],
    ids=["date32", "date64", "duckdb-DATE", "ns"],
)
def test_days_are_their_midnight(write: Writer, tmp_path: Path) -> None:
    as_times = prepare_moments(tmp_path / "a", WRITERS["arrow-us-None"], DAYS)
    as_days = prepare_moments(tmp_path / "b", write, DAYS)
    assert as_days.manifest.files == as_times.manifest.files


# Nanoseconds of 64 bits end in 2262; INT96 does not.
@pytest.mark.parametrize("name", [name for name in WRITERS if "ns" not in name.lower().split("-")[1].split("_")])
def test_items_of_any_century_keep_their_time_and_events_are_refused_by_row(name: str, tmp_path: Path) -> None:
    dataset = prepare_moments(tmp_path / "a", WRITERS[name], MOMENTS, FAR)
    reference = prepare_moments(tmp_path / "b", WRITERS["arrow-us-None"], MOMENTS, FAR)
    assert dataset.manifest.files == reference.manifest.files
    with pytest.raises(DataError, match=r'3 rows with a time out of range(.|\n)*row 8: "1600-01-01') as error:
        prepare_moments(tmp_path / "c", WRITERS[name], MOMENTS + FAR)
    assert "2300-01-01" in str(error.value)


@pytest.mark.parametrize("first", ["ns", "us", "s"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_files_of_several_units_are_one_table(first: str, zone: str | None, tmp_path: Path) -> None:
    """Nanoseconds that no other file can hold are cut from an item's time."""
    times = pa.array([1_700_000_000_000_000_123], pa.timestamp("ns", zone))
    for number, unit in enumerate(sorted(("ns", "us", "s"), key=lambda unit: unit != first)):
        moment = times.cast(pa.timestamp(unit, zone), safe=False)
        table = {"item_id": [f"i{number}"], "title": ["x"], "released": moment}
        pq.write_table(pa.table(table), tmp_path / f"items-{number}.parquet")
        pq.write_table(
            pa.table({"user_id": ["u"], "item_id": [f"i{number}"], "t": moment, "seen_at": moment}),
            tmp_path / f"events-{number}.parquet",
        )
    prepare(f"{tmp_path}/events-*.parquet", f"{tmp_path}/items-*.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    dataset = Dataset.open(tmp_path / "dataset")
    assert dataset.manifest.time_span == (1_700_000_000_000_000, 1_700_000_000_000_000)
    assert dataset.manifest.item_fields_filled["released"] == 3


def test_times_beyond_sixty_four_bits_of_microseconds_are_refused(tmp_path: Path) -> None:
    """DuckDB writes 'infinity', and anything can write milliseconds of the year 292 million."""
    items = pa.table({"item_id": ["i0"], "title": ["x"], "released": pa.array([2**62], pa.timestamp("ms"))})
    pq.write_table(items, tmp_path / "items.parquet")
    with_arrow(pa.timestamp("us"))(
        {"user_id": ["u"], "item_id": ["i0"], "t": MOMENTS[:1], "seen_at": MOMENTS[:1]}, tmp_path / "events.parquet"
    )
    with pytest.raises(DataError, match="column 'released': 1 row with times that cannot be read"):
        prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    pq.write_table(items.set_column(2, "released", pa.array([0], pa.timestamp("ms"))), tmp_path / "items.parquet")
    for days in (2**30, 2**31 - 1):  # the second is DuckDB's infinity
        day = pa.array([days], pa.int32()).cast(pa.date32())
        events = {"user_id": ["u"], "item_id": ["i0"], "t": day, "seen_at": day}
        pq.write_table(pa.table(events), tmp_path / "events.parquet")
        with pytest.raises(DataError, match="1 row with a time that cannot be read"):
            prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    far = pa.array([2**62], pa.timestamp("ms"))
    pq.write_table(
        pa.table({"user_id": ["u"], "item_id": ["i0"], "t": far, "seen_at": far}), tmp_path / "events.parquet"
    )
    with pytest.raises(DataError, match=r"events\.parquet or .*items\.parquet cannot be read: Conversion Error"):
        prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
