"""Updates that go wrong: killed in each phase, given twice, too old, of another form. The dataset stays as it is."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, update
from habitus.errors import DataError

from .tables import SMALL, make_events, make_items, prepared, write_tables

Table = dict[str, list[Any]]
PHASES = (
    "opening files", "checking events", "surveying items", "surveying events", "sorting events", "encoding items",
    "writing events", "cutting windows", "computing checksums",
)  # fmt: skip
IN_PARTS = "partitioning events", "writing events"
KILLED_AT = """
import os, signal, sys
from habitus.data import Dataset, PrepareOptions, update
dataset, later, out, phase, parts = sys.argv[1:]

def stop(name, done):
    if name == phase:
        os.kill(os.getpid(), signal.SIGKILL)

options = PrepareOptions(memory="256MiB", threads=1, parts=int(parts))
update(Dataset.open(dataset), f"{later}/events.parquet", f"{later}/items.parquet", out, options, stop)
"""


def halves() -> tuple[Table, Table]:
    """A log before and after its middle hour."""
    events = make_events(30, 9, seed=3)
    times = np.array(events["timestamp"])
    middle = np.sort(times)[len(times) // 2]
    parts = []
    for keep in (times < middle, times >= middle):
        parts.append({name: [column[row] for row in np.flatnonzero(keep)] for name, column in events.items()})
    return parts[0], parts[1]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    before, after = halves()
    write_tables(tmp_path / "later", after, make_items(12))  # three new ones
    return prepared(tmp_path / "first", before, make_items(9))


def files_of(dataset: Dataset) -> dict[str, bytes]:
    files = (path for path in dataset.path.rglob("*") if path.is_file())
    return {path.relative_to(dataset.path).as_posix(): path.read_bytes() for path in files}


def apply(dataset: Dataset, later: Path, out: Path, **options: Any) -> Dataset:
    from dataclasses import replace

    update(dataset, f"{later}/events.parquet", f"{later}/items.parquet", out, replace(SMALL, **options))
    return Dataset.open(out)


@pytest.mark.slow
def test_an_update_killed_in_any_phase_leaves_the_dataset_whole_and_the_next_succeeds(
    dataset: Dataset, tmp_path: Path
) -> None:
    before = files_of(dataset)
    expected = apply(dataset, tmp_path / "later", tmp_path / "expected").checksum
    (tmp_path / "work").mkdir()
    out = tmp_path / "work" / "grown"
    command = [sys.executable, "-c", KILLED_AT, str(dataset.path), str(tmp_path / "later"), str(out)]
    for phase, parts in [(phase, 1) for phase in PHASES] + [(phase, 3) for phase in IN_PARTS]:
        killed = subprocess.run([*command, phase, str(parts)], capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, f"{phase}: {killed.stderr}"
        assert not out.exists(), phase
        assert len(list(out.parent.iterdir())) == 1, "one stage at a time: the next try clears what the last one left"
    assert files_of(dataset) == before
    Dataset.open(dataset.path)  # its checksums hold
    assert apply(dataset, tmp_path / "later", out, parts=3).checksum == expected
    assert [path.name for path in out.parent.iterdir()] == ["grown"]


def test_the_same_update_twice_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    grown = apply(dataset, tmp_path / "later", tmp_path / "grown")
    rows = grown.num_events - dataset.num_events
    with pytest.raises(DataError, match="perhaps this update is in it already") as error:
        apply(grown, tmp_path / "later", tmp_path / "again")
    assert f"{rows:,} rows" in str(error.value)
    assert "not after the events that the dataset has" in str(error.value)
    with pytest.raises(DataError, match="no usable row is left after dropping"):
        apply(grown, tmp_path / "later", tmp_path / "again", on_bad="drop")
    assert not (tmp_path / "again").exists()


def test_an_update_that_begins_too_early_is_refused_or_its_old_rows_are_dropped_and_counted(
    dataset: Dataset, tmp_path: Path
) -> None:
    before, after = halves()
    late = {name: [*before[name][:7], *column] for name, column in after.items()}
    write_tables(tmp_path / "late", late, make_items(9))
    with pytest.raises(DataError, match="7 rows") as error:
        apply(dataset, tmp_path / "late", tmp_path / "out")
    last = np.datetime64(dataset.manifest.time_span[1], "us")
    assert f"events after {last}" in str(error.value)
    kept = apply(dataset, tmp_path / "late", tmp_path / "kept", on_bad="drop")
    assert kept.num_events == dataset.num_events + len(after["user_id"])
    assert kept.manifest.dropped["events.timestamp: a time that is not after the events that the dataset has"] == 7


def test_an_update_of_another_form_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    (_, after), items = halves(), make_items(9)
    seconds = [int(time.timestamp()) for time in after["timestamp"]]
    cases: list[tuple[Table, Table, str]] = [
        ({**after, "timestamp": seconds}, items, "timestamp"),
        ({**after, "paid": ["much"] * len(seconds)}, items, "paid"),
        (
            {name: column for name, column in after.items() if name != "event_type"},
            items,
            "'event_type' is missing from .*[\\s\\S]*name the columns as .* has them",
        ),
        (after, {name: column for name, column in items.items() if name != "brand"}, "'brand' is missing from"),
        (after, {**make_items(12), "price": ["cheap"] * 12}, "3 rows"),
        (after, {**items, "item_id": list(range(9))}, "item ids are int64 here and string"),
        ({**after, "user_id": [*after["user_id"][1:], None]}, items, "no user id"),
    ]
    before = files_of(dataset)
    for number, (events, catalogue, message) in enumerate(cases):
        write_tables(tmp_path / f"case {number}", events, catalogue)
        with pytest.raises(DataError, match=message):
            apply(dataset, tmp_path / f"case {number}", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert files_of(dataset) == before


def test_an_update_is_never_written_over_a_dataset(dataset: Dataset, tmp_path: Path) -> None:
    before = files_of(dataset)
    tables = [f"{tmp_path}/later/events.parquet", f"{tmp_path}/later/items.parquet"]
    command = ["prepare", *tables, "--update", str(dataset.path), "--out", str(dataset.path)]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, DataError)
    assert "exists already" in str(result.exception)
    assert files_of(dataset) == before
