"""Linear and gradient-boosted probes of scikit-learn, fitted to some users and asked about others."""

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from habitus.errors import ConfigError
from habitus.probing.labels import Label

ProbeKind = Literal["linear", "boosted"]
PROBE_KINDS: tuple[ProbeKind, ...] = ("linear", "boosted")
_LOGISTIC_C = [0.001, 0.01, 0.1, 1.0]
_RIDGE_ALPHA = [1.0, 10.0, 100.0, 1000.0, 10_000.0]
_INNER_FOLDS = 3
MIN_FITTED = 2 * _INNER_FOLDS  # users that a probe is fitted to
_TEST_SHARE = 1 / 3  # of rows with times, the latest


def require_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "a probe needs scikit-learn, which is not installed", next_step="pip install 'habitus[probe]'"
        ) from error


class Folds:
    """Who is asked about whom: test users are never fitted to, nor rows later than the test's first.

    Every user is in the test of one fold. Where rows have different times, the latest third is asked about and the
    earlier rows are fitted to, of other users.
    """

    def __init__(self, label: Label, num_folds: int, seed: int) -> None:
        from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

        users, times = label.moments.users, label.moments.times
        _check_number(label, num_folds)
        kind = StratifiedGroupKFold if label.classes else GroupKFold
        splits = kind(num_folds, shuffle=True, random_state=seed).split(users, label.values, users)
        self.fold = np.empty(len(users), np.int64)
        for number, (_, chosen) in enumerate(splits):
            self.fold[chosen] = number
        self.num_folds = num_folds
        self.fitted = np.ones(len(users), bool)
        self.asked = np.ones(len(users), bool)
        self.split_time: int | None = None  # the last time that is fitted to
        if times is not None and times.min() < times.max():
            self.split_time = _split_time(times)
            self.fitted = times <= self.split_time
            self.asked = ~self.fitted

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows to fit to and rows to ask about."""
        for number in range(self.num_folds):
            own = self.fold == number
            yield np.flatnonzero(self.fitted & ~own), np.flatnonzero(self.asked & own)


def _check_number(label: Label, num_folds: int) -> None:
    """Refuse more folds than there are users to divide; of classes, users of the most frequent one."""
    users, of_class = len(np.unique(label.moments.users)), ""
    if label.classes:
        pairs = np.unique(np.column_stack([label.values, label.moments.users]), axis=0)
        users, of_class = int(np.bincount(pairs[:, 0]).max()), " in its most frequent class"
    if num_folds > users:
        raise ConfigError(
            f"--folds is {num_folds}, and label {label.name!r} has {users:,} users{of_class}",
            expected=f"2 to {users:,}",
        )


def _split_time(times: np.ndarray) -> int:
    """The time up to which about two thirds of the rows lie, and never all of them."""
    before_last = times[times < times.max()].max()
    return int(min(np.quantile(times, 1 - _TEST_SHARE, method="lower"), before_last))


def predict(features: np.ndarray, label: Label, folds: Folds, kind: ProbeKind, seed: int) -> np.ndarray:
    """Answers for every row that is asked about, NaN for the others: probabilities [n, classes], or numbers [n, 1]."""
    answers = np.full((len(features), max(1, len(label.classes))), np.nan)
    for fitted, asked in folds:
        if not len(asked):  # of these users none has a late row
            continue
        probe = _fit(
            features[fitted], label.values[fitted], label.moments.users[fitted], bool(label.classes), kind, seed
        )
        if label.classes:
            answers[asked] = 0.0
            answers[np.ix_(asked, probe.classes_)] = probe.predict_proba(features[asked])
        else:
            answers[asked, 0] = probe.predict(features[asked])
    return answers


def _fit(
    features: np.ndarray, values: np.ndarray, users: np.ndarray, classifies: bool, kind: ProbeKind, seed: int
) -> Any:
    if kind == "boosted":
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        model = HistGradientBoostingClassifier if classifies else HistGradientBoostingRegressor
        settings = {"learning_rate": 0.05, "max_iter": 150, "max_leaf_nodes": 15, "early_stopping": False}
        return model(**settings, random_state=seed).fit(features, values)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedGroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    prepared = (SimpleImputer(keep_empty_features=True), StandardScaler())
    if classifies:
        pipeline = make_pipeline(*prepared, LogisticRegression(max_iter=300))
        grid, scoring, inner = {"logisticregression__C": _LOGISTIC_C}, "neg_log_loss", StratifiedGroupKFold
    else:
        pipeline = make_pipeline(*prepared, Ridge())
        grid, scoring, inner = {"ridge__alpha": _RIDGE_ALPHA}, "neg_mean_squared_error", GroupKFold
    search = GridSearchCV(pipeline, grid, scoring=scoring, cv=inner(_INNER_FOLDS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return search.fit(features, values, groups=users)
