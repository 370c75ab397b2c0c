"""Vectors out: of the items that may be recommended now, or of users, as Parquet in order and out of core."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import ConfigError, DataError
from habitus.evaluation import check_dataset
from habitus.exporting.moments import Moments, read_moments
from habitus.exporting.recommend import read_users
from habitus.exporting.results import check_output
from habitus.files import staged_file
from habitus.progress import Progress
from habitus.serving import EncodedHistory, RequestError, Retriever, UnknownHistoryError
from habitus.typed import Typed

ROWS = 1 << 14
_USERS = 256
_Part = tuple[pa.Table, np.ndarray, float]  # ids, vectors [n, h], share of the work


class Exported(Typed):
    """What was written."""

    path: str
    rows: int
    joint_dim: int
    left_out: int = 0  # users without an event of a known item, or before their time


def export_items(
    retriever: Retriever, out: str | Path, *, replace: bool = False, progress: Progress | None = None
) -> Exported:
    """Write id and vector of every item that may be recommended now, in catalogue order, run-time items last.

    A history's vector times an item's is the item's score.
    """
    retriever.catch_up()
    return _write(Path(out), _items(retriever), retriever, replace, progress)


def export_users(
    retriever: Retriever,
    out: str | Path,
    *,
    data: str | Path | None = None,
    histories: str | None = None,
    at: str | Path | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write id and vector of every user of a prepared dataset, or of a file of histories as `recommend` takes it.

    `at` is a file with users of the dataset and times: a vector per row, of the events strictly before its time, and
    the mean vector of all items before it.
    """
    if at is not None and data is None:
        raise ConfigError("--at was given without a dataset", expected="--data DATASET, whose users it names")
    if (data is None) == (histories is None):
        raise ConfigError(
            "users are to be exported " + ("from two sources" if data else "without their histories"),
            expected="either --data DATASET or --histories FILE",
        )
    retriever.catch_up()
    out = Path(out)
    if data is not None:
        dataset = Dataset.open(data, verify=False)
        check_dataset(retriever.bundle, dataset, other_dataset=None)
        if at is None:
            moments = Moments.of(dataset, np.arange(dataset.num_users), None)
            ids = pa.table({dataset.schema.events.user: dataset.user_ids()})
        else:
            moments, ids = read_moments(at, dataset)
        known = np.flatnonzero(moments.known)
        parts = _dataset_users(retriever, dataset, moments.take(known), ids.take(pa.array(known)), at is not None)
        exported = _write(out, parts, retriever, replace, progress)
        return exported.model_copy(update={"left_out": len(moments) - len(known)})
    assert histories is not None
    check_output(out, (".parquet",), replace=replace)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as scratch:
        left_out: list[int] = []
        parts = _listed_users(retriever, histories, Path(scratch), left_out)
        exported = _write(out, parts, retriever, replace, progress)
    return exported.model_copy(update={"left_out": sum(left_out)})


def _write(
    out: Path, parts: Iterator[_Part], retriever: Retriever, replace: bool, progress: Progress | None
) -> Exported:
    """One Parquet file, written under a temporary name and renamed when it is complete."""
    check_output(out, (".parquet",), replace=replace)
    joint_dim = retriever.bundle.recipe.model.joint_dim
    writer: pq.ParquetWriter | None = None
    rows = 0
    try:
        with staged_file(out) as partial:
            for ids, vectors, share in parts:
                flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
                table = ids.append_column("vector", pa.FixedSizeListArray.from_arrays(flat, joint_dim))
                if writer is None:
                    writer = pq.ParquetWriter(partial, table.schema, compression="zstd")
                writer.write_table(table.cast(writer.schema))
                rows += table.num_rows
                if progress is not None:
                    progress("writing vectors", share)
            if writer is None:
                raise DataError("there is nothing to export", expected="at least one item or user")
            writer.close()
    except OSError as error:
        raise DataError(f"{out} could not be written: {error.strerror or error}") from error
    return Exported(path=str(out), rows=rows, joint_dim=joint_dim)


