"""A preset adapted to the dataset and scaled to the compute: budgets, grids, whether models copy.

Letters as in sizing: widths follow C^0.3, because N* follows about C^0.6.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.sizing import contextualizer_parts, largest_num_negatives, tokens_per_item
from habitus.studies.options import GRID_AXES, StudyOptions
from habitus.sweeps import (
    DatasetFacts,
    Design,
    Preset,
    PriorResults,
    ReplicatedAxis,
    SweepRequest,
    centred_shapes,
    design_axis,
)

_WIDTH_EXPONENT = 0.3
_LEAST_SHAPES = 4  # of the allocation axis at a budget: three for a parabola, one to judge it by
_FACTORS = tuple(10 ** (step / 8) for step in range(-48, 49))  # of the preset's budgets
_ROUNDS = 5  # of scaling towards the envelope
_FILLED = 0.8  # of an envelope, from which it counts as used
_REPEATS_WORTH_COPYING = 0.05  # of the next items, from which models copy on a log of one's own by default
_GPU_HEAD, _GPU_WINDOWS = 16, 16  # less leaves most of a GPU idle
_REPEAT_WINDOWS = 64  # looked at
# Shapes beyond the preset's own, so that scaled budgets find neighbours too.
_LADDER = (
    (8, 1), (12, 1), (16, 1), (16, 2), (24, 2), (32, 2), (40, 2), (48, 3), (64, 3), (80, 3), (96, 4), (128, 4),
    (160, 4), (192, 4), (256, 6), (320, 6), (384, 6), (448, 8), (512, 8), (576, 8), (640, 8), (768, 12), (896, 12),
    (1024, 16), (1152, 16), (1280, 20), (1408, 20),
)  # fmt: skip

Cost = Callable[[Sequence[Design]], float]


def fill_gpu(preset: Preset) -> Preset:
    """The preset for a log on a GPU: bf16, heads of 16 or more, batches of 16 windows or more."""
    head = max(_GPU_HEAD, preset.common.head_dim or 0)
    common = preset.common.model_copy(update={"head_dim": head, "precision": "bf16"})
    allocation = preset.allocation.model_copy(
        update={"ladder": tuple(shape for shape in preset.allocation.ladder if shape[0] % head == 0)}
    )
    rows = tuple(row.model_copy(update={"width": max(1, round(row.width / head)) * head}) for row in preset.depth.rows)
    sizes = tuple(
        size.model_copy(update={"width": max(1, round(size.width / head)) * head}) for size in preset.init.sizes
    )
    changes = {
        "common": common,
        "allocation": allocation,
        "share": preset.share.model_copy(update={"head_dim": head}),
        "depth": preset.depth.model_copy(update={"rows": rows}),
        "init": preset.init.model_copy(update={"sizes": sizes}),
    }
    return _with_batches(
        preset.model_copy(update=changes), lambda windows: max(_GPU_WINDOWS, windows), evaluation=False
    )


def adapt_preset(preset: Preset, dataset: Dataset) -> tuple[Preset, list[str]]:
    """The preset with batches for the dataset's window length and queries for its size; and what was changed."""
    notes: list[str] = []
    adapted = preset
    ratio = preset.world.seq_len / dataset.seq_len
    if ratio != 1:
        adapted = _with_batches(adapted, lambda windows: max(1, round(windows * ratio)))
        notes.append(
            f"windows of {dataset.seq_len} events instead of {preset.world.seq_len}: batches of "
            f"{adapted.batch_sequences(adapted.budgets[0])} windows keep the number of slots"
        )
    queries = dataset.counts("validation").queries
    if queries < adapted.evaluate.queries:
        adapted = adapted.model_copy(update={"evaluate": adapted.evaluate.model_copy(update={"queries": queries})})
        notes.append(f"evaluates on all {queries:,} validation queries")
    return adapted, notes


def choose_copying(preset: Preset, dataset: Dataset, options: StudyOptions) -> tuple[Preset, list[str]]:
    """The preset with or without copying, as asked for or as the log suggests; and what was decided."""
    copying, notes = preset.common.copying, []
    if options.copying is not None:
        copying = options.copying
    elif options.data is not None and not copying:
        share = repeat_share(dataset)
        copying = share >= _REPEATS_WORTH_COPYING
        if copying:
            notes = [f"{share:.0%} of the next items are in the visible past: models copy (--no-copying: they do not)"]
    # Without log_q scores are right among a batch's targets only, and copied scores too low in the whole catalogue.
    common = preset.common.model_copy(update={"copying": copying, "log_q": preset.common.log_q or copying})
    return preset.model_copy(update={"common": common}), notes


