"""Three sides: which events train, validate and test, and windows of any length over each of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, PrepareOptions, describe, prepare, prepare_world
from habitus.data.event_columns import _with_following
from habitus.data.manifest import SplitCounts
from habitus.data.split import TEST, TRAIN, VALIDATION, EventPlaces, Split
from habitus.data.windows import UserParts, Windows, pack
from habitus.errors import ConfigError, DataError
from habitus.evaluation.baselines import Popularity, baselines
from habitus.evaluation.evaluation import EvaluateOptions, evaluate
from habitus.evaluation.queries import QuerySet
from habitus.events import World, WorldConfig, schema_of
from habitus.store import SPLIT_NAMES

from .tables import SCHEMA, SMALL, make_events, make_items, prepared, write_tables

FORMAT1 = Path(__file__).parents[1] / "fixtures" / "format1" / "dataset"
WITH_TEST = replace(SMALL, test_share=0.2)
SCORED = EvaluateOptions(queries=50, batch_sequences=4, cutoffs=(2,), histories=())


def quiet(_: str, __: float) -> None:
    pass


def sides_of(dataset: Dataset) -> np.ndarray:
    """The side of every event, from the lengths of the users' parts."""
    within = np.arange(dataset.num_events) - np.repeat(dataset.user_offsets[:-1], np.diff(dataset.user_offsets))
    sides = np.full(dataset.num_events, -1)
    for code, name in enumerate(SPLIT_NAMES):
        begins, ends = (np.repeat(part, np.diff(dataset.user_offsets)) for part in dataset.user_parts.part(name))
        inside = (begins <= within) & (within < ends)
        assert (sides[inside] == -1).all()
        sides[inside] = code
    return sides


# --- the split ----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=12),
    st.sampled_from(["user", "time", "last"]),
    st.tuples(st.floats(0.05, 0.45), st.sampled_from([0.0, 0.05, 0.2, 0.45])),
    st.integers(1, 7),
)
def test_each_history_is_training_then_validation_then_test(
    histories: list[list[int]], kind: Any, shares: tuple[float, float], chunk: int
) -> None:
    """Events stream in chunks of any size, and every user's sides are prefix, middle and suffix."""
    times = [np.sort(history) for history in histories]
    all_times = np.concatenate(times)
    split = Split(kind=kind, validation_share=shares[0], test_share=shares[1]).with_cuts(
        lambda share: int(np.quantile(all_times, share, method="inverted_cdf"))
    )
    sides = _streamed(split, times, chunk)
    user_sides = split.user_sides(pa.array([str(number) for number in range(len(times))]))
    for number, (user_times, codes) in enumerate(zip(times, sides, strict=True)):
        size = len(codes)
        assert (np.diff(codes) >= 0).all(), "a user's sides are in order"
        if not split.test_share:
            assert TEST not in codes
        if kind == "user":
            assert set(codes) == {user_sides[number]}
        elif kind == "time":
            assert split.time_cut_us is not None
            assert np.array_equal(codes >= VALIDATION, user_times >= split.time_cut_us)
            assert split.test_cut_us is None or np.array_equal(codes == TEST, user_times >= split.test_cut_us)
        elif split.test_share:
            expected = [TRAIN] if size == 1 else [TRAIN, VALIDATION]
            assert codes.tolist() == ([TRAIN] * (size - 2) + [VALIDATION, TEST] if size > 2 else expected)
        else:
            assert codes.tolist() == [TRAIN] * (size - 1) + [VALIDATION]


