"""Makes peer_metrics.json: lists, targets and what RecTools and scikit-learn say about them.

Run it in an environment of its own: pip install rectools scikit-learn; python make_peer_metrics.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
from rectools import Columns
from rectools.metrics import (
    MAP,
    AvgRecPopularity,
    HitRate,
    IntraListDiversity,
    MeanInvUserFreq,
    PairwiseHammingDistanceCalculator,
    Precision,
)
from rectools.metrics.distances import PairwiseDistanceCalculator
from sklearn.metrics import roc_auc_score

USERS, ITEMS, QUERIES, LISTED = 40, 30, 25, 10
CUTOFFS = (1, 3, 5, 10)


class CosineDistances(PairwiseDistanceCalculator):
    """1 - cosine of the items' vectors."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def _get_distances_for_item_pairs(self, items_0, items_1):
        return 1 - (self.vectors[np.asarray(items_0)] * self.vectors[np.asarray(items_1)]).sum(axis=1)


def main() -> None:
    draw = np.random.default_rng(7)
    weights = 1 / np.arange(1, ITEMS - 1)  # the last two items are in no training event
    events = pd.DataFrame(
        {
            Columns.User: draw.integers(0, USERS, 400),
            Columns.Item: draw.choice(ITEMS - 2, 400, p=weights / weights.sum()),
        }
    )
    codes = np.stack([draw.integers(0, size, ITEMS) for size in (3, 5, 12)], axis=1)
    vectors = draw.normal(size=(ITEMS, 6)).round(3)
    scores = draw.normal(size=(QUERIES, ITEMS)).round(6)
    targets = draw.integers(0, ITEMS, QUERIES)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :LISTED]
    top[3, 4:], top[8, 1:] = -1, -1  # two short lists
    query, place = np.nonzero(top >= 0)
    reco = pd.DataFrame({Columns.User: query, Columns.Item: top[query, place], Columns.Rank: place + 1})
    came = pd.DataFrame({Columns.User: np.arange(QUERIES), Columns.Item: targets})
    features = pd.DataFrame(codes, index=pd.RangeIndex(ITEMS, name=Columns.Item))
    hamming = PairwiseHammingDistanceCalculator(features)
    expected: dict[str, list[float]] = {}
    for k in CUTOFFS:
        for name, metric in (("hit_rate", HitRate(k)), ("precision", Precision(k)), ("map", MAP(k))):
            expected[f"{name}@{k}"] = ordered(metric.calc_per_user(reco, came))
        expected[f"novelty@{k}"] = ordered(MeanInvUserFreq(k).calc_per_user(reco, events))
        expected[f"popularity@{k}"] = ordered(AvgRecPopularity(k, normalize=True).calc_per_user(reco, events))
        expected[f"diversity@{k}"] = ordered(IntraListDiversity(k, hamming).calc_per_user(reco))
        expected[f"vector_diversity@{k}"] = ordered(IntraListDiversity(k, CosineDistances(vectors)).calc_per_user(reco))
    is_target = np.arange(ITEMS) == targets[:, None]
    expected["auc"] = [float(roc_auc_score(*row)) for row in zip(is_target, scores, strict=True)]
    values = {
        "versions": {name: version(name) for name in ("rectools", "scikit-learn", "numpy", "pandas")},
        "cutoffs": CUTOFFS,
        "train_users": events[Columns.User].tolist(),
        "train_items": events[Columns.Item].tolist(),
        "codes": codes.tolist(),
        "vectors": vectors.tolist(),
        "scores": scores.tolist(),
        "targets": targets.tolist(),
        "top": top.tolist(),
        "expected": expected,
    }
    Path(__file__).with_name("peer_metrics.json").write_text(json.dumps(values) + "\n")


def ordered(per_user: pd.Series) -> list[float]:
    """By query; RecTools leaves out users whose list is empty, of which there are none."""
    return [float(value) for value in per_user.sort_index()]


if __name__ == "__main__":
    main()
