"""Catalogue index, retriever, HTTP."""
