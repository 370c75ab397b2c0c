"""A budget and a metric to the next recipe: sizes, data, batch, negatives, memory and hours, each with interval and source."""

from habitus.planning.hardware import affordable_flops
from habitus.planning.knobs import stage1_metrics, stage2_metrics
from habitus.planning.plan import PlanOptions, plan
from habitus.planning.registration import check_plan, register_plan

__all__ = [
    "PlanOptions",
    "affordable_flops",
    "check_plan",
    "plan",
    "register_plan",
    "stage1_metrics",
    "stage2_metrics",
]
