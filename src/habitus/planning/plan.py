"""The verb: a budget and a metric to the next recipe, with every number's interval and source."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.laws import published_laws
from habitus.planning import knobs
from habitus.planning.best_run import plan_within_log
from habitus.planning.context import context_quantities, with_windows
from habitus.planning.facts import DatasetProfile, StoreFacts, check_dataset, planned_evaluation, read_store_facts
from habitus.planning.fast_batch import choose_fastest
from habitus.planning.hardware import PlannedSteps, hours_at, hours_of_runs, memory_of, rate_on
from habitus.planning.measured import usual_lengths
from habitus.planning.paper_recipe import compare_with_published, printed_recipe
from habitus.planning.predict import PlannedRun, predict_metrics
from habitus.planning.rates import stage1_rate
from habitus.planning.repeats import dropout_quantity, flops_to_log_end, log_end_warning, passes_quantity
from habitus.planning.shape import MIN_STEPS, FixedSettings, largest_batch, stage1_cell
from habitus.planning.sources import SourcedLaws, laws_by_source
from habitus.planning.stage_two import StageTwoCell, stage2_cell, stage2_quantities, stage2_warnings, usual_batch
from habitus.planning.warnings import (
    data_warnings,
    hardware_warnings,
    law_warnings,
    paper_warnings,
    prediction_warnings,
    quantity_warnings,
    reach_warnings,
    window_warnings,
)
from habitus.recipe import OPTIMIZERS, DataRecipe, EvaluateRecipe, Recipe, TrainRecipe
from habitus.sizing import Cell
from habitus.store import Extrapolation, Laws, MemoryEstimate, Plan, Quantity, gpu_named
from habitus.typed import suggest_name

# Times the largest measured budget, or less than the smallest: beyond it a plan is refused unless asked for.
_FARTHEST = 1000.0
_TEXT_DEPTH = 4


@dataclass(frozen=True)
class PlanOptions:
    """Everything but the budget and the metric."""

    laws: Path | None = None  # a laws.json; else the published laws
    dataset: Dataset | None = None
    gpu: str | None = None
    gpus: int = 1
    stage2_share: float = 0.2
    extrapolate: bool = False  # beyond _FARTHEST
    fastest_batch: bool = False  # of those that lose nothing; else that of the runs whose sizes were compared
    seed: int = 0


def plan(flops: float, metric: str, options: PlanOptions | None = None) -> Plan:
    """Both recipes for a total budget and the metric that is served."""
    options = options or PlanOptions()
    _check_options(flops, options)
    user = None if options.laws is None else Laws.read(options.laws)
    _check_metric(metric, user)
    facts = read_store_facts(options.laws)
    dataset = _dataset_profile(options, facts, user)
    unchecked = None if user is None else check_dataset(dataset, facts, user, options.laws)
    if user is not None and options.laws is not None and options.dataset is not None:
        within = plan_within_log(options.laws.parent, user, metric, options.dataset, flops)
        if within is not None:
            return within
    sources = laws_by_source(user)
    context = context_quantities((1 - options.stage2_share) * flops, metric, sources)
    evaluate, other_evaluation = planned_evaluation(dataset, facts, user, options.laws)
    fixed = with_windows(_fixed_settings(dataset, facts, user, evaluate), context, metric, sources)

    def cells_of(C: float, C2: float) -> PlannedCells:
        return plan_cells(C, C2, metric, sources, fixed, facts, fastest_batch=options.fastest_batch)

    def stage1_of(total: float) -> Cell:
        return cells_of((1 - options.stage2_share) * total, 0.0).stage1

    asked, flops = flops, flops_to_log_end(flops, dataset, stage1_of)
    C2 = options.stage2_share * flops
    C = flops - C2
    reach = _extrapolation(C, metric, sources, allowed=options.extrapolate, stopped=flops < asked)
    cells = cells_of(C, C2)
    passes = passes_quantity(cells.stage1, dataset, stopped=flops < asked)
    dropout = dropout_quantity(passes, facts)
    gpu = None if options.gpu is None else gpu_named(options.gpu)
    rate = None if gpu is None else rate_on(gpu, options.gpus, flops, [(c.flops, c) for c in cells.cells()])
    hours = hours_at(rate, flops) if rate is not None else hours_of_runs(cells.stages(C, C2), facts)
    memory = tuple(memory_of(cell, gpu, options.gpus) for cell in cells.cells())
    printed = printed_recipe(flops)
    learning_rate = cells.quantities["learning_rate"].value
    planned = PlannedRun.of(C, cells.stage1, learning_rate, dataset.train_slots, fixed.batch_scale)
    predictions, unpredicted = predict_metrics(planned, C2, metric, sources, facts.parents)
    warnings = [
        *([user.unsealed] if user and user.unsealed else []),
        *([unchecked] if unchecked else []),
        *log_end_warning(asked, flops, passes),
        *reach_warnings(reach),
        *law_warnings(metric, sources),
        *quantity_warnings({**cells.quantities, **context}, sources),
        *window_warnings(dataset.seq_len, fixed.dataset.seq_len, predictions),
        *data_warnings(cells.stage1, dataset),
        *stage2_warnings(cells.stage2),
        *hardware_warnings(memory, rate),
        *prediction_warnings(metric, predictions, sources),
        *([other_evaluation] if other_evaluation and predictions else []),
        *unpredicted,
        *paper_warnings(printed, flops),
    ]
    return Plan(
        metric=metric,
        flops=flops,
        stage1_flops=C,
        stage2_flops=C2,
        flops_item_cache=cells.stage1.flops_item_cache,
        optimizer=fixed.optimizer,
        laws="published" if user is None else str(options.laws),
        dataset_checksum=dataset.dataset_checksum,
        quantities={
            **cells.quantities,
            **context,
            **({} if passes is None else {"passes": passes}),
            **({"dropout": dropout} if dropout.value else {}),
            **({} if hours is None else {"hours": hours}),
            "memory_gib": _gibibytes(memory, options.gpus),
        },
        predictions=predictions,
        memory=memory,
        extrapolation=reach,
        printed=printed,
        differences=()
        if user is None
        else compare_with_published(*(optimal_knobs(C, C2, metric, s) for s in (sources, sources[1:]))),
        warnings=tuple(dict.fromkeys(warnings)),
        stage1=_recipe(cells.stage1, cells.quantities["learning_rate"], dropout, fixed, facts, options),
        stage2=None
        if cells.stage2 is None
        else _recipe(cells.stage2.cell, cells.quantities["stage2_learning_rate"], dropout, fixed, facts, options),
    )


def optimal_knobs(C: float, C2: float, metric: str, sources: list[SourcedLaws]) -> dict[str, Quantity]:
    """What the laws give, before anything is built or capped."""
    quantities = {
        "params": knobs.size(C, metric, sources),
        "embedder_share": knobs.share(C, metric, sources),
        "batch_sequences": knobs.batch(C, metric, sources),
    }
    return {**quantities, "num_negatives": knobs.negatives(C2, metric, sources)} if C2 else quantities


@dataclass(frozen=True)
class PlannedCells:
    """The knobs and the cells they become."""

    quantities: dict[str, Quantity]
    stage1: Cell
    stage2: StageTwoCell | None

    def cells(self) -> list[Cell]:
        return [self.stage1] + ([self.stage2.cell] if self.stage2 else [])

    def stages(self, C: float, C2: float) -> list[PlannedSteps]:
        """What each does."""
        return [
            PlannedSteps(
                cell.stage, C2 if cell.stage == 2 else C, cell.flops_per_step, cell.executed_flops / cell.flops
            )
            for cell in self.cells()
        ]


def plan_cells(
    C: float,
    C2: float,
    metric: str,
    sources: list[SourcedLaws],
    fixed: FixedSettings,
    facts: StoreFacts,
    *,
    fastest_batch: bool = False,
) -> PlannedCells:
    """N, s, B from the laws; D from Equation 1; K from its law, capped; and the ranges that N's interval implies."""
    optima = optimal_knobs(C, C2, metric, sources)
    N, s, B = (optima[name] for name in ("params", "embedder_share", "batch_sequences"))
    if fastest_batch:
        B = choose_fastest(B, sources[0].file, facts.speeds, metric, C)
    if fixed.batch_scale != 1:
        how = f"{B.how}; in windows of {fixed.dataset.seq_len}"
        B = B.model_copy(update={"value": fixed.in_windows(B.value), "low": None, "high": None, "how": how})
    affordable = largest_batch(C, N.value, s.value, int(B.value), fixed)
    if affordable < B.value:
        low, how = None if B.low is None else min(B.low, affordable), f"lowered so that {MIN_STEPS} steps remain"
        B = B.model_copy(update={"value": affordable, "low": low, "how": f"{B.how}; {how}"})
    cell = stage1_cell(C, N.value, s.value, affordable, fixed)
    ends = [_end(C, end, s.value, affordable, fixed) for end in (N.low, N.high)]
    quantities = {
        "params": _with_built_value(N, cell.params),
        "embedder_share": _with_built_value(s, cell.embedder_share),
        "batch_sequences": B,
        "learning_rate": stage1_rate(C, cell, affordable / fixed.batch_scale, metric, sources),
        **_derived(cell, ends, N),
    }
    if not C2:
        return PlannedCells(quantities, cell, None)
    second = stage2_cell(C2, cell, optima["num_negatives"].value, usual_batch(fixed, facts), fixed)
    quantities |= stage2_quantities(second, optima["num_negatives"], (C, C2), fixed, facts, sources)
    return PlannedCells(quantities, cell, second)


