"""The verbs in a row: probe, sweep, fit, plan, report. An event log in; laws, a recipe and a page out."""

from habitus.study.options import StudyOptions
from habitus.study.progress import StudyProgress
from habitus.study.running import StudyResult, study
from habitus.study.state import State

__all__ = ["State", "StudyOptions", "StudyProgress", "StudyResult", "study"]
