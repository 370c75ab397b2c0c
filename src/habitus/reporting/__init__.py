"""One HTML page from a store: figures, tables, what they say, and what was not measured."""

from habitus.reporting.error_page import error_report
from habitus.reporting.format import format_number
from habitus.reporting.report import report

__all__ = [
    "error_report",
    "format_number",
    "report",
]
