"""Run-time items: recommended at once, there after a restart, whole after kill -9, unchanged when the disk is full."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.errors import RunError
from habitus.serving import RecommendRequest, RecommendResponse, Retriever
from habitus.serving.item_store import ItemStore, JournalEntry
from habitus.serving.schemas import ReadOnlyError, RequestError, StorageError, UnknownItemError

Log = dict[int, list[dict[str, Any]]]


def fields_of(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "item_id"}


def ranks(response: RecommendResponse) -> dict[Any, int]:
    return {one.item_id: place for place, one in enumerate(response.items, 1)}


def test_an_added_item_scores_as_its_twin_in_the_catalogue(run: Path, log: Log, items: list[dict[str, Any]]) -> None:
    retriever = Retriever.open(run, device="cpu")
    request = RecommendRequest(history=log[3], k=310)
    best = retriever.recommend([request])[0].items[0]
    before = retriever.num_items
    retriever.put_item(5000, fields_of(items[best.item_id]))
    assert retriever.num_items == before + 1
    found = retriever.recommend([request])[0]
    by_id = {one.item_id: one for one in found.items}
    assert {one.item_id for one in found.items[:2]} == {best.item_id, 5000}  # embedded alone, so equal to rounding
    assert by_id[5000].score == pytest.approx(best.score, abs=1e-5)
    # The catalogue has one more item as likely as the best: probabilities fall by what it takes.
    assert by_id[best.item_id].probability == pytest.approx(best.probability / (1 + best.probability), rel=1e-4)
    assert sum(one.probability for one in found.items) == pytest.approx(1, abs=1e-5)


def test_a_withdrawn_item_is_gone_and_its_chance_goes_to_the_others(run: Path, log: Log) -> None:
    retriever = Retriever.open(run, device="cpu")
    request = RecommendRequest(history=log[5], k=300)
    before = retriever.recommend([request])[0].items
    retriever.delete_item(before[0].item_id)
    after = retriever.recommend([request])[0].items
    assert [one.item_id for one in after] == [one.item_id for one in before[1:]]
    left = 1 - before[0].probability
    assert after[0].probability == pytest.approx(before[1].probability / left, rel=1e-4)
    assert retriever.num_items == 299
    with pytest.raises(UnknownItemError, match="to withdraw"):
        retriever.delete_item(before[0].item_id)


def test_a_withdrawn_item_still_counts_in_histories(run: Path, log: Log) -> None:
    retriever = Retriever.open(run, device="cpu")
    before = retriever.embed_histories([log[7]])
    retriever.delete_item(log[7][-1]["item_id"])
    np.testing.assert_array_equal(retriever.embed_histories([log[7]]), before)
    answer = retriever.recommend([RecommendRequest(history=log[7], k=300)])[0]
    assert answer.unknown_items == ()
    assert log[7][-1]["item_id"] not in ranks(answer)


def test_a_changed_item_has_its_new_vector_everywhere(run: Path, log: Log, items: list[dict[str, Any]]) -> None:
    retriever = Retriever.open(run, device="cpu")
    request = RecommendRequest(history=log[11], k=300)
    before = retriever.recommend([request])[0].items
    first, last = before[0].item_id, before[-1].item_id
    retriever.put_item(last, fields_of(items[first]))
    after = {one.item_id: one for one in retriever.recommend([request])[0].items}
    assert len(after) == 300
    assert after[last].score == pytest.approx(before[0].score, abs=1e-5)
    other = retriever.embed_histories([[{"item_id": first}], [{"item_id": last}]])
    np.testing.assert_allclose(other[0], other[1], atol=1e-6)


def test_a_withdrawn_item_can_come_back(run: Path, log: Log, items: list[dict[str, Any]]) -> None:
    retriever = Retriever.open(run, device="cpu")
    retriever.put_item(900, fields_of(items[3]))
    retriever.delete_item(900)
    assert not retriever.item(900).recommended
    retriever.put_item(900, fields_of(items[4]))
    assert retriever.item(900).recommended
    assert retriever.num_items == 301
    retriever.delete_item(4)
    retriever.put_item(4, fields_of(items[4]))
    assert retriever.num_items == 301
    assert 4 in ranks(retriever.recommend([RecommendRequest(history=log[1], k=301)])[0])


def test_a_restarted_retriever_answers_the_same(run: Path, log: Log, items: list[dict[str, Any]]) -> None:
    first = Retriever.open(run, device="cpu")
    first.put_item(700, fields_of(items[8]))
    first.put_item(701, fields_of(items[9]))
    first.put_item(2, fields_of(items[100]))
    first.delete_item(701)
    first.delete_item(20)
    requests = [RecommendRequest(history=log[user], k=300, exclude_seen=user % 2 == 0) for user in range(12)]
    expected = first.recommend(requests)
    first.close()
    again = Retriever.open(run, device="cpu")
    assert again.recommend(requests) == expected
    assert again.num_items == first.num_items == 300
    again.store.compact()
    again.close()
    assert Retriever.open(run, device="cpu").recommend(requests) == expected


def test_items_embedded_by_another_model_are_embedded_again(
    run: Path, log: Log, items: list[dict[str, Any]], tmp_path: Path
) -> None:
    store = ItemStore(tmp_path / "items")
    store.put(800, JournalEntry(fields_of(items[8]), False, np.zeros(16, np.float32).tobytes(), "of another model"))
    found = Retriever.open(run, device="cpu", items=store)
    answer = {one.item_id: one.score for one in found.recommend([RecommendRequest(history=log[0], k=301)])[0].items}
    assert answer[800] == pytest.approx(answer[8], abs=1e-5)


def test_two_retrievers_may_share_a_store(run: Path, items: list[dict[str, Any]]) -> None:
    old = Retriever.open(run, device="cpu")
    new = Retriever.open(run, device="cpu", items=old.store)
    old.put_item(600, fields_of(items[1]))
    assert new.item(600).recommended
    new.delete_item(600)
    assert not old.item(600).recommended


def test_a_second_process_may_read_but_not_write(run: Path, items: list[dict[str, Any]]) -> None:
    first = Retriever.open(run, device="cpu")
    first.put_item(600, fields_of(items[1]))
    second = Retriever.open(run, device="cpu")  # another open file is to the lock as another process
    assert second.item(600).recommended
    with pytest.raises(StorageError, match="another process"):
        second.put_item(601, fields_of(items[1]))
    first.put_item(602, fields_of(items[2]))
    first.close()
    second.put_item(601, fields_of(items[1]))  # and sees what was written before it became the writer
    assert second.item(602).recommended


def test_read_only_means_it(run: Path, items: list[dict[str, Any]]) -> None:
    retriever = Retriever.open(run, device="cpu", read_only=True)
    with pytest.raises(ReadOnlyError):
        retriever.put_item(1, fields_of(items[1]))
    with pytest.raises(ReadOnlyError):
        retriever.delete_item(1)
    assert not (run / "serve" / "items").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no fields"),
        ({"title": None}, "no fields"),
        ({"titel": "x"}, "did you mean 'title'"),
        ({"price": float("nan")}, "price"),
        ({"price": float("inf")}, "price"),
        ({"price": 1e39}, "price"),
        ({"price": 10**5000}, "price"),
        ({"price": "cheap"}, "price"),
        ({"image": [0.5]}, "image"),
        ({"image": "x"}, "image"),
        ({"title": "a" * 200_000}, "characters"),
        ({"title": "\ud800"}, "surrogate"),
        ({"title": ["x"]}, "title"),
        ({"category": {"a": 1}}, "category"),
        ({"title": "x", "item_id": 8}, "not the item's id"),
        ([("title", "x")], "fields"),
    ],
)
def test_items_that_cannot_be_used_are_refused_and_change_nothing(run: Path, fields: Any, message: str) -> None:
    retriever = Retriever.open(run, device="cpu")
    with pytest.raises(RequestError, match=message):
        retriever.put_item(7, fields)
    assert retriever.num_items == 300
    assert not (run / "serve" / "items").exists()


@pytest.mark.parametrize("item_id", [None, True, 1.5, "seven", "../7", [7], {"item_id": 7}, 2**70, "9" * 40])
def test_ids_that_cannot_be_are_refused(run: Path, item_id: Any) -> None:
    retriever = Retriever.open(run, device="cpu")
    with pytest.raises(RequestError):
        retriever.put_item(item_id, {"title": "x"})


def test_a_torn_last_line_is_cut_off_and_a_damaged_one_refused(tmp_path: Path) -> None:
    store = ItemStore(tmp_path)
    for number in range(3):
        store.put(number, JournalEntry({"title": f"item {number}"}, False, b"\0" * 8, "e"))
    store.close()
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 4
    for cut in range(len(whole) - len(lines[-1]) + 1, len(whole)):
        journal.write_bytes(whole[:cut])
        assert [key for key, _ in ItemStore(tmp_path).changes(0)[1]] == [0, 1]
    journal.write_bytes(whole[: len(whole) - 5])
    store = ItemStore(tmp_path)
    store.put(9, JournalEntry({"title": "after"}, False, b"", "e"))
    store.close()
    assert [key for key, _ in ItemStore(tmp_path).changes(0)[1]] == [0, 1, 9]
    journal.write_bytes(lines[0] + lines[1].replace(b"item 0", b"item 8") + lines[2])
    with pytest.raises(RunError, match="line 2, is damaged"):
        ItemStore(tmp_path)


def test_the_journal_is_compacted_and_keeps_the_order_of_changes(tmp_path: Path) -> None:
    store = ItemStore(tmp_path)
    store._compact_at = 10
    for number in range(40):
        store.put(number % 3, JournalEntry({"title": f"{number}"}, number % 3 == 1, b"\1\2\3\4", "e"))
    store.close()
    assert len((tmp_path / "journal.jsonl").read_bytes().splitlines()) < 20
    found = ItemStore(tmp_path).changes(0)[1]
    assert [(key, entry.fields["title"], entry.withdrawn) for key, entry in found] == [
        (1, "37", True),
        (2, "38", False),
        (0, "39", False),
    ]


def test_a_compaction_that_fails_leaves_the_journal_in_use(tmp_path: Path) -> None:
    store = ItemStore(tmp_path)
    store.put(1, JournalEntry({"title": "one"}, False, b"", "e"))
    (tmp_path / ".journal.jsonl.partial").mkdir()  # nothing can be written under this name
    with pytest.raises(StorageError):
        store.compact()
    (tmp_path / ".journal.jsonl.partial").rmdir()
    store.put(2, JournalEntry({"title": "two"}, False, b"", "e"))
    assert [key for key, _ in ItemStore(tmp_path).changes(0)[1]] == [1, 2]
    store.compact()
    store.put(3, JournalEntry({"title": "three"}, False, b"", "e"))
    assert [key for key, _ in ItemStore(tmp_path).changes(0)[1]] == [1, 2, 3]


FULL = """
import resource, signal, sys
from habitus.serving.item_store import ItemStore, JournalEntry
from habitus.serving.schemas import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = ItemStore(sys.argv[1])
store.put(1, JournalEntry({"title": "first"}, False, b"", "e"))
resource.setrlimit(resource.RLIMIT_FSIZE, (store._size + 300, resource.RLIM_INFINITY))
try:
    store.put(2, JournalEntry({"title": "x" * 1000}, False, b"", "e"))
