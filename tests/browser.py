"""The system's Chromium for tests of pages, driven by Playwright; nothing is downloaded."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def launch_chromium() -> Iterator[Any]:
    """A headless browser. Skips the test where Chromium is missing or Playwright's driver does not start.

    Keep it open for one module at most: while Playwright runs, `asyncio.run` fails in the same thread.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    manager = sync_api.sync_playwright()
    try:
        playwright = manager.__enter__()
    except Exception as error:  # of whatever type: Playwright raises a bare one when its Node.js exits
        pytest.skip(f"Playwright's driver does not start: {error}")
    try:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield browser
        browser.close()
    finally:
        manager.__exit__(None, None, None)


@dataclass
class Tab:
    """A page in a browser context of its own, and what it reported since it was opened or last cleared."""

    page: Any
    messages: list[str] = field(default_factory=list)  # the console and uncaught exceptions, each 'type: text'
    requests: list[str] = field(default_factory=list)  # URLs, without data: and blob:
    dialogs: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        return [message for message in self.messages if message.startswith(("error:", "exception:"))]

    def hosts(self) -> set[str]:
        """The hosts that requests went to; a file has none."""
        return {host for url in self.requests if (host := urlsplit(url).hostname)}

    def clear(self) -> None:
        for reports in (self.messages, self.requests, self.dialogs):
            reports.clear()


@contextmanager
def open_tab(browser: Any, width: int = 1280, height: int = 900, **options: Any) -> Iterator[Tab]:
    """An empty tab of that size; below 500 pixels it is a phone's. `options` are those of Playwright's contexts."""
    viewport = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, is_mobile=width < 500, **options)
    tab = Tab(context.new_page())
    tab.page.on("console", lambda message: tab.messages.append(f"{message.type}: {message.text}"))
    tab.page.on("pageerror", lambda error: tab.messages.append(f"exception: {error}"))
    tab.page.on("request", lambda request: _note_request(tab, request.url))
    tab.page.on("dialog", lambda dialog: (tab.dialogs.append(dialog.message), dialog.dismiss()))
    yield tab
    context.close()


def _note_request(tab: Tab, url: str) -> None:
    if not url.startswith(("data:", "blob:")):
        tab.requests.append(url)