def _streamed(split: Split, times: list[np.ndarray], chunk: int) -> list[np.ndarray]:
    """The sides of each user's events, worked out chunk by chunk as preparation does."""
    users = np.repeat(np.arange(len(times)), [len(one) for one in times])
    flat, sides = np.concatenate(times), []
    user_sides = split.user_sides(pa.array([str(number) for number in range(len(times))]))
    for first in range(0, len(users), chunk):
        here = users[first : first + chunk]
        before, after = users[:first], users[first + chunk :]
        is_first = np.diff(here, prepend=before[-1] if len(before) else -1) != 0
        places = EventPlaces(is_first, int((before == here[0]).sum()), min(int((after == here[-1]).sum()), 2))
        sides.append(split.event_sides(user_sides[here], flat[first : first + chunk], places))
    return np.split(np.concatenate(sides), np.cumsum([len(one) for one in times])[:-1])


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1, 1], [3, 1, 2], [1, 5], [4, 4]])
def test_a_chunk_knows_the_users_of_the_two_events_after_it(sizes: list[int]) -> None:
    from habitus.data.event_columns import EventChunk

    users = pa.array([f"u{number // 2}" for number in range(sum(sizes))])
    ends = np.cumsum(sizes)
    chunks = [
        EventChunk(users.slice(end - size, size), np.zeros(size), np.zeros(size, np.int64), {})
        for end, size in zip(ends, sizes, strict=True)
    ]
    passed = list(_with_following(iter(chunks)))
    assert [chunk for chunk, _ in passed] == chunks
    for (_, following), end in zip(passed, ends, strict=True):
        assert [user.as_py() for user in following] == users.to_pylist()[end : end + 2]


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_small_chunks_make_the_same_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, rows: int
) -> None:
    options = replace(WITH_TEST, split=split)
    expected = prepared(tmp_path / "one", options=options)
    monkeypatch.setattr("habitus.data.sorted_events.EVENT_CHUNK_ROWS", rows)
    dataset = prepared(tmp_path / "many", options=options)
    assert dataset.manifest.sides() == expected.manifest.sides()
    for name, entry in expected.manifest.files.items():  # ids are written, and moments summed, chunk by chunk
        assert name in ("users/ids.parquet", "encoders.json") or dataset.manifest.files[name] == entry, name


def test_validation_users_stay_whatever_the_test_share_is(tmp_path: Path) -> None:
    events = make_events(200)
    plain = prepared(tmp_path / "plain", events)
    tested = prepared(tmp_path / "tested", events, options=WITH_TEST)
    before, after = (dataset.user_parts.part("validation") for dataset in (plain, tested))
    assert np.array_equal(before[1] - before[0], after[1] - after[0])
    held = np.flatnonzero(np.diff(np.stack(tested.user_parts.part("test")), axis=0)[0])
    assert len(held) / 200 == pytest.approx(0.2, abs=0.08)
    assert (plain.user_parts.train_lengths[held] > 0).all()


def test_split_time_cuts_the_events_by_time(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(200), options=replace(WITH_TEST, split="time"))
    sides = sides_of(dataset)
    assert dataset.times[sides == TRAIN].max() < dataset.times[sides == VALIDATION].min()
    assert dataset.times[sides == VALIDATION].max() < dataset.times[sides == TEST].min()
    shares = np.bincount(sides) / len(sides)
    assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.05)  # an hour of the log holds 2.5% of it


