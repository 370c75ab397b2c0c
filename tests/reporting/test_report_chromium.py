"""The page in a real browser: quiet, complete, usable by pointer and keyboard, small and large, light and dark."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from habitus.laws import fit
from habitus.reporting import report
from tests.browser import Tab, launch_chromium, open_tab

from .make_store import HOSTILE, planted_rows, write_store

pytestmark = pytest.mark.slow

DRAWN = """[...document.querySelectorAll('.panel > svg')].filter(s => s.getClientRects().length).map(s => {
  const r = s.getBoundingClientRect();
  return {id: s.closest('article').id, w: r.width, h: r.height, texts: s.querySelectorAll('text').length,
          marks: s.querySelectorAll('circle, rect, .ln, .dt').length};
})"""
# Text and what lies behind it, as the browser computed them; below 4.5 it is listed.
CONTRAST = """(() => {
  const parts = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const l = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => {
    return .2126 * l(r) + .7152 * l(g) + .0722 * l(b); };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] > 0) return c;
    } return [255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.getClientRects().length || e.closest('[hidden],script,style')) continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const ink = parts(svg ? style.fill : style.color);
    const ground = e.classList.contains('hv') ? parts(getComputedStyle(e.previousElementSibling).fill) : behind(e);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) bad.push([e.textContent.slice(0, 30), e.className.baseVal || e.className, ratio]);
  }
  return bad;
})()"""
FIRST_DOT = """e => { const [x, y] = e.getAttribute('d').slice(1).split('h')[0].split(' ').map(Number);
  return new DOMPoint(x, y).matrixTransform(e.getScreenCTM()).toJSON(); }"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_chromium() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any, planted_page: Path) -> Iterator[Tab]:
    with open_tab(browser) as opened:
        opened.page.goto(planted_page.as_uri())
        yield opened


def test_six_hundred_runs_are_one_small_page(planted_page: Path) -> None:
    assert planted_page.stat().st_size < 3 * 2**20
    assert not planted_page.with_name("report-data").exists()


def test_the_page_is_quiet_and_asks_for_nothing(tab: Tab) -> None:
    tab.page.wait_for_timeout(300)
    assert tab.messages == []
    assert tab.requests == [tab.page.url]  # the file itself
    assert tab.dialogs == []


