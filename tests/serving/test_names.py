"""Names beside ids: in answers and files, found by words; ranks, neighbours and what copying said."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from habitus.cli.serve import serve
from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.exporting import RecommendOptions, recommend_file
from habitus.exporting.vectors import export_items
from habitus.serving import RankRequest, RecommendRequest, RequestError, Retriever, SimilarRequest, ValidationUsers
from habitus.serving.schemas import UnknownItemError

from .conftest import MARKUP, Log


@pytest.fixture(scope="module")
def named(named_run: Path) -> Retriever:
    return Retriever.open(named_run, device="cpu", read_only=True)


@pytest.fixture
def writable(named_run: Path, tmp_path: Path) -> Retriever:
    return Retriever.open(named_run, device="cpu", items=tmp_path / "items")


def test_answers_carry_names_beside_ids(named: Retriever) -> None:
    response = named.recommend([RecommendRequest(history=[{"item_id": 17}], k=300)])[0]
    shown = {item.item_id: item.display or {} for item in response.items}
    assert shown[0]["name"].startswith("Thing 0 é-")
    assert shown[3]["name"] == MARKUP  # as it is: whoever shows it escapes it
    assert len(shown[5]["name"]) == 1_000
    assert shown[5]["photo"] == "https://pictures.test/5.png"
    assert float(shown[0]["price"]) > 0
    assert named.item(3).display == shown[3]


def test_a_run_without_names_answers_as_before(trained_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    manifest = run / "serve" / "catalogue" / "manifest.json"
    values = json.loads(manifest.read_text())
    assert "display.parquet" not in values["files"]
    del values["files"]["counts.npy"], values["sha256"]  # as a catalogue was written before
    (run / "serve" / "catalogue" / "counts.npy").unlink()
    manifest.write_text(json.dumps(values))
    retriever = Retriever.open(run, device="cpu", read_only=True)
    response = retriever.recommend([RecommendRequest(history=[{"item_id": 17}])])[0]
    assert {item.display for item in response.items} == {None}
    assert {item.copied for item in response.items} == {None}
    assert retriever.some_items(3) == [0, 1, 2]
    assert [item.item_id for item in retriever.find_items("29", 3).items] == [29, 290, 291]


def test_items_are_found_by_the_beginnings_of_words(named: Retriever, named_dataset: Dataset) -> None:
    def found(text: str, k: int = 400) -> list[int]:
        return [item.item_id for item in named.find_items(text, k).items]

    counts = named_dataset.item_train_counts
    everything = found("")
    assert sorted(everything) == list(range(300))
    assert [counts[row] for row in everything] == sorted(counts, reverse=True)
    assert sorted(found("thing")) == sorted(set(range(300)) - {3, 5})
    twelves = set(found("THING 12"))
    assert {12, *range(120, 130)} <= twelves
    prices = {row: named.item(row).display["price"] for row in twelves}  # type: ignore[index]
    assert all(str(row).startswith("12") or re.search(r"\b12", prices[row]) for row in twelves)
    assert found("12 thing", 2) == found("thing 12", 2)
    assert len(found("e")) > 290  # é without its accent
    assert found("hing") == []  # not the beginning of a word
    assert found("onerror") == [3]
    assert found("pictures") == []  # addresses are not searched
    assert found("no such words") == []
    with pytest.raises(RequestError, match="k = 0"):
        named.find_items("thing", 0)


def test_an_item_added_at_run_time_is_named_and_found(writable: Retriever) -> None:
    fields = {"title": "walnut desk", "price": 240, "name": "Walnut\tDesk", "photo": "https://pictures.test/new.png"}
    writable.put_item(9000, fields)
    shown = {"name": "Walnut Desk", "price": "240", "photo": "https://pictures.test/new.png"}
    assert writable.item(9000).display == shown
    assert [item.item_id for item in writable.find_items("wal des", 5).items] == [9000]
    assert writable.find_items("", 301).items[-1].item_id == 9000  # popular ones come first
    writable.delete_item(9000)
    assert writable.find_items("walnut", 5).items == ()
    with pytest.raises(RequestError, match="the item has no fields"):
        writable.put_item(9001, {"name": "shown alone, and nothing for the model to read"})
    with pytest.raises(RequestError, match="nmae"):
        writable.put_item(9001, {"title": "x", "nmae": "typo"})


def test_ranks_are_those_of_the_whole_list(named: Retriever, log: Log) -> None:
    history = log[1][:12]
    response = named.recommend([RecommendRequest(history=history, k=300)])[0]
    ids = [item.item_id for item in response.items]
    ranked = named.rank(RankRequest(history=history, item_ids=ids[:200]))
    assert ranked.num_items == 300
    by_list = {item.item_id: item for item in response.items}
    scores = np.array([item.score for item in response.items])
    for item in ranked.ranked:
        same = by_list[item.item_id]
        assert item.score == pytest.approx(same.score, abs=1e-5)
        assert item.probability == pytest.approx(same.probability, rel=1e-4)
        assert item.copied == pytest.approx(same.copied, abs=1e-5)
        assert abs(item.rank - np.count_nonzero(scores >= same.score)) <= 1  # equal but for the last digit
    assert [item.rank for item in ranked.ranked[:5]] == [1, 2, 3, 4, 5]
    with pytest.raises(RequestError, match="300 items to rank"):
        named.rank(RankRequest(history=history, item_ids=ids))


def test_the_share_of_copying_adds_up(named: Retriever, log: Log) -> None:
    response = named.recommend([RecommendRequest(history=log[1][:12], k=300)])[0]
    past = {event["item_id"] for event in log[1][:12]}
    copied = {item.item_id: item.probability * (item.copied or 0) for item in response.items}
    assert {item for item, share in copied.items() if share} == past
    assert sum(copied.values()) == pytest.approx(response.copied, rel=1e-4)
    assert 0 < (response.copied or 0) < 1


def test_a_new_item_ranks_where_it_stands_once_it_is_added(writable: Retriever, log: Log) -> None:
    history, fields = log[2][:9], {"title": "walnut desk", "price": 24.0, "category": "c1", "name": "Desk"}
    (before,) = writable.rank(RankRequest(history=history, items=[fields])).ranked
    assert (before.item_id, before.display, before.copied) == (None, {"name": "Desk", "price": "24"}, 0.0)
    writable.put_item(9000, fields)
    (after,) = writable.rank(RankRequest(history=history, item_ids=[9000])).ranked
    assert after.rank == before.rank
    assert after.probability == pytest.approx(before.probability, rel=1e-5)
    writable.delete_item(9000)
    with pytest.raises(UnknownItemError, match="9000"):
        writable.rank(RankRequest(history=history, item_ids=[9000]))
    with pytest.raises(RequestError, match="0 items to rank"):
        writable.rank(RankRequest(history=history))


def test_similar_items_have_the_largest_cosines(named: Retriever, items: list[dict[str, object]]) -> None:
    vectors = named.candidates.vectors(np.arange(300)).double().numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors[8]
    order = [row for row in np.argsort(-cosines, kind="stable").tolist() if row != 8][:5]
    near = named.similar(SimilarRequest(item_id=8, k=5)).items
    assert [item.item_id for item in near] == order
    assert [item.similarity for item in near] == pytest.approx(cosines[order].tolist(), abs=1e-4)
    fields = {name: value for name, value in items[8].items() if value is not None}
    described = named.similar(SimilarRequest(fields=fields, k=1)).items
    assert [item.item_id for item in described] == [8]
    assert described[0].similarity == pytest.approx(1, abs=1e-4)
    with pytest.raises(RequestError, match="both given or both absent"):
        named.similar(SimilarRequest())


def test_files_hold_names(named: Retriever, log: Log, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"user_id": 1, "item_id": 3}\n{"user_id": 1, "item_id": 8}\n')
    for suffix in ("parquet", "csv", "jsonl"):
        recommend_file(named, str(tmp_path / "log.jsonl"), tmp_path / f"out.{suffix}", RecommendOptions(k=300))
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert list(table[0]) == ["user_id", "rank", "item_id", "score", "probability", "name", "price", "photo"]
    assert next(row["name"] for row in table if row["item_id"] == 3) == MARKUP
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in table]
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert [item["display"]["name"] for item in line["items"]] == [row["name"] for row in table]
    export_items(named, tmp_path / "vectors.parquet")
    vectors = pq.read_table(tmp_path / "vectors.parquet")
    assert vectors.column_names == ["item_id", "name", "price", "photo", "vector"]
    assert vectors["name"][3].as_py() == MARKUP


def test_a_validation_user_is_shown_without_the_events_that_test(
    named: Retriever, named_dataset: Dataset, log: Log
) -> None:
    users = ValidationUsers(named_dataset)
    listed = users.find("", 5)
    assert listed.num_users == sum(len(events) > 2 for events in log.values())
    twelves = users.find("12", 100).users
    assert twelves[0] == 12
    assert sorted(twelves) == [12, *(user for user in range(120, 130) if len(log[user]) > 2)]
    shown = users.history("12", named)
    events = log[12]
    assert [event.item_id for event in shown.events] == [event["item_id"] for event in events[:-1]]
    assert [event.validates for event in shown.events] == [False] * (len(events) - 2) + [True]
    for one, raw in zip(shown.events, events, strict=False):
        assert one.event["event_type"] == raw["event_type"]
        assert one.event["timestamp"] == raw["timestamp"].replace(tzinfo=None).isoformat()
        assert one.display == named.item(raw["item_id"]).display
    raw_history = [{**event, "timestamp": event["timestamp"].isoformat()} for event in events[:-2]]
    requests = [RecommendRequest(history=history) for history in ([e.event for e in shown.events[:-1]], raw_history)]
    as_shown, as_logged = named.recommend(requests)
    assert [item.item_id for item in as_shown.items] == [item.item_id for item in as_logged.items]
    with pytest.raises(UnknownItemError, match="no validation user"):
        users.history("nobody", named)


def test_options_that_would_show_too_much_are_refused(named_run: Path, named_dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="without --data"):
        serve(named_run, show_users=True)
    with pytest.raises(ConfigError, match="can be reached from other machines") as refused:
        serve(named_run, data=named_dataset.path, show_users=True, host="0.0.0.0", port=0)
    assert "leave out --host" in refused.value.next_step
    for origin in ("images.example.org", "https://a.org/path", "https://a.org; script-src *", "https://*", "data:"):
        with pytest.raises(ConfigError, match="not the origin of a server"):
            serve(named_run, images=[origin])
