"""Which ends first, the compute or the log: the budget whose D* is one pass over the log.

Letters as in knobs: C nominal FLOPs, D slots, N params, s share, B batch.
"""

import math
from typing import Literal

from pydantic import Field

from habitus.data import Dataset
from habitus.planning import knobs
from habitus.planning.facts import DatasetProfile
from habitus.planning.shape import FixedSettings, slots_for
from habitus.planning.sources import laws_by_source
from habitus.typed import Typed

RegimeKind = Literal["compute-limited", "between", "data-limited"]

# The axes' budgets begin at about a hundredth of an envelope: beyond that even the smallest sees the whole log.
_SMALLEST_BUDGET = 0.01
_LOG_C = (3.0, 40.0)  # log10 of budgets among which the log's own is looked for


class LogRegime(Typed):
    """On which side of its log an envelope stands."""

    kind: RegimeKind
    flops: float = Field(description="The envelope, nominal; an estimate where hours were given.")
    log_flops: float = Field(description="The budget whose D* is one pass over the log, by the published laws.")
    train_events: int

    def describe(self) -> str:
        """The regime and its numbers, in one sentence."""
        means = {
            "compute-limited": "the compute ends first: one pass, the axes of the paper",
            "between": "both ends are near: the axes of the paper in one pass, then passes, regularisation and size",
            "data-limited": "the log ends first: passes, regularisation and size are searched together",
        }[self.kind]
        return (
            f"{self.kind}: {self.train_events:,} training events are one pass of the best model at "
            f"{self.log_flops:.2g} FLOPs, and the envelope is about {self.flops:.2g}; {means}"
        )


def log_regime(dataset: Dataset, flops: float) -> LogRegime:
    """The regime of an envelope of nominal FLOPs on a log."""
    limit = one_pass_flops(dataset)
    if flops <= limit:
        kind: RegimeKind = "compute-limited"
    else:
        kind = "data-limited" if _SMALLEST_BUDGET * flops >= limit else "between"
    return LogRegime(kind=kind, flops=flops, log_flops=limit, train_events=dataset.counts("train").events)


def one_pass_flops(dataset: Dataset) -> float:
    """The budget C whose D*(C) is one pass over the training windows; bisection in log C."""
    slots = max(1, dataset.counts("train").windows) * dataset.seq_len
    fixed = FixedSettings(DatasetProfile.of(dataset), text_depth=1)
    low, high = _LOG_C
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _best_slots(10**middle, fixed) > slots else (middle, high)
    return float(f"{10**high:.3g}")


def _best_slots(C: float, fixed: FixedSettings) -> float:
    """D*(C): what C pays at the published N*, share and batch."""
    sources = laws_by_source(None)
    N, s = (knob(C, "batch/loss", sources).value for knob in (knobs.size, knobs.share))
    B = max(1, round(64 * 2.0 ** (math.log10(C) - 15)))
    return slots_for(C, N, s, B, fixed)
