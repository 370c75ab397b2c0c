"""Questions about runs and recipes, as Python functions: `age`, `diff`, `probe`, `show`."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from habitus.api.run import Run
from habitus.api.tables import Table, table_path
from habitus.api.verbs import DatasetLike, RunLike, _dataset, _options

if TYPE_CHECKING:
    from habitus.evaluation import Ageing
    from habitus.probing import ProbeResult
    from habitus.studies import ComparedRuns, Knob, Subject


def age(
    runs: RunLike | Iterable[RunLike], dataset: DatasetLike, *,
    metric: str = "ndcg@10", days: Sequence[float] | None = None, **options: Any,
) -> "list[Ageing]":  # fmt: skip
    """How fast runs age on the later events of a dataset, a table each; `options` as in `age_runs`."""
    from habitus.evaluation import age_runs

    several = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    return age_runs([_path(one) for one in several], _dataset(dataset), metric, days, **options)


def probe(
    run: RunLike, dataset: DatasetLike, labels: Table | None = None, *, label: str | Sequence[str] = (), **options: Any
) -> "list[ProbeResult]":
    """What a run's user vectors are worth for labels, against aggregates made by hand; a result per label.

    `labels` is a file or a table with a column of users, perhaps one of times, and labels; `label` names some of its
    columns, or churn:28d. `options` are the fields of `habitus.probing.ProbeOptions`.
    """
    from habitus.probing import ProbeOptions
    from habitus.probing import probe as probe_run

    names = (label,) if isinstance(label, str) else tuple(label)
    with tempfile.TemporaryDirectory() as folder:
        if labels is None:
            return probe_run(_path(run), _dataset(dataset).path, _options(ProbeOptions, {**options, "names": names}))
        with table_path(labels, "labels", Path(folder)) as path:
            chosen = _options(ProbeOptions, {**options, "names": names, "labels": path})
            return probe_run(_path(run), _dataset(dataset).path, chosen)


def show(recipe: RunLike, *, dataset: DatasetLike | None = None, device: str = "auto") -> "list[Knob]":
    """Every knob of a recipe or a run: its meaning, where its value came from, and what doubling it costs."""
    from habitus.studies import explain_recipe

    return explain_recipe(_subject(recipe, dataset, device))


def diff(
    first: RunLike, second: RunLike, *, dataset: DatasetLike | None = None, device: str = "auto", **options: Any
) -> "ComparedRuns":
    """What differs between two recipes or runs; with a dataset both runs are evaluated on the same queries now."""
    from habitus.studies import compare

    one, other = (_subject(each, dataset, device) for each in (first, second))
    return compare(one, other, dataset=one.dataset, device=one.device, **options)


def _subject(path: RunLike, dataset: DatasetLike | None, device: str) -> "Subject":
    from habitus.studies import open_subject
    from habitus.sweeps import device_kind

    data = None if dataset is None else _dataset(dataset)
    return open_subject(_path(path), dataset=data, device=device_kind(device))


def _path(run: RunLike) -> Path:
    return run.path if isinstance(run, Run) else Path(run)
