"""Values per query of the two cells that the test of sizes compares, so that it pairs users (`docs/laws.md`)."""

from collections.abc import Sequence
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import HabitusError, Interrupted
from habitus.laws import MeasuredRun, compared_cells, read_runs, select
from habitus.progress import Note
from habitus.store import EVALUATIONS, REGIMES, cell_folder
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
        cells = cells_to_pair(select(read_runs(store), allow_repeats).runs, metric)
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


def cells_to_pair(runs: Sequence[MeasuredRun], metric: str) -> list[str]:
    """Recipe hashes of the first runs of the two cells of sizes that the test compares; one where they are the same."""
    compared = compared_cells([run for run in runs if run.axis == "allocation"], metric)
    return [] if compared is None else list(dict.fromkeys([c[0].recipe_hash for c in compared[:2]]))


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
