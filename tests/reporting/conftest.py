"""The three stores and their pages, each made once."""

from pathlib import Path

import pytest

from habitus.laws import fit
from habitus.reporting import report
from habitus.store import TEST_TABLE_FILE, TestTable

from .make_store import HOSTILE, TABLES, log_rows, planted_rows, tiny_rows, write_store
from .paper_rows import paper_rows


@pytest.fixture(scope="session")
def planted_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("planted") / "store", planted_rows())


@pytest.fixture(scope="session")
def planted_page(planted_store: Path) -> Path:
    return report(planted_store, planted_store.parent / "report.html")


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("tiny") / "store", tiny_rows())


@pytest.fixture(scope="session")
def tiny_page(tiny_store: Path) -> Path:
    return report(tiny_store, tiny_store.parent / "report.html")


@pytest.fixture(scope="session")
def paper_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the paper's printed tables, with its laws."""
    if not TABLES.is_dir():
        pytest.skip("the paper's printed tables are not on this machine (../shared/paper/tables)")
    store = write_store(tmp_path_factory.mktemp("paper") / "store", paper_rows(TABLES))
    fit(store).write(store / "laws.json")
    return store


@pytest.fixture(scope="session")
def paper_page(paper_store: Path) -> Path:
    return report(paper_store, paper_store.parent / "report.html")


TABLE = {
    "side": "test",
    "queries": 4000,
    "users": 500,
    "rows": [
        {"scorer": "model", "metrics": {m: {"value": v, "n": 4000} for m, v in (("recall@10", 0.31), ("loss", 6.1))}},
        {
            "scorer": f"popularity {HOSTILE}",
            "metrics": {m: {"value": v, "n": 4000} for m, v in (("recall@10", 0.12), ("loss", 7.4))},
            "differences": {"recall@10": {"value": 0.19, "low": 0.18, "high": 0.2}, "loss": {"value": -1.3}},
        },
    ],
}


@pytest.fixture(scope="session")
def log_page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a log that ends, with a table on test users."""
    names = ("catalogue/recall@10", "catalogue/loss", "train/loss")
    rows = log_rows()
    for row in rows:
        row["metrics"] = {m: v for m, v in row["metrics"].items() if m in names}
    store = write_store(tmp_path_factory.mktemp("log") / "store", rows)
    fit(store, ["catalogue/recall@10"]).write(store / "laws.json")
    TestTable.parse(TABLE, "test").write(store / TEST_TABLE_FILE)
    return report(store, store.parent / "report.html")
