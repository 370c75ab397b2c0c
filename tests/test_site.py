"""The site of `make docs`: built strictly, whole, without anything from elsewhere, on a desktop and on a phone."""

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

from tests.browser import launch_chromium, open_tab

ROOT = Path(__file__).parents[1]
PAGES = ("index.html", "concepts.html", "api.html", "guides/log-to-model.html", "train.html", "decisions/index.html")


def hooks() -> ModuleType:
    """docs/site.py."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_of_decisions_is_that_of_the_notes() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    assert index == hooks().decisions_index(), "docs/decisions/README.md is old: run .venv/bin/python docs/site.py"


def test_superseded_decisions_are_marked() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in index.splitlines() if line.startswith("- [0089]")]
    assert "~~" in line and "superseded by [0109](0109-" in line


def test_links_out_of_docs_point_into_the_site_or_are_named() -> None:
    rewrite = hooks().rewrite_links
    text = "[a](../../benchmarks/results/world.json) [b](../../tests/test_docs.py) [c](../train.md#x) ![d](../../e.png)"
    assert rewrite(text, "guides/page.md") == (
        "[a](../files/benchmarks/results/world.json) b [c](../train.md#x) ![d](../../e.png)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning fails the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served on this machine."""
    handler = functools.partial(_QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_every_link_and_picture_of_the_site_is_there_and_none_is_elsewhere(site: Path) -> None:
    checked = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html" or (page.parent.name == "h200-standard" and page.name == "report.html"):
            continue
        for found in re.findall(r'(?:href|src)="?([^"\s>]+)', page.read_text(encoding="utf-8")):
            target, _, _ = unquote(unescape(found)).partition("#")
            if not target or target.startswith("data:"):
                continue
            assert "://" not in target, f"{page.name}: {target}"
            assert (page.parent / target.partition("?")[0]).exists(), f"{page.relative_to(site)}: {target}"
            checked += 1
    assert checked > 1000


@pytest.mark.slow
def test_pages_fit_a_desktop_and_a_phone(site: Path, address: str) -> None:
    with launch_chromium() as browser:
        for width, scheme in ((1280, "light"), (390, "dark")):
            with open_tab(browser, width=width, color_scheme=scheme) as tab:
                for name in PAGES:
                    tab.page.goto(f"{address}/{name}")
                    assert tab.page.locator("h1").is_visible(), name
                    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                    assert tab.page.evaluate(overflow) <= 0, f"{name} at {width}"
                    broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
                    assert tab.page.evaluate(broken) == [], name
                assert tab.errors == []
                assert tab.hosts() == {"127.0.0.1"}


@pytest.mark.slow
def test_the_api_names_every_verb(site: Path) -> None:
    import habitus as hb

    page = (site / "api.html").read_text(encoding="utf-8")
    for name in hb.__all__:
        assert re.search(rf'id="habitus\.[a-z.]*{name}"', page), name
