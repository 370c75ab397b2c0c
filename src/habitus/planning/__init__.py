"""A budget and a metric, or a log, to the next recipe: every number with its interval and its source."""

from habitus.planning.best_run import plan_best_run, plan_of_run
from habitus.planning.hardware import affordable_flops, busy_note
from habitus.planning.log_limits import log_limits
from habitus.planning.neighbours import Change, combine, neighbours, passes_of
from habitus.planning.plan import PlanOptions, plan
from habitus.planning.portfolio import (
    LEAST_PASSES,
    SHAPES,
    DeviceKind,
    Shape,
    refit_recipe,
    stage1_recipe,
    stage2_recipe,
    usual_passes,
)
from habitus.planning.rates import RATE_AT_512
from habitus.planning.regime import LogRegime, log_regime
from habitus.planning.registration import check_plan, register_plan
from habitus.planning.sources import stage1_metrics, stage2_metrics

__all__ = [
    "LEAST_PASSES",
    "RATE_AT_512",
    "SHAPES",
    "Change",
    "DeviceKind",
    "LogRegime",
    "PlanOptions",
    "Shape",
    "affordable_flops",
    "busy_note",
    "check_plan",
    "combine",
    "log_limits",
    "log_regime",
    "neighbours",
    "passes_of",
    "plan",
    "plan_best_run",
    "plan_of_run",
    "refit_recipe",
    "register_plan",
    "stage1_metrics",
    "stage1_recipe",
    "stage2_metrics",
    "stage2_recipe",
    "usual_passes",
]
