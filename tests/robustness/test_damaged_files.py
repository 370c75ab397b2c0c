"""Files cut short and flipped bits: refused by name or without effect, never a different number.

Every file of a dataset, a run with its bundle, vectors and served catalogue, and a store. The suite damages each at a
few places; `make soak` at up to two hundred.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError, HabitusError
from habitus.laws import fit, read_runs
from habitus.model import EmbeddingCache, load_bundle
from habitus.recipe import Recipe
from habitus.serving import RecommendRequest, Retriever
from habitus.store import Laws, read_run_record
from habitus.sweeps import preset_dataset
from habitus.sweeps.cells import DatasetFacts, Design
from habitus.sweeps.manifest import write_manifest
from habitus.sweeps.preset import load_preset
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, Worker, WorkerOptions
from habitus.training import train
from tests.sweeps.cells_of_tests import quick_cells

Reader = Callable[[Path], Any]
# What is a log for people and decides no number; and what only says who holds a file.
NOT_READ = ("journal.jsonl", "lock", ".clock")
POSITIONS = [3, pytest.param(200, marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return preset_dataset(load_preset("tiny"), tmp_path_factory.mktemp("data") / "dataset", seed=1)


@pytest.fixture(scope="module")
def run(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated over the catalogue, served once, and given two items."""
    path = tmp_path_factory.mktemp("run") / "run"
    values = {
        "data": {"seq_len": dataset.seq_len},
        "model": {"joint_dim": 8, "text_len": dataset.fields.text_len, "text_depth": 1, "width": 32, "depth": 1},
        "train": {"batch_sequences": 4, "steps": 2, "learning_rate": 0.01},
        "evaluate": {"queries": 50, "regimes": ["batch", "catalogue"]},
    }
    train(Recipe.parse(values, "test"), dataset, path)
    retriever = Retriever.open(path, data=dataset.path, device="cpu")
    for number in (1, 2):
        retriever.put_item(10**9 + number, {"title": f"a new thing {number}"})
    retriever.close()
    return path


@pytest.fixture(scope="module")
def store(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cells of an axis and what is fitted to them."""
    tiny, path = load_preset("tiny"), tmp_path_factory.mktemp("store") / "store"
    cells = quick_cells(tiny, DatasetFacts.of(dataset), 3)
    made = Store.create(path, dataset, tiny.evaluate)
    write_manifest(made, Design("allocation", tuple(cells), (), (), ()), tiny, {})
    jobs = [Job(planned.hash, planned.row.flops_budget, steps=planned.recipe.train.steps) for planned in cells]
    Worker(made, dataset, WorkerOptions(device="cpu")).work(jobs)
    fit(path, allow_repeats=True).write(path / "laws.json")
    return path


def read_dataset(path: Path) -> Any:
    dataset = Dataset.open(path)
    batch = dataset.batch("train", 4, position=0)
    arrays = [np.ascontiguousarray(array) for array in (batch.items, batch.targets)]
    ids = dataset.item_ids().to_pylist(), dataset.user_ids().to_pylist()
    features = dataset.item_features(np.arange(dataset.num_items))
    return dataset.checksum, [digest(array) for array in arrays], ids, digest(features.tokens), dataset.schema


def read_run(path: Path, dataset: Dataset) -> Any:
    bundle = load_bundle(path)
    cache = EmbeddingCache.open(path / "catalogue", bundle, dataset)
    weights = {name: digest(tensor.numpy()) for name, tensor in bundle.model.state_dict().items()}
    vectors = [digest(shard.float().numpy()) for shard in cache.shards]
    return read_run_record(path).to_values(), weights, vectors, bundle.recipe, bundle.schema, bundle.encoders


def serve_run(path: Path) -> Any:
    retriever = Retriever.open(path, device="cpu", read_only=True)
    response = retriever.recommend([RecommendRequest(history=[{"item_id": 1}, {"item_id": 2}], k=300)])[0]
    retriever.close()
    return [(one.item_id, one.score) for one in response.items]


def read_store(path: Path) -> Any:
    Store.open(path)
    return read_runs(path), Laws.read(path / "laws.json")


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def damages(content: bytes, name: str, number: int) -> list[tuple[str, bytes]]:
    """The content cut short, and with one bit flipped, at so many places in all."""
    chance = random.Random(name)
    places = range(len(content)) if len(content) <= number // 2 else chance.sample(range(len(content)), number // 2 + 1)
    cut = [(f"cut at byte {place}", content[:place]) for place in places]
    flipped = []
    for place in places:
        bit = 1 << chance.randrange(8)
        changed = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        flipped.append((f"bit {bit} of byte {place}", changed))
    return (cut + flipped)[: number + 1] if number > 3 else [cut[0], *flipped]


def check_every_file(folder: Path, read: Reader, number: int) -> dict[str, int]:
    """Damage every file of a folder in turn; how many damages were refused and how many had no effect."""
    expected, counts = read(folder), {"files": 0, "refused": 0, "without effect": 0}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(NOT_READ)):
        whole = file.read_bytes()
        counts["files"] += 1
        for what, content in damages(whole, file.name, number):
            file.write_bytes(content)
            try:
                answer = read(folder)
            except HabitusError as error:
                assert str(folder) in str(error), (file, what, error)
                counts["refused"] += 1
            else:
                assert answer == expected, (file, what)
                counts["without effect"] += 1
        file.write_bytes(whole)
    assert read(folder) == expected
    return counts


@pytest.mark.parametrize("number", POSITIONS)
@pytest.mark.parametrize("what", ["dataset", "run", "served run", "store"])
def test_damage_is_refused_by_name_or_without_effect(
    dataset: Dataset, run: Path, store: Path, what: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"dataset": dataset.path, "run": run, "served run": run, "store": store}
    readers: dict[str, Reader] = {
        "dataset": read_dataset,
        "run": lambda path: read_run(path, dataset),
        "served run": serve_run,
        "store": read_store,
    }
    folder = tmp_path / what.replace(" ", "-")
    shutil.copytree(sources[what], folder)
    counts = check_every_file(folder, readers[what], number)
    with capsys.disabled():
        print(f"\n{what}: {counts}") if number > 3 else None
    assert counts["refused"] >= counts["files"] // 2


def test_a_journal_of_items_loses_at_most_its_end(run: Path, tmp_path: Path) -> None:
    """A cut journal cannot be told from one that was not written further: what comes back is a state that it was in."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    journal = folder / "serve" / "items" / "journal.jsonl"
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    states = []
    for count in range(1, len(lines) + 1):
        journal.write_bytes(b"".join(lines[:count]))
        states.append(serve_run(folder))
    for what, content in damages(whole, "journal", 3):
        journal.write_bytes(content)
        try:
            answer = serve_run(folder)
        except HabitusError as error:
            assert str(journal) in str(error), what
        else:
            assert answer in states, what


def test_documents_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    for name, text in (("a.json", "[" * 200_000), ("b.toml", "a = " + "[" * 200_000)):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            Recipe.read(tmp_path / name)


def test_an_edited_file_of_ours_is_refused_and_one_without_a_checksum_is_read(store: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(store, tmp_path / "store"))
    path = folder / "sweeps" / "allocation-1.json"
    values = json.loads(path.read_text())
    values["cells"][0]["learning_rate"] *= 1.5
    path.write_text(json.dumps(values))
    with pytest.raises(HabitusError, match=r"allocation-1\.json has been changed since it was written"):
        read_runs(folder)
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert len(read_runs(folder)) == 3
