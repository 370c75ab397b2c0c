"""Size, share, batch and rate together, where a store's cells are spread over all knobs: the best recipe of its law.

Letters as in knobs: C nominal FLOPs of stage 1, N params, s embedder_share, B batch_sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from habitus.laws import best_rate, best_recipe, published_laws
from habitus.planning.foresight import error_of_gain, foreseen_by
from habitus.planning.measured import best_cell
from habitus.planning.sources import (
    LOSS,
    RECIPE_SURFACE,
    SourcedLaws,
    power_of_two,
    quantity_of,
    size_metrics,
    swept,
)
from habitus.store import SURFACE_AXIS, Law, Quantity, RunRow

_USEFUL = 10.0  # high end over low end of a size
_KNOBS = {"params": "params", "embedder_share": "share", "batch_sequences": "batch"}


@dataclass(frozen=True)
class SurfaceRecipe:
    """The knobs of one recipe, which belong together."""

    quantities: dict[str, Quantity]  # params, embedder_share, batch_sequences
    law: Law | None = None
    rate_at_512: Quantity | None = None  # of the best cell, where no law gives one

    def rate(self, embedder_params: float, contextualizer_params: float, B: float) -> Quantity:
        """The learning rate of the model that is built, by the √B rule."""
        scale = math.sqrt(B / 512)
        if self.law is None:
            assert self.rate_at_512 is not None
            low, high = (None if end is None else end * scale for end in (self.rate_at_512.low, self.rate_at_512.high))
            return self.rate_at_512.model_copy(
                update={"value": self.rate_at_512.value * scale, "low": low, "high": high}
            )
        value, low95, high95 = (end * scale for end in best_rate(self.law, embedder_params, contextualizer_params))
        how = f"the best rate of this size by the square root of the batch, {self.quantities['params'].how}"
        return quantity_of(value, low95, high95, "this study", how)


def surface_recipe(C: float, metric: str, laws: SourcedLaws) -> SurfaceRecipe | None:
    """The best recipe of a budget by one law over all knobs; None where no cells are spread over them.

    By the first law, of the metrics whose size a plan takes, that is identified and foresaw budgets. Where none can be
    trusted it is the best cell: knobs of one store and of another do not belong together.
    """
    runs = [run for run in laws.file.runs if run.axis == SURFACE_AXIS and run.chosen]
    if not runs:
        return None
    key = (C, metric)
    if key not in laws.kept:
        laws.kept[key] = _by_law(C, metric, laws, runs) or _by_best_cell(C, metric, laws, runs)
    return cast(SurfaceRecipe | None, laws.kept[key])


def _by_law(C: float, metric: str, laws: SourcedLaws, runs: Sequence[RunRow]) -> SurfaceRecipe | None:
    """By the first law with an inner optimum; else by the first with one at an end of what was tried.

    A law whose roll-outs missed by more than persistence would have is not asked.
    """
    names = size_metrics(metric, laws, SURFACE_AXIS)
    asked = names[0] == metric
    found: list[tuple[str, Law, Law]] = []
    for name in names:
        law = next((e.law for e in laws.entries(RECIPE_SURFACE, [name]) if e.law.ok), None)
        if law is None or not _foresaw(name, laws):
            continue
        best = best_recipe(law, [run.knobs for run in runs], C)
        if best.ok and _is_useful(best):
            return _recipe(law, best, name, metric, asked=asked)
        found.append((name, law, best))
    # Those of the loss are measured sharply: an end of what was tried says at least on which side the best lies.
    for name, law, best in sorted(found, key=lambda one: one[0] != LOSS):
        if best.status in ("ok", "boundary"):
            return _recipe(law, best, name, metric, asked=asked)
    return None


def _foresaw(name: str, laws: SourcedLaws) -> bool:
    """Whether roll-outs of the law missed by less than persistence, or there are none."""
    missed = error_of_gain(foreseen_by(laws.file.rollouts, RECIPE_SURFACE, name))
    return missed is None or missed < 1


def _is_useful(best: Law) -> bool:
    low, high = best.interval("params")
    return low > 0 and high <= _USEFUL * low


def _recipe(law: Law, best: Law, name: str, metric: str, *, asked: bool) -> SurfaceRecipe:
    how = f"by one law of {name} over size, share, data, batch and rate, {law.residuals.n} runs"
    if name != metric and (name != LOSS or asked):
        how += f"; that of {metric} is not identified, or foresaw no budget"
    elif name != metric:
        how += f"; no test over users shows that {metric} wants another recipe"
    quantities = {}
    for knob, letter in _KNOBS.items():
        low, high = best.interval(letter)
        quantities[knob] = quantity_of(best[letter], low or -math.inf, high, "this study", how, best)
    B = power_of_two(quantities["batch_sequences"])
    quantities["batch_sequences"] = B.model_copy(update={"how": f"{B.how}; the nearest power of two", "doubts": ()})
    quantities["embedder_share"] = quantities["embedder_share"].model_copy(update={"doubts": ()})  # those of N
    return SurfaceRecipe(quantities, law)


def _by_best_cell(C: float, metric: str, laws: SourcedLaws, runs: Sequence[RunRow]) -> SurfaceRecipe | None:
    """The best cell of the largest budget, its size carried on by the published exponent."""
    exponent = float(published_laws().find("size_law", LOSS)["exponent"])
    for name in size_metrics(metric, laws, SURFACE_AXIS):
        of_name = [r for r in runs if name in r.metrics and {*_KNOBS} <= r.knobs.keys()]
        if not of_name:
            continue
        top = max(run.budget for run in of_name)
        at = [run for run in of_name if run.budget == top]
        best = best_cell(at, name)
        how = f"best cell by {name} at {top:.3g}: {_why_no_law(name, laws)}"

        def of(values: Sequence[float], value: float, scale: float = 1.0, how: str = how) -> Quantity:
            return swept(scale * value, scale * min(values), scale * max(values), "this study", how)

        scales = {"params": (C / top) ** exponent}
        quantities = {
            knob: of([run.knobs[knob] for run in at], best.knobs[knob], scales.get(knob, 1.0)) for knob in _KNOBS
        }
        quantities["params"] = quantities["params"].model_copy(
            update={"how": f"{how}; carried on by the published exponent {exponent:.3f}"}
        )
        quantities["batch_sequences"] = power_of_two(quantities["batch_sequences"])
        rates = of([_rate_at_512(run) for run in at], _rate_at_512(best))
        return SurfaceRecipe(quantities, rate_at_512=rates)
    return None


def _why_no_law(name: str, laws: SourcedLaws) -> str:
    law = next((e.law for e in laws.entries(RECIPE_SURFACE, [name])), None)
    if law is None:
        return f"the runs have no law of {name} over the recipe"
    if not law.ok:
        return f"the law of {name} over the recipe is {law.status.replace('_', ' ')}"
    if not _foresaw(name, laws):
        return f"the law of {name} over the recipe foresaw no budget better than the one before"
    return f"the best recipe by the law of {name} is not identified"


def _rate_at_512(run: RunRow) -> float:
    return run.learning_rate / math.sqrt(run.knobs["batch_sequences"] / 512)
