"""What one request may ask of a server or a file, and how long it may take."""

from collections.abc import Sequence

from pydantic import Field

from habitus.serving.schemas import (
    EmbedRequest,
    EventOrId,
    RankRequest,
    RecommendManyRequest,
    RecommendRequest,
    RequestError,
    ScoreRequest,
    SimilarRequest,
    shorten,
)
from habitus.typed import Typed


class Limits(Typed):
    """What one request may ask for, and how long it may take; what exceeds a limit is refused with its number."""

    max_body_bytes: int = Field(1 << 20, ge=1024, description="Of a request's body.")
    max_history: int = Field(2_000, ge=1, description="Events of one history; the model reads the newest ones.")
    read_history: int | None = Field(None, ge=1, description="Newest events that the model reads; absent: its window.")
    max_k: int = Field(1_000, ge=1, description="Recommendations in one response.")
    max_filter_values: int = Field(1_000, ge=1, description="Values in allow and deny together.")
    max_candidates: int = Field(10_000, ge=1, description="Items to score, items to choose from and to leave out.")
    max_text: int = Field(100_000, ge=1, description="Characters of a text or of a category's value.")
    max_rows: int = Field(256, ge=1, description="Histories or items of one embed request, items to rank.")
    timeout_s: float = Field(10.0, gt=0, description="From a request's headers to its response.")
    read_timeout_s: float = Field(10.0, gt=0, description="For headers, and for a body, to arrive.")
    max_batch: int = Field(64, ge=1, description="Requests computed together.")
    max_wait_ms: float = Field(2.0, ge=0, description="How long a request may wait for others to join its batch.")
    max_queue: int = Field(512, ge=1, description="Requests that wait; beyond it 503.")
    max_connections: int = Field(1_000, ge=1, description="Open connections; beyond it 503.")
    shutdown_s: float = Field(30.0, gt=0, description="For requests in flight to finish after SIGTERM.")

    def check_recommend(self, request: RecommendRequest) -> None:
        if request.history:
            self.check_history(request.history)
        self.check_count(request.k)
        for name, items in (("only_items", request.only_items), ("exclude_items", request.exclude_items)):
            if items is not None and len(items) > self.max_candidates:
                raise RequestError(f"{name} holds {len(items):,} items", expected=f"at most {self.max_candidates:,}")
        count = sum(len(values) for part in (request.allow, request.deny) for values in part.values())
        if count > self.max_filter_values:
            raise RequestError(
                f"allow and deny hold {count:,} values", expected=f"at most {self.max_filter_values:,} together"
            )

    def check_history(self, history: Sequence[EventOrId], name: str = "the history") -> None:
        if not history:
            raise RequestError(f"{name} is empty", expected="at least one event")
        if len(history) > self.max_history:
            raise RequestError(
                f"{name} has {len(history):,} events",
                expected=f"at most {self.max_history:,}",
                next_step="send the newest events only; the model reads no more than its window",
            )

    def check_many(self, request: RecommendManyRequest) -> None:
        self._check_histories(request.histories)

    def check_score(self, request: ScoreRequest) -> None:
        self._check_histories(request.histories)
        count = len(request.item_ids) + len(request.items)
        if not 1 <= count <= self.max_candidates:
            raise RequestError(f"{count:,} items to score", expected=f"1 to {self.max_candidates:,}")
        if len(request.items) > self.max_rows:
            raise RequestError(f"{len(request.items):,} items with fields", expected=f"at most {self.max_rows:,}")

    def _check_histories(self, histories: Sequence[Sequence[EventOrId]]) -> None:
        """Several, of which some may be empty."""
        if not 1 <= len(histories) <= self.max_rows:
            raise RequestError(f"{len(histories):,} histories", expected=f"1 to {self.max_rows:,}")
        for number, history in enumerate(histories):
            if history:
                self.check_history(history, f"histories[{number}]")

    def check_rank(self, request: RankRequest) -> None:
        self.check_history(request.history)
        count = len(request.item_ids) + len(request.items)
        if not 1 <= count <= self.max_rows:
            raise RequestError(f"{count:,} items to rank", expected=f"1 to {self.max_rows:,} in item_ids and items")

    def check_similar(self, request: SimilarRequest) -> None:
        if (request.item_id is None) == (request.fields is None):
            raise RequestError("item_id and fields are both given or both absent", expected="one of the two")
        self.check_count(request.k)

    def check_count(self, k: int) -> None:
        if not 1 <= k <= self.max_k:
            raise RequestError(f"k = {shorten(k)}", expected=f"1 to {self.max_k:,}")

    def check_embed(self, request: EmbedRequest) -> None:
        if bool(request.histories) == bool(request.items):
            raise RequestError("histories and items are both given or both empty", expected="one of the two")
        count = len(request.histories or request.items)
        if count > self.max_rows:
            raise RequestError(f"{count:,} rows to embed", expected=f"at most {self.max_rows:,}")
        for number, history in enumerate(request.histories):
            self.check_history(history, f"histories[{number}]")
