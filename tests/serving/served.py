"""A server in a process of its own, as a user starts it, and a plain client for it."""

import atexit
import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

READY_S = 60


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Served:
    """`habitus serve RUN ...` on a free port, until `stop` or `kill`."""

    def __init__(self, run: Path, *options: str, logs: Path, environment: dict[str, str] | None = None) -> None:
        self.run, self.log = run, logs / "server.log"
        command = [sys.executable, "-m", "habitus", "serve", str(run), "--port", "0", "--device", "cpu", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        address = re.search(r"http://(.+):(\d+)$", line.strip())
        assert address, f"{line!r}, {self.logged()}"
        self.host, self.port = address[1], int(address[2])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def connect(self, timeout: float = READY_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """One request; `raw` is sent as it is, `body` as JSON."""
        sent = dict(headers or {})
        if body is not None:
            raw = json.dumps(body).encode()
        if raw is not None:
            sent.setdefault("Content-Type", "application/json")
        used = connection or self.connect()
        try:
            used.request(method, path, raw, sent)
            answer = used.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            if connection is None:
                used.close()

    def recommend(self, history: list[dict[str, Any]], **options: Any) -> Answer:
        return self.ask("POST", "/v1/recommend", {"history": history, **options})

    def metric(self, name: str) -> float:
        """The value of a line of /metrics, named with its labels; 0 where it is missing."""
        for line in self.ask("GET", "/metrics").raw.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        return 0.0

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        self.process.kill()
        self._ended()

    def _ended(self) -> int:
        code = self.process.wait(READY_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@functools.cache
def shared_server(trained_run: Path) -> Served:
    """One server for all tests of a process that leave it standing; starting one takes seconds."""
    folder = Path(tempfile.mkdtemp())
    run = Path(shutil.copytree(trained_run, folder / "run"))
    limits = ["--max-history", "500", "--max-k", "5000", "--max-filter-values", "1500"]
    server = Served(run, *limits, "--read-timeout", "2", "--timeout", "8", logs=folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    return server


def events(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raw events of a log as JSON can carry them."""
    return [{name: _plain(value) for name, value in event.items()} for event in history]


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def wait_until(condition: Any, seconds: float = READY_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.02)
