"""A whole study, uninterrupted and interrupted: the same laws, the same recipe, the same page."""

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError, Interrupted
from habitus.recipe import Recipe
from habitus.store import RegisteredPlan
from habitus.studies import StudyOptions, StudyProgress, StudyResult, study
from habitus.studies.study import program

MICRO = Path(__file__).parent / "micro.toml"
OPTIONS = StudyOptions(preset=str(MICRO), device="cpu", workers=2)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, list[str], list[StudyProgress]]:
    """A study in one piece, with what it said on the way."""
    notes: list[str] = []
    progress: list[StudyProgress] = []
    result = study(tmp_path_factory.mktemp("complete") / "study", OPTIONS, progress=progress.append, note=notes.append)
    return result, notes, progress


@pytest.mark.slow
def test_a_study_leaves_laws_recipe_plan_and_page(complete: Any) -> None:
    result, notes, progress = complete
    assert result.report.read_text(encoding="utf-8").startswith("<!")
    laws = json.loads(result.laws.read_text())
    assert laws["extra"]["dataset_checksum"] == result.state.dataset_checksum
    assert {run["axis"] for run in laws["runs"]} == {"share", "depth", "batch", "allocation", "negatives"}
    # Stage 2 where the budget pays 200 steps of it, which is for the laws to say.
    assert [Recipe.read(path).train.stage for path in result.recipes] in ([1], [1, 2])
    registered = RegisteredPlan.read(result.plan)
    assert registered.unchanged()
    assert registered.flops == 8e9  # ten times the largest budget
    card = (result.out / "README.md").read_text(encoding="utf-8")
    assert "A plan for `catalogue/recall@10` at 8e+09 FLOPs" in card
    assert str(result.out) not in card
    assert any(line.startswith("together") for line in notes)
    assert any("learning rate" in line for line in notes)
    assert {p.axis for p in progress} >= {"probes", "allocation"}
    assert any(p.best.startswith("catalogue/recall@10 0.") for p in progress)


@pytest.mark.slow
def test_the_printed_next_command_works_as_printed(complete: Any) -> None:
    result, _, _ = complete
    command = result.next_command.replace("habitus", f"{sys.executable} -m habitus", 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240, env=one_thread())
    assert done.returncode == 0, done.stderr
    two = len(result.recipes) == 2
    card = (result.out / "run" / ("stage1" if two else "") / "README.md").read_text(encoding="utf-8")
    assert "A plan for `catalogue/recall@10` at 8e+09 FLOPs" in card  # that of the study, found beside the recipe
    assert (result.out / "run" / ("stage2" if two else "") / "record.json").exists()
    checked = habitus("plan", "--check", result.out / "run", "--json")
    values = json.loads(checked.stdout)
    assert values["same_recipe"] == {f"stage {stage}": True for stage in range(1, 2 + two)}


@pytest.mark.slow
def test_the_same_command_again_runs_nothing_and_changes_nothing(complete: Any) -> None:
    result, _, _ = complete
    before = contents(result.out)
    notes: list[str] = []
    again = study(result.out, OPTIONS, note=notes.append)
    assert again.next_command == result.next_command
    assert contents(result.out) == before
    printed = habitus("study", "--preset", MICRO, "--out", result.out, "--device", "cpu", "--workers", "2").stdout
    plan = RegisteredPlan.read(result.plan)
    foreseen = {told.metric for told in plan.predictions}
    assert all(f"{metric} after stage 1: " in printed for metric in foreseen)
    assert (f"{plan.metric} is not predicted: " in printed) == (plan.metric not in foreseen)
    assert "hours" in plan.quantities and "        time: " in printed and result.check_command in printed
    assert [line for line in notes if "0 of them now" in line]
    assert not [line for line in notes if re.search(r"[1-9]\d* of them now", line)]
    with pytest.raises(ConfigError, match="holds another study: allow_repeats was False"):
        study(result.out, StudyOptions(preset=str(MICRO), allow_repeats=True))


