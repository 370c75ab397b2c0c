"""habitus evaluate and habitus embed, and the catalogue spread over processes that torchrun starts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli.app import app
from habitus.data import Dataset
from habitus.errors import ConfigError, DataError, ModelError
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.events.world import World

SMALL = ["--queries", "500", "--batch-sequences", "8"]


@pytest.fixture
def run(make_run, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    """A run of its own, without a cache."""
    shutil.copytree(make_run(60) / "bundle", tmp_path / "run" / "bundle")
    return tmp_path / "run"


def habitus(*arguments: object) -> str:
    """What a command prints on stdout; failures are raised as they are."""
    result = CliRunner().invoke(app, [str(part) for part in arguments], env={"COLUMNS": "120"})
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_run_is_evaluated_and_written(run: Path, dataset: Dataset, tmp_path: Path) -> None:
    files = ["--out", tmp_path / "evaluations.csv", "--per-query", tmp_path / "queries.parquet"]
    shown = habitus("evaluate", run, "--data", dataset.path, *SMALL, *files)
    assert "recall@100" in shown
    assert "history=20" in shown
    assert "500 queries against 300 candidates" in shown
    again = json.loads(habitus("evaluate", run, "--data", dataset.path, *SMALL, "--json"))
    [direct] = evaluate_runs([run], dataset, EvaluateOptions(queries=500, batch_sequences=8))
    assert again[0]["metrics"] == direct.to_values()["metrics"]
    table = pyarrow.csv.read_csv(tmp_path / "evaluations.csv").to_pylist()
    values = {f"{row['regime']}/{row['metric']}": row["value"] for row in table}
    assert values["catalogue/loss"] == pytest.approx(direct.metrics["catalogue/loss"].value)
    queries = pq.read_table(tmp_path / "queries.parquet")
    assert set(queries["regime"].to_pylist()) == {"batch", "catalogue"}
    losses = queries.filter(pa.compute.equal(queries["regime"], "catalogue"))["loss"].to_numpy()
    assert losses.mean() == pytest.approx(direct.metrics["catalogue/loss"].value)


def test_the_names_of_slices_are_whole_on_a_narrow_terminal(run: Path, dataset: Dataset) -> None:
    arguments = [str(part) for part in ("evaluate", run, "--data", dataset.path, *SMALL)]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "FORCE_COLOR": "1"}).stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("history=20", "warm", "coverage@10"):
        assert sum(name in line.split() for line in lines) >= 2, name  # in both regimes


def test_baselines_need_no_run(dataset: Dataset) -> None:
    shown = habitus("evaluate", "--data", dataset.path, "--baselines", "--regime", "batch", *SMALL)
    assert all(name in shown for name in ("popularity", "repeat recent", "item to item", "oracle"))
    assert "catalogue regime" not in shown


def test_history_can_be_left_out(run: Path, dataset: Dataset) -> None:
    evaluations = json.loads(habitus("evaluate", run, "--data", dataset.path, *SMALL, "--exclude-history", "--json"))
    assert "catalogue/loss" not in evaluations[0]["metrics"]
    assert evaluations[0]["metrics"]["catalogue/recall@10"]["n"] < 500
    assert "catalogue/recall@10/repeat" not in evaluations[0]["metrics"]


def test_only_the_metrics_asked_for_are_computed_and_are_the_same(run: Path, dataset: Dataset, tmp_path: Path) -> None:
    every = json.loads(habitus("evaluate", run, "--data", dataset.path, *SMALL, "--json", "--baselines"))
    for groups, absent in (("ranking", ("loss", "coverage")), ("ranking,coverage", ("loss",)), ("loss", ("recall",))):
        file = tmp_path / f"{groups}.parquet"
        asked = ["--metrics", groups, "--json", "--baselines", "--per-query", file]
        evaluations = json.loads(habitus("evaluate", run, "--data", dataset.path, *SMALL, *asked))
        assert [one["scorer"] for one in evaluations] == [one["scorer"] for one in every]
        for one, whole in zip(evaluations, every, strict=True):
            assert one["metrics"]
            for name, metric in one["metrics"].items():
                assert metric == whole["metrics"][name]
            assert not any(f"/{word}" in name for name in one["metrics"] for word in absent)
        assert ("top" in pq.read_table(file).column_names) == ("coverage" in groups)
    shown = habitus("evaluate", run, "--data", dataset.path, *SMALL, "--metrics", "ranking")
    assert "recall@100" in shown and "perplexity" not in shown
    assert "loss" in habitus("evaluate", run, "--data", dataset.path, *SMALL, "--metrics", "loss")
    alone = json.loads(habitus("evaluate", run, "--data", dataset.path, *SMALL, "--metrics", "coverage", "--json"))
    assert set(alone[0]["metrics"]) == {name for name in every[0]["metrics"] if "coverage" in name}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no --data"),
        (["RUN", "--data", "DATA", "--metrics", "recall"], "metrics .'recall'."),
        (["RUN", "--data", "DATA", "--metrics", "loss", "--exclude-history"], "only losses are requested"),
        (["--data", "DATA"], "nothing to score"),
        (["RUN", "--data", "DATA", "--regime", "train"], "--regime 'train'"),
        (["RUN", "--data", "DATA", "--cutoffs", "0,10"], "k = 0"),
        (["RUN", "--data", "DATA", "--cutoffs", "ten"], "--cutoffs is 'ten'"),
        (["RUN", "--data", "DATA", "--histories", "3,100"], "history length of 100"),
        (["RUN", "--data", "DATA", "--out", "evaluations.txt"], "unknown suffix"),
        (["RUN", "--data", "DATA", "--per-query", "nowhere/q.parquet"], "nowhere does not exist"),
        (["RUN", "--data", "DATA", "--device", "tpu9"], "tpu9"),
    ],
)
def test_bad_options_are_named(run: Path, dataset: Dataset, arguments: list[str], message: str) -> None:
    places = {"RUN": str(run), "DATA": str(dataset.path)}
    with pytest.raises(ConfigError, match=message):
        habitus("evaluate", *(places.get(part, part) for part in arguments))


def test_a_catalogue_is_embedded_once(run: Path, dataset: Dataset, tmp_path: Path) -> None:
    assert "300 vectors of width 16 as fp16" in habitus("embed", run, "--data", dataset.path, "--dtype", "fp16")
    made = (run / "catalogue" / "manifest.json").stat().st_mtime_ns
    habitus("embed", run, "--data", dataset.path, "--dtype", "fp16")
    assert (run / "catalogue" / "manifest.json").stat().st_mtime_ns == made
    habitus("evaluate", run, "--data", dataset.path, *SMALL)
    assert (run / "catalogue" / "manifest.json").stat().st_mtime_ns == made
    with pytest.raises(ModelError, match="not as bf16"):
        habitus("embed", run, "--data", dataset.path)
    with pytest.raises(ConfigError, match="neither --data nor --items"):
        habitus("embed", run)


def test_new_items_are_embedded(run: Path, world: World, tmp_path: Path) -> None:
    pq.write_table(pa.concat_tables(world.item_blocks()).slice(0, 20), tmp_path / "new.parquet")
    out = tmp_path / "vectors.parquet"
    assert "20 vectors of width 16" in habitus("embed", run, "--items", tmp_path / "new.parquet", "--out", out)
    assert pq.read_table(out).num_rows == 20
    with pytest.raises(ConfigError, match="no --out"):
        habitus("embed", run, "--items", tmp_path / "new.parquet")


def torchrun(processes: int, run: Path, dataset: Dataset, out: Path) -> dict[str, np.ndarray]:
    """The per-query columns that `habitus evaluate` writes when torchrun starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "habitus", "evaluate", str(run), "--data", str(dataset.path), *SMALL, "--per-query", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("500 queries against 300 candidates") == 1  # the first process speaks alone
    table = pq.read_table(out)
    columns = {name: table[name].to_numpy() for name in ("rank", "loss", "entropy", "event")}
    return columns | {"top": np.array(table["top"].to_pylist()), "regime": np.array(table["regime"].to_pylist())}


