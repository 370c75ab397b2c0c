"""The page in a real browser: quiet, complete, usable by pointer and keyboard, small and large, light and dark."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from .chromium import Browser
from .make_store import HOSTILE

pytestmark = pytest.mark.slow

DRAWN = """[...document.querySelectorAll('.panel > svg')].filter(s => s.getClientRects().length).map(s => {
  const r = s.getBoundingClientRect();
  return {id: s.closest('article').id, w: r.width, h: r.height, texts: s.querySelectorAll('text').length,
          marks: s.querySelectorAll('circle, rect, .ln').length};
})"""
CHOOSE = """{ const s = document.getElementById('metric');
  s.value = 'catalogue/recall@10'; s.dispatchEvent(new Event('change')); }"""
FIRST = """(() => { const c = document.querySelector('#isoflop .view:not([hidden]) circle[data-t]');
  c.scrollIntoView({block: 'center', behavior: 'instant'});
  const r = c.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; })()"""
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


@pytest.fixture
def opened(browser: Browser, planted_page: Path) -> Browser:
    browser.media()
    browser.resize(1280, 900)
    browser.open(planted_page)
    return browser


def test_six_hundred_runs_are_one_small_page(planted_page: Path) -> None:
    assert planted_page.stat().st_size < 3_000_000


def test_the_page_is_quiet_and_asks_for_nothing(opened: Browser) -> None:
    opened.run("new Promise(done => setTimeout(done, 300))")
    assert opened.complaints() == []
    assert opened.requests() == []
    assert not [e for e in opened.events if e.get("method") == "Page.javascriptDialogOpening"]


def test_every_figure_is_drawn(opened: Browser) -> None:
    articles = opened.run(
        "[...document.querySelectorAll('article')].filter(a => a.querySelector('.panels')).map(a => a.id)"
    )
    assert len(articles) == 25  # the protocol's 24 figures, and the roll-out
    drawn: list[dict[str, Any]] = opened.run(DRAWN)
    assert {d["id"] for d in drawn} == set(articles)
    for d in drawn:
        assert d["w"] > 150 and d["h"] > 60 and d["marks"] > 0 and d["texts"] > 2, d
    # No text leaves its card.
    out = opened.run(
        "[...document.querySelectorAll('svg text')].filter(t => t.getClientRects().length).filter(t => {"
        "const a = t.closest('article').getBoundingClientRect(), r = t.getBoundingClientRect();"
        "return r.left < a.left - 1 || r.right > a.right + 1; }).map(t => [t.closest('article').id, t.textContent])"
    )
    assert out == []


def test_the_metric_switch_turns_every_figure(opened: Browser) -> None:
    shown = "[...document.querySelectorAll('#{} .view:not([hidden])')].map(v => v.dataset.m)"
    assert opened.run(shown.format("isoflop")) == ["batch/loss"]
    opened.run(CHOOSE)
    for key in ("answer", "share", "isoflop", "frontiers", "negatives", "recipe", "depth", "rollout"):
        assert opened.run(shown.format(key)) == ["catalogue/recall@10"], key
    assert opened.run(shown.format("regimes")) == ["batch/recall@10 catalogue/recall@10"]
    # The batch axis was measured in the batch regime only: its nearest view is shown, and said to be.
    assert opened.run(shown.format("trajectories")) == ["batch/recall@10"]
    assert "shown for batch/recall@10" in opened.run("document.querySelector('#trajectories .other').textContent")
    assert opened.run("document.querySelector('#isoflop .other').hidden")
    bare = "[...document.querySelectorAll('.view:not([hidden])')].filter(v => !v.querySelector('svg, table'))"
    assert opened.run(f"{bare}.every(v => (v.closest('article').querySelector('.how') || {{hidden: true}}).hidden)")
    assert opened.run("document.querySelectorAll('article[data-switch] .view:not([hidden])').length") == opened.run(
        "document.querySelectorAll('article[data-switch]').length"
    )
    assert opened.complaints() == []


def test_a_point_tells_its_values_to_pointer_and_keyboard(opened: Browser) -> None:
    at = opened.run(FIRST)
    time.sleep(0.2)  # scrolling hides the tip
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    tip = "[document.getElementById('tip').hidden, document.getElementById('tip').textContent]"
    hidden, words = opened.run(tip)
    assert not hidden
    assert words.startswith("batch/loss ") and "10¹⁵ · allocation a0" in words and "rate 2·10⁻³" in words
    opened.run("document.querySelector('#share .view:not([hidden]) .panels').focus({preventScroll: true})")
    for _ in range(2):
        opened.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
    hidden, words = opened.run(tip)
    assert not hidden and "share s1" in words
    opened.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    assert opened.run(tip)[0]


def test_data_can_be_seen_and_downloaded(opened: Browser, tmp_path: Path) -> None:
    opened.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    opened.run("document.querySelector('#share-table button.csv').click()")
    until = time.monotonic() + 20
    while not (tmp_path / "share-table.csv").exists() and time.monotonic() < until:
        time.sleep(0.1)
    text = (tmp_path / "share-table.csv").read_text(encoding="utf-8")
    assert text.splitlines()[0].startswith("metric,flops_budget,optimum,low95,high95")
    assert len(text.splitlines()) == 1 + 4 * 17
    opened.run("document.querySelector('#share button.data').click()")
    assert opened.run("document.querySelectorAll('#share .sheet tbody tr').length") == 4 * 13
    assert opened.run("document.querySelector('#share button.data').getAttribute('aria-expanded')") == "true"
    opened.run("document.querySelector('#share button.data').click()")
    assert opened.run("document.querySelector('#share .sheet')") is None


@pytest.mark.parametrize("width", [390, 320, 768, 1600])
def test_nothing_scrolls_sideways(browser: Browser, planted_page: Path, width: int) -> None:
    browser.media()
    browser.resize(width, 844)
    browser.open(planted_page)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.body.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_appearances(browser: Browser, planted_page: Path, scheme: str) -> None:
    browser.resize(1280, 900)
    browser.media(scheme)
    browser.open(planted_page)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == {
        "light": "rgb(252, 252, 250)", "dark": "rgb(18, 20, 24)",
    }[scheme]  # fmt: skip
    assert browser.run(CONTRAST) == []


def test_the_toggle_overrides_the_system_and_is_remembered(opened: Browser) -> None:
    before = opened.run("getComputedStyle(document.body).backgroundColor")
    opened.run("document.getElementById('theme').click()")
    assert opened.run("document.documentElement.dataset.theme") == "dark"
    assert opened.run("getComputedStyle(document.body).backgroundColor") != before
    assert opened.run("document.getElementById('theme').textContent") == "Light"
    opened.run("document.getElementById('theme').click(); localStorage.removeItem('habitus-theme')")
    assert opened.run("getComputedStyle(document.body).backgroundColor") == before


def test_the_keyboard_and_a_screen_reader_find_their_way(opened: Browser) -> None:
    opened.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert opened.run("document.activeElement.className") == "skip"
    assert opened.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert opened.run("[...document.querySelectorAll('.panels')].every(p => p.getAttribute('role') === 'img'"
                      "&& p.tabIndex === 0 && p.getAttribute('aria-label').length > 40)")  # fmt: skip
    assert opened.run("[...document.querySelectorAll('th')].every(t => t.scope === 'col' || t.scope === 'row')")
    assert opened.run("[...document.querySelectorAll('table')].every(t => t.caption || t.closest('[aria-label]'))")
    assert opened.run("[...document.querySelectorAll('button, select')].every(b => b.textContent.trim() || b.labels)")
    assert opened.run("document.documentElement.lang") == "en"
    levels = opened.run("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_print_is_light_and_has_no_controls(browser: Browser, planted_page: Path) -> None:
    browser.resize(794, 1123)  # A4 at 96 dots per inch
    browser.media("dark", "print")
    browser.open(planted_page)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('.reading')).color") == "rgb(27, 29, 34)"
    for css in (".bar", "nav", ".tools"):
        assert browser.run(f"getComputedStyle(document.querySelector('{css}')).display") == "none"
    assert browser.run("document.documentElement.scrollWidth") <= 794


def test_hostile_text_is_shown_and_not_run(browser: Browser, tiny_page: Path) -> None:
    browser.media()
    browser.resize(1280, 900)
    browser.open(tiny_page, "?metric=catalogue/recall@10")
    assert browser.complaints() == [] and browser.requests() == []
    assert HOSTILE in browser.run("document.getElementById('exclusions').textContent")
    assert browser.run("document.getElementById('metric').value") == "catalogue/recall@10"
    assert not [e for e in browser.events if e.get("method") == "Page.javascriptDialogOpening"]
