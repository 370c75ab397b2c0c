"""Trained runs, one or all of a store, on identical queries: the input of every comparison between runs."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import torch

from habitus.data import Dataset
from habitus.errors import ConfigError, HabitusError, ModelError, RunError
from habitus.evaluation.baselines import OracleScorer, baselines
from habitus.evaluation.calibration import calibrate, check_calibration
from habitus.evaluation.error_analysis import ErrorOptions, slice_evaluations
from habitus.evaluation.evaluation import (
    EvaluateOptions,
    Evaluation,
    catalogue_subset,
    evaluate,
    horizon_queries,
    query_set,
)
from habitus.evaluation.horizon import PerUser, horizon_differences
from habitus.evaluation.model_scorer import ModelScorer
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import Scorer
from habitus.model import (
    CACHE_MANIFEST,
    Bundle,
    CacheManifest,
    EmbeddingCache,
    build_cache,
    check_same_fields,
    chosen_run,
    load_bundle,
)
from habitus.progress import Note, Progress
from habitus.recipe import Recipe
from habitus.softmax import MEMORY_BYTES
from habitus.store import BaselineDifference

Keep = Callable[[str, str, PerQuery], None]


@dataclass(frozen=True)
class ComputeOptions:
    """How runs are opened and computed; nothing of it changes a number beyond rounding."""

    device: torch.device | str = "cpu"
    other_dataset: bool = False  # whether runs of another dataset with the same encoders are accepted
    memory_bytes: int = MEMORY_BYTES


def evaluate_runs(
    paths: Iterable[str | Path],
    dataset: Dataset,
    options: EvaluateOptions | None = None,
    compute: ComputeOptions | None = None,
    *,
    with_baselines: bool = False,
    checkpoints: bool = False,
    with_calibration: bool = False,
    errors: ErrorOptions | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
    keep: Keep | None = None,
    keep_users: Callable[[str, str, PerUser], None] | None = None,
) -> list[Evaluation]:
    """One evaluation per run, then one per baseline if requested, all on the same queries.

    Windows have the length of the runs' own `data.seq_len`, whatever that of `dataset` is.
    A path is a run, a checkpoint, a bundle, or a store, of which every cell with a bundle is taken; with `checkpoints`
    a run stands for its checkpoints too, in the order of their steps. `with_calibration` judges the probabilities of
    runs and fits a temperature; `errors` takes runs apart. `note` is called with what a user should know, such as that
    a cache is being built; `keep` with (scorer, regime, values per query), `keep_users` with those per user of
    horizons.
    """
    options, compute = options or EvaluateOptions(), compute or ComputeOptions()
    note = note or (lambda _: None)
    chosen = [chosen_run(path) for path in paths]
    if errors is not None:
        errors.check(dataset, options)
        if errors.reference_run is not None:
            errors = replace(errors, against=str(chosen_run(errors.reference_run)))
        chosen = errors.with_reference(chosen)
        with_baselines = with_baselines or errors.reference_run is None
    runs = find_runs(chosen, note, checkpoints=checkpoints)
    dataset = _with_seq_len_of(runs, dataset)
    # Everything that can be refused without a model is refused before one is loaded or a catalogue embedded.
    for users in horizon_queries(dataset, options):
        note(users.describe())
    if options.regimes:
        queries = query_set(dataset, options)
        if "catalogue" in options.regimes:
            catalogue_subset(dataset, queries, options)

    def evaluate_one(scorer: Scorer, number: int, count: int) -> Evaluation:
        def report(phase: str, done: float) -> None:
            if progress is not None:
                progress(phase if count == 1 else f"{number + 1}/{count} {phase}", done)

        def keep_values(regime: str, values: PerQuery) -> None:
            if errors is not None:
                values_by_scorer[scorer.name, regime] = values
            if keep is not None:
                keep(scorer.name, regime, values)

        def compare_users(regime: str, values: PerUser) -> None:
            first = first_users.setdefault(regime, values)
            if first is not values:
                leads[scorer.name] = leads.get(scorer.name, {}) | {
                    name: BaselineDifference(**difference._asdict())
                    for name, difference in horizon_differences(regime, first, values, options.cutoffs).items()
                }
            if keep_users is not None:
                keep_users(scorer.name, regime, values)

        evaluation = evaluate(dataset, scorer, options, progress=report, keep=keep_values, keep_users=compare_users)
        return evaluation.model_copy(update={"less_than_first": leads.get(scorer.name, {})})

    first_users: dict[str, PerUser] = {}  # of the first scorer by horizon
    leads: dict[str, dict[str, BaselineDifference]] = {}
    evaluations: list[Evaluation] = []
    values_by_scorer: dict[tuple[str, str], PerQuery] = {}
    scorers = baselines(dataset) if with_baselines else []
    if options.horizons:  # the oracle knows the next event, not the days after it
        scorers = [scorer for scorer in scorers if not isinstance(scorer, OracleScorer)]
    count = len(runs) + len(scorers)
    for number, run in enumerate(runs):
        # One at a time: the model and the catalogue of the last run are gone before the next one is opened.
        scorer = open_scorer(run, dataset, options, compute, note, progress)
        if with_calibration:
            check_calibration(scorer, options)
        evaluation = evaluate_one(scorer, number, count)
        if with_calibration:
            evaluation = evaluation.model_copy(update={"calibration": calibrate(dataset, scorer, options)})
        evaluations.append(evaluation)
    for number, baseline in enumerate(scorers, len(runs)):
        evaluations.append(evaluate_one(baseline, number, count))
    return evaluations if errors is None else slice_evaluations(dataset, evaluations, values_by_scorer, errors)


def metrics_table(evaluations: Iterable[Evaluation]) -> pa.Table:
    """One row per run, regime and metric: run, regime, metric, value, se, n. A metric may end in its slice."""
    rows = [
        {"run": one.scorer, "regime": name.partition("/")[0], "metric": name.partition("/")[2], **metric.to_values()}
        for one in evaluations
        for name, metric in one.metrics.items()
    ]
    columns = [("run", pa.string()), ("regime", pa.string()), ("metric", pa.string())]
    columns += [("value", pa.float64()), ("se", pa.float64()), ("n", pa.int64())]
    return pa.Table.from_pylist(rows, pa.schema(columns))


def find_runs(paths: Iterable[str | Path], note: Note, *, checkpoints: bool = False) -> list[Path]:
    """The folders that hold a bundle; a store stands for all of its cells that have one.

    With `checkpoints` each run is preceded by those that it kept: they hold the files of a bundle too.
    """
    runs: list[Path] = []
    for path in map(Path, paths):
        cells = path / "cells"
        if not cells.is_dir():
            runs += (_with_checkpoints(path) or [path]) if checkpoints else [path]
            continue
        every = sorted(cell for cell in cells.iterdir() if cell.is_dir() and not cell.name.startswith("."))
        by_cell = [_with_checkpoints(cell) if checkpoints else [cell] if _has_bundle(cell) else [] for cell in every]
        usable = [bundles for bundles in by_cell if bundles]
        missing = "neither bundle nor checkpoint" if checkpoints else "no bundle"
        if not usable:
            raise RunError(
                f"{path} holds {len(every)} cells and {missing}", expected="a store in which some cell was trained"
            )
        if len(usable) < len(every):
            note(f"{path}: {len(every) - len(usable)} of {len(every)} cells have {missing} and are left out")
        runs += [run for bundles in usable for run in bundles]
    return runs


def _with_checkpoints(run: Path) -> list[Path]:
    """What a run has to score, in the order in which it was trained."""
    checkpoints = [step for step in sorted((run / "checkpoints").glob("step-*")) if (step / "bundle.json").exists()]
    return [*checkpoints, run] if _has_bundle(run) else checkpoints


def _with_seq_len_of(runs: list[Path], dataset: Dataset) -> Dataset:
    """The dataset in windows of the length that the runs were trained with."""
    lengths: dict[int, Path] = {}
    for run in runs:
        for folder in (run, run / "bundle"):
            if (folder / "bundle.json").exists():
                with suppress(HabitusError):  # a file that cannot be read is refused, by name, when the run is opened
                    lengths.setdefault(Recipe.read(folder / "recipe.toml").data.seq_len, run)
                break
    if len(lengths) > 1:
        raise ConfigError(
            "the runs were trained with windows of different lengths: "
            + ", ".join(f"{length} in {run}" for length, run in sorted(lengths.items())),
            expected="runs with one data.seq_len: all are scored on the same queries",
            next_step="evaluate the runs of each length by themselves",
        )
    return dataset.with_seq_len(next(iter(lengths))) if lengths else dataset


def _has_bundle(run: Path) -> bool:
    return any((folder / "bundle.json").exists() for folder in (run, run / "bundle"))


def open_scorer(
    path: Path,
    dataset: Dataset,
    options: EvaluateOptions,
    compute: ComputeOptions,
    note: Note,
    progress: Progress | None = None,
) -> ModelScorer:
    """The model of a run as a scorer; a cache that the catalogue regime lacks is built, and `note` says so."""
    bundle = load_bundle(path, compute.device)
    check_dataset(bundle, dataset, compute.other_dataset)
    if bundle.recipe.data.include_validation and options.side == "validation":
        raise ModelError(
            f"{bundle.run_path} was trained on the validation events too (data.include_validation)",
            expected="an evaluation on events that it has not seen",
            next_step=f"habitus evaluate {path} --data {dataset.path} --side test",
        )
    ranks = Ranks()
    cache = find_cache(bundle, dataset, note, verify=ranks.is_first)  # hashing once is enough
    if cache is None and options.ranks_catalogue:
        cache = _build_cache(bundle, dataset, ranks, note, progress)
    return ModelScorer(bundle, dataset, cache, memory_bytes=compute.memory_bytes, ranks=ranks)


def check_dataset(bundle: Bundle, dataset: Dataset, other_dataset: bool | None) -> None:
    """Refuse a run that was trained on another dataset, unless `other_dataset` is set and the fields are the same.

    None where there is no such choice.
    """
    trained_on = bundle.manifest.dataset_checksum
    if trained_on != dataset.checksum and not other_dataset:
        raise ModelError(
            f"{bundle.run_path} was trained on another dataset than {dataset.path} "
            f"(checksum {trained_on[:12]}, not {dataset.checksum[:12]})",
            expected="the dataset that the run was trained on: with another one, validation users may have trained",
            next_step="name that dataset"
            if other_dataset is None
            else "pass --other-dataset if you mean it and the items are encoded in the same way",
        )
    check_same_fields(bundle, dataset)


def cache_folder(bundle: Bundle, dataset: Dataset) -> Path:
    """Where the vectors of a catalogue under a model belong; those of another dataset get a folder of their own."""
    of_training = bundle.manifest.dataset_checksum == dataset.checksum
    return bundle.run_path / ("catalogue" if of_training else f"catalogue-{dataset.checksum[:12]}")


def find_cache(bundle: Bundle, dataset: Dataset, note: Note, *, verify: bool = True) -> EmbeddingCache | None:
    """The model's own cache, or one of the same embedder that belongs to its run or to the run's stage-1 parent."""
    own = cache_folder(bundle, dataset)
    if (own / CACHE_MANIFEST).exists():
        return EmbeddingCache.open(own, bundle, dataset, verify=verify)
    run, parent = bundle.run_path, bundle.recipe.train.parent
    others = []
    if run.parent.name == "checkpoints":
        run = run.parents[1]
        others.append(run)
    if parent is not None:
        others.append(run.parent / parent)
    for other in others:
        shared = other / own.name
        if not (shared / CACHE_MANIFEST).exists():
            continue
        # A frozen embedder is the parent's, to the bit; should it not be, the vectors are not this model's.
        if CacheManifest.read(shared / CACHE_MANIFEST).embedder_checksum == bundle.embedder_checksum:
            note(f"{bundle.run_path}: its embedder is that of {other.name[:12]}, whose cache is used")
            return EmbeddingCache.open(shared, bundle, dataset, verify=verify)
    return None


def _build_cache(
    bundle: Bundle, dataset: Dataset, ranks: Ranks, note: Note, progress: Progress | None
) -> EmbeddingCache:
    """The cache, embedded by the first process while the others wait."""
    folder = cache_folder(bundle, dataset)
    if ranks.is_first:
        note(f"{bundle.run_path} has no embedding cache; embedding {dataset.num_items:,} items into {folder}")
        build_cache(bundle, dataset, folder, progress=progress)
    ranks.barrier()
    return EmbeddingCache.open(folder, bundle, dataset, verify=False)
