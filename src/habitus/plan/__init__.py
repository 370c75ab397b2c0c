"""A budget and a metric to the next recipe: sizes, data, batch, negatives, memory and hours, each with its doubt."""

from habitus.plan.hardware import DEVICES, affordable_flops, device_of
from habitus.plan.plan import FARTHEST, PlanOptions, plan
from habitus.plan.registration import Check, Registered, check, register
from habitus.plan.result import Plan, Prediction, Quantity

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
]
