"""Whether workers share a GPU is decided by what the machine has, and said."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from habitus.sweeps import mps


@pytest.fixture(autouse=True)
def as_if_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    mps._start_service.cache_clear()
    yield
    mps._start_service.cache_clear()


def installed(folder: Path, script: str) -> Path:
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(f"#!/bin/sh\n{script}\n")
    control.chmod(0o755)
    return control


def test_without_the_service_workers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    notes: list[str] = []
    assert mps.mps_environment(notes.append) == {}
    assert notes == ["no nvidia-cuda-mps-control here: workers take turns on the GPU"]


def test_a_service_that_fails_is_said_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    notes: list[str] = []
    assert mps.mps_environment(notes.append) == {}
    assert "does not work here" in notes[0] and "take turns" in notes[0]


def test_a_service_that_works_is_started_once_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    control = installed(tmp_path, f'echo "$@ $CUDA_MPS_PIPE_DIRECTORY" >> {calls}; [ -n "$1" ] || cat >> {calls}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "_PROBE", "import os; assert os.path.isdir(os.environ['CUDA_MPS_PIPE_DIRECTORY'])")
    notes: list[str] = []
    environment = mps.mps_environment(notes.append)
    assert mps.mps_environment(notes.append) == environment
    assert notes == ["workers share the GPU (MPS)"] * 2
    pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert calls.read_text().splitlines() == [f"-d {pipes}"]
    mps._stop_service(str(control), environment, Path(pipes).parent)
    assert calls.read_text().splitlines()[1:] == [f" {pipes}", "quit"]
    assert not Path(pipes).parent.exists()


def test_a_user_s_own_service_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    notes: list[str] = []
    assert mps.mps_environment(notes.append) == {} and not notes