def _with_built_value(optimum: Quantity, value: float) -> Quantity:
    """The number of the model that can be built; the interval holds it too."""
    low = None if optimum.low is None else min(optimum.low, value)
    high = None if optimum.high is None else max(optimum.high, value)
    return optimum.model_copy(update={"value": value, "low": low, "high": high})


def _end(C: float, N: float | None, s: float, B: int, fixed: FixedSettings) -> Cell | None:
    """The cell at an end of N's interval; None where it is open or cannot be built."""
    if N is None:
        return None
    try:
        return stage1_cell(C, N, s, B, fixed)
    except ConfigError:
        return None


def _derived(cell: Cell, ends: list[Cell | None], N: Quantity) -> dict[str, Quantity]:
    """What follows from N, s and B; its range is that of N's, of the same kind."""

    def quantity(value: float, at_ends: list[float | None], how: str) -> Quantity:
        ends = [end for end in at_ends if end is not None]
        low, high = (min(*ends, value), max(*ends, value)) if len(ends) == 2 else (None, None)
        return Quantity(value=value, low=low, high=high, source=N.source, how=how, range=N.range)

    def of(name: str, how: str) -> Quantity:
        def read(c: Cell | None) -> float | None:
            return None if c is None else float(getattr(c.model if hasattr(c.model, name) else c, name))

        value = read(cell)
        assert value is not None
        return quantity(value, [read(end) for end in ends], how)

    return {
        "slots_seen": of("slots_seen", "D of Equation 1, given N, B and s"),
        "data_ratio": of("data_ratio", "D/N as paid, not C/(6N²)"),
        "steps": of("steps", "D over the slots of a batch"),
        "joint_dim": of("joint_dim", "nearest embedder to the share"),
        "width": of("width", "shape near width/depth = 40"),
        "depth": of("depth", "shape near width/depth = 40"),
    }


