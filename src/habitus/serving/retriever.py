"""The retriever: histories in, next items out; vectors out; new items in.

M  requests of a call      h  joint_dim      k  items wanted
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from habitus.data import candidate_values
from habitus.errors import ConfigError
from habitus.evaluation import resolve_device
from habitus.model import Bundle, batch_tensors, load_bundle
from habitus.progress import Note, Progress
from habitus.serving.candidates import CandidateItems
from habitus.serving.catalogue import open_catalogue, words_of
from habitus.serving.encoding import EncodedHistory, HistoryEncoder, ItemEncoder, pack_histories
from habitus.serving.index import IndexInfo, IndexKind, SearchIndex, open_index
from habitus.serving.item_store import ItemStore, JournalEntry
from habitus.serving.limits import Limits
from habitus.serving.schemas import (
    BY_POPULARITY,
    EmbedRequest,
    EventOrId,
    Fields,
    ItemResponse,
    NamedItem,
    PutItemRequest,
    RankedItem,
    RankRequest,
    RankResponse,
    ReadOnlyError,
    RecommendedItem,
    RecommendRequest,
    RecommendResponse,
    RequestError,
    ScoreRequest,
    ScoreResponse,
    SearchResponse,
    SimilarItem,
    SimilarRequest,
    SimilarResponse,
    UnknownHistoryError,
    UnknownItemError,
)
from habitus.serving.scoring import score_requests
from habitus.serving.search import EncodedRequest, Filter, PastItems, RankedRows, Searcher, collect_past_items
from habitus.serving.values import Key

LIBRARY_LIMITS = Limits(max_history=10_000)  # of a retriever in Python; a server's are set on its command line

Response = TypeVar("Response")


class Retriever:
    """Recommends items of one run. Its methods may be called from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        candidates: CandidateItems,
        index: SearchIndex,
        store: ItemStore,
        *,
        read_only: bool,
        limits: Limits,
    ) -> None:
        self.bundle = bundle
        self.checksum = bundle.checksum  # which model answers
        self.candidates = candidates
        self.index = index
        self.store = store
        self.read_only = read_only
        self.limits = limits
        self.window = min(bundle.recipe.data.seq_len, limits.read_history or bundle.recipe.data.seq_len)
        self.id_format = candidates.catalogue.id_format
        self.encoder = HistoryEncoder(bundle, self.id_format, self.window, limits)
        self.item_encoder = ItemEncoder(bundle, self.id_format, limits)
        self.searcher = Searcher(candidates, bundle.encoders, index, limits)
        wanted = candidate_values(bundle.schema)
        self._is_candidate = Filter(allow=tuple((name, frozenset(values)) for name, values in wanted.items()))
        self._version = 0  # of the store's changes that are among the candidates
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
        limits: Limits = LIBRARY_LIMITS,
        temperature: float = 1.0,
        note: Note | None = None,
        progress: Progress | None = None,
    ) -> "Retriever":
        """The retriever of a run.

        `data`, the prepared dataset, is needed the first time a run is served: the ids of its items are copied into
        RUN/serve/catalogue, and the catalogue is embedded if it is not yet. `items` is the folder of items added at
        run time, RUN/serve/items by default; another retriever's `store` shares it, so that a new run can take over
        from an old one without losing an item. `limits` bound what one request may ask for. Probabilities are
        those of scores divided by `temperature`, which 'habitus evaluate --calibrate' fits. `note` is called with
        what a user should know.
        """
        if not 0.01 <= temperature <= 100:
            raise ConfigError(
                f"the temperature is {temperature:g}", expected="0.01 to 100, as in 'habitus evaluate --calibrate'"
            )
        note = note or (lambda _: None)
        bundle = load_bundle(run, resolve_device(device))
        catalogue = open_catalogue(bundle, None if data is None else Path(data), note, progress)
        candidates = CandidateItems(catalogue, bundle.device)
        search_index = open_index(index, bundle, candidates, note, progress)
        store = items if isinstance(items, ItemStore) else ItemStore(items or bundle.run_path / "serve" / "items")
        retriever = cls(bundle, candidates, search_index, store, read_only=read_only, limits=limits)
        retriever.searcher.temperature = temperature
        return retriever

    @property
    def num_items(self) -> int:
        """Items that may be recommended now; never waits."""
        return self.candidates.num_active

    @property
    def index_info(self) -> IndexInfo:
        """The kind of the index, and its recall against exact search."""
        return self.index.info

    def recommend(self, requests: Sequence[RecommendRequest]) -> list[RecommendResponse]:
        """A response per request, by one forward of the model for all of them; the first bad request is raised."""
        return _without_errors(self.recommend_each(requests))

    def recommend_each(self, requests: Sequence[RecommendRequest]) -> list[RecommendResponse | RequestError]:
        """The same, but a request that cannot be answered gets its error, and the others their responses."""
        with self._mutex:
            self.catch_up()
            encoded = [self._encode_request(request) for request in requests]
            good = [one for one in encoded if isinstance(one, EncodedRequest) and len(one.history.rows)]
            ranked = iter(self._search(good) if good else [])
            return [
                one if isinstance(one, RequestError)
                else self._respond(one, next(ranked) if len(one.history.rows) else self.searcher.popular(one), request)
                for request, one in zip(requests, encoded, strict=True)
            ]  # fmt: skip

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
        """The scores of given candidates, a response per request; the first bad request is raised."""
        return _without_errors(self.score_each(requests))

    def score_each(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse | RequestError]:
        """The same, but a request that cannot be answered gets its error."""
        with self._mutex:
            self.catch_up()
            return score_requests(self, requests)

    def rank(self, request: RankRequest) -> RankResponse:
        """Where items stand among all that may come next; ties count against an item, as in evaluation."""
        self.limits.check_rank(request)
        with self._mutex:
            self.catch_up()
            history = self.encode_history(request.history)
            rows = [self._active_row(item_id) for item_id in request.item_ids]
            new_items = [self.item_encoder.read_fields(fields) for fields in request.items]
            queries, (past,) = self.compute_queries([history])
            scores = self.searcher.score_all(queries[0], past)
            known = zip(self._name_rows(rows), map(scores.of_row, rows), strict=True)
            ranked = [RankedItem(**dict(item), **standing._asdict()) for item, standing in known]
            for fields, vector in zip(new_items, self.embed_as_stored(new_items), strict=True):
                standing = scores.of_new(float(vector @ queries[0].to(vector)))
                ranked.append(RankedItem(display=self.item_encoder.display(fields) or None, **standing._asdict()))
            return RankResponse(
                ranked=tuple(ranked),
                num_items=self.num_items,
                events_used=len(history.rows),
                unknown_items=history.unknown_ids,
                model=self.checksum,
            )

    def similar(self, request: SimilarRequest) -> SimilarResponse:
        """The items whose vectors are nearest to an item's, nearest first; but for rounding, all have one length."""
        self.limits.check_similar(request)
        with self._mutex:
            self.catch_up()
            own = -1
            if request.fields is None:
                own = self._active_row(request.item_id)
                vector = self.candidates.vectors(np.array([own]))[0].float()
            else:
                vector = self.embed_as_stored([self.item_encoder.read_fields(request.fields)])[0]
            rows = self.searcher.nearest(vector, request.k + 1)
            rows = rows[rows != own][: request.k]
            cosines = torch.cosine_similarity(self.candidates.vectors(rows).float(), vector, dim=1)
            items = zip(self._name_rows(rows.tolist()), cosines.tolist(), strict=True)
            return SimilarResponse(
                items=tuple(SimilarItem(**dict(item), similarity=min(cosine, 1.0)) for item, cosine in items),
                model=self.checksum,
            )

    def find_items(self, text: str, k: int) -> SearchResponse:
        """Items whose names or ids hold words that begin with those of the text; popular ones first."""
        self.limits.check_count(k)
        with self._mutex:
            self.catch_up()
            rows = self.candidates.find(words_of(text), k)
            return SearchResponse(items=tuple(self._name_rows(rows)), model=self.checksum)

    def embed_histories(self, histories: Sequence[Sequence[EventOrId]]) -> np.ndarray:
        """The query vectors float32 [n, h] of histories; their dot product with an item's vector is its score.

        If the recipe has `copying`, that is the score of items that the history does not hold.
        """
        request = EmbedRequest(histories=histories)
        with self._mutex:
            self.catch_up()
            if not request.histories:
                return np.empty((0, self.bundle.recipe.model.joint_dim), np.float32)
            encoded = [self.encode_history(history) for history in request.histories]
            size = self.limits.max_batch  # requests of many histories may wait together
            parts = [self.embed_encoded(encoded[at : at + size]) for at in range(0, len(encoded), size)]
            return torch.cat(parts).cpu().numpy()

    def embed_items(self, items: Sequence[Fields]) -> np.ndarray:
        """The vectors float32 [n, h] of items from their fields; an id among them is ignored."""
        request = EmbedRequest(items=items)
        with self._mutex:
            fields = [self.item_encoder.read_fields(item) for item in request.items]
            return self.item_encoder.embed(fields).float().cpu().numpy()

    def put_item(self, item_id: Any, fields: Mapping[str, Any]) -> None:
        """Add an item, or change it: embedded at once, and on the disk when this returns."""
        self._refuse_if_read_only()
        request = PutItemRequest(fields=fields)
        with self._mutex:
            self.catch_up()
            key = self.id_format.key(item_id)
            values = self.item_encoder.read_item(key, request.fields)
            vector = self.item_encoder.embed([values])[0].float().cpu().numpy()
            self.store.put(key, JournalEntry(values, False, vector.tobytes(), self.bundle.embedder_checksum))
            self.catch_up()

    def delete_item(self, item_id: Any) -> None:
        """Withdraw an item: it is not recommended any more. In histories it still counts as the item it was."""
        self._refuse_if_read_only()
        with self._mutex:
            self.catch_up()
            key = self.id_format.key(item_id)
            if not self.candidates.is_active(key):
                raise UnknownItemError(
                    f"there is no item {str(self.id_format.to_id(key))[:100]!r} to withdraw",
                    expected="an item that is being recommended",
                )
            entry = self.store.get(key) or JournalEntry({}, True, b"", "")
            self.store.put(key, JournalEntry(entry.fields, True, entry.vector, entry.embedder))
            self.catch_up()

    def item(self, item_id: Any) -> ItemResponse:
        """What is known of an item: all fields if it was added at run time, else its categories."""
        with self._mutex:
            self.catch_up()
            key = self.id_format.key(item_id)
            row = self.candidates.rows_of([key])[0]
            if row < 0:
                raise UnknownItemError(
                    f"there is no item {str(self.id_format.to_id(key))[:100]!r}", expected="an item of the catalogue"
                )
            return ItemResponse(
                item_id=self.id_format.to_id(key),
                recommended=row not in self.candidates.hidden,
                fields=self._fields_of(key, row),
                display=self.candidates.display_at([row])[0] or None,
                model=self.checksum,
            )

    def some_items(self, count: int) -> list[Any]:
        """The ids of some items that may be recommended, for examples: the most frequent in training."""
        with self._mutex:
            return self.candidates.ids_at(self.candidates.find((), count))

    def encode_history(self, history: Sequence[EventOrId]) -> EncodedHistory:
        """A history as the model reads it; refused if it holds no event of a known item."""
        encoded = self.encoder.encode(history, self.candidates.rows_of)
        if not len(encoded.rows):
            ids = ", ".join(repr(item) for item in encoded.unknown_ids[:3])
            (known,) = self.candidates.ids_at([0])
            raise UnknownHistoryError(
                f"none of the history's {len(history):,} events is of a known item: {ids}",
                expected=f"at least one event of an item of the catalogue, as {known!r}",
                next_step="add the items first, or recommend popular items",
            )
        return encoded

    def encode_any_history(self, history: Sequence[EventOrId]) -> EncodedHistory:
        """The same, but an empty one is taken: popularity answers it."""
        if history:
            return self.encode_history(history)
        self.searcher.popularity.check()
        return EncodedHistory(np.empty(0, np.int64), {})

    def rows_of(self, item_ids: Sequence[Any]) -> list[int]:
        """The rows of items that may be recommended, -1 of others."""
        rows = self.candidates.rows_of([self.id_format.key(item_id) for item_id in item_ids])
        return [-1 if row in self.candidates.hidden else row for row in rows]

    def embed_encoded(self, histories: Sequence[EncodedHistory]) -> Tensor:
        """The query vectors [M, h] of encoded histories, float32 on the model's device."""
        return self.compute_queries(histories)[0]

    def catch_up(self) -> None:
        """Bring changes of the store, made by other retrievers or by an earlier process, into the candidates."""
        version, changes = self.store.changes(self._version)
        if not changes:
            return
        own = self.bundle.embedder_checksum
        outdated = [(key, entry) for key, entry in changes if entry.fields and entry.embedder != own]
        vectors: dict[Key, Tensor] = {}
        if outdated:  # items that were embedded by another model
            items = [self.item_encoder.read_item(key, entry.fields) for key, entry in outdated]
            vectors = dict(zip((key for key, _ in outdated), self.item_encoder.embed(items).float(), strict=True))
        for key, entry in changes:
            is_hidden = entry.withdrawn
            if entry.fields:
                vector = vectors.get(key)
                if vector is None:
                    vector = torch.from_numpy(np.frombuffer(entry.vector, np.float32).copy())
                categories = self.item_encoder.categories(entry.fields)
                self.candidates.put(key, categories, self.item_encoder.display(entry.fields), vector)
                is_hidden |= not self._is_candidate.passes(categories)  # of [targets]
            if is_hidden:
                self.candidates.withdraw(key)
        self._version = version

    def close(self) -> None:
        """Release the lock on the items added at run time, if this retriever has it."""
        self.store.close()

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise ReadOnlyError(
                "items cannot be changed here", expected="a server that was started without --read-only"
            )

    def _encode_request(self, request: RecommendRequest) -> EncodedRequest | RequestError:
        try:
            self.limits.check_recommend(request)
            item_filter, notes = self.searcher.filters.read(request)
            history = self.encode_any_history(self.encoder.add_user(request.history, request.user))
            only = None if request.only_items is None else np.array(self.rows_of(request.only_items), np.int64)
            exclude = frozenset(self.rows_of(request.exclude_items))
        except RequestError as error:
            return error
        if only is not None and (only < 0).any():
            unknown = int(np.count_nonzero(only < 0))
            notes = (*notes, f"{unknown:,} of the {len(only):,} items to choose from are not in the catalogue")
            only = only[only >= 0]
        exclude |= history.seen_rows if request.exclude_seen else frozenset()
        return EncodedRequest(history, request.k, exclude, item_filter, notes, only)

    def _search(self, requests: Sequence[EncodedRequest]) -> list[RankedRows]:
        vectors, past_items = self.compute_queries([request.history for request in requests])
        return self.searcher.search(vectors, past_items, requests)

    @torch.no_grad()
    def compute_queries(self, histories: Sequence[EncodedHistory]) -> tuple[Tensor, list[PastItems]]:
        """What the model makes of histories: their query vectors [M, h], and the scores of their own items."""
        batch, windows, slots = pack_histories(histories, self.encoder.fields)
        rows, places = np.unique(batch.items, return_inverse=True)
        device = self.bundle.device
        vectors = self.candidates.vectors(rows).float()[torch.from_numpy(places.reshape(batch.items.shape)).to(device)]
        with self.bundle.autocast():
            output = self.bundle.model.contextualize(batch_tensors(batch, device), vectors)
        queries = output.queries[torch.from_numpy(windows).to(device), torch.from_numpy(slots).to(device)].float()
        return queries, collect_past_items(output.copy_scores, batch.items, windows, slots)

    def _respond(self, request: EncodedRequest, ranked: RankedRows, wanted: RecommendRequest) -> RecommendResponse:
        rows = ranked.rows.tolist()
        ids = self.candidates.ids_at(rows)
        fields: list[Fields | None] = [None] * len(rows)
        if wanted.with_fields:
            fields = [self._fields_of(self.id_format.key(item), row) for item, row in zip(ids, rows, strict=True)]
        probabilities = ranked.probabilities()
        copied = [None] * len(rows) if ranked.copied is None else ranked.copied.tolist()
        columns = zip(
            ids,
            self.candidates.display_at(rows),
            ranked.scores.tolist(),
            probabilities.tolist(),
            copied,
            fields,
            strict=True,
        )
        return RecommendResponse(
            items=tuple(
                RecommendedItem(
                    item_id=item,
                    display=display or None,
                    score=score,
                    probability=probability,
                    copied=share,
                    fields=item_fields,
                )
                for item, display, score, probability, share, item_fields in columns
            ),
            events_used=len(request.history.rows),
            unknown_items=request.history.unknown_ids,
            copied=ranked.total_copied,
            notes=request.notes,
            because=None if len(request.history.rows) else BY_POPULARITY,
            model=self.checksum,
        )

    def _name_rows(self, rows: list[int]) -> list[NamedItem]:
        """Ids and names of candidates."""
        columns = zip(self.candidates.ids_at(rows), self.candidates.display_at(rows), strict=True)
        return [NamedItem(item_id=item, display=display or None) for item, display in columns]

    def _active_row(self, item_id: Any) -> int:
        """The row of an item that may be recommended."""
        key = self.id_format.key(item_id)
        row = self.candidates.rows_of([key])[0]
        if row < 0 or row in self.candidates.hidden:
            raise UnknownItemError(
                f"there is no item {str(self.id_format.to_id(key))[:100]!r}", expected="an item that is recommended"
            )
        return row

    def embed_as_stored(self, items: Sequence[Fields]) -> Tensor:
        """The vectors [n, h] of items whose fields were read, rounded as the catalogue's are, in float32."""
        if not items:
            return torch.empty(0, self.bundle.recipe.model.joint_dim)
        vectors = self.item_encoder.embed(items).to(self.candidates.catalogue.cache.dtype)
        return vectors.to(self.candidates.device, self.candidates.dtype).float()

    def _fields_of(self, key: Key, row: int) -> Fields:
        """All fields of an item added at run time; of a trained one the categories, which is all that is stored."""
        entry = self.store.get(key)
        if entry is not None and entry.fields:
            return dict(entry.fields)
        values = self.bundle.encoders.item_values
        fields: dict[str, Any] = {}
        for name, column in self.candidates.catalogue.codes.items():
            known = [values[name][code - 1] for code in np.atleast_1d(column[row]).tolist() if code]
            if known:
                fields[name] = known if column.ndim > 1 else known[0]
        return fields


def _without_errors(responses: Sequence[Response | RequestError]) -> list[Response]:
    """The responses; the first error among them is raised."""
    good: list[Response] = []
    for response in responses:
        if isinstance(response, RequestError):
            raise response
        good.append(response)
    return good
