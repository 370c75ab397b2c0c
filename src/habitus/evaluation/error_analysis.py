"""Evaluations taken apart: every run against its reference, by every column that was asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation.evaluation import EvaluateOptions, Evaluation
from habitus.evaluation.groups import GroupOptions, check_names, query_groups
from habitus.evaluation.metrics import RANKING_METRICS
from habitus.evaluation.paired import query_values
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.slices import slice_tables
from habitus.store import ErrorPage, direction_of
from habitus.typed import suggest_name

BASELINES = ("popularity", "recent popularity", "repeat recent", "item to item", "oracle")
BEST_BASELINE = "best"


@dataclass(frozen=True)
class ErrorOptions:
    """What runs are taken apart by, and what each of them is compared with."""

    by: tuple[str, ...]
    file: Path | None = None  # a Parquet file with a row per user, item or event
    metric: str = "recall@10"  # without its regime
    against: str = BEST_BASELINE  # the best baseline by that metric, a baseline's name, or the folder of a run
    groups: GroupOptions = field(default_factory=GroupOptions)

    @property
    def reference_run(self) -> Path | None:
        """The run to compare with, where it is one."""
        return None if self.against in (BEST_BASELINE, *BASELINES) else Path(self.against)

    def with_reference(self, runs: Sequence[Path]) -> list[Path]:
        """The runs to score, that to compare with among them."""
        if not runs:
            raise ConfigError("--by has no run to take apart", expected="a run, as in evaluate RUN --by COLUMNS")
        reference = self.reference_run
        if reference is None or reference.resolve() in [run.resolve() for run in runs]:
            return list(runs)
        return [*runs, reference]

    def check(self, dataset: Dataset, options: EvaluateOptions) -> None:
        """Refuse columns, metrics and references before anything is scored."""
        name, _, cutoff = self.metric.partition("@")
        if self.metric != "loss" and (name not in RANKING_METRICS or not cutoff.isdigit() or int(cutoff) < 1):
            raise ConfigError(
                f"--by-metric {self.metric} has no value per query",
                expected=f"loss, or {', '.join(RANKING_METRICS)} with a cut-off, as in recall@10",
                next_step=_instead(name, cutoff),
            )
        if self.metric == "loss" and ("loss" not in options.metrics or options.exclude_history):
            raise ConfigError(
                "--by-metric loss, and losses are not computed",
                expected="--metrics with loss, and no --exclude-history",
            )
        if self.groups.bins < 2 or self.groups.most < 1:
            raise ConfigError(
                f"{self.groups.bins} bins and {self.groups.most} values", expected="2 bins or more, 1 value or more"
            )
        run = self.reference_run
        if run is not None and not run.is_dir():
            raise ConfigError(
                f"--against {self.against} is neither a baseline nor a folder "
                f"({suggest_name(self.against, [BEST_BASELINE, *BASELINES])})",
                expected=f"{BEST_BASELINE}, {', '.join(BASELINES)}, or a run",
            )
        if self.against == "oracle" and dataset.schema.world is None:
            raise ConfigError(f"--against oracle, and {dataset.path} is not a synthetic world, so it has none")
        check_names(dataset, self.by, self.file)


def _instead(name: str, cutoff: str) -> str:
    """The metric per query that says the same as a classic one."""
    if not cutoff.isdigit():
        return ""
    equal = {
        "hit_rate": f"use recall@{cutoff}, which it equals with one target",
        "precision": f"use recall@{cutoff}: with one target it is that divided by {cutoff}",
        "map": f"use mrr@{cutoff}, which it equals with one target",
    }
    return equal.get(name, "")


def slice_evaluations(
    dataset: Dataset,
    evaluations: Sequence[Evaluation],
    kept: Mapping[tuple[str, str], PerQuery],
    options: ErrorOptions,
) -> list[Evaluation]:
    """The evaluations, those of runs with their tables; `kept` are the values per query by scorer and regime."""
    regime = _regime(evaluations)
    reference = _reference(evaluations, regime, kept, options)
    subjects = [one for one in evaluations if one.scorer not in (reference, *BASELINES)]
    if not subjects:
        raise ConfigError("--by has no run to take apart", expected="a run that is not the one to compare with")
    values = kept[subjects[0].scorer, regime]
    groups = query_groups(dataset, values, options.by, options.file, options.groups)
    sliced = []
    for one in evaluations:
        if one in subjects:
            tables = slice_tables(
                dataset, kept[one.scorer, regime], groups, options.metric, (reference, kept[reference, regime])
            )
            one = one.model_copy(update={"slices": tables})
        sliced.append(one)
    return sliced


def error_pages(evaluations: Sequence[Evaluation]) -> list[ErrorPage]:
    """What a page shows of the runs that were taken apart or calibrated."""
    regime = _regime(evaluations)
    metrics = {
        one.scorer: {
            name.partition("/")[2]: metric
            for name, metric in one.metrics.items()
            if name.startswith(f"{regime}/") and name.count("/") == 1
        }
        for one in evaluations
    }
    pages = []
    for one in evaluations:
        if one.slices or one.calibration:
            spec = one.specification[regime]
            pages.append(
                ErrorPage(
                    run=one.scorer,
                    side=spec.side,
                    regime=regime,
                    queries=spec.queries,
                    candidates=spec.candidates,
                    metrics=metrics,
                    slices=one.slices,
                    calibration=one.calibration,
                )
            )
    return pages


def _regime(evaluations: Sequence[Evaluation]) -> str:
    """The regime that is taken apart: the catalogue's, where it was measured."""
    return "catalogue" if "catalogue" in evaluations[0].specification else "batch"


def _reference(
    evaluations: Sequence[Evaluation], regime: str, kept: Mapping[tuple[str, str], PerQuery], options: ErrorOptions
) -> str:
    """The name of the scorer that others are compared with."""
    run = options.reference_run
    if run is not None:
        return next(one.scorer for one in evaluations if Path(one.scorer).resolve() == run.resolve())
    if options.against != BEST_BASELINE:
        return options.against
    names = [one.scorer for one in evaluations if one.scorer in BASELINES and one.scorer != "oracle"]
    best = min if direction_of(options.metric) == "min" else max
    return best(names, key=lambda name: float(query_values(kept[name, regime], options.metric).mean()))
