"""What the fields of a prepared dataset look like to a model."""

from typing import Literal

from pydantic import Field as Described

from habitus.typed import Typed

PADDING_TOKEN = 0
SEPARATOR_TOKEN = 1
UNKNOWN_CODE = 0  # of a category: missing, or a value that preparation did not see


class Field(Typed):
    """One encoded field of items or of events. Missing is NaN, code 0 or no tokens, never a plain zero."""

    name: str
    kind: Literal["text", "category", "number", "vector"]
    size: int = Described(1, ge=1, description="Tokens, codes with the unknown one, or length of the vector.")
    mean: float = Described(0.0, description="Of a number, over training events or over all items.")
    std: float = Described(1.0, gt=0)
    log_mean: float = Described(0.0, description="Of sign(x)·log(1+|x|), over the same.")
    log_std: float = Described(1.0, gt=0)


class Fields(Typed):
    """Item fields feed the embedder, event fields the contextualizer's input."""

    item: tuple[Field, ...]
    event: tuple[Field, ...]
    text_len: int = Described(0, ge=0, description="Tokens stored per item; 0 where there is no text.")
