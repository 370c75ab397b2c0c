"""Budgets and grids that fit the dataset and the compute given: a preset, adapted and scaled.

Letters as in sizing: widths follow C^0.3, because N* follows about C^0.6.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.sizing import contextualizer_parts, largest_num_negatives, tokens_per_item
from habitus.sweeps import DatasetFacts, Design, Preset, PriorResults, SweepRequest, centred_shapes, design_axis

_WIDTH_EXPONENT = 0.3
_LEAST_SHAPES = 4  # of the allocation axis at a budget: three for a parabola, one to judge it by
_FACTORS = tuple(10 ** (step / 8) for step in range(-48, 49))  # of the preset's budgets
_CLOSER = 5
_FILLED = 0.8  # an envelope counts as used from here on
# Shapes beyond the preset's own, so that scaled budgets find neighbours too.
_LADDER = (
    (8, 1), (12, 1), (16, 1), (16, 2), (24, 2), (32, 2), (40, 2), (48, 3), (64, 3), (80, 3), (96, 4), (128, 4),
    (160, 4), (192, 4), (256, 6), (320, 6), (384, 6), (448, 8), (512, 8), (576, 8), (640, 8), (768, 12), (896, 12),
    (1024, 16), (1152, 16), (1280, 20), (1408, 20),
)  # fmt: skip

Cost = Callable[[Sequence[Design]], float]


def adapted(preset: Preset, dataset: Dataset) -> tuple[Preset, list[str]]:
    """The preset with batches for the dataset's window length and queries for its size; told in words."""
    notes: list[str] = []
    changed = preset
    ratio = preset.world.seq_len / dataset.seq_len
    if ratio != 1:
        changed = _with_batches(changed, lambda windows: max(1, round(windows * ratio)))
        notes.append(
            f"windows of {dataset.seq_len} events instead of {preset.world.seq_len}: batches of "
            f"{changed.batch_sequences(changed.budgets[0])} windows keep the number of slots"
        )
    queries = dataset.counts("validation").queries
    if queries < changed.evaluate.queries:
        changed = changed.model_copy(update={"evaluate": changed.evaluate.model_copy(update={"queries": queries})})
        notes.append(f"evaluates on all {queries:,} validation queries")
    return changed, notes


def scaled(preset: Preset, factor: float) -> Preset:
    """The preset with all budgets times `factor`; widths of fixed shapes follow."""
    if factor == 1:
        return preset
    head = preset.common.head_dim or 8

    def budget(value: float) -> float:
        return float(f"{value * factor:.3g}")

    def wide(width: int) -> int:
        return max(head, round(width * factor**_WIDTH_EXPONENT / head) * head)

    axes = {
        name: getattr(preset, name).model_copy(
            update={"budgets": tuple(budget(b) for b in getattr(preset, name).budgets)}
        )
        for name in ("share", "depth", "batch", "allocation", "negatives", "init")
    }
    rows = [
        row.model_copy(
            update={
                "budget": budget(row.budget),
                "width": wide(row.width),
                "joint_dim": max(4, round(row.joint_dim * factor**_WIDTH_EXPONENT / 4) * 4),
            }
        )
        for row in preset.depth.rows
    ]
    sizes = [r.model_copy(update={"budget": budget(r.budget), "width": wide(r.width)}) for r in preset.init.sizes]
    own = preset.allocation.ladder
    between = [s for s in _LADDER if s[0] % head == 0 and not own[0] <= s <= own[-1]]
    axes["depth"] = axes["depth"].model_copy(update={"rows": tuple(rows)})
    axes["init"] = axes["init"].model_copy(update={"sizes": tuple(sizes)})
    axes["allocation"] = axes["allocation"].model_copy(
        update={"ladder": tuple(sorted({*own, *between}, key=lambda s: s[0] ** 2 * s[1]))}
    )
    rate = preset.common.learning_rate * factor**preset.common.learning_rate_exponent
    common = preset.common.model_copy(update={"learning_rate": rate})
    made = preset.model_copy(update={**axes, "common": common, "budgets": tuple(budget(b) for b in preset.budgets)})
    doublings = round(math.log10(factor))  # the batch doubles, or halves, with every decade
    if len(preset.batch_by_budget) > 1 or doublings == 0:  # a table of batches by budget knows by itself
        return made
    return _with_batches(made, lambda windows: max(1, round(windows * 2.0**doublings)), evaluation=False)


def designs(preset: Preset, facts: DatasetFacts, axes: Sequence[str], allow_repeats: bool) -> list[Design]:
    """All axes as they would be designed before anything is known; stage-2 parents are the allocation's runs."""
    asked = SweepRequest(allow_repeats=allow_repeats)
    found = []
    for axis in axes:
        one = design_axis(axis, facts, preset, request=asked)
        drop = "allocation" in axes and axis == "negatives"
        found.append(Design(one.axis, one.cells, one.left_out, () if drop else one.parents, one.decided))
    return found


@dataclass(frozen=True)
class ScaledPreset:
    """A scaled preset with its designs, and what they cost."""

    preset: Preset
    factor: float
    designs: tuple[Design, ...]
    cost: float


