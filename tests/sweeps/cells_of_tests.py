"""Cells that train in a fraction of a second, and stores that hold them."""

from pathlib import Path

from habitus.data import Dataset
from habitus.record import Record
from habitus.sweeps.attempts import same_measurement
from habitus.sweeps.cells import DatasetFacts, PlannedRun
from habitus.sweeps.design import design_axis
from habitus.sweeps.preset import Preset
from habitus.sweeps.request import SweepRequest
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job


def quick_cells(tiny: Preset, facts: DatasetFacts, count: int) -> list[PlannedRun]:
    """Different runs of about ten steps each."""
    preset = tiny.model_copy(update={"allocation": tiny.allocation.model_copy(update={"regimes": ("batch",)})})
    smallest = design_axis("allocation", facts, preset, request=SweepRequest((4e7,), 1)).cells[0]
    return [smallest.with_learning_rate(1e-3 * (1 + number), facts) for number in range(count)]


def store_with(path: Path, dataset: Dataset, preset: Preset, cells: list[PlannedRun]) -> tuple[Store, list[Job]]:
    store = Store.create(path, dataset, preset.evaluate)
    for planned in cells:
        store.add(planned.hash, planned.recipe)
    jobs = [Job(p.hash, p.row.flops_budget, steps=p.recipe.train.steps) for p in cells]
    return store, jobs


def assert_equal_stores(one: Store, other: Store, cells: list[PlannedRun]) -> None:
    """Every cell has exactly one Record in both, equal but for times, and nothing is left lying about."""
    for planned in cells:
        records = []
        for store in (one, other):
            assert store.settled(planned.hash), planned.row.cell_id
            cell = store.cell(planned.hash)
            left = {path.name for path in cell.iterdir()}
            assert left <= {"recipe.toml", "record.json", "seal.json", "journal.jsonl", "bundle", "catalogue"}, left
            record = store.record(planned.hash)
            assert isinstance(record, Record)
            records.append(record)
        assert records[0].status == "done", records[0].reason
        assert same_measurement(*records), planned.row.cell_id
