"""The report of a running study, served on this machine only: `--watch` of `habitus study` and `habitus report`.

Beside a study the server is a process of its own, at a low priority. It only reads, and ends when the study does:
its standard input is a pipe from the study, whose end is the end of the study, however that came about.
"""

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from habitus.errors import ConfigError, FitError
from habitus.progress import Note
from habitus.reporting import LIVE_FOLDER, Live, draw_empty, draw_unfinished, render_live
from habitus.store import INFO_FILE
from habitus.studies.conclusion import REPORT
from habitus.studies.progress import PROGRESS_FILE
from habitus.studies.watch import Watcher

HOST = "127.0.0.1"
_PANEL = "<!-- live -->"  # where the panel stands in a page that was drawn before
_LOOK_SECONDS, _LOOK_SHARE = 1.0, 0.2  # the least pause between looks, and the most of a core that looking takes
_DRAW_SECONDS, _DRAW_SHARE = 2.0, 0.25  # the same of drawing
_ATTENTION_SECONDS = 30.0  # without a question for so long, nothing is looked at
_OPEN_SECONDS = 12.0  # a page that asked within them is open; hidden ones ask every ten
_FAREWELL_SECONDS = 11.0  # for open pages to fetch the last state
_NICE = 10


def open_port(port: int) -> socket.socket:
    """A socket that listens on this machine's own address; port 0 is any free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--watch {port}", expected="a port from 1 to 65535, or none for any free one")
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigError(
            f"--watch {port}: {HOST}:{port} cannot be used: {error.strerror}",
            expected="a port that is free",
            next_step="give another one, or --watch alone for any that is free",
        ) from None


def watch_store(store: Path, port: int, note: Note) -> None:
    """Serve the page of a store until interrupted."""
    if not (store / INFO_FILE).exists() and not (store.parent / PROGRESS_FILE).exists():
        raise ConfigError(
            f"{store} holds no {INFO_FILE}",
            expected="a folder that `habitus sweep` or `habitus study` writes runs to, as in out/study/store",
        )
    listening = open_port(port)
    note(f"watch: {_address(listening)}  (Ctrl-C ends it)")
    os.nice(_NICE)
    with contextlib.suppress(KeyboardInterrupt):
        LiveServer(store, listening).serve_forever()


@contextmanager
def watch_study(out: Path, port: int, note: Note) -> Iterator[str]:
    """Serve the page of a study in a process of its own while the block runs; gives the page's address."""
    listening = open_port(port)
    address = _address(listening)
    code = "import sys; from habitus.studies.live_server import serve_study; serve_study(*sys.argv[1:])"
    # A session of its own: an interrupt at the terminal is for the study, which then ends this process.
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(out), str(listening.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        start_new_session=True,
    )
    listening.close()
    note(f"watch: {address}")
    try:
        yield address
    finally:
        failed = process.poll()
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_FAREWELL_SECONDS + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if failed is not None:
            note(f"the live page ended before the study (exit code {failed})")


def serve_study(out: str, descriptor: str) -> None:
    """What that process does: serve until its standard input ends, then let open pages fetch the last state."""
    os.nice(_NICE)
    server = LiveServer(Path(out) / "store", socket.socket(fileno=int(descriptor)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began = time.time()
    sys.stdin.buffer.read()
    report = Path(out) / REPORT
    finished = report.exists() and report.stat().st_mtime >= began - 1
    server.say_farewell(report if finished else None)


class LiveServer(ThreadingHTTPServer):
    """Answers with the page, and with its panel alone; looks and draws in the background while someone asks."""

    daemon_threads = True

    def __init__(self, store: Path, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = HOST, listening.getsockname()[1]
        self.watcher = Watcher(store)
        self._panel, self._problem = Live("running"), ""
        self._drawn: tuple[int, str, dict[str, str]] = 0, draw_empty(store, _PANEL), {}  # number, page, sheets
        self._over, self._fetched = threading.Event(), threading.Event()
        self._asked = -math.inf
        for work in (self._look, self._draw):
            threading.Thread(target=work, daemon=True).start()

    def panel(self) -> str:
        """The panel as it was last seen."""
        self._asked = time.monotonic()
        number, _, _ = self._drawn
        return render_live(replace(self._panel, problem=self._panel.problem or self._problem), number)

    def page(self) -> str:
        """The whole page as it was last drawn, with the panel of now."""
        over = self._over.is_set()
        _, html, _ = self._drawn
        page = html.replace(_PANEL, self.panel())
        if over:
            self._fetched.set()
        return page

    def sheet(self, name: str) -> str | None:
        """A sheet that is too large for the page."""
        return self._drawn[2].get(name)

    def say_farewell(self, report: Path | None) -> None:
        """Let pages that are open fetch the report of a study that has ended; without one it was stopped."""
        number, html, sheets = self._drawn
        panel = self.watcher.look()
        self._panel = replace(panel, state="over" if report else "stopped", doing="", runs=())
        self._problem = f"This page is complete, and kept in {report}." if report else ""
        self._drawn = number + 1, report.read_text(encoding="utf-8") if report else html, sheets
        self._over.set()
        if time.monotonic() - self._asked < _OPEN_SECONDS:
            self._fetched.wait(_FAREWELL_SECONDS)
            time.sleep(0.2)  # for the answer to leave

    def _look(self) -> None:
        while self._rest_until_asked(_LOOK_SECONDS):
            began = time.monotonic()
            try:
                self._panel = self.watcher.look()
            except Exception as error:  # of whatever kind: the next look may well succeed
                self._panel = replace(self._panel, problem=f"The store cannot be read: {error}")
            time.sleep((time.monotonic() - began) / _LOOK_SHARE)

    def _draw(self) -> None:
        change = None
        while self._rest_until_asked(_DRAW_SECONDS):
            began, change_now = time.monotonic(), self.watcher.change()
            if change_now == change or not change_now[0]:
                continue
            change = change_now
            try:
                html, sheets = draw_unfinished(self.watcher.store, self.watcher.metrics(), _PANEL)
            except FitError as error:
                self._problem = f"No figures yet: {error.problem}."
            except Exception as error:  # of whatever kind: the panel goes on, and the study is not touched
                self._problem = f"The figures could not be drawn: {error}"
            else:
                if not self._over.is_set():
                    self._drawn, self._problem = (self._drawn[0] + 1, html, sheets), ""
            time.sleep((time.monotonic() - began) / _DRAW_SHARE)

    def _rest_until_asked(self, seconds: float) -> bool:
        """Wait, at least so long, until someone has asked lately; False once there is nothing more to look at."""
        while not self._over.wait(seconds):
            if time.monotonic() - self._asked < _ATTENTION_SECONDS:
                return True
        return False


class _Answer(BaseHTTPRequestHandler):
    """One question of a browser."""

    server: LiveServer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._is_local():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"This page is served at http://{HOST} only.")
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html", self.server.page())
        elif path == "/panel":
            self._send(HTTPStatus.OK, "text/html", self.server.panel())
        elif (sheet := self.server.sheet(path.removeprefix(f"/{LIVE_FOLDER}/"))) is not None:
            self._send(HTTPStatus.OK, "text/csv", sheet)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here; the page is at /.")

    def _is_local(self) -> bool:
        """Whether the browser meant this machine: a name that somebody else points here does not count."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in (HOST, "localhost")
        except ValueError:
            return False

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        with contextlib.suppress(ConnectionError):  # a page that was closed meanwhile
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal is the study's."""


def _address(listening: socket.socket) -> str:
    return f"http://{HOST}:{listening.getsockname()[1]}/"
