"""The application in this process: what happens when there is more to do than time or room."""

import asyncio
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from habitus.cli.app import app as command_line
from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import ConfigError
from habitus.events.schema import Schema
from habitus.events.world.writing import schema_of, write_world
from habitus.model.bundle import save_bundle
from habitus.serving import Limits, RecommendRequest, Retriever, Service, bind, is_loopback
from habitus.serving.app import _MAX_SEARCH, create_app
from habitus.serving.item_store import ItemStore, JournalEntry

HISTORY = [{"item_id": 1}, {"item_id": 2}]


@pytest.fixture
def service(trained_run: Path) -> Iterator[Callable[..., Service]]:
    def make(**limits: Any) -> Service:
        return Service(
            trained_run,
            lambda run, store: Retriever.open(run, device="cpu", read_only=True, limits=Limits(**limits)),
            share_items=False,
        )

    return make  # type: ignore[return-value]


def within(service: Service, scene: Callable[[httpx.AsyncClient], Awaitable[Any]], token: str | None = None) -> Any:
    """What a scene with a client of the started application returns."""

    async def main() -> Any:
        app = create_app(service, token=token, loopback_only=True)
        await service.start()
        try:
            transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await scene(client)
        finally:
            await service.stop()

    return asyncio.run(main())


async def many(client: httpx.AsyncClient, count: int) -> list[httpx.Response]:
    asked = [client.post("/v1/recommend", json={"history": HISTORY, "k": 3}) for _ in range(count)]
    return list(await asyncio.gather(*asked))


def test_a_full_queue_is_a_503_that_says_when_to_come_back(service: Callable[..., Service]) -> None:
    answers = within(service(max_batch=1, max_queue=2), lambda client: many(client, 30))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"].startswith("2 requests wait already")
    answered = {answer.text for answer in answers if answer.status_code == 200}
    assert len(answered) == 1


def test_plain_ids_stand_for_events(service: Callable[..., Service]) -> None:
    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        histories: list[list[Any]] = [HISTORY, [1, 2], [1, {"item_id": 2}], [True], [1.5], [None], [[1]]]
        return [await client.post("/v1/recommend", json={"history": history, "k": 3}) for history in histories]

    events, ids, mixed, *wrong = within(service(), ask)
    assert events.status_code == 200 and ids.json() == mixed.json() == events.json()
    assert [response.status_code for response in wrong] == [422] * 4


def test_time_that_is_over_is_a_504(service: Callable[..., Service]) -> None:
    made, gate = service(timeout_s=0.2), threading.Event()

    async def scene(client: httpx.AsyncClient) -> list[httpx.Response]:
        busy = asyncio.create_task(made.submit("read", gate.wait, math.inf))  # the worker waits while time runs out
        await asyncio.sleep(0)
        answers = await many(client, 3)
        gate.set()
        await busy
        return answers

    answers = within(made, scene)
    assert [answer.status_code for answer in answers] == [504] * 3
    assert answers[0].json()["error"] == "no answer within 0.2 s"


def test_requests_of_a_batch_are_answered_as_they_would_be_alone(
    service: Callable[..., Service], trained_run: Path
) -> None:
    histories = [[{"item_id": number}] for number in range(40)] + [[{"item_id": 10**6}]]

    made, held, gate = service(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait()

    async def scene(client: httpx.AsyncClient) -> list[httpx.Response]:
        busy = asyncio.create_task(made.submit("read", hold, math.inf))  # the worker waits until all have asked
        asked = [asyncio.create_task(client.post("/v1/recommend", json={"history": h})) for h in histories]
        while not held.is_set() or made.batcher.num_waiting < len(histories):
            await asyncio.sleep(0.01)
        gate.set()
        await busy
        return list(await asyncio.gather(*asked))

    answers = within(made, scene)
    batches = {sample.name: sample.value for metric in made.metrics.batch_sizes.collect() for sample in metric.samples}
    assert batches["habitus_batch_size_count"] == 1
    retriever = Retriever.open(trained_run, device="cpu", read_only=True)
    for history, answer in zip(histories[:-1], answers, strict=False):
        alone = retriever.recommend([RecommendRequest(history=history)])[0]
        assert [one["item_id"] for one in answer.json()["items"]] == [one.item_id for one in alone.items]
    assert answers[-1].status_code == 422


def test_pairs_are_named_by_json_in_paths_and_survive_a_swap(
    tmp_path: Path, world: Any, train: Callable[..., Any], recipe_of: Callable[..., Any]
) -> None:
    write_world(world, tmp_path / "files", threads=1, progress=lambda *_: None)
    values = schema_of(world).to_values()
    values["events"]["item"] = ["item_id", "event_type"]
    schema = Schema.parse({"events": values["events"], "items": values["items"]}, "test")
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, test_share=0, threads=1)
    files = [str(tmp_path / "files" / name) for name in ("events.parquet", "items.parquet")]
    prepare(*files, schema, tmp_path / "dataset", options)
    dataset = Dataset.open(tmp_path / "dataset")
    recipe = recipe_of(2)
    save_bundle(train(dataset, recipe), recipe, dataset, tmp_path / "run" / "bundle")
    made = Service(
        tmp_path / "run",
        lambda run, store: Retriever.open(run, data=dataset.path, device="cpu", items=store),
        share_items=False,
    )
    path = "/v1/items/%5B5%2C%22dream%22%5D"

    async def scene(client: httpx.AsyncClient) -> None:
        put = await client.put(path, json={"fields": {"title": "A dream of a thing"}})
        assert put.json()["item_id"] == {"item_id": 5, "event_type": "dream"}, put.json()
        assert (await client.get("/v1/items/5")).status_code == 422
        swapped = await client.post("/v1/admin/swap", json={})
        assert swapped.status_code == 200, swapped.json()
        assert swapped.json()["model"] == swapped.json()["previous"]
        assert (await client.get(path)).json()["fields"]["title"] == "A dream of a thing"
        seen = (await client.get("/v1/schema")).json()
        assert (seen["item_column"], seen["id_column"]) == ("item_id", "item_id")
        wanted = {"history": [seen["examples"][0]], "k": 1, "allow": {"event_type": ["dream"]}}
        found = (await client.post("/v1/recommend", json=wanted)).json()["items"]
        assert [one["item_id"] for one in found] == [{"item_id": 5, "event_type": "dream"}]

    within(made, scene)