def test_every_figure_is_drawn(tab: Tab) -> None:
    articles = tab.page.evaluate(
        "[...document.querySelectorAll('article')].filter(a => a.querySelector('.panels')).map(a => a.id)"
    )
    assert len(articles) == 28, articles  # the opening, the paper's figures, and the roll-out
    drawings: list[dict[str, Any]] = tab.page.evaluate(DRAWN)
    assert {d["id"] for d in drawings} == set(articles)
    for d in drawings:
        assert d["w"] > 150 and d["h"] > 60 and d["marks"] > 0 and d["texts"] > 2, d
    # No text leaves its card.
    outside = tab.page.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => t.getClientRects().length).filter(t => {"
        "const a = t.closest('article').getBoundingClientRect(), r = t.getBoundingClientRect();"
        "return r.left < a.left - 1 || r.right > a.right + 1; }).map(t => [t.closest('article').id, t.textContent])"
    )
    assert outside == []


def test_the_metric_switch_turns_every_figure(tab: Tab) -> None:
    page = tab.page
    metrics = "[...document.querySelectorAll('#{} .view:not([hidden])')].map(v => v.dataset.m)"
    assert page.evaluate(metrics.format("isoflop")) == ["batch/loss"]
    page.select_option("#metric", "catalogue/recall@10")
    for key in ("answer", "share", "isoflop", "frontiers", "negatives", "recipe", "depth", "rollout"):
        assert page.evaluate(metrics.format(key)) == ["catalogue/recall@10"], key
    assert page.evaluate(metrics.format("regimes")) == ["batch/recall@10 catalogue/recall@10"]
    # The batch axis was measured in the batch regime only: its nearest view is shown, and said to be.
    assert page.evaluate(metrics.format("trajectories")) == ["batch/recall@10"]
    assert "shown for batch/recall@10" in page.text_content("#trajectories .other")
    assert page.evaluate("document.querySelector('#isoflop .other').hidden")
    bare = "[...document.querySelectorAll('.view:not([hidden])')].filter(v => !v.querySelector('svg, table'))"
    assert page.evaluate(f"{bare}.every(v => (v.closest('article').querySelector('.how') || {{hidden: true}}).hidden)")
    switched = page.locator("article[data-switch]")
    assert switched.locator(".view:not([hidden])").count() == switched.count() > 0
    assert tab.messages == []


def test_a_point_tells_its_values_to_pointer_and_keyboard(tab: Tab) -> None:
    page = tab.page
    dots = page.locator("#isoflop .view:not([hidden]) path[data-r]").first
    dots.evaluate("e => e.scrollIntoView({block: 'center', behavior: 'instant'})")
    page.wait_for_timeout(200)  # scrolling hides the tip
    at = dots.evaluate(FIRST_DOT)
    page.mouse.move(at["x"], at["y"])
    tip = page.locator("#tip")
    assert tip.is_visible()
    text = tip.text_content()
    assert text.startswith("batch/loss ") and "10¹⁵ · allocation a0" in text and "rate 2·10⁻³" in text
    page.locator("#share .view:not([hidden]) .panels").evaluate("e => e.focus({preventScroll: true})")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert tip.is_visible() and "share s1" in tip.text_content()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator("#isoflop .view:not([hidden]) rect[data-t]").first.hover()
    assert tip.text_content().startswith("optimum at 10¹⁵: ") and page.locator(".ring").count() == 0


def test_a_figure_can_be_enlarged(tab: Tab) -> None:
    width = "document.querySelector('#isoflop .view:not([hidden]) svg').getBoundingClientRect().width"
    before = tab.page.evaluate(width)
    tab.page.click("#isoflop button.wide")
    assert tab.page.evaluate(width) > 1.3 * before
    assert tab.page.get_attribute("#isoflop button.wide", "aria-pressed") == "true"
    tab.page.click("#isoflop button.wide")
    assert tab.page.evaluate(width) == before


def test_data_can_be_seen_and_downloaded(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    with page.expect_download() as download:
        page.click("#share-table button.csv")
    assert download.value.suggested_filename == "share-table.csv"
    download.value.save_as(tmp_path / "share-table.csv")
    lines = (tmp_path / "share-table.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("metric,flops_budget,optimum,low95,high95")
    assert len(lines) == 1 + 4 * 17
    page.click("#share button.data")
    assert page.locator("#share .sheet tbody tr").count() == 4 * 13
    assert page.get_attribute("#share button.data", "aria-expanded") == "true"
    page.click("#share button.data")
    assert page.locator("#share .sheet").count() == 0


@pytest.mark.parametrize("width", [390, 320, 768, 1600])
def test_nothing_scrolls_sideways(browser: Any, planted_page: Path, width: int) -> None:
    with open_tab(browser, width, 844) as tab:
        tab.page.goto(planted_page.as_uri())
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate("document.body.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(252, 252, 250)"), ("dark", "rgb(18, 20, 24)")])
def test_text_can_be_read_in_both_appearances(browser: Any, planted_page: Path, scheme: str, background: str) -> None:
    with open_tab(browser, color_scheme=scheme) as tab:
        tab.page.goto(planted_page.as_uri())
        assert tab.page.evaluate(BACKGROUND) == background
        assert tab.page.evaluate(CONTRAST) == []


def test_the_toggle_overrides_the_system_and_is_remembered(tab: Tab) -> None:
    page = tab.page
    before = page.evaluate(BACKGROUND)
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    assert page.evaluate(BACKGROUND) != before
    assert page.text_content("#theme") == "Light"
    page.reload()
    assert page.get_attribute("html", "data-theme") == "dark"
    page.click("#theme")
    assert page.evaluate(BACKGROUND) == before


def test_the_keyboard_and_a_screen_reader_find_their_way(tab: Tab) -> None:
    page = tab.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.evaluate("[...document.querySelectorAll('.panels')].every(p => p.getAttribute('role') === 'img'"
                         "&& p.tabIndex === 0 && p.getAttribute('aria-label').length > 40)")  # fmt: skip
    assert page.evaluate("[...document.querySelectorAll('th')].every(t => t.scope === 'col' || t.scope === 'row')")
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.caption || t.closest('[aria-label]'))")
    assert page.evaluate(
        "[...document.querySelectorAll('button, select')].every(b => b.textContent.trim() || b.labels)"
    )
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_print_is_light_and_has_no_controls(browser: Any, planted_page: Path) -> None:
    with open_tab(browser, 794, 1123, color_scheme="dark") as tab:  # A4 at 96 dots per inch
        page = tab.page
        page.emulate_media(media="print")
        page.goto(planted_page.as_uri())
        assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
        assert page.evaluate("getComputedStyle(document.querySelector('.reading')).color") == "rgb(27, 29, 34)"
        for css in (".bar", "nav", ".tools"):
            assert page.evaluate(f"getComputedStyle(document.querySelector('{css}')).display") == "none"
        assert page.evaluate("document.documentElement.scrollWidth") <= 794


