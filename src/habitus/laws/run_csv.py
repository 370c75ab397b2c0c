"""Runs from one flat CSV: a row per run, or per evaluated step of a run."""

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from habitus.errors import FitError
from habitus.laws.runs import KNOBS, MeasuredRun
from habitus.store import AXES, REGIMES, SURFACE_AXIS, TRAIN
from habitus.typed import suggest_name

_POSITIVE = ("params", "slots_seen", "batch_sequences")
_MANIFEST_COLUMNS = ("axis", "cell_id", "flops_budget", "learning_rate", "seed")
_OTHER_COLUMNS = ("status", "reason", "init", "optimizer", "on_diagonal", "step", "recipe_hash", "parent_hash")
_METRIC_PREFIXES = tuple(f"{regime}/" for regime in (*REGIMES, TRAIN))


def read_csv(path: Path) -> list[MeasuredRun]:
    """The runs of a CSV; rows of one run that carry a step become its trajectory."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte-order mark first
    except (OSError, UnicodeDecodeError) as error:
        raise FitError(f"{path} cannot be read: {error}", expected="a CSV in UTF-8") from None
    with io.StringIO(text, newline="") as file:
        reader = csv.DictReader(file)
        _check_header(path, list(reader.fieldnames or []))
        rows = [_Row(f"{path}, line {number}", row) for number, row in enumerate(reader, start=2)]
        runs = [(row.run(), row.step()) for row in rows]
    if not runs:
        raise FitError(f"{path} holds no rows", expected="one row per run")
    return list(_with_trajectories(runs))


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in _MANIFEST_COLUMNS if name not in header]
    if missing:
        raise FitError(f"{path} lacks columns: {', '.join(missing)}", expected=", ".join(_MANIFEST_COLUMNS))
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise FitError(f"{path} has columns more than once: {', '.join(repeated)}", expected="each column once")
    columns = [*_MANIFEST_COLUMNS, *_OTHER_COLUMNS, *KNOBS]
    for name in header:
        if name not in columns and not name.startswith(_METRIC_PREFIXES):
            raise FitError(
                f"{path}: column {name!r} is unknown ({suggest_name(name, columns)})",
                expected="manifest and knob names, or metrics such as batch/loss and catalogue/recall@10",
            )


class _Row:
    """One line of the CSV, which names its place in errors."""

    def __init__(self, where: str, cells: dict[str, str]) -> None:
        self.where, self.cells = where, cells
        if None in cells:
            raise FitError(f"{where}: more cells than the header has names", expected="one cell per column")
        if not cells["cell_id"]:
            raise FitError(f"{where}: cell_id is empty", expected="a name that all rates and seeds of a cell share")
        if cells["axis"] not in {*AXES, SURFACE_AXIS}:
            raise FitError(f"{where}: axis {cells['axis']!r}", expected=f"one of {', '.join(AXES)}")
        self.filled = {name for name, text in cells.items() if text not in (None, "")}

    def run(self) -> MeasuredRun:
        cells = self.cells
        status = cells.get("status") or "done"
        knobs = {
            name: self._positive(name) if name in _POSITIVE else self._number(name)
            for name in KNOBS
            if name in self.filled
        }
        if "params" not in knobs and {"embedder_params", "contextualizer_params"} <= knobs.keys():
            knobs["params"] = knobs["embedder_params"] + knobs["contextualizer_params"]
        return MeasuredRun(
            axis=cells["axis"],
            cell_id=cells["cell_id"],
            budget=self._positive("flops_budget"),
            learning_rate=self._positive("learning_rate"),
            seed=self._integer("seed"),
            status=status,
            reason=cells.get("reason") or ("" if status == "done" else status),
            recipe_hash=cells.get("recipe_hash") or "",
            init=cells.get("init") or "default",
            optimizer=cells.get("optimizer") or "",
            on_diagonal=(cells.get("on_diagonal") or "yes").lower() not in ("no", "false", "0"),
            knobs=knobs,
            metrics={n: self._number(n) for n in self.cells if n in self.filled and n.startswith(_METRIC_PREFIXES)},
        )

    def step(self) -> float | None:
        return self._number("step") if "step" in self.filled else None

    def _number(self, column: str) -> float:
        try:
            value = float(self.cells[column])
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise FitError(
                f"{self.where}: {column} = {self.cells[column]!r}",
                expected="a finite number, or an empty cell where the value is missing",
            )
        return value

    def _positive(self, column: str) -> float:
        value = self._number(column)
        if value <= 0:
            raise FitError(f"{self.where}: {column} = {value!r}", expected="a positive, finite number")
        return value

    def _integer(self, column: str) -> int:
        value = self._number(column)
        if value != int(value):
            raise FitError(f"{self.where}: {column} = {value!r}", expected="a whole number")
        return int(value)


def _with_trajectories(rows: list[tuple[MeasuredRun, float | None]]) -> Iterator[MeasuredRun]:
    """Rows that carry a step and belong to one run become its trajectory; the last row is its end."""
    by_run: dict[tuple[Any, ...], list[tuple[float, MeasuredRun]]] = {}
    for run, step in rows:
        if step is None:
            yield run
        else:
            by_run.setdefault(run.key, []).append((step, run))
    for group in by_run.values():
        group.sort(key=lambda pair: pair[0])
        points = tuple((step, name, value) for step, run in group for name, value in sorted(run.metrics.items()))
        yield replace(group[-1][1], trajectory=points)