@pytest.mark.slow
@pytest.mark.parametrize("records", [4, pytest.param(24, marks=pytest.mark.soak)])
def test_a_study_stopped_and_continued_gives_the_same(complete: Any, tmp_path: Path, records: int) -> None:
    result, _, _ = complete
    stopped_after(tmp_path / "study", records, signal.SIGTERM)
    assert comparable(finished(tmp_path / "study")) == comparable(result)


@pytest.mark.soak
@pytest.mark.parametrize("records", [1, 3, 6, 9, 12, 15, 19, 23, 27, 31])
def test_a_study_killed_at_ten_points_gives_the_same(complete: Any, tmp_path: Path, records: int) -> None:
    result, _, _ = complete
    kind = signal.SIGTERM if records % 2 else signal.SIGINT
    stopped_after(tmp_path / "study", records, kind)
    assert comparable(finished(tmp_path / "study")) == comparable(result)


@pytest.mark.slow
def test_time_that_is_up_stops_and_says_how_to_go_on(tmp_path: Path) -> None:
    short = StudyOptions(preset=str(MICRO), device="cpu", workers=1, max_minutes=0.01)
    with pytest.raises(Interrupted, match=r"(?s)time is up during the probes.*same command again"):
        study(tmp_path / "study", short)


def stopped_after(out: Path, records: int, kind: signal.Signals) -> None:
    """Start the command, stop it once so many Records exist (probes among them), and see it leave in order."""
    command = [sys.executable, "-m", "habitus", "study", "--preset", str(MICRO), "--device", "cpu"]
    process = subprocess.Popen([*command, "--workers", "2", "--out", str(out)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while len(list(out.glob("*/cells/*/record.json"))) < records and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    os.kill(process.pid, kind)
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (130, 143), errors
    assert len(list(out.glob("*/cells/*/record.json"))) >= records
    assert not (out / "report.html").exists()
    assert "same command" in errors


def finished(out: Path) -> StudyResult:
    return study(out, OPTIONS)


def comparable(result: StudyResult) -> dict[str, Any]:
    """Everything that a study found, without times, hosts and places."""
    assert result.laws is not None and result.plan is not None and result.report is not None
    plan = json.loads(result.plan.read_text())
    for name in ("registered_at", "registered_hash", "laws"):
        plan.pop(name)
    plan["quantities"].pop("hours", None)
    return {
        "laws": json.loads(result.laws.read_text()),
        "plan": plan,
        "recipes": [path.read_text() for path in result.recipes],
        "report": timeless(result.report.read_text(encoding="utf-8")).replace(html.escape(result.next_command), ""),
    }


def timeless(page: str) -> str:
    """The page without how long its runs took and how much time that makes the plan."""
    page = re.sub(r"in [\d.,]+ (s|min|h) of runs", "", page)
    page = re.sub(r'<tr data-r="time">.*?</tr>', "", page)
    return re.sub(r"\\nhours,.*?(?=\\n)", "", page)


def contents(out: Path) -> dict[str, bytes]:
    names = ("store/laws.json", "recipe/stage1.toml", "plan.json", "study.json")
    return {name: (out / name).read_bytes() for name in names}


def habitus(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "habitus", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_the_command_makes_a_world_of_the_size_it_is_given(tmp_path: Path) -> None:
    out = tmp_path / "study"
    options = ("--preset", MICRO, "--out", out, "--device", "cpu", "--dry-run", "--json")
    stated = habitus("study", *options, "--items", 350, "--users", 500)
    assert stated.returncode == 0, stated.stderr
    values = json.loads(stated.stdout)
    assert (values["request"]["items"], values["request"]["users"]) == (350, 500)
    assert Dataset.open(out / "dataset").num_items == 350
    other = habitus("study", *options)
    assert other.returncode == 1 and "holds a world of 350 items" in other.stderr
    refused = habitus("study", *options, "--items", 350, "--data", out / "dataset")
    assert refused.returncode == 1 and "both --data and --items were given" in refused.stderr
    assert habitus("study", *options, "--items", 1).returncode == 2


def test_the_next_command_names_a_program_that_the_shell_finds(tmp_path: Path, monkeypatch: Any) -> None:
    elsewhere = tmp_path / "habitus"
    elsewhere.write_text("#!/bin/sh\n")
    elsewhere.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(elsewhere), "study"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert program() == str(elsewhere)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "habitus"
