"""From an axis, a preset and a dataset's facts to cells: recipes that can be run, and what was left out. No torch."""

import math
from collections.abc import Callable

from habitus.errors import ConfigError
from habitus.recipe import DataRecipe, ModelRecipe
from habitus.store import LOG_AXIS
from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun
from habitus.sweeps.context_cells import add_contexts
from habitus.sweeps.draft import Draft, centred_shapes
from habitus.sweeps.preset import Preset
from habitus.sweeps.prior_results import PriorResults
from habitus.sweeps.request import SweepRequest, check_axis
from habitus.sweeps.shape_cells import add_regularised, add_shapes


def design_axis(
    axis: str,
    facts: DatasetFacts,
    preset: Preset,
    *,
    prior: PriorResults | None = None,
    request: SweepRequest | None = None,
    winners: dict[float, PlannedRun] | None = None,
) -> Design:
    """The cells of an axis. `winners` are the store's stage-1 winners by budget, for the negatives axis."""
    check_axis(axis)
    request = request or SweepRequest()
    request.check()
    draft = Draft(axis, preset, facts, prior or PriorResults(), request, dict(winners or {}))
    _DESIGNERS[axis](draft)
    return draft.to_design()


def _share(draft: Draft) -> None:
    """Embedder shares at fixed D/N, and the smallest embedder there is."""
    settings = draft.preset.share
    for budget in draft.budgets():
        if settings.floor:
            draft.add_share(budget, "floor", {"floor": True}, joint_dim=4)
        for share in settings.shares:
            draft.add_share(budget, f"s={share:g}", {"embedder_share": share}, share=share)


def _depth(draft: Draft) -> None:
    """Depth against text depth at a constant sum; deeper cells off the diagonal are marked."""
    for budget in draft.budgets():
        row = min(draft.preset.depth.rows, key=lambda row: abs(math.log(row.budget / budget)))
        deepest = max(row.depths)
        for depth in (*row.depths, *row.off_diagonal):
            on_diagonal = depth in row.depths
            text_depth = row.depth_sum - (depth if on_diagonal else deepest)
            if text_depth < 1:
                raise ConfigError(
                    f"preset {draft.preset.name}: depth {depth} leaves no text layer of depth_sum {row.depth_sum}",
                    expected="depths below depth_sum",
                )
            wanted = {"on_diagonal": on_diagonal, "depth": depth, "text_depth": text_depth}
            draft.add_solved(
                budget,
                f"depth={depth}+{text_depth}",
                wanted,
                joint_dim=row.joint_dim,
                width=row.width,
                depth=depth,
                text_depth=text_depth,
            )


def _batch(draft: Draft) -> None:
    """One model, several batch sizes at equal compute, constant rate, evaluated all along; in two arms.

    The second one has the candidates of a fixed number of windows. A batch of so many is a cell of both.
    """
    settings, share = draft.preset.batch, draft.share()
    pool = settings.pool_sequences
    for budget in draft.budgets():
        base = draft.share_cell(budget, {"embedder_share": share}, share=share)
        if base is None:
            continue
        for batch in settings.batch_sequences:
            draft.add_batch(base.model, budget, batch)
        for batch in settings.batch_sequences:
            if pool is not None and batch > pool and batch % pool == 0:
                draft.add_batch(base.model, budget, batch, pool=pool)


def _batch_size(draft: Draft) -> None:
    """One model per budget, several batch sizes at equal compute: which of them ends best."""
    share = draft.share()
    for budget in draft.budgets():
        base = draft.share_cell(budget, {"embedder_share": share}, share=share)
        if base is None:
            continue
        usual = draft.preset.batch_sequences(budget)
        for batch in sorted({max(1, round(multiple * usual)) for multiple in draft.preset.batch_size.multiples}):
            draft.add_batch_size(base.model, budget, batch)


