"""The verbs in a row: probe, sweep, fit, plan, report. An event log in; laws, a recipe and a page out."""

from habitus.store import TestTable
from habitus.studies.log_table import compare_on_test
from habitus.studies.log_training import BEST, CHOICE_FILE, DEFAULT_HOURS, LogTraining, LogTrainingOptions, train_log
from habitus.studies.options import StudyOptions
from habitus.studies.progress import StudyProgress
from habitus.studies.search_state import SEARCH_FILE, SearchState
from habitus.studies.state import STATE_FILE, StudyState
from habitus.studies.study import StudyResult, study

__all__ = [
    "BEST",
    "CHOICE_FILE",
    "DEFAULT_HOURS",
    "SEARCH_FILE",
    "STATE_FILE",
    "LogTraining",
    "LogTrainingOptions",
    "SearchState",
    "StudyOptions",
    "StudyProgress",
    "StudyResult",
    "StudyState",
    "TestTable",
    "compare_on_test",
    "study",
    "train_log",
]
