"""The order of the page: every figure and table of the protocol, and what is missing with how to measure it."""

from collections.abc import Callable
from dataclasses import dataclass

from habitus.reporting import (
    allocation,
    batch,
    correlations,
    depth,
    disclosure,
    inits,
    negatives,
    planned,
    rollouts,
    share,
    sizes,
    slices,
    surrogates,
    trust,
)
from habitus.reporting import summary as top
from habitus.reporting.figure import Block
from habitus.reporting.study import Study


@dataclass(frozen=True)
class Missing:
    """A block that this store does not support, why, and what would measure it."""

    title: str
    command: str


@dataclass(frozen=True)
class Group:
    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Contents:
    groups: tuple[Group, ...]
    missing: tuple[Missing, ...]

    @property
    def blocks(self) -> list[Block]:
        return [block for group in self.groups for block in group.blocks]


Maker = Callable[[Study], Block | list[Block] | None]

# key and title of a group; per entry what it is called when missing, its maker, and the axes that measure it.
_ORDER: tuple[tuple[str, str, tuple[tuple[str, Maker, str], ...]], ...] = (
    ("embedder-share", "Embedder share", (
        ("metrics against share", share.share_curves, "share"),
        ("s*(C)", share.share_law, "share"),
        ("table of s*", share.share_table, "share"),
    )),
    ("batch-size", "Batch size", (
        ("critical batch size", batch.batch_fits, "batch"),
        ("table of critical batch sizes", batch.batch_table, "batch"),
    )),
    ("size-and-data", "Size and data", (
        ("iso-FLOP curves", allocation.isoflop, "allocation"),
        ("frontiers N*, D*, D/N", allocation.frontiers, "allocation"),
        ("table of the allocation", sizes.allocation_table, "allocation"),
        ("exponents with nearest cells", sizes.exponents, "allocation"),
    )),
    ("extra-negatives", "Extra negatives", (
        ("metrics against K", negatives.negatives_curves, "negatives"),
        ("table of K*", negatives.negatives_table, "negatives"),
    )),
    ("metrics", "Which metric to trust", (
        ("correlation of metrics", correlations.correlation_matrices, "allocation"),
        ("loss and ranking against K", negatives.loss_and_recall, "negatives"),
        ("batch-local against catalogue", surrogates.regimes, "both regimes"),
    )),
    ("recipe-table", "Recipe", (("recipe table", top.recipe_table, "allocation"),)),
    ("accounting-and-checks", "Accounting and cross-checks of the share", (
        ("iso-FLOP accounting", sizes.accounting, "allocation"),
        ("share zoom, loss only", share.share_zoom, "share"),
        ("metrics against FLOP share", share.flop_share, "share"),
        ("N/D as a proxy of the share", share.proxy, "share"),
    )),
    ("depth-axis", "Depth", (
        ("depth parabolas", depth.depth_parabolas, "depth"),
        ("depth metrics against s and f", depth.depth_metrics, "depth"),
        ("depth tables: summary, grid, evaluation", depth.depth_tables, "depth"),
    )),
    ("training-signals", "Training signals", (
        ("trajectories per batch size", batch.trajectories, "batch"),
        ("training-loss channels against K", negatives.channels, "negatives"),
        ("K*(C)", negatives.negatives_law, "negatives"),
        ("allocation by training loss", sizes.train_surrogate, "allocation"),
        ("surrogacy of the training loss", surrogates.surrogate, "negatives"),
    )),
    ("inits", "Initialisation and learning rates", (
        ("loss against learning rate, best rate against size", inits.learning_rates, "init"),
        ("table of initialisations", inits.learning_rate_table, "init"),
    )),
    ("correlations-in-full", "Correlations in full", (
        ("training loss against metrics", surrogates.training_loss_table, "allocation"),
        ("correlation by budget", correlations.correlation_by_budget, "allocation"),
        ("correlation tables, stage 1 and stage 2", correlations.correlation_tables, "allocation"),
        ("loss against ranking in both regimes", surrogates.loss_and_recall_regimes, "allocation"),
    )),
    ("history", "History slices", (
        ("worst slice agreement", slices.worst_agreement, "slices"),
        ("slice matrices, batch", lambda s: slices.slice_matrices(s, "batch"), "slices"),
        ("slice matrices, catalogue", lambda s: slices.slice_matrices(s, "catalogue"), "catalogue slices"),
    )),
    ("trust", "How far to trust it", (
        ("roll-out", rollouts.rollout_figure, "allocation over four budgets"),
        ("roll-out table", rollouts.rollout_table, "allocation over four budgets"),
        ("both approaches to N*", trust.both_approaches, "allocation"),
        ("flat ranges", trust.flat_ranges, "allocation"),
        ("calibration on this store", rollouts.calibration, "allocation over four budgets"),
        ("learning rates chosen", trust.rate_choices, "allocation with several learning rates"),
    )),
    ("disclosure-list", "Exclusions and disclosure", (
        ("exclusions", disclosure.exclusions, ""),
        ("warnings", disclosure.warnings, ""),
        ("disclosure", disclosure.disclosure, ""),
    )),
)  # fmt: skip


def contents(study: Study) -> Contents:
    """All blocks that the store supports, in order, and what is missing."""
    first = [block for block in (planned.plan_block(study), top.answer(study), disclosure.study_map(study)) if block]
    groups = [Group("summary", "Summary", tuple(first))]
    missing = []
    for key, title, entries in _ORDER:
        blocks: list[Block] = []
        for name, make, axis in entries:
            made = make(study)
            found = made if isinstance(made, list) else [made] if made is not None else []
            blocks += found
            if not found:
                missing.append(Missing(name, _command(axis)))
        if blocks:
            groups.append(Group(key, title, tuple(blocks)))
    if study.plan is None:
        flops = f"{10 * study.budgets[-1]:.3g}"
        command = f"habitus plan --laws STORE --flops {flops} --metric {study.metric} --register plan.json"
        missing.append(Missing("recipe for a budget of your own", command))
    return Contents(tuple(groups), tuple(missing))


def _command(axis: str) -> str:
    """What would measure it."""
    sweep = "habitus sweep {} --data DATASET --store STORE"
    if axis == "both regimes":
        return sweep.format("allocation") + '  (recipes with evaluate.regimes = ["batch", "catalogue"])'
    if axis.endswith("slices"):
        return sweep.format("allocation") + "  (queries with 3, 5, 10, 20, 50 and 100 events of history)"
    name, _, more = axis.partition(" ")
    return sweep.format(name) + (f"  ({more})" if more else "")
