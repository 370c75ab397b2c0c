"""Are a model's vectors worth more than aggregates made by hand? A probe on each, and on both, says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from habitus.data import Dataset
from habitus.errors import ConfigError, DataError
from habitus.evaluation import check_dataset
from habitus.exporting import Moments, embed_users, mean_item_vectors, parse_time
from habitus.probing.aggregates import aggregate
from habitus.probing.estimators import MIN_FITTED, Folds, ProbeKind, predict, require_sklearn
from habitus.probing.labels import Label, Task, check_label, churn_label, is_churn, read_labels
from habitus.probing.scores import Answers, draw_scores, interval
from habitus.progress import Progress
from habitus.serving import Retriever
from habitus.store import RECORD_FILE, read_run_record
from habitus.typed import Typed

FeatureSet = Literal["vectors", "aggregates", "both"]
FEATURE_SETS: tuple[FeatureSet, ...] = ("vectors", "aggregates", "both")
_COMPARED: tuple[tuple[FeatureSet, FeatureSet], ...] = (("vectors", "aggregates"), ("both", "aggregates"))


@dataclass(frozen=True)
class ProbeOptions:
    """What is predicted, and how."""

    labels: str | Path | None = None  # a file with users, perhaps times, and labels
    names: tuple[str, ...] = ()  # its columns, or churn:28d; without any, all columns of the file
    at: str | None = None  # a time for all rows of a file without times
    cuts: int = 4  # times at which churn is asked
    task: Task | None = None  # classification or regression; by default as the column's type says
    probe: ProbeKind = "linear"
    folds: int = 5
    draws: int = 1000  # of the users, for intervals
    seed: int = 0
    device: str = "auto"


class ProbeScore(Typed):
    """A metric of one set of features, with its 95% interval over users."""

    features: FeatureSet
    metric: str
    value: float
    low: float
    high: float


class ProbeDifference(Typed):
    """A metric of the first set of features less that of the second, over the same draws of users."""

    first: FeatureSet
    second: FeatureSet
    metric: str
    value: float
    low: float
    high: float


class ProbeResult(Typed):
    """One label."""

    run: str
    label: str
    task: Task
    classes: tuple[str, ...] = Field((), description="Empty where a number is predicted.")
    probe: ProbeKind
    folds: int
    rows: int = Field(description="With a label and a history.")
    users: int
    asked_rows: int = Field(description="Rows that were predicted: all, or of several times the latest third.")
    asked_users: int
    split_time: int | None = Field(None, description="The last time that was fitted to; absent without several times.")
    num_vectors: int = Field(description="Features that are the model's.")
    num_aggregates: int = Field(description="Features made by hand.")
    chance: dict[str, float] = Field(description="By metric, of always the same answer.")
    scores: tuple[ProbeScore, ...]
    differences: tuple[ProbeDifference, ...]
    left_out: dict[str, int] = Field(default_factory=dict, description="Rows, by reason.")
    trained_until: int | None = Field(None, description="Time of the model's last training event.")
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The result for people."""
        what = f"{len(self.classes)} classes" if self.classes else "a number"
        asked = f", {self.asked_rows:,} later ones of {self.asked_users:,} users asked" if self.split_time else ""
        lines = [f"{self.label} ({what}): {self.rows:,} rows of {self.users:,} users{asked}; {self.probe} probe"]
        metrics = list(self.chance)
        lines.append(f"  {'':22}" + "".join(f"  {name:26}" for name in metrics).rstrip())
        rows: dict[str, dict[str, str]] = {"always the same": {m: f"{self.chance[m]:.4f}" for m in metrics}}
        counts = {"vectors": self.num_vectors, "aggregates": self.num_aggregates}
        for score in self.scores:
            count = f" ({counts[score.features]})" if score.features in counts else ""
            cell = f"{score.value:.4f} [{score.low:.4f}, {score.high:.4f}]"
            rows.setdefault(score.features + count, {})[score.metric] = cell
        for one in self.differences:
            cell = f"{one.value:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"
            rows.setdefault(f"{one.first} − {one.second}", {})[one.metric] = cell
        lines += [
            f"  {name:22}" + "".join(f"  {cells[m]:26}" for m in metrics).rstrip() for name, cells in rows.items()
        ]
        lines += [f"  left out: {count:,} rows: {reason}" for reason, count in self.left_out.items()]
        return [*lines, *(f"  warning: {text}" for text in self.warnings)]

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def probe(
    run: str | Path, data: str | Path, options: ProbeOptions | None = None, progress: Progress | None = None
) -> list[ProbeResult]:
    """A result per label: how well vectors, aggregates and both predict it, and the differences between them.

    The model is used as it is: nothing of it is fitted to labels, and only events before a label's time enter.
    """
    options, progress = options or ProbeOptions(), progress or (lambda *_: None)
    require_sklearn()
    if options.folds < 2 or options.draws < 100:
        raise ConfigError(
            f"folds are {options.folds} and draws {options.draws}", expected="at least 2 folds and 100 draws"
        )
    dataset = Dataset.open(data, verify=False)
    labels = [check_label(label) for label in _labels(dataset, options)]
    retriever = Retriever.open(run, data=data, device=options.device, read_only=True)
    check_dataset(retriever.bundle, dataset, other_dataset=None)
    vectors = _vectors(retriever, dataset, labels, progress)
    results = []
    for number, (label, own) in enumerate(zip(labels, vectors, strict=True)):
        progress(f"probing {label.name}", number / len(labels))
        results.append(_probe(retriever.bundle.run_path, dataset, label, own, options))
    return results


