"""Each knob of a recipe from the laws: the user's own where they are identified, then the published, then a rule.

Letters: C nominal FLOPs of stage 1, N params, s embedder_share, B batch_sequences, K num_negatives.
"""

import math
from collections.abc import Sequence

import numpy as np

from habitus.laws import NO_TREND, predict_power_law, published_laws, trend
from habitus.sizing import ladder_batch_sequences
from habitus.store import AXES, Law, LawEntry, Laws, Quantity, QuantitySource, direction_of, regime_twins

_PUBLISHED_SHARE = 0.02  # the printed recipe's
RATE_AT_512 = 2e-3  # the printed rule, 2e-3·√(B/512)
_USEFUL = 10.0  # high end over low end of a size; beyond it another metric's law is asked


class SourcedLaws:
    """One set of laws with the name of its source."""

    def __init__(self, file: Laws, source: QuantitySource) -> None:
        self.file, self.source = file, source

    def entries(self, name: str, metrics: Sequence[str]) -> list[LawEntry]:
        """The entries of that name for the first of the metrics that has any."""
        for metric in metrics:
            entries = [e for e in self.file.entries if e.name == name and e.metric == metric]
            if entries:
                return sorted(entries, key=lambda e: e.budget or 0.0)
        return []

    def first_ok(self, name: str, metrics: Sequence[str], value: str) -> list[LawEntry]:
        """As `entries`, but only those that are ok and hold `value`; the next metric where none is."""
        for metric in metrics:
            entries = [e for e in self.entries(name, [metric]) if e.law.ok and value in e.law.values]
            if entries:
                return entries
        return []


def laws_by_source(user: Laws | None) -> list[SourcedLaws]:
    """The user's laws first, then the published ones."""
    published = SourcedLaws(published_laws(), "published")
    return [published] if user is None else [SourcedLaws(user, "this study"), published]


def stage1_metrics(metric: str) -> list[str]:
    """Where stage 1's laws of a metric are looked for: itself, its other regime, then the loss."""
    return list(dict.fromkeys([*regime_twins(metric), "batch/loss"]))


def stage2_metrics(metric: str) -> list[str]:
    """Stage 2 is judged against the catalogue only."""
    bare = metric.partition("/")[2]
    return list(dict.fromkeys([f"catalogue/{bare}", "catalogue/loss", "catalogue/recall@10"]))


