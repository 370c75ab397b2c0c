"""Short runs before the plan: which learning rate, and how fast this machine is."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from habitus.data import Dataset
from habitus.progress import Note
from habitus.sizing import Inputs, Parts, SpeedModel
from habitus.studies.options import StudyOptions
from habitus.studies.progress import interruption
from habitus.studies.state import StatedSpeeds
from habitus.sweeps import (
    DatasetFacts,
    PlannedRun,
    Preset,
    PriorResults,
    Store,
    SweepProgress,
    SweepResult,
    centred_shapes,
    device_kind,
    speed_of_store,
    sweep,
    usual_workers,
)

PROBES = "probes"
_RATES = (0.5, 1.0, 2.0)  # of the preset's rule; extended where the best is at an edge
_SHAPES = {"cpu": 2, "cuda": 3}  # sizes per budget; half or twice the rate costs 0.01 nats in `quick`, so two will do
_LARGE_SHAPES = 3
_STEEPEST = -0.5  # of the learning rate's exponent; the summary says where the probes asked for a steeper one
# Of the largest shapes: enough to time a step, far too few to learn anything. On a GPU workers slow each other, so that
# there must be one run for each of them, and long enough to overlap.
_LARGE_STEPS = {"cpu": 40, "cuda": 150}


@dataclass(frozen=True)
class ProbeResults:
    """What the probes say."""

    learning_rate: float  # of the rule at 512 windows and the smallest budget, replacing the preset's
    learning_rate_exponent: float  # of the budget, likewise
    summary: str
    speeds: SpeedModel
    evaluate: dict[str, float]  # seconds of one evaluation: "batch" alone, or with "catalogue"
    overhead: float  # seconds that a sweep takes beside its runs
    seconds: float  # of the probes themselves, in this call
    workers: int


def probe(
    preset: Preset,
    dataset: Dataset,
    out: Path,
    options: StudyOptions,
    progress: Callable[[SweepProgress], None],
    note: Note,
    hours_left: Callable[[], float | None],
) -> ProbeResults:
    """A few sizes × three rates at the smallest budget and at a middle one, and a few steps of the largest sizes:
    on as many workers at once as the study will have."""
    began = time.monotonic()
    common: dict[str, Any] = {
        "workers": options.workers,
        "backend": options.backend,
        "device": options.device,
        "allow_repeats": True,  # these runs are in no law
        "progress": progress,
        "note": note,
    }
    budgets = preset.budgets_of("allocation")
    smallest = min(budgets)
    middle = min(budgets, key=lambda budget: abs(math.log(budget * budget / smallest / max(budgets))))
    kind = device_kind(options.device)
    workers = options.workers or usual_workers(kind)
    large_preset, budget = _large_sizes(preset, DatasetFacts.of(dataset), kind, workers)
    results = []
    for one, at in ((_small_sizes(preset, kind), tuple(sorted({smallest, middle}))), (large_preset, (budget,))):
        results.append(
            sweep("allocation", dataset, out / PROBES, budgets=at, preset=one, max_hours=hours_left(), **common)
        )
        if not results[-1].complete:
            raise interruption(out, "probes", results[-1].stopped)
    small, large = results
    store = Store.open(out / PROBES)
    rate, exponent, summary = _best_rate(small, store, preset)
    speeds = speed_of_store(store, kind, Inputs.of(dataset.fields))
    evaluate = {"batch": _evaluation(small, store, speeds), "catalogue": _evaluation(large, store, speeds)}
    return ProbeResults(
        rate, exponent, summary, speeds, evaluate, _overhead(results), time.monotonic() - began, workers
    )


def stated_speeds(probes: ProbeResults) -> StatedSpeeds:
    """The speeds of the probes, for the study's state."""
    speeds = probes.speeds
    return StatedSpeeds(
        start=speeds.start,
        per_step=speeds.per_step,
        flops_per_second=speeds.flops_per_second,
        again=speeds.again,
        evaluate=probes.evaluate,
        source=speeds.source,
    )


def parts_of(planned: PlannedRun, speeds: StatedSpeeds) -> Parts:
    """The expected time of one run in its parts."""
    return speeds.parts(planned.recipe, planned.cell.steps, planned.cell.executed_flops)


def _evaluation(result: SweepResult, store: Store, speeds: SpeedModel) -> float:
    """Seconds of one evaluation, the median of these probes."""
    records = [store.record(run.planned.hash) for run in result.runs]
    return median([r.seconds.evaluate for r in records if r is not None and r.seconds] or [speeds.evaluate])


def _small_sizes(preset: Preset, kind: str) -> Preset:
    """The preset with a few shapes and the probe's rates on its allocation axis."""
    allocation = preset.allocation.model_copy(
        update={
            "num_shapes": _SHAPES[kind],
            "widen": 0,
            "learning_rates": _RATES,
            "regimes": ("batch",),
            "seeds": 1,
            "replicates": 1,
            "top_rates": (),
        }
    )
    return preset.model_copy(update={"allocation": allocation})


