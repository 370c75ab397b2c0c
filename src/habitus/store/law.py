"""The Law: what a fit hands back, with its uncertainty and its warnings."""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from habitus.errors import FitError
from habitus.typed import Typed, suggest_name

LEVELS = (0.80, 0.95)

LawStatus = Literal[
    "ok",  # values and intervals mean what they say
    "boundary",  # the optimum lies outside the swept range, or its interval reaches the edge
    "flat",  # no valley above the noise
    "monotone",  # only one of two opposing terms is there: no optimum
    "too_few",  # fewer points than the law needs; no values
    "not_identified",  # the data allow a whole family; intervals are open or missing
    "misfit",  # the form misses its points by more than seeds differ
    "disagree",  # two ways to the same number contradict each other
]

LawValue = float | tuple[float, float]


class Interval(Typed):
    """Low and high end; an absent end is open."""

    low: float | None = None
    high: float | None = None

    @field_validator("low", "high", mode="before")
    @classmethod
    def _open_ends_are_absent(cls, end: float | None) -> float | None:
        return None if end is None or not math.isfinite(end) else float(end)

    def ends(self) -> tuple[float, float]:
        return (
            -math.inf if self.low is None else self.low,
            math.inf if self.high is None else self.high,
        )


class Residuals(Typed):
    """How the fit missed its points, in the unit that was fitted."""

    n: int = Field(ge=0)
    dof: int = Field(description="Points less fitted values.")
    rmse: float | None = Field(None, description="Root of the mean squared residual.")
    r2: float | None = Field(None, description="Share of the variance explained.")
    largest: float | None = Field(None, description="Largest absolute residual.")


class Law(Typed):
    """One fitted law. `law["b_crit"]` is a value, `law.interval("b_crit")` its 95% interval."""

    law: str = Field(description="Which law: critical_batch, power_law, ...")
    form: str = Field(description="The equation, in the paper's letters.")
    status: LawStatus
    values: dict[str, LawValue] = Field(default_factory=dict)
    intervals: dict[str, dict[str, Interval]] = Field(
        default_factory=dict, description="Level ('0.80', '0.95'), then value name."
    )
    residuals: Residuals
    warnings: tuple[str, ...] = ()
    points: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="What was fitted, column by column, to redraw the figure."
    )
    details: dict[str, Any] = Field(default_factory=dict, description="What else the figure or table shows.")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise FitError(
                f"{self.law} has no value {name!r} ({suggest_name(name, list(self.values))})"
                if self.values
                else f"{self.law} has no values: its status is {self.status!r}",
                expected="one of the law's value names",
                next_step="; ".join(self.warnings) or "check .status before reading values",
            )
        return self.values[name]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values") or {}
        if name in values:
            return values[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or value {name!r}")

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """(low, high) for a value; infinite ends are open. Levels: 0.80 and 0.95."""
        if not any(math.isclose(level, known) for known in LEVELS):
            raise FitError(
                f"no interval at level {level}",
                expected=f"one of {', '.join(str(known) for known in LEVELS)}",
            )
        self[name]
        at_level = self.intervals.get(level_key(level), {})
        return at_level[name].ends() if name in at_level else (-math.inf, math.inf)

    def with_warnings(self, *warnings: str) -> "Law":
        """The same law with more warnings, none of them twice."""
        fresh = [w for w in dict.fromkeys(warnings) if w not in self.warnings]
        return self.model_copy(update={"warnings": (*self.warnings, *fresh)}) if fresh else self


def level_key(level: float) -> str:
    """'0.95': how a level is spelled in laws.json."""
    return f"{level:.2f}"
