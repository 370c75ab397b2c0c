"""Makes horizon_metrics.json: lists and sets of relevant items of 1,000 users, and what RecTools says about them.

Run it in an environment of its own: pip install rectools==0.19.0; python make_horizon_metrics.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
from rectools import Columns
from rectools.metrics import MAP, NDCG, Recall

USERS, ITEMS, LISTED = 1000, 60, 20
CUTOFFS = (1, 10, 20)


def main() -> None:
    draw = np.random.default_rng(23)
    weights = 1 / np.arange(1, ITEMS + 1) ** 0.7
    weights /= weights.sum()
    top = np.stack([draw.choice(ITEMS, LISTED, replace=False, p=weights) for _ in range(USERS)])
    for user in range(0, USERS, 50):  # short lists, as where nearly everything is left out
        top[user, draw.integers(1, LISTED) :] = -1
    sizes = np.minimum(draw.geometric(0.12, USERS), ITEMS)
    relevant = [np.sort(draw.choice(ITEMS, size, replace=False, p=weights)).tolist() for size in sizes]
    user, place = np.nonzero(top >= 0)
    reco = pd.DataFrame({Columns.User: user, Columns.Item: top[user, place], Columns.Rank: place + 1})
    came = pd.DataFrame(
        [(user, item) for user, items in enumerate(relevant) for item in items], columns=[Columns.User, Columns.Item]
    )
    expected = {}
    for k in CUTOFFS:
        measures = {"recall": Recall(k), "ndcg": NDCG(k, divide_by_achievable=True), "map": MAP(k)}
        for name, metric in measures.items():
            per_user = metric.calc_per_user(reco, came).sort_index()
            assert per_user.index.tolist() == list(range(USERS))
            expected[f"{name}@{k}"] = [round(float(value), 13) for value in per_user]
    values = {
        "versions": {name: version(name) for name in ("rectools", "numpy", "pandas")},
        "items": ITEMS,
        "top": top.tolist(),
        "relevant": relevant,
        "expected": expected,
    }
    Path(__file__).with_name("horizon_metrics.json").write_text(json.dumps(values, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
