"""Requests and responses, the limits on them, and the errors that a client sees.

The same models serve HTTP and Python: the endpoints parse bodies into requests and write responses as JSON, the
retriever takes requests and gives responses. What an event or an item may hold is up to the run's columns, so
`serving.encoding` checks that.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from habitus.errors import HabitusError
from habitus.typed import Typed, explain_error

ItemId = Any  # an int or a text; for item×field pairs a mapping from column to value
Event = dict[str, Any]  # by column of the event log; the user's column may be there and is not read


def _event_or_id(value: Any) -> Any:
    if isinstance(value, dict | str | int) and not isinstance(value, bool):
        return value
    raise ValueError("expected an event, an object by column of the log, or the id of an item")


# An item's id alone stands for an event with that item.
EventOrId = Annotated[Event | str | int, PlainValidator(_event_or_id, json_schema_input_type=Event | str | int)]
Fields = dict[str, Any]  # by column of the item table
Display = dict[str, str]  # by displayed column of the item table
Events = Annotated[list[EventOrId], FailFast()]  # stops at the first wrong event instead of collecting a million errors
_MAX_KEYS = 256  # of an object in a body
_MAX_PROBLEM = 500  # characters of an error's text
BY_POPULARITY = "popularity"  # why an answer to an empty history is as it is
RequestT = TypeVar("RequestT", bound="_Request")


class RequestError(HabitusError):
    """A request that cannot be answered as it is. The text may be shown to a client."""

    status = 422


class UnknownItemError(RequestError):
    """An item that the catalogue does not hold."""

    status = 404


class UnknownHistoryError(RequestError):
    """A history without an event of a known item."""


class ReadOnlyError(RequestError):
    """A change requested of a retriever that was opened read-only."""

    status = 403


class StorageError(HabitusError):
    """An item that could not be written durably: nothing has changed, neither on disk nor in memory."""

    status = 507


class OtherWriterError(StorageError):
    """An update while another process holds the items of the run."""

    status = 423


class HttpError(RequestError):
    """A request that is refused with this status."""

    def __init__(
        self, status: int, problem: str, *, expected: str = "", next_step: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(problem, expected=expected, next_step=next_step)
        self.status = status
        self.retry_after_s = retry_after_s


class _Request(Typed):
    """What a client sends; values of the wrong type raise a RequestError."""

    @model_validator(mode="wrap")
    @classmethod
    def _raise_request_error(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            problem = "; ".join(explain_error(cls, detail) for detail in details)
            if len(problem) > _MAX_PROBLEM:
                problem = problem[:_MAX_PROBLEM] + "…"
            raise RequestError(problem, expected=f"an object with the keys {', '.join(cls.model_fields)}") from None


class _Wanted(_Request):
    """Which items are wanted, whatever the history."""

    k: Annotated[int, Strict()] = Field(10, description="How many items.")
    exclude_seen: Annotated[bool, Strict()] = Field(False, description="Leave out the items of the history.")
    allow: dict[str, list[Any]] = Field({}, description="Only items whose field has one of these values.")
    deny: dict[str, list[Any]] = Field({}, description="No items whose field has one of these values.")
    ranges: dict[str, tuple[Any, Any]] = Field(
        {}, description="Only items whose number or time lies in [lowest, highest]; null leaves an end open."
    )
    only_items: list[ItemId] | None = Field(None, description="Only these items, such as those in stock.")
    exclude_items: list[ItemId] = Field([], description="None of these items, such as those out of stock.")
    with_fields: Annotated[bool, Strict()] = Field(
        False, description="Add what is known of each item: its categories, or all its fields."
    )


class RecommendRequest(_Wanted):
    """Ask for the next items of one history; popular ones if it is empty."""

    history: Events = Field(description="Events, oldest first, with the columns of the event log; or ids of items.")
    user: Fields = Field({}, description="Fields of the user, for all events that do not name theirs as user.NAME.")


class RecommendManyRequest(_Wanted):
    """Ask for the next items of several histories, under the same conditions."""

    histories: Annotated[list[Events], FailFast()] = Field(description="Histories, each a list of events.")

    def requests(self) -> list[RecommendRequest]:
        """One request per history."""
        shared = {name: getattr(self, name) for name in _Wanted.model_fields}
        return [RecommendRequest(history=history, **shared) for history in self.histories]


class ScoreRequest(_Request):
    """Ask for the scores of given candidates for every history: known ones by id, others by their fields."""

    histories: Annotated[list[Events], FailFast()] = Field(description="Histories, each a list of events.")
    item_ids: list[ItemId] = Field([], description="Items of the catalogue.")
    items: Annotated[list[Fields], FailFast()] = Field([], description="Items that are not, each with its fields.")


class RankRequest(_Request):
    """Ask where items stand among all that may come next: known ones by id, others as if they were in the catalogue."""

    history: Events = Field(description="Events, oldest first, with the columns of the event log; or ids of items.")
    item_ids: list[ItemId] = Field([], description="Items of the catalogue.")
    items: Annotated[list[Fields], FailFast()] = Field([], description="Items that are not, each with its fields.")


class SimilarRequest(_Request):
    """Ask for the items whose vectors are nearest to that of an item: a known one, or one described by its fields."""

    item_id: ItemId = Field(None, description="An item of the catalogue.")
    fields: Fields | None = Field(None, description="Instead: the fields of one that is not.")
    k: Annotated[int, Strict()] = Field(10, description="How many items.")


class EmbedRequest(_Request):
    """Ask for vectors, of histories or of items."""

    histories: Annotated[list[Events], FailFast()] = Field([], description="Histories, each a list of events.")
    items: Annotated[list[Fields], FailFast()] = Field([], description="Items, each with its fields.")


class PutItemRequest(_Request):
    """An item to add or to replace."""

    fields: Fields = Field(description="The item's fields, with the columns of the item table.")


class NamedItem(Typed):
    item_id: ItemId = Field(description="As in the log; for item×field pairs an object.")
    display: Display | None = Field(None, description="What people see beside the id, where the schema displays any.")


class RecommendedItem(NamedItem):
    score: float = Field(description="Dot product of the history's vector and the item's; by popularity its logarithm.")
    probability: float = Field(description="Of being the next event, among all items, whatever the filters.")
    copied: float | None = Field(
        None, description="Where the model copies: the share of the probability that the history's own events gave."
    )
    fields: Fields | None = Field(None, description="With with_fields only.")


class RecommendResponse(Typed):
    """The best items, best first; fewer than k if the filters leave fewer."""

    items: tuple[RecommendedItem, ...]
    events_used: int = Field(description="The newest events of known items that the model read.")
    unknown_items: tuple[ItemId, ...] = Field((), description="Items of the history that are not in the catalogue.")
    copied: float | None = Field(None, description="Where the model copies: the same share over all items.")
    because: str | None = Field(
        None, description="'popularity' where the history is empty: the most frequent in training that may be listed."
    )
    notes: tuple[str, ...] = Field((), description="Such as a filter value that no item has.")
    model: str = Field(description="Checksum of the bundle that answered.")


class RecommendManyResponse(Typed):
    """A response per history, in the order of the request."""

    answers: tuple[RecommendResponse, ...]


class HistoryScores(Typed):
    scores: tuple[float | None, ...] = Field(
        description="Of item_ids, then of items, in their order; null for an id that is not in the catalogue."
    )
    events_used: int
    unknown_items: tuple[ItemId, ...] = Field((), description="Items of the history that are not in the catalogue.")
    because: str | None = Field(None, description="As in RecommendResponse; scores are then log-probabilities.")


class ScoreResponse(Typed):
    """The scores by history, in the order of the request; those that /v1/recommend gives."""

    answers: tuple[HistoryScores, ...]
    model: str


class RankedItem(Typed):
    item_id: ItemId = Field(None, description="Absent for an item that was given by its fields.")
    display: Display | None = None
    rank: int = Field(description="1 is the best; items of the same score come before it.")
    score: float
    probability: float
    copied: float | None = None


class RankResponse(Typed):
    """The items in the order of the request: item_ids, then items."""

    ranked: tuple[RankedItem, ...]
    num_items: int = Field(description="That may be recommended.")
    events_used: int
    unknown_items: tuple[ItemId, ...] = ()
    model: str


class SimilarItem(NamedItem):
    similarity: float = Field(description="Cosine of the two items' vectors.")


class SimilarResponse(Typed):
    items: tuple[SimilarItem, ...]
    model: str


class SearchResponse(Typed):
    items: tuple[NamedItem, ...]
    model: str


class UsersResponse(Typed):
    users: tuple[Any, ...] = Field(description="Ids of validation users.")
    num_users: int = Field(description="Of all validation users.")


class UserEvent(NamedItem):
    event: Event = Field(description="As the log has it, ready for a history.")
    validates: bool = Field(description="Whether it is one of the events that validate.")


class UserResponse(Typed):
    """A validation user's events, oldest first, without those that test."""

    user_id: Any
    events: tuple[UserEvent, ...]
    num_earlier: int = Field(description="Older events that are left out here.")


