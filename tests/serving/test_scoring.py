"""Given candidates, empty histories, ranges and stock: each against the full list that `recommend` gives."""

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import habitus
from habitus.cli import app
from habitus.cli.serve import serve
from habitus.errors import ConfigError
from habitus.serving import (
    Limits,
    RecommendRequest,
    RecommendResponse,
    RequestError,
    Retriever,
    ScoreRequest,
    ServeOptions,
)
from habitus.serving.schemas import BY_POPULARITY

from .conftest import Log


@pytest.fixture(scope="module")
def retriever(trained_run: Path) -> Retriever:
    return Retriever.open(trained_run, device="cpu", read_only=True)


@pytest.fixture(scope="module")
def copying(copying_run: Path) -> Retriever:
    return Retriever.open(copying_run, device="cpu", read_only=True)


def ask(retriever: Retriever, history: list[dict[str, Any]], **wanted: Any) -> RecommendResponse:
    return retriever.recommend([RecommendRequest(history=history, **{"k": 300, **wanted})])[0]


def ids(response: RecommendResponse) -> list[int]:
    return [item.item_id for item in response.items]


@pytest.mark.parametrize("which", ["retriever", "copying"])
def test_scores_are_those_of_recommend(which: str, request: pytest.FixtureRequest, log: Log) -> None:
    retriever: Retriever = request.getfixturevalue(which)
    histories = [log[1][:5], log[2], log[3][:1]]
    candidates = [*range(299, -1, -1)]
    [response] = retriever.score([ScoreRequest(histories=histories, item_ids=candidates)])
    assert response.model == retriever.checksum
    for history, answer in zip(histories, response.answers, strict=True):
        scores = {item.item_id: item.score for item in ask(retriever, history).items}
        assert answer.scores == pytest.approx([scores[item] for item in candidates], abs=2e-5)
        assert answer.events_used == len(history)
        assert answer.because is None


def test_requests_of_one_call_do_not_mix(copying: Retriever, log: Log) -> None:
    first = ScoreRequest(histories=[log[1], [], log[2]], item_ids=[5, 7])
    bad = ScoreRequest(histories=[[{"item_id": 10**6}]], item_ids=[5])
    second = ScoreRequest(histories=[log[3]], item_ids=[9])
    answers = copying.score_each([first, bad, second])
    assert isinstance(answers[1], RequestError)
    worse = ScoreRequest(histories=[log[1], [], [{"item_id": 10**6}]], item_ids=[5])
    with pytest.raises(RequestError, match=r"histories\[2\]: none of the history's 1 events is of a known item"):
        copying.score([worse])
    for answer, request in ((answers[0], first), (answers[2], second)):
        [alone] = copying.score([request])
        assert not isinstance(answer, RequestError)
        for one, other in zip(answer.answers, alone.answers, strict=True):
            assert one.scores == pytest.approx(other.scores, abs=2e-5)


def test_unknown_and_withdrawn_candidates_have_no_score(run: Path, items: list[dict[str, Any]], log: Log) -> None:
    retriever = Retriever.open(run, device="cpu")
    retriever.delete_item(7)
    own = {name: value for name, value in items[5].items() if name != "item_id"}
    [response] = retriever.score([ScoreRequest(histories=[log[1]], item_ids=[5, 12345, 7], items=[own])])
    known, unknown, withdrawn, by_fields = response.answers[0].scores
    assert (unknown, withdrawn) == (None, None)
    assert by_fields == pytest.approx(known, abs=0.05)  # the same item, embedded beside others
    assert response.answers[0].events_used == len(log[1])
    retriever.close()


def test_an_empty_history_is_answered_by_popularity(
    retriever: Retriever, items: list[dict[str, Any]], log: Log
) -> None:
    counts = retriever.candidates.catalogue.names.counts
    assert counts is not None
    answer = ask(retriever, [], k=300)
    assert answer.because == BY_POPULARITY
    assert ids(answer) == np.argsort(-counts, kind="stable").tolist()
    expected = (counts + 1) / (counts.sum() + 300)
    assert [item.probability for item in answer.items] == pytest.approx(expected[ids(answer)].tolist())
    assert sum(item.probability for item in answer.items) == pytest.approx(1)
    assert ask(retriever, log[1], k=1).because is None
    # Of a segment: the same order among those that pass.
    category = items[0]["category"]
    some = ask(retriever, [], allow={"category": [category]}, exclude_items=ids(answer)[:20])
    assert ids(some) == [item for item in ids(answer)[20:] if items[item]["category"] == category]
    [scored] = retriever.score([ScoreRequest(histories=[[]], item_ids=[4, 9])])
    assert scored.answers[0].because == BY_POPULARITY
    assert scored.answers[0].scores == pytest.approx(np.log(expected[[4, 9]]).tolist())
    mixed = retriever.recommend([RecommendRequest(history=history, k=3) for history in (log[1], [], log[2])])
    assert [one.because for one in mixed] == [None, BY_POPULARITY, None]
    assert ids(mixed[2]) == ids(ask(retriever, log[2], k=3))


def test_an_item_that_is_changed_stays_as_popular(run: Path, items: list[dict[str, Any]]) -> None:
    retriever = Retriever.open(run, device="cpu")
    before = ask(retriever, [])
    first, second = ids(before)[:2]
    for item in (first, 7001):
        fields = {name: value for name, value in items[first].items() if name != "item_id"}
        retriever.put_item(item, {**fields, "price": 1.0})
    after = ask(retriever, [], k=301)
    assert ids(after) == [*ids(before), 7001]
    ratios = [now.probability / then.probability for now, then in zip(after.items[:2], before.items, strict=False)]
    assert 0.99 < ratios[0] < 1 and ratios[1] == pytest.approx(ratios[0])  # there is one item more
    assert sum(item.probability for item in after.items) == pytest.approx(1)
    [scored] = retriever.score([ScoreRequest(histories=[[]], item_ids=[first, second, 7001])])
    by_id = {item.item_id: item.score for item in after.items}
    assert scored.answers[0].scores == pytest.approx([by_id[item] for item in (first, second, 7001)])
    retriever.close()


