"""What a user may change about an axis of a preset: budgets, learning rates, seeds, repeated data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from habitus.errors import ConfigError
from habitus.store import AXES
from habitus.sweeps.preset import Preset
from habitus.typed import suggest_name

LearningRates = int | str | Sequence[float] | None  # as `rate_grid` takes them


@dataclass(frozen=True)
class SweepRequest:
    """What a user may change about an axis of a preset."""

    budgets: tuple[float, ...] = ()  # empty: the preset's
    learning_rates: LearningRates = None
    seeds: int | None = None
    allow_repeats: bool = False  # run cells of more than one epoch instead of listing them

    def check(self) -> None:
        """Refuse budgets that are not positive numbers."""
        for budget in self.budgets:
            if not 0 < budget < math.inf:
                raise ConfigError(f"budget {budget:g}", expected="a positive number of FLOPs, as in 1e13")

    def to_values(self, preset: Preset, axis: str) -> dict[str, Any]:
        """What makes two sweeps of an axis the same, apart from their budgets; a manifest keeps it."""
        rates = self.learning_rates
        return {
            "preset_hash": preset.hash(axis),
            "learning_rates": rates if rates is None or isinstance(rates, int | str) else list(rates),
            "seeds": self.seeds,
            "allow_repeats": self.allow_repeats,
        }


def check_axis(axis: str) -> None:
    """Refuse an axis that does not exist."""
    if axis not in AXES:
        raise ConfigError(
            f"axis {axis!r} is unknown ({suggest_name(axis, list(AXES))})", expected=f"one of {', '.join(AXES)}"
        )


def parse_budgets(text: str) -> tuple[float, ...]:
    """Budgets as a user types them, `1e13,1e14`, in ascending order."""
    try:
        budgets = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        budgets = []
    if not budgets or any(not 0 < budget < math.inf for budget in budgets):
        raise ConfigError(f"budgets {text!r}", expected="positive FLOPs separated by commas, as in 1e13,1e14,1e15")
    return tuple(sorted(set(budgets)))


def rate_grid(requested: LearningRates, multiples: Sequence[float], rule: float) -> list[float]:
    """The learning rates of a cell, ascending.

    `requested` is None for the preset's multiples of the rule, a number of rates a factor of two apart around the
    rule, the rates themselves, or text as a user types it: `3`, `1e-3,2e-3` or `0.5x,1x,2x`.
    """
    if requested is None:
        rates = [rule * multiple for multiple in multiples]
    elif isinstance(requested, str):
        rates = _parse_rates(requested, rule)
    elif isinstance(requested, int):
        if requested < 1:
            raise ConfigError(f"{requested} learning rates", expected="1 or more")
        rates = [rule * 2.0 ** (number - (requested - 1) / 2) for number in range(requested)]
        if requested % 2 == 0:  # an even number leans towards the smaller side, so that the rule itself is included
            rates = [rate / 2**0.5 for rate in rates]
    else:
        rates = [float(rate) for rate in requested]
    if not rates or any(not 0 < rate < math.inf for rate in rates):
        raise ConfigError(f"learning rates {rates}", expected="one or more positive numbers")
    # Twelve digits: the same rate from two formulas must give the same hash.
    return sorted({float(f"{rate:.12g}") for rate in rates})


def _parse_rates(text: str, rule: float) -> list[float]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if len(parts) == 1 and parts[0].isdigit():
            return rate_grid(int(parts[0]), (), rule)
        return [rule * float(part[:-1]) if part.endswith("x") else float(part) for part in parts]
    except ValueError:
        raise ConfigError(
            f"learning rates {text!r}",
            expected="how many (3), the rates (1e-3,2e-3), or multiples of the √B rule (0.5x,1x,2x)",
        ) from None
