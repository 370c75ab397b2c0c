"""Axes to recipes, the run store, its workers."""

from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun
from habitus.sweeps.design import centred_shapes, design_axis
from habitus.sweeps.estimate import device_kind, speed_of_store, usual_workers
from habitus.sweeps.mps import mps_environment
from habitus.sweeps.outcome import RunOutcome, SweepProgress, SweepResult
from habitus.sweeps.preset import EvaluationSettings, Preset, ReplicatedAxis, load_preset, preset_dataset, preset_text
from habitus.sweeps.prior_results import PriorResults
from habitus.sweeps.recipe_list import RecipeRunner
from habitus.sweeps.refinement import likely_to_go_on
from habitus.sweeps.request import SweepRequest, check_axis, parse_budgets
from habitus.sweeps.run_list import ListedRun, RunList, check_state, list_runs
from habitus.sweeps.store import Store
from habitus.sweeps.sweep import sweep

__all__ = [
    "DatasetFacts",
    "Design",
    "EvaluationSettings",
    "ListedRun",
    "PlannedRun",
    "Preset",
    "PriorResults",
    "RecipeRunner",
    "ReplicatedAxis",
    "RunList",
    "RunOutcome",
    "Store",
    "SweepProgress",
    "SweepRequest",
    "SweepResult",
    "centred_shapes",
    "check_axis",
    "check_state",
    "design_axis",
    "device_kind",
    "likely_to_go_on",
    "list_runs",
    "load_preset",
    "mps_environment",
    "parse_budgets",
    "preset_dataset",
    "preset_text",
    "speed_of_store",
    "sweep",
    "usual_workers",
]
