"""Malformed, huge, slow, hostile: documented refusals, never a 500 or a traceback; no acknowledged update is lost."""

import contextlib
import http.client
import json
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.served import Answer, Served, events, shared_server

Log = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def served(trained_run: Path) -> Served:
    return shared_server(trained_run)


def refused(answer: Answer, status: int) -> str:
    """The error's text, once it is known to be a refusal in the one shape."""
    assert answer.status == status, (answer.status, answer.raw[:300])
    assert set(answer.body) == {"error", "expected", "next_step"}
    assert answer.body["error"]
    assert b"Traceback" not in answer.raw
    assert b"site-packages" not in answer.raw
    return str(answer.body["error"])


GOOD = [{"item_id": 1, "timestamp": "2024-05-01T10:00:00", "event_type": "view", "price_paid": 2.5}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"history": GOOD, "k": 0}, "k = 0"),
        ({"history": GOOD, "k": -1}, "k = -1"),
        ({"history": GOOD, "k": 10**9}, "k = 1000000000"),
        ({"history": GOOD, "k": 10**300}, "k = 1000"),
        ({"history": GOOD, "k": 2.5}, "valid integer"),
        ({"history": GOOD, "k": True}, "valid integer"),
        ({"history": GOOD, "k": None}, "valid integer"),
        ({"history": [], "histories": [[]]}, "history"),
        ({"histories": []}, "0 histories"),
        ({"histories": [GOOD] * 257}, "257 histories"),
        ({"histories": [GOOD, GOOD * 501]}, "histories[1] has 501 events"),
        ({"histories": [GOOD, [{"item_id": 987654321}]]}, "histories[1]: none of the history's 1 events"),
        ({"history": GOOD, "ranges": {"colour": [1, 2]}}, "colour"),
        ({"history": GOOD, "ranges": {"price": [2, 1]}}, "ranges.price is [2, 1]"),
        ({"history": GOOD, "ranges": {"price": [None, None]}}, "ranges.price"),
        ({"history": GOOD, "ranges": {"price": ["dear", None]}}, "ranges.price[0]"),
        ({"history": GOOD, "ranges": {"price": [1]}}, "ranges.price"),
        ({"history": GOOD, "only_items": [1] * 10_001}, "only_items holds 10,001 items"),
        ({"history": GOOD, "exclude_items": ["five"]}, "five"),
        ({"history": [{}]}, "item_id"),
        ({"history": [1.5]}, "history.0 = 1.5"),
        ({"history": {"item_id": 1}}, "history"),
        ({}, "history"),
        ({"history": GOOD, "exclude_sen": True}, "did you mean 'exclude_seen'"),
        ({"history": [{"item_id": 1, "colour": "red"}]}, "colour"),
        ({"history": [{"item_id": 10**30}]}, "item_id"),
        ({"history": [{"item_id": [1]}]}, "item_id"),
        ({"history": [{"item_id": 99999}]}, "none of the history's 1 events"),
        ({"history": [{"item_id": 1, "timestamp": "yesterday"}]}, "timestamp"),
        ({"history": [{"item_id": 1, "price_paid": "NaN"}]}, "price_paid"),
        ({"history": [{"item_id": 1, "price_paid": {}}]}, "price_paid"),
        ({"history": [{"item_id": 1, "event_type": [[]]}]}, "event_type"),
        ({"history": GOOD * 501}, "501 events"),
        ({"history": GOOD, "allow": {"nothing": ["x"]}}, "nothing"),
        ({"history": GOOD, "allow": {"category": "shoes"}}, "list"),
        ({"history": GOOD, "allow": {"category": [{}]}}, "category"),
        ({"history": GOOD, "deny": {"category": list(range(2000))}}, "2,000 values"),
        ({"history": GOOD, "deny": {str(n): [] for n in range(300)}}, "300 keys"),
        ({str(n): 1 for n in range(5000)}, "5,000 keys"),
        ([], "array"),
        ("history", "string"),
        (3, "number"),
    ],
)
def test_requests_that_make_no_sense_are_told_why(served: Served, body: Any, words: str) -> None:
    assert words in refused(served.ask("POST", "/v1/recommend", body), 422)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"history": [{"item_id": 1, "price_paid": NaN}]}',
        b'{"history": [{"item_id": 1, "price_paid": -Infinity}]}',
        b'{"history": ["\\ud800"]}',
        b"[" * 100_000,
        b'{"a":' * 1_000 + b"1" + b"}" * 1_000,
        b"9" * 10_000,
        b"{'history': []}",
        b"history=1",
    ],
)
def test_what_is_not_json_is_a_400(served: Served, raw: bytes) -> None:
    assert "not JSON" in refused(served.ask("POST", "/v1/recommend", raw=raw), 400)