def test_ten_thousand_runs_keep_their_tables_beside_the_page(browser: Any, tmp_path: Path) -> None:
    """As many as a page has to bear, without the time to write so many Records: the laws of 600 with runs repeated."""
    store = write_store(tmp_path / "store", planted_rows())
    laws = fit(store)
    copies = (row.model_copy(update={"seed": seed}) for seed in range(17) for row in laws.runs)
    laws.model_copy(update={"runs": tuple(copies)}).write(store / "laws.json")
    page = report(store, tmp_path / "report.html")
    beside = tmp_path / "report-data"
    assert page.stat().st_size < 6 * 2**20
    rows = [row for row in laws.runs if row.axis == "share" and row.chosen]
    assert len((beside / "share.csv").read_text(encoding="utf-8").splitlines()) == 1 + 17 * len(rows)
    with open_tab(browser) as tab:
        tab.page.goto(page.as_uri())
        assert tab.messages == [] and tab.requests == [tab.page.url]
        dots = "document.querySelectorAll('#share .view:not([hidden]) path[data-r]')"
        counts = tab.page.evaluate(f"[...{dots}].map(p => p.dataset.r.split(',').length)")
        assert len(counts) == 4 and max(counts) <= 80
        assert "Of many runs at a budget some are drawn" in tab.page.text_content("#share .how")
        assert tab.page.get_attribute("#share a.csv", "href") == "report-data/share.csv"
        assert tab.page.locator("#share button.data").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_log_that_ends_is_drawn_in_both_appearances(browser: Any, log_page_path: Path, scheme: str) -> None:
    with open_tab(browser, color_scheme=scheme) as tab:
        tab.page.goto(log_page_path.as_uri())
        assert tab.messages == [] and tab.dialogs == []
        drawn = {d["id"] for d in tab.page.evaluate(DRAWN) if d["marks"] > 2}
        assert {"opening", "passes", "regularisation", "value-of-data"} <= drawn
        assert tab.page.evaluate(CONTRAST) == []
        assert HOSTILE in tab.page.text_content("#test-users")


def test_hostile_text_is_shown_and_not_run(browser: Any, tiny_page: Path) -> None:
    with open_tab(browser) as tab:
        tab.page.goto(tiny_page.as_uri() + "?metric=catalogue/recall@10")
        assert tab.messages == [] and tab.requests == [tab.page.url]
        assert HOSTILE in tab.page.text_content("#exclusions")
        assert tab.page.input_value("#metric") == "catalogue/recall@10"
        assert tab.dialogs == []
