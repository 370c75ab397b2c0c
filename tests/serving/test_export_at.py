"""Users at given times: the vectors that their earlier events alone give."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli.app import app
from habitus.data import Dataset
from habitus.errors import ConfigError, DataError
from habitus.exporting import Moments, export_users
from habitus.serving import Retriever

from .test_export import vectors_in

Log = dict[int, list[dict[str, Any]]]


def test_a_vector_is_that_of_the_events_strictly_before_its_time(
    run: Path, dataset: Dataset, log: Log, tmp_path: Path
) -> None:
    retriever = Retriever.open(run, device="cpu")
    # Of user 5 the first ten events, and all; user 3 at the moment of the fifth event, which is not before it.
    rows = [(5, log[5][10]["timestamp"]), (3, log[3][4]["timestamp"]), (5, log[5][-1]["timestamp"].replace(year=2199))]
    rows += [(7, log[7][0]["timestamp"])]  # nothing before
    times = pa.table({"user_id": [user for user, _ in rows], "time": [time for _, time in rows]})
    pq.write_table(times, tmp_path / "times.parquet")
    made = export_users(retriever, tmp_path / "out.parquet", data=dataset.path, at=tmp_path / "times.parquet")
    assert (made.rows, made.left_out) == (3, 1)
    users, vectors = vectors_in(tmp_path / "out.parquet")
    assert users == [5, 3, 5]
    assert pq.read_table(tmp_path / "out.parquet")["time"].to_pylist() == [time for _, time in rows[:3]]
    before = [[event for event in log[user] if event["timestamp"] < time] for user, time in rows[:3]]
    assert [len(events) for events in before] == [10, 4, len(log[5])]
    np.testing.assert_allclose(vectors, retriever.embed_histories(before), atol=2e-6)
    means = pq.read_table(tmp_path / "out.parquet")["mean_item_vector"].to_pylist()
    rows_of = [[event["item_id"] for event in events] for events in before]  # items are numbered as the catalogue is
    expected = [retriever.candidates.vectors(np.array(items)).float().numpy().mean(0) for items in rows_of]
    np.testing.assert_allclose(means, np.stack(expected), atol=1e-6)
    changed = [{**event, "item_id": (event["item_id"] + 1) % 300} for event in log[5][10:]]
    assert np.abs(retriever.embed_histories([log[5][:10] + changed])[0] - vectors[0]).max() > 1e-3


def test_moments_by_hand(dataset: Dataset) -> None:
    users = np.array([2, 2, 0])
    first, last = dataset.user_offsets[2], dataset.user_offsets[3]
    times = np.array([dataset.times[first], dataset.times[first] + 1, dataset.times[dataset.user_offsets[1] - 1]])
    moments = Moments.of(dataset, users, times)
    assert (moments.stops - moments.starts).tolist() == [0, 1, int(np.diff(dataset.user_offsets)[0]) - 1]
    assert moments.known.tolist() == [False, True, True]
    assert Moments.of(dataset, users, None).stops.tolist()[:2] == [last, last]


def test_what_is_no_file_of_times_is_refused(run: Path, dataset: Dataset, tmp_path: Path) -> None:
    retriever = Retriever.open(run, device="cpu")
    moment = np.datetime64("2025-03-01", "us").item()
    cases: list[tuple[dict[str, list[Any]], str]] = [
        ({"user_id": [1]}, "no column of times"),
        ({"user": [1], "time": [moment]}, "no column 'user_id'"),
        ({"user_id": [1, None], "time": [moment, moment]}, "1 rows without 'user_id'"),
        ({"user_id": [1, 2], "time": [moment, None]}, "1 rows have no time"),
        ({"user_id": [1], "time": [17]}, "is int64"),
        ({"user_id": [1], "time": ["last week"]}, "last week"),
        ({"user_id": [1, 10**9], "time": [moment, moment]}, "1 rows of users that .* lacks, the first 1000000000"),
        ({"user_id": [], "time": []}, "holds no rows"),
    ]
    for columns, message in cases:
        pq.write_table(pa.table(columns), tmp_path / "times.parquet")
        with pytest.raises(DataError, match=message):
            export_users(retriever, tmp_path / "out.parquet", data=dataset.path, at=tmp_path / "times.parquet")
    assert not (tmp_path / "out.parquet").exists()
    command = ["export", str(run), "--at", "times.parquet", "--out", str(tmp_path / "out.parquet")]
    for more, message in (
        (["--vectors", "items"], "--at was given with --vectors items"),
        (["--vectors", "users", "--histories", "log.parquet"], "--at was given with --histories"),
        (["--vectors", "users"], "without a dataset"),
    ):
        result = CliRunner().invoke(app, [*command, *more])
        assert isinstance(result.exception, ConfigError), result.output
        assert message in str(result.exception)