def _items(retriever: Retriever) -> Iterator[_Part]:
    candidates = retriever.candidates
    for start in range(0, candidates.num_trained, ROWS):
        rows = np.arange(start, min(start + ROWS, candidates.num_trained))
        rows = rows[~np.isin(rows, list(candidates.hidden))] if candidates.hidden else rows
        ids = _with_names(candidates.catalogue.ids.take(pa.array(rows)), retriever, rows.tolist())
        yield ids, _numpy(candidates.vectors(rows)), (start + ROWS) / candidates.num_rows
    added = [row for row in range(candidates.num_trained, candidates.num_rows) if row not in candidates.hidden]
    if added:
        schema = candidates.catalogue.ids.schema
        items = candidates.ids_at(added)
        records = items if retriever.id_format.is_pair else [{schema.names[0]: item} for item in items]
        ids = _with_names(pa.Table.from_pylist(records, schema), retriever, added)
        yield ids, _numpy(candidates.vectors(np.array(added))), 1.0


def _with_names(ids: pa.Table, retriever: Retriever, rows: list[int]) -> pa.Table:
    """The ids of candidates with what the schema displays of them."""
    display = retriever.candidates.display_at(rows)
    for name in retriever.bundle.schema.items.display or ():
        column = pa.array([shown.get(name) for shown in display], pa.string())
        ids = ids.append_column("item_vector" if name == "vector" else name, column)
    return ids


def _dataset_users(
    retriever: Retriever, dataset: Dataset, moments: Moments, ids: pa.Table, with_means: bool
) -> Iterator[_Part]:
    done = 0
    for vectors in embed_users(retriever, dataset, moments):
        users = ids.slice(done, len(vectors))
        if with_means:
            means = mean_item_vectors(retriever, dataset, moments.take(np.arange(done, done + len(vectors))))
            users = users.append_column(
                "mean_item_vector", pa.FixedSizeListArray.from_arrays(pa.array(means.ravel()), means.shape[1])
            )
        done += len(vectors)
        yield users, vectors, done / len(moments)


def embed_users(retriever: Retriever, dataset: Dataset, moments: Moments) -> Iterator[np.ndarray]:
    """The vectors of users at times, float32 [n, h] some rows at a time; each must have an event before its time."""
    newest, window = retriever.candidates.newest_rows(), retriever.window
    for first in range(0, len(moments), _USERS):
        part = slice(first, first + _USERS)
        histories = []
        for start, stop in zip(moments.starts[part].tolist(), moments.stops[part].tolist(), strict=True):
            used = slice(max(start, stop - window), stop)
            fields = dataset.event_values(used)
            histories.append(EncodedHistory(_current_rows(dataset.items[used], newest), fields))
        yield _numpy(retriever.embed_encoded(histories))


def mean_item_vectors(retriever: Retriever, dataset: Dataset, moments: Moments) -> np.ndarray:
    """The mean vector of the items of all events before each time, float32 [n, h]."""
    newest = retriever.candidates.newest_rows()
    means = np.empty((len(moments), retriever.bundle.recipe.model.joint_dim), np.float32)
    for place, (start, stop) in enumerate(zip(moments.starts.tolist(), moments.stops.tolist(), strict=True)):
        rows, counts = np.unique(_current_rows(dataset.items[start:stop], newest), return_counts=True)
        means[place] = counts @ _numpy(retriever.candidates.vectors(rows)) / (stop - start)
    return means


def _current_rows(items: np.ndarray, newest: Mapping[int, int]) -> np.ndarray:
    """The rows of items among the candidates; one that was changed at run time has a new row."""
    return np.array([newest.get(row, row) for row in items.tolist()], np.int64)


def _listed_users(retriever: Retriever, histories: str, scratch: Path, left_out: list[int]) -> Iterator[_Part]:
    column = retriever.bundle.schema.events.user
    held: list[tuple[Any, EncodedHistory]] = []

    def part(share: float) -> _Part:
        vectors = _numpy(retriever.embed_encoded([history for _, history in held]))
        return pa.table({column: [user for user, _ in held]}), vectors, share

    share = 0.0
    for user, events, share in read_users(retriever, histories, scratch):
        try:
            held.append((user, retriever.encode_history(events)))
        except UnknownHistoryError:
            left_out.append(1)
        except RequestError as error:
            raise DataError(f"histories, user {str(user)[:60]!r}: {error.problem}", expected=error.expected) from error
        if len(held) == _USERS:
            yield part(share)
            held = []
    if held:
        yield part(share)


def _numpy(vectors: Tensor) -> np.ndarray:
    array: np.ndarray = vectors.float().cpu().numpy()
    return array
