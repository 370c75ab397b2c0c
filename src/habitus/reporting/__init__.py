"""One HTML page from a store: figures, tables, what they say, and what was not measured."""

from habitus.reporting.error_page import error_report
from habitus.reporting.format import format_number
from habitus.reporting.live import Live, LiveAxis, LiveLog, LiveRun, render_live
from habitus.reporting.report import LIVE_FOLDER, draw_empty, draw_unfinished, report

__all__ = [
    "LIVE_FOLDER",
    "Live",
    "LiveAxis",
    "LiveLog",
    "LiveRun",
    "draw_empty",
    "draw_unfinished",
    "error_report",
    "format_number",
    "render_live",
    "report",
]
