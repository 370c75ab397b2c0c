"""`habitus report`: a store in, one HTML page out. Which exhibits stand on it, and in which order."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from habitus.errors import ConfigError
from habitus.files import write_atomic
from habitus.reporting import (
    allocation,
    allocation_tables,
    batch,
    context,
    correlations,
    costs,
    depth,
    disclosure,
    finite,
    inits,
    negatives,
    rollouts,
    shape,
    share,
    summary,
    surface,
    surrogates,
    trust,
)
from habitus.reporting.figure import Chapter, Contents, Exhibit, MissingExhibit
from habitus.reporting.opening import opening
from habitus.reporting.page import render_page
from habitus.reporting.plan import plan_exhibit
from habitus.reporting.study import Study, read_study, study_name
from habitus.reporting.valleys import (
    BATCH_SIZE,
    CONTEXT,
    DEPTH,
    NEGATIVES,
    SHARE,
    SIZE,
    Valley,
    curves,
    law_over_compute,
    optimum_table,
)
from habitus.store import SURFACE_AXIS, Laws, Plan, open_store

LIVE_FOLDER = "data"  # of the sheets beside a page that is served
_Make = Callable[[Study], Exhibit | list[Exhibit] | None]


def report(
    store: str | Path,
    out: str | Path,
    *,
    png: str | Path | None = None,
    plan: Plan | str | Path | None = None,
    title: str | None = None,
    next_command: str | None = None,
) -> Path:
    """Write the report of a store, its archive or a flat CSV of runs to `out`; with `png`, its figures as PNG too.

    `title` stands on top instead of the store's name, `next_command` below the plan.
    """
    store, out = Path(store), Path(out)
    if out.suffix.lower() not in (".html", ".htm") or not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be used", expected="a name that ends in .html, in a folder that exists")
    with open_store(store) as folder:
        study = read_study(folder, plan)
    study = replace(study, name=title or study.name, next_command=next_command)
    contents = _list_contents(study)
    try:
        html, beside = render_page(study, contents, f"{out.stem}-data")
        for name, text in beside.items():
            (out.parent / f"{out.stem}-data").mkdir(exist_ok=True)
            write_atomic(out.parent / f"{out.stem}-data" / name, text.encode())
        write_atomic(out, html.encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", expected="a file name in a folder") from error
    if png is not None:
        from habitus.reporting.png import write_pngs

        write_pngs(study, contents, Path(png))
    return out


def draw_unfinished(store: Path, metrics: Sequence[str], live: str) -> tuple[str, dict[str, str]]:
    """The page of a store whose runs have not all ended, below a panel, and the sheets beside it.

    Laws are fitted to the metrics named alone, as far as runs have them.
    """
    study = read_study(store, metrics=metrics)
    return render_page(study, _list_contents(study), LIVE_FOLDER, live)


def draw_empty(store: Path, live: str) -> str:
    """The same page before the first run has ended."""
    study = Study(study_name(store.resolve()), Laws(source="", seed=0, metrics=()), ())
    return render_page(study, Contents((), ()), LIVE_FOLDER, live)[0]


def _of(valley: Valley, make: Callable[[Study, Valley], Exhibit | None]) -> _Make:
    """An exhibit that is drawn from the description of an axis."""
    return lambda study: make(study, valley)


# Key and title of a chapter; per entry what it is called when missing, its function, and the axes that measure it.
_CHAPTERS: tuple[tuple[str, str, tuple[tuple[str, _Make, str], ...]], ...] = (
    ("log-end", "A log that ends", (
        ("metrics against passes", finite.passes, "passes"),
        ("metrics against regularisation", finite.regularisation, "passes"),
        ("the value of more data", finite.value_of_data, "passes on shares of the users"),
        ("how far this log goes", finite.limits_table, "passes"),
    )),
    ("one-law", "One law of the recipe", (
        ("size, share and batch as slices of one law", surface.slices, "surface"),
        ("best recipe by budget and cost", surface.optimum_table, "surface"),
        ("how the best recipe moves", surface.exponent_table, "surface"),
    )),
    ("embedder-share", "Embedder share", (
        ("metrics against share", _of(SHARE, curves), "share"),
        ("s*(C)", _of(SHARE, law_over_compute), "share"),
        ("table of s*", _of(SHARE, optimum_table), "share"),
    )),
    ("batch-size", "Batch size", (
        ("metrics against batch size at equal compute", _of(BATCH_SIZE, curves), "batch_size"),
        ("B*(C)", _of(BATCH_SIZE, law_over_compute), "batch_size"),
        ("table of B*", _of(BATCH_SIZE, optimum_table), "batch_size"),
        ("critical batch size", batch.batch_fits, "batch"),
        ("table of critical batch sizes", batch.batch_table, "batch"),
        ("critical batch sizes by target", batch.batch_targets, "batch"),
    )),
    ("size-and-data", "Size and data", (
        ("iso-FLOP curves", _of(SIZE, curves), "allocation"),
        ("frontiers N*, D*, D/N", allocation.frontiers, "allocation"),
        ("table of the allocation", allocation_tables.allocation_table, "allocation"),
        ("exponents with nearest cells", allocation_tables.exponents, "allocation"),
    )),
    ("windows", "Windows and histories", (
        ("metrics against window length", _of(CONTEXT, curves), "context"),
        ("L*(C) of the window", _of(CONTEXT, law_over_compute), "context"),
        ("table of L*", _of(CONTEXT, optimum_table), "context"),
        ("what longer histories add", context.history_curves, "context"),
        ("history that is enough", context.history_table, "context"),
    )),
    ("shapes", "Shape", (
        ("six knobs at once", shape.shape_table, "shape"),
        ("share with dropout in the embedder", shape.regularised_shares, "regularisation"),
    )),
    ("extra-negatives", "Extra negatives", (
        ("metrics against K", _of(NEGATIVES, curves), "negatives"),
        ("table of K*", _of(NEGATIVES, optimum_table), "negatives"),
    )),
    ("metrics", "Which metric to trust", (
        ("correlation of metrics", correlations.correlation_matrices, "allocation"),
        ("loss and ranking against K", negatives.loss_and_recall, "negatives"),
        ("batch-local against catalogue", surrogates.regimes, "both regimes"),
    )),
    ("recipe-table", "Recipe", (("recipe table", summary.recipe_table, "allocation"),)),
    ("accounting-and-checks", "Accounting and cross-checks of the share", (
        ("iso-FLOP accounting", allocation_tables.accounting, "allocation"),
        ("optima by nominal and executed FLOPs", costs.both_costs, "allocation"),
        ("share zoom, loss only", share.share_zoom, "share"),
        ("metrics against FLOP share", share.flop_share, "share"),
        ("N/D as a proxy of the share", share.proxy, "share"),
        ("N_eff and repetition", share.why_small, "share"),
    )),
    ("depth-axis", "Depth", (
        ("depth parabolas", _of(DEPTH, curves), "depth"),
        ("depth metrics against s and f", depth.depth_metrics, "depth"),
        ("depth tables: summary, grid, evaluation", depth.depth_tables, "depth"),
    )),
    ("training-signals", "Training signals", (
        ("trajectories per batch size", batch.trajectories, "batch"),
        ("training-loss channels against K", negatives.channels, "negatives"),
        ("K*(C)", _of(NEGATIVES, law_over_compute), "negatives"),
        ("allocation by training loss", allocation_tables.train_surrogate, "allocation"),
        ("surrogacy of the training loss", surrogates.surrogate, "negatives"),
    )),
    ("starts", "Initialisation and learning rates", (
        ("loss against learning rate, best rate against size", inits.learning_rates, "init"),
        ("table of initialisations", inits.learning_rate_table, "init"),
        ("laws by optimizer and init", inits.groups_table, "allocation with another optimizer in its preset"),
    )),
    ("correlations-in-full", "Correlations in full", (
        ("training loss against metrics", surrogates.training_loss_table, "allocation"),
        ("correlation by budget", correlations.correlation_by_budget, "allocation"),
        ("correlation tables, stage 1 and stage 2", correlations.correlation_tables, "allocation"),
        ("loss against ranking in both regimes", surrogates.loss_and_recall_regimes, "allocation"),
    )),
    ("history", "History slices", (
        ("worst slice agreement", correlations.worst_agreement, "slices"),
        ("slice matrices, batch", lambda s: correlations.slice_matrices(s, "batch"), "slices"),
        ("slice matrices, catalogue", lambda s: correlations.slice_matrices(s, "catalogue"), "catalogue slices"),
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


def _list_contents(study: Study) -> Contents:
    """All exhibits that the store supports, in order, and those that it does not."""
    first = (
        opening(study),
        plan_exhibit(study),
        finite.table_of_test_users(study),
        summary.answer(study),
        disclosure.study_map(study),
    )
    chapters = [Chapter("summary", "Summary", tuple(exhibit for exhibit in first if exhibit))]
    missing = []
    for key, title, entries in _CHAPTERS:
        exhibits: list[Exhibit] = []
        for name, make, axis in entries:
            result = make(study)
            if not result and axis == SURFACE_AXIS:
                continue  # of stores that hold one only: no command of habitus runs it
            if not result:
                missing.append(MissingExhibit(name, _command(axis)))
            else:
                exhibits += result if isinstance(result, list) else [result]
        if exhibits:
            chapters.append(Chapter(key, title, tuple(exhibits)))
    if study.plan is None:
        flops = f"{10 * study.budgets[-1]:.3g}"
        command = f"habitus plan --laws STORE --flops {flops} --metric {study.metric} --register plan.json"
        missing.append(MissingExhibit("recipe for a budget of your own", command))
    return Contents(tuple(chapters), tuple(missing))


def _command(axis: str) -> str:
    """The command that would measure an axis."""
    sweep = "habitus sweep {} --data DATASET --store STORE"
    if axis == "both regimes":
        return sweep.format("allocation") + '  (recipes with evaluate.regimes = ["batch", "catalogue"])'
    if axis.endswith("slices"):
        return sweep.format("allocation") + "  (queries with 3, 5, 10, 20, 50 and 100 events of history)"
    name, _, more = axis.partition(" ")
    return sweep.format(name) + (f"  ({more})" if more else "")
