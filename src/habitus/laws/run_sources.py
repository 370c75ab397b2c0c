"""Where runs come from: a store's manifests and Records, or one flat CSV."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError, FitError
from habitus.laws.run_csv import read_csv
from habitus.laws.runs import MeasuredRun
from habitus.record import Record
from habitus.store import (
    AXES,
    BEYOND_SLICE,
    CONTEXT_SLICE,
    LOG_AXIS,
    QUERY_SECONDS,
    SURFACE_AXIS,
    TRAIN,
    ManifestRow,
    StoreEvaluation,
    SweepManifest,
    manifest_paths,
    read_evaluations,
    read_record,
    read_store_info,
)


def read_runs(source: str | Path, on_record: Callable[[Record], None] = lambda _: None) -> list[MeasuredRun]:
    """All runs of a store folder or of a flat CSV, in a fixed order; `on_record` sees each Record once."""
    source = Path(source)
    if source.is_dir():
        return _each_once(_read_store(source, on_record))
    if source.suffix.lower() == ".csv" and source.is_file():
        return _each_once(read_csv(source))
    raise FitError(
        f"{source} is neither a store folder nor a .csv file" if source.exists() else f"{source} does not exist",
        expected="STORE/ with sweeps/<axis>-<n>.json and cells/<hash>/record.json, or a flat CSV",
        next_step="run `habitus sweep` first, or see docs/laws.md for the CSV's columns",
    )


def _read_store(store: Path, on_record: Callable[[Record], None]) -> list[MeasuredRun]:
    paths = manifest_paths(store)
    if not paths:
        raise FitError(
            f"{store} holds no sweep manifests",
            expected="files sweeps/<axis>-<n>.json",
            next_step="run `habitus sweep` into this store first",
        )
    read_store_info(store)  # refuses another version
    evaluations = read_evaluations(store)
    measured: dict[str, dict[str, Any]] = {}  # by recipe hash: ten thousand whole Records are slow to keep
    datasets = set()
    runs = []
    for manifest in map(_read_manifest, paths):
        for row in manifest.cells:
            if row.recipe_hash not in measured:
                record = _with_evaluations(read_record(store, row.recipe_hash), evaluations)
                measured[row.recipe_hash] = _measurements(record)
                if record is not None:
                    datasets.add(record.dataset_checksum)
                    on_record(record)
            runs.append(_measured_run(manifest.axis, row, measured[row.recipe_hash]))
    if len(datasets) > 1:
        raise FitError(
            f"{store} holds Records of {len(datasets)} datasets",
            expected="one dataset per store, or losses are not comparable",
            next_step="give each dataset a store of its own",
        )
    return runs


def _with_evaluations(record: Record | None, evaluations: list[StoreEvaluation]) -> Record | None:
    """The Record with what was measured of its model later."""
    for evaluation in evaluations:
        if record is not None:
            record = record.model_copy(update={"metrics": {**record.metrics, **evaluation.metrics_of(record)}})
    return record


def _read_manifest(path: Path) -> SweepManifest:
    try:
        manifest = SweepManifest.read(path)
    except ConfigError as error:
        raise FitError(
            error.problem, expected="a sweep manifest", next_step="bring the file back, or remove it"
        ) from None
    if manifest.axis not in {*AXES, LOG_AXIS, SURFACE_AXIS}:
        raise FitError(f"{path}: axis {manifest.axis!r} is unknown", expected=f"one of {', '.join(AXES)}")
    return manifest


def _measured_run(axis: str, row: ManifestRow, measured: dict[str, Any]) -> MeasuredRun:
    if axis == "context" and "metrics" in measured:
        measured = measured | {name: on_same_queries(measured[name]) for name in ("metrics", "errors")}
    return MeasuredRun(
        axis=axis,
        cell_id=row.cell_id,
        budget=row.flops_budget,
        learning_rate=row.learning_rate,
        seed=row.seed,
        recipe_hash=row.recipe_hash,
        on_diagonal=bool(row.wanted.get("on_diagonal", True)),
        **measured,
    )


def on_same_queries(values: dict[str, float]) -> dict[str, float]:
    """The metrics of a run of the context axis: under their plain names those with the longest history.

    What was measured on the run's own windows goes: runs with other windows have other queries there.
    """
    kept = {
        name: value
        for name, value in values.items()
        if name.startswith((f"{TRAIN}/", QUERY_SECONDS)) or f"/{CONTEXT_SLICE}" in name or f"/{BEYOND_SLICE}" in name
    }
    lengths = [int(name.rpartition(CONTEXT_SLICE)[2]) for name in kept if f"/{CONTEXT_SLICE}" in name]
    longest = f"/{CONTEXT_SLICE}{max(lengths, default=0)}"
    return kept | {name.removesuffix(longest): value for name, value in kept.items() if name.endswith(longest)}


def _measurements(record: Record | None) -> dict[str, Any]:
    """What a Record says, as fields of a MeasuredRun."""
    if record is None:
        return {"status": "missing", "reason": "no Record yet"}
    recipe = record.recipe
    if record.status == "failed" or record.params is None or record.train is None:
        return {"status": "failed", "reason": record.reason or "failed", "init": recipe.model.init}
    metrics = {name: metric.value for name, metric in record.metrics.items()}
    metrics |= {"train/loss": record.train.loss, "train/in_batch_loss": record.train.in_batch_loss}
    metrics |= {name: value for name, value in record.throughput.items() if name.startswith(QUERY_SECONDS)}
    if record.train.extra_loss is not None:
        metrics["train/extra_loss"] = record.train.extra_loss
    return {
        "init": recipe.model.init,
        "optimizer": recipe.train.optimizer,
        "query_set": "" if record.evaluation is None else record.evaluation.query_set_checksum,
        "knobs": _knobs(record),
        "metrics": metrics,
        "trajectory": tuple((float(p.step), p.metric, p.value) for p in record.trajectory),
        "errors": {name: metric.se for name, metric in record.metrics.items() if metric.se is not None},
    }


def _knobs(record: Record) -> dict[str, float]:
    params, recipe, evaluation = record.params, record.recipe, record.evaluation
    assert params is not None
    whole = (
        evaluation is not None and recipe.evaluate.catalogue_items == "all" and "catalogue" in recipe.evaluate.regimes
    )
    knobs: dict[str, float | None] = {
        "params": params.total,
        "embedder_params": params.embedder,
        "contextualizer_params": params.contextualizer,
        "embedder_share": record.embedder_share or params.embedder / max(params.total, 1),
        "embedder_flop_share": record.embedder_flop_share,
        "flops_nominal": record.flops_nominal,
        "flops_executed": record.flops_executed,
        "text_len": recipe.model.text_len,
        "events_seen": record.events_seen or None,
        "catalogue_items": evaluation.candidates if evaluation is not None and whole else None,
        "slots_seen": record.slots_seen or None,  # a Record that does not say how many has zero
        "batch_sequences": recipe.train.batch_sequences,
        "pool_sequences": recipe.train.pool_sequences,
        "num_negatives": recipe.train.num_negatives,
        "steps": record.steps,
        "epochs": record.epochs,
        "unique_events": record.unique_events or None,
        "user_share": recipe.data.user_share,
        "user_part": recipe.data.user_part,
        "dropout": recipe.train.dropout,
        "token_dropout": recipe.train.token_dropout,
        "field_dropout": recipe.train.field_dropout,
        "item_dropout": recipe.train.item_dropout,
        "weight_decay": recipe.train.weight_decay,
        "width": recipe.model.width,
        "depth": recipe.model.depth,
        "text_depth": recipe.model.text_depth,
        "joint_dim": recipe.model.joint_dim,
        "seq_len": recipe.data.seq_len,
    }
    return {name: float(value) for name, value in knobs.items() if value is not None}


def _each_once(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """The runs in a fixed order; the same cell, rate and seed of an axis may stand there only once."""
    by_key: dict[tuple[Any, ...], MeasuredRun] = {}
    for run in runs:
        if by_key.setdefault(run.key, run) != run:
            raise FitError(
                f"axis {run.axis}: cell {run.cell_id}, learning rate {run.learning_rate:g}, seed {run.seed} "
                "is given more than once, with different results",
                expected="one row per cell, learning rate and seed",
            )
    return [by_key[key] for key in sorted(by_key)]
