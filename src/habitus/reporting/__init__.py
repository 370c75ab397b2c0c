"""One HTML page from a store: figures, tables, what they say, and what was not measured."""

from habitus.reporting.format import number
from habitus.reporting.verb import report

__all__ = [
    "number",
    "report",
]
