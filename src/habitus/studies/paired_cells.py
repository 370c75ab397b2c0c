"""Values per query of the two cells that the test of sizes compares, so that it pairs users (`docs/laws.md`)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from habitus.data import Dataset
from habitus.errors import HabitusError, Interrupted
from habitus.laws import MeasuredRun, read_runs, select
from habitus.progress import Note
from habitus.store import EVALUATIONS, REGIMES, cell_folder, direction_of
from habitus.studies.state import StudyState

LOSS = "batch/loss"
FILE = "size-test.parquet"  # beside what `habitus evaluate STORE --keep` leaves


def keep_users(
    store: Path, state: StudyState, metric: str, dataset: Dataset, device: str, note: Note, allow_repeats: bool = False
) -> Path | None:
    """The file of the store that has the cells' values; None where one cell is best by both or no query has a value.

    What cannot be evaluated again leaves the test as cautious as it is without pairs, and is noted.
    """
    if not can_be_paired(metric) or "allocation" not in state.axes:
        return None
    try:
        cells = compared_cells(select(read_runs(store), allow_repeats).runs, metric)
        if len(cells) < 2:
            return None
        path = store / EVALUATIONS / FILE
        if not _holds(path, cells, metric):
            path.parent.mkdir(exist_ok=True)
            note(f"evaluating the best cells by {LOSS} and {metric} again: the test of sizes pairs users")
            _evaluate(path, [cell_folder(store, digest) for digest in cells], state, metric, dataset, device)
    except Interrupted:
        raise
    except HabitusError as error:
        note(f"users are not paired in the test of sizes: {error.problem}")
        return None
    return path


def stated_seconds(state: StudyState, metric: str) -> float:
    """What that is expected to take."""
    if state.speeds is None or not can_be_paired(metric) or "allocation" not in state.axes:
        return 0.0
    return 2 * (state.speeds.start + state.speeds.evaluate[metric.partition("/")[0]])


def can_be_paired(metric: str) -> bool:
    """Whether a query has a value of its own, and the metric is not the loss itself."""
    regime, _, bare = metric.partition("/")
    return regime in REGIMES and "/" not in bare and bare.partition("@")[0] in ("recall", "ndcg", "mrr")


def compared_cells(runs: Sequence[MeasuredRun], metric: str) -> list[str]:
    """The first run of the best cell by the loss and of the best by the metric, at the largest budget of sizes."""
    runs = [run for run in runs if run.axis == "allocation" and {LOSS, metric} <= set(run.metrics)]
    largest = max((run.budget for run in runs), default=0.0)
    cells: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        if run.budget == largest:
            cells.setdefault(run.cell_id, []).append(run)
    if not cells:
        return []

    def best(name: str) -> str:
        sign = 1 if direction_of(name) == "min" else -1
        return min(cells.values(), key=lambda cell: sign * fmean(run.metrics[name] for run in cell))[0].recipe_hash

    return list(dict.fromkeys([best(LOSS), best(metric)]))


def _evaluate(path: Path, cells: list[Path], state: StudyState, metric: str, dataset: Dataset, device: str) -> None:
    """On the queries and candidates of the store's own evaluation."""
    from habitus.evaluation import ComputeOptions, EvaluateOptions, PerQueryFile, evaluate_runs, resolve_device

    settings = state.preset.evaluate
    options = EvaluateOptions(
        regimes=(metric.partition("/")[0],), queries=settings.queries, batch_sequences=settings.batch_sequences,  # type: ignore[arg-type]
        catalogue_items=settings.catalogue_items, seed=settings.seed, metrics=("loss", "ranking"), histories=(),
    )  # fmt: skip
    with PerQueryFile(path) as file:
        evaluate_runs(cells, dataset, options, ComputeOptions(resolve_device(device)), keep=file.add)


def _holds(path: Path, cells: Sequence[str], metric: str) -> bool:
    """Whether a file of an earlier call has these cells under the metric's regime."""
    if not path.is_file():
        return False
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["scorer", "regime"])
    scorers, regimes = (set(table[name].unique().to_pylist()) for name in ("scorer", "regime"))
    return regimes == {metric.partition("/")[0]} and {Path(one).name for one in scorers} == set(cells)