def fitting(
    preset: Preset,
    facts: DatasetFacts,
    axes: Sequence[str],
    *,
    allow_repeats: bool,
    limit: float | None,
    cost: Cost,
    unit: str,
) -> ScaledPreset:
    """The preset scaled to the largest budgets whose cost is within `limit`; as it is where there is no limit.

    A scale counts only where every budget of the allocation axis keeps enough shapes to fit a valley. The error
    where none does, or where all cost more than the limit, names the least that works.
    """

    low, high = promising(preset, facts, allow_repeats)

    def at(factor: float) -> ScaledPreset:
        one = scaled(preset, min(max(factor, low), high))
        if one is not preset or facts.num_items != preset.world.num_items:
            one = with_negatives(one, facts)
        made = designs(one, facts, axes, allow_repeats)
        return ScaledPreset(one, one.budgets[0] / preset.budgets[0], tuple(made), cost(made))

    found = at(1.0)
    if limit is None:
        return found
    for _ in range(_CLOSER):  # runs cost their budgets, so the total follows the factor closely
        full, capped = found.cost >= _FILLED * limit, found.factor >= 0.99 * high
        if found.cost <= limit and (full or capped):
            return found
        if found.cost > limit and found.factor <= 1.01 * low:
            break
        found = at(found.factor * 0.5 * (1 + _FILLED) * limit / max(found.cost, 1e-9))
    if found.cost <= limit:
        return found
    budgets = ", ".join(f"{b:.3g}" for b in found.preset.budgets)
    raise ConfigError(
        f"{limit:.3g} {unit} are too little for any law",
        expected=f"at least {found.cost:.2g} {unit}: budgets of {budgets} FLOPs",
        next_step=f"raise the envelope, or name fewer axes (--axis) than {', '.join(axes)}",
    )


def promising(preset: Preset, facts: DatasetFacts, allow_repeats: bool) -> tuple[float, float]:
    """Smallest and largest factor at which every budget of the allocation axis keeps enough shapes.

    By real numbers, without building anything: enough steps, and no second pass over the data.
    """
    good = [f for f in _FACTORS if _enough_shapes(scaled(preset, f), facts, allow_repeats)]
    if not good:
        raise ConfigError(
            f"no budget gives every law enough cells: {facts.train_windows:,} training windows of "
            f"{facts.seq_len} events are too few",
            expected="a dataset whose single pass pays three budgets with four sizes each",
            next_step="prepare more events or shorter windows (--seq-len), or give --allow-repeats",
        )
    return min(good), max(good)


def _enough_shapes(preset: Preset, facts: DatasetFacts, allow_repeats: bool) -> bool:
    share, common = preset.common.share, preset.common
    t = tokens_per_item(facts.text_len, facts.inputs)
    for budget in preset.budgets_of("allocation"):
        shapes, _ = centred_shapes(preset, PriorResults(), budget, share)
        windows = preset.batch_sequences(budget)
        slots = windows * facts.seq_len
        kept = 0
        for width, depth in shapes:
            p = 12 * depth * width * width
            p_e = share * p / (1 - share)
            h = max(4.0, math.sqrt(p_e / (12 * common.text_depth + 2)))
            steps = budget / (6 * slots * (t * p_e + p + 3 * slots * h))
            long = steps * windows > facts.train_windows and not allow_repeats
            kept += steps >= common.min_steps and not long
        if kept < _LEAST_SHAPES:
            return False
    return True


def _with_batches(preset: Preset, of: Callable[[int], int], *, evaluation: bool = True) -> Preset:
    evaluate = preset.evaluate
    if evaluation:
        evaluate = evaluate.model_copy(update={"batch_sequences": of(evaluate.batch_sequences)})
    batches = tuple(sorted({of(windows) for windows in preset.batch.batch_sequences}))
    return preset.model_copy(
        update={
            "batch_by_budget": tuple((budget, of(windows)) for budget, windows in preset.batch_by_budget),
            "batch": preset.batch.model_copy(update={"batch_sequences": batches}),
            "negatives": preset.negatives.model_copy(update={"batch_sequences": of(preset.negatives.batch_sequences)}),
            "evaluate": evaluate,
        }
    )


def with_negatives(preset: Preset, facts: DatasetFacts) -> Preset:
    """The preset with numbers of negatives up to the catalogue, or to what its middle budget pays."""
    budgets = preset.budgets_of("negatives")
    budget = budgets[len(budgets) // 2]
    near, size = min(preset.allocation.centres, key=lambda row: abs(math.log(row[0] / budget)))
    size *= math.sqrt(budget / near)
    h = max(4, round(math.sqrt(preset.common.share * size / (12 * preset.common.text_depth + 2)) / 4) * 4)
    width = max(4, round(math.sqrt(size / 24)))
    p = sum(contextualizer_parts(h, width, 2, facts.inputs, copying=preset.common.copying).values())
    choice = preset.negatives
    most = largest_num_negatives(budget, p, B=choice.batch_sequences, L=facts.seq_len, h=h, min_steps=choice.min_steps)
    counts = _negatives_grid(min(facts.num_items, max(most or 0, 64)))
    return preset.model_copy(update={"negatives": choice.model_copy(update={"num_negatives": counts})})


def _negatives_grid(most: int) -> tuple[int, ...]:
    """0 and eight counts up to `most`, a constant factor apart, over two decades at the most."""
    low = max(8.0, most / 128)
    steps = [low * (most / low) ** (k / 7) for k in range(8)]
    return tuple(sorted({0, *(round(k) for k in steps)}))
