"""Texts and vectors of events: stored once, read with the event that holds them, refused where they are bad."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare, update
from habitus.errors import ConfigError, DataError
from habitus.events import Schema

from .tables import SHARED_DATA, SMALL, make_items, prepared, write_tables

TEXTS = [
    "red shoes",
    None,
    "  ",
    "наушники",
    "靴 を 買う",
    "حذاء أحمر",
    "👟" * 40,
    "a" * 1_000_000,
    "red shoes",
    "tab\there",
]
ROLES = {"user": "user_id", "item": "item_id", "timestamp": "position", "time_unit": "order"}
ITEMS = {"item": "item_id", "fields": {"title": "text", "brand": "category"}}


def schema_of(fields: dict[str, str], **more: Any) -> Schema:
    return Schema.parse(
        {"events": {**ROLES, "fields": fields, **more.pop("events", {})}, "items": ITEMS, **more}, "test"
    )


def log_of(**columns: list[Any]) -> dict[str, list[Any]]:
    """Ten events of each of two users, the first in a window with both."""
    size = len(next(iter(columns.values())))
    users = [f"u{n // 10}" for n in range(size)]
    return {"user_id": users, "item_id": [f"i{n % 6}" for n in range(size)], "position": list(range(size)), **columns}


def test_texts_of_any_script_and_length_are_stored_once_and_read_with_their_events(tmp_path: Path) -> None:
    schema = schema_of({"query": "text"})
    dataset = prepared(tmp_path, log_of(query=TEXTS * 2), schema=schema)
    assert dataset.event_texts["query"].to_pylist()[:2] == ["red shoes", "наушники"]  # in the order of the log
    assert dataset.event_contents["query"].shape == (1 + 7, SMALL.text_len)  # the missing one, and those that differ
    assert dataset.manifest.event_fields_filled["query"] == 16
    split = "train" if dataset.has_side("train") else "validation"
    batch = dataset.gather(split, np.arange(dataset.counts(split).windows))
    rows = dataset.event_rows(split, np.arange(dataset.counts(split).windows))
    for row, tokens in zip(rows.ravel(), batch.fields["query"].reshape(-1, SMALL.text_len), strict=True):
        text = TEXTS[row % 10] if row >= 0 else None
        expected = dataset.tokenizer.encode(" ".join((text or "").split())[:256]).ids[: SMALL.text_len]
        assert tokens.tolist() == expected + [0] * (SMALL.text_len - len(expected)), (text or "")[:20]
    assert dataset.fields.event[0].size == dataset.fields.item[0].size == dataset.tokenizer.get_vocab_size()


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_the_tokenizer_reads_texts_of_training_events_only(tmp_path: Path, split: str) -> None:
    """Ten users of ten events, each with one word of its own: it becomes a token where its event trains."""
    letters = np.random.default_rng(0).integers(97, 123, (100, 8))
    words = ["".join(map(chr, row)) for row in letters.tolist()]
    options = PrepareOptions(**{**SMALL.__dict__, "split": split, "validation_share": 0.3, "vocabulary_size": 8192})
    log = log_of(query=[f"{word} {word}" for word in words])
    log["position"] = [n % 10 for n in range(100)]
    schema = schema_of({"query": "text"}, events={"time_unit": "s"})
    dataset = prepared(tmp_path, log, schema=schema, options=options)
    _, ends = dataset.user_parts.part("train")
    rows = [row for start, end in zip(dataset.user_offsets, ends, strict=False) for row in range(start, start + end)]
    texts, numbers = dataset.event_texts["query"].to_pylist(), np.asarray(dataset.event_fields["query"])
    assert 50 < len(rows) < 95
    trained = {texts[number - 1] for number in numbers[rows]}
    for text in texts:
        assert (len(dataset.tokenizer.encode(text).ids) == 2) == (text in trained), text


def test_windows_of_any_length_carry_the_same_texts(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, log_of(query=[f"word {n}" for n in range(20)]), schema=schema_of({"query": "text"}))
    for seq_len in (2, 500):  # the second is longer than any history
        view = dataset.with_seq_len(seq_len)
        for split in ("train", "validation"):
            if not view.has_side(split):  # type: ignore[arg-type]
                continue
            batch = view.gather(split, np.arange(view.counts(split).windows))  # type: ignore[arg-type]
            rows = view.event_rows(split, np.arange(view.counts(split).windows))  # type: ignore[arg-type]
            expected = dataset.event_contents["query"][dataset.event_fields["query"][rows[rows >= 0]]]
            np.testing.assert_array_equal(batch.fields["query"][rows >= 0], expected)
            assert not batch.fields["query"][rows < 0].any()
    with pytest.raises(ConfigError, match=r"seq_len is 1"):
        dataset.with_seq_len(1)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_vectors_are_read_with_their_events(tmp_path: Path, kind: str) -> None:
    vectors = [[1.0, 2.5], None, [0.0, -1.0], [1.0, 2.5], [3.0, 4.0]] * 4
    dataset = prepared(tmp_path, log_of(picture=vectors), schema=schema_of({"picture": "vector"}), kind=kind)
    assert dataset.event_contents["picture"].shape == (1 + 3, 2)
    values = dataset.event_values(slice(0, 5))["picture"]
    np.testing.assert_array_equal(values, [[1, 2.5], [np.nan] * 2, [0, -1], [1, 2.5], [3, 4]])


def test_bad_vectors_are_refused_by_row_or_made_missing(tmp_path: Path) -> None:
    vectors = [[1.0, 2.0], [3.0], [1.0, float("inf")], [5.0, 6.0]] * 5
    schema = schema_of({"picture": "vector"})
    with pytest.raises(DataError) as caught:
        prepared(tmp_path / "a", log_of(picture=vectors), schema=schema)
    message = str(caught.value)
    assert "events, column 'picture': 5 rows with a vector of another length" in message
    assert "events.parquet row 2: length 1" in message
    assert "Expected length 2, the most frequent" in message
    assert "5 rows with NaN or infinite entries" in message
    assert "row 3" in message
    assert not (tmp_path / "a" / "dataset").exists()
    dropping = PrepareOptions(**{**SMALL.__dict__, "on_bad": "drop"})
    dataset = prepared(tmp_path / "b", log_of(picture=vectors), schema=schema, options=dropping)
    assert dataset.num_events == 20
    assert np.isnan(dataset.event_values(slice(0, 4))["picture"]).all(1).tolist() == [False, True, True, False]
    assert dataset.manifest.event_fields_filled["picture"] == 10
    assert dataset.manifest.dropped == {
        "events.picture: a vector of another length": 5,
        "events.picture: NaN or infinite entries": 5,
    }
    with pytest.raises(DataError, match=r"column 'picture' .* has type int64"):
        prepared(tmp_path / "c", log_of(picture=[1] * 20), schema=schema)


@pytest.mark.parametrize(
    ("vectors", "kind", "message"),
    [
        ([[1.0, 2.0], [1.0, 1e300]] * 10, "parquet", r"10 rows with NaN or infinite entries .* row 2: \[1\.0, inf\]"),
        ([[1.0, 2.0], [1.0, None]] * 10, "parquet", r"10 rows with NaN or infinite entries .* row 2: \[1\.0, None\]"),
        (["[1, 2]", "hello"] * 10, "csv", r'10 rows with a vector of another length .* row 2: "hello"'),
        (["[1, 2]", "[1, NaN]"] * 10, "csv", r"10 rows with NaN or infinite entries .* row 2: \[1\.0, nan\]"),
        ([[n, 1.0] for n in range(6)] + [[7.0]] * 14, "parquet", r"6 rows .* row 1: length 2.* Expected length 1,"),
    ],
)
def test_what_is_no_vector_is_named(tmp_path: Path, vectors: list[Any], kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, log_of(picture=vectors), schema=schema_of({"picture": "vector"}), kind=kind)


def test_vectors_written_as_text_may_be_as_long_as_they_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(20, 2048))  # 40,000 characters each, more than are kept of a text
    dataset = prepared(tmp_path, log_of(picture=vectors.tolist()), schema=schema_of({"picture": "vector"}), kind="csv")
    np.testing.assert_allclose(dataset.event_values(slice(0, 20))["picture"], vectors, rtol=1e-6)


def test_fields_without_a_value_are_missing_everywhere(tmp_path: Path) -> None:
    schema = schema_of({"query": "text", "picture": "vector"})
    blank = [None, "", "  ", "\t\n", "\u3000"]
    dataset = prepared(tmp_path, log_of(query=blank * 4, picture=[None] * 20), schema=schema)
    assert dataset.manifest.event_fields_filled == {"query": 0, "picture": 0}
    batch = dataset.gather("train", np.arange(dataset.counts("train").windows))
    assert not batch.fields["query"].any() and np.isnan(batch.fields["picture"]).all()


def test_control_characters_are_refused_or_become_spaces(tmp_path: Path) -> None:
    log, schema = (
        log_of(query=["red\x00shoes", "red shoes", "e\u0301te\u0301", "\u202eshoes"] * 5),
        schema_of({"query": "text"}),
    )
    with pytest.raises(
        DataError, match=r"column 'query': 5 rows with NUL or other control .* row 1: \"red\\u0000shoes"
    ):
        prepared(tmp_path / "a", log, schema=schema)
    dropping = PrepareOptions(**{**SMALL.__dict__, "on_bad": "drop"})
    dataset = prepared(tmp_path / "b", log, schema=schema, options=dropping)
    assert dataset.num_events == 20
    assert dataset.manifest.dropped == {"events.query: NUL or other control characters": 5}
    tokens = dataset.event_values(slice(0, 4))["query"]
    assert tokens[0].tolist() == tokens[1].tolist() and tokens.any(1).all()
    assert tokens[2].tolist()[:1] == dataset.tokenizer.encode("\u00e9t\u00e9").ids[:1]  # marks are joined to letters


def test_a_search_is_an_event_without_an_item(tmp_path: Path) -> None:
    log = log_of(query=["shoes" if n % 2 else None for n in range(20)], kind=["search", "view"] * 10)
    log["item_id"] = [
        None if kind == "search" else item for kind, item in zip(log["kind"], log["item_id"], strict=True)
    ]
    targets = {"column": "kind", "weights": {"view": 1.0}}
    schema = schema_of({"query": "text"}, events={"no_item": "(none)"}, targets=targets)
    dataset = prepared(tmp_path, log, schema=schema)
    assert dataset.num_items == 7
    assert dataset.item_ids().column(0).to_pylist()[6] == "(none)"
    assert dataset.items[:4].tolist() == [6, 1, 6, 3]
    assert dataset.candidate_rows is not None and dataset.candidate_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert dataset.target_weight is not None and dataset.target_weight[:4].tolist() == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"events\.no_item is given without \[targets\]"):
        schema_of({"query": "text"}, events={"no_item": "(none)"})
    numbered = {**make_items(), "item_id": list(range(6))}
    log["item_id"] = [None if item is None else int(item[1:]) for item in log["item_id"]]
    write_tables(tmp_path / "numbers", log, numbered)
    with pytest.raises(ConfigError, match=r"events\.no_item is '\(none\)', and the item ids of .* are integers"):
        prepared(tmp_path / "numbers", log, numbered, schema)


def test_an_update_says_that_texts_are_numbered_over_the_whole_log(tmp_path: Path) -> None:
    dataset: Dataset = prepared(tmp_path, log_of(query=["a"] * 20), schema=schema_of({"query": "text"}))
    with pytest.raises(DataError, match=r"texts or vectors \(query\), which are numbered over the whole log"):
        update(dataset, f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", tmp_path / "more")


def shipped(name: str, log: str, out: Path) -> tuple[Dataset, Any]:
    """A real log, prepared with a schema of examples/schemas, and its events as a table."""
    folder, schema = SHARED_DATA / log, Path(__file__).parents[2] / "examples" / "schemas" / f"{name}.toml"
    prepare(f"{folder}/events.parquet", f"{folder}/items.parquet", Schema.read(schema), out)
    return Dataset.open(out), pq.read_table(folder / "events.parquet")


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real datasets are not beside this checkout")
def test_the_tags_of_films_are_read_with_their_events(tmp_path: Path) -> None:
    dataset, log = shipped("movielens_small_tags", "movielens_small", tmp_path / "dataset")
    tags = log["tag"].drop_null().to_pylist()
    assert dataset.manifest.event_fields_filled["tag"] == len(tags) == 3_683
    assert set(dataset.event_texts["tag"].to_pylist()) == {tag.strip(" ") for tag in tags}
    numbers = np.asarray(dataset.event_fields["tag"])
    assert (dataset.target_weight == (numbers == 0)).all()  # a tag is context, a rating is predicted
    tagged = numbers[numbers > 0]
    assert dataset.event_texts["tag"][int(tagged[0]) - 1].as_py() == "will ferrell"  # the first of the log


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real datasets are not beside this checkout")
def test_a_return_is_an_item_of_its_own_and_no_candidate(tmp_path: Path) -> None:
    dataset, log = shipped("online_retail_pairs", "online_retail", tmp_path / "dataset")
    pairs = log.group_by(["item_id", "event_type"]).aggregate([([], "count_all")]).to_pylist()
    ids = dataset.item_ids()
    ours = dict(
        zip(
            zip(ids["item_id"].to_pylist(), ids["event_type"].to_pylist(), strict=True),
            np.bincount(dataset.items, minlength=dataset.num_items).tolist(),
            strict=True,
        )
    )
    assert ours == {(pair["item_id"], pair["event_type"]): pair["count_all"] for pair in pairs}
    assert dataset.candidate_rows is not None
    kinds = ids["event_type"].take(dataset.candidate_rows).unique().to_pylist()
    assert kinds == ["purchase"]
