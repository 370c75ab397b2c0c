"""The verbs as Python functions: paths, strings and objects are taken wherever one is meant.

Each does what the command of the same name does. Keyword options beyond the named ones are the fields of the room's
own options (`PrepareOptions`, `TrainOptions`, `EvaluateOptions`, …).
"""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from habitus.api.run import Run
from habitus.api.tables import Table, table_path
from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.events import Schema
from habitus.recipe import Recipe
from habitus.store import LAWS_FILE, Plan, find_laws
from habitus.store import Laws as StoredLaws

if TYPE_CHECKING:
    from habitus.api.laws import Laws
    from habitus.data import Description
    from habitus.evaluation import Evaluation
    from habitus.serving import RecommendedItem
    from habitus.sizing import Cell
    from habitus.studies import StudyResult
    from habitus.sweeps import RunList, SweepResult

DatasetLike = Dataset | str | Path
RecipeLike = Recipe | str | Path | Mapping[str, Any]
RunLike = Run | str | Path


def prepare(
    events: Table, items: Table, schema: Schema | Mapping[str, Any] | str | Path | None = None, *,
    out: str | Path, users: Table | None = None, update: DatasetLike | None = None,
    roles: Mapping[str, str] | None = None, **options: Any,
) -> Dataset:  # fmt: skip
    """The dataset prepared from an event log, an item table and perhaps a user table into the folder `out`.

    All are paths or globs of Parquet, CSV or JSON lines, or tables of pandas, polars or Arrow. Without a schema one
    is guessed from the columns, with `roles` such as {"user": "Kunde"} where names do not say it; look at
    `dataset.schema`. With `update`, these are the events that come after those of that dataset, and `out` is the two
    together.
    """
    from habitus.data import PrepareOptions, guess_schema
    from habitus.data import prepare as prepare_files
    from habitus.data import update as update_files

    if roles and (schema is not None or update is not None):
        raise ConfigError("roles were given beside a schema", expected="roles for a schema that is guessed")
    with (
        tempfile.TemporaryDirectory() as folder,
        table_path(events, "events", Path(folder)) as event_path,
        table_path(items, "items", Path(folder)) as item_path,
        nullcontext() if users is None else table_path(users, "users", Path(folder)) as user_path,
    ):
        if update is not None:
            if schema is not None:
                raise ConfigError("update and a schema were given", expected="an update alone: it has the dataset's")
            settings = _options(PrepareOptions, options)
            update_files(_dataset(update), event_path, item_path, out, settings, users=user_path)
            return Dataset.open(out)
        if schema is None:
            schema = guess_schema(event_path, item_path, user_path, roles=roles)
        elif isinstance(schema, str | Path):
            schema = Schema.read(schema)
        elif isinstance(schema, Mapping):
            schema = Schema.parse(schema, "schema")
        prepare_files(event_path, item_path, schema, out, _options(PrepareOptions, options), users=user_path)
    return Dataset.open(out)


def describe(dataset: DatasetLike) -> "Description":
    """What is in a prepared dataset, as numbers that bear on training."""
    from habitus.data import describe as describe_dataset

    return describe_dataset(_dataset(dataset))


def world(
    out: str | Path, *, prepared: bool = True, seq_len: int = 256, split: Literal["user", "time", "last"] = "user",
    test_share: float = 0.1, **knobs: Any,
) -> "Dataset | Path":  # fmt: skip
    """A synthetic shop with an exact oracle: its prepared dataset, or with prepared=False the folder of its tables."""
    from habitus.data import PrepareOptions, prepare_world
    from habitus.events import World, WorldConfig, schema_of, write_world

    shop = World(WorldConfig.parse(knobs, "the knobs"))
    if not prepared:
        write_world(shop, out, threads=os.cpu_count() or 1, progress=lambda *_: None)
        return Path(out)
    options = PrepareOptions(seq_len=seq_len, split=split, test_share=test_share)
    prepare_world(shop, schema_of(shop), out, options, lambda *_: None)
    return Dataset.open(out)