def test_split_last_tests_the_last_event_and_validates_the_one_before(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(200), options=replace(WITH_TEST, split="last"))
    sides, lengths = sides_of(dataset), np.diff(dataset.user_offsets)
    assert {1, 2, 3} <= set(lengths.tolist())
    for user, length in enumerate(lengths.tolist()):
        first = dataset.user_offsets[user]
        few = [TRAIN, VALIDATION][:length]
        assert sides[first : first + length].tolist() == (
            [TRAIN] * (length - 2) + [VALIDATION, TEST] if length > 2 else few
        )
    assert dataset.counts("test").queries == int((lengths > 2).sum())
    assert dataset.counts("validation").queries == int((lengths > 1).sum())
    for segment in dataset.windows("test").segments:  # the target sees all that came before it, as far as it fits
        assert segment["length"] == min(lengths[segment["user"]], dataset.seq_len)
        assert segment["first_target"] == segment["length"] - 1


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_only_training_events_are_counted(tmp_path: Path, split: str) -> None:
    dataset = prepared(tmp_path, make_events(200), options=replace(WITH_TEST, split=split))
    trains = sides_of(dataset) == TRAIN
    counts = np.bincount(dataset.items[trains], minlength=dataset.num_items)
    assert np.array_equal(dataset.item_train_counts, counts)
    paid = dataset.event_fields["paid"][trains].astype(np.float64)
    spec = next(field for field in dataset.fields.event if field.name == "paid")
    assert spec.mean == pytest.approx(np.nanmean(paid), rel=1e-5)
    assert spec.std == pytest.approx(np.nanstd(paid), rel=1e-5)


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_baselines_are_those_of_the_training_events(tmp_path: Path, split: str) -> None:
    """What the held-out events are cannot be seen in any baseline's counts."""
    events = make_events(200)
    dataset = prepared(tmp_path / "one", events, options=replace(WITH_TEST, split=split))
    held_out = sides_of(dataset) == TEST
    ids = dataset.user_ids().to_pylist()
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    rows = sorted(zip(*events.values(), strict=True), key=lambda row: (ids.index(row[0]), row[2]))
    moved = [
        (user, "i0" if hidden else item, *rest) for (user, item, *rest), hidden in zip(rows, held_out, strict=True)
    ]
    assert [row[0] for row in moved] == [ids[user] for user in users]
    other = prepared(
        tmp_path / "two",
        {name: list(column) for name, column in zip(events, zip(*moved, strict=True), strict=True)},
        options=replace(WITH_TEST, split=split),
    )
    assert not np.array_equal(other.items, dataset.items)
    assert np.array_equal(other.items[~held_out], dataset.items[~held_out])
    assert np.array_equal(other.item_train_counts, dataset.item_train_counts)
    for one, two in zip(baselines(dataset), baselines(other), strict=True):
        scored = [evaluate(data, scorer, SCORED).metrics for data, scorer in ((dataset, one), (other, two))]
        assert scored[0] == scored[1], one.name


# --- windows ------------------------------------------------------------------------------------------------------

_HISTORIES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)).filter(any), min_size=1, max_size=30
)


@given(_HISTORIES, st.lists(st.integers(2, 40), min_size=1, max_size=3))
def test_windows_of_any_length_hold_each_pair_once_and_no_two_users(
    parts: list[tuple[int, int, int]], lengths: list[int]
) -> None:
    train, validation, test = np.array(parts).T
    total = train + validation + test
    users = UserParts(np.cumsum(total) - total, total, train, validation)
    for seq_len in lengths:
        windows = {side: pack(users.segments(side, seq_len), seq_len) for side in SPLIT_NAMES}
        # Training: every event follows its predecessor in exactly one window, but for those at a cut.
        expected = {
            int(start) + place
            for start, length in zip(users.starts, train, strict=True)
            for place in range(1, int(length))
            if place % seq_len
        }
        assert _targets(windows["train"]) == sorted(expected)
        for side, (begins, ends) in ((side, users.part(side)) for side in SPLIT_NAMES):
            for segment in windows[side].segments:
                user, start = segment["user"], segment["start"] - users.starts[segment["user"]]
                assert 0 <= start < start + segment["length"] <= ends[user], "of one user, and nothing later"
                assert start + segment["first_target"] >= max(begins[user], 1), "nothing of an earlier side is a target"
            held = [
                int(users.starts[user]) + place
                for user in range(len(parts))
                for place in range(max(int(begins[user]), 1), int(ends[user]))
            ]
            targets = _targets(windows[side])
            assert len(set(targets)) == len(targets)
            assert set(targets) <= set(held)
            filled = [windows[side].segments["length"][a:b].sum() for a, b in _ranges(windows[side])]
            assert all(2 <= size <= seq_len for size in filled)
            counts = SplitCounts.of(users, side, windows[side])
            assert counts.queries == len(targets)


def _ranges(windows: Windows) -> list[tuple[int, int]]:
    return list(zip(windows.offsets[:-1], windows.offsets[1:], strict=True))


def _targets(windows: Windows) -> list[int]:
    return sorted(
        event
        for segment in windows.segments
        for event in range(segment["start"] + segment["first_target"], segment["start"] + segment["length"])
    )


