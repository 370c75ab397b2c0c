"""What the Records of a sweep ask for next: rates beyond an edge, sizes beyond an edge."""

import math
from collections.abc import Iterable, Sequence

from habitus.record import Record
from habitus.sweeps.cells import Facts, LeftOut, Planned
from habitus.sweeps.design import Asked, next_shape, wider, with_rate
from habitus.sweeps.preset import Preset
from habitus.sweeps.prior_results import LOSS
from habitus.sweeps.rates import beyond_edge
from habitus.sweeps.store import Store


def more_rates(store: Store, facts: Facts, cells: Sequence[Planned], first_grid: int, limit: int) -> list[Planned]:
    """For each cell whose best learning rate stands at the edge of its grid, the next rate, for every seed.

    A cell may get `limit` rates beyond the `first_grid` that it began with. The choice itself remains `fit`'s.
    """
    added = []
    for group in _by_cell(cells).values():
        losses = _tail_losses(store, group)
        if losses is None or len(losses) >= first_grid + limit:
            continue
        rate = beyond_edge(losses)
        if rate is not None:
            seeds = {planned.row.seed: planned for planned in group}
            added += [with_rate(planned, facts, rate) for planned in seeds.values()]
    return added


def more_sizes(
    store: Store, facts: Facts, preset: Preset, asked: Asked, cells: Sequence[Planned]
) -> tuple[list[Planned], list[LeftOut]]:
    """For each budget whose best size stands at the edge of its grid, the next shape of the ladder."""
    added: list[Planned] = []
    left_out: list[LeftOut] = []
    for budget in sorted({planned.row.flops_budget for planned in cells}):
        at = [planned for planned in cells if planned.row.flops_budget == budget]
        best = {cell_id: _best_loss(store, group) for (_, cell_id), group in _by_cell(at).items()}
        sizes = {planned.row.cell_id: planned.cell.params for planned in at}
        if len(best) < 3 or any(loss is None for loss in best.values()):
            continue
        winner = min(best, key=lambda cell_id: best[cell_id] or math.inf)
        side = {min(sizes.values()): -1, max(sizes.values()): 1}.get(sizes[winner], 0)
        tried = {(planned.recipe.model.width, planned.recipe.model.depth) for planned in at}
        shape = next_shape(preset.allocation.ladder, tried, side) if side else None
        if shape is None or len(tried) >= preset.allocation.num_shapes + preset.allocation.widen:
            continue
        share = float(at[0].row.wanted["embedder_share"])
        found = wider(facts, preset, asked, budget, share, shape)
        added += found.cells
        left_out += found.left_out
    return added, left_out


def _by_cell(cells: Iterable[Planned]) -> dict[tuple[float, str], list[Planned]]:
    groups: dict[tuple[float, str], list[Planned]] = {}
    for planned in cells:
        groups.setdefault((planned.row.flops_budget, planned.row.cell_id), []).append(planned)
    return groups


def _tail_losses(store: Store, group: Sequence[Planned]) -> dict[float, float] | None:
    """Mean tail training loss by rate, infinite where a run failed; None while a Record is missing."""
    by_rate: dict[float, list[float]] = {}
    for planned in group:
        record = store.record(planned.hash)
        if record is None:
            return None
        by_rate.setdefault(planned.row.learning_rate, []).append(_tail(record))
    return {rate: sum(losses) / len(losses) for rate, losses in by_rate.items()}


def _tail(record: Record) -> float:
    return math.inf if record.status == "failed" or record.train is None else record.train.loss


def _best_loss(store: Store, group: Sequence[Planned]) -> float | None:
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
