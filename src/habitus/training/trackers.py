"""Three trackers behind one interface: TensorBoard, MLflow, Weights & Biases. Each is imported when it is asked for."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Parameters = Mapping[str, str | int | float | bool]
_MLFLOW_BATCH = 500  # metrics per request; it takes 1,000 at most
_MLFLOW_KEY = "habitus.key"
_MOST_TEXT = 100_000  # characters of a file shown as text in TensorBoard


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
