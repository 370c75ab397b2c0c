"""The notebooks of examples/ run from top to bottom, and each script does what its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import habitus as hb

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.ipynb"))])
def test_a_notebook_runs_from_top_to_bottom(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.ipynb"))])
def test_a_notebook_is_kept_with_its_outputs_and_without_paths_of_a_machine(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    places = [str(ROOT), *(f"/{folder}/" for folder in ("home", "root", "Users"))]
    assert not [place for place in places if place in str(notebook)]


def run(script: str, *arguments: str | Path, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLES / script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_script_has_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "budget_to_plan.py",
        "cluster.py",
        "log_to_model.py",
        "serve.py",
    }


def test_a_log_becomes_a_model_that_is_served(tmp_path: Path) -> None:
    printed = run("log_to_model.py", "--users", "200", "--hours", "0.03", folder=tmp_path)
    assert len(printed.partition("after [")[2].splitlines()) == 1 + 5
    out = tmp_path / "out" / "log-to-model"
    answer = run("serve.py", out / "run" / "best", "--data", out / "dataset", folder=tmp_path)
    assert len(answer.splitlines()) == 3


def test_a_budget_becomes_two_recipes(tmp_path: Path) -> None:
    assert "by the paper's laws" in run("budget_to_plan.py", folder=tmp_path)
    assert hb.Recipe.read(tmp_path / "out" / "budget-to-plan" / "stage1.toml").train.stage == 1


def test_two_processes_share_one_store(tmp_path: Path) -> None:
    printed = run("cluster.py", "--preset", ROOT / "tests" / "brief.toml", folder=tmp_path)
    assert "0 failed" in printed and "Laws by metric" in printed
