"""The paper's recipe as it is printed, and what Equation 1 charges for it; and where two sets of laws differ."""

import math
from collections.abc import Mapping

from habitus.laws import published_laws
from habitus.planning.rates import RATE_AT_512
from habitus.sizing import TYPICAL_INPUTS, CellRequest, cell_of, solve
from habitus.store import Difference, PrintedRecipe, Quantity

_PRINTED_BUDGETS = (1e15, 1e19)
_BATCH = 2048
_NEGATIVES = (2.5e5, 9e5)
_DIFFERENT = 1.25  # a ratio within this of 1 is not worth a line unless an interval says otherwise


def printed_recipe(flops: float) -> PrintedRecipe | None:
    """The printed recipe at a budget between the smallest and the largest printed one.

    D/N between printed budgets follows straight lines in logarithms. The model is the paper's own setting: 256
    events, 24 text tokens, four text layers.
    """
    if not _PRINTED_BUDGETS[0] / 1.01 <= flops <= _PRINTED_BUDGETS[1] * 1.01:
        return None
    optima = {
        e.budget: e.law for e in published_laws().entries if e.name == "size_parabola" and e.metric == "batch/loss"
    }
    budgets = sorted(c for c in optima if c is not None)
    params = _interpolate(flops, budgets, [float(optima[c]["x_opt"]) for c in budgets])
    slots = _interpolate(flops, budgets, [float(optima[c].details["data_6nd"]) for c in budgets])
    share = float(published_laws().extra["recipe"]["embedder_share"])
    step = _step_flops(params, share)
    charged = step * slots / (_BATCH * 256)
    return PrintedRecipe(
        params=params,
        data_ratio_6nd=slots / params,
        slots=slots,
        embedder_share=share,
        batch_sequences=_BATCH,
        learning_rate=RATE_AT_512 * math.sqrt(_BATCH / 512),
        num_negatives=_NEGATIVES,
        flops=charged,
        times_budget=charged / flops,
    )


def _interpolate(flops: float, budgets: list[float], values: list[float]) -> float:
    at = min(max(flops, budgets[0]), budgets[-1])
    for (c0, v0), (c1, v1) in zip(
        zip(budgets, values, strict=True), zip(budgets[1:], values[1:], strict=True), strict=False
    ):
        if at <= c1:
            share = math.log(at / c0) / math.log(c1 / c0)
            return v0 * (v1 / v0) ** share
    return values[-1]


def _step_flops(params: float, share: float) -> float:
    """One step of a model of that size and share at the printed batch, by Equation 1."""
    request = CellRequest(batch_sequences=1, share=share, steps=int(15 * params / 256), data_ratio=15.0)
    cell = solve(request, TYPICAL_INPUTS)
    at_batch = cell_of(cell.model, batch_sequences=_BATCH, steps=1)
    return at_batch.flops_per_step * params / at_batch.params


def compare_with_published(ours: Mapping[str, Quantity], published: Mapping[str, Quantity]) -> tuple[Difference, ...]:
    """Knobs that both sets of laws decide, where they differ by more than a quarter or beyond our interval."""
    rows = []
    for name, mine in ours.items():
        theirs = published.get(name)
        if theirs is None or mine.source != "this study" or not mine.value or not theirs.value:
            continue
        ratio = mine.value / theirs.value
        inside = None
        if mine.low is not None and mine.high is not None:
            inside = mine.low <= theirs.value <= mine.high
        if inside is False or not 1 / _DIFFERENT <= ratio <= _DIFFERENT:
            rows.append(Difference(knob=name, ours=mine.value, published=theirs.value, ratio=ratio, inside=inside))
    return tuple(rows)
