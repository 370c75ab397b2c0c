"""The retriever: parity with evaluation, filters, probabilities, and requests that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import ConfigError, ModelError
from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs
from habitus.evaluation.per_query import PerQuery
from habitus.serving import RecommendRequest, Retriever
from habitus.serving import search as searching
from habitus.serving.schemas import RequestError, UnknownItemError

Log = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def retriever(trained_run: Path) -> Retriever:
    return Retriever.open(trained_run, device="cpu", read_only=True)


@pytest.fixture(scope="module")
def copying(copying_run: Path) -> Retriever:
    return Retriever.open(copying_run, device="cpu", read_only=True)


def history_of(log: Log, dataset: Dataset, query_event: int) -> tuple[int, tuple[dict[str, Any], ...]]:
    """The user's raw events up to a row of the prepared log."""
    place = int(np.searchsorted(dataset.user_offsets, query_event, "right")) - 1
    user = dataset.user_ids()[place].as_py()
    return user, tuple(log[user][: query_event - int(dataset.user_offsets[place]) + 1])


@pytest.mark.parametrize("which", ["retriever", "copying"])
def test_ranks_and_losses_equal_those_of_evaluate(
    which: str, request: pytest.FixtureRequest, dataset: Dataset, log: Log
) -> None:
    retriever: Retriever = request.getfixturevalue(which)
    kept: list[PerQuery] = []
    options = EvaluateOptions(regimes=("catalogue",), queries=600, cutoffs=(10,))
    evaluate_runs([retriever.bundle.run_path], dataset, options, ComputeOptions(), keep=lambda _, __, v: kept.append(v))
    values = kept[0]
    requests, targets, chosen = [], [], []
    for query, event in enumerate(values.event.tolist()):
        user, history = history_of(log, dataset, event)
        if len(history) == values.history[query]:  # evaluation saw no less than the retriever will
            requests.append(RecommendRequest(history=history, k=300))
            targets.append(log[user][len(history)]["item_id"])
            chosen.append(query)
    assert len(chosen) > 300
    ranks, losses, best = [], [], []
    for answer, target in zip(retriever.recommend(requests), targets, strict=True):
        assert len(answer.items) == 300
        own = next(one for one in answer.items if one.item_id == target)
        ranks.append(sum(one.score >= own.score for one in answer.items))
        losses.append(-np.log(own.probability))
        best.append([one.item_id for one in answer.items[:10]])
    assert ranks == values.rank[chosen].tolist()
    assert best == values.top[chosen].tolist()  # in a world, an item's id is its row
    assert values.loss is not None
    np.testing.assert_allclose(losses, values.loss[chosen], atol=2e-6)


def test_the_windows_newest_events_decide(retriever: Retriever, log: Log) -> None:
    long = next(events for events in log.values() if len(events) > 64)
    whole, newest = retriever.embed_histories([long, long[-64:]])
    first = retriever.embed_histories([long[-65:-1]])[0]
    # Only the time since the event before the window is lost with it.
    assert np.abs(whole - newest).max() < 0.2 * np.abs(whole - first).max()
    assert retriever.recommend([RecommendRequest(history=long)])[0].events_used == 64


def test_scores_are_dot_products_of_the_vectors_given_out(
    retriever: Retriever, log: Log, items: list[dict[str, Any]]
) -> None:
    answer = retriever.recommend([RecommendRequest(history=log[3], k=20)])[0]
    query = retriever.embed_histories([log[3]])[0]
    vectors = retriever.embed_items([items[one.item_id] for one in answer.items])
    np.testing.assert_allclose(vectors @ query, [one.score for one in answer.items], atol=0.02)  # cache: bfloat16


