"""Arrays on disk: appended to without being held, and mapped when read."""

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.lib import format as npy


class ArrayWriter:
    """Appends rows to one .npy file; memory stays at the size of a chunk."""

    def __init__(self, path: Path, dtype: np.typing.DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape
        self.rows = 0
        self._file = path.open("w+b")
        self._write_header()

    def append(self, rows: np.ndarray) -> None:
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"rows of shape {rows.shape[1:]} appended to an array of rows {self.row_shape}")
        self._file.write(rows.data)
        self.rows += len(rows)

    def close(self) -> None:
        if not self._file.closed:
            self._file.seek(0)
            self._write_header()  # numpy leaves room for the length to grow, so the header keeps its size
            self._file.close()

    def _write_header(self) -> None:
        descr = npy.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.rows, *self.row_shape)}
        npy.write_array_header_1_0(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with suppress(OSError):  # a full disk refuses what is still in the buffer, too
                self._file.close()


def write_array(path: Path, values: np.ndarray) -> None:
    """Write an array as .npy."""
    with ArrayWriter(path, values.dtype, values.shape[1:]) as writer:
        writer.append(values)


def map_array(path: Path) -> np.ndarray:
    """The array of a .npy file, mapped read-only. An empty one is read, since nothing can be mapped."""
    array = np.load(path, mmap_mode="r", allow_pickle=False) if path.stat().st_size > 0 else np.empty(0)
    return np.asarray(array)  # a plain view of the map: indexing a memmap subclass costs microseconds each time
