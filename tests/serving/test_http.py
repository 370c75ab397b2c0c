"""What the service answers is what the retriever answers; restarts, swaps and shutdowns lose nothing."""

import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.model.bundle import save_bundle
from habitus.serving import RecommendRequest, Retriever
from tests.serving.served import Served, events, shared_server, wait_until

Log = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http")


@pytest.fixture(scope="module")
def served(trained_run: Path) -> Served:
    return shared_server(trained_run)


@pytest.fixture(scope="module")
def retriever(served: Served) -> Retriever:
    """On the server's own folder: other tests may have left items in it."""
    return Retriever.open(served.run, device="cpu", read_only=True)


def as_answer(found: Any) -> list[dict[str, Any]]:
    return [{"item_id": one.item_id, "score": one.score, "probability": one.probability} for one in found.items]


def test_answers_are_those_of_the_retriever(served: Served, retriever: Retriever, log: Log) -> None:
    for user in (3, 5, 8):
        history = events(log[user])
        answer = served.recommend(history, k=7)
        assert answer.status == 200
        expected = retriever.recommend([RecommendRequest(history=history, k=7)])[0]
        assert answer.body["items"] == as_answer(expected)
        assert answer.body["events_used"] == len(history)
        assert answer.body["model"] == retriever.checksum


def test_filters_and_seen_items_are_passed_on(served: Served, retriever: Retriever, log: Log, items: list[Any]) -> None:
    history = events(log[4])
    category = items[0]["category"]
    wanted = {"k": 5, "exclude_seen": True, "allow": {"category": [category]}, "deny": {"brand": [items[0]["brand"]]}}
    found = served.recommend(history, **wanted).body
    assert found["items"] == as_answer(retriever.recommend([RecommendRequest(history=history, **wanted)])[0])
    ids = [one["item_id"] for one in found["items"]]
    assert ids
    assert all(items[i]["category"] == category and items[i]["brand"] != items[0]["brand"] for i in ids)
    assert not set(ids) & {event["item_id"] for event in history}


def test_several_histories_and_candidates_in_one_request(served: Served, retriever: Retriever, log: Log) -> None:
    histories = [events(log[7][:9]), [], events(log[8][:3])]
    wanted = {"k": 4, "ranges": {"price": [None, 60]}, "exclude_items": [5]}
    answers = served.ask("POST", "/v1/recommend", {"histories": histories, **wanted}).body["answers"]
    assert [answer.get("because") for answer in answers] == [None, "popularity", None]
    for history, answer in zip(histories, answers, strict=True):
        alone = served.ask("POST", "/v1/recommend", {"history": history, **wanted}).body
        assert [item["item_id"] for item in answer["items"]] == [item["item_id"] for item in alone["items"]]
        assert len(answer["items"]) == 4
        [scored] = served.ask(
            "POST", "/v1/score", {"histories": [history], "item_ids": [one["item_id"] for one in alone["items"]]}
        ).body["answers"]
        assert scored["scores"] == pytest.approx([one["score"] for one in alone["items"]], abs=2e-5)
    unknown = served.ask("POST", "/v1/score", {"histories": histories, "item_ids": [987654321, 4]}).body
    assert [answer["scores"][0] for answer in unknown["answers"]] == [None] * 3


def test_limits_of_the_command_line_hold_inside_too(served: Served, log: Log) -> None:
    """The shared server takes 500 events, k = 5,000 and 1,500 filter values, which the retriever must know too."""
    history = events(log[4])
    num_items = served.ask("GET", "/v1/health").body["num_items"]
    assert len(served.recommend(history, k=5_000).body["items"]) == num_items
    assert served.recommend(history, k=5_001).body == {"error": "k = 5001", "expected": "1 to 5,000", "next_step": ""}
    names = [f"none {number}" for number in range(1_501)]
    assert served.recommend(history, deny={"category": names[:1_500]}).status == 200
    answer = served.recommend(history, allow={"brand": names[:1]}, deny={"category": names[:1_500]})
    assert (answer.status, answer.body["error"]) == (422, "allow and deny hold 1,501 values")
    assert served.recommend((history * 500)[:500]).status == 200
    assert "501 events" in served.recommend((history * 500)[:501]).body["error"]


