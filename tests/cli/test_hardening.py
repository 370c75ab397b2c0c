"""No input ends in a traceback: odd options, damaged files, disks that cannot be written, Ctrl-C, the unforeseen."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from habitus import cli
from habitus.training.journal import read_journal

from .in_process import habitus_here
from .test_commands import habitus

RUNS = Path(__file__).parents[2] / "docs" / "studies" / "h200-minutes" / "runs.csv"
RECIPE = """
[model]
joint_dim = 8
text_depth = 1
width = 32
depth = 1

[train]
steps = 1
batch_sequences = 4
learning_rate = 0.01
"""
SIZE = ["size", "--share", 0.06]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small world in `shop`, its dataset in `dataset`, and a run's recipe."""
    folder = tmp_path_factory.mktemp("hardening")
    assert (
        habitus_here("world", "shop", "--users", 300, "--items", 200, "--events-per-user", 20, cwd=folder).returncode
        == 0
    )
    tables = ["shop/events.parquet", "shop/items.parquet", "--schema", "shop/schema.toml"]
    assert habitus_here("prepare", *tables, "--out", "dataset", "--seq-len", 32, cwd=folder).returncode == 0
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


PREPARE = ["prepare", "shop/events.parquet", "shop/items.parquet", "--schema", "shop/schema.toml", "--out", "out"]
TRAIN = ["train", "recipe.toml", "--data", "dataset", "--out", "run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SIZE, "--data-ratio", 15, "--flops", "1e400"], "flops = inf is out of range"),
        ([*SIZE, "--data-ratio", 15, "--flops", "1e300"], "flops = 1e+300 is out of range"),
        ([*SIZE, "--flops", "1e17", "--data-ratio", "1e-300"], "data_ratio = 1e-300 is out of range"),
        ([*SIZE, "--data-ratio", 15, "--steps", 10**40], "steps = 1e+40 is out of range"),
        ([*SIZE, "--flops", "1e17", "--data-ratio", 15, "--seq-len", 10**11], "seq_len = 1e+11 is out of range"),
        ([*PREPARE, "--seq-len", 10**11], "seq_len is 100,000,000,000"),
        ([*PREPARE, "--threads", 100_000], "threads is 100,000"),
        ([*TRAIN, "--threads", 100_000], "threads is 100,000"),
        ([*TRAIN, "data.seq_len=100000000000"], "seq_len is 100,000,000,000"),
        ([*TRAIN, "model.depth=100000"], "the model has 100,001 layers"),
        ([*TRAIN, "model.width=1000000"], "a step of this recipe takes about 131 TiB (optimizer 43.7 TiB, "),
        ([*TRAIN, "train.batch_sequences=100000000"], "a step of this recipe takes about 55.1 TiB (activations "),
        ([*PREPARE, "--text-len", 10**8], "text_len is 100,000,000"),
    ],
)
def test_numbers_beyond_reason_are_refused(place: Path, arguments: list[Any], message: str) -> None:
    failed = habitus_here(*arguments, cwd=place)
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.startswith(f"habitus: {message}"), failed.stderr
    assert "Traceback" not in failed.stderr


def test_tokens_that_do_not_fit_are_refused_with_their_size(place: Path) -> None:
    rows = "".join(f"item{i},word\n" for i in range(70_000))  # more than are encoded at once
    (place / "items.csv").write_text("item,title\n" + rows)
    (place / "events.csv").write_text("user,item,time\nu,item1,1\nu,item2,2\n")
    (place / "schema.toml").write_text(
        '[events]\nuser = "user"\nitem = "item"\ntimestamp = "time"\ntime_unit = "order"\n'
        '[items]\nitem = "item"\n[items.fields]\ntitle = "text"\n'
    )
    tables = ["prepare", "events.csv", "items.csv", "--schema", "schema.toml", "--out", "out"]
    failed = habitus_here(*tables, "--text-len", 60_000, "--memory", "1GiB", cwd=place)
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        "habitus: 60,000 text tokens for each of 70,000 items take 15.6 GiB, some of it at once, and --memory is 1 GiB"
    ), failed.stderr
    assert not (place / "out").exists()


def test_force_trains_what_seems_not_to_fit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from habitus.data import Dataset
    from habitus.errors import OutOfMemory
    from habitus.recipe import Recipe
    from habitus.training import TrainOptions, environment, train

    monkeypatch.setattr(environment, "available_memory", lambda: 10_000)
    recipe, dataset = Recipe.read(place / "recipe.toml"), Dataset.open(place / "dataset")
    with pytest.raises(OutOfMemory, match=r"and cpu has 9\.77 KiB"):
        train(recipe, dataset, place / "small")
    assert not (place / "small").exists()
    assert train(recipe, dataset, place / "small", options=TrainOptions(force=True)).status == "done"