def test_numbers_beyond_floats_are_refused(served: Served) -> None:
    raw = b'{"history": [{"item_id": 1, "price_paid": 1e999}]}'
    assert "price_paid" in refused(served.ask("POST", "/v1/recommend", raw=raw), 422)
    assert "price" in refused(served.ask("PUT", "/v1/items/7100", raw=b'{"fields": {"price": 1e999}}'), 422)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"item_ids": [1]}, "histories"),
        ({"histories": [GOOD]}, "0 items to score"),
        ({"histories": [GOOD], "item_ids": [1] * 10_001}, "10,001 items to score"),
        ({"histories": [GOOD], "items": [{"title": "x"}] * 257}, "257 items with fields"),
        ({"histories": [], "item_ids": [1]}, "0 histories"),
        ({"histories": [GOOD, GOOD * 501], "item_ids": [1]}, "histories[1] has 501 events"),
        ({"histories": [GOOD], "item_ids": ["five"]}, "five"),
        ({"histories": [GOOD], "items": [{"nope": 1}]}, "nope"),
    ],
)
def test_score_requests_that_make_no_sense_are_told_why(served: Served, body: Any, words: str) -> None:
    assert words in refused(served.ask("POST", "/v1/score", body), 422)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "both"),
        ({"histories": [GOOD], "items": [{"title": "x"}]}, "both"),
        ({"histories": [GOOD] * 257}, "257 rows"),
        ({"histories": [[]]}, "empty"),
        ({"histories": [GOOD, GOOD * 501]}, "histories[1] has 501 events"),
        ({"items": [{"price": "dear"}]}, "price"),
        ({"items": [{"nope": 1}]}, "nope"),
        ({"items": [{}]}, "no fields"),
        ({"items": [{"image": [1.0]}]}, "image"),
        ({"items": "x"}, "items"),
    ],
)
def test_embed_requests_that_make_no_sense_are_told_why(served: Served, body: Any, words: str) -> None:
    assert words in refused(served.ask("POST", "/v1/embed", body), 422)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no fields"),
        ({"price": "NaN"}, "price"),
        ({"price": True, "colour": 1}, "colour"),
        ({"title": ["a"]}, "title"),
        ({"image": [0.0, 1.0]}, "image"),
        ({"image": [None] * 16}, "image"),
        ({"category": {"a": 1}}, "category"),
        ({"title": "x" * 200_000}, "200,000 characters"),
        ({"item_id": 8, "title": "other id"}, "item_id"),
    ],
)
def test_items_that_make_no_sense_are_refused_and_not_kept(served: Served, fields: Any, words: str) -> None:
    assert words in refused(served.ask("PUT", "/v1/items/7101", {"fields": fields}), 422)
    refused(served.ask("GET", "/v1/items/7101"), 404)


@pytest.mark.parametrize(
    "tail", ["..%2f..%2fetc%2fpasswd", "../../etc/passwd", "%00", "a/b", ".", "%2e%2e", "1;rm", "1.5", "1" * 900]
)
def test_ids_are_names_and_never_paths(served: Served, tail: str) -> None:
    """The catalogue's ids are whole numbers, so every trick is refused; none reaches a file."""
    for method, body in (("GET", None), ("DELETE", None), ("PUT", {"fields": {"title": "x"}})):
        answer = served.ask(method, f"/v1/items/{tail}", body)
        assert answer.status in (404, 422), (method, answer.raw)
        refused(answer, answer.status)
    assert not list(served.log.parent.glob("**/passwd*"))


