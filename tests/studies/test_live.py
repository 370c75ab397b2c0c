"""A study while it runs: what it reports, what a terminal and a file show of it, and the page that is served."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from habitus.cli import app
from habitus.cli.study_screen import StudyScreen
from habitus.display import sparkline
from habitus.errors import ConfigError
from habitus.reporting import report
from habitus.studies import AxisProgress, StudyProgress
from habitus.studies.live_server import LiveServer, open_port, watch_store
from habitus.studies.progress import PROGRESS_FILE, StudyMonitor
from habitus.studies.watch import Watcher
from habitus.sweeps import SweepProgress

from .live_store import HOSTILE, WORKER, LiveStore

MICRO = Path(__file__).parent / "micro.toml"
NOW = StudyProgress(
    axis="allocation",
    number=4,
    axes=6,
    done=3,
    total=12,
    failed=1,
    best="catalogue/recall@10 0.31 (popularity 0.12)",
    seconds_left=90.0,
    metric="catalogue/recall@10",
    baseline=0.12,
    per_axis=(
        AxisProgress(axis="share", done=2, total=2),
        AxisProgress(axis="allocation", done=3, total=12, failed=1),
        AxisProgress(axis="negatives", done=0, total=3),
    ),
    curve=(0.1, 0.2, 0.2, 0.31),
    at=1000.0,
    first_at=940.0,
    first_left=120.0,
)


@pytest.fixture
def store(tmp_path: Path) -> LiveStore:
    return LiveStore(tmp_path / "study" / "store")


@pytest.fixture
def served(store: LiveStore) -> Iterator[tuple[LiveStore, LiveServer, str]]:
    """The store behind a server in a thread, and its address."""
    for number in range(3):
        store.end(number)
    store.end(3, f"out of memory {HOSTILE}")
    store.start(4)
    server = LiveServer(store.path, open_port(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield store, server, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 1.0, 7.0]) == "▁▂█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline(list(range(100)), width=8) == "▁▂▃▄▅▆▇█"


def test_a_terminal_shows_a_bar_per_axis_and_the_best_as_a_sparkline() -> None:
    file = io.StringIO()
    with StudyScreen(console=Console(file=file, force_terminal=True, width=100, height=30)) as screen:
        screen.note("axis [bold]share[/bold]")
        screen.progress(NOW)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    assert "axis [bold]share[/bold]" in lines  # as it is, not as markup
    assert any(re.fullmatch(r"share\s+━{24} 2 of 2", line) for line in lines)
    assert any(re.fullmatch(r"allocation [━╸╺ ]{24} 3 of 12 1 failed", line) for line in lines)
    assert "best catalogue/recall@10 0.31 (popularity 0.12) ▁▄▄█" in lines
    assert "90 s left; first said 2 min for all, by now 2.5 min (+25%)" in lines  # 60 s gone and 90 left of 120


def test_without_a_terminal_there_are_plain_lines() -> None:
    file = io.StringIO()
    with StudyScreen(console=Console(file=file, width=200)) as screen:
        screen.note("note")
        screen.progress(NOW)
        screen.progress(NOW)  # nothing new within half a minute
        screen.progress(NOW.model_copy(update={"axis": "negatives", "number": 5}))
    assert file.getvalue().splitlines() == [
        "note",
        "allocation (4 of 5): 3 of 12 runs, 1 failed, best catalogue/recall@10 0.31 (popularity 0.12), 90 s left",
        "negatives (5 of 5): 3 of 12 runs, 1 failed, best catalogue/recall@10 0.31 (popularity 0.12), 90 s left",
    ]
    silent = io.StringIO()
    with StudyScreen(quiet=True, console=Console(file=silent, force_terminal=True)) as screen:
        screen.note("note")
        screen.progress(NOW)
    assert silent.getvalue() == ""


def test_rounds_of_one_name_are_added_up_and_what_came_before_has_ended(store: LiveStore) -> None:
    file = store.path.parent / PROGRESS_FILE
    monitor = StudyMonitor(store.path, "batch/loss", None, None, file)
    probes, search = monitor.sweep_progress(0, 2), monitor.sweep_progress(1, 2, lambda: 50.0)
    probes(SweepProgress("probes", 2, 0, 3, 1, 9.0))
    store.end(0)
    for axis, done, total in (("start", 1, 2), ("explore", 3, 4), ("explore", 1, 4), ("explore", 2, 4)):
        search(SweepProgress(axis, done, 0, total, 1, 9.0))
    now = StudyProgress.read(file)
    assert [(one.axis, one.done, one.total) for one in now.per_axis] == [
        ("probes", 3, 3),
        ("start", 2, 2),
        ("explore", 5, 8),
    ]
    assert now.seconds_left == 50.0 and now.axis == "explore"
    monitor.close()
    assert not file.exists()


def test_the_panel_says_what_the_files_say(store: LiveStore) -> None:
    watcher = Watcher(store.path)
    before = sorted(store.path.rglob("*"))
    live = watcher.look()
    assert live.state == "running" and [(one.name, one.done, one.total) for one in live.axes] == [("share", 0, 6)]
    [run] = live.runs
    assert run.title.startswith("share s0, 10,000 parameters") and run.worker == WORKER
    assert (run.step, run.steps, run.loss) == (40, 100, pytest.approx(6.11))  # the half-written line is not read
    assert live.logs[0].lines[-1].endswith("claimed share s0")
    store.end(0)
    store.end(1, "out of memory")
    live = watcher.look()
    assert live.state == "idle" and live.failures == (("out of memory", 1),)
    assert (live.axes[0].done, live.axes[0].failed) == (2, 1)
    assert dict(live.facts)["Time left"].startswith("48 s")  # four of 100 steps at 12 s each
    assert re.fullmatch(r"\d+\.\d of \d+", dict(live.facts)["Cores busy"])
    NOW.model_copy(update={"at": time.time()}).write(store.path.parent / PROGRESS_FILE)
    live = watcher.look()
    assert live.state == "running" and live.doing == "allocation (4 of 5)" and live.curve == NOW.curve
    store.end(2)
    assert {path.name for path in store.path.rglob("*.clock")} == set() and len(before) > 0


def test_the_page_and_its_panel_are_served_to_this_machine_only(served: Any) -> None:
    _, _, address = served
    page = wait_for(address, "<article")
    assert "4 of 6 runs" in page  # those with a Record, of those planned
    assert 'id="share"' in page and "connect-src &#39;self&#39;" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    panel = fetch(f"{address}panel")
    assert panel.startswith('<section id="live"') and "3 of 6" in panel.replace("4 of 6", "3 of 6")
    assert HOSTILE not in panel and "&lt;script&gt;" in panel
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"{address}study.json")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetch(address, {"Host": "evil.example"})


def test_a_port_in_use_is_one_clear_error(tmp_path: Path, store: LiveStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"(?s)127.0.0.1:{port} cannot be used: Address already in use.*--watch"):
            open_port(port)
        result = CliRunner().invoke(app, ["study", "--out", str(tmp_path / "out"), f"--watch={port}"])
        assert isinstance(result.exception, ConfigError) and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="a port from 1 to 65535"):
        open_port(70_000)
    with pytest.raises(ConfigError, match=r"holds no store\.json"):
        watch_store(tmp_path / "nowhere", 0, print)


def test_the_port_may_be_left_out(tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        return str(CliRunner().invoke(app, [*arguments]).exception)

    nowhere = str(tmp_path / "nowhere")
    assert "holds no store.json" in refusal("report", nowhere, "--watch")
    assert "holds no store.json" in refusal("report", "--watch", nowhere)  # what follows is no port
    assert "holds no store.json" in refusal("report", "--watch", "8000", nowhere)
    assert "--watch -1" in refusal("report", str(LiveStore(tmp_path / "store").path), "--watch", "-1")
    assert "--png" in refusal("report", nowhere, "--watch", "--png", "x")
    assert "--watch was given with --out" in refusal("report", nowhere, "--watch", "--out", "x.html")
    assert "followed by 'abc'\nExpected: a port number" in refusal("report", nowhere, "--watch", "abc")
    assert "a dry run runs nothing" in refusal("study", "--out", nowhere, "--watch", "--dry-run")


@pytest.mark.slow
def test_a_browser_follows_the_runs_and_then_the_end(served: Any) -> None:
    from tests.browser import launch_chromium, open_tab

    store, server, address = served
    with launch_chromium() as browser, open_tab(browser, 1280, 900) as tab:
        page = tab.page
        page.goto(address)
        page.wait_for_selector("#share", timeout=20_000)
        dots = "document.querySelector('#share .view:not([hidden]) path[data-r]').dataset.r.split(',').length"
        assert page.evaluate(dots) == 3
        assert page.locator("#live-failures li").text_content() == f"1 × out of memory {HOSTILE}"
        page.select_option("#metric", "catalogue/recall@10")
        page.click("#live-logs summary")
        page.click("#disclosure button.csv")
        page.evaluate("document.querySelector('#words').mine = true")
        page.locator("#share").evaluate("e => e.scrollIntoView({block: 'start', behavior: 'instant'})")
        top = page.evaluate("document.querySelector('#share').getBoundingClientRect().top")
        store.end(4)
        wait_until(page, f"{dots} === 4")
        # What the reader sees stays where it is, as chosen; what did not change is the same element.
        assert page.evaluate("document.querySelector('#share').getBoundingClientRect().top") == pytest.approx(
            top, abs=2
        )
        assert page.input_value("#metric") == "catalogue/recall@10"
        assert page.evaluate("document.querySelector('#words').mine") is True
        assert page.evaluate("document.querySelector('#live-logs details').open") is True
        wait_until(page, "document.querySelector('#live-axes').textContent.includes('5 of 6')")
        page.locator("#share .view:not([hidden]) .panels").evaluate("e => e.focus({preventScroll: true})")
        page.keyboard.press("ArrowRight")
        assert page.locator("#tip").is_visible()  # new figures answer the keyboard, too
        final = report(store.path, store.path.parent / "report.html", title="All of it")
        threading.Thread(target=server.say_farewell, args=(final,), daemon=True).start()
        wait_until(page, "document.querySelector('h1').textContent === 'All of it'")
        assert "The study has ended" in page.text_content("#live-head")
        children = page.evaluate("[...document.querySelector('main').children].map(e => e.id).slice(0, 2)")
        assert children == ["top", "live"]
        assert tab.messages == [] and tab.dialogs == [] and tab.hosts() == {"127.0.0.1"}


@pytest.mark.slow
def test_the_server_ends_with_its_study_however_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "habitus", "study", "--preset", str(MICRO), "--device", "cpu", "--workers", "1"]
    study = subprocess.Popen([*command, "--out", str(tmp_path / "study"), "--watch"], stderr=subprocess.PIPE, text=True)
    assert study.stderr is not None
    address = study.stderr.readline().removeprefix("watch: ").strip()
    wait_for(address, "Running: probes")
    os.kill(study.pid, signal.SIGKILL)
    study.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            fetch(address)
        except OSError:  # refused, or cut off
            return
        time.sleep(0.5)
    raise AssertionError("the page is still served")


def fetch(address: str, headers: dict[str, str] | None = None) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers or {}), timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def wait_until(page: Any, condition: str) -> None:
    """Until an expression holds in the page, whose policy forbids Playwright's own waiting."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(100)


def wait_for(address: str, text: str) -> str:
    """The page once it holds that text."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            page = fetch(address)
        except OSError:
            page = ""
        if text in page:
            return page
        time.sleep(0.2)
    raise AssertionError(f"{address} never showed {text!r}")