def _allocation(draft: Draft) -> None:
    """Shapes along each iso-FLOP line, centred on the expected best size."""
    share = draft.share()
    for budget in draft.budgets():
        shapes, centred = centred_shapes(draft.preset, draft.prior, budget, share)
        draft.decided.append(f"sizes at {budget:.3g} FLOPs centred on {centred}")
        for shape in shapes:
            draft.add_shape(budget, shape, share)
        draft.repeat_sizes(budget)


def _negatives(draft: Draft) -> None:
    """Stage 2 with more and more negatives, from the allocation winner of each budget."""
    for budget in draft.budgets():
        parent = _stage_one_parent(draft, budget)
        if parent is not None:
            for count in sorted(draft.preset.negatives.num_negatives):
                draft.add_stage_two(budget, parent, count)
            draft.repeat_counts(budget)


def _init(draft: Draft) -> None:
    """Initialisations × sizes × learning rates; one budget per size."""
    settings = draft.preset.init
    budgets = draft.preset.budgets_of("init")
    for budget in draft.request.budgets:
        if budget not in budgets:
            raise ConfigError(
                f"the init axis has no size for {budget:g} FLOPs",
                expected=f"one of {', '.join(f'{b:g}' for b in budgets)}: preset {draft.preset.name} ties each size "
                "to a budget",
                next_step="omit --budgets, or use a preset of your own",
            )
    share = draft.share()
    for row in settings.sizes:
        if row.budget in draft.budgets():
            for init in settings.inits:
                wanted = {"init": init, "width": row.width, "depth": row.depth}
                label = f"{init}-{row.width}x{row.depth}"
                draft.add_solved(row.budget, label, wanted, init=init, share=share, width=row.width, depth=row.depth)


def _passes(draft: Draft) -> None:
    """Sizes × passes × dropout × shares of the users; cells of different passes share a trunk."""
    settings, common = draft.preset.passes, draft.preset.common
    for joint_dim, text_depth, width, depth in settings.sizes:
        model = ModelRecipe(
            joint_dim=joint_dim,
            text_len=draft.facts.text_len,
            text_depth=text_depth,
            width=width,
            depth=depth,
            head_dim=common.head_dim or math.gcd(width, 32),
            copying=settings.copying,
        )
        for share, part in settings.user_parts():
            data = DataRecipe(seq_len=draft.facts.seq_len, user_share=share, user_part=part)
            for dropout in settings.dropouts:
                draft.add_lengths(model, data, dropout)


_DESIGNERS: dict[str, Callable[[Draft], None]] = {
    "share": _share,
    "depth": _depth,
    "batch": _batch,
    "batch_size": _batch_size,
    "allocation": _allocation,
    "negatives": _negatives,
    "init": _init,
    "context": add_contexts,
    "shape": add_shapes,
    "regularisation": add_regularised,
    LOG_AXIS: _passes,
}


def _stage_one_parent(draft: Draft, budget: float) -> PlannedRun | None:
    """The stage-1 run that stage 2 continues: the store's winner, or one to be trained for the purpose."""
    if budget in draft.winners:
        winner = draft.winners[budget]
        draft.decided.append(f"parent at {budget:.3g} FLOPs: allocation winner {winner.row.cell_id}")
        return winner
    share, why = draft.prior.share(draft.preset.common.share)
    shapes, centred = centred_shapes(draft.preset, draft.prior, budget, share)
    request = SweepRequest(learning_rates=1, seeds=1, allow_repeats=draft.request.allow_repeats)
    allocation = Draft("allocation", draft.preset, draft.facts, draft.prior, request)
    for place in sorted(range(len(shapes)), key=lambda place: abs(place - (len(shapes) - 1) / 2)):
        allocation.add_shape(budget, shapes[place], share)
        if allocation.cells:
            parent = allocation.cells[0]
            draft.decided.append(
                f"parent at {budget:.3g} FLOPs: no allocation sweep there, so {parent.row.cell_id} is trained "
                f"first; centred on {centred}; {why}"
            )
            draft.parents.append(parent)
            return parent
    draft.left_out += allocation.left_out
    return None
