"""The service behind the endpoints: one retriever at a time, its worker, and how another one takes its place."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from habitus.errors import HabitusError
from habitus.model import chosen_run
from habitus.serving.batching import Batcher, DeadlineError, Lane, QueueFullError, StoppedError
from habitus.serving.item_store import ItemStore
from habitus.serving.middleware import Metrics, internal_error
from habitus.serving.retriever import Retriever
from habitus.serving.schemas import (
    EmbedRequest,
    EmbedResponse,
    Fields,
    HealthResponse,
    HttpError,
    ItemResponse,
    RankRequest,
    RankResponse,
    RecommendManyRequest,
    RecommendManyResponse,
    RecommendRequest,
    RecommendResponse,
    RequestError,
    SchemaResponse,
    ScoreRequest,
    ScoreResponse,
    SearchResponse,
    SimilarRequest,
    SimilarResponse,
    StorageError,
    SwapResponse,
    UnknownItemError,
    UpdateResponse,
    UserResponse,
    UsersResponse,
)
from habitus.serving.users import ValidationUsers

log = logging.getLogger(__name__)

# Opens a run; the store is that of the previous run if both share one.
OpenRun = Callable[[Path, ItemStore | None], Retriever]
_NUM_EXAMPLES = 12


class _Update(NamedTuple):
    item_id: Any
    fields: Fields | None  # None withdraws the item

    def apply(self, retriever: Retriever) -> None:
        if self.fields is None:
            retriever.delete_item(self.item_id)
        else:
            retriever.put_item(self.item_id, self.fields)

    def repeat(self, retriever: Retriever) -> None:
        """Apply an update that another run has applied; an item that is not there is withdrawn already."""
        with contextlib.suppress(UnknownItemError):
            self.apply(retriever)


class Service:
    """Answers through a retriever that one worker thread calls. `run` may be a link that points elsewhere later.

    The limits are those of the retriever that `open_run` opens. `users` may be looked at, and pictures come from
    `image_origins` only, where there are any.
    """

    def __init__(
        self,
        run: Path,
        open_run: OpenRun,
        *,
        share_items: bool,
        users: ValidationUsers | None = None,
        image_origins: tuple[str, ...] = (),
    ) -> None:
        self.run = run
        self.share_items = share_items
        self.users = users
        self.image_origins = image_origins
        self.metrics = Metrics()
        self.stopping = False
        self._open_run = open_run
        self._began = time.monotonic()
        self._swapping = False
        self._missed: list[_Update] | None = None  # updates while a new run is opened
        resolved = chosen_run(run).resolve()
        self._adopt(open_run(resolved, None), resolved)
        _prepare_search(self.retriever)
        self.limits = limits = self.retriever.limits
        self.batcher = Batcher(
            {
                "recommend": Lane(self._recommend, limits.max_batch),
                "score": Lane(lambda requests: self.retriever.score_each(requests), limits.max_batch),
                "embed_histories": Lane(
                    lambda jobs: self._embed(self.retriever.embed_histories, jobs), limits.max_batch
                ),
                "embed_items": Lane(lambda jobs: self._embed(self.retriever.embed_items, jobs), limits.max_batch),
                "read": Lane(lambda calls: [call() for call in calls]),
                "update": Lane(lambda updates: [self._update(update) for update in updates], patient=True),
                "install": Lane(lambda jobs: [self._install(*job) for job in jobs], patient=True, limited=False),
            },
            max_queue=limits.max_queue,
            max_wait_s=limits.max_wait_ms / 1000,
            on_batch=self.metrics.count_batch,
        )

    async def start(self) -> None:
        self.batcher.start()

    async def stop(self) -> None:
        """Answer what waits, then close the retriever."""
        self.stopping = True
        await self.batcher.stop()
        self.retriever.close()

    async def recommend(self, request: RecommendRequest, deadline: float) -> RecommendResponse:
        response: RecommendResponse = await self.submit("recommend", request, deadline)
        return response

    async def recommend_many(self, request: RecommendManyRequest, deadline: float) -> RecommendManyResponse:
        response: RecommendManyResponse = await self.submit("read", lambda: self._recommend_many(request), deadline)
        return response

    async def score(self, request: ScoreRequest, deadline: float) -> ScoreResponse:
        response: ScoreResponse = await self.submit("score", request, deadline)
        return response

    async def embed(self, request: EmbedRequest, deadline: float) -> EmbedResponse:
        lane, rows = ("embed_histories", request.histories) if request.histories else ("embed_items", request.items)
        response: EmbedResponse = await self.submit(lane, rows, deadline)
        return response

    async def put_item(self, item_id: str, fields: Fields, deadline: float) -> UpdateResponse:
        """Add or replace an item; it has happened, durably, if this returns, and has not if it raises."""
        response: UpdateResponse = await self.submit("update", _Update(item_id, fields), deadline)
        return response

    async def delete_item(self, item_id: str, deadline: float) -> UpdateResponse:
        """Withdraw an item, with the same promise."""
        response: UpdateResponse = await self.submit("update", _Update(item_id, None), deadline)
        return response

    async def item(self, item_id: str, deadline: float) -> ItemResponse:
        response: ItemResponse = await self.submit("read", lambda: self.retriever.item(item_id), deadline)
        return response

    async def rank(self, request: RankRequest, deadline: float) -> RankResponse:
        response: RankResponse = await self.submit("read", lambda: self.retriever.rank(request), deadline)
        return response

    async def similar(self, request: SimilarRequest, deadline: float) -> SimilarResponse:
        response: SimilarResponse = await self.submit("read", lambda: self.retriever.similar(request), deadline)
        return response

    async def find_items(self, text: str, k: int, deadline: float) -> SearchResponse:
        response: SearchResponse = await self.submit("read", lambda: self.retriever.find_items(text, k), deadline)
        return response

    async def find_users(self, text: str, k: int, deadline: float) -> UsersResponse:
        users = self._shown_users()
        response: UsersResponse = await self.submit("read", lambda: users.find(text, k), deadline)
        return response

    async def user(self, user_id: str, deadline: float) -> UserResponse:
        users = self._shown_users()
        response: UserResponse = await self.submit("read", lambda: users.history(user_id, self.retriever), deadline)
        return response

    def _shown_users(self) -> ValidationUsers:
        if self.users is None:
            raise HttpError(403, "users are not shown here", expected="a service started with --show-users on loopback")
        return self.users

    async def describe(self, deadline: float) -> SchemaResponse:
        """The columns of events and items, and some items."""
        response: SchemaResponse = await self.submit("read", self._describe, deadline)
        return response

    async def submit(self, lane: str, payload: Any, deadline: float) -> Any:
        """A job's result; if there is none, the error that says why to a client."""
        try:
            return await self.batcher.submit(lane, payload, deadline)
        except QueueFullError:
            raise HttpError(
                503,
                f"{self.batcher.num_waiting:,} requests wait already, as many as can be answered in time",
                expected=f"fewer than {self.limits.max_queue:,} that wait, and their answers within the time-out",
                next_step="try again later",
                retry_after_s=1,
            ) from None
        except StoppedError:
            raise HttpError(503, "the service is stopping", next_step="try again later", retry_after_s=5) from None
        except DeadlineError:
            raise HttpError(
                504, f"no answer within {self.limits.timeout_s:g} s", next_step="try again later, or ask for less"
            ) from None
        except (RequestError, StorageError):
            raise
        except HabitusError as error:
            log.error("a request could not be answered: %s", error)
            raise internal_error() from None
        except Exception:  # the worker has logged it
            raise internal_error() from None

    def health(self) -> HealthResponse:
        """Which run answers, and whether the service is stopping."""
        return HealthResponse(
            status="stopping" if self.stopping else "ok",
            run=self._resolved.name,
            model=self.model,
            num_items=self.num_items,
            index=self.retriever.index_info.kind,
            waiting=self.batcher.num_waiting,
            uptime_s=round(time.monotonic() - self._began, 3),
        )

    def metrics_text(self) -> bytes:
        """Counters in Prometheus's text form."""
        self.metrics.waiting.set(self.batcher.num_waiting)
        self.metrics.items.set(self.num_items)
        return self.metrics.to_text()

    async def swap(self) -> SwapResponse:
        """Answer from the run that `run` points to now; if it cannot be opened, everything stays as it is.

        The new run is opened, verified and tried out while the old one goes on answering. Updates that arrive
        meanwhile are applied to the old one and repeated on the new one before it takes over.
        """
        if self._swapping:
            raise HttpError(409, "another swap is under way", next_step="wait for it", retry_after_s=5)
        self._swapping, self._missed = True, []
        try:
            resolved = chosen_run(self.run).resolve()
            shared = self.share_items or self.retriever.read_only or resolved == self._resolved
            new = await asyncio.to_thread(self._open_new, resolved, shared)
            response: SwapResponse = await self.submit("install", (new, resolved, shared), math.inf)
        except Exception as error:
            self.metrics.swaps.labels("refused").inc()
            if isinstance(error, HttpError):
                raise
            if isinstance(error, HabitusError):
                raise HttpError(409, error.problem, expected=error.expected, next_step=error.next_step) from None
            log.exception("%s could not be opened", self.run)
            raise HttpError(409, "the run could not be opened", next_step="see the service's log") from None
        finally:
            self._swapping, self._missed = False, None
        self.metrics.swaps.labels("done").inc()
        log.info("swapped to %s, model %s", resolved.name, self.model[:12])
        return response

    def _adopt(self, retriever: Retriever, resolved: Path) -> None:
        """Answer by this retriever. What the event loop reads is copied here: the retriever locks while it computes."""
        self.retriever = retriever
        self._resolved = resolved
        self.model = retriever.checksum
        self.num_items = retriever.num_items

    def _recommend(self, requests: list[RecommendRequest]) -> list[RecommendResponse | RequestError]:
        return self.retriever.recommend_each(requests)

    def _recommend_many(self, request: RecommendManyRequest) -> RecommendManyResponse:
        requests, size = request.requests(), self.limits.max_batch
        answers: list[RecommendResponse] = []
        for at in range(0, len(requests), size):
            for response in self.retriever.recommend_each(requests[at : at + size]):
                if isinstance(response, RequestError):
                    problem = f"histories[{len(answers)}]: {response.problem}"
                    raise HttpError(response.status, problem, expected=response.expected, next_step=response.next_step)
                answers.append(response)
        return RecommendManyResponse(answers=tuple(answers))

    def _embed(self, embed: Callable[[list[Any]], np.ndarray], jobs: list[list[Any]]) -> list[EmbedResponse]:
        vectors = embed([row for job in jobs for row in job])
        stops = np.cumsum([len(job) for job in jobs])[:-1]
        return [EmbedResponse(vectors=part.tolist(), model=self.model) for part in np.split(vectors, stops)]

    def _update(self, update: _Update) -> UpdateResponse:
        update.apply(self.retriever)
        if self._missed is not None:
            self._missed.append(update)
        self.num_items = self.retriever.num_items
        item_id = self.retriever.item(update.item_id).item_id
        return UpdateResponse(item_id=item_id, num_items=self.num_items, model=self.model)

    def _describe(self) -> SchemaResponse:
        schema = self.retriever.bundle.schema
        return SchemaResponse(
            item_column=schema.events.item_column,
            id_column=schema.items.item,
            event_fields={schema.events.timestamp: schema.events.time_unit, **schema.event_fields},
            item_fields=schema.items.kinds,
            window=self.retriever.window,
            max_history=self.limits.max_history,
            display=schema.items.display or (),
            image_origins=self.image_origins,
            shows_users=self.users is not None,
            examples=self.retriever.some_items(_NUM_EXAMPLES),
            model=self.model,
        )

    def _open_new(self, resolved: Path, shared: bool) -> Retriever:
        """The new run, opened and tried out; with items of its own, it first gets those that were added here."""
        new = self._open_run(resolved, self.retriever.store if shared else None)
        try:
            if not shared:
                for update in _updates_of(self.retriever):
                    update.repeat(new)
            _try_out(new)
        except BaseException:
            if not shared:  # a shared store is still in use
                new.close()
            raise
        return new

    def _install(self, new: Retriever, resolved: Path, shared: bool) -> SwapResponse:
        """Runs on the worker, between two batches: no request is lost, and none sees a part of each run."""
        try:
            for update in [] if shared else self._missed or []:
                update.repeat(new)
        except BaseException:
            new.close()
            raise
        old, previous = self.retriever, self.model
        self._adopt(new, resolved)
        if not shared:
            old.close()
        return SwapResponse(run=resolved.name, model=self.model, previous=previous, num_items=self.num_items)


def _try_out(retriever: Retriever) -> None:
    """Recommend for one event, so that a broken run is noticed before anyone depends on it."""
    schema = retriever.bundle.schema
    item_id = retriever.some_items(1)[0]
    columns: Mapping[str, Any] = item_id if isinstance(item_id, dict) else {schema.items.item: item_id}
    event = {schema.events.item_column if name == schema.items.item else name: columns[name] for name in columns}
    retriever.recommend([RecommendRequest(history=[event], k=1)])
    _prepare_search(retriever)


def _prepare_search(retriever: Retriever) -> None:
    """Build what the search for names reads, seconds for millions of items, before a request would wait for it."""
    retriever.find_items("a", 1)


def _updates_of(retriever: Retriever) -> Iterator[_Update]:
    """The updates that bring another run's items to the state of this one's."""
    for key, entry in retriever.store.changes(0)[1]:
        if entry.fields:
            yield _Update(key, dict(entry.fields))
        if entry.withdrawn:
            yield _Update(key, None)
