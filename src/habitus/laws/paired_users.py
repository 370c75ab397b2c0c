"""Two runs of a store on the same queries: their difference in a metric, user by user."""

from pathlib import Path

import numpy as np

from habitus.store import EVALUATION_SLICE, EVALUATIONS

_GAINS = {
    "recall": lambda rank: np.ones(len(rank)),
    "ndcg": lambda rank: 1 / np.log2(rank + 1),
    "mrr": lambda rank: 1 / rank,
}


class PairedUsers:
    """The values per query that `habitus evaluate STORE --keep NAME` leaves beside its metrics."""

    def __init__(self, store: Path) -> None:
        self.files = sorted((store / EVALUATIONS).glob("*.parquet")) if store.is_dir() else []

    def error(self, first: str, second: str, metric: str) -> float | None:
        """The standard error, over users, of the mean difference of two runs (by recipe hash) in a metric; None where
        no file holds both."""
        plain, _, name = metric.partition(f"/{EVALUATION_SLICE}")
        for path in self.files:
            if not name or path.stem == name:
                values = [self._values(path, recipe_hash, plain) for recipe_hash in (first, second)]
                if all(one is not None and len(one[0]) for one in values):
                    (users, a), (others, b) = values  # type: ignore[misc]
                    if np.array_equal(users, others):
                        return clustered_error(a - b, users)
        return None

    def _values(self, path: Path, recipe_hash: str, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Users and values of one run, in the order of the queries; None for metrics without a value per query."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        regime, _, bare = metric.partition("/")
        kind, _, cutoff = bare.partition("@")
        if "/" in bare or not (bare == "loss" or (kind in _GAINS and cutoff.isdigit())):
            return None
        column = "loss" if bare == "loss" else "rank"
        table = pq.read_table(path, columns=["scorer", "regime", "user", "event", column])
        of_run = pc.and_(pc.ends_with(table["scorer"], recipe_hash), pc.equal(table["regime"], regime))
        table = table.filter(of_run).sort_by("event")
        values = table[column].to_numpy().astype(np.float64)
        if column == "rank":
            values = np.where(values <= int(cutoff), _GAINS[kind](values), 0.0)
        return table["user"].to_numpy(), values


def clustered_error(difference: np.ndarray, users: np.ndarray) -> float | None:
    """The standard error of a mean whose queries count by user; None with fewer than two users."""
    _, owner = np.unique(users, return_inverse=True)
    num_users = int(owner.max()) + 1 if len(owner) else 0
    if num_users < 2:
        return None
    off = np.bincount(owner, difference - difference.mean())
    return float(np.sqrt((off**2).sum() * num_users / (num_users - 1)) / len(difference))