@pytest.mark.parametrize("arguments", [["serve", "run", "--threads", -3], ["world", "w", "--threads", 100_000]])
def test_threads_that_no_machine_has_are_a_usage_error(place: Path, arguments: list[Any]) -> None:
    failed = habitus_here(*arguments, cwd=place)
    assert failed.returncode == 2
    assert "'--threads'" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_laws_of_absurd_numbers_give_no_plan(tmp_path: Path) -> None:
    assert habitus_here("fit", RUNS, "--out", "laws.json", cwd=tmp_path).returncode == 0
    laws = json.loads((tmp_path / "laws.json").read_text())

    def inflate(value: Any, inside: bool = False) -> Any:
        if isinstance(value, dict):
            return {name: inflate(v, inside or name in ("values", "intervals")) for name, v in value.items()}
        if isinstance(value, list):
            return [inflate(v, inside) for v in value]
        return 1e308 if inside and isinstance(value, float) else value

    (tmp_path / "laws.json").write_text(json.dumps(inflate(laws)))
    plan = ["plan", "--laws", "laws.json", "--flops", "1e17", "--metric", "batch/loss"]
    assert "laws.json has been changed since it was written" in habitus_here(*plan, cwd=tmp_path).stderr
    del laws["sha256"]
    (tmp_path / "laws.json").write_text(json.dumps(inflate(laws)))
    failed = habitus_here(*plan, cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.startswith("habitus: no plan can be computed: ")
    assert "Traceback" not in failed.stderr


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that cannot be written to, not even by root, with runs.csv in it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system does not let tests mount a disk")
    try:
        (disk / "runs.csv").write_text("".join(RUNS.read_text().splitlines(keepends=True)[:6]))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_store_that_cannot_be_written_is_one_message(place: Path, read_only: Path) -> None:
    fit = habitus_here("fit", read_only / "runs.csv", cwd=place)
    sweep = ["sweep", "share", "--data", "dataset", "--store", read_only / "store"]
    sweep += ["--preset", "tiny", "--budgets", "1e10", "--allow-repeats"]
    for failed in (fit, habitus_here(*sweep, cwd=place)):
        assert failed.returncode == 1, failed.stderr
        assert failed.stderr.startswith(f"habitus: {read_only}"), failed.stderr
        assert "Read-only file system" in failed.stderr
        assert "Traceback" not in failed.stderr


def test_a_journal_with_bytes_that_are_not_text_gives_its_other_lines(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe{"step": 2}\n[3]\n{"step": 4}\n{"st')
    assert read_journal(tmp_path / "journal.jsonl") == [{"step": 1}, {"step": 4}]


def test_an_interrupt_ends_prepare_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    shop = ["--users", 20_000, "--items", 3_000, "--events-per-user", 30]
    assert habitus_here("world", "shop", *shop, cwd=tmp_path).returncode == 0
    command = [sys.executable, "-m", "habitus", *PREPARE, "--threads", "1"]
    interrupted = 0
    for seconds in (0.0, 0.1, 0.3):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.partial*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        if (tmp_path / "out").exists():  # finished before the signal, which may have met Python at its own end
            assert errors in ("", "habitus: interrupted\n")
            assert process.returncode in (0, -signal.SIGINT)
            shutil.rmtree(tmp_path / "out")
            continue
        assert process.returncode == 130
        assert errors == "habitus: interrupted\n"
        assert [path.name for path in tmp_path.iterdir()] == ["shop"]
        interrupted += 1
    assert interrupted


def test_the_unforeseen_is_one_line_with_the_place_of_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = typer.Typer(pretty_exceptions_enable=False)

    @broken.command()
    def divide() -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(cli, "app", broken)
    monkeypatch.setattr(sys, "argv", ["habitus"])
    monkeypatch.delenv("HABITUS_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == cli.UNFORESEEN == 70
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    line = re.fullmatch(
        r"habitus: unforeseen ZeroDivisionError at test_hardening\.py:\d+: by zero\. "
        r"Its traceback is in (\S+); 'habitus --debug' prints it\.\n",
        errors,
    )
    assert line is not None
    traceback = Path(line[1])
    assert "Traceback (most recent call last)" in traceback.read_text()
    assert traceback.stat().st_mode & 0o077 == 0
    traceback.unlink()
    monkeypatch.setenv("HABITUS_DEBUG", "1")
    with pytest.raises(SystemExit):
        cli.main()
    errors = capsys.readouterr().err
    assert "Traceback (most recent call last)" in errors
    Path(errors.partition("Its traceback is in ")[2].partition(";")[0]).unlink()


def test_debug_prints_the_traceback_of_a_refusal_too(tmp_path: Path) -> None:
    failed = habitus("--debug", "describe", "nowhere", cwd=tmp_path)
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert "Traceback" not in habitus_here("describe", "nowhere", cwd=tmp_path).stderr