def _labels(dataset: Dataset, options: ProbeOptions) -> list[Label]:
    derived = [name for name in options.names if is_churn(name)]
    columns = [name for name in options.names if not is_churn(name)]
    if options.labels is None and (columns or not derived):
        raise ConfigError(
            f"--label {columns[0]!r} was given without --labels" if columns else "no label was given",
            expected="--labels FILE with a column of users, or --label churn:28d",
        )
    if options.labels is None and options.at is not None:
        raise ConfigError("--at was given with churn, which has times of its own", expected="--at with --labels FILE")
    labels = [churn_label(dataset, name, options.cuts) for name in derived]
    if options.labels is not None and (columns or not derived):
        at = None if options.at is None else parse_time(options.at, dataset)
        labels += read_labels(options.labels, dataset, columns, at, options.task)
    return labels


def _vectors(retriever: Retriever, dataset: Dataset, labels: Sequence[Label], progress: Progress) -> list[np.ndarray]:
    """What the model makes of each label's rows: the query for the next item, and the mean vector of the items so far.

    A history that several rows share is read once.
    """
    every_stop = np.concatenate([label.moments.stops for label in labels])
    _, first, place = np.unique(every_stop, return_index=True, return_inverse=True)  # a stop is of one user
    starts = np.concatenate([label.moments.starts for label in labels])
    users = np.concatenate([label.moments.users for label in labels])
    moments = Moments(users[first], None, starts[first], every_stop[first])
    parts, done = [], 0
    for part in embed_users(retriever, dataset, moments):
        parts.append(part)
        done += len(part)
        progress("reading histories", done / len(moments))
    ends = np.cumsum([len(label.moments) for label in labels])
    means = mean_item_vectors(retriever, dataset, moments)
    vectors = np.hstack([np.concatenate(parts), means]).astype(np.float64)[place]
    return [vectors[start:end] for start, end in pairwise([0, *ends])]


def _probe(run: Path, dataset: Dataset, label: Label, vectors: np.ndarray, options: ProbeOptions) -> ProbeResult:
    aggregates, names = aggregate(dataset, label.moments)
    features = {"vectors": vectors, "aggregates": aggregates, "both": np.hstack([vectors, aggregates])}
    folds = Folds(label, options.folds, options.seed)
    asked = np.flatnonzero(folds.asked)
    _check_folds(label, folds)
    answers = Answers(label.values[asked], label.moments.users[asked], folds.fold[asked], len(label.classes))
    predictions = {
        name: predict(one, label, folds, options.probe, options.seed)[asked] for name, one in features.items()
    }
    draws = draw_scores(answers, predictions, draws=options.draws, seed=options.seed)
    until = _trained_until(run, dataset)
    return ProbeResult(
        run=str(run),
        label=label.name,
        task=label.task,
        classes=label.classes,
        probe=options.probe,
        folds=options.folds,
        rows=len(label.moments),
        users=len(np.unique(label.moments.users)),
        asked_rows=len(asked),
        asked_users=len(np.unique(answers.users)),
        split_time=folds.split_time,
        num_vectors=vectors.shape[1],
        num_aggregates=len(names),
        chance=_chance(answers),
        scores=tuple(
            ProbeScore(features=name, metric=metric, **interval(values[name])._asdict())
            for metric, values in draws.items()
            for name in FEATURE_SETS
        ),
        differences=tuple(
            ProbeDifference(first=one, second=other, metric=metric, **interval(values[one] - values[other])._asdict())
            for metric, values in draws.items()
            for one, other in _COMPARED
        ),
        left_out=label.left_out,
        trained_until=until,
        warnings=tuple(_warnings(label, dataset, until)),
    )


def _check_folds(label: Label, folds: Folds) -> None:
    """Refuse times that leave too few users or one class to fit to, or one class to ask about."""
    parts = [fitted for fitted, asked in folds if len(asked)]
    fewest = min(len(np.unique(label.moments.users[rows])) for rows in parts)
    if fewest < MIN_FITTED:
        raise DataError(
            f"label {label.name!r}: a fold has earlier rows of {fewest} users to fit to",
            expected=f"{MIN_FITTED} users or more",
            next_step="add times, or leave the column of times out to split by user alone",
        )
    if not label.classes:
        return
    for chosen, what in (*((rows, "that are fitted to") for rows in parts), (folds.asked, "that are asked about")):
        if len(np.unique(label.values[chosen])) < 2:
            raise DataError(
                f"label {label.name!r}: the {len(label.values[chosen]):,} rows {what} are all of one class",
                expected="two classes or more among the earlier rows and among the latest third",
                next_step="add times, or leave the column of times out to split by user alone",
            )


def _chance(answers: Answers) -> dict[str, float]:
    if not answers.num_classes:
        return {"R²": 0.0}
    return {"AUC": 0.5, "accuracy": float(np.bincount(answers.values).max() / len(answers.values))}


def _trained_until(run: Path, dataset: Dataset) -> int | None:
    """The time of the model's last training event; None where its Record does not say."""
    if not (run / RECORD_FILE).exists():
        return None
    record = read_run_record(run)
    if record.trained_until is None and record.dataset_checksum == dataset.checksum:
        return dataset.training_view(record.recipe.data).trained_until
    return record.trained_until


def _warnings(label: Label, dataset: Dataset, trained_until: int | None) -> list[str]:
    """What makes the answers look better than they are."""
    users, warnings = dataset.schema.users, []
    if users is not None and label.name in users.fields:
        warnings.append(f"{label.name!r} is a field of the users table, which the model reads")
    times = label.moments.times
    if trained_until is None or times is None or times.min() > trained_until:
        return warnings
    early = int((times <= trained_until).sum())
    until = np.datetime64(trained_until, "us").astype("datetime64[D]")
    return [
        *warnings,
        f"the model was trained until {until}, and {early:,} of {len(times):,} labels are of that time or earlier: it "
        "has seen what came after them. Ask later, or train on less (prepare --split time)",
    ]
