"""A DuckDB for the length of a task: within a memory limit, and closed whatever happens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from habitus.interrupts import hold_interrupts
from habitus.progress import Progress
from habitus.units import parse_bytes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# DuckDB's own limit leaves room for what stands outside its buffers.
_DUCKDB_SHARE = 0.75
_BYTES_PER_ITEM = 16  # 15 were seen at 10^8 items


def duckdb_memory(memory: str) -> int:
    """The bytes that DuckDB gets of the memory of a task."""
    return int(parse_bytes(memory) * _DUCKDB_SHARE)


def leave_room(con: "DuckDBPyConnection", memory: str, num_items: int) -> None:
    """Lower DuckDB's limit by what a catalogue takes outside its buffers; a quarter of the memory stays its own."""
    limit = max(parse_bytes(memory) // 4, duckdb_memory(memory) - _BYTES_PER_ITEM * num_items)
    con.execute(f"SET memory_limit = '{limit // 2**20}MiB'")


@contextmanager
def connect(scratch: Path, memory: str, threads: int, progress: Progress) -> Iterator["DuckDBPyConnection"]:
    """A DuckDB that keeps the memory limit and spills to `scratch`, with a thread that reports how far its query is."""
    with hold_interrupts():
        import duckdb

    config = {
        "memory_limit": f"{duckdb_memory(memory) // 2**20}MiB",
        "threads": threads,
        "temp_directory": str(scratch / "spill"),
    }
    con = duckdb.connect(":memory:", config=config)
    stop = threading.Event()
    thread = threading.Thread(target=_report_queries, args=(con, stop, progress), daemon=True)
    try:
        con.execute("SET TimeZone = 'UTC'")
        thread.start()
        yield con
    finally:
        stop.set()
        if thread.ident is not None:  # an interrupt may come before it has started
            thread.join()
        con.close()


def _report_queries(con: "DuckDBPyConnection", stop: threading.Event, progress: Progress) -> None:
    while not stop.wait(0.3):
        percent = con.query_progress()
        if percent >= 0:
            progress("", percent / 100)  # the phase goes on
