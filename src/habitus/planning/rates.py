"""The learning rate of a planned run: the best one of its size, the rule of the runs, or the rates that they chose."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from habitus.laws import rate_of_runs
from habitus.planning.sources import LOSS, SourcedLaws, quantity_of, stage1_metrics, swept
from habitus.planning.surface_plan import surface_recipe
from habitus.sizing import Cell
from habitus.store import STUDY_RECIPE, Law, Laws, Quantity, QuantitySource

RATE_AT_512 = 2e-3  # the printed rule, 2e-3·√(B/512)
_KNOBS_OF_RULE = ("embedder_params", "contextualizer_params", "slots_seen", "steps", "batch_sequences")


def stage1_rate(C: float, cell: Cell, batch: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """The best rate of the cell by one law over the recipe; the rule of runs whose rates follow one; else as below.

    `batch` is in windows of the laws' runs. What another rate than the rule's is worth such runs do not say.
    """
    embedder, contextualizer = cell.embedder_params, cell.params - cell.embedder_params
    if (whole := surface_recipe(C, metric, sources[0])) is not None:
        return whole.rate(embedder, contextualizer, batch)
    knobs = (embedder, contextualizer, cell.slots_seen, cell.steps, batch)
    row = {name: [float(value)] for name, value in zip(_KNOBS_OF_RULE, knobs, strict=True)}
    for entry in sources[0].entries(STUDY_RECIPE, [LOSS, *stage1_metrics(metric)]):
        rate = rate_of_runs(entry.law, row) if entry.law.points else None
        if rate is not None:
            how = f"the rule of all {entry.law.residuals.n} runs over their other knobs, at the planned recipe"
            return quantity_of(rate * math.sqrt(batch / 512), -math.inf, math.inf, "this study", how)
    return learning_rate(round(batch), ("allocation", "share"), sources, C, cell.params)


def learning_rate(
    B: int,
    axes: Sequence[str],
    sources: Sequence[SourcedLaws],
    C: float | None = None,
    N: float | None = None,
) -> Quantity:
    """The study's rule: the best rate of a run of N at C where rates were compared; else the rates chosen at its
    budgets, and how they moved with the budget. Both by the √B rule."""
    for laws in sources:
        if laws.source != "this study":
            continue
        compared = next(iter(laws.first_ok("rate_response", [LOSS], "rate_at_512")), None)
        if compared is not None and C is not None and N is not None:
            return _compared_rate(B, compared.law, C, N)
        rates = _chosen_rates(laws.file, axes)
        if rates:
            top = max(rates)
            slope = slope_in_compute({c: float(np.mean(np.log(at))) for c, at in rates.items()})
            scale = math.sqrt(B / 512) * (1.0 if C is None else (C / top) ** slope)
            value = math.exp(float(np.mean(np.log(rates[top])))) * scale
            how = f"rates chosen in {len(rates[top])} cells of the largest budget, by the square root of the batch"
            if abs(slope) > 0.005 and C is not None:
                how += f" and C^{slope:.2g}, as they moved over {len(rates)} budgets"
            return swept(value, min(rates[top]) * scale, max(rates[top]) * scale, "this study", how)
    value = RATE_AT_512 * math.sqrt(B / 512)
    source: QuantitySource = "published" if sources[0].source == "published" else "default"
    return swept(value, value / 2, value * 2, source, "2e-3·√(B/512), as printed")


def _compared_rate(B: int, law: Law, C: float, N: float) -> Quantity:
    """The best rate by the quadratic in its logarithm, carried on in size and budget."""
    about, scale = law.details, math.sqrt(B / 512)
    moved = (N / about["size"]) ** law["size_power"] * (C / about["budget"]) ** law["budget_power"]
    how = (
        f"best rate by a quadratic in log rate over {about['cells']} cells, by the square root of the batch, "
        f"N^{law['size_power']:.2g} and C^{law['budget_power']:.2g}"
    )
    low, high = (end * scale * moved for end in about["tried"])
    return swept(law["rate_at_512"] * moved * scale, low, high, "this study", how)


def _chosen_rates(laws: Laws, axes: Sequence[str]) -> dict[float, list[float]]:
    """By budget, the chosen rates of the first axis that has any, as rates at B = 512."""
    for axis in axes:
        runs = [r for r in laws.runs if r.axis == axis and r.chosen and "batch_sequences" in r.knobs]
        if runs:
            rates: dict[float, list[float]] = {}
            for r in runs:
                rates.setdefault(r.budget, []).append(r.learning_rate / math.sqrt(r.knobs["batch_sequences"] / 512))
            return rates
    return {}


def slope_in_compute(by_budget: Mapping[float, float]) -> float:
    """Of a straight line through one number per budget, in log C; zero with a single budget."""
    if len(by_budget) < 2:
        return 0.0
    return float(np.polyfit([math.log(c) for c in by_budget], list(by_budget.values()), 1)[0])