class EmbedResponse(Typed):
    vectors: list[list[float]]
    model: str


class ItemResponse(Typed):
    item_id: ItemId
    recommended: bool = Field(description="False once it is withdrawn.")
    fields: Fields = Field(description="All fields of an item added at run time, else its categories.")
    display: Display | None = None
    model: str


class UpdateResponse(Typed):
    item_id: ItemId
    num_items: int = Field(description="In the catalogue, after the update.")
    model: str


class SchemaResponse(Typed):
    item_column: str = Field(description="Of an event, the column that names the item.")
    id_column: str = Field(description="Of the item table, the column of the id; the key of ids that are objects.")
    event_fields: dict[str, str] = Field(description="Columns of an event and their kinds.")
    item_fields: dict[str, str] = Field(description="Columns of an item and their kinds.")
    window: int = Field(description="Events that the model reads.")
    max_history: int = Field(description="Events of one history; the newest count.")
    display: tuple[str, ...] = Field((), description="Columns that people see beside the id, the name first.")
    image_origins: tuple[str, ...] = Field((), description="Where the page may load pictures from.")
    shows_users: bool = Field(False, description="Whether validation users can be looked at.")
    examples: list[ItemId] = Field(description="Ids of some items.")
    model: str


class HealthResponse(Typed):
    status: str = Field(description="'ok', or 'stopping' with status 503.")
    run: str
    model: str
    num_items: int
    index: str
    waiting: int = Field(description="Requests in the queue.")
    uptime_s: float


