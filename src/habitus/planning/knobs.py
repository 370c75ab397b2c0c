"""Each knob of a recipe from the laws: the user's own where they are identified, then the published, then a rule.

Letters: C nominal FLOPs of stage 1, N params, s embedder_share, B batch_sequences, K num_negatives.
"""

import math
from collections.abc import Sequence

import numpy as np

from habitus.laws import NO_TREND, predict_power_law, published_laws, trend
from habitus.planning.measured import SIZED_AXES, best_cell
from habitus.planning.rates import slope_in_compute
from habitus.planning.sources import (
    LOSS,
    SourcedLaws,
    assumed,
    power_of_two,
    quantity_of,
    size_metrics,
    stage1_metrics,
    stage2_metrics,
    swept,
)
from habitus.planning.surface_plan import surface_recipe
from habitus.sizing import ladder_batch_sequences
from habitus.store import AXES, LawEntry, Laws, Quantity, RunRow

_PUBLISHED_SHARE = 0.02  # the printed recipe's
_USEFUL = 10.0  # high end over low end of a size; beyond it another metric's law is asked
LADDER_EXPONENT = math.log10(2)  # of the batch over compute: twice per decade


def size(C: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """N*(C): by one law over the recipe where the store has one; else by the size law; else the largest budget's
    optimum carried on by the published exponent."""
    published = published_laws().find("size_law", LOSS)
    for laws in sources:
        if (whole := surface_recipe(C, metric, laws)) is not None:
            return whole.quantities["params"]
        metrics = size_metrics(metric, laws)
        entry = _size_entry(C, metrics, laws)
        if entry is not None:
            value, low, high = predict_power_law(entry.law, C)
            how = _describe_law("size law", entry)
            return quantity_of(value, low, high, laws.source, how, entry.law)
        carried = _carried_optimum(C, metrics, laws, float(published["exponent"]))
        if carried is not None:
            return carried
    raise AssertionError("the published laws always give a size")


def _size_entry(C: float, metrics: Sequence[str], laws: SourcedLaws) -> LawEntry | None:
    """The size law to use: of the first metric whose interval at C says anything; else of the first that has one.

    Three budgets can give a law of status ok whose interval spans decades.
    """
    entries = []
    for name in metrics:
        entries += [e for e in laws.first_ok("size_law", [name], "coefficient") if e.law.points]
    for entry in entries:
        _, low, high = predict_power_law(entry.law, C)
        if high <= _USEFUL * low:
            return entry
    return entries[0] if entries else None


def _carried_optimum(C: float, metrics: Sequence[str], laws: SourcedLaws, exponent: float) -> Quantity | None:
    """One optimum (or, with none inside, the best cell of the largest budget) and the published exponent."""
    optima = laws.first_ok("size_optimum", metrics, "x_opt")
    if optima:
        entry = optima[-1]
        assert entry.budget is not None
        scale = (C / entry.budget) ** exponent
        low, high = entry.law.interval("x_opt")
        how = f"optimum of {entry.metric} at {entry.budget:.3g}, carried on by the published exponent {exponent:.3f}"
        return assumed(scale * entry.law["x_opt"], scale * low, scale * high, laws.source, how, entry.law)
    best = _best_cell(laws.file, metrics, "allocation")
    if best is None:
        return None
    ranked_by, budget, params, tried = best
    scale = (C / budget) ** exponent
    how = f"best cell by {ranked_by} at {budget:.3g}; no interior optimum, so only the swept range bounds it"
    return swept(scale * params, scale * tried[0], scale * tried[1], laws.source, how)


def _best_cell(laws: Laws, metrics: Sequence[str], axis: str) -> tuple[str, float, float, tuple[float, float]] | None:
    """(metric, budget, knob of the best cell at its chosen rate, swept range) of an axis's largest budget."""
    knob = AXES[axis].knob
    for metric in metrics:
        runs = [r for r in laws.runs if r.axis == axis and r.chosen and metric in r.metrics and knob in r.knobs]
        if runs:
            budget = max(r.budget for r in runs)
            at = [r for r in runs if r.budget == budget]
            knobs = [r.knobs[knob] for r in at]
            return metric, budget, best_cell(at, metric).knobs[knob], (min(knobs), max(knobs))
    return None


def share(C: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """s: by one law over the recipe where the store has one; else that of the runs whose sizes were compared, since N*
    belongs to it; without such runs the share law, the optimum of the nearest budget, the best cell; else the printed
    2%."""
    for laws in sources:
        if (whole := surface_recipe(C, metric, laws)) is not None:
            return whole.quantities["embedder_share"]
        metrics = stage1_metrics(metric)
        compared = _compared_share(laws)
        if compared is not None:
            return compared
        for entry in laws.first_ok("share_law", metrics, "coefficient"):
            if entry.law.points:
                value, low, high = predict_power_law(entry.law, C)
                if 0.001 < value < 0.5:
                    how = _describe_law("share law", entry)
                    return quantity_of(value, low, min(high, 1.0), laws.source, how, entry.law)
        optima = laws.first_ok("share_optimum", metrics, "x_opt")
        if laws.source == "published":
            shares = [float(e.law["x_opt"]) for e in optima]
            how = f"the printed recipe; printed optima of {optima[0].metric} at {len(shares)} budgets give the range"
            return swept(_PUBLISHED_SHARE, min(shares), max(shares), "published", how)
        if optima:
            entry = min(optima, key=lambda e: abs(math.log((e.budget or C) / C)))
            low, high = entry.law.interval("x_opt")
            how = f"optimum of {entry.metric} at {entry.budget:.3g}"
            return assumed(float(entry.law["x_opt"]), low, high, laws.source, how, entry.law)
        best = _best_cell(laws.file, metrics, "share")
        if best is not None:
            ranked_by, budget, value, tried = best
            how = f"best cell by {ranked_by} at {budget:.3g}; no interior optimum, so only the swept range bounds it"
            return swept(value, tried[0], tried[1], laws.source, how)
    return Quantity(value=_PUBLISHED_SHARE, source="default", how="the printed recipe")


def _compared_share(laws: SourcedLaws) -> Quantity | None:
    """The share of the largest budget's allocation runs; its interval is what the share sweep says of that budget."""
    runs = [r for r in laws.file.runs if r.axis == "allocation" and r.chosen and "embedder_share" in r.knobs]
    if not runs:
        return None
    budget = max(r.budget for r in runs)
    value = math.exp(float(np.mean([math.log(r.knobs["embedder_share"]) for r in runs if r.budget == budget])))
    how = f"the share of the runs at {budget:.3g} whose sizes were compared"
    optima = laws.first_ok("share_optimum", [LOSS], "x_opt")
    if not optima:
        return Quantity(value=value, source=laws.source, how=f"{how}; no interior optimum of the share bounds it")
    nearest = min(optima, key=lambda e: abs(math.log((e.budget or budget) / budget)))
    low, high = nearest.law.interval("x_opt")
    how = f"{how}; the optimum of {LOSS} at {nearest.budget:.3g} gives the interval"
    return assumed(value, min(low, value), max(high, value), laws.source, how, nearest.law)


def batch(C: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """B by one law over the recipe where the store has one; else B* at equal compute where batch sizes were compared;
    else B as the runs had it, so that sizes and predictions hold for it, and at most the critical batch; the ladder
    where nothing was measured."""
    laws = sources[0]
    if (whole := surface_recipe(C, metric, laws)) is not None:
        return whole.quantities["batch_sequences"]
    if laws.source == "this study":
        best = _best_batch(C, metric, laws)
        if best is not None:
            return best
        # A published critical batch belongs to budgets a thousand times larger than a laptop's.
        B = study_batch(C, laws.file)
        entries = laws.first_ok("critical_batch", stage1_metrics(metric), "b_crit")
        if not entries:
            return B.model_copy(update={"how": f"{B.how}; no critical batch was identified"})
        entry = entries[-1]
        b_crit = float(entry.law["b_crit"])
        low, high = entry.law.interval("b_crit")
        at_most = max(1.0, 2.0 ** round(math.log2(max(b_crit, 1.0))))
        found = f"B_crit {b_crit:.0f} of {entry.metric}, measured at {entry.budget:.3g}"
        how = f"{B.how}; below {found}" if B.value <= at_most else f"power of two nearest to {found}"
        return assumed(min(B.value, at_most), -math.inf, high, B.source, how, entry.law)
    entries = laws.first_ok("critical_batch", stage1_metrics(metric), "b_crit")
    if entries:
        entry = entries[-1]
        b_crit = float(entry.law["b_crit"])
        low, high = entry.law.interval("b_crit")
        how = f"power of two nearest to B_crit {b_crit:.0f} of {entry.metric}, measured at {entry.budget:.3g}"
        return assumed(max(1.0, 2.0 ** round(math.log2(b_crit))), low, high, laws.source, how, entry.law)
    return Quantity(value=ladder_batch_sequences(C), source="default", how="the ladder: 64 at 1e15, twice per decade")


def _best_batch(C: float, metric: str, laws: SourcedLaws) -> Quantity | None:
    """B*(C) of the metric, else of the loss in its regime, else as for sizes; the nearest power of two.

    Where the law's interval says nothing, the optimum of the largest budget goes on as the ladder does.
    """
    regime, beyond = metric.partition("/")[0], ""
    for name in dict.fromkeys([metric, f"{regime}/loss", *stage1_metrics(metric)]):
        beyond = beyond or _only_improves(name, laws)
        for entry in laws.first_ok("batch_size_law", [name], "coefficient"):
            value, low, high = predict_power_law(entry.law, C)
            if entry.law.points and high <= _USEFUL * low:
                how = f"{_describe_law('B* law at equal compute', entry)}; the nearest power of two{beyond}"
                return power_of_two(quantity_of(value, low, high, laws.source, how, entry.law))
        optima = laws.first_ok("batch_size_optimum", [name], "x_opt")
        if optima:
            entry = optima[-1]
            assert entry.budget is not None
            scale = (C / entry.budget) ** LADDER_EXPONENT
            low, high = entry.law.interval("x_opt")
            B = float(entry.law["x_opt"])
            how = (
                f"B* {B:.0f} of {name} at {entry.budget:.3g} and equal compute, carried on as C^{LADDER_EXPONENT:.2f}, "
                f"as the ladder; the nearest power of two{beyond}"
            )
            return power_of_two(assumed(scale * B, scale * low, scale * high, laws.source, how, entry.law))
    return None


def _only_improves(metric: str, laws: SourcedLaws) -> str:
    """What is to be said of a metric that was best at an end of the batch sizes, where another one decides."""
    entries = laws.entries("batch_size_optimum", [metric])
    if not entries or entries[-1].law.status not in ("monotone", "boundary") or not entries[-1].law.points:
        return ""
    best, sizes = entries[-1].law.details["best_on_grid"], entries[-1].law.points["x"]
    side = "or more" if best > math.sqrt(min(sizes) * max(sizes)) else "or less"
    return f"; {metric} by itself wants {best:g} {side} at {entries[-1].budget:.3g}, an end of what was tried"


def study_batch(C: float, laws: Laws) -> Quantity:
    """The batch of the study's runs, carried on as it grew over their budgets."""
    by_budget = {r.budget: r.knobs["batch_sequences"] for r in laws.runs if _is_sized(r)}
    if not by_budget:
        return Quantity(
            value=ladder_batch_sequences(C), source="default", how="the ladder: 64 at 1e15, twice per decade"
        )
    top = max(by_budget)
    slope = slope_in_compute({c: math.log(b) for c, b in by_budget.items()})
    value = max(1.0, 2.0 ** round(math.log2(by_budget[top] * (C / top) ** slope)))
    grew = f"growing as C^{slope:.2g}, as over their budgets" if abs(slope) > 0.01 else "the same at all their budgets"
    return Quantity(
        value=value, source="this study", how=f"batch {by_budget[top]:.0f} of the runs at {top:.3g}, {grew}"
    )


def _is_sized(run: RunRow) -> bool:
    return run.axis == "allocation" and "batch_sequences" in run.knobs


def negatives(C2: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """K*(C) of stage 2's budget: the law; else optima; else the best cell of the study; uncapped."""
    metrics = stage2_metrics(metric)
    for laws in sources:
        for name in ("negatives_law", "negatives_shared_alpha_law"):
            for entry in laws.first_ok(name, metrics, "coefficient"):
                if entry.law.points:
                    value, low, high = predict_power_law(entry.law, C2)
                    how = _describe_law("negatives law", entry)
                    return quantity_of(value, low, high, laws.source, how, entry.law)
        optima = laws.first_ok("negatives_optimum", metrics, "x_opt")
        if optima and laws.source == "published":
            counts = [float(e.law["x_opt"]) for e in optima]
            value = math.exp(float(np.mean(np.log(counts))))
            how = f"geometric mean of the printed optima of {optima[0].metric} at {len(counts)} budgets"
            return swept(value, min(counts), max(counts), "published", how)
        if optima:
            entry = min(optima, key=lambda e: abs(math.log((e.budget or C2) / C2)))
            low, high = entry.law.interval("x_opt")
            how = f"optimum of {entry.metric} at {entry.budget:.3g}"
            return assumed(float(entry.law["x_opt"]), low, high, laws.source, how, entry.law)
        best = _best_cell(laws.file, metrics, "negatives")
        if best is not None:
            ranked_by, budget, value, tried = best
            how = f"best cell by {ranked_by} at {budget:.3g}; no interior optimum, so only the swept range bounds it"
            return swept(value, tried[0], tried[1], laws.source, how)
    return Quantity(value=0, source="default", how="no law of negatives: in-batch candidates only")


def measured_budgets(metric: str, sources: Sequence[SourcedLaws]) -> tuple[float, float] | None:
    """Smallest and largest budget at which sizes were measured: whichever law is used, and whatever it left out.

    Laws without their runs, as the published ones, have the budgets of their size laws, of the loss where the metric
    has none.
    """
    laws = sources[0]
    budgets = [r.budget for r in laws.file.runs if r.axis in SIZED_AXES]
    for names in (stage1_metrics(metric), [LOSS]):
        budgets = budgets or [x for e in laws.entries("size_law", names) for x in e.law.points.get("x", ())]
    return (min(budgets), max(budgets)) if budgets else None


def _describe_law(name: str, entry: LawEntry) -> str:
    """'size law of batch/loss, exponent 0.347, n = 4', and that there is no trend where its error swallows it."""
    text = f"{name} of {entry.metric}, exponent {entry.law['exponent']:.3f}, n = {entry.law.residuals.n}"
    return f"{text}: {NO_TREND}" if trend(entry.law) == "none" else text
