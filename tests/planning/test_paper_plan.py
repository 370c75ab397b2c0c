"""benchmarks/paper_plan.py: what a law cannot bound has an open end."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def paper_plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("paper_plan")


@pytest.mark.parametrize("low, high, expected", [(2.0, 9.0, (2.0, 9.0)), (4.0, math.inf, (3.0, None))])
def test_an_interval_holds_the_planned_value_and_may_be_open(
    paper_plan: Any, low: float, high: float, expected: tuple[float, float | None]
) -> None:
    best = SimpleNamespace(interval=lambda name: (low, high))
    quantity = paper_plan._quantity(best, "params", 3.0, "by hand")
    assert (quantity.low, quantity.high) == expected
