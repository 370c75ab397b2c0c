"""Times and memory of cells before they run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.record import Params, Record, Seconds, TrainLosses
from habitus.sizing import count_evaluations, wall_seconds
from habitus.sizing.speed import _non_negative
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.design import design_axis
from habitus.sweeps.estimate import speed_of_store
from habitus.sweeps.pool import _SharedMemory
from habitus.sweeps.preset import Preset
from habitus.sweeps.request import SweepRequest
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job
from tests.sealing import seal_records
from tests.sweeps.cells_of_tests import quick_cells


def test_speeds_are_recovered_from_records(tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts) -> None:
    cells = design_axis("depth", facts, tiny, request=SweepRequest(allow_repeats=True)).cells
    store = Store.create(tmp_path / "store", dataset, tiny.evaluate)
    assert speed_of_store(store, "cpu", facts.inputs).source.startswith("assumed")
    for planned in cells:
        store.add(planned.hash, planned.recipe)
        seconds = 0.004 * planned.cell.steps + planned.cell.executed_flops / 3e9
        Record(
            recipe=planned.recipe,
            recipe_hash=planned.hash,
            dataset_checksum=dataset.checksum,
            status="done",
            params=Params(embedder=1, contextualizer=1, vocabulary=1),
            train=TrainLosses(in_batch_loss=1, loss=1),
            steps=planned.cell.steps,
            hardware={"device": "cpu"},
            seed=0,
            seconds=Seconds(warmup=0.5, train=seconds, evaluate=0.25),
        ).write(store.cell(planned.hash) / "record.json")
    seal_records(store.path)
    speed = speed_of_store(store, "cpu", facts.inputs)
    assert speed.source == "measured on 15 Records of this store"
    assert (speed.per_step, speed.flops_per_second, speed.evaluate) == pytest.approx((0.004, 3e9, 0.25))
    assert speed_of_store(store, "cuda", facts.inputs).source.startswith("assumed")  # none of those ran on a GPU


def test_no_coefficient_is_negative() -> None:
    columns = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert _non_negative(columns, np.array([1.0, 2.0, 3.0])) == pytest.approx((1.0, 0.0), abs=1e-12)
    assert _non_negative(columns, np.array([0.5, 2.0, 3.5])) == pytest.approx((15.0 / 14.0, 0.0))  # the line dips


def test_wall_time_is_shared_but_not_below_the_longest_run() -> None:
    assert wall_seconds([4.0, 4.0, 4.0], 2) == 6.0
    assert wall_seconds([10.0, 1.0], 8) == 10.0
    assert wall_seconds([], 2) == 0.0


def test_evaluations_during_a_run_are_counted(tiny: Preset, facts: DatasetFacts) -> None:
    recipe = quick_cells(tiny, facts, 1)[0].recipe
    train = recipe.train.model_copy(update={"steps": 100})
    often = recipe.evaluate.model_copy(update={"every": 10})
    assert count_evaluations(recipe.model_copy(update={"train": train})) == 1
    assert count_evaluations(recipe.model_copy(update={"train": train, "evaluate": often})) == 10  # 10, 20, … 90, 100


def test_cells_are_admitted_while_their_bytes_fit() -> None:
    gib = 1 << 30
    reserved = [0, 0, 0]
    first, second, third = (_SharedMemory(reserved, number, 10 * gib) for number in range(3))
    job = Job("a", 1.0, bytes=2 * gib)  # 3.3 GiB with what a process and its allocator take
    assert first.enter(job, alone=False) and second.enter(job, alone=False)
    assert not third.enter(replace(job, bytes=3 * gib), alone=False)
    assert not third.enter(job, alone=True)
    first.leave()
    second.leave()
    assert third.enter(job, alone=True) and not first.enter(job, alone=False)
    third.leave()
    assert first.enter(replace(job, bytes=99 * gib), alone=False)  # larger than the device: alone, and it may fail
    assert not second.enter(job, alone=False)


def test_further_evaluations_of_a_run_are_cheap_on_a_gpu_only(tiny: Preset, facts: DatasetFacts) -> None:
    cell = quick_cells(tiny, facts, 1)[0].cell
    cpu, cuda = (speed_of_store(None, kind, facts.inputs) for kind in ("cpu", "cuda"))
    assert cpu.seconds(cell, 31) - cpu.seconds(cell, 1) == pytest.approx(30 * cpu.evaluate)
    assert cuda.seconds(cell, 31) - cuda.seconds(cell, 1) == pytest.approx(1.5 * cuda.evaluate)  # 30 twentieths