def repeat_share(dataset: Dataset) -> float:
    """The share of next items that occur earlier in the same window, over some training windows."""
    batch = dataset.batch("train", min(_REPEAT_WINDOWS, dataset.counts("train").windows))
    visible = (batch.segments[:, :, None] == batch.segments[:, None, :]) & np.tri(batch.items.shape[1], dtype=bool)
    repeated = ((batch.targets[:, :, None] == batch.items[:, None, :]) & visible).any(-1)
    return float(repeated[batch.targets >= 0].mean())


def scale_preset(preset: Preset, factor: float) -> Preset:
    """The preset with all budgets times `factor`; widths of fixed shapes follow."""
    if factor == 1:
        return preset
    head = preset.common.head_dim or 8

    def budget(value: float) -> float:
        return float(f"{value * factor:.3g}")

    def widen(width: int) -> int:
        return max(head, round(width * factor**_WIDTH_EXPONENT / head) * head)

    axes: dict[str, Any] = {}
    for name in GRID_AXES:
        settings = preset.axis(name)
        changes: dict[str, Any] = {"budgets": tuple(budget(b) for b in settings.budgets)}
        if isinstance(settings, ReplicatedAxis) and settings.replicates_until is not None:
            changes["replicates_until"] = budget(settings.replicates_until)
        axes[name] = settings.model_copy(update=changes)
    rows = [
        row.model_copy(
            update={
                "budget": budget(row.budget),
                "width": widen(row.width),
                "joint_dim": max(4, round(row.joint_dim * factor**_WIDTH_EXPONENT / 4) * 4),
            }
        )
        for row in preset.depth.rows
    ]
    sizes = [r.model_copy(update={"budget": budget(r.budget), "width": widen(r.width)}) for r in preset.init.sizes]
    ladder = preset.allocation.ladder
    beyond = [s for s in _LADDER if s[0] % head == 0 and not ladder[0] <= s <= ladder[-1]]
    axes["depth"] = axes["depth"].model_copy(update={"rows": tuple(rows)})
    axes["init"] = axes["init"].model_copy(update={"sizes": tuple(sizes)})
    axes["allocation"] = axes["allocation"].model_copy(
        update={"ladder": tuple(sorted({*ladder, *beyond}, key=lambda s: s[0] ** 2 * s[1]))}
    )
    rate = preset.common.learning_rate * factor**preset.common.learning_rate_exponent
    common = preset.common.model_copy(update={"learning_rate": rate})
    scaled = preset.model_copy(update={**axes, "common": common, "budgets": tuple(budget(b) for b in preset.budgets)})
    doublings = round(math.log10(factor))  # the batch doubles, or halves, with every decade
    if len(preset.batch_by_budget) > 1 or doublings == 0:  # a table of batches by budget needs no scaling
        return scaled
    return _with_batches(scaled, lambda windows: max(1, round(windows * 2.0**doublings)), evaluation=False)


def design_axes(preset: Preset, facts: DatasetFacts, axes: Sequence[str], allow_repeats: bool) -> list[Design]:
    """All axes as they are designed in an empty store; the parents of stage 2 are runs of the allocation axis."""
    request = SweepRequest(allow_repeats=allow_repeats)
    designs = [design_axis(axis, facts, preset, request=request) for axis in axes]
    return [
        replace(design, parents=()) if design.axis == "negatives" and "allocation" in axes else design
        for design in designs
    ]


@dataclass(frozen=True)
class ScaledPreset:
    """A scaled preset with its designs, and what they cost."""

    preset: Preset
    factor: float
    designs: tuple[Design, ...]
    cost: float


def fit_envelope(
    preset: Preset,
    facts: DatasetFacts,
    axes: Sequence[str],
    *,
    allow_repeats: bool,
    limit: float | None,
    cost: Cost,
    unit: str,
    envelope_for: Callable[[float], float] = float,
) -> ScaledPreset:
    """The preset scaled to the largest budgets whose cost is within `limit`; as it is where there is no limit.

    A scale counts only where every budget of the allocation axis keeps enough shapes to fit a valley. The error
    where none does, or where all cost more than the limit, names the least that works; `envelope_for` says which
    envelope, in `unit`, pays a cost.
    """

    low, high = _usable_factors(preset, facts, allow_repeats)

    def scale(factor: float) -> ScaledPreset:
        changed = scale_preset(preset, min(max(factor, low), high))
        if changed is not preset or facts.num_items != preset.world.num_items:
            changed = adapt_negatives(changed, facts)
        designs = design_axes(changed, facts, axes, allow_repeats)
        return ScaledPreset(changed, changed.budgets[0] / preset.budgets[0], tuple(designs), cost(designs))

    scaled = scale(1.0)
    if limit is None:
        return scaled
    for _ in range(_ROUNDS):  # runs cost their budgets, so the total follows the factor closely
        full, capped = scaled.cost >= _FILLED * limit, scaled.factor >= 0.99 * high
        if scaled.cost <= limit and (full or capped):
            return scaled
        if scaled.cost > limit and scaled.factor <= 1.01 * low:
            break
        scaled = scale(scaled.factor * 0.5 * (1 + _FILLED) * limit / max(scaled.cost, 1e-9))
    if scaled.cost <= limit:
        return scaled
    budgets = ", ".join(f"{b:.3g}" for b in scaled.preset.budgets)
    raise ConfigError(
        f"{envelope_for(limit):.3g} {unit} are too little for any law",
        expected=f"at least {round_up(envelope_for(scaled.cost))} {unit}: budgets of {budgets} FLOPs",
        next_step=f"raise the envelope, or name fewer axes (--axis) than {', '.join(axes)}",
    )


