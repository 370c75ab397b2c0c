"""A toy GPU, metric, optimizer and field kind, each added through one table and what is truly new."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import habitus as hb
from habitus.errors import ConfigError
from habitus.evaluation.baselines import Popularity
from habitus.evaluation.evaluation import EvaluateOptions, evaluate
from habitus.evaluation.metrics import RANKING_METRICS
from habitus.recipe import OPTIMIZERS, OptimizerKind, Recipe
from habitus.store import GPUS, METRICS, Gpu, MetricKind, direction_of, gpu_reported
from habitus.training.optimizers import HIDDEN_RULES

RECIPE: dict[str, Any] = {
    "data": {"seq_len": 32},
    "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 16, "depth": 1, "head_dim": 8},
    "train": {"batch_sequences": 8, "steps": 4, "learning_rate": 1e-2, "precision": "fp32", "optimizer": "signs"},
    "evaluate": {"queries": 50},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> hb.Dataset:
    prepared = hb.world(
        tmp_path_factory.mktemp("toys") / "world", seq_len=32, num_users=200, num_items=60, events_per_user=12
    )
    assert isinstance(prepared, hb.Dataset)
    return prepared


def test_a_gpu_is_a_line_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not a GPU that habitus knows"):
        hb.plan(1e17, gpu="t1000")
    monkeypatch.setitem(GPUS, "t1000", Gpu("t1000", "T1000", gibibytes=10, peak_tflops=989))
    ours, reference = hb.plan(1e17, gpu="T1000"), hb.plan(1e17, gpu="h200")
    assert ours["hours"].value == pytest.approx(reference["hours"].value, rel=0.5)  # the same peak
    assert ours.memory[0].device_bytes == int(10 * 2**30 * 0.88)
    assert gpu_reported("NVIDIA T1000 8GB") is GPUS["t1000"]  # what training shows a share of


def test_a_metric_is_a_line_and_a_function(
    dataset: hb.Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(METRICS, "halves", MetricKind("halves", "max", "ranking", at_cutoff=True))
    monkeypatch.setitem(RANKING_METRICS, "halves", lambda ranks, k: np.where(ranks <= k, 0.5**ranks, 0.0))
    evaluation = evaluate(dataset, Popularity(dataset), EvaluateOptions(queries=50))
    recall, halves = (evaluation.metrics[f"catalogue/{name}@10"].value for name in ("recall", "halves"))
    assert 0 < halves <= recall / 2
    assert direction_of("catalogue/halves@10") == "max"
    study = (Path(__file__).parents[1] / "docs" / "studies" / "h200-standard" / "runs.csv").read_text()
    (tmp_path / "runs.csv").write_text(study.replace("catalogue/mrr@10", "catalogue/halves@10"))
    laws = hb.fit(tmp_path / "runs.csv", ["catalogue/halves@10"])
    assert laws.metrics == ("catalogue/halves@10",)
    assert laws["size_optimum"].metric == "catalogue/halves@10"


def test_an_optimizer_is_a_line_and_its_update(
    dataset: hb.Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved: list[str] = []

    class Signs:
        """Moves every matrix of a layer by the signs of its gradient."""

        def __init__(self, _optimizer: Any, infos: Sequence[Any]) -> None:
            self.infos = infos

        def step(self, lr: float | Tensor) -> None:
            for info in self.infos:
                moved.append(info.name)
                info.parameter.data -= lr * torch.sign(info.parameter.grad)

    with pytest.raises(ConfigError, match="not an optimizer"):
        Recipe.parse(RECIPE, "test")
    monkeypatch.setitem(OPTIMIZERS, "signs", OptimizerKind(hidden_moments=0))
    monkeypatch.setitem(HIDDEN_RULES, "signs", Signs)
    run = hb.train(RECIPE, dataset, out=tmp_path / "run", device="cpu")
    assert run.record.status == "done"
    assert len(moved) == 4 * len(set(moved)) > 0  # every hidden matrix, at every step
    adamw = {**RECIPE, "train": {**RECIPE["train"], "optimizer": "adamw"}}
    assert hb.size(RECIPE, dataset=dataset).bytes["optimizer"] < hb.size(adamw, dataset=dataset).bytes["optimizer"]


# A toy field kind is followed from file to batch in tests/data/test_kinds.py.
