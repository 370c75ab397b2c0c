"""A headless Chromium driven over its debugging pipe: no driver program, no dependency.

Debian's `chromium` is used where it is installed; where it is not, one attempt is made to install it.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio",
)  # fmt: skip


def find_chromium() -> str | None:
    """The path of a Chromium, installed now if need be; None where there is none to be had."""
    found = _known()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            subprocess.run(
                ["apt-get", "install", "-y", "-q", "chromium"], capture_output=True, timeout=240, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        found = _known()
    return found


def _known() -> str | None:
    return next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


class Browser:
    """One page in one browser; `events` holds everything it reported."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'  # Chromium reads from 3 and answers on 4
        command = ["bash", "-c", script, "chromium", program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        scratch = {**os.environ, "TMPDIR": str(profile)}  # it leaves small folders behind
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), env=scratch, **quiet)
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._next, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, timeout: float = 60.0, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that arrive meanwhile are kept."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + timeout
        while True:
            answer = self._message(until)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer.get("result", {})
            self.events.append(answer)

    def open(self, page: Path, query: str = "") -> None:
        """Load a file and wait until it stands."""
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri() + query)
        until = time.monotonic() + 60
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._message(until))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """Appearance the system asks for, and screen or print."""
        self.call(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> None:
        more: dict[str, Any] = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Console errors and warnings, exceptions and log entries."""
        told = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                told.append(str(params["exceptionDetails"]))
            if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                told.append(str(params["args"]))
            if event.get("method") == "Log.entryAdded":
                told.append(str(params["entry"]))
        return told

    def requests(self) -> list[str]:
        """Addresses that the page asked for, other than itself and data inside it."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked[1:] if not url.startswith(("data:", "blob:"))]

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer in time")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has gone")
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)
