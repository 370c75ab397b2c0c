"""A budget and a metric to the next recipe: sizes, data, batch, negatives, memory and hours, each with its doubt."""

from habitus.planning.hardware import DEVICES, affordable_flops, device_of
from habitus.planning.knobs import stage1_metrics, stage2_metrics
from habitus.planning.plan import FARTHEST, PlanOptions, plan
from habitus.planning.registration import Check, Registered, check, register
from habitus.planning.result import Plan, Prediction, Quantity

__all__ = [
    "DEVICES",
    "FARTHEST",
    "Check",
    "Plan",
    "PlanOptions",
    "Prediction",
    "Quantity",
    "Registered",
    "affordable_flops",
    "check",
    "device_of",
    "plan",
    "register",
    "stage1_metrics",
    "stage2_metrics",
]