def size(C: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """N*(C): the size law; else the largest budget's optimum carried on by the published exponent."""
    published = published_laws().find("size_law", "batch/loss")
    for laws in sources:
        entry = _size_entry(C, metric, laws)
        if entry is not None:
            value, low, high = predict_power_law(entry.law, C)
            how = _describe_law("size law", entry)
            return _quantity(value, low, high, laws.source, how, entry.law)
        carried = _carried_optimum(C, metric, laws, float(published["exponent"]))
        if carried is not None:
            return carried
    raise AssertionError("the published laws always give a size")


def _size_entry(C: float, metric: str, laws: SourcedLaws) -> LawEntry | None:
    """The size law to use: of the first metric whose interval at C says anything; else of the first that has one.

    Three budgets can give a law of status ok whose interval spans decades; the loss, which is measured more
    sharply, then decides in the place of a ranking metric.
    """
    entries = []
    for name in stage1_metrics(metric):
        entries += [e for e in laws.first_ok("size_law", [name], "coefficient") if e.law.points]
    for entry in entries:
        _, low, high = predict_power_law(entry.law, C)
        if high <= _USEFUL * low:
            return entry
    return entries[0] if entries else None


def _carried_optimum(C: float, metric: str, laws: SourcedLaws, exponent: float) -> Quantity | None:
    """One optimum (or, with none inside, the best cell of the largest budget) and the published exponent."""
    optima = laws.first_ok("size_optimum", stage1_metrics(metric), "x_opt")
    if optima:
        entry = optima[-1]
        assert entry.budget is not None
        scale = (C / entry.budget) ** exponent
        low, high = entry.law.interval("x_opt")
        how = f"optimum of {entry.metric} at {entry.budget:.3g}, carried on by the published exponent {exponent:.3f}"
        return _quantity(scale * entry.law["x_opt"], scale * low, scale * high, laws.source, how, entry.law)
    best = _best_cell(laws.file, stage1_metrics(metric), "allocation")
    if best is None:
        return None
    ranked_by, budget, params, swept = best
    scale = (C / budget) ** exponent
    how = f"best cell by {ranked_by} at {budget:.3g}; no interior optimum, so only the swept range bounds it"
    return _quantity(scale * params, scale * swept[0], scale * swept[1], laws.source, how)


def _best_cell(laws: Laws, metrics: Sequence[str], axis: str) -> tuple[str, float, float, tuple[float, float]] | None:
    """(metric, budget, knob of the best chosen run, swept range) of an axis's largest budget."""
    knob = AXES[axis].knob
    for metric in metrics:
        runs = [r for r in laws.runs if r.axis == axis and r.chosen and metric in r.metrics and knob in r.knobs]
        if runs:
            budget = max(r.budget for r in runs)
            at = [r for r in runs if r.budget == budget]
            sign = 1 if direction_of(metric) == "min" else -1
            best = min(at, key=lambda r: sign * r.metrics[metric])
            knobs = [r.knobs[knob] for r in at]
            return metric, budget, best.knobs[knob], (min(knobs), max(knobs))
    return None


def share(C: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """s*: the share law; else the optimum of the nearest budget; else the best cell; else the printed 2%."""
    for laws in sources:
        metrics = stage1_metrics(metric)
        for entry in laws.first_ok("share_law", metrics, "coefficient"):
            if entry.law.points:
                value, low, high = predict_power_law(entry.law, C)
                if 0.001 < value < 0.5:
                    how = _describe_law("share law", entry)
                    return _quantity(value, low, min(high, 1.0), laws.source, how, entry.law)
        optima = laws.first_ok("share_optimum", metrics, "x_opt")
        if laws.source == "published":
            shares = [float(e.law["x_opt"]) for e in optima]
            how = f"the printed recipe; printed optima of {optima[0].metric} at {len(shares)} budgets give the range"
            return _quantity(_PUBLISHED_SHARE, min(shares), max(shares), "published", how)
        if optima:
            entry = min(optima, key=lambda e: abs(math.log((e.budget or C) / C)))
            low, high = entry.law.interval("x_opt")
            how = f"optimum of {entry.metric} at {entry.budget:.3g}"
            return _quantity(float(entry.law["x_opt"]), low, high, laws.source, how, entry.law)
        best = _best_cell(laws.file, metrics, "share")
        if best is not None:
            ranked_by, budget, value, swept = best
            how = f"best cell by {ranked_by} at {budget:.3g}; no interior optimum, so only the swept range bounds it"
            return _quantity(value, swept[0], swept[1], laws.source, how)
    return Quantity(value=_PUBLISHED_SHARE, source="default", how="the printed recipe")


def batch(C: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """B near the metric's critical batch, as a power of two; the ladder where a study has none."""
    for laws in sources:
        entries = laws.first_ok("critical_batch", stage1_metrics(metric), "b_crit")
        if entries:
            entry = entries[-1]
            b_crit = float(entry.law["b_crit"])
            low, high = entry.law.interval("b_crit")
            how = f"power of two nearest to B_crit {b_crit:.0f} of {entry.metric}, measured at {entry.budget:.3g}"
            nearest_power = max(1.0, 2.0 ** round(math.log2(max(b_crit, 1.0))))
            return _quantity(nearest_power, low, high, laws.source, how, entry.law)
        if laws.source == "this study":
            # A published critical batch belongs to budgets a thousand times larger than a laptop's.
            return _study_ladder(C, laws.file)
    return Quantity(value=ladder_batch_sequences(C), source="default", how="the ladder: 64 at 1e15, twice per decade")


def _study_ladder(C: float, laws: Laws) -> Quantity:
    """The batch of the study's largest budget, doubled per decade beyond it."""
    runs = [r for r in laws.runs if r.axis == "allocation" and "batch_sequences" in r.knobs]
    if not runs:
        how = "the ladder: 64 at 1e15, twice per decade; no critical batch was identified"
        return Quantity(value=ladder_batch_sequences(C), source="default", how=how)
    budget = max(r.budget for r in runs)
    base = max(r.knobs["batch_sequences"] for r in runs if r.budget == budget)
    value = max(1.0, base * 2.0 ** round(math.log10(C / budget)))
    how = f"batch {base:.0f} of the runs at {budget:.3g}, twice per decade; no critical batch was identified"
    return Quantity(value=value, source="this study", how=how)


def learning_rate(B: int, axes: Sequence[str], sources: Sequence[SourcedLaws]) -> Quantity:
    """The rate for a batch: the study's chosen rates by the √B rule, geometric mean at the largest budget."""
    for laws in sources:
        if laws.source != "this study":
            continue
        rates = _chosen_rates(laws.file, axes)
        if rates:
            scale = math.sqrt(B / 512)
            value = math.exp(float(np.mean(np.log(rates)))) * scale
            how = f"rates chosen in {len(rates)} cells of the largest budget, by the square root of the batch"
            return _quantity(value, min(rates) * scale, max(rates) * scale, "this study", how)
    value = RATE_AT_512 * math.sqrt(B / 512)
    source: QuantitySource = "published" if sources[0].source == "published" else "default"
    return Quantity(value=value, low=value / 2, high=value * 2, source=source, how="2e-3·√(B/512), as printed")


def _chosen_rates(laws: Laws, axes: Sequence[str]) -> list[float]:
    """The chosen rates of the largest budget of the first axis that has any, as rates at B = 512."""
    for axis in axes:
        runs = [r for r in laws.runs if r.axis == axis and r.chosen and "batch_sequences" in r.knobs]
        if runs:
            budget = max(r.budget for r in runs)
            return [r.learning_rate / math.sqrt(r.knobs["batch_sequences"] / 512) for r in runs if r.budget == budget]
    return []


def negatives(C2: float, metric: str, sources: Sequence[SourcedLaws]) -> Quantity:
    """K*(C) of stage 2's budget: the law; else optima; else the best cell of the study; uncapped."""
    metrics = stage2_metrics(metric)
    for laws in sources:
        for name in ("negatives_law", "negatives_shared_alpha_law"):
            for entry in laws.first_ok(name, metrics, "coefficient"):
                if entry.law.points:
                    value, low, high = predict_power_law(entry.law, C2)
                    how = _describe_law("negatives law", entry)
                    return _quantity(value, low, high, laws.source, how, entry.law)
        optima = laws.first_ok("negatives_optimum", metrics, "x_opt")
        if optima and laws.source == "published":
            counts = [float(e.law["x_opt"]) for e in optima]
            value = math.exp(float(np.mean(np.log(counts))))
            how = f"geometric mean of the printed optima of {optima[0].metric} at {len(counts)} budgets"
            return _quantity(value, min(counts), max(counts), "published", how)
        if optima:
            entry = min(optima, key=lambda e: abs(math.log((e.budget or C2) / C2)))
            low, high = entry.law.interval("x_opt")
            how = f"optimum of {entry.metric} at {entry.budget:.3g}"
            return _quantity(float(entry.law["x_opt"]), low, high, laws.source, how, entry.law)
        best = _best_cell(laws.file, metrics, "negatives")
        if best is not None:
            ranked_by, budget, value, swept = best
            how = f"best cell by {ranked_by} at {budget:.3g}; no interior optimum, so only the swept range bounds it"
            return _quantity(value, swept[0], swept[1], laws.source, how)
    return Quantity(value=0, source="default", how="no law of negatives: in-batch candidates only")


def measured_budgets(metric: str, sources: Sequence[SourcedLaws]) -> tuple[float, float] | None:
    """Smallest and largest budget at which sizes were measured: whichever law is used, and whatever it left out.

    Laws without their runs, as the published ones, have the budgets of their size laws.
    """
    laws = sources[0]
    budgets = [r.budget for r in laws.file.runs if r.axis == "allocation"] or [
        x for e in laws.entries("size_law", stage1_metrics(metric)) for x in e.law.points.get("x", ())
    ]
    return (min(budgets), max(budgets)) if budgets else None


def _describe_law(name: str, entry: LawEntry) -> str:
    """'size law of batch/loss, exponent 0.347, n = 4', and that there is no trend where its error swallows it."""
    text = f"{name} of {entry.metric}, exponent {entry.law['exponent']:.3f}, n = {entry.law.residuals.n}"
    return f"{text}: {NO_TREND}" if trend(entry.law) == "none" else text


def _quantity(
    value: float, low: float, high: float, source: QuantitySource, how: str, law: Law | None = None
) -> Quantity:
    return Quantity(
        value=value,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        source=source,
        how=how,
        doubts=() if law is None else law.warnings,
    )