def test_windows_of_format_1_are_cut_as_they_were_stored() -> None:
    dataset = Dataset.open(FORMAT1)
    assert dataset.manifest.format_version == 1
    assert list(dataset.manifest.sides()) == ["train", "validation"]
    for side in dataset.manifest.sides():
        windows = dataset.windows(side)
        assert np.array_equal(windows.segments, np.load(FORMAT1 / side / "segments.npy"))
        assert np.array_equal(windows.offsets, np.load(FORMAT1 / side / "windows.npy"))
        assert SplitCounts.of(dataset.user_parts, side, windows) == dataset.counts(side)
        longer = dataset.with_seq_len(64)
        assert longer.counts(side).windows < dataset.counts(side).windows
        assert longer.gather(side, np.arange(3)).items.shape == (3, 64)


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_another_length_gives_the_batches_of_a_dataset_prepared_with_it(tmp_path: Path, split: str) -> None:
    events = make_events(100)
    options = replace(WITH_TEST, split=split)
    prepared_with = {
        length: prepared(tmp_path / str(length), events, options=replace(options, seq_len=length))
        for length in (2, 8, 64)
    }
    for length, expected in prepared_with.items():
        dataset = Dataset.open(tmp_path / "8" / "dataset", seq_len=length)
        assert dataset.seq_len == length
        assert dataset.checksum == prepared_with[8].checksum
        for side in SPLIT_NAMES:
            assert dataset.counts(side) == expected.counts(side)
            one, two = (data.batch(side, 5, seed=2, position=1) for data in (dataset, expected))
            for name, values in vars(one).items():
                if name != "fields":
                    assert np.array_equal(values, vars(two)[name]), name
            for name, values in one.fields.items():
                np.testing.assert_array_equal(values, two.fields[name])
    again = prepared_with[8].with_seq_len(64).with_seq_len(8)
    assert again.counts("train") == prepared_with[8].counts("train")
    assert prepared_with[8].with_seq_len(8) is prepared_with[8]


def test_lengths_below_two_are_refused_and_longer_than_any_history_is_fine(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, options=WITH_TEST)
    for seq_len in (1, 0, -3):
        with pytest.raises(ConfigError, match=f"seq_len is {seq_len}"):
            dataset.with_seq_len(seq_len)
        with pytest.raises(ConfigError, match=f"seq_len is {seq_len}"):
            Dataset.open(dataset.path, seq_len)
    huge = dataset.with_seq_len(50_000)
    assert huge.counts("train").windows == 1
    assert huge.batch("train", 1).items.shape == (1, 50_000)


def test_the_folder_holds_no_windows_and_the_manifest_no_empty_keys(tmp_path: Path) -> None:
    plain, tested = prepared(tmp_path / "a"), prepared(tmp_path / "b", options=WITH_TEST)
    users = {"users/ids.parquet", "users/offsets.npy", "users/train_length.npy"}
    for dataset, expected in ((plain, users), (tested, users | {"users/validation_length.npy"})):
        values = json.loads((dataset.path / "manifest.json").read_text())
        assert values["format_version"] == 2
        assert {name for name in values["files"] if not name.startswith(("items/", "events/"))} == expected | {
            "encoders.json", "schema.toml", "tokenizer.json",
        }  # fmt: skip
        assert ("test" in values) == ("test_share" in values["split"]) == (dataset is tested)
        assert "test_cut_us" not in values["split"]


# --- evaluation on test -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_test_queries_have_test_targets_and_see_what_came_before(tmp_path: Path, split: str) -> None:
    dataset = prepared(tmp_path, make_events(100), options=replace(WITH_TEST, split=split))
    sides, users = sides_of(dataset), np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    contexts = set()
    for code, side in ((VALIDATION, "validation"), (TEST, "test")):
        queries = QuerySet(dataset, 10**6, 4, 0, side=side)
        assert queries.num_queries == dataset.counts(side).queries
        for batch in queries:
            assert (sides[batch.events + 1] == code).all()
            assert np.array_equal(batch.targets, dataset.items[batch.events + 1])
            for event, user, history in zip(batch.events, batch.users, batch.histories, strict=True):
                visible = range(event + 1 - history, event + 1)
                assert {users[row] for row in visible} == {user}
                if side == "test":
                    contexts |= {int(sides[row]) for row in visible}
    assert contexts == (
        {TEST} if split == "user" else {TRAIN, VALIDATION, TEST} - ({TEST} if split == "last" else set())
    )


