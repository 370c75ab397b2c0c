from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from habitus.data import Dataset
from habitus.data.windows import held_out_segments, pack, training_segments
from habitus.errors import DataError

from .tables import SMALL, make_events, make_items, prepared


def user_of_event(dataset: Dataset) -> np.ndarray:
    return np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))


def all_slots(dataset: Dataset, split: str):  # type: ignore[no-untyped-def]
    """Every window of a split, with the event behind each slot worked out the slow way."""
    segments, offsets = dataset.windows(split)
    for window in range(len(offsets) - 1):
        slots = []
        for number, segment in enumerate(segments[offsets[window] : offsets[window + 1]]):
            slots += [
                (number, place, int(segment["start"]) + place, int(segment["first_target"]), int(segment["length"]))
                for place in range(segment["length"])
            ]
        yield window, slots


@pytest.mark.parametrize("split", ["user", "time", "last"])
@pytest.mark.parametrize("side", ["train", "validation"])
def test_a_batch_is_what_a_slow_reading_of_the_log_gives(tmp_path: Path, split: str, side: str) -> None:
    dataset = prepared(tmp_path, options=replace(SMALL, split=split))
    users = user_of_event(dataset)
    num_windows = dataset.counts(side).windows
    batch = dataset.gather(side, np.arange(num_windows))
    rows = dataset.event_rows(side, np.arange(num_windows))
    queries = 0
    edges = []
    if side == "train":
        assert max(len({number for number, *_ in slots}) for _, slots in all_slots(dataset, side)) > 1, (
            "nothing is packed"
        )
    for window, slots in all_slots(dataset, side):
        assert len(slots) <= dataset.seq_len
        for slot in range(dataset.seq_len):
            assert rows[window, slot] == (slots[slot][2] if slot < len(slots) else -1)
            if slot >= len(slots):
                assert batch.segments[window, slot] == -1
                assert batch.targets[window, slot] == -1
                assert batch.items[window, slot] == 0
                assert batch.fields["event_type"][window, slot] == 0
                assert np.isnan(batch.fields["paid"][window, slot])
                continue
            number, place, event, first_target, length = slots[slot]
            assert batch.items[window, slot] == dataset.items[event]
            assert batch.positions[window, slot] == place
            assert batch.segments[window, slot] == number
            assert batch.users[window, number] == users[event]
            has_query = first_target <= place + 1 < length
            queries += has_query
            assert batch.targets[window, slot] == (dataset.items[event + 1] if has_query else -1)
            if has_query:
                assert users[event] == users[event + 1]
            for name in ("event_type", "paid", "time_gap", "hour", "weekday"):
                np.testing.assert_array_equal(batch.fields[name][window, slot], dataset.event_fields[name][event])
            if place == 0:
                edges.append(window * dataset.seq_len + slot)
        if len(slots) < dataset.seq_len:
            edges.append(window * dataset.seq_len + len(slots))
    assert queries == dataset.counts(side).queries > 0
    assert batch.boundaries[: len(edges)].tolist() == edges
    assert set(batch.boundaries[len(edges) :].tolist()) == {num_windows * dataset.seq_len}
    assert len(batch.boundaries) == num_windows * (dataset.counts(side).max_segments + 1) + 1


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_every_event_is_in_a_window_or_counted_as_left_out(tmp_path: Path, split: str) -> None:
    dataset = prepared(tmp_path, make_events(60), options=replace(SMALL, split=split))
    train_length = np.load(dataset.path / "users" / "train_length.npy")
    within = np.arange(dataset.num_events) - np.repeat(dataset.user_offsets[:-1], np.diff(dataset.user_offsets))
    trains = within < np.repeat(train_length, np.diff(dataset.user_offsets))
    for side, belongs in (("train", trains), ("validation", ~trains)):
        seen = np.zeros(dataset.num_events, bool)
        for _, slots in all_slots(dataset, side):
            seen[[event for _, _, event, _, _ in slots]] = True
        assert dataset.counts(side).left_out == int((belongs & ~seen).sum())
    assert dataset.counts("train").left_out + dataset.counts("validation").left_out > 0


def test_with_split_user_no_user_is_on_both_sides(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(200), make_items())
    train, held = (set(dataset.windows(side).segments["user"].tolist()) for side in ("train", "validation"))
    assert train and held
    assert not train & held
    assert len(held) / 200 == pytest.approx(0.1, abs=0.06)


def test_a_user_keeps_its_side_when_others_come(tmp_path: Path) -> None:
    few, many = prepared(tmp_path / "few", make_events(60)), prepared(tmp_path / "many", make_events(200))

    def sides(dataset: Dataset) -> dict[str, bool]:
        trains = np.load(dataset.path / "users" / "train_length.npy") > 0
        return dict(zip(dataset.user_ids().to_pylist(), trains.tolist(), strict=True))

    assert sides(few).items() <= sides(many).items()
    assert len(set(sides(few).values())) == 2


