"""Catalogue index, retriever, HTTP."""

from habitus.serving.histories import History, packed
from habitus.serving.index import INDEX_KINDS
from habitus.serving.items import ItemStore
from habitus.serving.limits import ServerLimits
from habitus.serving.requests import Request, RequestError, Response, Scored
from habitus.serving.retriever import Retriever
from habitus.serving.service import Service
from habitus.serving.serving import address_of, bind, is_loopback, serve

__all__ = [
    "INDEX_KINDS",
    "History",
    "ItemStore",
    "Request",
    "RequestError",
    "Response",
    "Retriever",
    "Scored",
    "ServerLimits",
    "Service",
    "address_of",
    "bind",
    "is_loopback",
    "packed",
    "serve",
]
