"""The service behind the endpoints: one retriever at a time, its worker, and how another one takes its place."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from habitus.errors import HabitusError
from habitus.serving.batching import Batcher, DeadlineError, Lane, QueueFullError, StoppedError
from habitus.serving.items import ItemStore
from habitus.serving.limits import ServerLimits
from habitus.serving.requests import ReadOnlyError, Request, RequestError, StorageError, UnknownItemError
from habitus.serving.retriever import Retriever
from habitus.serving.telemetry import Telemetry
from habitus.serving.wire import RefusedError, failure, recommend_answer

log = logging.getLogger(__name__)

# Opens a run; the store is that of the run before where both share one.
OpenRun = Callable[[Path, ItemStore | None], Retriever]
Values = dict[str, Any]
STATUS = ((UnknownItemError, 404), (ReadOnlyError, 403), (RequestError, 422), (StorageError, 507))
NUM_EXAMPLES = 12


class Service:
    """Answers through a retriever that one worker thread asks. `run` may be a link that points elsewhere later."""

    def __init__(self, run: Path, open_run: OpenRun, limits: ServerLimits, *, share_items: bool) -> None:
        self.run = run
        self.limits = limits
        self.share_items = share_items
        self.telemetry = Telemetry()
        self.stopping = False
        self._open_run = open_run
        self._began = time.monotonic()
        self._swapping = False
        self._missed: list[tuple[str, Any, Mapping[str, Any]]] | None = None  # updates while a new run is opened
        self.batcher = Batcher(
            {
                "recommend": Lane(self._recommend, limits.max_batch),
                "embed_histories": Lane(
                    lambda jobs: self._embed(self.retriever.embed_histories, jobs), limits.max_batch
                ),
                "embed_items": Lane(lambda jobs: self._embed(self.retriever.embed_items, jobs), limits.max_batch),
                "read": Lane(lambda calls: [call() for call in calls]),
                "update": Lane(lambda jobs: [self._update(*job) for job in jobs], patient=True),
                "install": Lane(lambda jobs: [self._install(*job) for job in jobs], patient=True, limited=False),
            },
            max_queue=limits.max_queue,
            max_wait_s=limits.max_wait_ms / 1000,
            on_batch=self.telemetry.note_batch,
        )
        resolved = run.resolve()
        self._adopt(open_run(resolved, None), resolved)

    async def start(self) -> None:
        self.batcher.start()

    async def stop(self) -> None:
        """Answer what waits, then let go of the retriever."""
        self.stopping = True
        await self.batcher.stop()
        self.retriever.close()

    async def recommend(self, request: Request, with_fields: bool, deadline: float) -> Values:
        """The body of an answer."""
        found: Values = await self.ask("recommend", (request, with_fields), deadline)
        return found

    async def embed(self, kind: str, rows: Sequence[Any], deadline: float) -> Values:
        """The vectors of 'histories' or 'items'."""
        vectors, model = await self.ask(f"embed_{kind}", rows, deadline)
        return {"vectors": vectors.tolist(), "model": model}

    async def update(self, verb: str, item_id: str, fields: Mapping[str, Any], deadline: float) -> Values:
        """'put' or 'delete' an item; it has happened, durably, when this returns, and otherwise it has not."""
        found: Values = await self.ask("update", (verb, item_id, fields), deadline)
        return found

    async def item(self, item_id: str, deadline: float) -> Values:
        """What is known of an item."""
        found: Values = await self.ask("read", lambda: self._item(item_id), deadline)
        return found

    async def describe(self, deadline: float) -> Values:
        """The columns of events and items, and some items."""
        found: Values = await self.ask("read", self._describe, deadline)
        return found

    async def ask(self, lane: str, payload: Any, deadline: float) -> Any:
        """A job's result; where there is none, the refusal that says why."""
        try:
            return await self.batcher.ask(lane, payload, deadline)
        except QueueFullError:
            raise RefusedError(
                503, f"{self.limits.max_queue:,} requests wait already", next_step="try again later", retry_s=1
            ) from None
        except StoppedError:
            raise RefusedError(503, "the service is stopping", next_step="try again later", retry_s=5) from None
        except DeadlineError:
            raise RefusedError(
                504, f"no answer within {self.limits.timeout_s:g} s", next_step="try again later, or ask for less"
            ) from None
        except HabitusError as error:
            for kind, status in STATUS:
                if isinstance(error, kind):
                    raise RefusedError.of(error, status) from None
            log.error("a request could not be answered: %s", error)
            raise failure() from None
        except RefusedError:
            raise
        except Exception:  # the worker has logged it
            raise failure() from None

    def health(self) -> Values:
        """Who answers, and whether."""
        return {
            "status": "stopping" if self.stopping else "ok",
            "run": self._resolved.name,
            "model": self.model,
            "num_items": self.num_items,
            "index": self.retriever.index_info.kind,
            "waiting": self.batcher.num_waiting,
            "uptime_s": round(time.monotonic() - self._began, 3),
        }

    def metrics(self) -> bytes:
        """Counters in Prometheus's text form."""
        self.telemetry.waiting.set(self.batcher.num_waiting)
        self.telemetry.items.set(self.num_items)
        return self.telemetry.text()

    async def swap(self) -> Values:
        """Let what `run` names now answer from now on; where it cannot be opened, everything stays as it is.

        The new run is opened, verified and asked once beside the old one, which goes on answering. Updates that come
        meanwhile are made in the old one and repeated in the new one before it takes over.
        """
        if self._swapping:
            raise RefusedError(409, "another swap is under way", next_step="wait for it", retry_s=5)
        self._swapping, self._missed = True, []
        try:
            resolved = self.run.resolve()
            shared = self.share_items or self.retriever.read_only or resolved == self._resolved
            new = await asyncio.to_thread(self._opened, resolved, shared)
            answer: Values = await self.ask("install", (new, resolved, shared), math.inf)
        except Exception as error:
            self.telemetry.swaps.labels("refused").inc()
            if isinstance(error, RefusedError):
                raise
            if isinstance(error, HabitusError):
                raise RefusedError.of(error, 409) from None
            log.exception("%s could not be opened", self.run)
            raise RefusedError(409, "the run could not be opened", next_step="see the service's log") from None
        finally:
            self._swapping, self._missed = False, None
        self.telemetry.swaps.labels("done").inc()
        log.info("swapped to %s, model %s", resolved.name, self.model[:12])
        return answer

    def _adopt(self, retriever: Retriever, resolved: Path) -> None:
        """Answer by this retriever. What is asked of it on the event loop is kept here: it locks while it computes."""
        self.retriever = retriever
        self._resolved = resolved
        self.model = retriever.checksum
        self.num_items = retriever.num_items

    def _recommend(self, jobs: list[tuple[Request, bool]]) -> list[Any]:
        answers = self.retriever.recommend_each([request for request, _ in jobs])
        found: list[Any] = []
        for (_, with_fields), answer in zip(jobs, answers, strict=True):
            if isinstance(answer, RequestError):
                found.append(answer)
                continue
            body = recommend_answer(answer, self.model)
            if with_fields:
                for one in body["items"]:
                    one["fields"] = self._item(one["item_id"])["fields"]
            found.append(body)
        return found

    def _embed(self, embed: Callable[[list[Any]], np.ndarray], jobs: list[list[Any]]) -> list[Any]:
        vectors = embed([row for job in jobs for row in job])
        stops = np.cumsum([len(job) for job in jobs])[:-1]
        return [(part, self.model) for part in np.split(vectors, stops)]

    def _update(self, verb: str, item_id: Any, fields: Mapping[str, Any]) -> Values:
        _apply(self.retriever, verb, item_id, fields)
        if self._missed is not None:
            self._missed.append((verb, item_id, fields))
        self.num_items = self.retriever.num_items
        return {"item_id": self.retriever.item(item_id).item_id, "num_items": self.num_items, "model": self.model}

    def _item(self, item_id: Any) -> Values:
        found = self.retriever.item(item_id)
        fields = _trained_categories(self.retriever, item_id) if found.fields is None else dict(found.fields)
        return {"item_id": found.item_id, "recommended": found.live, "fields": fields, "model": self.model}

    def _describe(self) -> Values:
        schema = self.retriever.bundle.schema
        return {
            "item_column": schema.events.item_column,
            "id_column": schema.items.item,
            "event_fields": {schema.events.timestamp: schema.events.time_unit, **schema.events.fields},
            "item_fields": dict(schema.items.fields),
            "window": self.retriever.limits.window,
            "examples": self.retriever.some_items(NUM_EXAMPLES),
            "model": self.model,
        }

    def _opened(self, resolved: Path, shared: bool) -> Retriever:
        """The run, opened and asked once; with items of its own, it first gets those that were added here."""
        new = self._open_run(resolved, self.retriever.store if shared else None)
        try:
            if not shared:
                for change in _changes_of(self.retriever):
                    _repeat(new, *change)
            _try_out(new)
        except BaseException:
            if not shared:  # a shared store is still in use
                new.close()
            raise
        return new

    def _install(self, new: Retriever, resolved: Path, shared: bool) -> Values:
        """Runs on the worker, between two batches: no request is lost, none sees half of each."""
        try:
            for update in [] if shared else self._missed or []:
                _repeat(new, *update)
        except BaseException:
            new.close()
            raise
        old, previous = self.retriever, self.model
        self._adopt(new, resolved)
        if not shared:
            old.close()
        return {"run": resolved.name, "model": self.model, "previous": previous, "num_items": self.num_items}