def test_ids_that_are_not_utf8_or_empty_are_refused(served: Served) -> None:
    refused(served.ask("GET", "/v1/items/%ff%fe"), 400)
    refused(served.ask("PUT", "/v1/items/", {"fields": {"title": "x"}}), 422)
    refused(served.ask("DELETE", "/v1/items"), 404)


def test_wrong_methods_paths_and_content_types(served: Served) -> None:
    assert served.ask("GET", "/v1/recommend").headers["allow"] == "POST"
    refused(served.ask("GET", "/v1/recommend"), 405)
    refused(served.ask("PATCH", "/v1/items/1"), 405)
    refused(served.ask("GET", "/../../etc/passwd"), 404)
    refused(served.ask("GET", "/v1/health/"), 404)
    body = json.dumps({"history": GOOD}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        refused(served.ask("POST", "/v1/recommend", raw=body, headers={"Content-Type": kind}), 415)
    refused(served.ask("POST", "/v1/admin/swap"), 415)
    fine = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert served.ask("POST", "/v1/recommend", raw=body, headers=fine).status == 200


def test_a_foreign_host_name_is_refused_on_loopback(served: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1", ""):
        refused(served.ask("GET", "/v1/health", headers={"Host": host}), 421)
    for host in ("localhost", "LOCALHOST:9", "[::1]:80", "127.0.0.1"):
        assert served.ask("GET", "/v1/health", headers={"Host": host}).status == 200


def test_a_huge_body_is_refused_without_being_read(served: Served) -> None:
    with socket.create_connection((served.host, served.port), timeout=30) as client:
        head = b"POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 100000000000\r\n\r\n{")
        answer = b""
        while b"next_step" not in answer:
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"at most 1,048,576 bytes" in answer
    with socket.create_connection((served.host, served.port), timeout=30) as client:  # and where no length is told
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):
            client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_history_of_a_million_events_is_refused_quickly(served: Served) -> None:
    raw = json.dumps({"history": [{"item_id": 1}] * 1_000_000}).encode()
    began = time.monotonic()
    assert "too large" in refused(served.ask("POST", "/v1/recommend", raw=raw), 413)
    small = b'{"history":[' + b"{}," * 300_000 + b"{}]}"
    assert "300,001 events" in refused(served.ask("POST", "/v1/recommend", raw=small), 422)
    ids = b'{"history":[' + b"1," * 500_000 + b"1]}"
    assert "500,001 events" in refused(served.ask("POST", "/v1/recommend", raw=ids), 422)
    wrong = b'{"history":[' + b"1.5," * 200_000 + b"1]}"
    assert "history.0 = 1.5" in refused(served.ask("POST", "/v1/recommend", raw=wrong), 422)
    assert time.monotonic() - began < 10


def test_slow_clients_are_let_go_and_hold_up_nobody(served: Served) -> None:
    """Bodies that stop get a 408; headers that stop, and connections that say nothing, are closed. The limit is 2 s."""
    head = b"POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    address = (served.host, served.port)
    with contextlib.ExitStack() as stack:
        body, headers, silent = (stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(3))
        body.sendall(head + b'Content-Length: 100\r\n\r\n{"history": [')
        headers.sendall(head[:40])
        began = time.monotonic()
        for _ in range(5):
            assert served.recommend(GOOD).status == 200
        assert time.monotonic() - began < 2
        assert body.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert headers.recv(65536) == b""
        assert silent.recv(65536) == b""
    assert time.monotonic() - began < 10


def test_a_client_that_takes_no_answers_is_cut_off(served: Served) -> None:
    body = json.dumps({"history": GOOD, "k": 300}).encode()
    head = "POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    request = f"{head}{len(body)}\r\n\r\n".encode() + body
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect((served.host, served.port))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            while True:
                client.sendall(request)
    assert served.recommend(GOOD).status == 200


