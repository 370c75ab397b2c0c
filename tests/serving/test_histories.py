"""Raw events encoded one by one are what preparation makes of a whole log."""

from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from habitus.data import Dataset
from habitus.data.columns import to_codes, to_numbers
from habitus.serving import EncodedHistory, RecommendRequest, Retriever, pack_histories
from habitus.serving.limits import Limits
from habitus.serving.schemas import RequestError
from habitus.serving.values import read_category, read_number, read_time

Log = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def retriever(trained_run: Path) -> Retriever:
    return Retriever.open(trained_run, device="cpu", read_only=True)


def encoded(retriever: Retriever, *histories: list[dict[str, Any]]) -> list[EncodedHistory]:
    return [retriever.encoder.encode(history, retriever.candidates.rows_of) for history in histories]


def test_a_history_is_encoded_as_the_prepared_log(retriever: Retriever, dataset: Dataset, log: Log) -> None:
    ids = dataset.user_ids().to_pylist()
    for place in range(0, len(ids), 17):
        start, stop = dataset.user_offsets[place : place + 2]
        history = encoded(retriever, log[ids[place]])[0]
        window = slice(max(start, stop - 64), stop)
        np.testing.assert_array_equal(history.rows, dataset.items[window])
        assert history.fields.keys() == dataset.event_fields.keys()
        for name, column in dataset.event_fields.items():
            np.testing.assert_array_equal(history.fields[name], column[window], err_msg=name)
        assert history.seen_rows == set(dataset.items[start:stop].tolist())


def test_values_may_come_as_text_as_in_a_csv(retriever: Retriever, log: Log) -> None:
    typed = log[4]
    text = [{name: str(value) for name, value in event.items() if value is not None} for event in typed]
    one, other = encoded(retriever, typed, text)
    np.testing.assert_array_equal(one.rows, other.rows)
    for name in one.fields:
        np.testing.assert_array_equal(one.fields[name], other.fields[name], err_msg=name)


def test_events_are_put_in_the_order_of_their_times(retriever: Retriever, log: Log) -> None:
    events = next(events for events in log.values() if len({event["timestamp"] for event in events}) == len(events) > 5)
    one, other = encoded(retriever, events, events[::-1])
    np.testing.assert_array_equal(one.rows, other.rows)
    tied = [{"item_id": item, "timestamp": "2025-01-01"} for item in (5, 3, 4)]
    assert encoded(retriever, tied)[0].rows.tolist() == [5, 3, 4]


def test_without_times_the_order_given_counts_and_the_clock_is_missing(retriever: Retriever) -> None:
    history = encoded(retriever, [{"item_id": 5}, {"item_id": 3}])[0]
    assert history.rows.tolist() == [5, 3]
    assert np.isnan(history.fields["time_gap"]).all()
    assert history.fields["hour"].tolist() == [0, 0]
    with pytest.raises(RequestError, match=r"history\[1\] has no 'timestamp'"):
        encoded(retriever, [{"item_id": 5, "timestamp": "2025-01-01"}, {"item_id": 3}])


def test_unknown_items_are_left_out_and_told(retriever: Retriever) -> None:
    history = encoded(retriever, [{"item_id": 5}, {"item_id": 999}, {"item_id": 3}, {"item_id": 999}])[0]
    assert history.rows.tolist() == [5, 3]
    assert history.unknown_ids == (999,)
    with pytest.raises(
        RequestError, match=r"none of the history's 1 events is of a known item: 999\n.*an item of the catalogue, as "
    ):
        retriever.embed_histories([[{"item_id": 999}]])


