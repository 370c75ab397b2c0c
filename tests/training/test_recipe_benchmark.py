"""benchmarks/recipe.py reaches into how models begin: it should notice when that moves."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from habitus.data import Dataset
from habitus.model import BehaviorModel
from tests.training.conftest import small_recipe

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recipe.py"


@pytest.fixture
def benchmark_recipe() -> Any:
    spec = spec_from_file_location("benchmark_recipe", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    module.use_init(module.DEFAULT)
    del sys.modules[spec.name]


def input_and_output(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices into and out of a fresh contextualizer, the latter transposed, both as directions."""
    contextualizer = BehaviorModel(dataset.fields, small_recipe().model).contextualizer
    matrices = (contextualizer.input.weight.detach(), contextualizer.output.weight.detach().T)
    first, second = (matrix / matrix.norm() for matrix in matrices)
    return first, second


def test_every_variant_begins_as_it_says(dataset: Dataset, benchmark_recipe: Any) -> None:
    for variant in benchmark_recipe.VARIANTS:
        benchmark_recipe.use_init(variant)
        model = BehaviorModel(dataset.fields, small_recipe().model)
        first, second = input_and_output(dataset)
        assert torch.allclose(first, second) == (variant.start == "ours"), variant.name
        if variant.start == "plain":
            assert model.contextualizer.output.weight.std().item() == pytest.approx(0.02, rel=0.2)
        gain = 1.0 if variant.start == "plain" else variant.gain or 0.1
        assert model.contextualizer.gain.item() == pytest.approx(gain), variant.name
