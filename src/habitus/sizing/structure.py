"""How many parameters a model has, part by part, without building it.

The paper's letters: h joint_dim, t text tokens per item, p_e and p the two parts without vocabulary tables.
`habitus.model` builds its modules under the very names used here, and a test compares the two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from habitus.recipe import ModelRecipe
from habitus.record import Params

# Periodic features of one number: sine and cosine at 8 frequencies, of its standardised and of its log value.
NUMBER_FREQUENCIES = 8
NUMBER_FEATURES = 2 * 2 * NUMBER_FREQUENCIES

LAG_KNOTS = 14  # of the function of the lag, one and a half per doubling: 400 events back, flat beyond

ONE_HOT_ROWS = 64  # category tables of at most so many rows are multiplied rather than looked up

_LARGEST_TEXT_HEAD = 80  # unless only larger ones divide


class _Field(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def size(self) -> int: ...


class _Fields(Protocol):
    @property
    def item(self) -> Sequence[_Field]: ...
    @property
    def event(self) -> Sequence[_Field]: ...


@dataclass(frozen=True)
class Inputs:
    """What the fields of a dataset mean for the size of a model: how many of each kind, and how large."""

    tokens: int = 0  # rows of the token table; 0 where no field is text
    item_categories: tuple[int, ...] = ()  # rows of each table, the unknown one included
    item_category_lists: tuple[int, ...] = ()  # likewise, of fields that hold several categories of an item
    item_numbers: int = 0
    item_vectors: tuple[int, ...] = ()  # length of each vector
    event_categories: tuple[int, ...] = ()
    event_numbers: int = 0
    event_texts: tuple[int, ...] = ()  # tokens of each text's vocabulary
    event_vectors: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: _Fields) -> "Inputs":
        """The inputs of a prepared dataset's fields. All text fields of an item share one token table."""
        return cls(
            tokens=max((f.size for f in fields.item if f.kind == "text"), default=0),
            item_categories=tuple(f.size for f in fields.item if f.kind == "category"),
            item_category_lists=tuple(f.size for f in fields.item if f.kind == "categories"),
            item_numbers=sum(f.kind == "number" for f in fields.item),
            item_vectors=tuple(f.size for f in fields.item if f.kind == "vector"),
            event_categories=tuple(f.size for f in fields.event if f.kind == "category"),
            event_numbers=sum(f.kind == "number" for f in fields.event),
            event_texts=tuple(f.size for f in fields.event if f.kind == "text"),
            event_vectors=tuple(f.size for f in fields.event if f.kind == "vector"),
        )


# Assumed where no dataset is named: text, two categories and a price per item; the type of an event, and two
# numbers of it. Only vocabulary tables and a few small projections depend on it.
TYPICAL_INPUTS = Inputs(
    tokens=16_384, item_categories=(1_024, 4_096), item_numbers=1, event_categories=(8,), event_numbers=2
)


@dataclass(frozen=True)
class Breakdown:
    """Parameters by part. The sums are what the laws and Equation 1 use."""

    embedder: dict[str, int]
    contextualizer: dict[str, int]
    vocabulary: dict[str, int]

    @property
    def embedder_params(self) -> int:
        """p_e"""
        return sum(self.embedder.values())

    @property
    def contextualizer_params(self) -> int:
        """p"""
        return sum(self.contextualizer.values())

    @property
    def vocabulary_params(self) -> int:
        """Token and category tables, which neither part counts."""
        return sum(self.vocabulary.values())

    @property
    def params(self) -> int:
        """N = p_e + p"""
        return self.embedder_params + self.contextualizer_params

    @property
    def share(self) -> float:
        """s = p_e / N"""
        return self.embedder_params / self.params

    def as_record(self) -> Params:
        return Params(
            embedder=self.embedder_params,
            contextualizer=self.contextualizer_params,
            vocabulary=self.vocabulary_params,
        )


