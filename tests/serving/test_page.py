"""The page in a real browser: by keyboard alone, in light and dark, and with hostile text in the catalogue."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Tab, launch_chromium, open_tab, sync_api
from tests.serving.served import Served, shared_server

expect = sync_api.expect


@pytest.fixture(scope="module")
def served(trained_run: Path) -> Served:
    return shared_server(trained_run)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_chromium() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Tab]:
    """The server's page, once it has shown its examples."""
    with open_tab(browser, 1100, 800) as opened:
        opened.page.goto(served.url)
        expect(opened.page.locator("#examples")).to_be_visible()
        yield opened
        assert opened.hosts() == {served.host}


def item_ids(tab: Tab) -> list[str]:
    ids: list[str] = tab.page.locator("#answers .id").all_text_contents()
    return ids


def name_focused(tab: Tab) -> str:
    return str(tab.page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def submit(tab: Tab, history: str) -> None:
    """Type a history over what is there, and ask by keyboard."""
    tab.page.fill("#history", history)
    tab.page.press("#history", "Control+Enter")


def expect_answers(tab: Tab, count: int = 10) -> None:
    expect(tab.page.locator("#answers li")).to_have_count(count)


def test_a_history_is_typed_and_answered_by_keyboard_alone(tab: Tab, served: Served) -> None:
    keyboard = tab.page.keyboard
    assert "items, index exact" in tab.page.text_content("#who")
    keyboard.press("Tab")
    assert name_focused(tab) == "history"
    keyboard.insert_text("17\n4\n987654321")
    keyboard.press("Control+Enter")
    expect_answers(tab)
    expected = served.recommend([{"item_id": 17}, {"item_id": 4}]).body["items"]
    assert item_ids(tab) == [str(one["item_id"]) for one in expected]
    assert "Unknown, and left out: 987654321" in tab.page.text_content("#status")
    order = []
    for _ in range(30):
        keyboard.press("Tab")
        order.append(name_focused(tab))
        if order[-1] == "Recommend":
            break
    assert order[0] == "0"  # the first example
    assert [name for name in order if name in ("k", "seen", "Recommend")] == ["k", "seen", "Recommend"]
    keyboard.press("Tab")
    assert name_focused(tab) == "Add"
    keyboard.press("Enter")
    expect(tab.page.locator("#history")).to_have_value(f"17\n4\n987654321\n{expected[0]['item_id']}")
    assert tab.errors == []


def test_examples_and_options_are_used(tab: Tab, served: Served) -> None:
    tab.page.press("#picks button >> nth=0", " ")
    assert tab.page.input_value("#history") == "0"
    tab.page.fill("#k", "3")
    tab.page.press("#seen", " ")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    expect_answers(tab, 3)
    expected = served.recommend([{"item_id": 0}], k=3, exclude_seen=True).body["items"]
    assert item_ids(tab) == [str(one["item_id"]) for one in expected]


def test_script_text_in_items_is_shown_as_text(tab: Tab, served: Served) -> None:
    text = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    assert served.ask("PUT", "/v1/items/7200", {"fields": {"title": text}}).status == 200
    try:
        answers = served.recommend([{"item_id": 7200}], k=1_000).body["items"]
        rank = [one["item_id"] for one in answers].index(7200) + 1
        tab.page.fill("#k", str(rank))
        submit(tab, "7200")
        expect_answers(tab, rank)
        assert tab.page.text_content("#answers li:last-child .fields") == f"title: {text}"
        assert tab.page.locator("#answers img, #answers script").count() == 0
        assert tab.page.evaluate("window.hacked === undefined")
        assert tab.errors == []
    finally:
        assert served.ask("DELETE", "/v1/items/7200").status == 200


def test_errors_are_shown_in_words_and_as_text(tab: Tab) -> None:
    status = tab.page.locator("#status")
    for history, message in (("<b>bold</b>", "<b>bold</b>"), ('{"item_id": 1', "not a JSON object"), ("", "empty")):
        status.evaluate("e => { e.textContent = ''; }")
        submit(tab, history)
        expect(status).to_have_class("bad")
        expect(status).to_contain_text(message)
        assert status.locator("b").count() == 0


def test_the_policy_lets_nothing_else_run(tab: Tab, served: Served) -> None:
    policy = served.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    attempts = {
        "TrustedScript": "document.body.append(Object.assign(document.createElement('script'), {text: 'hacked = 1'}))",
        "TrustedHTML": "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>')",
        "Failed to fetch": "fetch('https://example.org/')",
    }
    for refusal, expression in attempts.items():
        with pytest.raises(sync_api.Error, match=refusal):
            tab.page.evaluate(expression)
    assert tab.page.evaluate("window.hacked === undefined")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark_and_on_a_phone(browser: Any, served: Served, scheme: str) -> None:
    with open_tab(browser, 360, 740, color_scheme=scheme) as tab:
        tab.page.goto(served.url)
        submit(tab, "1")
        expect_answers(tab)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
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
            assert contrast(tab, selector) >= 4.5, selector
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (brightness(numbers(background)) > 0.5) == (scheme == "light")
        if pictures := os.environ.get("HABITUS_PICTURES"):
            tab.page.screenshot(path=Path(pictures) / f"page-{scheme}-phone.png")
            tab.page.set_viewport_size({"width": 1100, "height": 800})
            tab.page.screenshot(path=Path(pictures) / f"page-{scheme}.png")


@pytest.mark.slow
def test_the_token_is_asked_for_where_there_is_one(run: Path, tmp_path: Path, browser: Any) -> None:
    server = Served(run, logs=tmp_path, environment={"HABITUS_TOKEN": "a-token-of-the-page"})
    try:
        with open_tab(browser, 1100, 800) as tab:
            tab.page.goto(server.url)
            expect(tab.page.locator("#secret")).to_be_visible()
            tab.page.focus("#token")
            tab.page.keyboard.insert_text("a-token-of-the-page")
            tab.page.keyboard.press("Tab")
            expect(tab.page.locator("#examples")).to_be_visible()
            submit(tab, "1")
            expect_answers(tab)
            assert tab.page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    finally:
        server.kill()


def contrast(tab: Tab, selector: str) -> float:
    """WCAG's ratio between an element's text and the first opaque background behind it."""
    colours: list[str] = tab.page.evaluate(
        f"(() => {{ let at = document.querySelector({selector!r}); const ink = getComputedStyle(at).color;"
        "while (at && getComputedStyle(at).backgroundColor === 'rgba(0, 0, 0, 0)') at = at.parentElement;"
        "return [ink, getComputedStyle(at).backgroundColor]; })()"
    )
    light, dark = sorted((brightness(numbers(colour)) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def numbers(colour: str) -> list[float]:
    return [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]


def brightness(channels: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    weights: Any = (0.2126, 0.7152, 0.0722)
    return float(sum(weight * value for weight, value in zip(weights, linear, strict=True)))