def test_the_past_lifts_its_own_items_and_no_others(copying: Retriever, log: Log) -> None:
    history = tuple(log[3])
    met = {event["item_id"] for event in history}
    query = copying.embed_histories([history])[0]
    vectors = copying.candidates.vectors(np.arange(300)).numpy()  # in a world, an item's id is its row
    answer = copying.recommend([RecommendRequest(history=history, k=300)])[0]
    scores = {one.item_id: one.score for one in answer.items}
    plain = vectors @ query
    lifted = np.array([scores[item] - plain[item] for item in range(300)])
    assert all(lifted[item] > 0.01 for item in met)
    assert all(abs(lifted[item]) < 1e-4 for item in set(range(300)) - met)
    assert sum(one.probability for one in answer.items) == pytest.approx(1, abs=1e-5)
    # Left out, the past still takes its share: chances are of all items, as without a filter.
    others = copying.recommend([RecommendRequest(history=history, k=300, exclude_seen=True)])[0].items
    assert {one.item_id for one in others} == set(range(300)) - met
    chances = {one.item_id: one.probability for one in answer.items}
    assert all(one.probability == pytest.approx(chances[one.item_id], rel=1e-4) for one in others)


def test_filters_and_withdrawn_items_hold_for_the_past_too(copying_run: Path, tmp_path: Path, log: Log) -> None:
    retriever = Retriever.open(copying_run, device="cpu", items=tmp_path / "items")
    history = tuple(log[3])
    best = retriever.recommend([RecommendRequest(history=history, k=300)])[0].items
    met = {event["item_id"] for event in history}
    first = next(one for one in best if one.item_id in met)
    retriever.delete_item(first.item_id)
    without = retriever.recommend([RecommendRequest(history=history, k=300)])[0].items
    assert [one.item_id for one in without] == [one.item_id for one in best if one.item_id != first.item_id]
    assert sum(one.probability for one in without) == pytest.approx(1, abs=1e-5)
    name, codes = next(iter(retriever.candidates.catalogue.codes.items()))
    wanted = int(codes[without[0].item_id])
    value = retriever.bundle.encoders.item_values[name][wanted - 1]
    kept = retriever.recommend([RecommendRequest(history=history, k=300, allow={name: [value]})])[0].items
    assert [one.item_id for one in kept] == [one.item_id for one in without if codes[one.item_id] == wanted]


def test_requests_of_one_call_have_their_own_k_and_filters(retriever: Retriever, log: Log) -> None:
    requests = [RecommendRequest(history=log[user], k=1 + user, exclude_seen=bool(user % 2)) for user in range(30)]
    together = retriever.recommend(requests)
    for request, answer in zip(requests, together, strict=True):
        alone = retriever.recommend([request])[0]
        assert len(answer.items) == request.k
        assert [one.item_id for one in answer.items] == [one.item_id for one in alone.items]
        np.testing.assert_allclose(
            [one.probability for one in answer.items], [one.probability for one in alone.items], rtol=1e-4
        )


def expected_ids(
    retriever: Retriever,
    items: list[dict[str, Any]],
    request: RecommendRequest,
    passes: Callable[[dict[str, Any]], bool],
) -> list[int]:
    """What a filter should leave, from the whole ranking and the raw item table."""
    everything = retriever.recommend([RecommendRequest(history=request.history, k=300)])[0].items
    seen = {event["item_id"] for event in request.history} if request.exclude_seen else set()
    left = [one.item_id for one in everything if passes(items[one.item_id]) and one.item_id not in seen]
    return left[: request.k]


@pytest.mark.parametrize("overfetch", [1, 4, 100])
def test_filters_are_exact_however_much_was_fetched(
    retriever: Retriever, log: Log, items: list[dict[str, Any]], overfetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "OVERFETCH", overfetch)
    monkeypatch.setattr(searching, "GATHER_ROWS", 7)
    category, brand = items[0]["category"], items[1]["brand"]
    several = sorted({item["category"] for item in items if item["category"]})[:3]
    cases: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
        ({"allow": {"category": [category]}}, lambda item: item["category"] == category),
        ({"allow": {"category": several}}, lambda item: item["category"] in several),
        ({"deny": {"category": several}}, lambda item: item["category"] not in several),
        (
            {"allow": {"category": several}, "deny": {"brand": [brand]}},
            lambda item: item["category"] in several and item["brand"] != brand,
        ),
        (
            {"allow": {"category": several, "brand": [brand]}},
            lambda item: item["category"] in several and item["brand"] == brand,
        ),
        ({"allow": {"category": []}}, lambda item: False),
        ({"allow": {"category": [None, several[0]]}}, lambda item: item["category"] in (None, several[0])),
        ({"exclude_seen": True, "allow": {"category": several}}, lambda item: item["category"] in several),
        ({"exclude_seen": True}, lambda item: True),
    ]
    for user in (2, 9):
        requests = [RecommendRequest(history=log[user], k=12, **case) for case, _ in cases]
        for request, answer, (_, passes) in zip(requests, retriever.recommend(requests), cases, strict=True):
            assert [one.item_id for one in answer.items] == expected_ids(retriever, items, request, passes)


