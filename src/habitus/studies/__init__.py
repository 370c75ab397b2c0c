"""The verbs in a row: probe, sweep, fit, plan, report. An event log in; laws, a recipe and a page out."""

from habitus.studies.options import StudyOptions
from habitus.studies.progress import StudyProgress, clock
from habitus.studies.running import StudyResult, study
from habitus.studies.state import STATE_FILE, State

__all__ = [
    "STATE_FILE",
    "State",
    "StudyOptions",
    "StudyProgress",
    "StudyResult",
    "clock",
    "study",
]