class SwapResponse(Typed):
    run: str
    model: str
    previous: str = Field(description="Checksum of the bundle that answered before.")
    num_items: int


class ErrorResponse(Typed):
    error: str = Field(description="What was given, and what is wrong with it.")
    expected: str
    next_step: str


def parse_body(kind: type[RequestT], body: bytes) -> RequestT:
    """The request that a JSON body holds."""
    return kind.model_validate(_read_object(body))


def parse_recommend(body: bytes) -> RecommendRequest | RecommendManyRequest:
    """A request for one history, or with the key `histories` for several."""
    values = _read_object(body)
    return (RecommendManyRequest if "histories" in values else RecommendRequest).model_validate(values)


def _read_object(body: bytes) -> dict[str, Any]:
    """The object that a JSON body holds. NaN and Infinity are not JSON."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", expected="a JSON object in UTF-8") from None
    if not isinstance(values, dict):
        raise RequestError(f"the body is a JSON {_json_type(values)}", expected="a JSON object")
    # Objects with very many keys are refused before they are validated, which would cost an error per key.
    for name, part in (("the body", values), *values.items()):
        if isinstance(part, dict) and len(part) > _MAX_KEYS:
            raise RequestError(f"{shorten(name)} has {len(part):,} keys", expected=f"at most {_MAX_KEYS}")
    return values


def invalid_value(name: str, value: Any, expected: str) -> RequestError:
    """The error for a value of an event, an item or a filter."""
    return RequestError(f"{name} is {shorten(value)}", expected=expected)


def shorten(value: Any) -> str:
    """A value for an error's text, at most 60 characters whatever was sent."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__} that is too long to print"
    return text if len(text) <= 60 else text[:57] + "..."


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
