"""How long windows should be, and how much of a history to serve with: where the study swept the context axis."""

import math
from collections.abc import Sequence
from dataclasses import replace

from habitus.laws import describe_history, predict_power_law, served_history
from habitus.planning.shape import FixedSettings
from habitus.planning.sources import SourcedLaws, assumed, quantity_of, stage2_metrics
from habitus.store import Quantity


def context_quantities(C: float, metric: str, sources: Sequence[SourcedLaws]) -> dict[str, Quantity]:
    """`seq_len` of the training windows and `serve_history`, each only where runs identify it."""
    laws = sources[0]
    metrics = stage2_metrics(metric)
    swept = sorted({r.knobs["seq_len"] for r in laws.file.runs if r.axis == "context" and "seq_len" in r.knobs})
    if laws.source != "this study" or not swept:
        return {}
    quantities = {}
    length = _length(C, metrics, laws)
    if length is not None:
        nearest = min(swept, key=lambda n: abs(math.log(n / length.value)))
        how = f"{length.how}; the nearest of those that were run"
        quantities["seq_len"] = length.model_copy(update={"value": nearest, "how": how})
    gains = laws.entries("context_gain", metrics)
    gain = gains[-1] if gains else None
    served = None if gain is None or not gain.law.values else served_history(gain.law)
    if gain is not None and served is not None:
        low, high = gain.law.interval("x_opt")
        window, doubts = gain.law.details["seq_len"], list(gain.law.warnings)
        if "seq_len" in quantities and quantities["seq_len"].value != window:
            doubts.append(f"measured with windows of {window:,}, where the plan has {quantities['seq_len'].value:,.0f}")
        quantities["serve_history"] = Quantity(
            value=served,
            low=min(low, served),
            high=max(high, served),
            source=laws.source,
            how=f"{describe_history(gain.law, gain.metric)}, measured at {gain.budget:.3g}",
            doubts=tuple(doubts),
            range="assumed",
        )
    return quantities


def _length(C: float, metrics: Sequence[str], laws: SourcedLaws) -> Quantity | None:
    """L*(C) of the law, or of the nearest budget with an interior optimum."""
    for entry in laws.first_ok("context_law", metrics, "coefficient"):
        if entry.law.points:
            value, low, high = predict_power_law(entry.law, C)
            how = f"window law of {entry.metric}, exponent {entry.law['exponent']:.3f}, n = {entry.law.residuals.n}"
            return quantity_of(value, low, high, laws.source, how)
    optima = laws.first_ok("context_optimum", metrics, "x_opt")
    if not optima:
        return None
    entry = min(optima, key=lambda e: abs(math.log((e.budget or C) / C)))
    low, high = entry.law.interval("x_opt")
    how = f"optimum of {entry.metric} at {entry.budget:.3g}"
    return assumed(float(entry.law["x_opt"]), low, high, laws.source, how)


def with_windows(
    fixed: FixedSettings, quantities: dict[str, Quantity], metric: str, sources: Sequence[SourcedLaws]
) -> FixedSettings:
    """The settings with windows of the planned length; a batch keeps its slots, so that it has fewer longer ones.

    The planned run measures shorter histories too, as those of the axis did, so that whoever serves it knows.
    """
    if quantities:
        gains = [e.law for e in sources[0].entries("context_gain", stage2_metrics(metric)) if e.law.points]
        histories = {int(length) for law in gains for length in law.points["history"]}
        fixed = replace(fixed, contexts=tuple(sorted(histories)))
    if "seq_len" not in quantities:
        return fixed
    seq_len = int(quantities["seq_len"].value)
    scale = fixed.dataset.seq_len / seq_len
    return replace(fixed, dataset=replace(fixed.dataset, seq_len=seq_len), batch_scale=scale)
