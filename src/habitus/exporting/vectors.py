"""Vectors out: of the items that may be recommended now, or of users, as Parquet in order and out of core."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import ConfigError, DataError
from habitus.evaluation import check_dataset
from habitus.exporting.recommend import users_in
from habitus.exporting.results import check_out
from habitus.progress import Progress
from habitus.serving import History, RequestError, Retriever
from habitus.typed import Typed

ROWS = 1 << 14
USERS = 256
Part = tuple[pa.Table, np.ndarray, float]  # ids, vectors [n, h], share of the work


class Exported(Typed):
    """What was written."""

    path: str
    rows: int
    joint_dim: int
    left_out: int = 0  # users without an event of a known item


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
    replace: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write id and vector of every user of a prepared dataset, or of a file of histories as `recommend` takes it."""
    if (data is None) == (histories is None):
        raise ConfigError(
            "users were asked for" + (" with two sources" if data else " without their histories"),
            expected="either --data DATASET or --histories FILE",
        )
    retriever.catch_up()
    out = Path(out)
    if data is not None:
        return _write(out, _dataset_users(retriever, Path(data)), retriever, replace, progress)
    assert histories is not None
    check_out(out, (".parquet",), replace=replace)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as scratch:
        left_out: list[int] = []
        parts = _listed_users(retriever, histories, Path(scratch), left_out)
        made = _write(out, parts, retriever, replace, progress)
    return made.model_copy(update={"left_out": sum(left_out)})


def _write(
    out: Path, parts: Iterator[Part], retriever: Retriever, replace: bool, progress: Progress | None
) -> Exported:
    """One Parquet file, written beside its name and renamed when it is whole."""
    check_out(out, (".parquet",), replace=replace)
    joint_dim = retriever.bundle.recipe.model.joint_dim
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    writer: pq.ParquetWriter | None = None
    rows = 0
    try:
        for ids, vectors, share in parts:
            flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
            table = ids.append_column("vector", pa.FixedSizeListArray.from_arrays(flat, joint_dim))
            if writer is None:
                writer = pq.ParquetWriter(beside, table.schema, compression="zstd")
            writer.write_table(table.cast(writer.schema))
            rows += table.num_rows
            if progress is not None:
                progress("writing vectors", share)
        if writer is None:
            raise DataError("there is nothing to export", expected="at least one item or user")
        writer.close()
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(out)
    except OSError as error:
        raise DataError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return Exported(path=str(out), rows=rows, joint_dim=joint_dim)


def _items(retriever: Retriever) -> Iterator[Part]:
    live = retriever.live
    for start in range(0, live.num_base, ROWS):
        rows = np.arange(start, min(start + ROWS, live.num_base))
        rows = rows[~np.isin(rows, list(live.hidden))] if live.hidden else rows
        yield live.catalogue.ids.take(pa.array(rows)), _numpy(live.vectors(rows)), (start + ROWS) / live.num_rows
    extra = [row for row in range(live.num_base, live.num_rows) if row not in live.hidden]
    if extra:
        ids = live.ids_at(extra)
        names = live.catalogue.ids.schema
        rows_of = ids if retriever.kind.is_pair else [{names.names[0]: one} for one in ids]
        yield pa.Table.from_pylist(rows_of, names), _numpy(live.vectors(np.array(extra))), 1.0


def _dataset_users(retriever: Retriever, data: Path) -> Iterator[Part]:
    dataset = Dataset.open(data, verify=False)
    check_dataset(retriever.bundle, dataset, other_dataset=False)
    ids, window = dataset.user_ids(), retriever.limits.window
    newest = retriever.live.newest_rows()
    for start in range(0, dataset.num_users, USERS):
        offsets = dataset.user_offsets[start : start + USERS + 1]
        histories = []
        for first, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            shown = slice(max(first, stop - window), stop)
            rows = np.array([newest.get(row, row) for row in dataset.items[shown].tolist()], np.int64)
            fields = {name: np.array(column[shown]) for name, column in dataset.event_fields.items()}
            histories.append(History(rows, fields, frozenset(), ()))
        vectors = _numpy(retriever.query_vectors(histories))
        names = pa.table({dataset.schema.events.user: ids.slice(start, len(histories))})
        yield names, vectors, (start + len(histories)) / dataset.num_users


def _listed_users(retriever: Retriever, histories: str, scratch: Path, left_out: list[int]) -> Iterator[Part]:
    column = retriever.bundle.schema.events.user
    held: list[tuple[Any, History]] = []

    def part(share: float) -> Part:
        vectors = _numpy(retriever.query_vectors([history for _, history in held]))
        return pa.table({column: [user for user, _ in held]}), vectors, share

    share = 0.0
    for user, events, share in users_in(retriever, histories, scratch):
        try:
            held.append((user, retriever.encoded(events)))
        except RequestError as error:
            if not error.problem.startswith("none of the history"):
                raise DataError(
                    f"histories, user {str(user)[:60]!r}: {error.problem}", expected=error.expected
                ) from error
            left_out.append(1)
        if len(held) == USERS:
            yield part(share)
            held = []
    if held:
        yield part(share)


def _numpy(vectors: Tensor) -> np.ndarray:
    found: np.ndarray = vectors.float().cpu().numpy()
    return found
