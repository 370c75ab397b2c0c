"""search.json: what a search tried, round by round, and what it may spend."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from habitus.errors import ConfigError
from habitus.studies.envelope import round_up
from habitus.typed import Typed

SEARCH_FILE = "search.json"
RoundKind = Literal["start", "explore", "finalists", "stage 2", "users"]


class Trial(Typed):
    """One run of the search."""

    change: str = Field(description="What was changed, in words.")
    recipe_hash: str
    value: float | None = Field(None, description="Of the metric on validation; absent where the run failed.")
    passes: float
    seconds: float


class SearchRound(Typed):
    """Recipes that were run together."""

    kind: RoundKind
    trials: tuple[Trial, ...]


class SearchState(Typed):
    """search.json: every round, in its order."""

    metric: str
    rounds: tuple[SearchRound, ...] = ()
    seconds: float = Field(0.0, description="Of all calls together.")
    ended: str = Field("", description="Why exploring ended, in words; empty before.")
    seconds_to_best: float = Field(0.0, description="When the best recipe's first run had ended.")
    winner: str | None = Field(None, description="Hash of the stage-1 run whose recipe is the best.")
    winner_values: tuple[float, ...] = Field((), description="Of the winner's recipe at each seed.")
    stage2: str | None = Field(None, description="Hash of its stage-2 run, where that is better.")
    value: float | None = None


@dataclass(frozen=True)
class Envelope:
    """What may be spent: seconds of this machine, or nominal FLOPs of all runs."""

    limit: float
    unit: Literal["seconds", "FLOPs"]

    def refusal(self, least: float) -> ConfigError:
        """The error of an envelope without one pass; the least that it names is accepted when given."""
        if self.unit == "FLOPs":
            return ConfigError(
                f"--flops {self.limit:.3g} do not pay one pass over the log",
                expected=f"at least {round_up(least)} FLOPs",
            )
        return ConfigError(
            f"--gpu-hours {self.limit / 3600:.3g} do not pay one pass over the log on this device",
            expected=f"at least {round_up(least / 3600)} hours",
        )