def train(
    recipe: RecipeLike | Sequence[RecipeLike] | Dataset, dataset: DatasetLike | None = None,
    out: str | Path | None = None, *, parent: RunLike | None = None, **options: Any,
) -> Run:  # fmt: skip
    """The run trained from a recipe, or from a stage-1 and a stage-2 recipe in a row, in the folder `out`.

    `parent` is the run that stage 2 continues, or whose weights stage 1 begins with. `train(dataset, out="run")`,
    without a recipe, finds a model for the log within `hours`, chosen on validation.
    """
    if out is None:
        raise ConfigError("no folder was given", expected="where the run is to be written, as in out='run'")
    if dataset is None:
        return _train_log(recipe, Path(out), options)
    from habitus.cards import add_plan
    from habitus.training import TrainOptions
    from habitus.training import train as train_stage

    if isinstance(recipe, Dataset):
        raise ConfigError(
            "two datasets were given", expected="train(recipe, dataset, out=...) or train(dataset, out=...)"
        )
    data, train_options = _dataset(dataset), _options(TrainOptions, options)
    stages = list(recipe) if isinstance(recipe, Sequence) and not isinstance(recipe, str) else [recipe]
    if len(stages) not in (1, 2):
        raise ConfigError(f"{len(stages)} recipes were given", expected="one, or those of stage 1 and stage 2")
    folders = [Path(out)] if len(stages) == 1 else [Path(out) / "stage1", Path(out) / "stage2"]
    before = None if parent is None else _run(parent)
    for stage, folder in zip(stages, folders, strict=True):
        parsed = _recipe(stage, None if before is None else before.record.recipe_hash)
        path = None if before is None else before.path
        train_stage(parsed, data, folder, parent=path, options=train_options)
        if isinstance(stage, str | Path):
            add_plan(folder, Path(stage))
        before = Run(folder, data)
    assert before is not None
    return before


def _train_log(dataset: Any, out: Path, options: Mapping[str, Any]) -> Run:
    from habitus.studies import BEST, LogTrainingOptions, train_log

    if not isinstance(dataset, Dataset | str | Path):
        raise ConfigError("a recipe was given without a dataset", expected="train(recipe, dataset, out=...)")
    data = _dataset(dataset)
    result = train_log(data, out, _options(LogTrainingOptions, options), note=print)
    print("\n".join(result.table.lines()))
    return Run(out / BEST, data)


def evaluate(
    runs: RunLike | Iterable[RunLike] | None, dataset: DatasetLike, *,
    baselines: bool = False, device: str = "auto", **options: Any,
) -> "list[Evaluation]":  # fmt: skip
    """One evaluation per run, then one per baseline if asked for, all on the same queries."""
    from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs, resolve_device

    single = isinstance(runs, Run | str | Path)
    several: Iterable[RunLike] = [runs] if single else runs or []  # type: ignore[list-item, assignment]
    paths = [one.path if isinstance(one, Run) else Path(one) for one in several]
    compute = ComputeOptions(device=resolve_device(device))
    return evaluate_runs(
        paths, _dataset(dataset), _options(EvaluateOptions, options), compute, with_baselines=baselines
    )


def embed(run: RunLike, items: Table, out: str | Path, *, device: str = "auto") -> Path:
    """A Parquet file with the vectors of a table of new items, from their raw fields."""
    from habitus.evaluation import resolve_device
    from habitus.model import embed_table, load_bundle

    bundle = load_bundle(_run(run).path, resolve_device(device))
    with tempfile.TemporaryDirectory() as folder, table_path(items, "items", Path(folder)) as path:
        embed_table(bundle, path, out)
    return Path(out)


def sweep(axis: str, dataset: DatasetLike, store: str | Path, **options: Any) -> "SweepResult":
    """One axis of a study, run into a store; `options` as in `habitus.sweeps.sweep`."""
    from habitus.sweeps import sweep as run_sweep

    return run_sweep(axis, _dataset(dataset), store, **options)