def test_script_text_comes_back_as_the_text_it_is(served: Served) -> None:
    text = "</script><script>alert('x')</script>&\u2028\x00"
    assert served.ask("PUT", "/v1/items/7102", {"fields": {"title": text}}).status == 200
    answer = served.ask("GET", "/v1/items/7102")
    assert answer.body["fields"] == {"title": text}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert served.ask("DELETE", "/v1/items/7102").status == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([1, 2.0, "3"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
event_keys = st.sampled_from(["item_id", "timestamp", "event_type", "price_paid", "user_id", "x"])
item_keys = st.sampled_from(["item_id", "title", "category", "brand", "price", "image", "x"])
odd_events = st.lists(st.dictionaries(event_keys, json_values, max_size=4), max_size=4) | json_values
odd_body = st.one_of(
    json_values,
    st.fixed_dictionaries(
        {},
        optional={
            "history": odd_events,
            "k": json_values,
            "exclude_seen": json_values,
            "allow": st.dictionaries(item_keys, json_values, max_size=3) | json_values,
            "deny": json_values,
            "histories": st.lists(odd_events, max_size=3) | json_values,
            "items": st.lists(st.dictionaries(item_keys, json_values, max_size=4), max_size=3) | json_values,
            "fields": st.dictionaries(item_keys, json_values, max_size=4) | json_values,
            "with_fields": json_values,
        },
    ),
)
raw_body = odd_body.map(lambda values: json.dumps(values).encode()) | st.binary(max_size=200)
paths = st.sampled_from(["/v1/recommend", "/v1/embed", "/v1/items/7103", "/v1/admin/nothing", "/v1/health", "/"])
odd_paths = paths | st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=30).map(
    lambda text: "/v1/items/" + text.replace("#", "").replace("?", "")
)
methods = st.sampled_from(["POST", "POST", "PUT", "PUT", "GET", "DELETE", "PATCH", "HEAD", "OPTIONS"])


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_malformed_requests_never_get_a_500(served: Served, number: int) -> None:
    connection = served.connect()
    count = 0

    @settings(
        max_examples=number, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(methods, odd_paths, raw_body, st.sampled_from(["application/json"] * 9 + ["text/plain"]))
    def ask(method: str, path: str, raw: bytes, kind: str) -> None:
        nonlocal count
        count += 1
        headers = {"Content-Type": kind}
        try:
            answer = served.ask(method, path, raw=raw, headers=headers, connection=connection)
        except (OSError, http.client.HTTPException):  # a connection that idled while this was drawn is closed
            connection.close()
            answer = served.ask(method, path, raw=raw, headers=headers, connection=connection)
        assert answer.status < 500, (method, path, raw, answer)
        assert b"Traceback" not in answer.raw
        if answer.status >= 400 and method != "HEAD":
            refused(answer, answer.status)

    ask()
    connection.close()
    assert count >= number
    assert served.metric("habitus_errors_total") == 0
    assert "Traceback" not in served.logged()
    assert served.recommend(GOOD).status == 200


def test_a_full_disk_refuses_the_update_and_changes_nothing(served: Served) -> None:
    assert served.ask("PUT", "/v1/items/7104", {"fields": {"title": "First"}}).status == 200
    journal = served.log.parent / "run" / "serve" / "items" / "journal.jsonl"
    before = journal.read_bytes()
    answers = served.recommend(GOOD, k=400).body
    pid = served.process.pid
    free = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (len(before) + 20, free[1]))  # room for half a line
    try:
        for method, path, body in (
            ("PUT", "/v1/items/7105", {"fields": {"title": "No room"}}),
            ("PUT", "/v1/items/7104", {"fields": {"title": "No room"}}),
            ("DELETE", "/v1/items/7104", None),
        ):
            refused(served.ask(method, path, body), 507)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, free)
    assert journal.read_bytes() == before
    assert served.recommend(GOOD, k=400).body == answers
    assert served.ask("GET", "/v1/items/7104").body["fields"] == {"title": "First"}
    refused(served.ask("GET", "/v1/items/7105"), 404)
    assert served.ask("PUT", "/v1/items/7105", {"fields": {"title": "Room again"}}).status == 200
    assert served.ask("DELETE", "/v1/items/7105").status == 200
    assert served.ask("DELETE", "/v1/items/7104").status == 200