def test_an_evaluation_names_its_side_where_it_is_test(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(100), options=WITH_TEST)
    default, validation, test = (
        evaluate(dataset, Popularity(dataset), options)
        for options in (SCORED, replace(SCORED, side="validation"), replace(SCORED, side="test"))
    )
    assert default.metrics == validation.metrics != test.metrics
    assert set(default.metrics) == set(test.metrics)
    for regime in ("batch", "catalogue"):
        assert "side" not in default.specification[regime].to_values()
        assert test.specification[regime].to_values()["side"] == "test"
        assert test.specification[regime].query_set_checksum != default.specification[regime].query_set_checksum
    with pytest.raises(ConfigError, match="side is 'train'"):
        evaluate(dataset, Popularity(dataset), replace(SCORED, side="train"))  # type: ignore[arg-type]
    other = dataset.with_seq_len(16)
    assert QuerySet(other, 9, 4, 0).checksum() != QuerySet(dataset, 9, 4, 0).checksum()


def test_without_a_test_side_evaluation_on_it_is_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, make_events(100))
    assert not dataset.has_side("test")
    with pytest.raises(DataError, match=r"no test side(.|\n)*train, validation(.|\n)*--test-share"):
        evaluate(dataset, Popularity(dataset), replace(SCORED, side="test"))
    for ask in (dataset.counts, dataset.windows):
        with pytest.raises(DataError, match="no test side"):
            ask("test")
    with pytest.raises(DataError, match="no test side"):
        dataset.with_seq_len(4).counts("test")


def test_descriptions_show_the_test_side(tmp_path: Path) -> None:
    plain, tested = (
        prepared(tmp_path / "a", make_events(100)),
        prepared(tmp_path / "b", make_events(100), options=WITH_TEST),
    )
    assert "test" not in describe(plain).to_values()
    assert "test" not in repr(plain).split("item fields")[0].replace(str(plain.path), "")
    described = describe(tested)
    assert described.test is not None
    assert described.train.users + described.validation.users + described.test.users == 100
    assert f"{described.test.users:,} users" in repr(tested)
    shown = CliRunner().invoke(app, ["describe", str(tested.path)], env={"COLUMNS": "120"}).stdout
    assert "validation" in shown
    assert "test" in shown
    assert f"{described.test.queries:,}" in shown


# --- commands and bad input ---------------------------------------------------------------------------------------


def habitus(*arguments: Any) -> tuple[int, str]:
    from habitus.errors import HabitusError

    result = CliRunner().invoke(app, [str(part) for part in arguments], env={"COLUMNS": "120"})
    if isinstance(result.exception, HabitusError):
        return 2, str(result.exception)
    assert result.exception is None, result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "shares, message",
    [
        (("0.5", "0.5"), "nothing is left to train"),
        (("0.1", "0.95"), "nothing is left to train"),
        (("0.1", "-0.1"), "test_share = -0.1"),
        (("0.1", "1"), "test_share = 1"),
        (("0", "0.1"), "validation_share = 0"),
        (("0.1", "nan"), "test_share = nan"),
    ],
)
def test_shares_that_leave_nothing_are_refused(tmp_path: Path, shares: tuple[str, str], message: str) -> None:
    write_tables(tmp_path, make_events(), make_items())
    SCHEMA.write(tmp_path / "schema.toml")
    command = ["prepare", tmp_path / "events.parquet", tmp_path / "items.parquet", "--schema", tmp_path / "schema.toml"]
    code, said = habitus(*command, "--out", tmp_path / "d", "--validation-share", shares[0], "--test-share", shares[1])
    assert code == 2
    assert message in said
    assert not (tmp_path / "d").exists()


def test_split_last_takes_any_share(tmp_path: Path) -> None:
    options = replace(SMALL, split="last", validation_share=0.9, test_share=0.5)
    assert prepared(tmp_path, options=options).counts("test").queries > 0