def round_up(value: float) -> str:
    """Two digits, never less than the value: an envelope that a message names must be accepted when given."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.2g}"


def _usable_factors(preset: Preset, facts: DatasetFacts, allow_repeats: bool) -> tuple[float, float]:
    """Smallest and largest factor at which every budget of the allocation axis keeps enough shapes.

    Counted in real numbers, without building anything: enough steps, and no second pass over the data.
    """
    factors = [f for f in _FACTORS if _enough_shapes(scale_preset(preset, f), facts, allow_repeats)]
    if not factors:
        raise ConfigError(
            f"no budget gives every law enough cells: {facts.train_windows:,} training windows of "
            f"{facts.seq_len} events are too few",
            expected="a dataset whose single pass pays three budgets with four sizes each",
            next_step="prepare more events or shorter windows (--seq-len), or allow repeats (--allow-repeats)",
        )
    return min(factors), max(factors)


def _enough_shapes(preset: Preset, facts: DatasetFacts, allow_repeats: bool) -> bool:
    share, common = preset.common.share, preset.common
    t = tokens_per_item(facts.text_len, facts.inputs)
    for budget in preset.budgets_of("allocation"):
        shapes, _ = centred_shapes(preset, PriorResults(), budget, share)
        windows = preset.batch_sequences(budget)
        slots = windows * facts.seq_len
        affordable = 0
        for width, depth in shapes:
            p = 12 * depth * width * width
            p_e = share * p / (1 - share)
            h = max(4.0, math.sqrt(p_e / (12 * common.text_depth + 2)))
            steps = budget / (6 * slots * (t * p_e + p + 3 * slots * h))
            repeats = steps * windows > facts.train_windows and not allow_repeats
            affordable += steps >= common.min_steps and not repeats
        if affordable < _LEAST_SHAPES:
            return False
    return True


def _with_batches(preset: Preset, resize: Callable[[int], int], *, evaluation: bool = True) -> Preset:
    """The preset with every number of windows per batch changed."""
    evaluate = preset.evaluate
    if evaluation:
        evaluate = evaluate.model_copy(update={"batch_sequences": resize(evaluate.batch_sequences)})
    batches = tuple(sorted({resize(windows) for windows in preset.batch.batch_sequences}))
    negatives = preset.negatives.model_copy(update={"batch_sequences": resize(preset.negatives.batch_sequences)})
    return preset.model_copy(
        update={
            "batch_by_budget": tuple((budget, resize(windows)) for budget, windows in preset.batch_by_budget),
            "batch": preset.batch.model_copy(update={"batch_sequences": batches}),
            "negatives": negatives,
            "evaluate": evaluate,
        }
    )


def adapt_negatives(preset: Preset, facts: DatasetFacts) -> Preset:
    """The preset with numbers of negatives up to the catalogue, or to what its middle budget pays."""
    budgets = preset.budgets_of("negatives")
    budget = budgets[len(budgets) // 2]
    near, size = min(preset.allocation.centres, key=lambda row: abs(math.log(row[0] / budget)))
    size *= math.sqrt(budget / near)
    h = max(4, round(math.sqrt(preset.common.share * size / (12 * preset.common.text_depth + 2)) / 4) * 4)
    width = max(4, round(math.sqrt(size / 24)))
    p = sum(contextualizer_parts(h, width, 2, facts.inputs, copying=preset.common.copying).values())
    settings = preset.negatives
    most = largest_num_negatives(
        budget, p, B=settings.batch_sequences, L=facts.seq_len, h=h, min_steps=settings.min_steps
    )
    counts = _negatives_grid(min(facts.num_candidates or facts.num_items, max(most or 0, 64)))
    return preset.model_copy(update={"negatives": settings.model_copy(update={"num_negatives": counts})})


def _negatives_grid(most: int) -> tuple[int, ...]:
    """0 and eight counts up to `most`, a constant factor apart, over two decades at the most."""
    low = max(8.0, most / 128)
    steps = [low * (most / low) ** (k / 7) for k in range(8)]
    return tuple(sorted({0, *(round(k) for k in steps)}))
