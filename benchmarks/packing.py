"""The Records of a store that is at work, packed into one file now and then."""

import time
from pathlib import Path

from habitus.store import pack_store
from habitus.sweeps import SweepProgress

EVERY_SECONDS = 60.0


class Packer:
    """Packs the Records so far once a minute: a rented machine takes with it what was not copied."""

    def __init__(self, store: Path, archive: Path) -> None:
        self.store, self.archive, self.packed = store, archive, time.monotonic()

    def __call__(self, _progress: SweepProgress) -> None:
        if time.monotonic() - self.packed > EVERY_SECONDS:
            self.pack()

    def pack(self) -> None:
        if any((self.store / "cells").glob("*/record.json")):
            pack_store(self.store, self.archive)
        self.packed = time.monotonic()
