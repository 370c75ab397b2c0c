"""Runs shown in a tracker: TensorBoard, MLflow or W&B get what a run wrote. The run knows nothing of it.

    python -m habitus.training.track run --to tensorboard
    python -m habitus.training.track study --to mlflow

Follows the journal of a run until the Record is there, so that it can be started before, during or after the run. Of a
study or a store every run that is done is shown, as one group.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from habitus.cards import CARD_FILE, FACTS_FILE
from habitus.errors import ConfigError, HabitusError, RunError
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import INFO_FILE, LAWS_FILE, RECIPE_FILE, RECORD_FILE, TEST_TABLE_FILE, read_records
from habitus.training.trackers import TRACKERS, Entry, Parameters, Tracker
from habitus.typed import suggest_name

JOURNAL_FILE = "journal.jsonl"
_POLL_SECONDS = 1.0
_RUN_FILES = (CARD_FILE, FACTS_FILE, RECIPE_FILE, RECORD_FILE, JOURNAL_FILE)
_STUDY_FILES = (CARD_FILE, "plan.json", "report.html", "study.json")


def track(
    folder: Path, tracker: str, *, follow: bool = True, project: str = "habitus", with_model: bool = False
) -> int:
    """Show a run, or every run of a study or a store, in a tracker; returns how many values there were.

    `with_model` adds the bundle to the files.
    """
    if tracker not in TRACKERS:
        raise ConfigError(f"{tracker!r} is not a tracker", expected=suggest_name(tracker, list(TRACKERS)))
    store = next((place for place in (folder, folder / "store") if (place / INFO_FILE).exists()), None)
    try:
        if store is None:
            entry = Entry(folder, folder.absolute().name, project)
            return _track_run(folder, TRACKERS[tracker](entry), follow=follow, with_model=with_model)
        return _track_study(folder, store, tracker, project, with_model)
    except ImportError as error:
        raise ConfigError(f"{tracker} is not installed ({error})", next_step="pip install 'habitus[track]'") from error


def _track_study(folder: Path, store: Path, tracker: str, project: str, with_model: bool) -> int:
    """The study itself, with its files; then its runs in the order of their hashes."""
    group = folder.absolute().name
    study = TRACKERS[tracker](Entry(folder, group, project, group, is_study=True))
    files = [folder / name for name in _STUDY_FILES] + [store / name for name in (LAWS_FILE, TEST_TABLE_FILE)]
    study.log_end({}, {}, [file for file in files if file.exists()])
    study.close(failed=False)
    count = 0
    for record in read_records(store):
        key = record.recipe_hash
        shown = TRACKERS[tracker](Entry(folder, key[:12], project, group, key))
        count += _track_run(store / "cells" / key, shown, follow=False, with_model=with_model)
    return count


def _track_run(run: Path, tracker: Tracker, *, follow: bool, with_model: bool) -> int:
    """Every number of the journal, then what the Record says; returns how many values there were."""
    count, last, failed = 0, dict[str, int](), True
    try:
        for line in _read_lines(run, follow=follow):
            step, values = int(line["step"]), _values(line)
            tracker.log_values(values, step)
            last |= dict.fromkeys(values, step)
            count += len(values)
        path = run / RECORD_FILE
        record = Record.read(path) if path.exists() else None
        metrics = {} if record is None else {name: metric.value for name, metric in record.metrics.items()}
        if record is not None:
            fresh = {name: value for name, value in metrics.items() if last.get(name) != record.steps}
            if fresh:
                tracker.log_values(fresh, record.steps)
                count += len(fresh)
        files = [run / name for name in (*_RUN_FILES, *(("bundle",) if with_model else ()))]
        tracker.log_end(_parameters(run, record), metrics, [file for file in files if file.exists()])
        failed = record is not None and record.status == "failed"
    finally:
        tracker.close(failed=failed)
    return count


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the journal by name."""
    metrics = line.get("metrics") or {f"train/{name}": value for name, value in line.items() if name != "step"}
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _parameters(run: Path, record: Record | None) -> Parameters:
    """The recipe with dotted names, and the sizes that follow from it."""
    path = run / RECIPE_FILE
    recipe = record.recipe if record is not None else Recipe.read(path) if path.exists() else None
    if recipe is None:
        return {}
    values: dict[str, str | int | float | bool] = {}
    for section, knobs in recipe.to_values().items():
        for name, value in knobs.items():
            values[f"{section}.{name}"] = value if isinstance(value, str | int | float) else json.dumps(value)
    if record is not None:
        values["recipe_hash"], values["dataset_checksum"] = record.recipe_hash, record.dataset_checksum
        if record.params is not None:
            values["params"] = record.params.total
        if record.flops_nominal is not None:
            values["flops_nominal"] = record.flops_nominal
    return values


def _read_lines(run: Path, *, follow: bool) -> Iterator[dict[str, Any]]:
    """The lines of a run's journal, each once; with `follow` until the run is over."""
    path, partial = run / JOURNAL_FILE, ""
    while follow and not path.exists():
        time.sleep(_POLL_SECONDS)
    if not path.exists():
        raise RunError(
            f"{run} holds no {JOURNAL_FILE}",
            expected="the folder of a run, a study or a store",
            next_step="without --once a run is waited for",
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = not follow or (run / RECORD_FILE).exists()  # looked up before reading, so that no line is missed
            for text in file:
                partial += text
                if partial.endswith("\n"):
                    yield from _parse_line(partial)
                    partial = ""
            if over:
                return
            time.sleep(_POLL_SECONDS)


def _parse_line(text: str) -> Iterator[dict[str, Any]]:
    """The values of a line; nothing where it is damaged."""
    try:
        values = json.loads(text)
    except ValueError:
        return
    if isinstance(values, dict) and isinstance(values.get("step"), int):
        yield values


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Show a run, or every run of a study, in a tracker: parameters, curves, final metrics and files.",
        epilog="Example: python -m habitus.training.track run --to tensorboard",
    )
    parser.add_argument("folder", type=Path, help="of a run, a study or a store")
    parser.add_argument("--to", default="tensorboard", help=", ".join(TRACKERS))
    parser.add_argument("--project", default="habitus", help="experiment of MLflow, project of W&B")
    parser.add_argument("--model", action="store_true", help="hand over the trained model (the bundle) as well")
    parser.add_argument(
        "--once", action="store_true", help="show what is in the journal now, without waiting for the end"
    )
    given = parser.parse_args()
    try:
        count = track(given.folder, given.to, follow=not given.once, project=given.project, with_model=given.model)
        print(f"{count:,} values")
    except HabitusError as error:
        parser.exit(1, f"habitus: {error}\n")


if __name__ == "__main__":
    main()
