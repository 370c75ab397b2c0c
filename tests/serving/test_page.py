"""The page in a real browser: by keyboard alone, in light and dark, and with hostile text in the catalogue."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.chromium import Chromium, browser_path
from tests.serving.served import Served, shared_server

pytestmark = pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def served(trained_run: Path) -> Served:
    return shared_server(trained_run)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    found = Chromium()
    yield found
    found.close()


def ids(browser: Chromium) -> list[str]:
    found: list[str] = browser.value("[...document.querySelectorAll('#answers .id')].map((one) => one.textContent)")
    return found


def focused(browser: Chromium) -> str:
    return str(browser.value("document.activeElement.id || document.activeElement.textContent"))


def test_a_history_is_typed_and_answered_by_keyboard_alone(served: Served, browser: Chromium) -> None:
    browser.problems.clear()
    browser.open(served.url)
    browser.until("!document.getElementById('examples').hidden")
    assert "items, index exact" in browser.value("document.getElementById('who').textContent")
    browser.press("Tab")
    assert focused(browser) == "history"
    browser.type("17\n4\n987654321")
    browser.press("Enter", control=True)
    browser.until("document.querySelectorAll('#answers li').length === 10")
    expected = served.recommend([{"item_id": 17}, {"item_id": 4}]).body["items"]
    assert ids(browser) == [str(one["item_id"]) for one in expected]
    assert "Unknown, and left out: 987654321" in browser.value("document.getElementById('status').textContent")
    order = []
    for _ in range(30):
        browser.press("Tab")
        order.append(focused(browser))
        if order[-1] == "Recommend":
            break
    assert order[0] == "0"  # the first example
    assert [name for name in order if name in ("k", "seen", "Recommend")] == ["k", "seen", "Recommend"]
    browser.press("Tab")
    assert focused(browser) == "Add"
    browser.press("Enter")
    browser.until(f"document.getElementById('history').value.endsWith('\\n{expected[0]['item_id']}')")
    assert browser.problems == []


def test_examples_and_options_are_used(served: Served, browser: Chromium) -> None:
    browser.open(served.url)
    browser.until("!document.getElementById('examples').hidden")
    browser.value("document.querySelector('#picks button').focus()")
    browser.press(" ")
    assert browser.value("document.getElementById('history').value") == "0"
    browser.value("document.getElementById('k').value = 3; document.getElementById('seen').focus()")
    browser.press(" ")
    browser.press("Tab")
    browser.press("Enter")
    browser.until("document.querySelectorAll('#answers li').length === 3")
    expected = served.recommend([{"item_id": 0}], k=3, exclude_seen=True).body["items"]
    assert ids(browser) == [str(one["item_id"]) for one in expected]


def test_script_text_in_items_is_shown_as_text(served: Served, browser: Chromium) -> None:
    text = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    assert served.ask("PUT", "/v1/items/7200", {"fields": {"title": text}}).status == 200
    try:
        browser.problems.clear()
        browser.open(served.url)
        browser.value("document.getElementById('history').value = '7200'")
        answers = served.recommend([{"item_id": 7200}], k=1_000).body["items"]
        rank = [one["item_id"] for one in answers].index(7200) + 1
        browser.value(f"document.getElementById('k').value = {rank}; document.getElementById('history').focus()")
        browser.press("Enter", control=True)
        browser.until(f"document.querySelectorAll('#answers li').length === {rank}")
        shown = browser.value("document.querySelector('#answers li:last-child .fields').textContent")
        assert shown == f"title: {text}"
        assert browser.value("document.querySelectorAll('#answers img, #answers script').length") == 0
        assert browser.value("window.hacked === undefined")
        assert browser.problems == []
    finally:
        assert served.ask("DELETE", "/v1/items/7200").status == 200


def test_errors_are_told_in_words_and_as_text(served: Served, browser: Chromium) -> None:
    browser.open(served.url)
    for typed, words in (("<b>bold</b>", "<b>bold</b>"), ('{"item_id": 1', "not a JSON object"), ("", "empty")):
        browser.value(f"document.getElementById('history').value = {typed!r}")
        browser.value("document.getElementById('status').textContent = ''; document.getElementById('history').focus()")
        browser.press("Enter", control=True)
        browser.until("document.getElementById('status').className === 'bad'")
        browser.until(f"document.getElementById('status').textContent.includes({words!r})")
        assert browser.value("document.querySelectorAll('#status b').length") == 0


def test_the_policy_lets_nothing_else_run(served: Served, browser: Chromium) -> None:
    policy = served.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    browser.open(served.url)
    attempts = {
        "inline": "(() => { const made = document.createElement('script'); made.text = 'window.hacked = 1';"
        "document.body.append(made); })()",
        "html": "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>')",
        "elsewhere": "fetch('https://example.org/')",
    }
    for expression in attempts.values():
        browser.call("Runtime.evaluate", expression=expression, awaitPromise=True, allowUnsafeEvalBlockedByCSP=False)
    assert browser.value("window.hacked === undefined")
    refused = browser.call("Runtime.evaluate", expression=attempts["elsewhere"], awaitPromise=True)
    assert "exceptionDetails" in refused


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark_and_on_a_phone(served: Served, browser: Chromium, scheme: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    try:
        browser.open(served.url)
        browser.value("document.getElementById('history').value = '1'; document.getElementById('history').focus()")
        browser.press("Enter", control=True)
        browser.until("document.querySelectorAll('#answers li').length === 10")
        assert browser.value("document.documentElement.scrollWidth") <= 360
        for selector in (
            "h1",
            "#who",
            "#hint",
            "#history",
            "#answers .id",
            "#answers button",
            "button.main",
            "#status",
        ):
            assert contrast(browser, selector) >= 4.5, selector
        background = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (brightness(numbers(background)) > 0.5) == (scheme == "light")
        if pictures := os.environ.get("HABITUS_PICTURES"):
            browser.picture(Path(pictures) / f"page-{scheme}-phone.png")
            browser.call("Emulation.clearDeviceMetricsOverride")
            browser.picture(Path(pictures) / f"page-{scheme}.png")
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
        browser.call("Emulation.setEmulatedMedia", features=[])


@pytest.mark.slow
def test_the_token_is_asked_for_where_there_is_one(run: Path, tmp_path: Path, browser: Chromium) -> None:
    server = Served(run, logs=tmp_path, environment={"HABITUS_TOKEN": "a-token-of-the-page"})
    try:
        browser.open(server.url)
        browser.until("!document.getElementById('secret').hidden")
        browser.value("document.getElementById('token').focus()")
        browser.type("a-token-of-the-page")
        browser.press("Tab")
        browser.until("!document.getElementById('examples').hidden")
        browser.value("document.getElementById('history').value = '1'; document.getElementById('history').focus()")
        browser.press("Enter", control=True)
        browser.until("document.querySelectorAll('#answers li').length === 10")
        assert browser.value("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    finally:
        server.kill()


def contrast(browser: Chromium, selector: str) -> float:
    """WCAG's ratio between an element's text and the first opaque background behind it."""
    found: list[str] = browser.value(
        f"(() => {{ let at = document.querySelector({selector!r}); const ink = getComputedStyle(at).color;"
        "while (at && getComputedStyle(at).backgroundColor === 'rgba(0, 0, 0, 0)') at = at.parentElement;"
        "return [ink, getComputedStyle(at).backgroundColor]; })()"
    )
    light, dark = sorted((brightness(numbers(colour)) for colour in found), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def numbers(colour: str) -> list[float]:
    return [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]


def brightness(channels: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    weights: Any = (0.2126, 0.7152, 0.0722)
    return float(sum(weight * value for weight, value in zip(weights, linear, strict=True)))
