"""From an axis, a preset and a dataset's facts to cells: recipes that can be run, and what was left out. No torch."""

import math
from collections.abc import Callable, Iterable, Sequence

from habitus.errors import ConfigError
from habitus.sweeps.cells import Design, Facts, Planned
from habitus.sweeps.draft import Asked, Draft
from habitus.sweeps.preset import AXES, Preset
from habitus.sweeps.prior_results import Known
from habitus.typed import nearest

Shape = tuple[int, int]  # width, depth


def design(
    axis: str,
    facts: Facts,
    preset: Preset,
    *,
    known: Known | None = None,
    asked: Asked | None = None,
    winners: dict[float, Planned] | None = None,
) -> Design:
    """The cells of an axis. `winners` are the store's stage-1 winners by budget, for the negatives axis."""
    check_axis(axis)
    asked = asked or Asked()
    for budget in asked.budgets:
        if not 0 < budget < math.inf:
            raise ConfigError(f"budget {budget:g}", expected="a positive number of FLOPs, as in 1e13")
    draft = Draft(axis, preset, facts, known or Known(), asked, dict(winners or {}))
    _DESIGNERS[axis](draft)
    return draft.finished()


def check_axis(axis: str) -> None:
    if axis not in AXES:
        raise ConfigError(
            f"axis {axis!r} is unknown ({nearest(axis, list(AXES))})", expected=f"one of {', '.join(AXES)}"
        )


