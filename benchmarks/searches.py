"""Events with text: does a model that reads the searches gain what the searches are worth?

    python benchmarks/searches.py --out benchmarks/results/searches-cpu.json
    python benchmarks/searches.py --arms none,shared --device cuda --steps 2000

A log of known probabilities. The next item follows from the last one, p(x | last) = ½ successors + ½ popularity; half
of the items are announced by a search, an event without an item whose text names brand and kind, so that
p(x | last, search) is p(x | last) over the items that match. Both are exact, and so are the losses that no model can
beat with and without the texts, on the very queries that score the runs. Arms: `none` has the searches without their
texts, `own` reads them as the mean of token vectors, `shared` by the items' text encoder, `vector` as a picture would
come, a vector per search. Prints a table and ends with one JSON line.
"""

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from prepare import hardware

ARMS = ("none", "own", "shared", "vector")
NUM_ITEMS, NUM_BRANDS, NUM_KINDS, SUCCESSORS = 400, 20, 10, (0.5, 0.25, 0.15, 0.1)
SEARCHED = 0.5  # of the items
VECTOR = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--users", type=int, default=6_000)
    parser.add_argument("--items-per-user", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    law = Law(given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        log = law.draw(given.users, given.items_per_user)
        runs = {arm: run_arm(arm, law, log, given, Path(scratch)) for arm in given.arms.split(",")}
    result: dict[str, Any] = {
        "benchmark": "searches", "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(),
        "device": given.device, "users": given.users, "steps": given.steps, "arms": runs,
    }  # fmt: skip
    plain = runs.get("none")
    print(f"{'arm':8} {'loss':>8} {'oracle':>8} {'gain':>8} {'oracle':>8} {'of it':>7} {'seconds':>8}")
    for arm, run in runs.items():
        if plain is not None and arm != "none":
            run["gain"], run["oracle_gain"] = plain["loss"] - run["loss"], plain["oracle"] - run["oracle"]
            run["share_of_gain"] = run["gain"] / run["oracle_gain"]
        gains = [f"{run[name]:8.4f}" if name in run else " " * 8 for name in ("gain", "oracle_gain")]
        share = f"{run['share_of_gain']:7.1%}" if "share_of_gain" in run else " " * 7
        print(f"{arm:8} {run['loss']:8.4f} {run['oracle']:8.4f} {' '.join(gains)} {share} {run['seconds']:8.0f}")
    line = json.dumps(result)
    if given.out:
        given.out.write_text(line + "\n", encoding="utf-8")
    print(line)


class Law:
    """The probabilities of the log, and the words of its items."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.random = random
        self.brand, self.kind = random.integers(0, NUM_BRANDS, NUM_ITEMS), random.integers(0, NUM_KINDS, NUM_ITEMS)
        popularity = 1 / np.arange(1, NUM_ITEMS + 1)
        self.popularity = popularity / popularity.sum()
        self.next_item = np.tile(self.popularity / 2, (NUM_ITEMS, 1))  # p(x | last)
        for item in range(NUM_ITEMS):
            followers = random.choice(NUM_ITEMS, len(SUCCESSORS), replace=False)
            self.next_item[item, followers] += np.array(SUCCESSORS) / 2
        self.matches = (self.brand[:, None] == self.brand) & (self.kind[:, None] == self.kind)
        self.vectors = random.standard_normal((NUM_BRANDS, VECTOR)), random.standard_normal((NUM_KINDS, VECTOR))

    def draw(self, users: int, items_per_user: int) -> dict[str, np.ndarray]:
        """Items [users, n] and whether a search announces each."""
        items = np.empty((users, items_per_user), np.int64)
        items[:, 0] = self.random.choice(NUM_ITEMS, users, p=self.popularity)
        cumulated = self.next_item.cumsum(1)
        for place in range(1, items_per_user):
            drawn = self.random.random(users)[:, None]
            items[:, place] = (cumulated[items[:, place - 1]] < drawn).sum(1).clip(max=NUM_ITEMS - 1)
        return {"items": items, "searched": self.random.random(items.shape) < SEARCHED}

    def losses(self, log: dict[str, np.ndarray], users: np.ndarray, *, reads: bool) -> np.ndarray:
        """-log p of the items of some users but the first, by a reader of the searches or by one who does not."""
        last, item = log["items"][users, :-1].ravel(), log["items"][users, 1:].ravel()
        chance = self.next_item[last]
        if reads:
            known = np.where(log["searched"][users, 1:].ravel()[:, None], self.matches[item], True)
            chance = chance * known / (chance * known).sum(1, keepdims=True)
        return -np.log(chance[np.arange(len(item)), item])

    def write(self, log: dict[str, np.ndarray], arm: str, folder: Path) -> dict[str, Any]:
        """The two tables of an arm; returns its schema. The first item of a user has no search: it is no target."""
        folder.mkdir()
        brands, kinds = [f"brand{n:02d}" for n in range(NUM_BRANDS)], [f"kind{n:02d}" for n in range(NUM_KINDS)]
        titles = [f"{brands[b]} {kinds[k]} no{n}" for n, (b, k) in enumerate(zip(self.brand, self.kind, strict=True))]
        pq.write_table(pa.table({"item_id": np.arange(NUM_ITEMS), "title": titles}), folder / "items.parquet")
        items, searched = log["items"], log["searched"].copy()
        searched[:, 0] = False
        rows: dict[str, list[Any]] = {name: [] for name in ("user_id", "position", "item_id", "type", "query")}
        for user, (line, asked) in enumerate(zip(items.tolist(), searched.tolist(), strict=True)):
            for place, (item, is_searched) in enumerate(zip(line, asked, strict=True)):
                brand, kind = self.brand[item], self.kind[item]
                if is_searched:
                    text = f"{kinds[kind]} {brands[brand]}"
                    query = (self.vectors[0][brand] + self.vectors[1][kind]).tolist() if arm == "vector" else text
                    _append(rows, user, 2 * place, None, "search", query)
                _append(rows, user, 2 * place + 1, item, "buy" if place else "first", None)
        pq.write_table(pa.table(rows), folder / "events.parquet")
        fields = {"type": "category"} | ({} if arm == "none" else {"query": "vector" if arm == "vector" else "text"})
        events = {"user": "user_id", "item": "item_id", "timestamp": "position", "time_unit": "order", "no_item": -1}
        return {
            "events": {**events, "fields": fields},
            "items": {"item": "item_id", "fields": {"item_id": "category", "title": "text"}},
            "targets": {"column": "type", "weights": {"buy": 1.0}},
        }


def run_arm(arm: str, law: Law, log: dict[str, np.ndarray], given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Prepare, train and evaluate one arm."""
    import habitus
    from habitus.data import Dataset, PrepareOptions, prepare
    from habitus.events import Schema
    from habitus.recipe import Recipe

    folder = scratch / arm
    schema = Schema.parse(law.write(log, arm, folder), arm)
    seq_len = 2 * given.items_per_user
    options = PrepareOptions(seq_len=seq_len, text_len=12, vocabulary_size=1024, test_share=0, seed=given.seed)
    prepare(str(folder / "events.parquet"), str(folder / "items.parquet"), schema, folder / "data", options)
    dataset = Dataset.open(folder / "data")
    recipe = Recipe.parse(
        {
            "data": {"seq_len": seq_len},
            "model": {
                "joint_dim": 48, "text_len": 12, "text_depth": 1, "width": 64, "depth": 2, "head_dim": 16,
                **({"event_text": "shared"} if arm == "shared" else {}),
            },
            "train": {
                "batch_sequences": 32, "steps": given.steps, "learning_rate": 4e-3, "log_q": True, "seed": given.seed,
                "precision": "fp32",
            },
            "evaluate": {"regimes": ["catalogue"], "queries": 1_000_000, "metrics": ["loss", "ranking"]},
        },
        arm,
    )  # fmt: skip
    run = habitus.train(recipe, dataset, folder / "run", device=given.device)
    begins, ends = dataset.user_parts.part("validation")
    users = dataset.user_ids().to_numpy()[ends > begins]
    oracle = law.losses(log, users, reads=arm != "none")
    metric = run.record.metrics["catalogue/loss"]
    assert metric.n == len(oracle), f"{metric.n} queries and {len(oracle)} targets"
    params, seconds = run.record.params, run.record.seconds
    return {
        "loss": metric.value, "se": metric.se, "oracle": float(oracle.mean()), "queries": metric.n,
        "recall@10": run.record.metrics["catalogue/recall@10"].value, "seconds": seconds.train if seconds else 0.0,
        "embedder_params": params.embedder, "contextualizer_params": params.contextualizer,
    }  # fmt: skip


def _append(rows: dict[str, list[Any]], *values: Any) -> None:
    for column, value in zip(rows.values(), values, strict=True):
        column.append(value)


if __name__ == "__main__":
    main()
