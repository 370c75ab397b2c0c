"""A store at a glance: every run with its state, filtered and summed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from habitus.errors import RunError
from habitus.recipe import Recipe
from habitus.sizing import cell_of_recipe
from habitus.sweeps.lease import LEASE_SECONDS, WorkerFile, holder
from habitus.sweeps.manifest import Manifest, manifests
from habitus.sweeps.store import Store

State = Literal["done", "failed", "running", "stalled", "waiting"]
STATES: tuple[State, ...] = ("done", "failed", "running", "stalled", "waiting")


@dataclass(frozen=True)
class RunLine:
    """One run of the store."""

    digest: str
    state: State
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
class Listing:
    """Runs, and what the workers of the store went through."""

    runs: tuple[RunLine, ...]
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


def listing(
    store: str | Path,
    *,
    axis: str | None = None,
    state: str | None = None,
    budget: float | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> Listing:
    """The runs of a store that answer the filters, in the order of axis, budget and cell."""
    opened = Store.open(store)
    rows = _rows(manifests(opened.path))
    now = _server_time(opened)
    lines = [_line(opened, digest, rows.get(digest), now, lease_seconds) for digest in opened.digests()]
    working = len({line.worker for line in lines if line.state == "running"})
    left = _seconds_left(lines, max(1, working))
    chosen = [
        line
        for line in lines
        if (axis is None or axis in line.axes)
        and (state is None or line.state == state)
        and (budget is None or abs(line.budget / budget - 1) < 1e-6)
    ]
    chosen.sort(key=lambda line: (line.axes, line.budget, line.params, line.cell_id, line.learning_rate, line.seed))
    return Listing(tuple(chosen), _counts(opened), left, working)


def _rows(files: Iterable[Any]) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for file in files:
        manifest: Manifest = file.manifest
        for row in manifest.cells:
            found.setdefault(row.recipe_hash, []).append((manifest.axis, row))
        for row in manifest.parents:
            found.setdefault(row.recipe_hash, []).append((f"parent of {manifest.axis}", row))
    return found


def _line(store: Store, digest: str, rows: list[tuple[str, Any]] | None, now: float, lease_seconds: float) -> RunLine:
    record = store.record(digest)
    recipe: Recipe = record.recipe if record else store.recipe(digest)
    known = rows or []
    budget = known[0][1].flops_budget if known else (record.flops_budget if record else None) or 0.0
    params = record.params.total if record and record.params else 0
    if not params:
        params = int(known[0][1].realised["params"]) if known else cell_of_recipe(recipe).params
    common: dict[str, Any] = {
        "digest": digest,
        "axes": tuple(sorted({axis for axis, _ in known})),
        "cell_id": known[0][1].cell_id if known else digest[:8],
        "budget": budget,
        "learning_rate": recipe.train.learning_rate,
        "seed": recipe.train.seed,
        "params": params,
        "steps": recipe.train.steps,
    }
    if record is None:
        held = holder(store.cell(digest))
        if held is None:
            return RunLine(state="waiting", **common)
        worker, touched = held
        return RunLine(state="running" if now - touched <= lease_seconds else "stalled", worker=worker, **common)
    took = record.seconds
    loss = record.metrics.get("batch/loss")
    return RunLine(
        state=record.status,
        seconds=took.warmup + took.train + took.evaluate if took else None,
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


def _seconds_left(lines: list[RunLine], workers: int) -> float | None:
    """Seconds per step and parameter of what is done, applied to what is not."""
    done = [line for line in lines if line.state == "done" and line.seconds]
    rest = [line for line in lines if line.state in ("waiting", "running", "stalled")]
    if not rest:
        return 0.0
    if not done:
        return None
    pace = sum(line.seconds or 0.0 for line in done) / sum(line.steps for line in done)
    return pace * sum(line.steps for line in rest) / workers


def _counts(store: Store) -> dict[str, int]:
    events = [event.get("event") for event in store.events()]
    return {
        "claims": events.count("claimed"),
        "duplicates": events.count("duplicate"),
        "abandoned": events.count("abandoned"),
        "retries": events.count("retry"),
    }


def _failures(runs: Iterable[RunLine]) -> dict[str, int]:
    reasons = [run.reason for run in runs if run.state == "failed"]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def check_state(state: str | None) -> None:
    if state is not None and state not in STATES:
        raise RunError(f"status {state!r} is unknown", expected=f"one of {', '.join(STATES)}")
