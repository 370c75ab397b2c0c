"""What the page of plans shows works as it is printed."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from habitus.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(block, "docs/plan.md", "exec"), {})
    assert (tmp_path / "recipe" / "stage2.toml").exists()


def test_the_commands_without_files_run() -> None:
    commands = [line.strip() for line in PAGE.splitlines() if line.startswith("    habitus plan")]
    alone = [c for c in commands if "--laws" not in c and "--check" not in c]
    assert len(alone) >= 2
    for command in alone:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output


def test_every_option_of_the_page_exists() -> None:
    known = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    for option in set(re.findall(r"`(--[a-z0-9-]+)`", PAGE)) - {"--accumulate"}:
        assert option in known, option
