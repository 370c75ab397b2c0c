"""One HTML page from a store: figures, tables, what they say, and what was not measured."""

from habitus.report.verb import report

__all__ = ["report"]
