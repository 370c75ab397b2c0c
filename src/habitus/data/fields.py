"""What the fields of a prepared dataset look like to a model, and how their arrays are laid out."""

from typing import Literal

import numpy as np
from pydantic import Field as Described

from habitus.typed import Typed

PADDING_TOKEN = 0
SEPARATOR_TOKEN = 1
UNKNOWN_CODE = 0  # of a category: missing, or a value that preparation did not see

EncodedKind = Literal["text", "category", "categories", "number", "vector"]


class Field(Typed):
    """One encoded field of items or of events. Missing is NaN, code 0 or no tokens, never a plain zero."""

    name: str
    kind: EncodedKind
    size: int = Described(1, ge=1, description="Tokens, codes with the unknown one, or length of the vector.")
    mean: float = Described(0.0, description="Of a number, over training events or over all items.")
    std: float = Described(1.0, gt=0)
    log_mean: float = Described(0.0, description="Of sign(x)·log(1+|x|), over the same.")
    log_std: float = Described(1.0, gt=0)
    width: int | None = Described(None, ge=1, description="Codes stored per item, of categories; absent otherwise.")
    rows: int | None = Described(
        None, ge=1, description="Distinct texts or vectors of the events, the missing one included; absent otherwise."
    )

    @property
    def is_coded(self) -> bool:
        """Whether values are tokens or codes, whole numbers below `size`; otherwise they are float32."""
        return self.kind in ("text", "category", "categories")

    @property
    def dtype(self) -> np.dtype:
        """In memory."""
        return np.dtype(np.int32 if self.is_coded else np.float32)

    @property
    def stored_dtype(self) -> np.dtype:
        """On disk: codes and tokens as narrow as their range allows."""
        return np.min_scalar_type(self.size - 1) if self.is_coded else np.dtype(np.float32)

    @property
    def record_dtype(self) -> np.dtype:
        """Of an event: its value, or the number of its text or vector."""
        return self.stored_dtype if self.rows is None else np.min_scalar_type(self.rows - 1)

    @property
    def missing(self) -> float:
        """What stands for a missing value."""
        return UNKNOWN_CODE if self.is_coded else np.nan

    def row_shape(self, text_len: int) -> tuple[int, ...]:
        """The shape of one value."""
        return {"text": (text_len,), "vector": (self.size,), "categories": (self.width or 1,)}.get(self.kind, ())


class Fields(Typed):
    """Item fields feed the embedder, event fields the contextualizer's input."""

    item: tuple[Field, ...]
    event: tuple[Field, ...]
    text_len: int = Described(0, ge=0, description="Tokens stored per text; 0 where there is no text.")


def item_file(number: int) -> str:
    """The file of an item field, by its place among them."""
    return f"items/field-{number:02d}.npy"
