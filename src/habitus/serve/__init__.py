"""Catalogue index, retriever, HTTP."""

from habitus.serve.requests import Request, Response, Scored
from habitus.serve.retriever import Retriever

__all__ = ["Request", "Response", "Retriever", "Scored"]