def test_prepare_says_what_each_side_holds_and_evaluate_takes_the_side(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(200), make_items())
    SCHEMA.write(tmp_path / "schema.toml")
    code, said = habitus(
        "prepare", tmp_path / "events.parquet", tmp_path / "items.parquet", "--schema", tmp_path / "schema.toml",
        "--out", tmp_path / "dataset", "--seq-len", 8,
    )  # fmt: skip
    dataset = Dataset.open(tmp_path / "dataset")
    assert code == 0
    assert f"{dataset.counts('test').users} test" in said
    assert "warning" not in said
    assert dataset.manifest.split.test_share == 0.1
    scored = ["evaluate", "--baselines", "--data", dataset.path, "--queries", 40, "--device", "cpu"]
    on = {side: json.loads(habitus(*scored, "--json", "--side", side)[1]) for side in ("validation", "test")}
    assert on["validation"] == [
        {**one, "seconds": on["validation"][place]["seconds"]}
        for place, one in enumerate(json.loads(habitus(*scored, "--json")[1]))
    ]
    assert on["test"][0]["metrics"] != on["validation"][0]["metrics"]
    assert "40 test queries against 6 candidates" in habitus(*scored, "--side", "test")[1]
    code, said = habitus(*scored, "--side", "tests")
    assert (code, "validation" in said) == (2, True)


def test_worlds_are_written_with_a_test_side(tmp_path: Path) -> None:
    small = ["--users", 200, "--items", 50, "--events-per-user", 10, "--prepared", "--seq-len", 16]
    habitus("world", tmp_path / "a", *small)
    habitus("world", tmp_path / "b", *small, "--test-share", 0)
    with_test, without = Dataset.open(tmp_path / "a"), Dataset.open(tmp_path / "b")
    assert with_test.counts("test").users == pytest.approx(20, abs=12)
    assert not without.has_side("test")
    assert with_test.counts("validation") == without.counts("validation")
    code, said = habitus("world", tmp_path / "c", "--users", 2, "--items", 5, "--prepared")
    assert code == 0
    assert "warning: the test side has no queries: it holds 0 of 2 users" in said


def test_a_test_side_without_users_is_said_when_preparing_and_refused_when_evaluating(tmp_path: Path) -> None:
    events = {name: column[:9] for name, column in make_events().items()} | {"user_id": ["a"] * 4 + ["b"] * 5}
    write_tables(tmp_path, events, make_items())
    SCHEMA.write(tmp_path / "schema.toml")
    command = ["prepare", tmp_path / "events.parquet", tmp_path / "items.parquet", "--schema", tmp_path / "schema.toml"]
    code, said = habitus(*command, "--out", tmp_path / "dataset", "--test-share", 0.01)
    assert code == 0
    assert "warning: the test side has no queries: it holds 0 of 2 users" in said
    assert "larger --test-share" in said
    dataset = Dataset.open(tmp_path / "dataset")
    assert not dataset.has_side("test")
    assert "0 users" in repr(dataset)
    code, said = habitus("evaluate", "--baselines", "--data", dataset.path, "--side", "test")
    assert code == 2
    assert "no test windows: that side has 0 of 2 users" in said
    assert "larger --test-share" in said
    describe(dataset)


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_one_user_and_two_items_give_a_dataset_or_a_clear_word(tmp_path: Path, split: str) -> None:
    base = make_events(1, 2, seed=3)
    rows = len(base["user_id"])
    assert rows > 5
    one_user = prepared(tmp_path / "one", base, make_items(2), options=replace(WITH_TEST, split=split))
    assert one_user.num_users == 1
    sides = [side for side in SPLIT_NAMES if one_user.has_side(side)]
    assert sides == {"user": ["train"], "time": list(SPLIT_NAMES), "last": list(SPLIT_NAMES)}[split]
    assert len(one_user.manifest.warnings()) == 3 - len(sides)
    for side in ("validation", "test"):
        options = replace(SCORED, side=side)
        if one_user.has_side(side):
            assert evaluate(one_user, Popularity(one_user), options).metrics
        else:
            with pytest.raises(DataError, match=f"no {side} windows"):
                evaluate(one_user, Popularity(one_user), options)
    two_items = prepared(tmp_path / "two", make_events(60, 2), make_items(2), options=replace(WITH_TEST, split=split))
    for scorer in baselines(two_items):
        assert evaluate(two_items, scorer, replace(SCORED, side="test")).metrics["catalogue/recall@2"].value == 1.0