def test_filters_see_run_time_items_with_values_that_training_never_saw(
    run: Path, log: Log, items: list[dict[str, Any]]
) -> None:
    retriever = Retriever.open(run, device="cpu")
    retriever.put_item(400, {**items[5], "item_id": 400, "category": "brand new"})
    retriever.put_item(401, {"title": "nameless"})
    request = RecommendRequest(history=log[1], k=5, allow={"category": ["brand new"]})
    answer = retriever.recommend([request])[0]
    assert [one.item_id for one in answer.items] == [400]
    assert answer.notes == ("no item of the trained catalogue has category = 'brand new'",)
    missing = retriever.recommend([RecommendRequest(history=log[1], k=5, allow={"category": [None]})])[0]
    nameless = {item["item_id"] for item in items if item["category"] is None}
    assert {one.item_id for one in missing.items} == {401, *nameless}
    assert 0 < len(nameless) < 5
    rest = retriever.recommend([RecommendRequest(history=log[1], k=302, deny={"category": ["brand new", None]})])[0]
    assert {one.item_id for one in rest.items} == set(range(300)) - nameless
    retriever.delete_item(400)
    assert retriever.recommend([request])[0].items == ()


def test_probabilities_do_not_depend_on_the_filters(retriever: Retriever, log: Log) -> None:
    whole = {one.item_id: one for one in retriever.recommend([RecommendRequest(history=log[8], k=300)])[0].items}
    some = retriever.recommend([RecommendRequest(history=log[8], k=5, exclude_seen=True)])[0].items
    for one in some:
        assert one.probability == pytest.approx(whole[one.item_id].probability, rel=1e-5)
    assert sum(one.probability for one in whole.values()) == pytest.approx(1, abs=1e-5)


