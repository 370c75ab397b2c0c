"""Runs as `fit` sees them: read from a store's sweep manifests and Records, or from one flat CSV."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from habitus.errors import FitError
from habitus.record import Record
from habitus.store import AXES
from habitus.typed import suggest_name

# Knobs that an axis varies or a law needs, by the names of design §2.
KNOBS = (
    "params", "embedder_params", "contextualizer_params", "embedder_share", "embedder_flop_share",
    "slots_seen", "batch_sequences", "num_negatives", "steps", "epochs", "width", "depth", "text_depth",
    "joint_dim", "flops_nominal",
)  # fmt: skip
_POSITIVE = ("params", "slots_seen", "batch_sequences")
_MANIFEST_COLUMNS = ("axis", "cell_id", "flops_budget", "learning_rate", "seed")
_OTHER_COLUMNS = ("status", "reason", "init", "optimizer", "on_diagonal", "step", "recipe_hash", "parent_hash")
_REGIMES = ("batch/", "catalogue/", "train/")


@dataclass(frozen=True)
class Run:
    """One row of a sweep manifest with what its Record measured."""

    axis: str
    cell_id: str
    budget: float
    learning_rate: float
    seed: int
    status: str = "done"
    reason: str = ""
    recipe_hash: str = ""
    init: str = "default"
    optimizer: str = ""
    query_set: str = ""  # checksum of the queries its metrics were measured on
    on_diagonal: bool = True
    knobs: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # train/... losses included
    trajectory: tuple[tuple[float, str, float], ...] = ()  # step, metric, value


def read_runs(source: str | Path) -> list[Run]:
    """All runs of a store folder or of a flat CSV, in a fixed order."""
    source = Path(source)
    if source.is_dir():
        return _from_store(source)
    if source.suffix.lower() == ".csv" and source.is_file():
        return _from_csv(source)
    raise FitError(
        f"{source} is neither a store folder nor a .csv file",
        expected="STORE/ with sweeps/<axis>-<n>.json and cells/<hash>/record.json, or a flat CSV",
        next_step="run `habitus sweep` first, or see docs/laws.md for the CSV's columns",
    )


def _from_store(store: Path) -> list[Run]:
    manifests = sorted((store / "sweeps").glob("*.json"))
    if not manifests:
        raise FitError(
            f"{store} holds no sweep manifests",
            expected="files sweeps/<axis>-<n>.json",
            next_step="run `habitus sweep` into this store first",
        )
    records: dict[str, Record | None] = {}
    runs: list[Run] = []
    for path in manifests:
        manifest = _json(path)
        axis = manifest.get("axis")
        if axis not in AXES:
            raise FitError(f"{path}: axis {axis!r} is unknown", expected=f"one of {', '.join(AXES)}")
        for cell in _cells(manifest, path):
            digest = str(_needed(cell, "recipe_hash", path))
            if digest not in records:
                record_path = store / "cells" / digest / "record.json"
                records[digest] = Record.read(record_path) if record_path.exists() else None
            runs.append(_run_of_cell(axis, cell, records[digest], path))
    datasets = {record.dataset_checksum for record in records.values() if record is not None}
    if len(datasets) > 1:
        raise FitError(
            f"{store} holds Records of {len(datasets)} datasets",
            expected="one dataset per store, or losses are not comparable",
            next_step="give each dataset a store of its own",
        )
    return _each_once(runs)


def _run_of_cell(axis: str, cell: Mapping[str, Any], record: Record | None, path: Path) -> Run:
    bare = Run(
        axis=axis,
        cell_id=str(_needed(cell, "cell_id", path)),
        budget=_positive(_needed(cell, "flops_budget", path), "flops_budget", str(path)),
        learning_rate=_positive(_needed(cell, "learning_rate", path), "learning_rate", str(path)),
        seed=_whole(_needed(cell, "seed", path), "seed", str(path)),
        recipe_hash=str(cell["recipe_hash"]),
        on_diagonal=bool((cell.get("wanted") or {}).get("on_diagonal", True)),
    )
    if record is None:
        return replace(bare, status="missing", reason="no Record yet")
    recipe = record.recipe
    if record.status == "failed" or record.params is None or record.train is None:
        return replace(bare, status="failed", reason=record.reason or "failed", init=recipe.model.init)
    params = record.params
    knobs: dict[str, float | None] = {
        "params": params.total,
        "embedder_params": params.embedder,
        "contextualizer_params": params.contextualizer,
        "embedder_share": record.embedder_share or params.embedder / max(params.total, 1),
        "embedder_flop_share": record.embedder_flop_share,
        "flops_nominal": record.flops_nominal,
        "slots_seen": record.slots_seen or None,  # a Record that does not say how many has zero
        "batch_sequences": recipe.train.batch_sequences,
        "num_negatives": recipe.train.num_negatives,
        "steps": record.steps,
        "epochs": record.epochs,
        "width": recipe.model.width,
        "depth": recipe.model.depth,
        "text_depth": recipe.model.text_depth,
        "joint_dim": recipe.model.joint_dim,
    }
    metrics = {name: metric.value for name, metric in record.metrics.items()}
    metrics |= {"train/loss": record.train.loss, "train/in_batch_loss": record.train.in_batch_loss}
    if record.train.extra_loss is not None:
        metrics["train/extra_loss"] = record.train.extra_loss
    return replace(
        bare,
        init=recipe.model.init,
        optimizer=recipe.train.optimizer,
        query_set="" if record.evaluation is None else record.evaluation.query_set_checksum,
        knobs={name: float(value) for name, value in knobs.items() if value is not None},
        metrics=metrics,
        trajectory=tuple((float(p.step), p.metric, p.value) for p in record.trajectory),
    )


def _from_csv(path: Path) -> list[Run]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte-order mark first
    except (OSError, UnicodeDecodeError) as error:
        raise FitError(f"{path} cannot be read: {error}", expected="a CSV in UTF-8") from None
    with io.StringIO(text, newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        missing = [name for name in _MANIFEST_COLUMNS if name not in header]
        known = [*_MANIFEST_COLUMNS, *_OTHER_COLUMNS, *KNOBS]
        if missing:
            raise FitError(f"{path} lacks columns: {', '.join(missing)}", expected=", ".join(_MANIFEST_COLUMNS))
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise FitError(f"{path} has columns more than once: {', '.join(twice)}", expected="each column once")
        for name in header:
            if name not in known and not name.startswith(_REGIMES):
                raise FitError(
                    f"{path}: column {name!r} is unknown ({suggest_name(name, known)})",
                    expected="manifest and knob names, or metrics such as batch/loss and catalogue/recall@10",
                )
        rows = [_row(path, number, row) for number, row in enumerate(reader, start=2)]
    if not rows:
        raise FitError(f"{path} holds no rows", expected="one row per run")
    return _each_once(list(_with_trajectories(rows)))


def _row(path: Path, number: int, row: dict[str, str]) -> tuple[Run, float | None]:
    def number_in(column: str) -> float:
        try:
            value = float(row[column])
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise FitError(
                f"{path}, line {number}: {column} = {row[column]!r}",
                expected="a finite number, or an empty cell where the value is missing",
            )
        return value

    if None in row:
        raise FitError(f"{path}, line {number}: more cells than the header has names", expected="one cell per column")
    if not row["cell_id"]:
        raise FitError(
            f"{path}, line {number}: cell_id is empty", expected="a name that all rates and seeds of a cell share"
        )
    if row["axis"] not in AXES:
        raise FitError(f"{path}, line {number}: axis {row['axis']!r}", expected=f"one of {', '.join(AXES)}")
    where = f"{path}, line {number}"
    present = {name for name, text in row.items() if name and text not in (None, "")}
    status = row.get("status") or "done"
    run = Run(
        axis=row["axis"],
        cell_id=row["cell_id"],
        budget=_positive(number_in("flops_budget"), "flops_budget", where),
        learning_rate=_positive(number_in("learning_rate"), "learning_rate", where),
        seed=_whole(number_in("seed"), "seed", where),
        status=status,
        reason=row.get("reason") or ("" if status == "done" else status),
        recipe_hash=row.get("recipe_hash") or "",
        init=row.get("init") or "default",
        optimizer=row.get("optimizer") or "",
        on_diagonal=(row.get("on_diagonal") or "yes").lower() not in ("no", "false", "0"),
        knobs={
            name: _positive(number_in(name), name, where) if name in _POSITIVE else number_in(name)
            for name in KNOBS
            if name in present
        },
        metrics={name: number_in(name) for name in present if name.startswith(_REGIMES)},
    )
    if "params" not in run.knobs and {"embedder_params", "contextualizer_params"} <= present:
        total = run.knobs["embedder_params"] + run.knobs["contextualizer_params"]
        run = replace(run, knobs={**run.knobs, "params": total})
    return run, number_in("step") if "step" in present else None


def _with_trajectories(rows: list[tuple[Run, float | None]]) -> Iterator[Run]:
    """Rows that carry a step and belong to one run become its trajectory; the last row is its end."""
    stepped: dict[tuple[Any, ...], list[tuple[float, Run]]] = {}
    for run, step in rows:
        if step is None:
            yield run
        else:
            stepped.setdefault(_key(run), []).append((step, run))
    for group in stepped.values():
        group.sort(key=lambda pair: pair[0])
        points = tuple((step, name, value) for step, run in group for name, value in sorted(run.metrics.items()))
        yield replace(group[-1][1], trajectory=points)


def _each_once(runs: list[Run]) -> list[Run]:
    """The runs in a fixed order; the same cell, rate and seed of an axis may stand there only once."""
    seen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = _key(run)
        if key in seen and seen[key] != run:
            raise FitError(
                f"axis {run.axis}: cell {run.cell_id}, learning rate {run.learning_rate:g}, seed {run.seed} "
                "is given more than once, with different results",
                expected="one row per cell, learning rate and seed",
            )
        seen.setdefault(key, run)
    return [seen[key] for key in sorted(seen)]


def _key(run: Run) -> tuple[Any, ...]:
    return (run.axis, run.budget, run.cell_id, run.init, run.learning_rate, run.seed)


def _json(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FitError(f"{path} cannot be read: {error}", expected="a sweep manifest in JSON") from None
    if not isinstance(manifest, dict):
        raise FitError(f"{path} holds a {type(manifest).__name__}", expected="a sweep manifest: axis, preset, cells")
    return manifest


def _cells(manifest: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    cells = manifest.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise FitError(f"{path}: 'cells' is not a list of cells", expected="the keys of a sweep manifest")
    if not all(isinstance(cell.get("wanted") or {}, dict) for cell in cells):
        raise FitError(f"{path}: a cell's 'wanted' is not a table", expected="the keys of a sweep manifest")
    return cells


def _positive(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise FitError(f"{where}: {name} = {value!r}", expected="a positive, finite number")
    return number


def _whole(value: Any, name: str, where: str) -> int:
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != float(value):
        raise FitError(f"{where}: {name} = {value!r}", expected="a whole number")
    return whole


def _needed(cell: Mapping[str, Any], key: str, path: Path) -> Any:
    if cell.get(key) is None:
        raise FitError(f"{path}: a cell lacks {key!r}", expected="the keys of a sweep manifest")
    return cell[key]
