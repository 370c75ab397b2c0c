"""Bytes of a training step by part: an estimate by structure, for 'does it fit' rather than for the last MiB.

Letters: h joint_dim, w width.
"""

from habitus.recipe import OPTIMIZERS, ModelRecipe, Optimizer, Precision
from habitus.sizing.executed import Workload
from habitus.sizing.structure import Breakdown, Inputs

_FLOAT32 = 4
_BFLOAT16 = 2

# Elements kept for the backward pass per token and unit of width, in one layer: the inputs of both norms and
# their outputs (4), queries, keys and values (3), attention's output (1), the MLP before and after GELU (8).
_KEPT_PER_TEXT_LAYER = 16
# Trained parameters above which several processes shard weights, gradients and moments (16 bytes each) rather than
# hold all of them each.
SHARD_ABOVE = 500_000_000
# The contextualizer also keeps its rotated queries and keys.
_KEPT_PER_CONTEXT_LAYER = 18
_KEPT_PER_PAIR = 4


def training_bytes(
    model: ModelRecipe,
    inputs: Inputs,
    parts: Breakdown,
    work: Workload,
    *,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
) -> dict[str, int]:
    """Bytes by part: weights, gradients, optimizer, activations, candidates; `total` is their sum."""
    trained = parts.params + parts.vocabulary_params
    if work.items == 0:  # stage 2: the embedder neither moves nor needs to be there
        tables = [count for name, count in parts.vocabulary.items() if name.startswith("contextualizer.")]
        trained = parts.contextualizer_params + sum(tables)
    parts_bytes = {
        "weights": trained * _FLOAT32,
        "gradients": trained * _FLOAT32,
        "optimizer": _optimizer_bytes(model, trained, optimizer, embedder=work.items > 0 and inputs.tokens > 0),
        "activations": activation_bytes(model, inputs, work, precision),
        "candidates": _candidate_bytes(model, work, precision),
    }
    return {**parts_bytes, "total": sum(parts_bytes.values())}


def _optimizer_bytes(model: ModelRecipe, trained: int, optimizer: Optimizer, *, embedder: bool) -> int:
    """Two float32 moments per parameter, but for the matrices of the transformer layers, of which Muon keeps one."""
    hidden = 12 * model.width**2 * model.depth
    if embedder:
        hidden += 12 * model.joint_dim**2 * model.text_depth
    return (2 * (trained - hidden) + OPTIMIZERS[optimizer].hidden_moments * hidden) * _FLOAT32


def activation_bytes(model: ModelRecipe, inputs: Inputs, work: Workload, precision: Precision) -> int:
    """What the backward pass keeps of the layers; everything outside them is small in comparison."""
    per_element = _BFLOAT16 if precision == "bf16" else _FLOAT32
    text = _KEPT_PER_TEXT_LAYER * model.joint_dim * model.text_depth * work.text_tokens if inputs.tokens else 0
    context = _KEPT_PER_CONTEXT_LAYER * model.width * model.depth * work.slots
    # By query and event of a window: scores, their exponentials and masks.
    copying = _KEPT_PER_PAIR * work.copied_pairs * _FLOAT32 if model.copying else 0
    return (text + context) * per_element + copying


def _candidate_bytes(model: ModelRecipe, work: Workload, precision: Precision) -> int:
    """The candidate axis: rows, their gradient in float32, and queries with theirs. Never queries × rows,
    except where the softmax is run on plain logits."""
    per_element = _BFLOAT16 if precision == "bf16" else _FLOAT32
    gradient = _FLOAT32 if work.items else 0
    rows = work.candidates * model.joint_dim * (per_element + gradient)
    queries = 2 * work.queries * model.joint_dim * per_element
    logits = 2 * work.queries * work.candidates * _FLOAT32 if work.softmax == "logits" else 0
    return rows + queries + logits


def item_cache_bytes(joint_dim: int, items: int) -> int:
    """The embedding cache of a whole catalogue, in bf16."""
    return items * joint_dim * _BFLOAT16
