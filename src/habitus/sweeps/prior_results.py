"""What a store already knows, as far as an axis needs it: shares, sizes, and which run won. Read from laws.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from habitus.errors import RunError

LOSS = "batch/loss"


@dataclass(frozen=True)
class Winner:
    """The best run of the allocation axis at a budget, by `batch/loss` at its chosen learning rate."""

    budget: float
    cell_id: str
    learning_rate: float
    seed: int
    loss: float


@dataclass(frozen=True)
class Known:
    """Answers of earlier axes. Empty where the store has none."""

    shares: Mapping[float, float] = field(default_factory=dict)  # budget: best share
    sizes: Mapping[float, float] = field(default_factory=dict)  # budget: N* with an interior optimum
    size_law: tuple[float, float] | None = None  # a, b of N* = a·C^b
    winners: Mapping[float, Winner] = field(default_factory=dict)

    def share(self, default: float) -> tuple[float, str]:
        """One share for all budgets, and where it comes from: the geometric mean of the best ones found."""
        if not self.shares:
            return default, f"share {default:.3g}: the preset's, since the store has no share sweep"
        mean = math.exp(sum(math.log(s) for s in self.shares.values()) / len(self.shares))
        mean = float(f"{mean:.3g}")
        of = f"mean of {len(self.shares)} budgets" if len(self.shares) > 1 else "one budget"
        return mean, f"share {mean:.3g}: the store's share sweep, {of}"

    def size(self, budget: float) -> tuple[float, str] | None:
        """The expected best size at a budget, from the size law or the nearest budget with an optimum."""
        if self.size_law is not None:
            a, b = self.size_law
            return a * budget**b, f"the store's size law, {a:.3g}·C^{b:.3g}"
        if not self.sizes:
            return None
        near = min(self.sizes, key=lambda known: abs(math.log(known / budget)))
        # Between two budgets the size grows about as the root of the compute; the grid is wide enough to be wrong.
        return self.sizes[near] * (budget / near) ** 0.5, f"the optimum at {near:.3g} FLOPs, scaled as C^0.5"


def read_known(laws: Path) -> Known:
    """What laws.json says; nothing where there is no such file."""
    if not laws.exists():
        return Known()
    try:
        found = json.loads(laws.read_text(encoding="utf-8"))
        return Known(_shares(found), _sizes(found), _size_law(found), _winners(found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{laws} cannot be read: {error!r}",
            expected="laws as `habitus fit` writes them",
            next_step=f"delete {laws.name}; the sweep fits again",
        ) from None


def _entries(laws: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [e for e in laws["entries"] if e["name"] == name and e["metric"] == LOSS and e["law"]["status"] == "ok"]


def _shares(laws: dict[str, Any]) -> dict[float, float]:
    """The share of the best cell per budget, replaced by the fitted optimum where that is interior."""
    best = _best_runs(laws, "share")
    shares = {budget: float(run["knobs"]["embedder_share"]) for budget, run in best.items()}
    return shares | {float(e["budget"]): float(e["law"]["values"]["x_opt"]) for e in _entries(laws, "share_optimum")}


def _sizes(laws: dict[str, Any]) -> dict[float, float]:
    return {float(e["budget"]): float(e["law"]["values"]["x_opt"]) for e in _entries(laws, "size_optimum")}


def _size_law(laws: dict[str, Any]) -> tuple[float, float] | None:
    for entry in _entries(laws, "size_law"):
        values = entry["law"]["values"]
        if len(_sizes(laws)) >= 3 and 0 < values["exponent"] < 1.5:
            return float(values["coefficient"]), float(values["exponent"])
    return None


def _winners(laws: dict[str, Any]) -> dict[float, Winner]:
    return {
        budget: Winner(
            budget, run["cell_id"], float(run["learning_rate"]), int(run["seed"]), float(run["metrics"][LOSS])
        )
        for budget, run in _best_runs(laws, "allocation").items()
    }


def _best_runs(laws: dict[str, Any], axis: str) -> dict[float, dict[str, Any]]:
    best: dict[float, dict[str, Any]] = {}
    for run in laws["runs"]:
        if run["axis"] != axis or not run["chosen"] or LOSS not in run["metrics"]:
            continue
        budget = float(run["budget"])
        if budget not in best or run["metrics"][LOSS] < best[budget]["metrics"][LOSS]:
            best[budget] = run
    return best
