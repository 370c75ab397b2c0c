"""Runs added after the first grid: a learning rate or a size beyond the edge at which the best one lies."""

import math
from collections.abc import Iterable, Mapping, Sequence

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