def test_vectors_are_those_of_the_retriever(
    served: Served, retriever: Retriever, log: Log, items: list[dict[str, Any]]
) -> None:
    histories = [events(log[user]) for user in (1, 2)]
    found = served.ask("POST", "/v1/embed", {"histories": histories})
    assert found.status == 200
    assert np.array_equal(np.float32(found.body["vectors"]), retriever.embed_histories(histories))
    raw = [{**item, "image": list(map(float, item["image"]))} for item in items[:3]]
    found = served.ask("POST", "/v1/embed", {"items": raw})
    assert found.status == 200, found.body
    np.testing.assert_allclose(np.array(found.body["vectors"]), retriever.embed_items(raw), rtol=1e-6, atol=1e-7)


def test_concurrent_requests_share_batches_and_get_their_own_answers(
    served: Served, retriever: Retriever, log: Log
) -> None:
    histories = {user: events(log[user]) for user in range(24)}
    expected = {
        user: [one.item_id for one in retriever.recommend([RecommendRequest(history=history)])[0].items]
        for user, history in histories.items()
    }
    before = [served.metric(f'habitus_batch_size_{part}{{lane="recommend"}}') for part in ("count", "sum")]
    wrong: list[int] = []

    def client(users: list[int]) -> None:
        connection = served.connect()
        for _ in range(4):
            for user in users:
                body = {"history": histories[user]}
                found = served.ask("POST", "/v1/recommend", body, connection=connection).body
                if [one["item_id"] for one in found["items"]] != expected[user]:
                    wrong.append(user)
        connection.close()

    threads = [threading.Thread(target=client, args=(list(range(at, at + 3)),)) for at in range(0, 24, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    after = [served.metric(f'habitus_batch_size_{part}{{lane="recommend"}}') for part in ("count", "sum")]
    assert after[1] - before[1] == 96
    assert after[0] - before[0] < 70


def test_items_are_added_shown_replaced_and_withdrawn(served: Served, items: list[dict[str, Any]]) -> None:
    fields = {"title": "A brand new thing", "category": items[5]["category"], "price": 12.5}
    before = served.ask("GET", "/v1/health").body["num_items"]
    assert served.ask("GET", "/v1/items/7001").status == 404
    added = served.ask("PUT", "/v1/items/7001", {"fields": fields})
    assert (added.status, added.body["item_id"], added.body["num_items"]) == (200, 7001, before + 1)
    assert served.ask("GET", "/v1/items/7001").body["fields"] == fields
    everything = served.recommend([{"item_id": 5}], k=before + 1, with_fields=True).body["items"]
    assert {one["item_id"]: one for one in everything}[7001]["fields"] == fields
    again = served.ask("PUT", "/v1/items/7001", {"fields": {"title": "Renamed"}})
    assert again.body["num_items"] == before + 1
    assert served.ask("GET", "/v1/items/7001").body["fields"] == {"title": "Renamed"}
    trained = served.ask("GET", "/v1/items/5").body
    assert trained["fields"] == {name: items[5][name] for name in ("category", "brand")}
    assert served.recommend([{"item_id": 7001}]).status == 200
    gone = served.ask("DELETE", "/v1/items/7001")
    assert (gone.status, gone.body["num_items"]) == (200, before)
    assert served.ask("GET", "/v1/items/7001").body["recommended"] is False
    assert 7001 not in {one["item_id"] for one in served.recommend([{"item_id": 5}], k=before).body["items"]}
    assert served.ask("DELETE", "/v1/items/7001").status == 404


def test_health_and_metrics_tell_what_goes_on(served: Served, retriever: Retriever) -> None:
    health = served.ask("GET", "/v1/health").body
    assert (health["status"], health["run"], health["index"]) == ("ok", "run", "exact")
    assert health["model"] == retriever.checksum
    before = served.metric('habitus_requests_total{endpoint="/v1/recommend",status="422"}')
    assert served.recommend([], k=0).status == 422
    assert served.metric('habitus_requests_total{endpoint="/v1/recommend",status="422"}') == before + 1
    assert served.metric("habitus_items") == health["num_items"]
    assert served.metric("habitus_errors_total") == 0
    assert served.metric('habitus_request_seconds_count{endpoint="/v1/recommend"}') > before


def test_openapi_describes_every_endpoint(served: Served) -> None:
    paths = served.ask("GET", "/openapi.json").body["paths"]
    assert {path: sorted(verbs) for path, verbs in paths.items()} == {
        "/v1/recommend": ["post"],
        "/v1/score": ["post"],
        "/v1/embed": ["post"],
        "/v1/items/{item_id}": ["delete", "get", "put"],
        "/v1/rank": ["post"],
        "/v1/similar": ["post"],
        "/v1/search": ["get"],
        "/v1/users": ["get"],
        "/v1/users/{user_id}": ["get"],
        "/v1/schema": ["get"],
        "/v1/health": ["get"],
        "/v1/admin/swap": ["post"],
        "/metrics": ["get"],
    }
    body = paths["/v1/recommend"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert paths["/v1/items/{item_id}"]["get"]["parameters"][0]["name"] == "item_id"
    one, several = (set(kind["properties"]) for kind in body["oneOf"])
    assert one - several == {"history", "user"}
    assert several - one == {"histories"}
    assert one >= {"k", "exclude_seen", "allow", "deny", "ranges", "only_items", "exclude_items", "with_fields"}


def test_answers_have_the_form_that_openapi_promises(served: Served) -> None:
    from habitus.serving import schemas

    history = [{"item_id": 1}, {"item_id": 987654}]
    found = served.recommend(history, with_fields=True).body
    assert schemas.RecommendResponse.model_validate(found).unknown_items == (987654,)
    schemas.EmbedResponse.model_validate(served.ask("POST", "/v1/embed", {"histories": [[{"item_id": 1}]]}).body)
    schemas.SchemaResponse.model_validate(served.ask("GET", "/v1/schema").body)
    schemas.HealthResponse.model_validate(served.ask("GET", "/v1/health").body)
    schemas.ItemResponse.model_validate(served.ask("GET", "/v1/items/1").body)
    ranked = served.ask("POST", "/v1/rank", {"history": history, "item_ids": [1], "items": [{"title": "x"}]}).body
    assert [item.item_id for item in schemas.RankResponse.model_validate(ranked).ranked] == [1, None]
    scored = served.ask("POST", "/v1/score", {"histories": [history], "item_ids": [1, 987654]}).body
    assert schemas.ScoreResponse.model_validate(scored).answers[0].scores[1] is None
    schemas.RecommendManyResponse.model_validate(served.ask("POST", "/v1/recommend", {"histories": [history]}).body)
    schemas.SimilarResponse.model_validate(served.ask("POST", "/v1/similar", {"item_id": 1}).body)
    assert len(schemas.SearchResponse.model_validate(served.ask("GET", "/v1/search?q=1&k=3").body).items) == 3
    schemas.ErrorResponse.model_validate(served.ask("GET", "/nowhere").body)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v1/search?k=0", 422, "k = 0"),
        ("/v1/search?k=ten", 422, "k = 'ten'"),
        ("/v1/search?query=shoe", 422, "the query names 'query'"),
        ("/v1/search?q=" + "x" * 201, 422, "q has 201 characters"),
        ("/v1/users", 403, "users are not shown here"),
        ("/v1/users/1", 403, "users are not shown here"),
    ],
)
def test_searches_that_cannot_be_answered(served: Served, path: str, status: int, error: str) -> None:
    answer = served.ask("GET", path)
    assert (answer.status, answer.body["error"]) == (status, error)


def test_the_curl_examples_of_the_page_work(served: Served) -> None:
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    blocks = [block.strip("\n") for block in text.split("```sh\n")[1:]]
    commands = [block.split("```")[0] for block in blocks if block.startswith("curl ")]
    assert len(commands) >= 4
    for command in commands:
        command = command.replace("http://127.0.0.1:8000", served.url)
        done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        assert "error" not in json.loads(done.stdout), (command, done.stdout)


@pytest.mark.slow
def test_shutdown_answers_what_is_in_flight_and_a_restarted_server_answers_the_same(
    run: Path, log: Log, tmp_path: Path
) -> None:
    history = events(log[6])
    server = Served(run, logs=tmp_path)
    assert server.ask("PUT", "/v1/items/7002", {"fields": {"title": "Stays", "price": 3}}).status == 200
    assert server.ask("DELETE", "/v1/items/11").status == 200
    expected = server.recommend(history, k=300).body
    assert 11 not in {one["item_id"] for one in expected["items"]}
    slow = server.connect()
    body = json.dumps({"history": history, "k": 300}).encode()
    slow.putrequest("POST", "/v1/recommend")
    slow.putheader("Content-Type", "application/json")
    slow.putheader("Content-Length", str(len(body)))
    slow.endheaders()
    slow.send(body[:100])
    wait_until(lambda: server.metric("habitus_in_flight_requests") == 2)  # this one, and that which asks
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not _listening(server))
    slow.send(body[100:])
    answer = slow.getresponse()
    assert (answer.status, json.loads(answer.read())) == (200, expected)
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.logged()
    assert "no token" not in server.logged()
    again = Served(run, "--host", "0.0.0.0", "--access-log", logs=tmp_path)
    assert again.recommend(history, k=300).body == expected
    assert again.ask("GET", "/v1/items/7002").body["fields"] == {"title": "Stays", "price": 3.0}
    assert "warning: no token, and 0.0.0.0 can be reached" in again.logged()
    assert '"POST /v1/recommend HTTP/1.1" 200' in again.logged()
    again.kill()


