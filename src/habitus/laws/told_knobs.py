"""What the runs of a recipe's law tell: where they never moved, or moved only together, the law is a guess.

Let u be the centred logarithms of the six columns of n runs. Along a direction in which runs hardly differ, root mean
square of u·v below 0.02, nothing is known of the metric: a rate that is a function of the size in all runs, one batch,
the slots that are always steps times batch. A recipe may be asked there only as far as the runs went.
"""

from collections.abc import Mapping

import numpy as np

from habitus.laws.checks import Numbers
from habitus.laws.recipe_form import COLUMNS
from habitus.store import Law

_UNTOLD = 0.02  # spread per run of a direction, in logarithms, below which nothing is known along it
_WEAK = 0.1  # below which a recipe may go along it only as far as the runs went
_AS_IN_RUNS = 0.05  # of a logarithm: a recipe is that of the runs
_RUNS_WENT = 3.0  # spreads
_AT_ONE_VALUE = 1e-9
_GOES_WITH = 0.1  # of what a knob moved: what another one explains of it
_RANK = 1e-6  # of the largest singular value
# Whom to name where several moved together: what a plan sets last.
_NAMED_FIRST = ("rate_at_512", "batch_sequences", "steps", "slots_seen", "contextualizer_params", "embedder_params")
_WORDS = {
    "rate_at_512": "the learning rate",
    "batch_sequences": "the batch",
    "steps": "the steps",
    "slots_seen": "the slots",
    "contextualizer_params": "the contextualizer's size",
    "embedder_params": "the embedder's size",
}


def why_untold(law: Law, table: Mapping[str, Numbers]) -> str:
    """Why runs say nothing of a recipe, '' where they do: it leaves them in a direction in which they hardly differ.

    With one batch, what a batch costs cannot be told from the floor, nor data from steps. With a rate that is a
    function of the size, what another rate costs cannot be told from what the size costs. `table` holds one recipe.
    """
    runs, at = _centred(law, table)
    spread, directions = _directions(runs)
    moved = np.abs(at @ directions.T)
    limit = np.where(spread < _WEAK, np.maximum(_AS_IN_RUNS, _RUNS_WENT * spread), np.inf)
    # Directions along which nothing is known have no names of their own: together they are one.
    nothing = spread < _UNTOLD
    beyond = bool(np.any(moved > limit)) or float(np.linalg.norm(moved[nothing])) > _AS_IN_RUNS
    if not beyond:
        return ""
    for k, name in enumerate(COLUMNS):
        if np.ptp(runs[:, k]) <= _AT_ONE_VALUE and abs(at[k]) > _AS_IN_RUNS:
            return f"is of runs with one {name}, which the plan does not have"
    return _told_only_together(runs, at)


def as_told(law: Law, u: np.ndarray) -> np.ndarray:
    """Centred logs [..., 6] without what they move, by rounding, along directions that nothing is known of.

    There a law's slope is a guess, and it may be steep: a rate rounded by a hundredth is still the rate of the runs.
    """
    runs = np.log(np.stack([np.asarray(law.points[name], float) for name in COLUMNS], axis=1))
    spread, directions = _directions(runs - runs.mean(axis=0))
    nothing = directions[spread < _UNTOLD]
    moved = u @ nothing.T
    near = np.linalg.norm(moved, axis=-1, keepdims=True) <= _AS_IN_RUNS
    return np.asarray(u - np.where(near, moved, 0.0) @ nothing)


def rate_of_runs(law: Law, table: Mapping[str, Numbers]) -> float | None:
    """The rate at 512 windows per step that the runs' own rule gives a recipe; None where rates follow no rule."""
    runs, at = _centred(law, {**table, "rate_at_512": [1.0]})
    k = COLUMNS.index("rate_at_512")
    coefficients, spread = _by_others(runs, k)
    if spread >= _UNTOLD:
        return None
    centre = float(np.mean(np.log(law.points["rate_at_512"])))
    return float(np.exp(centre + np.delete(at, k) @ coefficients))


def _centred(law: Law, table: Mapping[str, Numbers]) -> tuple[np.ndarray, np.ndarray]:
    """Centred logs of the runs [n, 6] and of a recipe [6]."""
    runs = np.log(np.stack([np.asarray(law.points[name], float) for name in COLUMNS], axis=1))
    at = np.array([float(np.log(np.ravel(np.asarray(table[name], float))[0])) for name in COLUMNS])
    centre = runs.mean(axis=0)
    return runs - centre, at - centre


def _directions(runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square of the runs along each of six directions [6], and the directions [6, 6]."""
    values, directions = np.linalg.eigh(runs.T @ runs / len(runs))
    return np.sqrt(np.maximum(values, 0.0)), directions.T


def _by_others(runs: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """A knob as a sum of the others' logs, of the least numbers that do, and what is left of it."""
    others = np.delete(runs, k, axis=1)
    coefficients = np.linalg.lstsq(others, runs[:, k], rcond=_RANK)[0]
    return coefficients, float(np.sqrt(np.mean((runs[:, k] - others @ coefficients) ** 2)))


def _told_only_together(runs: np.ndarray, at: np.ndarray) -> str:
    """The knob that leaves the runs, with whom it went and by how much the recipe's differs."""
    for name in _NAMED_FIRST:
        k = COLUMNS.index(name)
        coefficients, spread = _by_others(runs, k)
        off = float(at[k] - np.delete(at, k) @ coefficients)
        if spread >= _WEAK or abs(off) <= max(_AS_IN_RUNS, _RUNS_WENT * spread):
            continue
        parts = np.abs(coefficients) * np.delete(runs, k, axis=1).std(axis=0)
        others = [_WORDS[COLUMNS[j]] for j, part in zip(np.delete(np.arange(len(COLUMNS)), k), parts, strict=True)
                  if part > _GOES_WITH * max(runs[:, k].std(), _AS_IN_RUNS)]  # fmt: skip
        whom = ", ".join(others[:-1]) + (" and " if len(others) > 1 else "") + others[-1] if others else "the others"
        return (
            f"is of runs that tell {_WORDS[name]} only together with {whom}, and the plan has {np.exp(off):.2g} times "
            "what they would"
        )
    return "is of runs whose knobs moved together in a way that the plan's do not"
