"""Attempts at a cell: each claim trains in a folder of its own, and one of them becomes the cell."""

import contextlib
import os
import shutil
from pathlib import Path

from habitus.files import link_once, sha256_of
from habitus.record import Record
from habitus.store import ATTEMPTS, RECORD_FILE, SEAL_FILE, Seal, published_attempt, read_record
from habitus.sweeps.lease import Lease, clear_claims

_TIMES = ("seconds", "throughput", "memory", "hardware", "versions")


def begin(lease: Lease) -> tuple[Path, int]:
    """A folder for this claim, with the newest checkpoints of earlier ones; and the step that they reach.

    The checkpoints are linked, not moved: a worker that was only asleep may still have its own open. Where an
    earlier attempt is complete but for its publication, that one is returned, with step -1.
    """
    own = lease.cell / ATTEMPTS / f"{lease.number:06d}-{lease.worker.name}"
    earlier = sorted(p for p in (lease.cell / ATTEMPTS).glob("*") if p.is_dir() and p != own)
    own.mkdir(parents=True, exist_ok=True)
    finished = next((folder for folder in earlier if (folder / RECORD_FILE).exists()), None)
    if finished is not None:  # its worker died between the last line of the run and its publication
        shutil.rmtree(own)
        return finished, -1
    by_step = {path.name: path for folder in earlier for path in folder.glob("checkpoints/step-*")}
    for name in sorted(by_step, reverse=True):
        if _link_checkpoint(by_step[name], own / "checkpoints" / name):
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
    return link_once(attempt / RECORD_FILE, cell / RECORD_FILE)


def settle(cell: Path, worker: str) -> None:
    """Move what belongs to the published Record beside it and clear the rest. Safe to repeat after a crash."""
    winner = published_attempt(cell)
    if winner is not None:
        # A worker that was killed just after the end of its run has not removed its checkpoints any more.
        unwanted = "checkpoints" if Record.read(cell / RECORD_FILE).status == "done" else None
        for entry in sorted(winner.iterdir()):
            if entry.name not in (RECORD_FILE, SEAL_FILE, unwanted):  # a cell has a seal of its own
                _move(entry, cell / entry.name)
    if winner is None:  # put in place before a crash, so sealed; else nobody knows where the Record comes from
        read_record(cell.parent.parent, cell.name)
    elif not (cell / SEAL_FILE).exists():
        claims = len(list(cell.glob("lease-*")))
        Seal(record_sha256=sha256_of(cell / RECORD_FILE), worker=worker, claims=claims).write(cell / SEAL_FILE)
    shutil.rmtree(cell / ATTEMPTS, ignore_errors=True)
    clear_claims(cell)
    for leftover in cell.glob(".*.partial"):  # of workers that were killed while they claimed
        leftover.unlink(missing_ok=True)


def same_measurement(one: Record, other: Record) -> bool:
    """Whether two Records agree in everything but times and machines."""
    return _without_times(one) == _without_times(other)


def _without_times(record: Record) -> dict[str, object]:
    return {name: value for name, value in record.to_values().items() if name not in _TIMES}


def _link_checkpoint(source: Path, target: Path) -> bool:
    """Link a checkpoint's files under another folder; False where it vanished or is incomplete."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        if not (source / "state.json").exists():
            return False
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, copy_function=os.link)
        partial.rename(target)
    except (OSError, shutil.Error):
        shutil.rmtree(partial, ignore_errors=True)
        return False
    return True


def _move(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if source.is_dir() and target.exists():
            shutil.rmtree(target)
        source.replace(target)