def _listening(server: Served) -> bool:
    try:
        connection = server.connect(timeout=5)
        connection.connect()
        connection.close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def second_run(dataset: Dataset, train: Callable[..., Any], recipe_of: Callable[..., Any], folder: Path) -> Path:
    """Another model of the same dataset, ready to be served."""
    recipe = recipe_of(steps=5)
    save_bundle(train(dataset, recipe), recipe, dataset, folder / "second" / "bundle")
    Retriever.open(folder / "second", data=dataset.path, device="cpu").close()
    return folder / "second"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_swap_drops_no_request_and_loses_no_item(
    run: Path, second_run: Path, log: Log, tmp_path: Path, shared: bool
) -> None:
    second = shutil.copytree(second_run, tmp_path / "second")
    link = tmp_path / "current"
    link.symlink_to(run)
    options = ["--items", str(tmp_path / "items")] if shared else []
    server = Served(link, *options, logs=tmp_path)
    old, new = (Retriever.open(path, device="cpu", read_only=True) for path in (run, second))
    history = events(log[2])
    expected = {one.checksum: as_answer(one.recommend([RecommendRequest(history=history)])[0]) for one in (old, new)}
    assert server.ask("PUT", "/v1/items/7003", {"fields": {"title": "Comes along"}}).status == 200
    assert server.ask("DELETE", "/v1/items/7003").status == 200
    assert server.ask("PUT", "/v1/items/7004", {"fields": {"title": "Comes along too"}}).status == 200
    seen: list[Any] = []
    updated: list[int] = []
    stop = threading.Event()

    def client() -> None:
        connection = server.connect()
        while not stop.is_set():
            answer = server.ask("POST", "/v1/recommend", {"history": history, "deny": {}}, connection=connection)
            seen.append((answer.status, answer.body["model"]))
        connection.close()

    def updater() -> None:
        number = 8000
        while not stop.is_set():
            number += 1
            answer = server.ask("PUT", f"/v1/items/{number}", {"fields": {"title": "Added meanwhile"}})
            assert answer.status == 200, answer.body
            updated.append(number)

    threads = [threading.Thread(target=work) for work in (client, client, updater)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(seen) > 10 and updated)
    if shared:
        _refused_swaps(server, link, second, tmp_path / "damaged")
    _point(link, second)
    if shared:
        swapped = server.ask("POST", "/v1/admin/swap", raw=b"")
        assert swapped.status == 200, swapped.body
        assert (swapped.body["previous"], swapped.body["model"]) == (old.checksum, new.checksum)
    else:
        server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: seen[-1][1] == new.checksum)
    count = len(seen)
    wait_until(lambda: len(seen) > count + 10)
    stop.set()
    for thread in threads:
        thread.join()
    assert {status for status, _ in seen} == {200}
    assert [model for _, model in seen[:5]] == [old.checksum] * 5
    assert server.ask("GET", "/v1/items/7003").body["recommended"] is False
    for number in (7004, *updated):
        assert server.ask("GET", f"/v1/items/{number}").body["recommended"] is True
    trained = {"allow": {}, "k": 300 + len(updated) + 1}
    after = [one for one in server.recommend(history, **trained).body["items"] if one["item_id"] < 7000]
    assert [one["item_id"] for one in after[:10]] == [one["item_id"] for one in expected[new.checksum]]
    assert server.stop() == 0
    assert "Traceback" not in server.logged()


def _refused_swaps(server: Served, link: Path, whole: Path, damaged: Path) -> None:
    """A run with a flipped bit, then none at all: both are refused, and the former one goes on answering."""
    shutil.copytree(whole, damaged)
    weights = next((damaged / "bundle").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    _point(link, damaged)
    refused = server.ask("POST", "/v1/admin/swap", raw=b"")
    assert refused.status == 409
    assert "safetensors" in refused.body["error"]
    link.unlink()
    assert server.ask("POST", "/v1/admin/swap", raw=b"").status == 409
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "goes on answering" in server.logged())
    assert server.metric('habitus_swaps_total{outcome="refused"}') == 3


def _point(link: Path, run: Path) -> None:
    beside = link.with_name("beside")
    beside.symlink_to(run)
    beside.replace(link)