def test_items_and_values_unseen_in_training_are_scored(tmp_path: Path) -> None:
    """All targets of the test side are cold, with categories and numbers that training does not have."""
    events = make_events(100, 6)
    late = [time >= sorted(events["timestamp"])[int(len(events["timestamp"]) * 0.85)] for time in events["timestamp"]]
    events["item_id"] = [
        f"i{6 + n % 6}" if new else item for n, (item, new) in enumerate(zip(events["item_id"], late, strict=True))
    ]
    events["event_type"] = ["refund" if new else kind for kind, new in zip(events["event_type"], late, strict=True)]
    events["paid"] = [1e30 if new else None for new in late]  # not a single number in training
    dataset = prepared(tmp_path, events, make_items(12), options=replace(WITH_TEST, split="time", test_share=0.1))
    trains = sides_of(dataset) == TRAIN
    assert (dataset.item_train_counts[6:] == 0).all()
    assert "refund" in dataset.encoders.event_values["event_type"]
    refund = dataset.encoders.event_codes["event_type"]["refund"]
    assert refund not in dataset.event_fields["event_type"][trains]
    paid = next(field for field in dataset.fields.event if field.name == "paid")
    assert np.isfinite([paid.mean, paid.std]).all()
    for scorer in baselines(dataset):
        scored = evaluate(dataset, scorer, replace(SCORED, side="test"))
        assert scored.metrics["catalogue/loss/cold"].n == scored.metrics["catalogue/loss"].n
        assert np.isfinite(scored.metrics["catalogue/loss"].value)


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_many_users_of_two_events(tmp_path: Path, split: str) -> None:
    config = WorldConfig(
        num_users=100_000, num_items=50, events_per_user=2, min_events_per_user=2, length_spread=0, seed=1
    )
    world = World(config)
    options = PrepareOptions(seq_len=16, text_len=4, vocabulary_size=300, split=split, threads=2)  # type: ignore[arg-type]
    manifest = prepare_world(world, schema_of(world), tmp_path / "dataset", options, quiet)
    assert manifest.num_events == 200_000
    dataset = Dataset.open(tmp_path / "dataset")
    if split == "last":  # too short for a test event
        assert dataset.counts("validation").queries == 100_000
        assert [warning.split(":")[0] for warning in manifest.warnings()] == [
            "the train side has no queries", "the test side has no queries",
        ]  # fmt: skip
        return
    assert dataset.counts("train").fill(16) > 0.99
    assert dataset.has_side("test")
    scored = evaluate(dataset, Popularity(dataset), replace(SCORED, side="test"))
    assert scored.metrics["catalogue/loss"].n == 50
    assert dataset.with_seq_len(64).counts("test").queries == dataset.counts("test").queries


def test_files_of_a_world_and_the_world_itself_agree_on_uneven_shares(tmp_path: Path) -> None:
    from habitus.events import write_world

    world = World(WorldConfig(num_users=97, num_items=30, events_per_user=7, seed=5))
    write_world(world, tmp_path / "files", threads=1, progress=quiet)
    for number, (validation, test) in enumerate([(0.1, 0.1), (0.15, 0.3), (1 / 3, 1 / 7), (0.07, 0.0)]):
        options = replace(SMALL, split="time", validation_share=validation, test_share=test)
        files = f"{tmp_path}/files/events.parquet", f"{tmp_path}/files/items.parquet"
        via = prepare(*files, schema_of(world), tmp_path / f"via{number}", options)
        directly = prepare_world(world, schema_of(world), tmp_path / f"direct{number}", options, quiet)
        assert via == directly