def budgets_from(text: str) -> tuple[float, ...]:
    """Budgets as typed: `1e13,1e14`, in ascending order."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or any(not 0 < budget < math.inf for budget in found):
        raise ConfigError(f"budgets {text!r}", expected="positive FLOPs separated by commas, as in 1e13,1e14,1e15")
    return tuple(sorted(set(found)))


def _share(draft: Draft) -> None:
    """Embedder shares at fixed D/N, and the smallest embedder there is."""
    choice = draft.preset.share
    for budget in draft.budgets():
        if choice.floor:
            draft.add_share(budget, "floor", {"floor": True}, joint_dim=4)
        for share in choice.shares:
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
    """One model, several batch sizes at equal compute, constant rate, evaluated all along."""
    choice, share = draft.preset.batch, draft.share()
    for budget in draft.budgets():
        base = draft.of_share(budget, {"embedder_share": share}, share=share)
        for batch in choice.batch_sequences if base else ():
            assert base is not None
            draft.add_model(base.model, budget, choice.flops_multiple * budget, batch, f"B={batch}")


def _allocation(draft: Draft) -> None:
    """Shapes along each iso-FLOP line, centred on what is known of the best size."""
    share = draft.share()
    for budget in draft.budgets():
        shapes, centred = centred_shapes(draft.preset, draft.known, budget, share)
        draft.decided.append(f"sizes at {budget:.3g} FLOPs centred on {centred}")
        for shape in shapes:
            _add_shape(draft, budget, shape, share)


def _negatives(draft: Draft) -> None:
    """Stage 2 with more and more negatives, from the allocation winner of each budget."""
    for budget in draft.budgets():
        parent = _parent(draft, budget)
        for count in sorted(draft.preset.negatives.num_negatives) if parent else ():
            assert parent is not None
            draft.add_stage_two(budget, parent, count)


def _init(draft: Draft) -> None:
    """Initialisations × sizes × learning rates; one budget per size."""
    choice = draft.preset.init
    known = draft.preset.budgets_of("init")
    for budget in draft.asked.budgets:
        if budget not in known:
            raise ConfigError(
                f"the init axis has no size for {budget:g} FLOPs",
                expected=f"one of {', '.join(f'{b:g}' for b in known)}: preset {draft.preset.name} ties each size "
                "to a budget",
                next_step="leave --budgets away, or give a preset of your own",
            )
    share = draft.share()
    for row in choice.sizes:
        if row.budget in draft.budgets():
            for init in choice.inits:
                wanted = {"init": init, "width": row.width, "depth": row.depth}
                label = f"{init}-{row.width}x{row.depth}"
                draft.add_solved(row.budget, label, wanted, init=init, share=share, width=row.width, depth=row.depth)


_DESIGNERS: dict[str, Callable[[Draft], None]] = {
    "share": _share,
    "depth": _depth,
    "batch": _batch,
    "allocation": _allocation,
    "negatives": _negatives,
    "init": _init,
}


def centred_shapes(preset: Preset, known: Known, budget: float, share: float) -> tuple[list[Shape], str]:
    """The neighbouring shapes of the ladder whose middle is nearest to the expected best size.

    The preset's table holds at the preset's share. At another share a parameter costs more or less per event, since
    those of the embedder work on all tokens of an item, and the best size goes as the root of what compute buys.
    """
    choice = preset.allocation
    expected = known.size(budget)
    if expected is None:
        row = min(choice.centres, key=lambda row: abs(math.log(row[0] / budget)))
        tokens = preset.world.text_len
        dearer = (1 + (tokens - 1) * share) / (1 + (tokens - 1) * preset.common.share)
        expected = row[1] * (budget / row[0] / dearer) ** 0.5, "the preset's table"
    size, why = expected
    sizes = [12 * depth * width * width / (1 - share) for width, depth in choice.ladder]
    count = min(choice.num_shapes, len(sizes))

    def distance(first: int) -> float:
        middle = sum(math.log(s) for s in sizes[first : first + count]) / count
        return abs(middle - math.log(size))

    first = min(range(len(sizes) - count + 1), key=distance)
    return list(choice.ladder[first : first + count]), f"{size:.3g} parameters ({why})"


def wider(facts: Facts, preset: Preset, asked: Asked, budget: float, share: float, shape: Shape) -> Design:
    """The allocation cells of one further shape, for a budget whose best size is at the edge of its grid."""
    draft = Draft("allocation", preset, facts, Known(), asked)
    _add_shape(draft, budget, shape, share)
    return draft.finished()


def next_shape(ladder: Sequence[Shape], tried: Iterable[Shape], side: int) -> Shape | None:
    """The shape of the ladder above (side = 1) or below (-1) those tried; None at its end."""
    shapes = set(tried)
    places = [place for place, shape in enumerate(ladder) if shape in shapes]
    if not places:
        return None
    place = (max(places) if side > 0 else min(places)) + side
    return ladder[place] if 0 <= place < len(ladder) else None


def with_rate(planned: Planned, facts: Facts, rate: float) -> Planned:
    """The same cell at another learning rate."""
    train = planned.recipe.train.model_copy(update={"learning_rate": rate})
    recipe = planned.recipe.model_copy(update={"train": train})
    row = planned.row.model_copy(update={"learning_rate": rate, "recipe_hash": recipe.hash(facts.checksum)})
    return Planned(row, recipe, planned.cell)


def _add_shape(draft: Draft, budget: float, shape: Shape, share: float) -> None:
    width, depth = shape
    wanted = {"width": width, "depth": depth, "embedder_share": share}
    draft.add_solved(budget, f"{width}x{depth}", wanted, share=share, width=width, depth=depth)


def _parent(draft: Draft, budget: float) -> Planned | None:
    """The stage-1 run that stage 2 continues: the store's winner, or one to be trained for the purpose."""
    if budget in draft.winners:
        found = draft.winners[budget]
        draft.decided.append(f"parent at {budget:.3g} FLOPs: allocation winner {found.row.cell_id}")
        return found
    share, why = draft.known.share(draft.preset.common.share)
    shapes, centred = centred_shapes(draft.preset, draft.known, budget, share)
    own = Draft("allocation", draft.preset, draft.facts, draft.known, Asked((), 1, 1, draft.asked.allow_repeats))
    for place in sorted(range(len(shapes)), key=lambda place: abs(place - (len(shapes) - 1) / 2)):
        _add_shape(own, budget, shapes[place], share)
        if own.cells:
            draft.decided.append(
                f"parent at {budget:.3g} FLOPs: no allocation sweep there, so {own.cells[0].row.cell_id} is trained "
                f"first; centred on {centred}; {why}"
            )
            draft.parents.append(own.cells[0])
            return own.cells[0]
    draft.left_out += own.left_out
    return None
