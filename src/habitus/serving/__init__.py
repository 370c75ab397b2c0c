"""Recommendations from a trained run: catalogue, index, retriever, and the HTTP service."""

from typing import TYPE_CHECKING, Any

from habitus.errors import ConfigError
from habitus.serving.encoding import EncodedHistory, pack_histories
from habitus.serving.index import INDEX_KINDS
from habitus.serving.item_store import ItemStore
from habitus.serving.limits import Limits
from habitus.serving.retriever import LIBRARY_LIMITS, Retriever
from habitus.serving.schemas import (
    Event,
    EventOrId,
    RankRequest,
    RankResponse,
    RecommendedItem,
    RecommendManyRequest,
    RecommendRequest,
    RecommendResponse,
    RequestError,
    ScoreRequest,
    ScoreResponse,
    SimilarRequest,
    SimilarResponse,
    UnknownHistoryError,
)
from habitus.serving.users import ValidationUsers

if TYPE_CHECKING:
    from habitus.serving.serve import ServeOptions, serve_run
    from habitus.serving.server import address_of, bind, is_loopback, run_server
    from habitus.serving.service import Service

# The HTTP side needs the `serve` extra (FastAPI, uvicorn, Prometheus), so it is imported when it is first used.
_HTTP = {
    "ServeOptions": "serve",
    "Service": "service",
    "address_of": "server",
    "bind": "server",
    "is_loopback": "server",
    "run_server": "server",
    "serve_run": "serve",
}

__all__ = [
    "INDEX_KINDS",
    "LIBRARY_LIMITS",
    "EncodedHistory",
    "Event",
    "EventOrId",
    "ItemStore",
    "Limits",
    "RankRequest",
    "RankResponse",
    "RecommendManyRequest",
    "RecommendRequest",
    "RecommendResponse",
    "RecommendedItem",
    "RequestError",
    "Retriever",
    "ScoreRequest",
    "ScoreResponse",
    "ServeOptions",
    "Service",
    "SimilarRequest",
    "SimilarResponse",
    "UnknownHistoryError",
    "ValidationUsers",
    "address_of",
    "bind",
    "is_loopback",
    "pack_histories",
    "run_server",
    "serve_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HTTP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"{__name__}.{_HTTP[name]}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed", next_step="pip install 'habitus[serve]'") from error
    return getattr(module, name)