def test_the_newest_events_fill_the_window_and_all_are_seen(retriever: Retriever) -> None:
    events = [{"item_id": number % 100, "timestamp": f"2025-01-01T00:{number % 60:02d}:00"} for number in range(60)]
    events += [{"item_id": 200 + number, "timestamp": "2025-02-01"} for number in range(50)]
    history = encoded(retriever, events)[0]
    assert history.rows.tolist() == [*range(46, 60), *range(200, 250)]
    assert history.seen_rows == {*range(60), *range(200, 250)}
    assert history.fields["time_gap"][0] == 60.0  # from the event before the window


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ("item 5", "valid list"),
        ({"item_id": 5}, "valid list"),
        ([5.5], "an event, an object by column of the log, or the id of an item"),
        ([[5]], "or the id of an item"),
        ([True], "or the id of an item"),
        (["five"], "an integer"),
        ([{}], "item_id"),
        ([{"item_id": None}], "item_id"),
        ([{"item_id": "five"}], "an integer"),
        ([{"item_id": 5, "itemid": 5}], "did you mean 'item_id'"),
        ([{"item_id": 5, "price_paid": float("nan")}], "price_paid"),
        ([{"item_id": 5, "price_paid": "much"}], "price_paid"),
        ([{"item_id": 5, "event_type": ["view"]}], "event_type"),
        ([{"item_id": 5, "timestamp": "yesterday"}], "timestamp"),
        ([{"item_id": 5, "timestamp": 1700000000}], "timestamp"),
        ([{"item_id": 5, "timestamp": "1800-01-01"}], "1900 to 2199"),
        ([{"item_id": 5, "timestamp": "9999-12-31T23:59:59-23:59"}], "1900 to 2199"),
        ([{"item_id": 5}] * 10_001, "10,001 events"),
    ],
)
def test_histories_that_cannot_be_used_are_refused_in_words(retriever: Retriever, history: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        retriever.embed_histories([history])
    with pytest.raises(RequestError, match=message):
        retriever.recommend([RecommendRequest(history=history)])


def test_an_empty_history_has_no_vector(retriever: Retriever) -> None:
    with pytest.raises(RequestError, match="empty"):
        retriever.embed_histories([[]])


def test_an_event_value_never_seen_is_unknown_and_not_an_error(retriever: Retriever) -> None:
    history = encoded(retriever, [{"item_id": 5, "event_type": "teleport", "price_paid": None}])[0]
    assert history.fields["event_type"].tolist() == [0]
    assert np.isnan(history.fields["price_paid"]).all()


@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(-(2**53), 2**53).map(float)), min_size=1, max_size=20))
def test_a_category_reads_numbers_as_a_column_of_them(numbers: list[float | None]) -> None:
    texts = [read_category("x", number, 100) for number in numbers]
    known = pa.array(sorted({text for text in texts if text is not None}), pa.string())
    place = {text: code for code, text in enumerate(known.to_pylist(), 1)}
    expected = to_codes(pa.array(numbers, pa.float64()), known)
    assert [place.get(text, 0) if text is not None else 0 for text in texts] == expected.tolist()


@given(st.lists(st.one_of(st.booleans(), st.integers(-(2**63) + 1, 2**63 - 1)), min_size=1, max_size=5))
def test_a_category_reads_integers_and_booleans_as_columns_of_them(given_values: list[int]) -> None:
    for value in given_values:
        column = pa.array([value])
        assert to_codes(column, pa.array([read_category("x", value, 100)])).tolist() == [1]


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(-(10**30), 10**30)))
def test_a_number_reads_text_as_a_column_of_it(number: float) -> None:
    text = str(number)
    assert np.float32(read_number("x", text)) == to_numbers(pa.array([text]))[0]


def test_times_in_every_form_are_one_moment() -> None:
    noon = 1_735_732_800_000_000  # 2025-01-01 12:00 UTC
    east = timezone(timedelta(hours=3))
    same = ["2025-01-01T12:00:00", "2025-01-01 12:00:00Z", "2025-01-01T15:00:00+03:00"]
    same += [datetime(2025, 1, 1, 12), datetime(2025, 1, 1, 12, tzinfo=UTC), datetime(2025, 1, 1, 15, tzinfo=east)]
    assert {read_time("t", value, "datetime") for value in same} == {noon}
    assert read_time("t", date(2025, 1, 1), "datetime") == noon - 12 * 3_600_000_000
    assert read_time("t", noon / 1e6, "s") == noon
    assert read_time("t", str(noon // 1000), "ms") == noon
    assert read_time("t", noon, "us") == noon
    assert read_time("t", 2**60 + 1, "order") == 2**60 + 1
    for value in (0.5, "x", None, float("nan"), 2**70):
        with pytest.raises(RequestError):
            read_time("t", value, "order")


def test_packed_histories_get_the_queries_that_they_get_alone(retriever: Retriever, log: Log) -> None:
    histories = [log[user][: 1 + user % 40] for user in range(40)]
    together = retriever.embed_histories(histories)
    alone = np.concatenate([retriever.embed_histories([history]) for history in histories])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    batch = pack_histories(encoded(retriever, *histories), retriever.encoder.fields)[0]
    filled = sum(min(len(history), 64) for history in histories)
    assert (batch.segments >= 0).sum() == filled
    assert batch.items.size < 1.3 * filled  # short histories share windows


def test_many_histories_are_embedded_in_batches(retriever: Retriever, trained_run: Path, log: Log) -> None:
    """Else the memory of 64 requests that wait together would be that of all their histories at once."""
    few = Retriever.open(trained_run, device="cpu", read_only=True, limits=Limits(max_batch=16))
    slots: list[int] = []
    few.bundle.model.contextualizer.register_forward_pre_hook(lambda _, given: slots.append(given[1].shape[:2].numel()))
    histories = [log[user][:5] for user in range(40)]
    np.testing.assert_allclose(few.embed_histories(histories), retriever.embed_histories(histories), atol=2e-6)
    assert slots == [16 * 5, 16 * 5, 8 * 5]
