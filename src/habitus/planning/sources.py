"""Where a plan's numbers come from: the user's laws before the published ones, and whose metric's laws are asked."""

import math
from collections.abc import Sequence
from typing import Any

from habitus.laws import is_loss, published_laws
from habitus.store import Law, LawEntry, Laws, Quantity, QuantitySource, regime_twins

LOSS = "batch/loss"
RECIPE_SURFACE = "recipe_surface"  # the law of cells that are spread over all knobs, and its roll-outs


class SourcedLaws:
    """One set of laws with the name of its source."""

    def __init__(self, file: Laws, source: QuantitySource) -> None:
        self.file, self.source = file, source
        self.kept: dict[tuple[float, str], Any] = {}  # what takes a while and is asked again, by budget and metric

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
    return list(dict.fromkeys([*regime_twins(metric), LOSS]))


def stage2_metrics(metric: str) -> list[str]:
    """Stage 2 is judged against the catalogue only."""
    bare = metric.partition("/")[2]
    return list(dict.fromkeys([f"catalogue/{bare}", "catalogue/loss", "catalogue/recall@10"]))


def size_metrics(metric: str, laws: SourcedLaws, axis: str = "allocation") -> list[str]:
    """Whose optimum N is taken from: the loss's, which is measured sharply, unless a test over users shows that the
    metric has another one; then the metric's own. `axis` has the cells of that test."""
    own = stage1_metrics(metric)
    another = any(e.law.ok for e in laws.entries("size_test", [metric]) if e.axis == axis)
    if laws.source == "published" or another or is_loss(metric):
        return own
    return list(dict.fromkeys([LOSS, *own]))


def quantity_of(
    value: float, low: float, high: float, source: QuantitySource, how: str, law: Law | None = None
) -> Quantity:
    """A number with its interval, whose infinite ends are open, and what its law warns of."""
    return Quantity(
        value=value,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        source=source,
        how=how,
        doubts=() if law is None else law.warnings,
    )


def swept(value: float, low: float, high: float, source: QuantitySource, how: str) -> Quantity:
    """A number between the ends of what was tried or printed, which is no confidence interval."""
    return quantity_of(value, low, high, source, how).model_copy(update={"range": "tried"})


def assumed(
    value: float, low: float, high: float, source: QuantitySource, how: str, law: Law | None = None
) -> Quantity:
    """A number whose interval was measured elsewhere, at another budget say, and is taken over by a rule."""
    return quantity_of(value, low, high, source, how, law).model_copy(update={"range": "assumed"})


def power_of_two(B: Quantity) -> Quantity:
    """The nearest power of two; the interval holds it too."""
    value = max(1.0, 2.0 ** round(math.log2(max(B.value, 1.0))))
    low = None if B.low is None else min(B.low, value)
    high = None if B.high is None else max(B.high, value)
    return B.model_copy(update={"value": value, "low": low, "high": high})
