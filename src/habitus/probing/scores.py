"""AUC, accuracy and R² with users drawn again: one set of draws for everything that is compared."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

_WEIGHTS = 2_000_000  # that are held at once
_INTERVAL = (0.025, 0.975)


class Interval(NamedTuple):
    """A value, and the 95% interval of it over users."""

    value: float
    low: float
    high: float


class Answers(NamedTuple):
    """What was asked, row by row."""

    values: np.ndarray  # int64 classes or float64 numbers [n]
    users: np.ndarray  # int64 [n]
    folds: np.ndarray  # int64 [n]: probabilities of different folds come from different fits
    num_classes: int  # 0 where numbers are predicted


Metric = Callable[[Answers, np.ndarray, np.ndarray], np.ndarray]  # answers, predictions, weights [draws, n] → [draws]


def metrics_of(num_classes: int) -> dict[str, Metric]:
    return {"AUC": _auc, "accuracy": _accuracy} if num_classes else {"R²": _r_squared}


def draw_scores(
    answers: Answers, predictions: Mapping[str, np.ndarray], *, draws: int, seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """Per metric and predictor the value, then one per draw of the users, float64 [1 + draws]."""
    _, place = np.unique(answers.users, return_inverse=True)
    num_users = int(place.max()) + 1
    random = np.random.default_rng(seed)
    at_once = max(1, _WEIGHTS // len(place))
    metrics = metrics_of(answers.num_classes)
    parts: dict[str, dict[str, list[np.ndarray]]] = {name: {one: [] for one in predictions} for name in metrics}
    counts = np.ones((1, num_users), np.int64)  # the first draw is everyone once
    done = 0
    while done <= draws:
        weights = counts[:, place].astype(np.float64)
        for name, metric in metrics.items():
            for one, predicted in predictions.items():
                parts[name][one].append(metric(answers, predicted, weights))
        done += len(counts)
        size = min(at_once, draws + 1 - done)
        counts = random.multinomial(num_users, np.full(num_users, 1 / num_users), size)
    return {name: {one: np.concatenate(values) for one, values in by_one.items()} for name, by_one in parts.items()}


def interval(values: np.ndarray) -> Interval:
    """The first of the values, and where 95% of the others lie."""
    low, high = np.nanquantile(values[1:], _INTERVAL)
    return Interval(float(values[0]), float(low), float(high))


def _auc(answers: Answers, predicted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How often a row of a class gets more of it than a row of another class, ties by half, within folds.

    Of more than two classes each stands against all others, and counts as often as it occurs.
    """
    classes = [1] if answers.num_classes == 2 else range(answers.num_classes)
    won, weight = np.zeros(len(weights)), np.zeros(len(weights))
    for code in classes:
        is_class = answers.values == code
        pairs_won, pairs = np.zeros(len(weights)), np.zeros(len(weights))
        for fold in np.unique(answers.folds):
            rows = np.flatnonzero(answers.folds == fold)
            order = rows[np.argsort(predicted[rows, code], kind="stable")]
            scores = predicted[order, code]
            starts = np.flatnonzero(np.concatenate([[True], scores[1:] > scores[:-1]]))  # of ties
            inside = np.add.reduceat(weights[:, order] * is_class[order], starts, axis=1)
            outside = np.add.reduceat(weights[:, order] * ~is_class[order], starts, axis=1)
            below = np.cumsum(outside, axis=1) - outside
            pairs_won += (inside * (below + outside / 2)).sum(1)
            pairs += inside.sum(1) * outside.sum(1)
        share = (weights * is_class).sum(1)
        present = pairs > 0
        won[present] += share[present] * pairs_won[present] / pairs[present]
        weight[present] += share[present]
    return np.divide(won, weight, out=np.full(len(weights), np.nan), where=weight > 0)


def _accuracy(answers: Answers, predicted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    right = predicted.argmax(1) == answers.values
    return np.asarray((weights * right).sum(1) / weights.sum(1))


def _r_squared(answers: Answers, predicted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """1 less the squared error over that of the mean of the rows that were asked."""
    centre = answers.values.mean()  # so that the difference of squares keeps its digits
    values, total = answers.values - centre, weights.sum(1)
    around = (weights * values**2).sum(1) - (weights * values).sum(1) ** 2 / total
    error = (weights * (values + centre - predicted[:, 0]) ** 2).sum(1)
    return 1 - np.divide(error, around, out=np.full(len(total), np.nan), where=around > 0)