def _try_out(retriever: Retriever) -> None:
    """Ask a retriever for what follows one event, so that what is broken shows before anyone depends on it."""
    schema = retriever.bundle.schema
    first = retriever.some_items(1)[0]
    named = first if isinstance(first, dict) else {schema.items.item: first}
    event = {schema.events.item_column if name == schema.items.item else name: named[name] for name in named}
    retriever.recommend([Request((event,), k=1)])


def _apply(retriever: Retriever, verb: str, item_id: Any, fields: Mapping[str, Any]) -> None:
    if verb == "put":
        retriever.put_item(item_id, fields)
    else:
        retriever.delete_item(item_id)


def _trained_categories(retriever: Retriever, item_id: Any) -> dict[str, str]:
    """What is kept of an item that came with the run: the categories that filters look at."""
    live = retriever.live
    row = live.rows_of([retriever.kind.key(item_id)])[0]
    known = retriever.bundle.encoders.item_values
    codes = {name: int(column[row]) for name, column in live.catalogue.codes.items()}
    return {name: known[name][code - 1] for name, code in codes.items() if code}


def _changes_of(retriever: Retriever) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """The updates that bring another run's items to the state of this one's."""
    for key, entry in retriever.store.changes(0)[1]:
        if entry.fields:
            yield "put", key, entry.fields
        if entry.withdrawn:
            yield "delete", key, {}


def _repeat(retriever: Retriever, verb: str, item_id: Any, fields: Mapping[str, Any]) -> None:
    """Make a change again that another run has seen; an item that is not there is withdrawn already."""
    with contextlib.suppress(UnknownItemError):
        _apply(retriever, verb, item_id, fields)
