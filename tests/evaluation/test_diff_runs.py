"""`habitus diff RUN RUN --data DATASET`: both runs on the same queries, paired."""

from collections.abc import Callable
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.studies import compare, open_subject


def test_two_runs_are_evaluated_and_paired(dataset: Dataset, make_run: Callable[[int], Path]) -> None:
    first, second = make_run(1), make_run(60)
    rows = {
        one.metric: one
        for one in compare(open_subject(first, dataset=dataset), open_subject(second), dataset=dataset).metrics
    }
    loss = rows["catalogue/loss"]
    assert loss.how == "paired" and loss.low is not None and loss.high is not None
    assert loss.low < loss.difference < loss.high < 0  # sixty steps are better than one
    assert loss.difference == pytest.approx(loss.second - loss.first)
    one, other = evaluate_runs([first, second], dataset, EvaluateOptions(regimes=("catalogue",)))
    errors = [evaluation.metrics["catalogue/loss"].se or 0.0 for evaluation in (one, other)]
    unpaired = 1.96 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    assert (loss.high - loss.low) / 2 < unpaired  # what pairing is for
