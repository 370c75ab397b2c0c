"""A store packed into one file: the same laws, one seal over all, and nothing that is not a store's."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from habitus.errors import RunError
from habitus.laws import fit
from habitus.reporting import report
from habitus.store import open_store, pack_store, read_records
from habitus.store.archive import StoreArchive
from habitus.typed import CHECKSUM
from tests.laws.test_fit_pipeline import write_store


@pytest.fixture
def archive(planted: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A store of planted runs and its archive."""
    folder = tmp_path
    store = write_store(folder / "planted", planted)
    pack_store(store, folder / "planted.store.xz")
    return store, folder / "planted.store.xz"


def test_laws_and_page_of_an_archive_are_those_of_the_store(archive: tuple[Path, Path], tmp_path: Path) -> None:
    store, packed = archive
    assert fit(packed, ["batch/loss"]) == fit(store, ["batch/loss"])
    with open_store(packed) as folder:
        assert [r.recipe_hash for r in read_records(folder)] == [r.recipe_hash for r in read_records(store)]
    assert not folder.exists()
    page = report(packed, tmp_path / "page.html").read_text()
    assert "planted" in page
    assert packed.stat().st_size < 0.1 * sum(path.stat().st_size for path in store.rglob("record.json"))


def test_a_changed_archive_and_one_that_leaves_its_folder_are_refused(
    archive: tuple[Path, Path], tmp_path: Path
) -> None:
    text = lzma.decompress(archive[1].read_bytes()).decode()
    changed = tmp_path / "changed.store.xz"
    changed.write_bytes(lzma.compress(text.replace("done", "d0ne", 1).encode()))
    with pytest.raises(RunError, match="has been changed since it was written"):
        fit(changed)
    unsealed = {name: value for name, value in json.loads(text).items() if name != CHECKSUM}
    changed.write_bytes(lzma.compress(json.dumps(unsealed).encode()))
    with pytest.raises(RunError, match="nothing shows that its Records are as they were packed"):
        fit(changed)
    changed.write_bytes(archive[1].read_bytes()[:100])
    with pytest.raises(RunError, match="no archive of a store, or damaged"):
        fit(changed)
    changed.write_bytes(lzma.compress(StoreArchive(files={"../sweeps/x.json": "{}"}).to_json().encode()))
    with pytest.raises(RunError, match="which is no file of a store"):
        fit(changed)
    with pytest.raises(RunError, match=r"ends in \.store\.xz"):
        pack_store(archive[0], tmp_path / "x.zip")
    with pytest.raises(RunError, match="holds no Records"):
        pack_store(tmp_path, tmp_path / "x.store.xz")


def test_a_store_with_a_changed_record_is_not_packed(archive: tuple[Path, Path], tmp_path: Path) -> None:
    record = next(archive[0].glob("cells/*/record.json"))
    record.write_text(record.read_text().replace("done", "d0ne", 1))
    with pytest.raises(RunError, match="has been changed since it was published"):
        pack_store(archive[0], tmp_path / "again.store.xz")
    assert not (tmp_path / "again.store.xz").exists()
