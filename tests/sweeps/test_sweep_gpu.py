"""Cells packed on one GPU: the same Records to rounding as one at a time."""

from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.estimate import device_bytes
from habitus.sweeps.pool import Pool
from habitus.sweeps.preset import Preset
from habitus.sweeps.worker import Worker, WorkerOptions
from tests.sweeps.cells_of_tests import quick_cells, store_with


@pytest.mark.gpu
def test_packed_cells_equal_those_run_alone(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    cells = quick_cells(tiny, facts, 4)
    alone, jobs = store_with(tmp_path / "alone", dataset, tiny, cells)
    options = WorkerOptions(device="cuda", threads=None)
    Worker(alone, dataset, options).work(jobs)
    packed, jobs = store_with(tmp_path / "packed", dataset, tiny, cells)
    Pool(packed, dataset, jobs, options, workers=2, device_bytes=device_bytes("cuda")).run()
    for planned in cells:
        one, other = alone.record(planned.hash), packed.record(planned.hash)
        assert one is not None and other is not None and one.train and other.train
        assert one.hardware["device"] != "cpu"
        assert other.train.loss == pytest.approx(one.train.loss, rel=1e-3)
        assert other.metrics["batch/loss"].value == pytest.approx(one.metrics["batch/loss"].value, rel=1e-3)
