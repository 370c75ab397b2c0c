"""A store at a glance: every run with its state, filtered and summed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from habitus.errors import RunError
from habitus.sizing import cell_of_recipe
from habitus.store import ManifestRow
from habitus.sweeps.lease import LEASE_SECONDS, WorkerFile, holder
from habitus.sweeps.manifest import ManifestFile, load_manifests
from habitus.sweeps.store import Store

RunState = Literal["done", "failed", "running", "stalled", "waiting"]
STATES: tuple[RunState, ...] = ("done", "failed", "running", "stalled", "waiting")


@dataclass(frozen=True)
class ListedRun:
    """One run of the store."""

    digest: str
    state: RunState
    axes: tuple[str, ...]
    cell_id: str
    budget: float
    learning_rate: float
    seed: int
    params: int
    steps: int
    seconds: float | None = None
    loss: float | None = None  # batch/loss where measured, else the tail training loss
    reason: str = ""
    worker: str = ""


@dataclass(frozen=True)
class RunList:
    """Runs of a store, and counts of what its workers did."""

    runs: tuple[ListedRun, ...]
    counts: dict[str, int]  # duplicates, abandoned, retries, claims
    seconds_left: float | None  # of the runs that wait or run, at the pace of those that are done
    workers: int

    def to_values(self) -> dict[str, Any]:
        """Plain values for --json."""
        return {
            "states": {state: sum(run.state == state for run in self.runs) for state in STATES},
            "seconds_spent": round(sum(run.seconds or 0.0 for run in self.runs), 3),
            "seconds_left": self.seconds_left,
            "workers": self.workers,
            **self.counts,
            "failures": _failures(self.runs),
            "runs": [{k: v for k, v in vars(run).items() if v not in (None, "")} for run in self.runs],
        }


def list_runs(
    store: str | Path,
    *,
    axis: str | None = None,
    state: str | None = None,
    budget: float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    ended: dict[str, ListedRun] | None = None,
) -> RunList:
    """The runs of a store that pass the filters, in the order of axis, budget and cell.

    Runs in `ended` are not read again, and those that have ended since are added: for callers that look often.
    """
    opened = Store.open(store)
    rows = _rows_by_hash(load_manifests(opened.path))
    digests = sorted({*opened.digests(), *rows})  # a cell whose folder is gone waits to be run again
    now = _server_time(opened)
    runs = []
    for digest in digests:
        run = ended.get(digest) if ended else None
        run = run or _listed_run(opened, digest, rows.get(digest, []), now, lease_seconds)
        if ended is not None and run.state in ("done", "failed") and run.axes:
            ended[digest] = run
        runs.append(run)
    working = len({run.worker for run in runs if run.state == "running"})
    left = _seconds_left(runs, max(1, working))
    chosen = [
        run
        for run in runs
        if (axis is None or axis in run.axes)
        and (state is None or run.state == state)
        and (budget is None or abs(run.budget / budget - 1) < 1e-6)
    ]
    chosen.sort(key=lambda run: (run.axes, run.budget, run.params, run.cell_id, run.learning_rate, run.seed))
    return RunList(tuple(chosen), _event_counts(opened), left, working)


def _rows_by_hash(files: Iterable[ManifestFile]) -> dict[str, list[tuple[str, ManifestRow]]]:
    """The rows of all manifests by the hash of their recipe, each with what it is a row of."""
    rows: dict[str, list[tuple[str, ManifestRow]]] = {}
    for file in files:
        axis = file.manifest.axis
        for row in file.manifest.cells:
            rows.setdefault(row.recipe_hash, []).append((axis, row))
        for row in file.manifest.parents:
            rows.setdefault(row.recipe_hash, []).append((f"parent of {axis}", row))
    return rows


def _listed_run(
    store: Store, digest: str, rows: list[tuple[str, ManifestRow]], now: float, lease_seconds: float
) -> ListedRun:
    record = store.record(digest)
    recipe = record.recipe if record else store.recipe(digest) if store.has_recipe(digest) or not rows else None
    budget = rows[0][1].flops_budget if rows else (record.flops_budget if record else None) or 0.0
    params = record.params.total if record and record.params else 0
    if not params:
        params = int(rows[0][1].realised["params"]) if rows else cell_of_recipe(recipe).params if recipe else 0
    common: dict[str, Any] = {
        "digest": digest,
        "axes": tuple(sorted({axis for axis, _ in rows})),
        "cell_id": rows[0][1].cell_id if rows else digest[:8],
        "budget": budget,
        "learning_rate": recipe.train.learning_rate if recipe else rows[0][1].learning_rate,
        "seed": recipe.train.seed if recipe else rows[0][1].seed,
        "params": params,
        "steps": recipe.train.steps if recipe else int(rows[0][1].realised["steps"]),
    }
    if record is None:
        held = holder(store.cell(digest)) if store.cell(digest).is_dir() else None
        if held is None:
            return ListedRun(state="waiting", **common)
        worker, touched = held
        return ListedRun(state="running" if now - touched <= lease_seconds else "stalled", worker=worker, **common)
    seconds = record.seconds
    loss = record.metrics.get("batch/loss")
    return ListedRun(
        state=record.status,
        seconds=seconds.warmup + seconds.train + seconds.evaluate if seconds else None,
        loss=loss.value if loss else (record.train.loss if record.train else None),
        reason=record.reason or "",
        **common,
    )


def _server_time(store: Store) -> float:
    """The file server's time; that of the newest lease where the store cannot be written to."""
    try:
        clock = WorkerFile(store.path)
        now = clock.now()
        clock.close()
        return now
    except OSError:
        leases = [path.stat().st_mtime for path in store.path.glob("cells/*/lease-*")]
        return max(leases, default=0.0)


def _seconds_left(runs: list[ListedRun], workers: int) -> float | None:
    """Seconds per step of the runs that are done, applied to the others."""
    done = [run for run in runs if run.state == "done" and run.seconds]
    rest = [run for run in runs if run.state in ("waiting", "running", "stalled")]
    if not rest:
        return 0.0
    if not done:
        return None
    pace = sum(run.seconds or 0.0 for run in done) / sum(run.steps for run in done)
    return pace * sum(run.steps for run in rest) / workers


def _event_counts(store: Store) -> dict[str, int]:
    events = [event.get("event") for event in store.events()]
    return {
        "claims": events.count("claimed"),
        "duplicates": events.count("duplicate"),
        "abandoned": events.count("abandoned"),
        "retries": events.count("retry"),
    }


def _failures(runs: Iterable[ListedRun]) -> dict[str, int]:
    reasons = [run.reason for run in runs if run.state == "failed"]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def check_state(state: str | None) -> None:
    if state is not None and state not in STATES:
        raise RunError(f"status {state!r} is unknown", expected=f"one of {', '.join(STATES)}")
