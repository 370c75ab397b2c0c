"""The store: what it refuses, who gets a cell, and what becomes of a run that nobody finished."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.files import write_once
from habitus.record import Record
from habitus.sweeps import attempts
from habitus.sweeps.cells import DatasetFacts, PlannedRun
from habitus.sweeps.lease import LeaseLostError, WorkerFile, holder, latest_claim, try_claim
from habitus.sweeps.preset import Preset
from habitus.sweeps.store import Store
from habitus.sweeps.worker import DeviceLostError, Job, Worker, WorkerOptions
from tests.sweeps.cells_of_tests import quick_cells, store_with


@pytest.fixture(scope="module")
def finished(
    dataset: Dataset, tiny: Preset, facts: DatasetFacts, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PlannedRun]:
    """A store with one finished cell; copied by every test that changes it."""
    cells = quick_cells(tiny, facts, 1)
    path = tmp_path_factory.mktemp("finished") / "store"
    store, jobs = store_with(path, dataset, tiny, cells)
    tally = Worker(store, dataset).work(jobs)
    assert tally.published == 1 and store.settled(cells[0].hash)
    return path, cells[0]


@pytest.fixture
def store(finished: tuple[Path, PlannedRun], tmp_path: Path) -> Store:
    shutil.copytree(finished[0], tmp_path / "store")
    return Store.open(tmp_path / "store")


@pytest.fixture
def digest(finished: tuple[Path, PlannedRun]) -> str:
    return finished[1].hash


def claimed_cell(tmp_path: Path) -> tuple[Path, WorkerFile]:
    cell = tmp_path / "cells" / "a"
    cell.mkdir(parents=True)
    (tmp_path / "workers").mkdir()
    return cell, WorkerFile(tmp_path)


def test_a_finished_cell_is_a_run_with_everything_in_it(store: Store, digest: str) -> None:
    names = {path.name for path in store.cell(digest).iterdir()}
    assert names == {"recipe.toml", "record.json", "seal.json", "journal.jsonl", "bundle"}
    record = store.record(digest)
    assert record is not None and record.status == "done" and record.flops_budget == 4e7
    assert record.evaluation is not None
    assert record.evaluation.query_set_checksum == store.info.evaluation.query_set_checksum


def test_running_again_runs_nothing(store: Store, digest: str, dataset: Dataset) -> None:
    before = (store.cell(digest) / "record.json").stat().st_mtime_ns
    assert Worker(store, dataset).work([Job(digest, 4e7)]).published == 0
    assert (store.cell(digest) / "record.json").stat().st_mtime_ns == before


def test_one_of_two_claims_wins_and_the_other_waits(tmp_path: Path) -> None:
    cell, first = claimed_cell(tmp_path)
    second = WorkerFile(tmp_path)
    lease = try_claim(cell, first)
    assert lease is not None and lease.number == 1
    assert try_claim(cell, second) is None and try_claim(cell, first) is None
    held = holder(cell)
    assert held is not None and held[0] == first.name


def test_a_lease_that_nobody_touches_runs_out_and_fences_its_holder(tmp_path: Path) -> None:
    cell, first = claimed_cell(tmp_path)
    second = WorkerFile(tmp_path)
    lease = try_claim(cell, first, lease_seconds=0.2)
    assert lease is not None
    lease.check()
    with lease.keep_alive(0.2):
        time.sleep(0.5)
        assert try_claim(cell, second, lease_seconds=0.2) is None
    time.sleep(0.3)
    taken = try_claim(cell, second, lease_seconds=0.2)
    assert taken is not None and taken.number == 2
    with pytest.raises(LeaseLostError):
        lease.check()
    taken.check()


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    cell, first = claimed_cell(tmp_path)
    lease = try_claim(cell, first)
    assert lease is not None
    lease.release()
    assert holder(cell) is None
    again = try_claim(cell, first)
    assert again is not None and again.number == 2


def test_local_clocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, first = claimed_cell(tmp_path)
    second = WorkerFile(tmp_path)
    for off in (-3600.0, 3600.0):
        real = time.time
        monkeypatch.setattr(time, "time", lambda real=real, off=off: real() + off)
        lease = try_claim(cell, first, lease_seconds=5)
        assert lease is not None
        assert try_claim(cell, second, lease_seconds=5) is None
        lease.release()
        monkeypatch.undo()


def test_a_file_is_published_once(tmp_path: Path) -> None:
    assert write_once(tmp_path / "a", b"first")
    assert not write_once(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def unfinished(store: Store, digest: str, published: bool) -> Path:
    """The cell as it is when a worker dies right after its last step, before or after publishing."""
    cell = store.cell(digest)
    attempt = cell / "attempts" / "000001-dead"
    attempt.mkdir(parents=True)
    for name in ("bundle", "journal.jsonl", "record.json"):
        (cell / name).rename(attempt / name)
    (attempt / "checkpoints" / "step-000004").mkdir(parents=True)  # removed last, so perhaps not yet
    (cell / "seal.json").unlink()
    if published:
        os.link(attempt / "record.json", cell / "record.json")
    (cell / "lease-000001").write_text('{"worker": "dead", "number": 1}')
    os.utime(cell / "lease-000001", (1, 1))
    return attempt


@pytest.mark.parametrize("published", [False, True])
def test_a_run_that_only_lacked_its_publication_is_published(
    store: Store, digest: str, dataset: Dataset, published: bool
) -> None:
    before = (store.cell(digest) / "record.json").read_bytes()
    unfinished(store, digest, published)
    tally = Worker(store, dataset).work([Job(digest, 4e7)])
    assert tally.published == (0 if published else 1)
    assert store.settled(digest) and (store.cell(digest) / "bundle" / "bundle.json").exists()
    assert (store.cell(digest) / "record.json").read_bytes() == before  # not trained again
    assert not (store.cell(digest) / "checkpoints").exists()
    assert latest_claim(store.cell(digest)) == 0


def test_the_second_of_two_finished_attempts_is_a_duplicate(store: Store, digest: str, dataset: Dataset) -> None:
    cell = store.cell(digest)
    late = cell / "attempts" / "000001-late"
    late.mkdir(parents=True)
    shutil.copy(cell / "record.json", late / "record.json")
    assert not attempts.publish(late, cell)
    assert attempts.same_measurement(Record.read(late / "record.json"), Record.read(cell / "record.json"))


def test_a_failed_run_is_a_record_with_its_reason(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    cells = quick_cells(tiny, facts, 1)
    wild = cells[0].recipe.model_copy(
        update={"train": cells[0].recipe.train.model_copy(update={"learning_rate": 3e38})}
    )
    store = Store.create(tmp_path / "store", dataset, tiny.evaluate)
    digest = wild.hash(dataset.checksum)
    store.add(digest, wild)
    tally = Worker(store, dataset).work([Job(digest, 4e7)])
    record = store.record(digest)
    assert (tally.published, tally.failed) == (1, 1)
    assert record is not None and record.status == "failed" and "at step" in (record.reason or "")


def test_a_stage_two_cell_waits_for_its_parent(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    (parent,) = quick_cells(tiny, facts, 1)
    values = parent.recipe.to_values()
    values["train"] |= {"stage": 2, "parent": parent.hash, "num_negatives": 8, "steps": 3}
    child = type(parent.recipe).parse(values, "child")
    store, jobs = store_with(tmp_path / "store", dataset, tiny, [parent])
    digest = child.hash(dataset.checksum)
    store.add(digest, child)
    worker = Worker(store, dataset)
    assert not worker._try_job(Job(digest, 4e7)) and latest_claim(store.cell(digest)) == 0
    tally = worker.work([Job(digest, 4e7), *jobs])  # the child first: it is passed over until the parent is there
    record = store.record(digest)
    assert tally.published == 2 and record is not None and record.parent_hash == parent.hash
    assert record.train is not None and record.train.extra_loss is not None


def test_stopping_saves_and_another_worker_goes_on(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    (planned,) = quick_cells(tiny, facts, 1)
    train = planned.recipe.train.model_copy(update={"steps": 3000})
    recipe = planned.recipe.model_copy(update={"train": train})
    digest = recipe.hash(dataset.checksum)
    store = Store.create(tmp_path / "store", dataset, tiny.evaluate)
    store.add(digest, recipe)
    job = Job(digest, 4e7, steps=3000)
    Worker(store, dataset, WorkerOptions(seconds_left=1.5)).work([job])
    assert not store.has_record(digest)
    second = Worker(store, dataset, WorkerOptions(seconds_left=1.0))
    second.work([job])
    claims = {event["claim"]: event["from_step"] for event in store.events() if event["event"] == "claimed"}
    assert claims[1] == 0 and claims[2] > 0, claims


def test_out_of_memory_is_retried_alone_then_in_pieces_and_said(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (planned,) = quick_cells(tiny, facts, 1)
    store, jobs = store_with(tmp_path / "store", dataset, tiny, [planned])
    backward, failures = torch.Tensor.backward, iter([True, True])

    def short_of_memory(self: torch.Tensor, *args: object, **kwargs: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        backward(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "backward", short_of_memory)
    notes: list[str] = []
    tally = Worker(store, dataset, note=notes.append).work(jobs)
    record = store.record(planned.hash)
    assert tally.published == 1 and record is not None and record.status == "done"
    assert record.hardware["accumulate"] == 2
    assert ["alone" in notes[0], "2 micro-batches" in notes[1]] == [True, True]


def test_an_error_of_the_device_is_tried_in_new_processes_and_then_the_cells_fault(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def broken(self: torch.Tensor, *args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "backward", broken)
    (planned,) = quick_cells(tiny, facts, 1)
    store, jobs = store_with(tmp_path / "store", dataset, tiny, [planned])
    for _ in range(3):  # each would be a process of its own
        assert not store.settled(planned.hash)
        with pytest.raises(DeviceLostError, match="an illegal memory access"):
            Worker(store, dataset).work(jobs)
    record = store.record(planned.hash)
    assert record is not None and record.status == "failed" and "CUDA error" in (record.reason or "")
    assert "illegal memory access" in (store.cell(planned.hash) / "failure.txt").read_text()


@pytest.mark.slow
def test_a_full_disk_stops_the_sweep_in_words_and_room_lets_it_go_on(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        cells = quick_cells(tiny, facts, 4)
        store, jobs = store_with(tmp_path / "disk" / "store", dataset, tiny, cells)
        options = WorkerOptions(device="cpu", poll_seconds=0.01)
        with pytest.raises(RunError, match="cannot be written to: No space left on device"):
            Worker(store, dataset, options).work(jobs)
        subprocess.run(["mount", "-o", "remount,size=20m", str(tmp_path / "disk")], check=True)
        Worker(store, dataset, options).work(jobs)
        records = [store.record(planned.hash) for planned in cells]
        assert [record.status for record in records if record] == ["done"] * 4
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_another_dataset_or_evaluation_is_refused(store: Store, dataset: Dataset, tiny: Preset) -> None:
    with pytest.raises(RunError, match="belongs to another dataset"):
        store.check("0" * 64)
    other = tiny.evaluate.model_copy(update={"queries": 123})
    with pytest.raises(ConfigError, match=r"queries = 123.*begun with queries = 200"):
        Store.create(store.path, dataset, other)


def test_a_store_of_a_newer_version_is_refused(store: Store) -> None:
    info = json.loads((store.path / "store.json").read_text())
    (store.path / "store.json").write_text(json.dumps(info | {"version": 2, "news": 1}))
    with pytest.raises(RunError, match=r"version 2.*\n.*version 1\n.*update habitus"):
        Store.open(store.path)


def test_what_is_no_store_is_refused(tmp_path: Path, dataset: Dataset, tiny: Preset) -> None:
    with pytest.raises(RunError, match=r"holds no store\.json"):
        Store.open(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(RunError, match="exists and is not a store"):
        Store.create(tmp_path, dataset, tiny.evaluate)


@pytest.mark.parametrize("change", ["metric", "recipe", "cut"])
def test_a_hand_edited_record_is_named(store: Store, digest: str, change: str) -> None:
    path = store.cell(digest) / "record.json"
    values = json.loads(path.read_text())
    if change == "metric":
        values["metrics"]["batch/loss"]["value"] -= 0.5
    elif change == "recipe":
        values["recipe"]["train"]["steps"] += 1
    text = json.dumps(values)
    path.write_text(text[: len(text) // 2] if change == "cut" else text)
    with pytest.raises(RunError, match=r"record.json has been changed since it was published"):
        Store.open(store.path).record(digest)


@pytest.mark.parametrize("attempts_left", [False, True])
def test_a_record_that_lost_its_seal_is_refused_and_not_sealed_again(
    store: Store, digest: str, dataset: Dataset, attempts_left: bool
) -> None:
    cell = store.cell(digest)
    values = json.loads((cell / "record.json").read_text())
    values["metrics"]["batch/loss"]["value"] -= 0.5
    (cell / "record.json").write_text(json.dumps(values))
    (cell / "seal.json").unlink()
    with pytest.raises(RunError, match=rf"{digest}/record\.json has no seal\.json"):
        Store.open(store.path).record(digest)
    if attempts_left:  # as if a worker had died while it published
        (cell / "attempts" / "000001-dead").mkdir(parents=True)
        with pytest.raises(RunError, match=rf"{digest}/record\.json has no seal\.json"):
            Worker(store, dataset).work([Job(digest, 4e7)])
    assert not (cell / "seal.json").exists()