def _dataset_profile(options: PlanOptions, facts: StoreFacts, user: Laws | None) -> DatasetProfile:
    """The dataset that is given; else one with the windows and texts of the study's runs; else a typical one."""
    if options.dataset is not None:
        return DatasetProfile.of(options.dataset)
    if facts.recipe is None:
        known = {} if user is None else usual_lengths(user.runs)
        typical = DatasetProfile()
        return replace(
            typical,
            seq_len=known.get("seq_len", typical.seq_len),
            text_len=known.get("text_len", typical.text_len),
        )
    return DatasetProfile(seq_len=facts.recipe.data.seq_len, text_len=facts.recipe.model.text_len)


def _fixed_settings(
    dataset: DatasetProfile, facts: StoreFacts, user: Laws | None, evaluate: EvaluateRecipe
) -> FixedSettings:
    """What all runs behind the laws had in common: the optimizer is part of the law."""
    stated = "adamw" if user is None else user.definitions.get("optimizer", "")
    recipe = facts.recipe
    known = {} if user is None else usual_lengths(user.runs)
    return FixedSettings(
        dataset=dataset,
        text_depth=known.get("text_depth", _TEXT_DEPTH) if recipe is None else recipe.model.text_depth,
        head_dim=None if recipe is None else recipe.model.head_dim,
        optimizer=stated if stated in OPTIMIZERS else "adamw",
        precision="bf16" if recipe is None else recipe.train.precision,
        copying=recipe is not None and recipe.model.copying,
        init=None if user is None else user.definitions.get("init"),
        evaluate=evaluate,
    )


