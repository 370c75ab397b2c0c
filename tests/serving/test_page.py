"""The page in a real browser: by keyboard alone, in light and dark, and with hostile text in the catalogue."""

import base64
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from habitus.data import Dataset
from tests.browser import Tab, launch_chromium, open_tab, sync_api
from tests.serving.conftest import MARKUP, Log
from tests.serving.served import Served, shared_server

expect = sync_api.expect
ELSEWHERE = re.compile("^https:")
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def served(trained_run: Path) -> Served:
    return shared_server(trained_run)


@pytest.fixture(scope="module")
def named(named_run: Path, named_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Items with names and pictures, and validation users, of a model that copies."""
    folder = tmp_path_factory.mktemp("page")
    options = ["--data", str(named_dataset.path), "--show-users", "--images", "https://pictures.test"]
    server = Served(Path(shutil.copytree(named_run, folder / "run")), *options, logs=folder)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_chromium() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Tab]:
    """The page of a run without names, once it has shown its examples."""
    with open_tab(browser, 1100, 800) as opened:
        opened.page.goto(served.url)
        expect(opened.page.locator("#examples")).to_be_visible()
        yield opened
        assert opened.hosts() == {served.host}


@pytest.fixture
def named_tab(browser: Any, named: Served) -> Iterator[Tab]:
    """The page of a run with names; what it asks of other machines is answered here, and noted."""
    with open_tab(browser, 1100, 900) as opened:
        opened.page.route(ELSEWHERE, lambda route: route.fulfill(body=PIXEL, content_type="image/png"))
        opened.page.goto(named.url)
        expect(opened.page.locator("#examples")).to_be_visible()
        yield opened
        assert opened.hosts() <= {named.host, "pictures.test"}
        assert opened.errors == []


def names(tab: Tab, where: str = "#answers") -> list[str]:
    texts: list[str] = tab.page.locator(f"{where} .name").all_text_contents()
    return texts


def focused(tab: Tab) -> str:
    return str(tab.page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def ask_in_lines(tab: Tab, history: str) -> None:
    """Type a history as text over what is there, and ask by keyboard."""
    if tab.page.get_attribute("#raw", "open") is None:
        tab.page.click("#raw summary")
    tab.page.fill("#lines", history)
    tab.page.press("#lines", "Control+Enter")


def expect_answers(tab: Tab, count: int = 10) -> None:
    expect(tab.page.locator("#answers li")).to_have_count(count)


def test_a_history_is_composed_by_keyboard_alone(named_tab: Tab, named: Served) -> None:
    tab, keyboard = named_tab, named_tab.page.keyboard
    assert "300 items, index exact" in tab.page.text_content("#who")
    keyboard.press("/")
    assert focused(tab) == "search"
    keyboard.type("thing 17")
    options = tab.page.locator("#search-found [role=option]")
    expect(options.first).to_contain_text("17")
    expect(tab.page.locator("#search")).to_have_attribute("aria-activedescendant", "search-found-0")
    keyboard.press("ArrowDown")
    expect(tab.page.locator("#search")).to_have_attribute("aria-activedescendant", "search-found-1")
    chosen = options.nth(1).locator(".name").text_content()
    keyboard.press("Enter")
    expect_answers(tab)
    assert names(tab, "#history") == [chosen]
    assert focused(tab) == "search"
    item_id = named.ask("GET", "/v1/search?q=thing%2017&k=2").body["items"][1]["item_id"]
    answer = named.recommend([{"item_id": item_id}]).body
    assert names(tab) == [item["display"]["name"] for item in answer["items"]]
    expect(tab.page.locator("#legend")).to_contain_text("copied from this history")
    tab.page.focus("#answers button >> nth=0")
    keyboard.press("Enter")  # adds the first answer
    expect(tab.page.locator("#history li")).to_have_count(2)
    expect(tab.page.locator("#status")).to_contain_text("after 2 events")
    assert names(tab, "#history")[1] == answer["items"][0]["display"]["name"]
    assert focused(tab) == "Add"  # the button that stands in the same place now
    tab.page.focus("#history button >> nth=0")
    keyboard.press("Enter")
    expect(tab.page.locator("#history li")).to_have_count(1)
    keyboard.press("Escape")
    tab.page.press("#clear", "Enter")
    expect_answers(tab, 0)
    expect(tab.page.locator("#examples")).to_be_visible()
    assert focused(tab) == "search"


def test_similar_items_and_one_that_does_not_exist(named_tab: Tab, named: Served) -> None:
    page = named_tab.page
    page.click("#picks button >> nth=0")
    expect_answers(named_tab)
    page.click("#answers button:text-is('Similar') >> nth=0")
    expect(page.locator("#neighbours li")).to_have_count(8)
    assert page.text_content("#resembling") == f"Similar to {names(named_tab)[0]}"
    page.click("#invent summary")
    page.fill("#new-title", "walnut desk")
    page.fill("#new-name", "Walnut Desk")
    page.press("#new-name", "Enter")
    first = named.ask("GET", "/v1/search?k=1").body["items"][0]["item_id"]
    body = {"history": [{"item_id": first}], "items": [{"title": "walnut desk", "name": "Walnut Desk"}]}
    ranked = named.ask("POST", "/v1/rank", body).body["ranked"][0]
    expect(page.locator("#new-rank")).to_contain_text(f"rank {ranked['rank']} of 301")
    page.click("#new-rank button")
    expect(page.locator("#resembling")).to_have_text("Similar to Walnut Desk")
    page.fill("#k", "100")
    page.press("#k", "Enter")
    expect_answers(named_tab, 100 + (ranked["rank"] <= 100))
    page.fill("#new-price", "a lot")
    page.press("#new-price", "Enter")
    expect(page.locator("#new-rank")).to_have_class("bad")
    expect(page.locator("#new-rank")).to_contain_text("price")
    expect(page.locator("#status")).to_contain_text("100 items after 1 event")
    expect_answers(named_tab, 100)
    named_tab.clear()  # the browser reports the refusal itself
    page.click("#answers button >> nth=0")
    expect(page.locator("#status")).to_contain_text("after 2 events")
    expect(page.locator("#new-rank")).to_be_empty()
    page.click("#somebody button >> nth=0")
    expect(page.locator("#came .badge")).to_be_visible()
    page.press("#new-price", "Enter")
    expect(page.locator("#new-rank")).to_have_class("bad")
    expect(page.locator("#came .badge")).to_contain_text("rank")  # what came is ranked without it
    named_tab.clear()


def test_a_validation_user_is_followed_event_by_event(named_tab: Tab, named: Served, log: Log) -> None:
    page = named_tab.page
    page.fill("#user", "12")
    expect(page.locator("#user-found [role=option]").first).to_have_text("12")
    page.click("#user-found [role=option] >> nth=0")
    events = log[12]
    expect(page.locator("#cut-label")).to_have_text(f"The model has seen {len(events) - 2} of {len(events) - 1} events")
    again = " again" if events[-2]["item_id"] in {event["item_id"] for event in events[:-2]} else ""
    expect(page.locator("#came")).to_contain_text(f"What came{again}: rank")
    expect(page.locator("#came .more").last).to_contain_text(events[-2]["event_type"])
    shown = page.locator("#history li").last.locator(".more").last
    expect(shown).to_contain_text(str(events[-3]["timestamp"])[:16])
    expect(shown).to_contain_text(events[-3]["event_type"])
    history = [{**event, "timestamp": event["timestamp"].isoformat()} for event in events[:-2]]
    ranked = named.ask("POST", "/v1/rank", {"history": history, "item_ids": [events[-2]["item_id"]]}).body["ranked"][0]
    expect(page.locator("#came .badge")).to_contain_text(f"rank {ranked['rank']} of 300")
    page.click("#back")
    expect(page.locator("#cut-label")).to_contain_text(f"has seen {len(events) - 3} of")
    expect(page.locator("#came .more").last).to_contain_text(events[-3]["event_type"])
    expect(page.locator("#history li")).to_have_count(len(events) - 3)
    page.click("#answers button >> nth=0")  # another history than the user's from here on
    expect(page.locator("#came")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text(f"after {len(events) - 2} events")


def test_times_of_every_unit_are_dates_and_tiny_shares_have_no_exponent(tab: Tab) -> None:
    for unit, time, text in (
        ("s", 978300760, "2000-12-31 22:12:40"),
        ("s", "978300720.5", "2000-12-31 22:12"),
        ("ms", 978300760123, "2000-12-31 22:12:40"),
        ("us", 978300760123456, "2000-12-31 22:12:40"),
        ("s", -1, "1969-12-31 23:59:59"),
        ("s", "soon", "soon"),
        ("datetime", "2024-05-01T10:00:00", "2024-05-01 10:00"),
        ("order", 978300760, "978300760"),
    ):
        shown = "([unit, at]) => { schema = { ...schema, event_fields: { at: unit } }; return eventText({ at }); }"
        assert tab.page.evaluate(shown, [unit, time]) == text, (unit, time)
    shares = tab.page.evaluate("[0, 1e-9, 1e-5, 0.0123, 0.5].map(percent)")
    assert shares == ["0.0 %", "< 0.001 %", "0.0010 %", "1.2 %", "50.0 %"]


def test_names_are_shown_as_text_and_cut(named_tab: Tab) -> None:
    page = named_tab.page
    page.fill("#search", "onerror")
    expect(page.locator("#search-found .name")).to_have_text(MARKUP)
    page.press("#search", "Enter")
    page.fill("#search", "endless")
    page.press("#search", "Enter")  # before anything was found
    expect(page.locator("#history .name")).to_have_count(2)
    assert names(named_tab, "#history")[0] == MARKUP
    assert len(names(named_tab, "#history")[1]) == 1_000
    assert page.locator("#history li").nth(1).bounding_box()["height"] < 120
    assert page.locator("#history img[src^=x], main script").count() == 0
    assert page.evaluate("window.hacked === undefined")


def test_pictures_come_from_allowed_origins_alone(named_tab: Tab, named: Served, browser: Any) -> None:
    page = named_tab.page
    page.fill("#search", "thing 7")
    expect(page.locator("#search-found .name").first).to_be_visible()
    assert "img-src data: https://pictures.test;" in named.ask("GET", "/").headers["content-security-policy"]
    addresses = page.locator("main img").evaluate_all("images => images.map(image => image.src)")
    assert addresses
    assert all(address.startswith("https://pictures.test/") for address in addresses)  # item 7's is from elsewhere
    assert "pictures.test" not in page.text_content("main")


@pytest.mark.slow
def test_without_permission_no_picture_is_asked_for(named_run: Path, tmp_path: Path, browser: Any) -> None:
    server = Served(Path(shutil.copytree(named_run, tmp_path / "run")), logs=tmp_path)
    try:
        with open_tab(browser, 1100, 800) as tab:
            reached: list[str] = []
            tab.page.route(ELSEWHERE, lambda route: (reached.append(route.request.url), route.abort()))
            tab.page.goto(server.url)
            tab.page.click("#picks button >> nth=0")
            expect_answers(tab)
            assert tab.page.locator("main img").count() == 0
            assert tab.hosts() == {server.host}
            assert tab.page.locator("#people").is_hidden()
            assert server.ask("GET", "/v1/users").status == 403
            tab.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://pictures.test/1.png'}))")
            tab.page.wait_for_function("document.querySelector('body > img').complete")
            assert reached == []  # the policy refuses what the page would not ask for
    finally:
        server.kill()


def test_a_run_without_names_shows_ids_and_categories(tab: Tab, served: Served) -> None:
    ask_in_lines(tab, "17\n4\n987654321")
    expect_answers(tab)
    expected = served.recommend([{"item_id": 17}, {"item_id": 4}]).body["items"]
    assert names(tab) == [str(one["item_id"]) for one in expected]
    assert "Unknown, and left out: 987654321" in tab.page.text_content("#status")
    assert "brand" in tab.page.text_content("#answers .more >> nth=0")
    expect(tab.page.locator("#legend")).to_be_hidden()  # this model does not copy
    tab.page.fill("#k", "3")
    tab.page.press("#seen", " ")
    expect_answers(tab, 3)
    expected = served.recommend([{"item_id": 17}, {"item_id": 4}], k=3, exclude_seen=True).body["items"]
    assert names(tab) == [str(one["item_id"]) for one in expected]
    assert tab.errors == []


def test_errors_are_shown_in_words_and_as_text(tab: Tab) -> None:
    status = tab.page.locator("#status")
    for history, message in (("<b>bold</b>", "<b>bold</b>"), ('{"item_id": 1', "not a JSON object"), ("", "empty")):
        status.evaluate("e => { e.textContent = ''; }")
        ask_in_lines(tab, history)
        expect(status).to_have_class("bad")
        expect(status).to_contain_text(message)
        assert status.locator("b").count() == 0


def test_the_policy_lets_nothing_else_run(tab: Tab, served: Served) -> None:
    policy = served.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "img-src data:;" in policy
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
def test_it_is_readable_in_light_and_dark_and_on_a_phone(browser: Any, named: Served, scheme: str) -> None:
    with open_tab(browser, 360, 740, color_scheme=scheme) as tab:
        tab.page.route(ELSEWHERE, lambda route: route.fulfill(body=PIXEL, content_type="image/png"))
        tab.page.goto(named.url)
        tab.page.click("#somebody button >> nth=0")
        expect_answers(tab)
        expect(tab.page.locator("#came")).to_be_visible()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        for selector in (
            "h1",
            "#who",
            "#hint",
            "#search",
            "#history .name",
            "#history .more",
            "#answers .name",
            "#answers .more",
            "#answers button",
            "#answers .came .badge" if tab.page.locator("#answers .came").count() else "#came .badge",
            "#invent summary",
            "#status",
        ):
            assert contrast(tab, selector) >= 4.5, selector
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (brightness(numbers(background)) > 0.5) == (scheme == "light")
        if pictures := os.environ.get("HABITUS_PICTURES"):
            tab.page.screenshot(path=Path(pictures) / f"page-{scheme}-phone.png", full_page=True)


def test_every_control_has_a_name(named_tab: Tab) -> None:
    page = named_tab.page
    page.click("#somebody button >> nth=0")
    expect_answers(named_tab)
    page.click("#answers button:text-is('Similar') >> nth=0")
    expect(page.locator("#neighbours li")).to_have_count(8)
    for details in ("#raw", "#invent"):
        page.click(f"{details} summary")
    controls = page.locator("main :is(button, input, textarea)")
    unnamed = controls.evaluate_all(
        "all => all.filter(one => !(one.getAttribute('aria-label') || (one.labels && one.labels.length) "
        "|| one.textContent.trim())).map(one => one.outerHTML)"
    )
    assert unnamed == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("[role=status][aria-live=polite]").count() == 3


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
            ask_in_lines(tab, "1")
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
