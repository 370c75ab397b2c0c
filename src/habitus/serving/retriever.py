"""The retriever: histories in, next items out; vectors out; new items in.

M  requests of a call      h  joint_dim      k  items wanted
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from habitus.errors import HabitusError
from habitus.evaluation import device_named
from habitus.model import Bundle, batch_tensors, load_bundle
from habitus.progress import Note, Progress
from habitus.serving import values
from habitus.serving.approximate import IndexInfo
from habitus.serving.filters import Filter, Filters
from habitus.serving.histories import History, HistoryEncoder, packed
from habitus.serving.ids import Key
from habitus.serving.index import IndexKind, SearchIndex, open_index
from habitus.serving.item_encoder import ItemEncoder
from habitus.serving.items import Entry, ItemStore
from habitus.serving.live import LiveItems
from habitus.serving.past_items import pasts
from habitus.serving.requests import (
    ItemState,
    Limits,
    ReadOnlyError,
    Request,
    RequestError,
    Response,
    Scored,
    UnknownItemError,
)
from habitus.serving.search import Asked, Query, Searcher
from habitus.serving.served_catalogue import open_catalogue


class Retriever:
    """One run, opened to be asked. Its methods may be called from several threads."""

    def __init__(
        self, bundle: Bundle, live: LiveItems, index: SearchIndex, store: ItemStore, *, read_only: bool, limits: Limits
    ) -> None:
        kind = live.catalogue.kind
        self.bundle = bundle
        self.limits = limits
        self.read_only = read_only
        self.store = store
        self.live = live
        self._filters = Filters(bundle.encoders.item_values, self.live, self.limits)
        self._searcher = Searcher(self.live, self._filters, index)
        self.encoder = HistoryEncoder(bundle.schema, bundle.encoders, kind, self.limits)
        self._items = ItemEncoder(bundle, kind, self.limits)
        self.kind = kind
        self._index = index
        self._version = 0  # of the store's changes that are in `_live`
        self._mutex = threading.RLock()
        self.catch_up()

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        data: str | Path | None = None,
        device: str = "auto",
        index: IndexKind = "exact",
        items: str | Path | ItemStore | None = None,
        read_only: bool = False,
        max_history: int = 10_000,
        note: Note | None = None,
        progress: Progress | None = None,
    ) -> "Retriever":
        """The retriever of a run.

        `data`, the prepared dataset, is needed the first time a run is served: the ids of its items are copied into
        RUN/serve/catalogue, and the catalogue is embedded if it is not yet. `items` is the folder of the run-time
        items, RUN/serve/items unless said; handing over another retriever's `store` shares it, so that a new run can
        take over from an old one without losing an item. `max_history` bounds the events of one request. `note` is
        told what a user should know.
        """
        told = note or (lambda _: None)
        bundle = load_bundle(run, device_named(device))
        catalogue = open_catalogue(bundle, None if data is None else Path(data), told, progress)
        live = LiveItems(catalogue, bundle.device)
        chosen = open_index(index, bundle, live, told, progress)
        store = items if isinstance(items, ItemStore) else ItemStore(items or bundle.run_path / "serve" / "items")
        limits = Limits(window=bundle.recipe.data.seq_len, max_history=max_history)
        return cls(bundle, live, chosen, store, read_only=read_only, limits=limits)

    @property
    def checksum(self) -> str:
        """Of the bundle: which model answers."""
        return self.bundle.checksum

    @property
    def num_items(self) -> int:
        """Items that may be recommended now; never waits."""
        return self.live.num_live

    @property
    def ids_are_integers(self) -> bool:
        """Whether items are named by whole numbers; by texts otherwise."""
        return self.kind.is_integer

    @property
    def index_info(self) -> IndexInfo:
        """What is searched with, and how well it finds what exact search finds."""
        return self._index.info

    def recommend(self, requests: Sequence[Request]) -> list[Response]:
        """An answer per request, by one forward of the model for all of them; the first bad request is raised."""
        answers = self.recommend_each(requests)
        for answer in answers:
            if isinstance(answer, HabitusError):
                raise answer
        return [answer for answer in answers if isinstance(answer, Response)]

    def recommend_each(self, requests: Sequence[Request]) -> list[Response | RequestError]:
        """The same, but a request that cannot be answered gets its error, and the others their answers."""
        with self._mutex:
            self.catch_up()
            asked: list[Asked | RequestError] = [self._ask(request) for request in requests]
            good = [one for one in asked if isinstance(one, Asked)]
            found = iter(self._searcher.search(self._query([one.history for one in good]), good) if good else ())
            return [one if isinstance(one, RequestError) else self._response(one, *next(found)) for one in asked]

    def check(self, request: Request) -> None:
        """Raise what is wrong with a request as far as it can be seen without the catalogue; waits for nothing."""
        self._read(request)
        self.encoder.check(request.history)

    def embed_histories(self, histories: Sequence[Sequence[Mapping[str, Any]]]) -> np.ndarray:
        """The query vectors float32 [n, h] of histories; their dot product with an item's vector is its score.

        Where the recipe has `copying`, that is the score of items that the history does not hold.
        """
        with self._mutex:
            self.catch_up()
            encoded = [self.encoded(history) for history in histories]
            if not encoded:
                return np.empty((0, self.bundle.recipe.model.joint_dim), np.float32)
            return self.query_vectors(encoded).cpu().numpy()

    def embed_items(self, items: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The vectors float32 [n, h] of items from their fields; the id, where an item has one, is not read."""
        with self._mutex:
            return self._items.embed([self._items.read_fields(item) for item in items]).float().cpu().numpy()

    def put_item(self, item_id: Any, fields: Mapping[str, Any]) -> None:
        """Add an item, or change it: embedded on the spot, and on the disk when this returns."""
        self._refuse_if_read_only()
        with self._mutex:
            self.catch_up()
            key = self.kind.key(item_id)
            read = self._items.fields_of(key, fields)
            vector = self._items.embed([read])[0].float().cpu().numpy()
            self.store.put(key, Entry(read, False, vector.tobytes(), self.bundle.embedder_checksum))
            self.catch_up()

    def delete_item(self, item_id: Any) -> None:
        """Withdraw an item: it is not recommended any more. In histories it still counts as the item it was."""
        self._refuse_if_read_only()
        with self._mutex:
            self.catch_up()
            key = self.kind.key(item_id)
            if not self.live.is_live(key):
                raise UnknownItemError(
                    f"there is no item {str(self.kind.shown(key))[:100]!r} to withdraw",
                    expected="an item that is being recommended",
                )
            known = self.store.get(key) or Entry({}, True, b"", "")
            self.store.put(key, Entry(known.fields, True, known.vector, known.embedder))
            self.catch_up()

    def item(self, item_id: Any) -> ItemState:
        """What is known of an item: whether it may be recommended, and its fields where they were put at run time."""
        with self._mutex:
            self.catch_up()
            key = self.kind.key(item_id)
            if self.live.rows_of([key])[0] < 0:
                raise UnknownItemError(
                    f"there is no item {str(self.kind.shown(key))[:100]!r}", expected="an item of the catalogue"
                )
            known = self.store.get(key)
            fields = None if known is None or not known.fields else dict(known.fields)
            return ItemState(self.kind.shown(key), self.live.is_live(key), fields)

    def some_items(self, count: int) -> list[Any]:
        """The ids of some items that may be recommended, for examples."""
        with self._mutex:
            rows = (row for row in range(self.live.num_rows) if row not in self.live.hidden)
            return self.live.ids_at(itertools.islice(rows, count))

    def close(self) -> None:
        """Give up the lock on the run-time items, where this retriever has it."""
        self.store.close()

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise ReadOnlyError("items cannot be changed here", expected="a server that was started to take changes")

    def _ask(self, request: Request) -> Asked | RequestError:
        try:
            chosen, notes = self._read(request)
            history = self.encoded(request.history)
        except RequestError as error:
            return error
        seen = history.seen if request.exclude_seen else frozenset()
        return Asked(history, request.k, seen, chosen, tuple(notes))

    def _read(self, request: Request) -> tuple[Filter, list[str]]:
        k = request.k
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.limits.max_k:
            raise values.refuse("k", k, f"a whole number from 1 to {self.limits.max_k:,}")
        return self._filters.of(request)

    def encoded(self, history: Sequence[Mapping[str, Any]]) -> History:
        """A history as the model reads it; refused where it holds no event of a known item."""
        encoded = self.encoder.encode([history], self.live.rows_of)[0]
        if not len(encoded.rows):
            raise RequestError(
                f"none of the history's {len(history):,} events is of an item that is known here",
                expected="at least one event of an item of the catalogue",
                next_step="add the items first, or recommend what is popular",
            )
        return encoded

    def query_vectors(self, histories: Sequence[History]) -> Tensor:
        """The model's vectors [M, h] for the next item of each history, float32 on its device."""
        return self._query(histories).vectors

    @torch.no_grad()
    def _query(self, histories: Sequence[History]) -> Query:
        batch, windows, slots = packed(histories, self.encoder.specs)
        rows, places = np.unique(batch.items, return_inverse=True)
        device = self.bundle.device
        events = self.live.vectors(rows).float()[torch.from_numpy(places.reshape(batch.items.shape)).to(device)]
        with self.bundle.autocast():
            read = self.bundle.model.contextualize(batch_tensors(batch, device), events)
        vectors = read.queries[torch.from_numpy(windows).to(device), torch.from_numpy(slots).to(device)].float()
        return Query(vectors, pasts(read.copy_scores, batch.items, windows, slots))

    def _response(self, asked: Asked, scores: np.ndarray, rows: np.ndarray, lse: float) -> Response:
        ids = self.live.ids_at(rows.tolist())
        chances = np.exp(scores.astype(np.float64) - lse)
        scored = zip(ids, scores.tolist(), np.minimum(chances, 1.0).tolist(), strict=True)
        return Response(
            items=tuple(Scored(*one) for one in scored),
            events_used=len(asked.history.rows),
            unknown_items=asked.history.unknown,
            notes=asked.notes,
        )

    def catch_up(self) -> None:
        """Bring changes of the store that other retrievers made, or an earlier process, into the live items."""
        version, changes = self.store.changes(self._version)
        if not changes:
            return
        mine = self.bundle.embedder_checksum
        stale = [(key, entry) for key, entry in changes if entry.fields and entry.embedder != mine]
        fresh: dict[Key, Tensor] = {}
        if stale:  # items that were embedded by another model
            read = [self._items.fields_of(key, entry.fields) for key, entry in stale]
            fresh = dict(zip((key for key, _ in stale), self._items.embed(read).float(), strict=True))
        for key, entry in changes:
            if entry.fields:
                vector = (
                    fresh[key] if key in fresh else torch.from_numpy(np.frombuffer(entry.vector, np.float32).copy())
                )
                self.live.put(key, self._items.categories_of(entry.fields), vector)
            if entry.withdrawn:
                self.live.withdraw(key)
        self._version = version
