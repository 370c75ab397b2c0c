"""Runs added after the first grid: a learning rate or a size beyond the edge at which the best one lies, and longer
runs of batch sizes that have not reached the target."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from habitus.laws import EWMA_HALF_LIFE, smooth
from habitus.record import Record
from habitus.store import LeftOut
from habitus.sweeps.cells import DatasetFacts, PlannedRun
from habitus.sweeps.draft import Draft, Shape
from habitus.sweeps.preset import Preset
from habitus.sweeps.prior_results import LOSS, PriorResults
from habitus.sweeps.request import SweepRequest
from habitus.sweeps.store import Store


def more_rates(
    store: Store, facts: DatasetFacts, cells: Sequence[PlannedRun], first_grid: int, limit: int
) -> list[PlannedRun]:
    """For each cell whose best learning rate lies at the edge of its grid, the next rate, for every seed.

    A cell may get `limit` rates beyond the `first_grid` that it began with. The choice itself remains `fit`'s.
    """
    added = []
    for group in _by_cell(cells).values():
        losses = _tail_losses(store, group)
        if losses is None or len(losses) >= first_grid + limit:
            continue
        rate = next_rate(losses)
        if rate is not None:
            seeds = {planned.row.seed: planned for planned in group}
            added += [planned.with_learning_rate(rate, facts) for planned in seeds.values()]
    return added


def next_rate(losses: Mapping[float, float]) -> float | None:
    """The rate to try next where the best of two or more is the smallest or largest; None where it is bracketed.

    `losses` maps each tried rate to its tail training loss; a failed run counts as infinitely bad. Where nothing
    succeeded there is no winner and no next rate.
    """
    rates = sorted(losses)
    finite = [rate for rate in rates if losses[rate] < math.inf]
    if len(rates) < 2 or not finite:
        return None
    best = min(finite, key=lambda rate: losses[rate])
    if best == rates[-1]:
        return float(f"{best * best / rates[-2]:.12g}")
    if best == rates[0]:
        return float(f"{best * best / rates[1]:.12g}")
    return None


def more_sizes(
    store: Store, facts: DatasetFacts, preset: Preset, request: SweepRequest, cells: Sequence[PlannedRun]
) -> tuple[list[PlannedRun], list[LeftOut]]:
    """For each budget whose best size lies at the edge of its grid, the next shape of the ladder."""
    draft = Draft("allocation", preset, facts, PriorResults(), request)
    for budget in sorted({planned.row.flops_budget for planned in cells}):
        runs = [planned for planned in cells if planned.row.flops_budget == budget]
        losses = {cell_id: _best_loss(store, group) for (_, cell_id), group in _by_cell(runs).items()}
        sizes = {planned.row.cell_id: planned.cell.params for planned in runs}
        if len(losses) < 3 or any(loss is None for loss in losses.values()):
            continue
        winner = min(losses, key=lambda cell_id: losses[cell_id] or math.inf)
        side = {min(sizes.values()): -1, max(sizes.values()): 1}.get(sizes[winner], 0)
        tried = {(planned.recipe.model.width, planned.recipe.model.depth) for planned in runs}
        shape = next_shape(preset.allocation.ladder, tried, side) if side else None
        if shape is not None and len(tried) < preset.allocation.num_shapes + preset.allocation.widen:
            draft.add_shape(budget, shape, float(runs[0].row.wanted["embedder_share"]))
    design = draft.to_design()
    return list(design.cells), list(design.left_out)


def next_shape(ladder: Sequence[Shape], tried: Iterable[Shape], side: int) -> Shape | None:
    """The shape of the ladder above (side = 1) or below (-1) those tried; None at its end."""
    shapes = set(tried)
    places = [place for place, shape in enumerate(ladder) if shape in shapes]
    if not places:
        return None
    place = (max(places) if side > 0 else min(places)) + side
    return ladder[place] if 0 <= place < len(ladder) else None


def more_steps(
    store: Store, facts: DatasetFacts, preset: Preset, request: SweepRequest, cells: Sequence[PlannedRun]
) -> tuple[list[PlannedRun], list[LeftOut]]:
    """For each batch size that has not reached what the middle one ends with, the same for twice as long.

    Each arm of the axis has a target of its own, and `max_multiple` says when to give up.
    """
    settings = preset.batch
    draft = Draft("batch", preset, facts, PriorResults(), request)
    arms = {planned.recipe.train.pool_sequences for planned in cells}
    for budget in sorted({planned.row.flops_budget for planned in cells}):
        for pool in sorted(arms, key=lambda pool: pool or 0):
            runs = [p for p in cells if p.row.flops_budget == budget and _is_of_arm(p, pool)]
            batches = sorted({planned.recipe.train.batch_sequences for planned in runs})
            by_batch = {b: [p for p in runs if p.recipe.train.batch_sequences == b] for b in batches}
            middle = by_batch[batches[len(batches) // 2]]
            target = _lowest_loss(store, [p for p in middle if p.cell.steps == min(q.cell.steps for q in middle)])
            for batch, own in by_batch.items():
                shortest, longest = (end(planned.cell.steps for planned in own) for end in (min, max))
                reached = _lowest_loss(store, own)
                if target is None or reached is None or reached <= target:
                    continue
                times = 2 * round(longest / shortest)
                if times * settings.flops_multiple <= settings.max_multiple:
                    draft.add_batch(own[0].recipe.model, budget, batch, pool=pool, times=times)
    design = draft.to_design()
    return list(design.cells), list(design.left_out)


def likely_to_go_on(cells: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs of the batch axis that `more_steps` most likely repeats for twice as long, before any has ended.

    Batches above the middle one take fewer steps for the same compute, and rarely reach what that one ends with.
    """
    middles = {}
    for planned in cells:
        budget = planned.row.flops_budget
        batches = sorted({p.recipe.train.batch_sequences for p in cells if p.row.flops_budget == budget})
        middles[budget] = batches[len(batches) // 2]
    return [p for p in cells if p.recipe.train.batch_sequences > middles[p.row.flops_budget]]


def _is_of_arm(planned: PlannedRun, pool: int | None) -> bool:
    """Whether a run has the candidates of `pool` windows, as a batch of so many has in both arms."""
    train = planned.recipe.train
    return train.pool_sequences == pool or (train.pool_sequences is None and train.batch_sequences == pool)


def _lowest_loss(store: Store, runs: Sequence[PlannedRun]) -> float | None:
    """The lowest smoothed loss on the way of some run; None where a Record is missing or has none."""
    lowest = []
    for planned in runs:
        record = store.record(planned.hash)
        values = [point.value for point in record.trajectory if point.metric == LOSS] if record is not None else []
        if not values:
            return None
        lowest.append(float(smooth(np.array(values), EWMA_HALF_LIFE).min()))
    return min(lowest)


def _by_cell(cells: Iterable[PlannedRun]) -> dict[tuple[float, str], list[PlannedRun]]:
    groups: dict[tuple[float, str], list[PlannedRun]] = {}
    for planned in cells:
        groups.setdefault((planned.row.flops_budget, planned.row.cell_id), []).append(planned)
    return groups


def _tail_losses(store: Store, group: Sequence[PlannedRun]) -> dict[float, float] | None:
    """Mean tail training loss by rate, infinite where a run failed; None while a Record is missing."""
    by_rate: dict[float, list[float]] = {}
    for planned in group:
        record = store.record(planned.hash)
        if record is None:
            return None
        by_rate.setdefault(planned.row.learning_rate, []).append(_tail_loss(record))
    return {rate: sum(losses) / len(losses) for rate, losses in by_rate.items()}


def _tail_loss(record: Record) -> float:
    return math.inf if record.status == "failed" or record.train is None else record.train.loss


def _best_loss(store: Store, group: Sequence[PlannedRun]) -> float | None:
    """Validation loss at the rate that training loss chooses; None where a Record is missing or has none."""
    losses = _tail_losses(store, group)
    if losses is None:
        return None
    rate = min(losses, key=lambda rate: losses[rate])
    values = []
    for planned in group:
        record = store.record(planned.hash)
        if planned.row.learning_rate == rate and record is not None and LOSS in record.metrics:
            values.append(record.metrics[LOSS].value)
    return sum(values) / len(values) if values else None
