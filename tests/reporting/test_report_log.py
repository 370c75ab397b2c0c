"""The chapters of a log that ends, and the table on test users."""

from pathlib import Path

import pytest

from .make_store import HOSTILE
from .reading import Page, read_page


@pytest.fixture(scope="module")
def log_page(log_page_path: Path) -> Page:
    return read_page(log_page_path)


def test_passes_and_regularisation_name_the_best_run(log_page: Page) -> None:
    assert "took 16.0 passes with N = 3.2M" in log_page.articles["passes"].readings[0]
    reading = log_page.articles["regularisation"].readings[0]
    assert reading.startswith("With dropout 0.3 the best run has catalogue/recall@10 0.") and ", with 0.1 0." in reading
    assert log_page.articles["regularisation"].drawings == 1  # nothing but dropout was varied


def test_the_value_of_more_data_is_said_with_intervals(log_page: Page) -> None:
    reading = log_page.articles["value-of-data"].readings[0]
    assert "With twice the users: catalogue/recall@10 0.2" in reading and "With ten times the users" in reading
    assert "No run has checked what lies beyond the log." in reading
    answers = {row[0]: row[1] for row in log_page.articles["log-limits"].tables[0]}
    assert answers["twice the users"] in reading.replace("With twice the users: catalogue/recall@10 ", "")
    assert {"one more pass", "twice the size", "best number of passes"} <= set(answers)


def test_the_table_on_test_users_stands_on_top(log_page: Page) -> None:
    article = log_page.articles["test-users"]
    assert article.readings == [
        "On 4,000 queries of 500 test users model has recall@10 0.3100. "
        f"The best baseline, popularity {HOSTILE}, has 0.1200, a difference of +0.1900 [+0.1800, +0.2000]."
    ]
    assert article.row(f"popularity {HOSTILE}")[1:] == [
        "0.1200 | +0.1900 [+0.1800, +0.2000]", "7.400 | −1.3000",
    ]  # fmt: skip
    assert HOSTILE not in log_page.text


def test_what_a_log_does_not_measure_is_not_on_its_page(log_page: Page) -> None:
    assert list(log_page.articles)[:3] == ["opening", "test-users", "map"]
    assert not {"answer", "recipe", "isoflop"} & set(log_page.articles)
    assert "Dots are runs" in log_page.text and "best so far" in log_page.text


def test_stores_without_a_log_axis_have_no_such_chapter(tiny_page: Path) -> None:
    page = read_page(tiny_page)
    assert not {"passes", "regularisation", "value-of-data", "log-limits", "test-users"} & set(page.articles)
    assert "habitus sweep passes --data DATASET --store STORE" in page.text