def runs(store: str | Path, **filters: Any) -> "RunList":
    """Every run of a store with its state."""
    from habitus.sweeps import list_runs

    return list_runs(Path(store), **filters)


def fit(store: str | Path, metrics: Sequence[str] = (), **options: Any) -> "Laws":
    """Every law that the runs of a store, or of a flat CSV, support."""
    from habitus.api.laws import Laws
    from habitus.laws import fit as fit_laws

    return Laws.of(fit_laws(store, metrics, **options))


def plan(
    flops: float, metric: str = "catalogue/recall@10", *,
    laws: "StoredLaws | str | Path | None" = None, dataset: DatasetLike | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """The recipe for a budget and a metric, from laws of one's own (an object, a laws.json, a store) or the paper's."""
    from habitus.planning import PlanOptions
    from habitus.planning import plan as make_plan

    data = None if dataset is None else _dataset(dataset)
    with tempfile.TemporaryDirectory() as folder:
        path = None if laws is None else _laws_path(laws, Path(folder))
        made = make_plan(flops, metric, _options(PlanOptions, {**options, "laws": path, "dataset": data}))
        in_memory = path is not None and path.is_relative_to(folder)
    return made.model_copy(update={"laws": laws.source}) if in_memory and isinstance(laws, StoredLaws) else made


def report(store: str | Path, out: str | Path, *, plan: Plan | str | Path | None = None, **options: Any) -> Path:
    """The HTML page of a store."""
    from habitus.reporting import report as write_report

    return write_report(store, out, plan=plan, **options)


def study(out: str | Path, data: DatasetLike | None = None, **options: Any) -> "StudyResult":
    """Probe, sweep, fit, plan and report into a folder; the same call continues where it stopped."""
    from habitus.studies import StudyOptions
    from habitus.studies import study as run_study

    path = None if data is None else _dataset(data).path
    return run_study(out, _options(StudyOptions, {**options, "data": path}))


def recommend(
    run: RunLike, history: Sequence[Mapping[str, Any] | Any], k: int = 10, *,
    dataset: DatasetLike | None = None, exclude_seen: bool = False, **conditions: Any,
) -> "list[RecommendedItem]":  # fmt: skip
    """The k next items for a history of events or plain item ids, oldest first; popular ones for an empty one.

    `conditions` as in `habitus.serving.RecommendRequest`: allow, deny, ranges, only_items, exclude_items.
    """
    opened = run if isinstance(run, Run) else Run(run, dataset)
    return opened.recommend(history, k, exclude_seen=exclude_seen, **conditions)


def load(folder: str | Path, dataset: DatasetLike | None = None) -> Run:
    """The model in a folder: of a run, or one that `export --hub` wrote, which needs no dataset."""
    return Run(folder, dataset)


def card(
    folder: RunLike, *, dataset: DatasetLike | None = None, plan: str | Path | None = None, device: str = "auto"
) -> Path:
    """README.md of a run, a dataset or a study, written again; `dataset` adds a run's table on test users."""
    from habitus.exporting import write_card

    path = folder.path if isinstance(folder, Run) else folder
    data = None if dataset is None else _dataset(dataset).path
    return write_card(path, data=data, plan=plan, device=device)


def export(
    run: RunLike, out: str | Path, *,
    what: Literal["items", "users", "onnx", "hub"] = "items", dataset: DatasetLike | None = None,
    license_id: str | None = None, at: str | Path | None = None,
) -> Path:  # fmt: skip
    """Vectors of items or users as a Parquet file, or the model as a folder of ONNX files or for a hub.

    `at` is a file of users and times: users as they were then.
    """
    from habitus.exporting import export_hub, export_items, export_onnx, export_users
    from habitus.model import load_bundle

    opened = run if isinstance(run, Run) else Run(run, dataset)
    if what == "onnx":
        export_onnx(load_bundle(opened.path, "cpu"), Path(out))
    elif what == "users":
        export_users(opened.retriever, out, data=opened.dataset.path, at=at)
    elif what == "items":
        export_items(opened.retriever, out)
    elif what == "hub":
        data = None if opened._dataset is None else opened.dataset.path
        export_hub(opened.path, out, data=data, license_id=license_id)
    else:
        raise ConfigError(f"what = {what!r}", expected="items, users, onnx or hub")
    return Path(out)


def serve(run: RunLike, *, dataset: DatasetLike | None = None, **options: Any) -> None:
    """Serve a run over HTTP until the process is stopped; `options` as in `habitus.serving.ServeOptions`: host, port,
    show_users, temperature, ..., with the defaults of `habitus serve`."""
    from habitus.serving import ServeOptions, serve_run

    opened = run if isinstance(run, Run) else Run(run, dataset)
    data = None if opened._dataset is None else opened.dataset.path
    serve_run(opened.path, _options(ServeOptions, {**options, "data": data}))


def size(recipe: RecipeLike | None = None, *, dataset: DatasetLike | None = None, **request: Any) -> "Cell":
    """Parameters, FLOPs and bytes of a recipe, or of what a budget buys (`flops`, `share`, `data_ratio`, …)."""
    from habitus.sizing import TYPICAL_INPUTS, CellRequest, Inputs, cell_of_recipe, ladder_batch_sequences, solve

    data = None if dataset is None else _dataset(dataset)
    inputs = TYPICAL_INPUTS if data is None else Inputs.of(data.fields)
    num_items = None if data is None else data.num_items
    if recipe is not None:
        return cell_of_recipe(_recipe(recipe, None), inputs, catalogue_items=num_items)
    if "batch_sequences" not in request:
        request["batch_sequences"] = ladder_batch_sequences(request["flops"]) if request.get("flops") else 64
    return solve(_options(CellRequest, request), inputs, catalogue_items=num_items)


def _dataset(dataset: DatasetLike) -> Dataset:
    return dataset if isinstance(dataset, Dataset) else Dataset.open(dataset)


def _run(run: RunLike) -> Run:
    return run if isinstance(run, Run) else Run(run)


def _recipe(recipe: RecipeLike, parent_hash: str | None) -> Recipe:
    """The recipe; one that names no parent, or 'previous', continues the run with `parent_hash` where there is one."""
    if isinstance(recipe, Recipe):
        recipe = recipe.to_values()
    source = "the recipe" if isinstance(recipe, Mapping) else str(recipe)
    values = dict(recipe) if isinstance(recipe, Mapping) else Recipe.read_values(recipe)
    train_values = dict(values.get("train", {}))
    if train_values.get("parent") in (None, "previous") and parent_hash:
        values["train"] = {**train_values, "parent": parent_hash}
    return Recipe.parse(values, source)


def _laws_path(laws: "StoredLaws | str | Path", folder: Path) -> Path:
    """Where the laws are on disk: a store's laws.json, a file, or one written for an object."""
    if isinstance(laws, StoredLaws):
        beside = Path(laws.source) / LAWS_FILE
        if beside.exists() and StoredLaws.read(beside).to_values() == laws.to_values():
            return beside  # with the store's Records beside it, which say how fast runs were
        laws.write(folder / LAWS_FILE)
        return folder / LAWS_FILE
    return find_laws(laws)


def _options(options: type, values: Mapping[str, Any]) -> Any:
    """The options with these values; an unknown name is refused with the nearest known one."""
    from dataclasses import fields, is_dataclass

    from habitus.typed import suggest_name

    known = [field.name for field in fields(options)] if is_dataclass(options) else list(options.model_fields)  # type: ignore[attr-defined]
    for name in values:
        if name not in known:
            raise ConfigError(f"option {name!r} is unknown ({suggest_name(name, known)})", expected=", ".join(known))
    return options(**values)
