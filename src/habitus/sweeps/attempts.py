"""Attempts at a cell: each claim trains in a folder of its own, and one of them becomes the cell."""

import contextlib
import os
import shutil
from pathlib import Path

from habitus.files import sha256_of
from habitus.record import Record
from habitus.sweeps.lease import Lease, clear
from habitus.sweeps.store import ATTEMPTS, RECORD, SEAL, Seal

_TIMES = ("seconds", "throughput", "memory", "hardware", "versions")


def begin(lease: Lease) -> tuple[Path, int]:
    """A folder for this claim, with the newest checkpoints of earlier ones; and the step that they reach.

    The checkpoints are linked, not moved: a worker that was only asleep may still have its own open. Where an
    earlier attempt is complete but for its publication, that one is returned, with step -1.
    """
    own = lease.cell / ATTEMPTS / f"{lease.number:06d}-{lease.worker.name}"
    earlier = sorted(p for p in (lease.cell / ATTEMPTS).glob("*") if p.is_dir() and p != own)
    own.mkdir(parents=True, exist_ok=True)
    finished = next((folder for folder in earlier if (folder / RECORD).exists()), None)
    if finished is not None:  # its worker died between the last line of the run and its publication
        shutil.rmtree(own)
        return finished, -1
    by_step = {path.name: path for folder in earlier for path in folder.glob("checkpoints/step-*")}
    for name in sorted(by_step, reverse=True):
        if _linked(by_step[name], own / "checkpoints" / name):
            journal = by_step[name].parent.parent / "journal.jsonl"
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(journal, own / "journal.jsonl")
            for folder in earlier:
                shutil.rmtree(folder, ignore_errors=True)
            return own, int(name.removeprefix("step-"))
    for folder in earlier:
        shutil.rmtree(folder, ignore_errors=True)
    return own, 0


def abandon(attempt: Path) -> None:
    """Remove an attempt that came too late."""
    shutil.rmtree(attempt, ignore_errors=True)
    with contextlib.suppress(OSError):
        attempt.parent.rmdir()


def publish(attempt: Path, cell: Path) -> bool:
    """Make the attempt's Record the cell's; False where another was first."""
    try:
        os.link(attempt / RECORD, cell / RECORD)
    except FileExistsError:
        return False
    return True


def settle(cell: Path, worker: str) -> None:
    """Move what belongs to the published Record beside it and clear the rest. May be done again after a crash."""
    winner = next((p for p in (cell / ATTEMPTS).glob("*") if _is_published(p, cell)), None)
    if winner is not None:
        # A worker that was killed just after the end of its run has not removed its checkpoints any more.
        unwanted = "checkpoints" if Record.read(cell / RECORD).status == "done" else None
        for entry in sorted(winner.iterdir()):
            if entry.name not in (RECORD, unwanted):
                _moved(entry, cell / entry.name)
    if not (cell / SEAL).exists():
        claims = len(list(cell.glob("lease-*")))
        Seal(record_sha256=sha256_of(cell / RECORD), worker=worker, claims=claims).write(cell / SEAL)
    shutil.rmtree(cell / ATTEMPTS, ignore_errors=True)
    clear(cell)
    for leftover in cell.glob(".*.partial"):  # of workers that were killed while they claimed
        leftover.unlink(missing_ok=True)


def same_measurement(one: Record, other: Record) -> bool:
    """Whether two Records agree in all but times and machines."""
    return _timeless(one) == _timeless(other)


def _timeless(record: Record) -> dict[str, object]:
    return {name: value for name, value in record.to_values().items() if name not in _TIMES}


def _is_published(attempt: Path, cell: Path) -> bool:
    try:
        return (attempt / RECORD).samefile(cell / RECORD)
    except FileNotFoundError:
        return False


def _linked(source: Path, target: Path) -> bool:
    """Link a checkpoint's files under another folder; False where it vanished or is not whole."""
    beside = target.with_name(f".{target.name}.partial")
    try:
        if not (source / "state.json").exists():
            return False
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(source, beside, copy_function=os.link)
        beside.rename(target)
    except (OSError, shutil.Error):
        shutil.rmtree(beside, ignore_errors=True)
        return False
    return True


def _moved(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if source.is_dir() and target.exists():
            shutil.rmtree(target)
        source.replace(target)