def test_ranges_keep_items_whose_number_lies_in_them(
    retriever: Retriever, items: list[dict[str, Any]], log: Log
) -> None:
    everything = ids(ask(retriever, log[1]))
    prices = [item["price"] for item in items]
    low, high = sorted(price for price in prices if price is not None)[100], None
    for limits in ((low, high), (None, low), (low, low + 3)):
        first, last = (-np.inf if limits[0] is None else limits[0]), (np.inf if limits[1] is None else limits[1])
        within = [item for item in everything if prices[item] is not None and first <= prices[item] <= last]
        assert 0 < len(within) < 300
        assert ids(ask(retriever, log[1], ranges={"price": limits})) == within
        assert ids(ask(retriever, log[1], ranges={"price": limits}, k=2)) == within[:2]
    none = ask(retriever, log[1], ranges={"price": (1e6, None)})
    assert none.items == ()


def test_ranges_hold_for_items_added_at_run_time(run: Path, items: list[dict[str, Any]], log: Log) -> None:
    retriever = Retriever.open(run, device="cpu")
    dear = {**{name: value for name, value in items[5].items() if name != "item_id"}, "price": 5e5}
    retriever.put_item(7001, dear)
    assert ids(ask(retriever, log[1], ranges={"price": (4e5, 5e5)})) == [7001]
    retriever.put_item(7001, {**dear, "price": None})
    assert ids(ask(retriever, log[1], ranges={"price": (4e5, None)})) == []
    retriever.close()


@pytest.mark.parametrize("which", ["retriever", "copying"])
def test_what_is_in_stock(which: str, request: pytest.FixtureRequest, log: Log) -> None:
    retriever: Retriever = request.getfixturevalue(which)
    full = ask(retriever, log[1])
    seen = log[1][-1]["item_id"]
    stock = [3, 4, seen, 250, 251, 987654321]
    answer = ask(retriever, log[1], only_items=stock)
    assert ids(answer) == [item for item in ids(full) if item in stock]
    by_id = {item.item_id: item for item in full.items}
    assert [one.probability for one in answer.items] == pytest.approx([by_id[one].probability for one in ids(answer)])
    assert answer.notes == ("1 of the 6 items to choose from are not in the catalogue",)
    assert (
        ids(ask(retriever, log[1], only_items=stock, exclude_items=[4], k=1))
        == [item for item in ids(full) if item in (3, seen, 250, 251)][:1]
    )
    assert ids(ask(retriever, log[1], only_items=[])) == []
    gone = ids(full)[:5]
    assert ids(ask(retriever, log[1], exclude_items=gone, k=5)) == ids(full)[5:10]


def test_the_command_takes_an_empty_history_ranges_stock_and_a_temperature(run: Path, tmp_path: Path) -> None:
    command = ["recommend", str(run), "--device", "cpu", "--json", "--k", "4", "--history"]

    def say(*options: str) -> Any:
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    empty = say("[]", "--range", "price=..20")
    assert empty["because"] == "popularity"
    assert len(empty["items"]) == 4
    (tmp_path / "stock.txt").write_text("17\n4\n\n5\n")
    stocked = say("[1, 2]", "--only-items", f"{tmp_path}/stock.txt")
    assert {item["item_id"] for item in stocked["items"]} == {4, 5, 17}
    left = say("[1, 2]", "--exclude-items", f"{tmp_path}/stock.txt", "--k", "300")
    assert {item["item_id"] for item in left["items"]} == set(range(300)) - {4, 5, 17}
    hot = say("[1, 2]", "--only-items", f"{tmp_path}/stock.txt", "--temperature", "2")
    assert [item["score"] for item in hot["items"]] == [item["score"] for item in stocked["items"]]
    assert hot["items"][0]["probability"] < stocked["items"][0]["probability"]
    told = CliRunner().invoke(app, [*command[:3], "cpu", "--history", "[]"])
    assert "the history is empty: these are the most frequent items of training" in told.stderr


def test_python_has_the_same(run: Path) -> None:
    opened = habitus.Run.__new__(habitus.Run)  # a folder with a bundle and no Record
    opened.path, opened._dataset = run, None
    best = opened.recommend([1, 2], k=3, ranges={"price": (None, 50)})
    assert opened.score([1, 2], [best[0].item_id, 10**6]) == [pytest.approx(best[0].score, abs=2e-5), None]
    assert len(opened.recommend([], k=3)) == 3


def test_the_command_and_python_serve_with_the_same_defaults() -> None:
    command = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    options = ServeOptions()
    for field in fields(ServeOptions):
        if field.name in command and field.name != "images":
            assert command[field.name] == getattr(options, field.name), field.name
    renamed = {"max_body_bytes": "max_body", "timeout_s": "timeout", "read_timeout_s": "read_timeout"}
    renamed |= {"shutdown_s": "shutdown_timeout"}
    for name, value in Limits().to_values().items():
        if name not in ("max_rows", "max_text"):  # which the command does not offer
            assert command[renamed.get(name, name)] == value, name
    with pytest.raises(ConfigError, match="--show-users was given without --data"):
        ServeOptions(show_users=True).check(Path("run"))
