"""A horizon as the metric of a study: named, measured by every run, and refused where the log has no cut."""

from pathlib import Path

import pytest

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.errors import ConfigError, DataError
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.recipe import EvaluateRecipe
from habitus.store import direction_of, horizon_of, read_store_info, regime_twins
from habitus.studies import StudyOptions, study
from habitus.studies.baseline import best_baseline, check_horizon
from habitus.studies.options import check_metric
from habitus.studies.study import _measuring
from habitus.sweeps import EvaluationSettings, load_preset
from habitus.sweeps.store import Store

MICRO = Path(__file__).parent / "micro.toml"
METRIC = "horizon7d/ndcg@10"


@pytest.fixture(scope="module")
def by_time(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    world = World(WorldConfig(num_users=300, num_items=60, events_per_user=12, seed=3))
    options = PrepareOptions(
        seq_len=16, text_len=4, vocabulary_size=300, split="time", validation_share=0.2, test_share=0, threads=1
    )
    path = tmp_path_factory.mktemp("by-time") / "dataset"
    prepare_world(world, schema_of(world), path, options, lambda *_: None)
    return Dataset.open(path)


def test_horizons_are_metrics_by_name() -> None:
    for metric in (METRIC, "horizon28d_new/recall@100", "horizon36h/map@5"):
        check_metric(metric)
        assert direction_of(metric) == "max"
    for metric in (
        "horizon7d/loss",
        "horizon7d/ndcg@7",
        "horizon/ndcg@10",
        "horizon7/ndcg@10",
        "horizon7d/ndcg@10/first",
    ):
        with pytest.raises(ConfigError, match="is not recorded"):
            check_metric(metric)
    assert (horizon_of(METRIC), horizon_of("catalogue/ndcg@10")) == ("7d", None)
    assert regime_twins(METRIC) == [METRIC, "catalogue/ndcg@10", "batch/ndcg@10"]
    assert regime_twins("batch/ndcg@10") == ["batch/ndcg@10", "catalogue/ndcg@10"]


def test_every_run_of_such_a_study_measures_it(by_time: Dataset, tmp_path: Path) -> None:
    preset = load_preset(str(MICRO))
    assert _measuring(preset, "catalogue/ndcg@10") == preset
    settings = _measuring(preset, METRIC).evaluate
    assert EvaluateRecipe(**settings.to_values()).horizons == ("7d",)
    for _ in range(2):  # begun, then continued
        Store.create(tmp_path / "store", by_time, settings)
    assert read_store_info(tmp_path / "store").evaluation.horizons == ("7d",)
    assert "horizons" not in EvaluationSettings().to_values()  # stores of before stay as they are


def test_the_best_baseline_is_that_of_the_horizon(by_time: Dataset) -> None:
    best = best_baseline(by_time, METRIC, EvaluationSettings())
    assert best is not None
    assert best.scorer != "oracle"
    assert 0 < best.value < 1


def test_a_log_without_a_cut_is_refused_before_anything_is_spent(by_time: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="covers"):
        check_horizon(by_time, "horizon9999d/ndcg@10")
    with pytest.raises(DataError, match="covers"):
        study(tmp_path / "out", StudyOptions(data=by_time.path, preset=str(MICRO), metric="horizon9999d/ndcg@10"))
    assert not (tmp_path / "out").exists()
