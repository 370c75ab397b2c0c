"""A temperature changes probabilities as it changes the full distribution, and neither scores nor their order."""

from pathlib import Path

import numpy as np
import pytest

from habitus.errors import ConfigError
from habitus.serving import Retriever
from habitus.serving.schemas import RecommendRequest


@pytest.mark.parametrize("which", ["trained_run", "copying_run"])
def test_probabilities_are_those_of_scores_divided_by_the_temperature(
    which: str, request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(which)
    history = [{"item_id": item} for item in (3, 8, 3, 21)]
    asked = RecommendRequest.model_validate({"history": history, "k": 300})
    plain, warm = (
        Retriever.open(run, device="cpu", read_only=True, temperature=one).recommend([asked])[0] for one in (1.0, 1.6)
    )
    assert [item.item_id for item in warm.items] == [item.item_id for item in plain.items]
    scores = np.array([item.score for item in plain.items], np.float64)
    np.testing.assert_allclose([item.score for item in warm.items], scores)
    assert len(scores) == 300  # the whole catalogue, so that the sum can be written out
    expected = np.exp(scores / 1.6) / np.exp(scores / 1.6).sum()
    np.testing.assert_allclose([item.probability for item in warm.items], expected, rtol=1e-4)
    few = RecommendRequest.model_validate({"history": history, "k": 5})
    [short] = Retriever.open(run, device="cpu", read_only=True, temperature=1.6).recommend([few])
    np.testing.assert_allclose([item.probability for item in short.items], expected[:5], rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), 1e9])
def test_temperatures_that_mean_nothing_are_refused(trained_run: Path, temperature: float) -> None:
    with pytest.raises(ConfigError, match="the temperature is"):
        Retriever.open(trained_run, device="cpu", read_only=True, temperature=temperature)
