"""The three stores and their pages, each made once."""

from pathlib import Path

import pytest

from habitus.laws import fit
from habitus.reporting import report

from .make_store import TABLES, planted_rows, tiny_rows, write_store
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