def test_more_than_the_catalogue_is_the_catalogue(retriever: Retriever, log: Log) -> None:
    assert len(retriever.recommend([RecommendRequest(history=log[8], k=1000)])[0].items) == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k = 0"),
        ({"k": -1}, "k = -1"),
        ({"k": 10**9}, "1 to 1,000"),
        ({"k": 10**6000}, "k = a int"),
        ({"k": 2.5}, "k = 2.5"),
        ({"k": True}, "k = True"),
        ({"k": "10"}, "k = '10'"),
        ({"allow": {"colour": ["red"]}}, "names 'colour', which is not a field"),
        ({"allow": {"price": [3]}}, "names 'price', which is not a field"),
        ({"deny": {"category": "shoes"}}, "valid list"),
        ({"deny": {"category": [["shoes"]]}}, "category"),
        ({"deny": ["category"]}, "valid dictionary"),
        ({"allow": {"category": ["x"] * 1001}}, "1,001 values"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused_in_words(
    retriever: Retriever, log: Log, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        retriever.recommend([RecommendRequest(history=log[1], **changes)])


def test_a_bad_request_fails_alone(retriever: Retriever, log: Log) -> None:
    good = RecommendRequest(history=log[1])
    conditions = {"allow": {"colour": ["red"]}}, {"deny": {"category": [["shoes"]]}}, {"ranges": {"price": (2, 1)}}
    for bad in ({"k": 0}, *conditions):
        found = retriever.recommend_each([good, good.model_copy(update=bad), good])
        assert isinstance(found[1], RequestError)
        assert found[0] == found[2] == retriever.recommend([good, good])[0]


def test_no_requests_have_no_answers(retriever: Retriever) -> None:
    assert retriever.recommend([]) == []
    assert retriever.embed_histories([]).shape == (0, 16)
    assert retriever.embed_items([]).shape == (0, 16)


def test_an_item_that_nobody_knows(retriever: Retriever) -> None:
    with pytest.raises(UnknownItemError):
        retriever.item(12345)
    assert retriever.item("17").item_id == 17  # as it comes out of a path
    counts = retriever.candidates.catalogue.names.counts
    assert counts is not None
    assert retriever.some_items(3) == np.argsort(-counts, kind="stable")[:3].tolist()  # the most frequent


def test_a_run_needs_its_dataset_once_and_is_then_served_without(run: Path, dataset: Dataset, log: Log) -> None:
    import shutil

    shutil.rmtree(run / "serve")
    with pytest.raises(ModelError, match="--data DATASET"):
        Retriever.open(run, device="cpu")
    first = Retriever.open(run, data=dataset.path, device="cpu")
    second = Retriever.open(run, device="cpu")
    request = RecommendRequest(history=log[2])
    assert first.recommend([request]) == second.recommend([request])
    with pytest.raises(ConfigError, match="unknown index"):
        Retriever.open(run, device="cpu", index="magic")  # type: ignore[arg-type]


def test_a_damaged_catalogue_is_refused_by_name(run: Path) -> None:
    ids = run / "serve" / "catalogue" / "ids.parquet"
    ids.write_bytes(ids.read_bytes()[:-1])
    with pytest.raises(ModelError, match="is missing or has changed"):
        Retriever.open(run, device="cpu")


def test_pairs_of_item_and_event_are_asked_for_and_answered_as_pairs(
    tmp_path: Path,
    world: Any,
    items: list[dict[str, Any]],
    train: Callable[..., Any],
    recipe_of: Callable[..., Any],
) -> None:
    from habitus.events.schema import Schema
    from habitus.events.world.writing import schema_of, write_world
    from habitus.model.bundle import save_bundle

    write_world(world, tmp_path / "files", threads=1, progress=lambda *_: None)
    values = schema_of(world).to_values()
    values["events"]["item"] = ["item_id", "event_type"]
    schema = Schema.parse({"events": values["events"], "items": values["items"]}, "test")
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, test_share=0, threads=1)
    files = [str(tmp_path / "files" / name) for name in ("events.parquet", "items.parquet")]
    prepare(*files, schema, tmp_path / "dataset", options)
    dataset = Dataset.open(tmp_path / "dataset")
    run = tmp_path / "run"
    recipe = recipe_of(20)
    save_bundle(train(dataset, recipe), recipe, dataset, run / "bundle")
    retriever = Retriever.open(run, data=dataset.path, device="cpu")
    assert retriever.num_items > 300
    history = ({"item_id": 5, "event_type": "view"}, {"item_id": 7, "event_type": "view"})
    answer = retriever.recommend([RecommendRequest(history=history, k=50, allow={"event_type": ["purchase"]})])[0]
    assert {one.item_id["event_type"] for one in answer.items} == {"purchase"}
    assert all(set(one.item_id) == {"item_id", "event_type"} for one in answer.items)
    unknown = retriever.recommend([RecommendRequest(history=(*history, {"item_id": 5, "event_type": "dream"}))])[0]
    assert unknown.unknown_items == ({"item_id": 5, "event_type": "dream"},)
    new = {"item_id": 5, "event_type": "dream"}
    fields = {name: value for name, value in items[5].items() if name != "item_id"}
    retriever.put_item(new, fields)
    assert retriever.item('[5, "dream"]').fields == {**retriever.item([5, "dream"]).fields, "event_type": "dream"}
    again = Retriever.open(run, device="cpu")
    found = again.recommend([RecommendRequest(history=(*history, new), k=1, allow={"event_type": ["dream"]})])[0]
    assert [one.item_id for one in found.items] == [new]
    with pytest.raises(RequestError, match="mapping with item_id, event_type"):
        again.item("5")
    with pytest.raises(RequestError, match="not that of the item's id"):
        again.item_encoder.read_item((5, "dream"), {**fields, "event_type": "view"})


def test_text_ids_positions_and_times_as_item_fields(
    tmp_path: Path, train: Callable[..., Any], recipe_of: Callable[..., Any]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from habitus.events.schema import Schema
    from habitus.model.bundle import save_bundle
    from habitus.serving.item_store import ItemStore, JournalEntry

    names = [f"item/{number:02d}?ü" for number in range(20)]
    released = [f"2020-01-{1 + number:02d}" for number in range(20)]
    pq.write_table(pa.table({"name": names, "released": released}), tmp_path / "items.parquet")
    events = [(user, names[(user * 7 + place) % 20], place) for user in range(40) for place in range(6)]
    users, items, places = zip(*events, strict=True)
    pq.write_table(pa.table({"user": users, "name": items, "place": places}), tmp_path / "events.parquet")
    schema = Schema.parse(
        {
            "events": {"user": "user", "item": "name", "timestamp": "place", "time_unit": "order"},
            "items": {"item": "name", "fields": {"released": "time"}},
        },
        "test",
    )
    files = [str(tmp_path / f"{name}.parquet") for name in ("events", "items")]
    prepare(*files, schema, tmp_path / "dataset", PrepareOptions(seq_len=64, test_share=0, threads=1))
    dataset = Dataset.open(tmp_path / "dataset")
    recipe = recipe_of(3)
    save_bundle(train(dataset, recipe), recipe, dataset, tmp_path / "run" / "bundle")
    retriever = Retriever.open(tmp_path / "run", data=dataset.path, device="cpu")
    shuffled = ({"name": names[3], "place": 9}, {"name": names[5], "place": "2"}, {"name": "no such"} | {"place": 4})
    answer = retriever.recommend([RecommendRequest(history=shuffled, k=30)])[0]
    assert {one.item_id for one in answer.items} == set(names)
    assert answer.unknown_items == ("no such",)
    in_order = retriever.embed_histories([[{"name": names[5]}, {"name": names[3]}]])
    np.testing.assert_array_equal(retriever.embed_histories([shuffled]), in_order)
    retriever.put_item("twin", {"released": "2020-01-08T00:00:00+00:00"})
    state = retriever.item("twin")
    assert state.fields == {"released": "2020-01-08T00:00:00"}
    np.testing.assert_allclose(
        retriever.embed_items([{"released": "2020-01-08"}]), retriever.embed_items([state.fields]), atol=1e-7
    )
    store = ItemStore(tmp_path / "other")
    store.put("twin", JournalEntry(state.fields, False, b"", "another embedder"))
    scores = {one.item_id: one.score for one in answer.items}
    again = Retriever.open(tmp_path / "run", device="cpu", items=store).recommend(
        [RecommendRequest(history=shuffled, k=30)]
    )[0]
    assert {one.item_id: one.score for one in again.items}["twin"] == pytest.approx(scores[names[7]], abs=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_ranks_are_those_of_evaluate_and_items_come_and_go(
    run: Path, dataset: Dataset, log: Log, items: list[dict[str, Any]]
) -> None:
    kept: list[PerQuery] = []
    options = EvaluateOptions(regimes=("catalogue",), queries=300, cutoffs=(10,))
    evaluate_runs([run], dataset, options, ComputeOptions("cuda"), keep=lambda _, __, v: kept.append(v))
    retriever = Retriever.open(run, device="cuda")
    requests, chosen = [], []
    for query, event in enumerate(kept[0].event.tolist()):
        _, history = history_of(log, dataset, event)
        if len(history) == kept[0].history[query]:
            requests.append(RecommendRequest(history=history, k=10))
            chosen.append(query)
    answers = retriever.recommend(requests)
    same = [
        [one.item_id for one in answer.items] == kept[0].top[query].tolist()
        for answer, query in zip(answers, chosen, strict=True)
    ]
    assert np.mean(same) > 0.95  # other windows, other rounding: near ties may change places
    best = answers[0].items[0]
    retriever.delete_item(best.item_id)
    retriever.put_item(5000, {name: value for name, value in items[best.item_id].items() if name != "item_id"})
    after = retriever.recommend([RecommendRequest(history=requests[0].history, k=300)])[0].items
    assert {one.item_id for one in after} == {*range(300), 5000} - {best.item_id}
    new = next(one for one in after if one.item_id == 5000)
    assert new.probability == pytest.approx(best.probability, rel=0.05)
    cpu = Retriever.open(run, device="cpu").recommend([requests[1]])[0].items
    assert [one.probability for one in answers[1].items] == pytest.approx([one.probability for one in cpu], rel=0.1)