except StorageError as error:
    print("refused", error.problem)
assert store.get(2) is None
store.put(3, JournalEntry({"title": "small"}, False, b"", "e"))
print("written", len(store))
"""


def test_a_full_disk_refuses_the_change_and_leaves_all_else_as_it_was(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.startswith("refused the item could not be written"), done.stderr
    assert done.stdout.endswith("written 2\n")
    assert [key for key, _ in ItemStore(tmp_path).changes(0)[1]] == [1, 3]


WRITER = """
import sys
from habitus.serving import Retriever
run, seed = sys.argv[1], int(sys.argv[2])
retriever = Retriever.open(run, device="cpu")
retriever.store._compact_at = 20
number = 0
while True:
    item = 10_000 + (seed * 37 + number) % 50
    retriever.put_item(item, {"title": f"round {seed} number {number}", "price": number, "brand": "b" * (number % 400)})
    print(f"put {item} {number}", flush=True)
    if number % 5 == 4:
        retriever.delete_item(item)
        print(f"delete {item} {number}", flush=True)
    number += 1
"""


def killed_round(run: Path, seed: int) -> dict[int, tuple[str, str]]:
    """What a writer acknowledged before it was killed: item -> (last change, title)."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert writer.stdout is not None
    acknowledged: dict[int, tuple[str, str]] = {}
    first = writer.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.0, 0.25))
    os.kill(writer.pid, signal.SIGKILL)
    for line in [first, *writer.stdout.readlines()]:
        if line.endswith("\n"):
            what, item, number = line.split()
            acknowledged[int(item)] = what, f"round {seed} number {number}"
    writer.wait()
    return acknowledged


def check_kills(run: Path, rounds: int) -> None:
    shutil.rmtree(run / "serve" / "items", ignore_errors=True)
    expected: dict[int, tuple[str, str]] = {}
    total = 0
    for seed in range(rounds):
        acknowledged = killed_round(run, seed)
        total += len(acknowledged)
        expected |= acknowledged
        retriever = Retriever.open(run, device="cpu")
        for item, (what, title) in expected.items():
            state = retriever.item(item)
            assert state.fields is not None
            found = str(state.fields["title"])
            if found == title:
                # A deletion that was acknowledged is never undone; one that was not may or may not be there.
                assert not (what == "delete" and state.recommended), (item, title)
            else:  # the writer was killed between the write and the word: only newer, only of this round
                assert found.startswith(f"round {seed} number"), (item, title, found)
                assert acknowledged.get(item, ("", ""))[1] != found
                expected[item] = ("put" if state.recommended else "delete", found)
    assert total > rounds


@pytest.mark.slow
def test_every_acknowledged_update_survives_kill_9(run: Path) -> None:
    check_kills(run, 5)


@pytest.mark.soak
def test_every_acknowledged_update_survives_kill_9_fifty_times(run: Path) -> None:
    check_kills(run, 50)
