"""The verbs in a row: probe, sweep, fit, plan, report. An event log in; laws, a recipe and a page out."""

from habitus.store import TestTable
from habitus.studies.comparison import ComparedRuns, MetricDifference, compare
from habitus.studies.knobs import Knob, KnobChange, describe_size, explain_recipe
from habitus.studies.live_server import watch_store, watch_study
from habitus.studies.log_table import compare_on_test
from habitus.studies.log_training import (
    BEST,
    CHOICE_FILE,
    DEFAULT_HOURS,
    REFIT,
    LogTraining,
    LogTrainingOptions,
    train_log,
)
from habitus.studies.options import StudyOptions
from habitus.studies.progress import AxisProgress, StudyProgress
from habitus.studies.search_state import SEARCH_FILE, SearchState
from habitus.studies.state import STATE_FILE, StudyState
from habitus.studies.study import StudyResult, study
from habitus.studies.subject import Subject, open_subject

__all__ = [
    "BEST",
    "CHOICE_FILE",
    "DEFAULT_HOURS",
    "REFIT",
    "SEARCH_FILE",
    "STATE_FILE",
    "AxisProgress",
    "ComparedRuns",
    "Knob",
    "KnobChange",
    "LogTraining",
    "LogTrainingOptions",
    "MetricDifference",
    "SearchState",
    "StudyOptions",
    "StudyProgress",
    "StudyResult",
    "StudyState",
    "Subject",
    "TestTable",
    "compare",
    "compare_on_test",
    "describe_size",
    "explain_recipe",
    "open_subject",
    "study",
    "train_log",
    "watch_store",
    "watch_study",
]