def breakdown(model: ModelRecipe, inputs: Inputs) -> Breakdown:
    """The parameters of `model` on such inputs; every part is named as the module that holds it."""
    texts = () if model.event_text == "shared" else inputs.event_texts
    return Breakdown(
        embedder=embedder_parts(model.joint_dim, model.text_depth, model.text_len, inputs),
        contextualizer=contextualizer_parts(
            model.joint_dim, model.width, model.depth, inputs, copying=model.copying, event_text=model.event_text
        ),
        vocabulary={
            "embedder.text.tokens": inputs.tokens * model.joint_dim,
            "embedder.categories": sum(inputs.item_categories) * model.joint_dim,
            "embedder.category_lists": sum(inputs.item_category_lists) * model.joint_dim,
            "contextualizer.events.categories": sum(inputs.event_categories) * model.width,
            **{f"contextualizer.events.texts.{n}.tokens": size * model.width for n, size in enumerate(texts)},
        },
    )


def embedder_parts(h: int, text_depth: int, text_len: int, inputs: Inputs) -> dict[str, int]:
    """p_e by part: text_depth·(12h² + norms) where there is text, 2h² of fusion, and the small rest."""
    text = inputs.tokens > 0
    return {
        "embedder.text.positions": text_len * h if text else 0,
        "embedder.text.blocks": block_params(h) * text_depth if text else 0,
        "embedder.text.norm": h if text else 0,
        "embedder.text.missing": h if text else 0,
        "embedder.numbers": (NUMBER_FEATURES + 1) * h * inputs.item_numbers,  # + 1: the vector of a missing value
        "embedder.vectors": sum(size + 1 for size in inputs.item_vectors) * h,
        "embedder.fusion": 2 * h * h + h,
    }


def contextualizer_parts(
    h: int, width: int, depth: int, inputs: Inputs, *, copying: bool = False, event_text: str = "own"
) -> dict[str, int]:
    """p by part: depth·(12·width² + norms), both projections, the event-field encoder's non-table part.

    A text of the events has a vector for a missing one and, with an encoder of its own, a norm; a shared encoder is
    counted where it stands, in p_e, and its projection here.
    """
    per_text = (h if event_text == "shared" else 1) * width + width
    return {
        "contextualizer.input": h * width,
        "contextualizer.events.numbers": (NUMBER_FEATURES + 1) * width * inputs.event_numbers,
        **({"contextualizer.events.texts": per_text * len(inputs.event_texts)} if inputs.event_texts else {}),
        **(
            {"contextualizer.events.vectors": sum(size + 1 for size in inputs.event_vectors) * width}
            if inputs.event_vectors
            else {}
        ),
        "contextualizer.blocks": block_params(width) * depth,
        "contextualizer.norm": width,
        "contextualizer.output": width * h,
        "contextualizer.gain": 1,
        **({"contextualizer.copying": (2 * copy_dim(width) + 1) * width + LAG_KNOTS} if copying else {}),
    }


def copy_dim(width: int) -> int:
    """The width of the queries and keys of the copy head."""
    return max(4, min(32, width // 4))


def block_params(width: int) -> int:
    """One transformer layer: queries, keys, values 3w², output w², MLP 8w², two norms."""
    return 12 * width * width + 2 * width


def tokens_per_item(text_len: int, inputs: Inputs) -> int:
    """t of Equation 1: how often an item touches each embedder weight. Without text, once."""
    return text_len if inputs.tokens else 1


def text_heads(h: int) -> int:
    """Attention heads of the text encoder: few, and such that little is padded.

    Fused attention pads a head to a power of two (32 at least), and loads best where a head begins at a
    multiple of 16 bytes; short texts gain nothing from many narrow heads.
    """
    sizes = [size for size in range(2, h + 1, 2) if h % size == 0 and size >= min(h, 16)]

    def cost(size: int) -> tuple[bool, int, int, int]:
        heads, padded = h // size, max(32, 1 << (size - 1).bit_length())
        return size > _LARGEST_TEXT_HEAD, heads * padded, -math.gcd(size, 8), heads

    return h // min(sizes, key=cost)
