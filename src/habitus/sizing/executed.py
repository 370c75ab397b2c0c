"""Executed compute: what a training step really multiplies, for MFU and time. It is never the axis of a law.

It differs from Equation 1 in four ways: each unique item is embedded once, padding is skipped, attention has
its own term, and the softmax counts as it is run. Letters: h joint_dim, w width, n items embedded in a step.
"""

from dataclasses import dataclass
from typing import Literal

from habitus.recipe import ModelRecipe
from habitus.sizing.structure import NUMBER_FEATURES, ONE_HOT_ROWS, Inputs, copy_dim

SoftmaxForm = Literal["attention", "logits", "none"]

# A linear map costs its forward pass again for the gradient of its input and once more for that of its weight.
_LINEAR, _LINEAR_OF_CONSTANTS = 3, 2
# Fused attention multiplies twice forward and five times backward, since it computes the scores again.
_ATTENTION = 1 + 5 / 2


@dataclass(frozen=True)
class Workload:
    """What one training step holds, in whole counts."""

    slots: int  # B·L
    items: int  # embedded in the step: unique inputs and targets; 0 in stage 2
    text_tokens: int  # of those items, padding left out
    text_pairs: int  # sum over items of tokens², what bidirectional attention scores
    context_pairs: int  # scored by the contextualizer: L² per window under a mask, Σ l(l+1)/2 when packed
    queries: int
    candidates: int
    softmax: SoftmaxForm = "attention"
    copied_pairs: int = 0  # pairs of slots of a window, masked or not, that copying scores

    @classmethod
    def expected(cls, *, B: int, L: int, t: int, K: int = 0, stage: int = 1, unique_share: float = 0.5) -> "Workload":
        """A step as it is before any data is known: full windows, one user each, all t tokens in use.

        Half of the slots are taken to hold an item that no other slot of the batch holds.
        """
        items = max(1, round(B * L * unique_share))
        embedded = items if stage == 1 else 0
        return cls(
            slots=B * L,
            items=embedded,
            text_tokens=embedded * t,
            text_pairs=embedded * t * t,
            context_pairs=B * L * (L + 1) // 2,
            queries=B * (L - 1),
            candidates=items + K,
            copied_pairs=B * L * L,
        )


def executed_step_flops(model: ModelRecipe, inputs: Inputs, work: Workload) -> dict[str, float]:
    """FLOPs of one training step by part: text, text_attention, fields, contextualizer, attention, softmax."""
    h, w = model.joint_dim, model.width
    frozen = work.items == 0
    input_cost = _LINEAR_OF_CONSTANTS if frozen else _LINEAR
    text = 2 * 12 * h * h * model.text_depth * work.text_tokens if inputs.tokens else 0
    text_attention = 4 * h * model.text_depth * work.text_pairs if inputs.tokens else 0
    positions = 2 * h * model.text_len * work.text_tokens if inputs.tokens else 0  # one-hot times table
    item_constants = NUMBER_FEATURES * inputs.item_numbers + sum(inputs.item_vectors)
    item_constants += _multiplied_rows(inputs.item_categories) + _multiplied_rows(inputs.item_category_lists)
    constants = 2 * h * item_constants * work.items
    fusion = 2 * 2 * h * h * work.items
    event_constants = NUMBER_FEATURES * inputs.event_numbers + _multiplied_rows(inputs.event_categories)
    event_constants += sum(inputs.event_vectors)
    event_fields = 2 * w * event_constants * work.slots
    layers = 2 * (12 * w * w * model.depth + w * h) * work.slots
    copied = 2 * copy_dim(w) * (2 * w * work.slots + work.copied_pairs)
    return {
        "text": float(_LINEAR * text + _LINEAR_OF_CONSTANTS * positions),
        "text_attention": _ATTENTION * text_attention,
        "fields": float(_LINEAR * fusion + _LINEAR_OF_CONSTANTS * (constants + event_fields)),
        "contextualizer": float(_LINEAR * layers + input_cost * 2 * h * w * work.slots),
        "attention": _ATTENTION * 4 * w * model.depth * work.context_pairs,
        **({"copying": float(_LINEAR * copied)} if model.copying else {}),
        "softmax": _softmax_flops(work, h),
    }


def _multiplied_rows(categories: tuple[int, ...]) -> int:
    """Rows of small tables, which are multiplied by one-hot rows rather than looked up."""
    return sum(categories) if sum(categories) <= ONE_HOT_ROWS else 0


def _softmax_flops(work: Workload, h: int) -> float:
    """FLOPs of scoring queries against candidates, with gradients: M·V·h times what the form multiplies.

    In attention form two products give loss and query gradient, and two more the candidates' (docs/softmax.md);
    with logits, one product forward and one per gradient. Stage 2 needs no gradient of its candidates.
    """
    if work.softmax == "none":
        return 0.0
    frozen = work.items == 0
    products = {"attention": 2 if frozen else 4, "logits": 2 if frozen else 3}[work.softmax]
    return 2.0 * products * work.queries * work.candidates * h
