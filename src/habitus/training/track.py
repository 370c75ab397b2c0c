"""Runs shown in a tracker: TensorBoard, MLflow or W&B get what a run wrote. The run knows nothing of it.

    python -m habitus.training.track run --to tensorboard
    python -m habitus.training.track study --to mlflow

Follows the journal of a run until the Record is there, so that it can be started before, during or after the run. Of a
study or a store every run that is done is shown, as one group.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from habitus.cards import CARD_FILE, FACTS_FILE
from habitus.errors import ConfigError, HabitusError, RunError
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import INFO_FILE, LAWS_FILE, RECIPE_FILE, RECORD_FILE, TEST_TABLE_FILE, read_records
from habitus.training.journal import JOURNAL_FILE, parse_line
from habitus.typed import suggest_name

Parameters = Mapping[str, str | int | float | bool]
_POLL_SECONDS = 1.0
_RUN_FILES = (CARD_FILE, FACTS_FILE, RECIPE_FILE, RECORD_FILE, JOURNAL_FILE)
_STUDY_FILES = (CARD_FILE, "plan.json", "report.html", "study.json")
_MLFLOW_BATCH = 500  # metrics per request; it takes 1,000 at most
_MLFLOW_KEY = "habitus.key"
_MOST_TEXT = 100_000  # characters of a file shown as text in TensorBoard


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


def _track_run(run: Path, tracker: "Tracker", *, follow: bool, with_model: bool) -> int:
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
    """The lines of a run's journal that are intact, each once; with `follow` until the run is over."""
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
                    values = parse_line(partial)
                    if values is not None and isinstance(values.get("step"), int):
                        yield values
                    partial = ""
            if over:
                return
            time.sleep(_POLL_SECONDS)


# The trackers, each imported when it is asked for ---------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One run of a tracker: a run of ours, or the study that a group of them belongs to."""

    folder: Path  # where TensorBoard's files go
    name: str
    project: str = "habitus"
    group: str | None = None
    key: str | None = None  # the hash of a cell: the same run is not shown twice
    is_study: bool = False


class Tracker(Protocol):
    """What is shown of one run, in this order."""

    def log_values(self, values: Mapping[str, float], step: int) -> None: ...

    def log_end(self, parameters: Parameters, metrics: Mapping[str, float], files: Sequence[Path]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class TensorBoard:
    """Event files in FOLDER/tensorboard: scalars, texts, and parameters with final metrics in the HParams tab."""

    def __init__(self, entry: Entry) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = entry.folder / "tensorboard"
        if entry.group is not None:
            folder /= "study" if entry.is_study else entry.name
        for earlier in folder.glob("events.out.tfevents.*"):  # of an earlier call: curves would be there twice
            earlier.unlink()
        self._writer = SummaryWriter(str(folder))

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_end(self, parameters: Parameters, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        from torch.utils.tensorboard.summary import hparams

        if parameters:
            for part in hparams(dict(parameters), dict(metrics)):
                self._writer.file_writer.add_summary(part)  # type: ignore[attr-defined]  # None only once closed
        for file in files:
            if file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")[:_MOST_TEXT]
                self._writer.add_text(file.name, text if file.suffix == ".md" else f"```\n{text}\n```")

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of an experiment in the store that MLFLOW_TRACKING_URI names; runs of a study are its children."""

    def __init__(self, entry: Entry) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param, self._pending = Metric, Param, list[Any]()
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(entry.project)
        where = self._client.create_experiment(entry.project) if experiment is None else experiment.experiment_id
        parent, tags = re.sub(r"[^\w. -]", "-", f"study {entry.group}"), {"mlflow.runName": entry.name}
        key = parent if entry.is_study else entry.key
        if key is not None:
            tags[_MLFLOW_KEY] = key
            self._delete_earlier(where, key)
        if entry.group is not None and not entry.is_study:
            tags["mlflow.parentRunId"] = self._find(where, parent)[0]
        self._run = self._client.create_run(where, tags=tags).info.run_id

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._pending += [self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        if len(self._pending) >= _MLFLOW_BATCH:
            self._flush()

    def log_end(self, parameters: Parameters, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        params = [self._param(_mlflow_name(name), str(value)) for name, value in parameters.items()]
        self._client.log_batch(self._run, params=params)
        for file in files:
            if file.is_dir():
                self._client.log_artifacts(self._run, str(file), file.name)
            else:
                self._client.log_artifact(self._run, str(file))

    def close(self, *, failed: bool) -> None:
        self._flush()
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")

    def _flush(self) -> None:
        self._client.log_batch(self._run, metrics=self._pending)
        self._pending = []

    def _delete_earlier(self, experiment: str, key: str) -> None:
        """MLflow keeps what it deletes until it is told to collect garbage."""
        for run in self._find(experiment, key):
            self._client.delete_run(run)

    def _find(self, experiment: str, key: str) -> list[str]:
        """The runs of an experiment that have this key."""
        runs = self._client.search_runs([experiment], f"tags.`{_MLFLOW_KEY}` = '{key}'")
        return [str(run.info.run_id) for run in runs]


class WeightsAndBiases:
    """A run of a project; offline where WANDB_MODE says so. Runs of a study share its group."""

    def __init__(self, entry: Entry) -> None:
        import wandb

        self._wandb, self._entry = wandb, entry
        os.environ.setdefault("WANDB_SILENT", "true")
        self._run = wandb.init(
            project=entry.project,
            name=entry.name,
            group=entry.group,
            job_type="study" if entry.is_study else "run",
            id=None if entry.key is None else entry.key[:16],
            resume=None if entry.key is None else "allow",
        )

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_end(self, parameters: Parameters, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        self._run.config.update(dict(parameters), allow_val_change=True)
        self._run.summary.update(dict(metrics))
        if files:
            name = re.sub(r"[^\w.-]", "-", self._entry.name)
            artifact = self._wandb.Artifact(f"{name}-files", type="study" if self._entry.is_study else "run")
            for file in files:
                if file.is_dir():
                    artifact.add_dir(str(file), name=file.name)
                else:
                    artifact.add_file(str(file))
            self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[Entry], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def _mlflow_name(name: str) -> str:
    """A name that MLflow allows: no '@' and no '='."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


# The command ----------------------------------------------------------------------------------------------------------


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