@pytest.mark.parametrize("counts", [(3,), pytest.param((2, 3), marks=pytest.mark.soak)])
def test_the_same_numbers_from_one_and_several_processes(
    run: Path, dataset: Dataset, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    habitus("evaluate", run, "--data", dataset.path, *SMALL, "--per-query", tmp_path / "one.parquet")
    alone = pq.read_table(tmp_path / "one.parquet")
    shutil.rmtree(run / "catalogue")  # the first build the cache themselves; later ones find it
    for processes in counts:
        evaluations = torchrun(processes, run, dataset, tmp_path / f"{processes}.parquet")
        assert evaluations["regime"].tolist() == alone["regime"].to_pylist()
        assert np.array_equal(evaluations["event"], alone["event"].to_numpy())
        assert np.array_equal(evaluations["rank"], alone["rank"].to_numpy())
        assert np.array_equal(evaluations["top"], np.array(alone["top"].to_pylist()))
        np.testing.assert_allclose(evaluations["loss"], alone["loss"].to_numpy(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(evaluations["entropy"], alone["entropy"].to_numpy(), rtol=0, atol=1e-6)


def test_names_that_cannot_be_written_are_refused_before_any_work(run: Path, dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        habitus("evaluate", run, "--data", dataset.path, *SMALL, "--per-query", tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        habitus("embed", run, "--items", "new.parquet", "--out", tmp_path / "nowhere" / "vectors.parquet")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file cannot be created: File exists"):
        habitus("embed", run, "--data", dataset.path, "--out", tmp_path / "file")


def test_folders_that_are_read_only_are_refused_before_any_work(
    run: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not bind every user that runs tests.
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    for option, name in (("--out", "evaluations.json"), ("--per-query", "evaluations.parquet")):
        with pytest.raises(ConfigError, match="cannot be written to"):
            habitus("evaluate", run, "--data", dataset.path, *SMALL, option, tmp_path / name)
    with pytest.raises(DataError, match="cannot be written to"):
        habitus("embed", run, "--items", "new.parquet", "--out", tmp_path / "vectors.parquet")
    with pytest.raises(ModelError, match="catalogue cannot be written to"):
        habitus("evaluate", run, "--data", dataset.path, *SMALL)


def test_odd_options_are_clear_errors(run: Path, dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="--catalogue-items is '250,300'"):
        habitus("evaluate", run, "--data", dataset.path, *SMALL, "--catalogue-items", "250,300")
    with pytest.raises(ConfigError, match="device 'meta' is not supported"):
        habitus("evaluate", run, "--data", dataset.path, *SMALL, "--device", "meta")
