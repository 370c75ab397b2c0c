"""The best recipe of any budget by a surface's law and the knobs of its runs, as a plan asks for it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from habitus.errors import FitError
from habitus.laws.law_builders import law_without_values
from habitus.laws.recipe_cost import slot_cost
from habitus.laws.recipe_form import COLUMNS, FORM
from habitus.laws.recipe_optimum import recipe_optimum
from habitus.laws.recipe_surface import centred_logs, fitted_surfaces
from habitus.laws.told_knobs import why_untold
from habitus.store import Law

_WHOLE_PASS = 0.98  # of its slots
_COST_COLUMNS = ("embedder_params", "contextualizer_params", "slots_seen", "batch_sequences", "joint_dim", "seq_len")


def best_recipe(law: Law, knobs: Sequence[Mapping[str, float]], compute: float) -> Law:
    """Size, share, batch, rate and slots of a budget with intervals that move together, at most one pass.

    Refused where the runs' cost is not Equation 1's, and where the best recipe lies where runs tell nothing.
    """
    rows = [row for row in knobs if {*_COST_COLUMNS, "flops_nominal"} <= row.keys()]
    table = {name: np.array([row[name] for row in rows], float) for name in _COST_COLUMNS}
    passes = [row["slots_seen"] / row["epochs"] for row in rows if row.get("epochs")]
    try:
        cost = slot_cost({**table, "compute": [row["flops_nominal"] for row in rows]})
    except FitError as error:
        return law_without_values("recipe_optimum", FORM, "not_identified", law.residuals.n, error.problem)
    best = recipe_optimum(law, compute, cost, float(np.median(passes)) if passes else math.inf)
    N, s, B, D = (best[name] for name in ("params", "share", "batch", "slots"))
    told = (s * N, (1 - s) * N, D, D / (B * cost.seq_len), B, best["rate"])
    if passes and _WHOLE_PASS * np.median(passes) < D:
        best = best.with_warnings(
            f"the best recipe spends the whole pass, {np.median(passes):,.0f} slots: the log has ended, and all that "
            "is added goes into the model"
        )
    if why := why_untold(law, {name: [value] for name, value in zip(COLUMNS, told, strict=True)}):
        return best.model_copy(update={"status": "not_identified", "warnings": (f"the law {why}",)})
    return best


def best_rate(law: Law, embedder_params: float, contextualizer_params: float) -> tuple[float, float, float]:
    """The best learning rate of a size at 512 windows per step, and its 95% interval."""
    u = centred_logs(law, np.log([[embedder_params, contextualizer_params, 1.0, 1.0, 1.0, 1.0]]))
    rates = np.exp(fitted_surfaces(law).best_rate(u)[:, 0] - u[0, 5])
    low, high = np.quantile(rates[1:], [0.025, 0.975])
    return float(rates[0]), float(min(low, rates[0])), float(max(high, rates[0]))
