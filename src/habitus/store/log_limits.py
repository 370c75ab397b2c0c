"""What a log can still give: the answers of the law for finite logs, as they are kept and printed."""

from typing import Literal

from pydantic import Field

from habitus.store.law import LawStatus
from habitus.typed import Typed

LOG_LIMITS_FILE = "log_limits.json"


class Estimate(Typed):
    """A number and its 95% interval; an absent end is open."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        ends = ["?" if end is None else f"{end + 0.0:.4g}" for end in (self.low, self.high)]  # no -0
        return f"{self.value:.4g} [{ends[0]}, {ends[1]}]"


class MoreUsers(Typed):
    """The metric with so many times the users."""

    factor: float
    events: float = Field(description="Unique training events.")
    passes: float
    value: Estimate
    checked: bool = Field(False, description="Whether runs on as many users exist.")


class NextStep(Typed):
    """What one step from the best run on the whole log would change."""

    what: str
    change: Estimate = Field(description="Of the metric; the direction of the metric says which sign helps.")
    helps: Literal["yes", "no", "undecided"]


class LogLimits(Typed):
    """How far a log goes: size, passes and compute, and what more users would bring."""

    metric: str
    status: LawStatus
    form: str = Field("", description="The law that answers.")
    forecast_by: str = Field("", description="How more users are forecast.")
    events: float = Field(0.0, description="Unique training events of the log.")
    best_size: Estimate | None = None
    best_passes: Estimate | None = None
    best_value: Estimate | None = None
    compute_limit: Estimate | None = Field(None, description="FLOPs beyond which the log buys nothing.")
    more_users: tuple[MoreUsers, ...] = ()
    steps: tuple[NextStep, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The answers, a sentence each."""
        said = []
        if self.best_value is not None:
            said.append(f"this log: {self.metric} {self.best_value} at best")
        if self.best_passes is not None:
            said.append(f"best passes: {self.best_passes}")
        if self.best_size is not None:
            said.append(f"best size: {self.best_size} parameters")
        if self.compute_limit is not None:
            said.append(f"compute beyond {self.compute_limit} FLOPs buys nothing on this log")
        helped = {"yes": "helps", "no": "does not help", "undecided": "may help or harm"}
        said += [f"{step.what} {helped[step.helps]}: {self.metric} by {step.change}" for step in self.steps]
        said += [
            f"with {more.factor:g} times the users: {self.metric} {more.value}"
            + ("" if more.checked else " (unchecked)")
            for more in self.more_users
        ]
        return said + list(self.notes)
