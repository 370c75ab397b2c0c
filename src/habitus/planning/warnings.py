"""What a plan warns of: how far it extrapolates, what its laws warn of, what the data and the GPU cannot hold."""

from collections.abc import Mapping, Sequence

from habitus.planning.facts import DatasetProfile
from habitus.planning.hardware import RateRange
from habitus.planning.sources import SourcedLaws, stage1_metrics
from habitus.recipe import OPTIMIZERS
from habitus.sizing import Cell
from habitus.store import Extrapolation, MemoryEstimate, Prediction, PrintedRecipe, Quantity

_TRUSTED = 1000.0


def reach_warnings(reach: Extrapolation | None) -> list[str]:
    """How far beyond, or below, the measured budgets the plan is."""
    if reach is None:
        return []
    if reach.factor > 1.01:
        far = " That is farther than any law should be trusted." if reach.factor > _TRUSTED else ""
        return [
            f"extrapolates: stage 1's {reach.budget:.3g} FLOPs are {reach.factor:,.1f} times the largest measured "
            f"budget, {reach.largest:.3g}.{far}"
        ]
    if reach.budget < 0.99 * reach.smallest:
        return [
            f"extrapolates downwards: {reach.budget:.3g} FLOPs are {reach.smallest / reach.budget:,.1f} times less "
            f"than the smallest measured budget, {reach.smallest:.3g}"
        ]
    return []


def law_warnings(metric: str, sources: Sequence[SourcedLaws]) -> list[str]:
    """Roll-outs that missed and approaches that disagree, for the metric and for the training loss."""
    laws = sources[0]
    names = {*stage1_metrics(metric), "train/loss"}
    lines = []
    for item in laws.file.rollouts:
        if item.metric in names:
            lines += [f"{item.name} of {item.metric}: {w}" for w in item.rollout.warnings if "misses" in w]
    for entry in laws.file.entries:
        if entry.name == "both_approaches" and entry.metric in names and entry.law.status == "disagree":
            lines += [f"{entry.metric}: {w}" for w in entry.law.warnings]
    if laws.source == "published":
        loss = laws.file.find("critical_batch", "batch/loss", 1e17)
        lines += [f"critical batch of the loss: {w}" for w in loss.warnings]
    stated = laws.file.definitions.get("optimizer")
    if laws.source == "this study" and stated not in OPTIMIZERS:
        lines.append(f"the laws' optimizer is {stated or 'not stated'}; the recipe takes adamw")
    return lines


def quantity_warnings(quantities: Mapping[str, Quantity], sources: Sequence[SourcedLaws]) -> list[str]:
    """What the laws used warn of, and knobs for which the study has no answer."""
    lines = []
    for name, quantity in quantities.items():
        lines += [f"{name}: {doubt}" for doubt in quantity.doubts if not doubt.startswith("n = ")]
    if sources[0].source == "this study":
        borrowed = [name for name, quantity in quantities.items() if quantity.source == "published"]
        if borrowed:
            lines.append(f"this study does not identify {', '.join(borrowed)}: the published laws stand in")
    return lines


def data_warnings(cell: Cell, dataset: DatasetProfile) -> list[str]:
    """More slots than the dataset has means more than one pass."""
    if not dataset.train_slots or dataset.train_slots >= cell.slots_seen:
        return []
    passes = cell.slots_seen / dataset.train_slots
    return [
        f"the dataset holds {dataset.train_slots:,} training slots and stage 1 sees {cell.slots_seen:,}: "
        f"{passes:.1f} passes. The laws are of one pass; repeated events teach less"
    ]


def window_warnings(measured: int, planned: int, predictions: Sequence[Prediction]) -> list[str]:
    """Windows of another length have other queries than those that predictions are about."""
    if measured == planned or not predictions:
        return []
    return [
        f"predictions are those of windows of {measured:,} events, as the laws' runs had; in windows of {planned:,} "
        "queries have other histories"
    ]


def hardware_warnings(memory: Sequence[MemoryEstimate], rate: RateRange | None) -> list[str]:
    """Stages that do not fit, and hours that nobody measured."""
    lines = [f"stage {m.stage} does not fit {m.device}: {m.change}" for m in memory if m.fits is False]
    if rate is not None and not rate.measured:
        lines.append(f"hours are estimated: {rate.how}")
    return lines


def prediction_warnings(metric: str, predictions: Sequence[Prediction], sources: Sequence[SourcedLaws]) -> list[str]:
    """A metric whose height the paper prints no law of; what a study's laws leave out, they say themselves."""
    if sources[0].source != "published" or any(prediction.metric == metric for prediction in predictions):
        return []
    return [f"{metric} is not predicted: the paper prints no law of its height"]


def paper_warnings(printed: PrintedRecipe | None, flops: float) -> list[str]:
    """The printed D/N is no promise about the budget."""
    if printed is None:
        return []
    return [
        f"the paper's D/N = {printed.data_ratio_6nd:.0f} is D = C/(6N), not what a budget buys: with the printed "
        f"batch of {printed.batch_sequences} Equation 1 charges {printed.times_budget:.1f} times {flops:.3g} FLOPs"
    ]
