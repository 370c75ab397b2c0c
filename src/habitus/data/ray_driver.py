"""Ray in a process of its own: Ray ends the process that is connected when a cluster loses its head, and here that is
a child, whose end is an error that can be explained and cleaned up after."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from typing import Any

from habitus.errors import ConfigError, RunError

MOST_RETRIES = 20  # of a task whose worker or node died
_POLL_SECONDS = 0.5
_STOP_SECONDS = 20


class RayDriver:
    """A connection to a cluster, on which functions run as tasks of one CPU each."""

    def __init__(self, connection: Connection, num_cpus: int) -> None:
        self._connection = connection
        self.num_cpus = num_cpus

    def run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], ahead: int | None = None
    ) -> Iterator[Any]:
        """function(*job) of every job, in order. At most `ahead` are under way or waiting to be taken; None: all.

        A task whose worker dies is run again, alone.
        """
        self._connection.send((function, list(jobs), ahead or max(1, len(jobs))))
        for _ in jobs:
            yield _receive(self._connection)
            self._connection.send("next")


@contextmanager
def ray_driver() -> Iterator[RayDriver]:
    """The cluster that this process has joined, or that RAY_ADDRESS names, or one on this machine for the block."""
    if find_spec("ray") is None:
        raise ConfigError(
            "backend ray needs the package ray", expected="the `ray` extra", next_step="pip install 'habitus[ray]'"
        )
    here, there = Pipe()
    code = f"from habitus.data.ray_driver import serve; serve({there.fileno()})"
    environment = {**os.environ, **_joined_cluster()}
    # A session of its own: Ctrl-C is for this process, which then closes the connection.
    child = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[there.fileno()], env=environment, start_new_session=True
    )
    there.close()
    try:
        yield RayDriver(here, _receive(here))
    finally:
        here.close()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _joined_cluster() -> dict[str, str]:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def _receive(connection: Connection) -> Any:
    try:
        what, content = connection.recv()
    except (EOFError, OSError):
        raise RunError(
            "the Ray cluster lost its head, or this machine's part of the cluster ended; nothing was written",
            expected="a cluster whose head stays; input and earlier datasets are as they were",
            next_step="start the cluster again ('ray status' shows it) and run the command again",
        ) from None
    if what == "cannot join":
        raise RunError(
            f"the Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine')} cannot be joined: {content}",
            next_step="check 'ray status', or unset RAY_ADDRESS to start a cluster on this machine",
        )
    if what == "lost":
        raise RunError(
            f"a task was lost {MOST_RETRIES + 1} times, or its node is gone: {content}",
            expected="workers that live as long as a task; those that run out of memory are killed",
            next_step="lower --memory, check 'ray status', and run the command again",
        )
    return content


# --- in the child --------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Join the cluster and run what the connection asks for, until it is closed."""
    import ray

    connection = Connection(descriptor)
    try:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    except Exception as error:
        connection.send(("cannot join", _first_line(error)))
        return
    with suppress(EOFError, OSError):  # the parent has closed its end, or is gone
        connection.send(("cpus", max(1, int(ray.cluster_resources().get("CPU", 1)))))
        while True:
            _run_jobs(ray, connection, *connection.recv())
    ray.shutdown()


def _run_jobs(
    ray: Any, connection: Connection, function: Callable[..., Any], jobs: list[tuple[Any, ...]], ahead: int
) -> None:
    task = ray.remote(num_cpus=1, max_retries=MOST_RETRIES)(function)
    running: list[Any] = []
    while jobs or running:
        while jobs and len(running) < ahead:
            running.append(task.remote(*jobs.pop(0)))
        while not ray.wait(running[:1], timeout=_POLL_SECONDS)[0]:
            if connection.poll():  # nothing is asked now: the end of the connection
                raise EOFError
        try:
            result = ("result", ray.get(running.pop(0)))
        except ray.exceptions.RayError as error:
            result = ("lost", _first_line(error))
        connection.send(result)
        connection.recv()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