def _large_sizes(preset: Preset, facts: DatasetFacts, kind: str, workers: int) -> tuple[Preset, float]:
    """The preset with the top budget's shapes, and a budget that pays a few steps of them."""
    top = max(preset.budgets_of("allocation"))
    shapes, _ = centred_shapes(preset, PriorResults(), top, preset.common.share)
    ladder = tuple(shapes[-_LARGE_SHAPES:])
    width, depth = ladder[len(ladder) // 2]
    p = 12 * depth * width * width
    h = max(4.0, math.sqrt(preset.common.share * p / (12 * preset.common.text_depth + 2)))
    slots = preset.batch_sequences(top) * facts.seq_len
    step = 6 * slots * (p + facts.text_len * preset.common.share * p + 3 * slots * h)
    allocation = preset.allocation.model_copy(
        update={
            "ladder": ladder, "num_shapes": _LARGE_SHAPES, "widen": 0, "learning_rates": (1.0,), "extend": 0,
            "replicates": 1, "top_rates": (), "regimes": ("batch", "catalogue"),
            "seeds": 1 if kind == "cpu" else -(-workers // _LARGE_SHAPES),
        }
    )  # fmt: skip
    common = preset.common.model_copy(update={"min_steps": 2})
    budget = float(f"{min(_LARGE_STEPS[kind] * step, top):.3g}")
    # The batch is that of the top budget, whatever the probe's own budget.
    batches = ((budget, preset.batch_sequences(top)),)
    changes = {"allocation": allocation, "common": common, "batch_by_budget": batches}
    return preset.model_copy(update=changes), budget


def _best_rate(result: SweepResult, store: Store, preset: Preset) -> tuple[float, float, str]:
    """The rule's rate and its exponent: a line through the multiples that trained best, a mean over sizes each."""
    losses: dict[tuple[float, str], dict[float, float]] = {}
    for run in result.runs:
        record = store.record(run.planned.hash)
        if record is not None and record.train is not None and record.status == "done":
            row = run.planned.row
            rule = preset.rule_rate(run.planned.recipe.train.batch_sequences, row.flops_budget)
            losses.setdefault((row.flops_budget, row.cell_id), {})[row.learning_rate / rule] = record.train.loss
    best: dict[float, list[float]] = {}
    for (budget, _), by_rate in sorted(losses.items()):
        best.setdefault(budget, []).append(math.log(min(by_rate, key=lambda m: by_rate[m])))
    common, smallest = preset.common, min(preset.budgets)
    if not best:
        return common.learning_rate, common.learning_rate_exponent, "no probe finished: the preset's rate stays"
    rate, exponent, asked = rate_line(best, smallest, common.learning_rate, common.learning_rate_exponent)
    tried = ", ".join(f"{m:.2g}" for m in sorted({m for by_rate in losses.values() for m in by_rate}))
    budgets = " and ".join(f"{budget:.3g}" for budget in best)
    budget_factor = f"·(C/{smallest:.3g})^{exponent:g}" if exponent else ""
    summary = (
        f"learning rate {rate:g}·√(B/512){budget_factor}, by the best of {tried} times the preset's for "
        f"{len(losses)} cells at {budgets} FLOPs"
    )
    if round(asked, 2) != exponent:
        summary += f"; the probes ask for an exponent of {asked:.2f}, which is held at {exponent:g}"
    return rate, exponent, summary


def rate_line(
    best: Mapping[float, Sequence[float]], smallest: float, rate: float, exponent: float
) -> tuple[float, float, float]:
    """The rate at the smallest budget, its exponent within bounds and as asked for, out of ln of the best multiples of
    the old ones by budget."""
    levels = {math.log(budget / smallest): sum(logs) / len(logs) for budget, logs in best.items()}
    (first, low), (last, high) = min(levels.items()), max(levels.items())
    slope = (high - low) / (last - first) if last > first else 0.0
    # Rates fall with the length of a run. A rise, or a steep fall, is the noise of three rates and three sizes.
    bounded = min(max(exponent + slope, _STEEPEST), 0.0)
    level = (low + high) / 2 - (bounded - exponent) * (first + last) / 2
    return float(f"{rate * math.exp(level):.2g}"), round(bounded, 2), exponent + slope


def _overhead(results: list[SweepResult]) -> float:
    """Seconds of a sweep call that no run accounts for; of the calls that ran something."""
    overheads = []
    for result in results:
        if result.counts.get("published"):
            busy = sum(run.seconds for run in result.runs) / max(1, min(result.workers, len(result.runs)))
            overheads.append(max(0.0, result.seconds - busy))
    return min(overheads, default=2.0)
