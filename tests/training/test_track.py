"""Runs and studies in the real trackers, read back with the trackers' own readers.

TensorBoard is part of the development environment. MLflow and W&B are installed into a folder of their own, which takes
a minute and a network: `pytest -m soak tests/training/test_track.py`.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from habitus.errors import ConfigError, RunError
from habitus.record import Record
from habitus.store import INFO_FILE, Laws
from habitus.training.track import track

PACKAGES = ("mlflow==3.17.2", "wandb==0.31.0")


@pytest.fixture(scope="session")
def study(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder whose store holds one run; trackers read nothing else of it."""
    folder = tmp_path_factory.mktemp("tracked") / "my study"
    record = Record.read(parent / "record.json")
    shutil.copytree(parent, folder / "store" / "cells" / record.recipe_hash)
    (folder / "store" / INFO_FILE).write_text("{}")
    (folder / "README.md").write_text("# A study\n")
    Laws(source="store", seed=0, metrics=()).write(folder / "store" / "laws.json")
    return folder


def scalars(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
    events.Reload()
    return events


def journal(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


def test_tensorboard_shows_curves_parameters_final_metrics_and_files(parent: Path, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run = Path(shutil.copytree(parent, tmp_path / "run"))
    record = Record.read(run / "record.json")
    count = track(run, "tensorboard", follow=False)
    events = scalars(run / "tensorboard")
    losses = [(line["step"], line["loss"]) for line in journal(run) if "loss" in line]
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, loss in losses
    ]
    (final,) = events.Scalars("catalogue/recall@10")
    assert (final.step, final.value) == (40, pytest.approx(record.metrics["catalogue/recall@10"].value))
    assert count == sum(len(line) - 1 for line in journal(run)) + len(record.metrics)
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = HParamsPluginData.FromString(start).session_start_info.hparams
    assert shown["model.width"].number_value == 32
    assert shown["recipe_hash"].string_value == record.recipe_hash
    texts = {name.removesuffix("/text_summary") for name in events.Tags()["tensors"]}
    assert {"README.md", "recipe.toml", "record.json"} <= texts
    readme = events.Tensors("README.md/text_summary")[0].tensor_proto.string_val[0].decode()
    assert readme == (run / "README.md").read_text()
    track(run, "tensorboard", follow=False)  # again: the curves are there once
    assert len(scalars(run / "tensorboard").Scalars("train/loss")) == len(losses)


def test_tensorboard_shows_a_study_as_a_group(study: Path) -> None:
    (cell,) = (study / "store" / "cells").iterdir()
    track(study, "tensorboard")
    assert sorted(path.name for path in (study / "tensorboard").iterdir()) == sorted(["study", cell.name[:12]])
    assert "README.md/text_summary" in scalars(study / "tensorboard" / "study").Tags()["tensors"]
    assert scalars(study / "tensorboard" / cell.name[:12]).Scalars("train/loss")


def test_a_journal_that_is_being_written_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [{"step": 0, "loss": 5.0}, {"step": 1, "loss": 4.5}, {"step": 2, "metrics": {"batch/recall@10": 0.25}}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '[1]\n{"loss": 3}\nnonsense\n{"step": 2, "lo'
    (tmp_path / "journal.jsonl").write_text(text)
    assert track(tmp_path, "tensorboard", follow=False) == 3
    events = scalars(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 5.0), (1, 4.5)]
    assert events.Scalars("batch/recall@10")[0].value == 0.25


def test_what_cannot_be_tracked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard"):
        track(tmp_path, "tensorbord")
    with pytest.raises(RunError, match=r"holds no journal\.jsonl"):
        track(tmp_path / "nowhere", "tensorboard", follow=False)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with MLflow and W&B, which sees this one's packages behind its own."""
    folder = tmp_path_factory.mktemp("trackers") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    (own,) = (folder / "lib").glob("python*/site-packages")
    here = [str(Path(__file__).parents[2] / "src"), sysconfig.get_path("purelib")]
    (own / "beside.pth").write_text("\n".join(here))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    subprocess.run(command, check=True, timeout=900)
    return python


def call(python: Path, environment: dict[str, str], cwd: Path, *arguments: object) -> str:
    done = subprocess.run(
        [python, *map(str, arguments)],
        cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("shop").experiment_id])
print(json.dumps([{
    "name": run.info.run_name, "status": run.info.status, "id": run.info.run_id,
    "parent": run.data.tags.get("mlflow.parentRunId"), "parameters": run.data.params, "metrics": run.data.metrics,
    "losses": [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")],
    "files": sorted(f.path for f in client.list_artifacts(run.info.run_id)),
} for run in runs]))
"""


@pytest.mark.soak
def test_mlflow_holds_a_run_and_a_study(packages: Path, parent: Path, study: Path, tmp_path: Path) -> None:
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    command = ("-m", "habitus.training.track")
    for _ in range(2):  # the second time the study replaces what it had
        call(packages, environment, tmp_path, *command, study, "--to", "mlflow", "--project", "shop")
    call(packages, environment, tmp_path, *command, parent, "--to", "mlflow", "--project", "shop", "--once", "--model")
    shown = {
        one["name"]: one
        for one in json.loads(call(packages, environment, tmp_path, "-c", READ_MLFLOW).splitlines()[-1])
    }
    record = Record.read(parent / "record.json")
    cell, group, single = (shown.pop(name) for name in (record.recipe_hash[:12], "my study", "run"))
    assert not shown
    assert cell["parent"] == group["id"]
    assert {"README.md", "laws.json"} <= set(group["files"])
    for one in (cell, single):
        assert one["status"] == "FINISHED"
        assert one["parameters"]["model.width"] == "32"
        assert one["metrics"]["catalogue/recall_at_10"] == record.metrics["catalogue/recall@10"].value
        assert one["losses"] == [[line["step"], line["loss"]] for line in journal(parent) if "loss" in line]
        assert {"README.md", "recipe.toml", "record.json", "journal.jsonl"} <= set(one["files"])
    assert "bundle" in single["files"] and "bundle" not in cell["files"]


READ_WANDB = """
import json, pathlib, struct
from wandb.proto.wandb_internal_pb2 import Record

def records(data, at=7, parts=b""):  # blocks of a log as LevelDB writes them
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts = (b"" if kind in (1, 2) else parts) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)

def values(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}

shown = []
for path in sorted(pathlib.Path("wandb").glob("offline-run-*/*.wandb")):
    one = {"config": {}, "losses": [], "summary": {}, "files": []}
    for record in records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            one |= {"name": record.run.display_name, "group": record.run.run_group, "project": record.run.project}
            one["config"] |= values(record.run.config.update)
        if kind == "config":
            one["config"] |= values(record.config.update)
        if kind == "history":
            line = values(record.history.item)
            if "train/loss" in line:
                one["losses"].append((line["_step"], line["train/loss"]))
        if kind == "summary":
            one["summary"] |= values(record.summary.update)
        artifact = record.artifact if kind == "artifact" else record.request.log_artifact.artifact
        one["files"] += [entry.path for entry in artifact.manifest.contents]
    shown.append(one)
print(json.dumps(shown))
"""


@pytest.mark.soak
def test_wandb_holds_a_run_and_a_study_offline(packages: Path, parent: Path, study: Path, tmp_path: Path) -> None:
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = ("-m", "habitus.training.track")
    call(packages, environment, tmp_path, *command, study, "--to", "wandb", "--project", "shop")
    call(packages, environment, tmp_path, *command, parent, "--to", "wandb", "--project", "shop", "--once")
    shown = {
        one["name"]: one for one in json.loads(call(packages, environment, tmp_path, "-c", READ_WANDB).splitlines()[-1])
    }
    record = Record.read(parent / "record.json")
    cell, group, single = (shown.pop(name) for name in (record.recipe_hash[:12], "my study", "run"))
    assert not shown
    assert (cell["group"], group["group"], single["group"]) == ("my study", "my study", "")
    assert {"README.md", "laws.json"} <= set(group["files"])
    for one in (cell, single):
        assert one["project"] == "shop"
        assert one["config"]["model.width"] == 32
        assert one["summary"]["catalogue/recall@10"] == record.metrics["catalogue/recall@10"].value
        assert one["losses"] == [[line["step"], line["loss"]] for line in journal(parent) if "loss" in line]
        assert {"README.md", "recipe.toml", "record.json", "journal.jsonl"} <= set(one["files"])
