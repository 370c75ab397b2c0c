"""Runs of two optimizers or starts: their laws stand side by side, and are never pooled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.laws import fit, format_summary
from habitus.reporting import report
from habitus.store import Laws

from .make_store import BUDGETS, Row, planted_loss, planted_size, write_store
from .reading import Page, read_page

LOSS, MAIN, OTHER = "batch/loss", "muon/default", "muon/mup_lr"


def rows_of(init: str, factor: float, budgets: tuple[float, ...]) -> list[Row]:
    """Eight sizes per budget around an N* that is `factor` times the planted one."""
    rows: list[Row] = []
    for budget in budgets:
        for i, size in enumerate(planted_size(budget) * np.geomspace(1 / 6, 6, 8)):
            loss = planted_loss(size, budget / (6 * size))
            knobs: dict[str, Any] = {"params": factor * size, "slots_seen": budget / (6 * factor * size)}
            rows.append(
                {"axis": "allocation", "cell_id": f"{init}-{i}", "budget": budget, "rate": 2e-3, "init": init,
                 "knobs": knobs, "metrics": {"train/loss": loss - 0.01, LOSS: loss}}
            )  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose second start has N* twice as large, and a budget that the first one lacks."""
    rows = rows_of("default", 1.0, BUDGETS[:4]) + rows_of("mup_lr", 2.0, (BUDGETS[0] / 10, *BUDGETS[:2]))
    store = write_store(tmp_path_factory.mktemp("groups") / "store", rows)
    fit(store).write(store / "laws.json")
    return store


@pytest.fixture(scope="module")
def laws(store: Path) -> Laws:
    return Laws.read(store / "laws.json")


@pytest.fixture(scope="module")
def page(store: Path) -> Page:
    return read_page(report(store, store.parent / "report.html"))


def test_the_page_has_a_column_for_each_optimizer_and_start(page: Page) -> None:
    article = page.articles["groups"]
    assert article.metrics == [LOSS, "train/loss"]
    header, *rows = article.tables[0]
    assert header == ["law", "budget", MAIN, OTHER]
    sizes = {row[1]: row[2:] for row in rows if row[0] == "N*"}
    assert list(sizes) == ["10¹⁴", "10¹⁵", "10¹⁶", "10¹⁷", "10¹⁸"]
    assert sizes["10¹⁴"][0] == "–" and sizes["10¹⁸"][1] == "–"
    assert sizes["10¹⁵"][0].startswith("1.09M [") and sizes["10¹⁵"][1].startswith("2.17M [")
    assert [row[0] for row in rows if row[1] == "–"] == ["N*(C), exponent", "L*(C) along the frontier, exponent"]
    assert rows[5][2].startswith("0.4512 [")  # β / (α + β) = 0.37 / 0.82


def test_an_axis_that_could_not_be_fitted_leaves_the_rest_of_the_table(tmp_path: Path) -> None:
    """A metric that half of the runs lack has one entry, allocation_fit, that says so."""
    rows = rows_of("default", 1.0, BUDGETS[:4]) + rows_of("mup_lr", 2.0, BUDGETS[:3])
    for row in rows[::2]:
        row["metrics"]["catalogue/loss"] = row["metrics"][LOSS]
    store = write_store(tmp_path / "store", rows)
    assert any(entry.name == "allocation_fit" for entry in fit(store).entries)
    assert LOSS in read_page(report(store, tmp_path / "report.html")).articles["groups"].metrics


def test_its_sheet_has_every_number_once(page: Page, laws: Laws) -> None:
    lines = page.sheet("groups")
    keys = [tuple(line[name] for name in ("group", "metric", "law", "flops_budget")) for line in lines]
    assert len(set(keys)) == len(keys)
    (line,) = [line for line in lines if (line["group"], line["law"], line["metric"]) == (OTHER, "size_law", LOSS)]
    (group,) = laws.groups
    law = next(e.law for e in group.entries if (e.name, e.metric) == ("size_law", LOSS))
    assert float(line["value"]) == pytest.approx(law["exponent"], rel=1e-6)


def test_a_store_of_one_group_says_how_to_measure_another(tiny_page: Path) -> None:
    page = read_page(tiny_page)
    assert "groups" not in page.articles
    _, _, missing = page.text.partition("laws by optimizer and init")
    command = "habitus sweep allocation --data DATASET --store STORE  (with another optimizer in its preset)"
    assert command in missing[:300]


def test_the_summary_has_a_table_for_each(laws: Laws) -> None:
    main, other = format_summary(laws).split(f"Laws of {OTHER}, 24 runs, fitted apart")
    for text, ended in ((main, "4/4 ok"), (other, "3/3 ok")):
        line = next(line for line in text.splitlines() if line.startswith(LOSS))
        assert ended in line
    alone = format_summary(laws.model_copy(update={"groups": ()}))
    assert "fitted apart" not in alone.replace("\n", " ").split("Notes")[0]