@pytest.mark.parametrize("split", ["time", "last"])
def test_no_training_event_is_later_than_its_users_validation_events(tmp_path: Path, split: str) -> None:
    dataset = prepared(tmp_path, make_events(60), make_items(), options=replace(SMALL, split=split))
    last_trained: dict[int, int] = {}
    for segment in dataset.windows("train").segments:
        end = int(segment["start"] + segment["length"]) - 1
        last_trained[int(segment["user"])] = max(last_trained.get(int(segment["user"]), -1), end)
    checked = 0
    for segment in dataset.windows("validation").segments:
        first_target = int(segment["start"] + segment["first_target"])
        trained = last_trained.get(int(segment["user"]))
        if trained is not None:
            checked += 1
            assert trained < first_target
            assert dataset.times[trained] <= dataset.times[first_target]
            if split == "time":
                cut = dataset.manifest.split.time_cut_us
                assert cut is not None
                assert dataset.times[trained] < cut <= dataset.times[first_target]
    assert checked > 5


def test_split_last_holds_out_exactly_the_last_event(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, options=replace(SMALL, split="last"))
    lengths = np.diff(dataset.user_offsets)
    assert dataset.counts("validation").queries == int((lengths > 1).sum())
    for segment in dataset.windows("validation").segments:
        assert segment["start"] + segment["length"] == dataset.user_offsets[segment["user"] + 1]
        assert segment["length"] == min(lengths[segment["user"]], dataset.seq_len)


def test_a_batch_asked_for_twice_is_identical_and_an_epoch_holds_every_window_once(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(100))
    num_windows = dataset.counts("train").windows
    again = Dataset.open(tmp_path / "dataset", verify=False)
    one, two = (d.batch("train", 4, seed=3, epoch=2, position=5) for d in (dataset, again))
    assert np.array_equal(one.items, two.items)
    assert np.array_equal(one.boundaries, two.boundaries)
    starts = []
    for position in range(dataset.num_batches("train", 4)):
        starts += dataset.batch("train", 4, seed=3, position=position).users[:, 0].tolist()
    expected = dataset.gather("train", np.arange(num_windows)).users[:, 0].tolist()
    assert sorted(starts[:num_windows]) == sorted(expected)
    assert starts[:num_windows] != expected
    other = dataset.batch("train", 4, seed=4, epoch=2, position=5)
    assert not np.array_equal(one.items, other.items)


def test_steps_walk_on_into_the_next_epoch(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(100))
    num_windows = dataset.counts("train").windows
    size = num_windows - 1
    second = dataset.batch("train", size, seed=1, position=1)  # the last window of epoch 0, then epoch 1
    fresh = dataset.batch("train", size, seed=1, epoch=1, position=0)
    assert np.array_equal(second.items[1:], fresh.items[: size - 1])


def test_an_empty_side_says_so(tmp_path: Path) -> None:
    events = {name: column[:3] for name, column in make_events().items()} | {"user_id": ["u1", "u1", "u1"]}
    dataset = prepared(tmp_path, events)
    empty = "validation" if dataset.counts("train").windows else "train"
    with pytest.raises(DataError, match="no windows"):
        dataset.batch(empty, 2)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(2, 12))
def test_packing_places_every_segment_once_and_never_overfills(lengths: list[int], seq_len: int) -> None:
    sizes = np.array(lengths)
    starts = np.cumsum(sizes) - sizes
    segments = training_segments(starts, sizes, seq_len)
    windows = pack(segments, seq_len)
    assert np.array_equal(np.sort(windows.segments, order="start"), np.sort(segments, order="start"))
    for first, last in zip(windows.offsets[:-1], windows.offsets[1:], strict=True):
        assert 2 <= windows.segments["length"][first:last].sum() <= seq_len
    # Best fit opens a window only when no open one has room: at most one window is less than half full.
    filled = np.add.reduceat(windows.segments["length"], windows.offsets[:-1]) if len(segments) else np.empty(0)
    assert (filled * 2 < seq_len).sum() <= 1


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), min_size=1, max_size=40), st.integers(2, 12))
def test_validation_targets_are_the_held_out_events(users: list[tuple[int, float]], seq_len: int) -> None:
    lengths = np.array([length for length, _ in users])
    train = np.array([int(length * share) for length, share in users])
    starts = np.cumsum(lengths) - lengths
    targets = []
    for segment in held_out_segments(starts, train, lengths, seq_len):
        targets += range(segment["start"] + segment["first_target"], segment["start"] + segment["length"])
        assert starts[segment["user"]] <= segment["start"]
    assert len(set(targets)) == len(targets)
    held = [
        s + i for s, n, t in zip(starts, lengths, train, strict=True) for i in range(max(t, 1), n)
    ]  # a cut every seq_len costs the event at its beginning, which no event of its window precedes
    missing = set(held) - set(targets)
    assert set(targets) <= set(held)
    assert len(missing) <= sum(-(-(n - t) // seq_len) for n, t in zip(lengths, train, strict=True))
