"""Ctrl-C where it would do harm."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """A block that no Ctrl-C interrupts: one that came is raised at its end.

    For the import of native modules such as DuckDB's: an exception inside of it ends the process with an abort, and
    what was half written stays.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    received = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt
