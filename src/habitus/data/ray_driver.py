"""Ray in a process of its own: Ray ends the process that is connected when a cluster loses its head, and here that is
a child, whose end is an error that can be explained and cleaned up after."""

import os
import socket
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
_CONNECT_SECONDS = 10
_JOIN_SECONDS = 180  # Ray itself waits for a cluster without an end


class RayDriver:
    """A connection to a cluster, on which functions run as tasks of one CPU each."""

    def __init__(self, connection: Connection, num_cpus: int) -> None:
        self._connection = connection
        self.num_cpus = num_cpus

    def run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], memory: int, ahead: int | None = None
    ) -> Iterator[Any]:
        """function(*job) of every job, in order. At most `ahead` are under way or waiting to be taken; None: all.

        A node runs as many at once as have a CPU and `memory` bytes each. One whose worker dies is run again, alone.
        """
        self._connection.send((function, list(jobs), memory, ahead or max(1, len(jobs))))
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
    # A session of its own: Ctrl-C is for this process, which then closes the connection. What Ray has to say of lost
    # workers goes to stderr: stdout is for the manifest.
    child = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[there.fileno()], env=environment, start_new_session=True, stdout=2
    )
    there.close()
    try:
        if not here.poll(_JOIN_SECONDS):
            child.kill()
            raise _cannot_join(f"no answer in {_JOIN_SECONDS} s")
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
        raise _cannot_join(content)
    if what == "failed":
        raise RunError(
            f"a task cannot run on the cluster: {content}",
            expected="the same versions of habitus and Python on every node",
            next_step="install habitus[ray] on every node, and run the command again",
        )
    if what == "lost":
        raise RunError(
            f"a task was lost {MOST_RETRIES + 1} times, or its node is gone: {content}",
            expected="workers that live as long as a task; those that run out of memory are killed",
            next_step="lower --memory, check 'ray status', and run the command again",
        )
    return content


def _cannot_join(reason: str) -> RunError:
    return RunError(
        f"the Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine')} cannot be joined: {reason}",
        next_step="check 'ray status', or unset RAY_ADDRESS to start a cluster on this machine",
    )


# --- in the child --------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Join the cluster and run what the connection asks for, until it is closed."""
    connection = Connection(descriptor)
    try:
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        import ray

        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    except Exception as error:
        connection.send(("cannot join", _first_line(error)))
        return
    with suppress(EOFError, OSError):  # the parent has closed its end, or is gone
        connection.send(("cpus", max(1, int(ray.cluster_resources().get("CPU", 1)))))
        while True:
            _run_jobs(ray, connection, *connection.recv())
    ray.shutdown()


def _check_address(address: str) -> None:
    """Raise OSError where nothing answers at host:port; ray.init() would wait."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


def _run_jobs(
    ray: Any,
    connection: Connection,
    function: Callable[..., Any],
    jobs: list[tuple[Any, ...]],
    memory: int,
    ahead: int,
) -> None:
    # No more than the smallest node has, or no node would ever take a task.
    memory = min([memory, *(int(node["Resources"].get("memory", memory)) for node in _working_nodes(ray))])
    task = ray.remote(num_cpus=1, memory=memory, max_retries=MOST_RETRIES)(function)
    running: list[Any] = []
    try:
        while jobs or running:
            while jobs and len(running) < ahead:
                running.append(task.remote(*jobs.pop(0)))
            while not ray.wait(running[:1], timeout=_POLL_SECONDS)[0]:
                if connection.poll():  # nothing is asked now: the end of the connection
                    raise EOFError
            connection.send(_result(ray, running.pop(0)))
            connection.recv()
    finally:  # after an error or Ctrl-C; the parent waits for this before it removes what tasks write to
        for reference in running:
            ray.cancel(reference, force=True)
        if running:
            ray.wait(running, num_returns=len(running), timeout=_STOP_SECONDS / 2)


def _working_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _result(ray: Any, reference: Any) -> tuple[str, Any]:
    try:
        return "result", ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # it cannot even be imported: what it raises, it returns
        return "failed", str(error).strip().splitlines()[-1]
    except ray.exceptions.RayError as error:
        return "lost", _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
