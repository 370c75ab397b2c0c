"""The verbs in a row: probe, sweep, fit, plan, report. An event log in; laws, a recipe and a page out."""

from habitus.studies.options import StudyOptions
from habitus.studies.progress import StudyProgress
from habitus.studies.state import STATE_FILE, StudyState
from habitus.studies.study import StudyResult, study

__all__ = [
    "STATE_FILE",
    "StudyOptions",
    "StudyProgress",
    "StudyResult",
    "StudyState",
    "study",
]