def _recipe(
    cell: Cell, rate: Quantity, dropout: Quantity, fixed: FixedSettings, facts: StoreFacts, options: PlanOptions
) -> Recipe:
    evaluate = fixed.evaluate
    common = facts.recipe.train if facts.recipe is not None else None
    model = cell.model
    if facts.recipe is not None:
        model = model.model_copy(update={"init": fixed.init or facts.recipe.model.init})
    return Recipe(
        data=DataRecipe(seq_len=cell.seq_len),
        model=model,
        train=TrainRecipe(
            stage=cell.stage,
            parent="previous" if cell.stage == 2 else None,
            num_negatives=cell.num_negatives,
            batch_sequences=cell.batch_sequences,
            steps=cell.steps,
            optimizer=fixed.optimizer,
            learning_rate=float(f"{rate.value:.4g}"),
            schedule="cosine",
            warmup=0.05 if common is None else common.warmup,
            weight_decay=0.1 if common is None else common.weight_decay,
            clip=1.0 if common is None else common.clip,
            precision=fixed.precision,
            log_q=common is not None and common.log_q,
            dropout=dropout.value,
            seed=options.seed,
        ),
        evaluate=evaluate.model_copy(
            update={
                "regimes": ("batch", "catalogue"),
                "every": 0,
                "contexts": fixed.contexts,
                "batch_sequences": fixed.in_windows(evaluate.batch_sequences),  # as many candidates in windows of L*
            }
        ),
    )


def _check_options(flops: float, options: PlanOptions) -> None:
    if not flops > 0 or not math.isfinite(flops):
        raise ConfigError(f"--flops {flops:g}", expected="a positive budget, as in 1e19")
    if not 0 <= options.stage2_share < 1:
        raise ConfigError(
            f"--stage2-share {options.stage2_share:g}", expected="the share of stage 2, from 0 to below 1, as in 0.2"
        )
    if options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}", expected="1 or more")


def _check_metric(metric: str, user: Laws | None) -> None:
    laws = user or published_laws()
    recorded = sorted(set(laws.metrics) | {e.metric for e in laws.entries})
    if metric not in recorded:
        names = {m: m.partition("/")[2] for m in recorded}
        with_regime = [m for m in recorded if names[m] == metric] or [
            m for m in recorded if names[m].startswith(metric)
        ]
        hint = f"did you mean {' or '.join(with_regime)}?" if with_regime else suggest_name(metric, recorded)
        raise ConfigError(
            f"metric {metric!r} was not recorded by these laws" + (f" ({hint})" if hint.startswith("did") else ""),
            expected=f"one of {', '.join(recorded)}",
            next_step="fit it with `habitus fit STORE --metric ...` if the runs hold it",
        )


def _extrapolation(
    C: float, metric: str, sources: list[SourcedLaws], *, allowed: bool, stopped: bool
) -> Extrapolation | None:
    """How far the budget is from those that were measured; refused beyond _FARTHEST on either side."""
    measured = knobs.measured_budgets(metric, sources)
    if measured is None:
        return None
    reach = Extrapolation(budget=C, smallest=measured[0], largest=measured[1], factor=C / measured[1])
    if allowed:
        return reach
    if reach.factor > _FARTHEST:
        raise ConfigError(
            f"{C:.3g} FLOPs are {reach.factor:,.0f} times the largest measured budget, {measured[1]:.3g}: "
            "a law says nothing there",
            expected=f"at most {_FARTHEST:,.0f} times, {_FARTHEST * measured[1]:.3g} FLOPs for stage 1",
            next_step="measure larger budgets (habitus study --flops or --gpu-hours), or insist with --extrapolate"
            + ("" if sources[0].source == "published" else "; --published reaches farther"),
        )
    if reach.smallest > _FARTHEST * C:
        less = f"{reach.smallest / C:,.0f} times less than the smallest measured budget, {reach.smallest:.3g}"
        where = f"the log ends at {C:.3g} FLOPs of stage 1," if stopped else f"{C:.3g} FLOPs of stage 1 are"
        raise ConfigError(
            f"{where} {less}: the model that a law gives there may lose to popularity",
            expected=f"at least {reach.smallest / _FARTHEST:.3g} FLOPs",
            next_step="habitus train --data DATASET finds a recipe for a log of any size, habitus study --data DATASET "
            "has laws of its own; or insist with --extrapolate",
        )
    return reach


def _gibibytes(memory: tuple[MemoryEstimate, ...], gpus: int) -> Quantity:
    largest = max(m.bytes["total"] + (m.bytes.get("item_cache", 0) if m.stage == 2 else 0) for m in memory)
    how = "counted by structure, of the larger stage, item cache included"
    if gpus > 1:
        how += f"; before {gpus} GPUs divide it: whether each has room stands below"
    return Quantity(value=largest / 1024**3, source="default", how=how)
