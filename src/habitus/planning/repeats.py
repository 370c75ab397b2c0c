"""A budget that outlasts its log: how many passes are worth paying for, and how they are regularised."""

import math
from collections.abc import Callable

from habitus.errors import ConfigError
from habitus.planning.facts import DatasetProfile, StoreFacts
from habitus.planning.portfolio import usual_passes_of
from habitus.sizing import Cell
from habitus.store import Quantity

# Up to four passes repeated text is worth nearly as much as new text (Muennighoff et al. 2023).
_NEARLY_NEW = 4.0
_DROPOUT = 0.3  # found on seven logs of several passes, docs/any-log.md
_TWICE, _LEAST_CAP = 2.0, 8.0  # twice the usual passes, which was worse on all logs but the largest; and at least
_CLOSE = 0.02  # to the passes wanted
_ROUNDS = 12


def most_passes(dataset: DatasetProfile) -> float | None:
    """The passes beyond which logs of this size only lost; None without a dataset."""
    if not dataset.train_slots:
        return None
    return max(_TWICE * usual_passes_of(dataset.train_slots), _LEAST_CAP)


def passes_of_cell(cell: Cell, dataset: DatasetProfile) -> float | None:
    return cell.slots_seen / dataset.train_slots if dataset.train_slots else None


def flops_to_log_end(flops: float, dataset: DatasetProfile, stage1_cell: Callable[[float], Cell]) -> float:
    """The part of a total budget that the log can use: all of it, or what the most passes of its size cost.

    `stage1_cell` gives stage 1 of a total budget.
    """
    most = most_passes(dataset)
    if most is None:
        return flops
    low, high, used = 0.0, flops, flops
    for _ in range(_ROUNDS):
        try:
            passes = passes_of_cell(stage1_cell(used), dataset) or 0.0
        except ConfigError:
            if used == flops:
                raise
            passes = 0.0  # too little for any model: more is needed
        if passes <= most:
            if used == flops or passes >= (1 - _CLOSE) * most:
                return used
            low = used
        else:
            high = used
        used = math.sqrt(low * high) if low else high / max(2.0, (passes / most) ** 2)
    return high


def passes_quantity(cell: Cell, dataset: DatasetProfile, *, stopped: bool) -> Quantity | None:
    """How often stage 1 sees the log."""
    passes = passes_of_cell(cell, dataset)
    if passes is None:
        return None
    how = f"D over the {dataset.train_slots:,} slots of one pass"
    if stopped:
        how = "the most that logs of this size gained anything from (docs/any-log.md)"
    return Quantity(value=passes, source="default", how=how)


def dropout_quantity(passes: Quantity | None, facts: StoreFacts) -> Quantity:
    """The runs' own dropout; where they had none and the plan repeats the log often, the one that logs wanted."""
    own = 0.0 if facts.recipe is None else facts.recipe.train.dropout
    if own or passes is None or passes.value <= _NEARLY_NEW:
        how = "the runs' own" if facts.recipe is not None else "none: each event is seen once, or nearly so"
        return Quantity(value=own, source="this study" if facts.recipe is not None else "default", how=how)
    how = f"{passes.value:.3g} passes: what several passes wanted on seven logs (docs/any-log.md)"
    return Quantity(value=_DROPOUT, source="default", how=how)


def log_end_warning(asked: float, used: float, passes: Quantity | None) -> list[str]:
    """That the budget outlasts the log."""
    if used >= asked or passes is None:
        return []
    return [
        f"the log ends at {used:.3g} FLOPs, {passes.value:.3g} passes: the plan stops there, and the rest of "
        f"{asked:.3g} FLOPs would only overfit. More users would help; habitus study --data searches sizes and "
        "regularisation for this log"
    ]
