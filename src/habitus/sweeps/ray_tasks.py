"""Workers as tasks of a Ray cluster: the same loop on the same store, which all nodes must see under one path."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError, HabitusError, RunError
from habitus.progress import Note
from habitus.sweeps.store import Store
from habitus.sweeps.worker import DeviceLostError, Job, Tally, Worker, WorkerOptions, deadline

_MOST_RETRIES = 1_000  # of a task whose node died


def run_on_ray(
    store: Store,
    dataset: Dataset,
    jobs: Sequence[Job],
    options: WorkerOptions,
    workers: int,
    *,
    watch: Callable[[], None],
    note: Note,
) -> Tally:
    """Start so many tasks and wait until every job has a Record, or time is up.

    Nothing but the store is shared: a node that dies takes no result with it, and its cells are claimed again
    when their leases run out. Joins the cluster that is already connected, or that RAY_ADDRESS names, or starts
    one on this machine.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "backend ray needs the package ray",
            expected="the `ray` extra",
            next_step="pip install 'habitus[ray]'",
        ) from None
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    seconds_left = deadline(options.seconds_left)
    share = min(1.0, _num_gpus(ray, options) / workers)
    task = ray.remote(num_cpus=1, num_gpus=share, max_retries=_MOST_RETRIES)(_work)
    paths = str(store.path.resolve()), str(dataset.path.resolve())
    running = [task.remote(*paths, list(jobs), options) for _ in range(workers)]
    total = Tally()
    try:
        while running:
            ready, running = ray.wait(running, timeout=0.5)
            for reference in ready:
                total.add(_tally_of(ray, reference, note))
            watch()
            remaining = seconds_left()
            if remaining is not None and remaining < -60:
                break  # a task that was started again does not know how late it is
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if started_here:
            ray.shutdown()
    return total


def _work(store: str, dataset: str, jobs: list[Job], options: WorkerOptions) -> dict[str, object]:
    """One task: a worker, from its first claim to its tally. Errors that a user can fix come back as text."""
    began = time.monotonic()
    try:
        worker = Worker(
            Store.open(store), Dataset.open(Path(dataset), verify=False), replace(options, poll_seconds=0.5)
        )
        return {"counts": worker.work(jobs).counts(), "seconds": time.monotonic() - began}
    except DeviceLostError:
        os._exit(70)  # Ray starts the task again in a new process
    except HabitusError as error:
        return {"error": str(error)}


def _tally_of(ray: object, reference: object, note: Note) -> Tally:
    try:
        reply = ray.get(reference)  # type: ignore[attr-defined]
    except Exception as error:  # the task was lost more often than it is retried; the store shows what is missing
        note(f"a Ray task was lost: {error}")
        return Tally()
    if "error" in reply:
        raise RunError(reply["error"])
    return Tally(**reply["counts"])


def _num_gpus(ray: object, options: WorkerOptions) -> float:
    if options.device == "cpu":
        return 0.0
    return float(ray.cluster_resources().get("GPU", 0))  # type: ignore[attr-defined]
