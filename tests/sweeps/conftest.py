"""The tiny preset's world, prepared once."""

from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.sweeps import preset_dataset
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.preset import Preset, load_preset


@pytest.fixture(scope="session")
def tiny() -> Preset:
    """With one seed of every cell: a test that is about seeds asks for them."""
    preset = load_preset("tiny")
    once = {name: preset.axis(name).model_copy(update={"replicates": 1}) for name in ("allocation", "negatives")}
    return preset.model_copy(update=once)


@pytest.fixture(scope="session")
def dataset(tiny: Preset, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path: Path = tmp_path_factory.mktemp("tiny") / "dataset"
    return preset_dataset(tiny, path, seed=1)


@pytest.fixture(scope="session")
def facts(dataset: Dataset) -> DatasetFacts:
    return DatasetFacts.of(dataset)