def test_updates_of_a_read_only_service_are_a_403(service: Callable[..., Service]) -> None:
    async def scene(client: httpx.AsyncClient) -> list[int]:
        put = await client.put("/v1/items/5", json={"fields": {"title": "x"}})
        return [put.status_code, (await client.delete("/v1/items/5")).status_code]

    assert within(service(), scene) == [403, 403]


def test_an_update_beside_another_writer_is_a_423(trained_run: Path, tmp_path: Path) -> None:
    holder = ItemStore(tmp_path / "items")
    holder.put(1, JournalEntry({}, True, b"", ""))

    def open_retriever(run: Path, store: Any) -> Retriever:
        return Retriever.open(run, device="cpu", items=ItemStore(tmp_path / "items"))

    async def scene(client: httpx.AsyncClient) -> httpx.Response:
        return await client.put("/v1/items/5", json={"fields": {"title": "x"}})

    answer = within(Service(trained_run, open_retriever, share_items=False), scene)
    holder.close()
    assert answer.status_code == 423
    assert answer.json()["error"] == "another process is writing the items of this run"


def test_a_fault_of_ours_is_a_500_without_its_words(
    service: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    made = service()
    made.retriever.bundle.model.contextualizer.register_forward_pre_hook(_fail)

    async def scene(client: httpx.AsyncClient) -> httpx.Response:
        return (await many(client, 1))[0]

    answer = within(made, scene)
    assert answer.status_code == 500
    assert answer.json() == {
        "error": "the request could not be answered",
        "expected": "",
        "next_step": "see the service's log",
    }
    assert "the disc is on fire" in caplog.text


def _fail(*_: Any) -> None:
    raise RuntimeError("the disc is on fire")


def test_a_stopping_service_says_so(service: Callable[..., Service]) -> None:
    made = service()

    async def scene(client: httpx.AsyncClient) -> tuple[int, int]:
        made.stopping = True
        health = (await client.get("/v1/health")).status_code
        await made.batcher.stop()
        return health, (await many(client, 1))[0].status_code

    assert within(made, scene) == (503, 503)


def test_ports_and_tokens_that_cannot_be_used_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("127.0.0.1", 70_000)
    (tmp_path / "token").write_text("short")
    for arguments, words in (
        (["--token-file", str(tmp_path / "token")], "has 5 characters"),
        (["--token-file", str(tmp_path / "none")], "cannot be read"),
        (["--max-batch", "0"], "max_batch"),
        (["--index", "best"], "index"),
    ):
        found = CliRunner().invoke(command_line, ["serve", str(run), *arguments])
        assert isinstance(found.exception, ConfigError), found.output
        assert words in str(found.exception)
    monkeypatch.setenv("HABITUS_TOKEN", "with a space in it")
    found = CliRunner().invoke(command_line, ["serve", str(run)])
    assert "HABITUS_TOKEN" in str(found.exception)
    assert "with a space" not in str(found.exception)


def test_loopback_addresses_are_known() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("127.8.8.8")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("10.0.0.1")


def test_the_command_and_the_page_of_documentation_name_the_limits_that_hold() -> None:
    from habitus.cli.serve import serve

    names = {
        "max_body": "max_body_bytes",
        "timeout": "timeout_s",
        "read_timeout": "read_timeout_s",
        "shutdown_timeout": "shutdown_s",
        **{
            same: same
            for same in (
                "max_history",
                "max_k",
                "max_filter_values",
                "max_candidates",
                "max_batch",
                "max_wait_ms",
                "max_queue",
                "max_connections",
            )
        },
    }
    limits = Limits()
    defaults = {name: parameter.default for name, parameter in inspect.signature(serve).parameters.items()}
    assert {name: defaults[name] for name in names} == {name: getattr(limits, field) for name, field in names.items()}
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    for option, name in names.items():
        shown = f"{getattr(limits, name):,g}" if isinstance(defaults[option], float) else f"{defaults[option]:,}"
        row = re.search(rf"\| `--{option.replace('_', '-')}` \| ([\d,]+)", text)
        assert row, option
        assert row[1] == shown
    assert f"| {limits.max_rows} |" in text
    assert f"| characters of a search | | {_MAX_SEARCH} |" in text
    page = (files("habitus.serving") / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"encodeURIComponent\(text\.slice\(0, (\d+)\)\)", page) == [str(_MAX_SEARCH)] * 2
