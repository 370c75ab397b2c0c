"""Training events with the validation events among them: everything before the test, and nothing of it."""

from dataclasses import replace

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.recipe import DataRecipe
from tests.data.tables import SMALL, make_events, prepared

OPTIONS = replace(SMALL, validation_share=0.2, test_share=0.2)


@pytest.fixture(scope="module", params=["user", "time", "last"])
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("log"), make_events(150), options=replace(OPTIONS, split=request.param))


def events(dataset: Dataset, side: str = "train") -> np.ndarray:
    """The rows of the log in a side's windows."""
    rows = dataset.event_rows(side, np.arange(dataset.counts(side).windows))  # type: ignore[arg-type]
    return np.unique(rows[rows >= 0])


def test_all_events_before_the_test_train_and_none_of_the_test_does(log: Dataset) -> None:
    whole = log.with_validation()
    before_test = log.user_parts.part("validation")[1]
    rows = [
        np.arange(start, start + length)
        for start, length in zip(log.user_offsets, before_test, strict=False)
        if length > 1  # one event alone predicts nothing
    ]
    expected = np.concatenate(rows)
    trained = events(whole)
    # A history's last stretch may be a single event, which stands in no window.
    assert set(trained) <= set(expected)
    assert len(expected) - len(trained) == whole.counts("train").left_out - int((before_test == 1).sum())
    assert set(events(log)) < set(trained)
    assert whole.item_train_counts.sum() == before_test.sum()
    assert whole.item_train_counts.sum() > log.item_train_counts.sum()


def test_other_sides_and_the_dataset_itself_stay_as_they_are(log: Dataset) -> None:
    counts = log.counts("train")
    whole = log.with_validation()
    assert log.counts("train") == counts
    for side in ("validation", "test"):
        assert whole.counts(side) == log.counts(side)
    assert whole.with_validation(False).counts("train") == counts
    assert whole.checksum == log.checksum
    assert log.training_view(DataRecipe(seq_len=log.seq_len, include_validation=True)).counts("train") == whole.counts(
        "train"
    )
    assert whole.with_users(1 / 2).counts("train").users < whole.counts("train").users


def test_the_key_is_absent_where_it_says_nothing() -> None:
    assert "include_validation" not in DataRecipe(seq_len=8).to_values()
    assert DataRecipe(seq_len=8, include_validation=True).to_values()["include_validation"] is True
