"""Scores of given candidates, for rankers: nothing but the candidates is scored.

n  known candidates
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.serving.encoding import EncodedHistory
from habitus.serving.schemas import (
    BY_POPULARITY,
    EventOrId,
    Fields,
    HistoryScores,
    RequestError,
    ScoreRequest,
    ScoreResponse,
)
from habitus.serving.search import PastItems

if TYPE_CHECKING:
    from habitus.serving.retriever import Retriever

_Query = tuple[Tensor, PastItems]


class _Candidates(NamedTuple):
    """What one request asks for."""

    histories: list[EncodedHistory]
    rows: np.ndarray  # of item_ids; -1 where unknown or withdrawn
    items: list[Fields]  # others, by their fields


def score_requests(retriever: "Retriever", requests: Sequence[ScoreRequest]) -> list[ScoreResponse | RequestError]:
    """A response per request, by one forward of the model for the histories of all, or why there is none."""
    read = [_read(retriever, request) for request in requests]
    good = [one for one in read if isinstance(one, _Candidates)]
    queries = iter(_queries(retriever, [history for one in good for history in one.histories]))
    responses = iter([_respond(retriever, one, [next(queries) for _ in one.histories]) for one in good])
    return [next(responses) if isinstance(one, _Candidates) else one for one in read]


def _read(retriever: "Retriever", request: ScoreRequest) -> _Candidates | RequestError:
    try:
        retriever.limits.check_score(request)
        histories = [_encode(retriever, number, history) for number, history in enumerate(request.histories)]
        rows = np.array(retriever.rows_of(request.item_ids), np.int64)
        return _Candidates(histories, rows, [retriever.item_encoder.read_fields(fields) for fields in request.items])
    except RequestError as error:
        return error


def _encode(retriever: "Retriever", number: int, history: Sequence[EventOrId]) -> EncodedHistory:
    try:
        return retriever.encode_any_history(history)
    except RequestError as error:
        problem = f"histories[{number}]: {error.problem}"
        raise type(error)(problem, expected=error.expected, next_step=error.next_step) from error


def _queries(retriever: "Retriever", histories: Sequence[EncodedHistory]) -> list[_Query | None]:
    """The query and the past items of every history; None for an empty one."""
    filled = [place for place, history in enumerate(histories) if len(history.rows)]
    queries: list[_Query | None] = [None] * len(histories)
    for at in range(0, len(filled), retriever.limits.max_batch):
        places = filled[at : at + retriever.limits.max_batch]
        vectors, past_items = retriever.compute_queries([histories[place] for place in places])
        for place, vector, past in zip(places, vectors, past_items, strict=True):
            queries[place] = vector, past
    return queries


def _respond(retriever: "Retriever", request: _Candidates, queries: Sequence[_Query | None]) -> ScoreResponse:
    is_known = request.rows >= 0
    known = request.rows[is_known]
    parts = (retriever.candidates.vectors(known).float(), retriever.embed_as_stored(request.items))
    vectors = torch.cat([part.to(retriever.candidates.device) for part in parts])
    answers = []
    for history, query in zip(request.histories, queries, strict=True):
        if query is None:
            scores = retriever.searcher.popularity.scores(np.append(known, np.full(len(request.items), -1)))
        else:
            scores = retriever.searcher.score_rows(*query, known, vectors)
        named = np.full(len(request.rows), np.nan)
        named[is_known] = scores[: len(known)]
        listed = [None if np.isnan(score) else float(score) for score in named] + scores[len(known) :].tolist()
        answers.append(
            HistoryScores(
                scores=tuple(listed),
                events_used=len(history.rows),
                unknown_items=history.unknown_ids,
                because=BY_POPULARITY if query is None else None,
            )
        )
    return ScoreResponse(answers=tuple(answers), model=retriever.checksum)
