"""The verb `prepare`: event log and item table in, a dataset folder out, whatever the size of the log."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from habitus.data.assemble import Assembly, assemble
from habitus.data.category_lists import split_texts
from habitus.data.connection import connect, leave_room
from habitus.data.dataset import Dataset
from habitus.data.earlier import Batches, Earlier
from habitus.data.event_columns import EventPlan
from habitus.data.event_contents import CONTENT_KINDS
from habitus.data.kinds import KINDS
from habitus.data.log import EventLog
from habitus.data.manifest import DatasetManifest
from habitus.data.no_item import add_no_item
from habitus.data.options import InputTables, PrepareOptions, check_options, check_users, split_of
from habitus.data.problems import refuse
from habitus.data.ray_driver import RayDriver, ray_driver
from habitus.data.ray_prepare import RayEventLog, RayWork
from habitus.data.remote import is_remote
from habitus.data.remote_datasets import publish_dataset
from habitus.data.sorted_events import bring_into_order, encode_sorted, read_ahead, sorted_files
from habitus.data.sources import CHUNK_ROWS, SourceTable, explain_query_error, is_disk_full, open_table, rechunk
from habitus.data.survey import ItemStream, TextOptions, survey_items
from habitus.errors import ConfigError, DataError, HabitusError
from habitus.events import Schema, comma_numbers
from habitus.files import staged_folder
from habitus.progress import Progress
from habitus.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def prepare(
    events: str,
    items: str,
    schema: Schema,
    out: str | Path,
    options: PrepareOptions | None = None,
    progress: Progress | None = None,
    *,
    users: str | None = None,
) -> DatasetManifest:
    """The manifest of the dataset written to `out`, which must not exist yet.

    `events`, `items` and `users` are paths or globs of Parquet, CSV or JSON-lines files.
    """
    if is_remote(out):
        return publish_dataset(
            out, lambda folder: prepare(events, items, schema, folder, options, progress, users=users)
        )
    tables = InputTables(events, items, users)
    return _prepare(tables, schema, Path(out), options or PrepareOptions(), progress or _silent, None)


def update(
    dataset: Dataset,
    events: str,
    items: str,
    out: str | Path,
    options: PrepareOptions | None = None,
    progress: Progress | None = None,
    *,
    users: str | None = None,
) -> DatasetManifest:
    """The manifest of a dataset written to `out`: that of `dataset`, which stays as it is, with later events.

    `items` may be the whole catalogue or what is new in it; of an item that `dataset` has, the features stay. The
    schema, the split, the window length and the encoding are the dataset's; of `options` only memory, threads and
    on_bad count.
    """
    if is_remote(out):
        return publish_dataset(
            out, lambda folder: update(dataset, events, items, folder, options, progress, users=users)
        )
    manifest = dataset.manifest
    _check_can_grow(dataset)
    if options is not None and options.backend == "ray":
        raise ConfigError(
            "an update was asked of backend ray", expected="backend local: an update reads what is new, and sorts it in"
        )
    options = replace(
        options or PrepareOptions(),
        seq_len=manifest.seq_len,
        text_len=max(1, dataset.fields.text_len),
        split=manifest.split.kind,
        validation_share=manifest.split.validation_share,
        test_share=manifest.split.test_share,
        seed=manifest.seed,
    )
    tables = InputTables(events, items, users)
    return _prepare(tables, dataset.schema, Path(out), options, progress or _silent, Earlier(dataset))


def _check_can_grow(dataset: Dataset) -> None:
    schema = dataset.schema
    if schema.world is not None:
        raise DataError(
            f"{dataset.path} is a synthetic world, whose oracle knows its own events only",
            next_step="habitus world with more users or events",
        )
    contents = [name for name, kind in schema.events.fields.items() if kind in CONTENT_KINDS]
    if contents:
        raise DataError(
            f"{dataset.path} has event fields that are texts or vectors ({', '.join(contents)}), which are numbered "
            "over the whole log",
            expected="a dataset whose event fields are categories, numbers and times",
            next_step="prepare the whole log again",
        )
    if schema.events.pair_columns:
        raise DataError(
            f"{dataset.path} predicts pairs of item and {', '.join(schema.events.pair_columns)}, which are numbered "
            "over the whole log",
            expected="a dataset whose events name items alone",
            next_step="prepare the whole log again",
        )


def _silent(phase: str, done: float) -> None:
    pass


def _prepare(
    tables: InputTables,
    schema: Schema,
    out: Path,
    options: PrepareOptions,
    progress: Progress,
    earlier: Earlier | None,
) -> DatasetManifest:
    check_options(options, out, schema)
    check_users(tables.users, schema)
    try:
        cluster = ray_driver() if options.backend == "ray" else nullcontext()
        # The cluster ends before the folder is removed, so that no task still writes there.
        with staged_folder(out) as stage, cluster as driver, _scratch(stage) as scratch:
            with connect(scratch, options.memory, options.threads, progress) as con:
                log, parts = _read(con, tables, schema, options, scratch, progress, earlier, driver)
                num_parts = bring_into_order(log, options, scratch, progress)
            files = sorted_files(log, num_parts, options, scratch)
            sorted_chunks = encode_sorted(files, log.num_usable, schema, parts.plan, progress)
            with closing(sorted_chunks), closing(read_ahead(sorted_chunks)) as chunks:
                return assemble(parts, chunks, stage, progress)
    except Exception as error:
        if "Query interrupted" in str(error):  # DuckDB's RuntimeError, or its InterruptException, for Ctrl-C
            raise KeyboardInterrupt from error
        explanation = _explain(error, out, options, {k: v for k, v in asdict(tables).items() if v is not None})
        if explanation is None:
            raise
        raise explanation from error


def _explain(error: Exception, out: Path, options: PrepareOptions, tables: dict[str, str]) -> DataError | None:
    """A full disk, too little memory or damaged files as an error that says what to do; None for anything else."""
    if isinstance(error, HabitusError):
        return None
    if is_disk_full(error):
        return DataError(
            f"the disk that holds {out.parent.resolve()} is full; nothing was written to {out}",
            expected="about three times the size of the event log as free space while preparing",
            next_step="free some space or choose another --out",
        )
    if type(error).__name__ == "OutOfMemoryException":  # DuckDB's; it is imported only where it is used
        return DataError(
            f"{options.memory} of memory is too little for {options.threads} threads on these tables",
            next_step="raise --memory or lower --threads",
        )
    if "duckdb" in type(error).__module__ or isinstance(error, pa.ArrowException):
        return explain_query_error(error, tables)
    if isinstance(error, OSError):
        return DataError(f"{out} could not be written: {error}", expected="a free name in a folder that can be written")
    return None


def _read(
    con: "DuckDBPyConnection",
    inputs: InputTables,
    schema: Schema,
    options: PrepareOptions,
    scratch: Path,
    progress: Progress,
    earlier: Earlier | None,
    driver: RayDriver | None,
) -> tuple[EventLog, Assembly]:
    """Open, check and survey the tables; errors in any are raised before the long work starts."""
    progress("opening files", 0.0)
    events = open_table("events", inputs.events, con, scratch, comma_numbers(schema.events))
    items = open_table("items", inputs.items, con, scratch, comma_numbers(schema.items))
    tables = events, add_no_item(items, schema, con, scratch)
    leave_room(con, options.memory, tables[1].num_rows)
    users = None
    if inputs.users is not None:
        users = open_table("users", inputs.users, con, scratch, comma_numbers(schema.users))
    if driver is not None:
        work = RayWork(driver, scratch, options.memory, options.parts, progress)
        log: EventLog = RayEventLog(con, schema, *tables, users, work)
    elif earlier is None:
        log = EventLog(con, schema, *tables, users=users)
    else:
        log = EventLog(con, schema, *tables, earlier, scratch / "earlier.parquet", users)
        earlier.check_ids(log.events.types[schema.events.user], log.items.types[schema.items.item])
        earlier.write_events(scratch / "earlier.parquet")
    drop = options.on_bad == "drop"
    unusable = log.make_catalogue(drop)
    log.read_users(drop)
    log.join()
    progress("checking events", 0.0)
    log.check_events(drop)
    stream, item_columns = _item_streams(log, schema, unusable)
    _check_token_table(stream, options, scratch)
    progress("surveying items", 0.0)
    survey = survey_items(stream, TextOptions(options.text_len, options.vocabulary_size, options.seed))
    if not drop:
        refuse(survey.problems())
    dropped = Counter(log.dropped)
    dropped.update({f"items.{p.column}: {p.what}": p.rows for p in survey.problems()})
    dropped.update(survey.left_out())
    progress("surveying events", 0.0)
    item_ids: Batches = lambda: item_columns([schema.items.item])  # noqa: E731
    item_display: Batches = lambda: item_columns(list(schema.items.display or ()))  # noqa: E731
    num_items = stream.num_items
    if earlier is None:
        split = split_of(options).with_cuts(log.time_at)
    else:
        earlier.check_vectors(stream)
        before = earlier.dataset.manifest
        split, num_items = before.split, num_items + before.num_items
        dropped.update(before.dropped)
        item_ids, item_display = earlier.ids_with(item_ids), earlier.display_with(item_display)
    contents = log.number_contents(drop, scratch)
    dropped.update({key: count for key, count in log.dropped.items() if key not in dropped})
    plan = EventPlan(schema.event_fields, log.event_values(), schema.events.time_unit, num_items, split, contents)
    parts = Assembly(
        schema=schema,
        seq_len=options.seq_len,
        seed=options.seed,
        survey=survey,
        item_ids=item_ids,
        plan=plan,
        dropped=dict(dropped),
        item_display=item_display,
        earlier=earlier,
        user_rows=log.count_users(),
    )
    return log, parts


def _check_token_table(stream: ItemStream, options: PrepareOptions, scratch: Path) -> None:
    """Refuse texts whose tokens fit neither the disk nor, a chunk of items at a time, the memory."""
    if not any(KINDS[kind].encoded_as == "text" for kind in stream.kinds.values()):
        return
    row = 4 * options.text_len
    free, memory = shutil.disk_usage(scratch).free, parse_bytes(options.memory)
    for needed, room, what in (
        (row * stream.num_items, free, "and the disk has"),
        (row * min(stream.num_items, CHUNK_ROWS), memory, "some of it at once, and --memory is"),
    ):
        if needed > room:
            raise DataError(
                f"{options.text_len:,} text tokens for each of {stream.num_items:,} items take "
                f"{format_bytes(row * stream.num_items)}, {what} {format_bytes(room)}",
                expected="a table of tokens that fits",
                next_step="lower --text-len: texts of items rarely have more than a few dozen tokens",
            )


def _item_streams(
    log: EventLog, schema: Schema, unusable: np.ndarray
) -> tuple[ItemStream, Callable[[list[str]], Iterator[pa.RecordBatch]]]:
    """The catalogue's fields as a stream, and any of its columns; for item×value pairs a row is repeated per pair."""
    usable = np.setdiff1d(np.arange(log.items.num_rows), unusable, assume_unique=True) if len(unusable) else None
    kinds, separators = schema.items.kinds, schema.items.separators
    pair_values: dict[str, pa.Array] = {}
    rows, num_items = usable, log.items.num_rows - len(unusable)
    if schema.events.pair_columns:
        item_rows, pair_values = log.make_pairs()
        rows = item_rows if usable is None else usable[item_rows]
        num_items = len(rows)
        kinds |= dict.fromkeys(pair_values, "category")

    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        return rechunk(_select_rows(log.items, columns, rows, pair_values), CHUNK_ROWS)

    def place(row: int) -> str:
        return log.items.place(row if rows is None else int(rows[row]))

    fields = list(schema.items.fields)
    stream = ItemStream(
        kinds, num_items, lambda: (split_texts(batch, separators) for batch in batches(fields)), place, separators
    )
    return stream, batches


def _select_rows(
    table: SourceTable, columns: list[str], rows: np.ndarray | None, pair_values: dict[str, pa.Array]
) -> Iterator[pa.RecordBatch]:
    """The given rows (sorted, perhaps repeated) of a table, with the pair's values as further columns."""
    first = start = 0
    for batch in table.batches(columns):
        if rows is not None:
            stop = int(np.searchsorted(rows, first + batch.num_rows))
            first, batch = first + batch.num_rows, batch.take(pa.array(rows[start:stop] - first))
            for name, values in pair_values.items():
                batch = batch.append_column(name, values.slice(start, stop - start))
            start = stop
        yield batch


@contextmanager
def _scratch(stage: Path) -> Iterator[Path]:
    """A folder for intermediate files inside the stage, gone before the stage is published or removed."""
    scratch = stage / ".scratch"
    scratch.mkdir()
    yield scratch
    shutil.rmtree(scratch)