@pytest.mark.slow
def test_only_the_right_token_is_let_in_and_limits_hold(run: Path, log: Log, tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    (tmp_path / "token").write_text(secret + "\n")
    options = ["--token-file", str(tmp_path / "token"), "--read-only", "--host", "0.0.0.0", "--timeout", "0.0001"]
    server = Served(run, *options, logs=tmp_path, environment={"HABITUS_TOKEN": "another-long-token"})
    server.host = "127.0.0.1"
    for given_header in (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {secret}x",
        f"Bearer {secret[:-1]}",
        f"Basic {secret}",
        secret,
        "Bearer another-long-token",
        "Bearer \u00e9",
    ):
        answer = server.ask("GET", "/v1/schema", headers={"Authorization": given_header} if given_header else None)
        refused(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert secret.encode() not in answer.raw
    for path in ("/metrics", "/openapi.json", "/v1/items/1", "/nowhere", "/v1/health/../schema"):
        refused(server.ask("GET", path), 401)
    assert server.ask("GET", "/").status == 200
    assert server.ask("GET", "/v1/health", headers={"Host": "shop.example"}).status == 200
    allowed = {"Authorization": f"Bearer {secret}"}
    assert server.ask("GET", "/openapi.json", headers=allowed).status == 200
    refused(server.ask("POST", "/v1/recommend", {"history": events(log[1])}, headers=allowed), 504)
    assert secret not in server.logged()
    assert secret not in " ".join(server.process.args)  # type: ignore[arg-type]
    assert server.stop() == 0


def updates_until_killed(server: Served, first: int, acknowledged: dict[int, str], after_s: float) -> None:
    """Put and replace items as fast as they are answered, and kill the server in the middle of it."""
    connection = server.connect()
    end = time.monotonic() + after_s
    number = first
    killer_sent = False
    with contextlib.suppress(OSError, Exception):
        while True:
            if not killer_sent and time.monotonic() > end:
                os.kill(server.process.pid, 9)
                killer_sent = True
            for title in ("one", "two"):
                body = {"fields": {"title": f"{title} {number}"}}
                if server.ask("PUT", f"/v1/items/{number}", body, connection=connection).status == 200:
                    acknowledged[number] = body["fields"]["title"]
            number += 1
    server.kill()


def kill_and_restart(run: Path, logs: Path, times: int) -> None:
    acknowledged: dict[int, str] = {}
    server = Served(run, logs=logs)
    for turn in range(times):
        count = len(acknowledged)
        updates_until_killed(server, 10_000 * (turn + 1), acknowledged, 0.1 + 0.037 * (turn % 10))
        assert len(acknowledged) > count
        server = Served(run, logs=logs)
        connection = server.connect()
        for number, title in acknowledged.items():
            answer = server.ask("GET", f"/v1/items/{number}", connection=connection)
            assert answer.status == 200, number
            # The update that was under way may have happened or not; no other title, and no torn item.
            assert answer.body["fields"]["title"] in (title, f"two {number}"), number
        connection.close()
    assert server.recommend(GOOD, k=1_000).status == 200
    assert "Traceback" not in server.logged()
    server.kill()


@pytest.mark.slow
def test_kills_during_updates_lose_nothing_that_was_acknowledged(run: Path, tmp_path: Path) -> None:
    kill_and_restart(run, tmp_path, 5)


@pytest.mark.soak
def test_fifty_kills_during_updates_lose_nothing_that_was_acknowledged(run: Path, tmp_path: Path) -> None:
    kill_and_restart(run, tmp_path, 50)
