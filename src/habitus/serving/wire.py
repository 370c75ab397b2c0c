"""What goes over the wire: bodies in, answers out, and refusals in one shape."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, FailFast, Field
from pydantic_core import from_json

from habitus.errors import ConfigError, HabitusError
from habitus.serving.limits import ServerLimits
from habitus.serving.requests import Response
from habitus.typed import Typed

Event = dict[str, Any]
Events = Annotated[list[Event], FailFast()]  # one wrong event is told; a million are not collected first
MAX_KEYS = 256
Body = TypeVar("Body", bound="_Body")


class RefusedError(Exception):
    """A request that is not answered: a status, and the words of the error's body."""

    def __init__(self, status: int, error: str, *, expected: str = "", next_step: str = "", retry_s: int = 0) -> None:
        super().__init__(error)
        self.status = status
        self.retry_s = retry_s
        self.body = {"error": error, "expected": expected, "next_step": next_step}

    @classmethod
    def of(cls, error: HabitusError, status: int = 422) -> "RefusedError":
        return cls(status, error.problem, expected=error.expected, next_step=error.next_step)


def failure() -> RefusedError:
    """The answer where the fault is ours; what happened is in the log, never in the answer."""
    return RefusedError(500, "the request could not be answered", next_step="see the service's log")


class _Body(Typed):
    model_config = ConfigDict(strict=True)


class RecommendBody(_Body):
    """Ask for the next items of one history."""

    history: Events = Field(description="Events in order, oldest first, with the columns of the event log.")
    k: int = Field(10, description="How many items.")
    exclude_seen: bool = Field(False, description="Leave out the items of the history.")
    allow: dict[str, list[Any]] = Field({}, description="Only items whose field has one of these values.")
    deny: dict[str, list[Any]] = Field({}, description="No items whose field has one of these values.")
    with_fields: bool = Field(False, description="Add what is known of each item: its categories, or all its fields.")


class EmbedBody(_Body):
    """Ask for vectors, of histories or of items."""

    histories: Annotated[list[Events], FailFast()] = Field([], description="Histories, each a list of events.")
    items: Events = Field([], description="Items, each with its fields.")


class ItemBody(_Body):
    """An item to add or to replace."""

    fields: Event = Field(description="The item's fields, with the columns of the item table.")


class ScoredItem(Typed):
    item_id: Any = Field(description="As in the log; for item×field pairs an object.")
    score: float = Field(description="Dot product of the history's vector and the item's.")
    probability: float = Field(description="Of being the next event, among all items.")
    fields: Event | None = Field(None, description="With with_fields only.")


class RecommendAnswer(Typed):
    items: list[ScoredItem]
    events_used: int = Field(description="The newest events of known items that the model read.")
    unknown_items: list[Any] = Field(description="Items of the history that are not in the catalogue.")
    notes: list[str] = Field(description="Such as a filter value that no item has.")
    model: str = Field(description="Checksum of the bundle that answered.")


class EmbedAnswer(Typed):
    vectors: list[list[float]]
    model: str


class ItemAnswer(Typed):
    item_id: Any
    num_items: int = Field(description="In the catalogue, after the update.")
    model: str


class ItemFields(Typed):
    item_id: Any
    recommended: bool = Field(description="False once it is withdrawn.")
    fields: Event = Field(description="Of an item added at run time all of them, else its categories.")
    model: str


class SchemaAnswer(Typed):
    item_column: str = Field(description="Of an event, the column that names the item.")
    id_column: str = Field(description="Of the item table, the column of the id; the key of ids that are objects.")
    event_fields: dict[str, str] = Field(description="Columns of an event and their kinds.")
    item_fields: dict[str, str] = Field(description="Columns of an item and their kinds.")
    window: int = Field(description="Events that the model reads.")
    examples: list[Any] = Field(description="Ids of some items.")
    model: str


class Health(Typed):
    status: str = Field(description="'ok', or 'stopping' with status 503.")
    run: str
    model: str
    num_items: int
    index: str
    waiting: int = Field(description="Requests in the queue.")
    uptime_s: float


class SwapAnswer(Typed):
    run: str
    model: str
    previous: str = Field(description="Checksum of the bundle that answered before.")
    num_items: int


class ErrorAnswer(Typed):
    error: str = Field(description="What was given, and what is wrong with it.")
    expected: str
    next_step: str


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object that a body holds; NaN and Infinity are no JSON."""
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RefusedError(400, f"the body is not JSON: {error}", expected="a JSON object in UTF-8") from None
    if not isinstance(values, dict):
        raise RefusedError(422, f"the body is a JSON {_kind(values)}", expected="a JSON object")
    return values


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """A body of this kind; unknown keys are refused with the nearest name."""
    values = parse_json(raw)
    for name, part in (("the body", values), *values.items()):
        if isinstance(part, dict) and len(part) > MAX_KEYS:
            raise RefusedError(422, f"{shortened(name)} has {len(part):,} keys", expected=f"at most {MAX_KEYS}")
    try:
        return kind.parse(values, "the body")
    except ConfigError as error:
        problem = error.problem if len(error.problem) <= 500 else error.problem[:500] + "…"
        keys = ", ".join(kind.model_fields)
        raise RefusedError(
            422, problem, expected=f"an object with the keys {keys}", next_step="see /openapi.json"
        ) from None


def check_recommend(body: RecommendBody, limits: ServerLimits) -> None:
    check_history(body.history, limits)
    if not 1 <= body.k <= limits.max_k:
        raise RefusedError(
            422, f"k = {shortened(body.k)}", expected=f"1 to {limits.max_k:,}", next_step="ask for fewer items"
        )
    for name, wanted in (("allow", body.allow), ("deny", body.deny)):
        count = sum(len(values) for values in wanted.values())
        if count > limits.max_k:
            raise RefusedError(422, f"{name} lists {count:,} values", expected=f"at most {limits.max_k:,}")


def check_history(history: list[Event], limits: ServerLimits, place: str = "history") -> None:
    """Refuse histories that are too long; what their fields hold is for the retriever to judge."""
    if len(history) > limits.max_history:
        raise RefusedError(
            422,
            f"{place} has {len(history):,} events",
            expected=f"at most {limits.max_history:,}",
            next_step="send the newest events only; the model reads no more than its window",
        )


def check_embed(body: EmbedBody, limits: ServerLimits) -> None:
    if bool(body.histories) == bool(body.items):
        raise RefusedError(422, "histories and items are both given or both empty", expected="one of the two")
    rows = body.histories or body.items
    if len(rows) > limits.max_rows:
        raise RefusedError(422, f"{len(rows):,} rows to embed", expected=f"at most {limits.max_rows:,}")
    for number, history in enumerate(body.histories):
        check_history(history, limits, f"histories[{number}]")


def recommend_answer(answer: Response, model: str) -> dict[str, Any]:
    """The body of an answer, in the form of `RecommendAnswer`."""
    return {
        "items": [{"item_id": one.item_id, "score": one.score, "probability": one.probability} for one in answer.items],
        "events_used": answer.events_used,
        "unknown_items": list(answer.unknown_items),
        "notes": list(answer.notes),
        "model": model,
    }


def dumps(values: Mapping[str, Any]) -> bytes:
    """Compact JSON, as UTF-8. Text that JSON cannot carry never gets in, so none comes out."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def shortened(value: object) -> str:
    """A value for an error's text: short, whatever was sent."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
