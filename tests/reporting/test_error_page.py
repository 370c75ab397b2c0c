"""The page of an evaluation: what it says, that names stay text, and that a browser has nothing to complain about."""

from pathlib import Path

import pytest

from habitus.record import Metric
from habitus.reporting import error_report
from habitus.store import (
    Calibration,
    ErrorPage,
    QueryExample,
    Reliability,
    ReliabilityBin,
    SliceRow,
    SliceTable,
)

MARKUP = "<script>alert(1)</script>"


def row(value: str, measured: float, difference: float, p_value: float | None) -> SliceRow:
    return SliceRow(
        value=value,
        users=20,
        metric=Metric(value=measured, se=0.01, n=200),
        reference=measured - difference,
        difference=difference,
        low=difference - 0.02,
        high=difference + 0.02,
        p_value=p_value,
    )


def page() -> ErrorPage:
    table = SliceTable(
        by="department",
        source="item field of the target",
        metric="recall@10",
        reference="repeat recent",
        comparisons=3,
        rows=(row("GROCERY", 0.3, 0.1, 0.0001), row(MARKUP, 0.1, -0.05, 0.01), row("DELI", 0.2, 0.0, None)),
        worst=MARKUP,
        examples=(QueryExample(user="7", history=("a", MARKUP), target="b", rank=1234, first=("c",)),),
    )
    bins = tuple(ReliabilityBin(predicted=p, observed=0.9 * p, se=0.01, listed=100) for p in (0.01, 0.1, 0.5))
    plain, scaled = (
        Reliability(temperature=t, loss=2.0, entropy=1.9, expected_error={"1": 0.02, "10": 0.01}, bins=bins)
        for t in (1.0, 1.2)
    )
    return ErrorPage(
        run="run",
        side="test",
        regime="catalogue",
        queries=600,
        candidates=300,
        metrics={
            "run": {"recall@10": Metric(value=0.25, n=600)},
            "popularity": {"recall@10": Metric(value=0.1, n=600)},
        },
        slices=(table,),
        calibration=Calibration(
            temperature=1.2, fitted_side="validation", fitted_queries=500, plain=plain, scaled=scaled
        ),
    )


def test_the_page_says_where_a_run_is_behind_and_keeps_names_as_text(tmp_path: Path) -> None:
    html = error_report([page()], tmp_path / "errors.html").read_text()
    assert "2 of 3 rows differ from repeat recent in recall@10" in html
    assert "is behind repeat recent for department" in html
    assert "habitus serve run --temperature 1.200" in html
    assert MARKUP not in html and "&lt;script&gt;alert(1)" in html
    assert "1,234" in html and "600 test queries" in html


def test_two_runs_have_a_chapter_each(tmp_path: Path) -> None:
    html = error_report([page(), page().model_copy(update={"run": "other"})], tmp_path / "two.html").read_text()
    assert "Where it errs: run" in html and "Where it errs: other" in html


@pytest.mark.slow
def test_a_browser_draws_it_and_asks_for_nothing(tmp_path: Path) -> None:
    from tests.browser import launch_chromium, open_tab

    path = error_report([page()], tmp_path / "errors.html")
    with launch_chromium() as browser, open_tab(browser, 390, 800) as tab:
        tab.page.goto(path.as_uri())
        assert tab.page.locator("svg circle").count() >= 9  # three rows in two panels, and the reference's rings
        assert "GROCERY" in tab.page.locator("svg").first.text_content()
        tab.page.locator("button.data").first.click()
        assert not tab.errors and not tab.hosts() and not tab.dialogs
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.page.evaluate(overflow) <= 0
