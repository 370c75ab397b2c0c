"""Nominal compute: the axis of every law. Whole numbers, exactly as Equation 1 counts them.

Letters: B batch_sequences, L seq_len, t text tokens per item, h joint_dim, K num_negatives, T steps, I items.
"""

from habitus.errors import ConfigError


def stage1_step_flops(p_e: int, p: int, *, B: int, L: int, t: int, h: int) -> int:
    """F_step = 6·B·L·(t·p_e + p + 3·B·L·h), the paper's Equation 1."""
    return 6 * B * L * (t * p_e + p + 3 * B * L * h)


def stage2_step_flops(p: int, *, B: int, L: int, h: int, K: int) -> int:
    """F_step = 6·B·L·(p + 3·(B·L + K)·h). Ours: the paper prints no formula for the frozen stage."""
    return 6 * B * L * (p + 3 * (B * L + K) * h)


def attention_term(width: int, depth: int, *, L: int) -> int:
    """L·width·depth, which joins p where attention is counted: 6·D·L·width·depth over D slots.

    Scores and sums of a causal window multiply 2·L·width per slot and layer, and three times that with gradients. The
    paper's Equation 1 leaves it out. Of the layers' 12·depth·width² it is L/(12·width): 4% at width 512 and L = 256,
    two thirds at width 128 and L = 1,024.
    """
    return L * width * depth


def item_cache_flops(p_e: int, *, t: int, items: int) -> int:
    """2·I·t·p_e: one forward pass of the embedder over the catalogue, reported apart from both stages."""
    return 2 * items * t * p_e


def embedder_flop_share(p_e: int, p: int, *, B: int, L: int, t: int, h: int) -> float:
    """f = (t·p_e + 3·B·L·h) / (t·p_e + p + 3·B·L·h), the paper's cross-check axis."""
    embedder_side = t * p_e + 3 * B * L * h
    return embedder_side / (embedder_side + p)


def steps_for(budget: float, step_flops: int) -> int:
    """T, the whole number of steps whose total is nearest to the budget; refused below half a step."""
    steps = round(budget / step_flops)
    if steps < 1:
        raise ConfigError(
            f"one step costs {step_flops:.3g} FLOPs, more than the budget of {budget:.3g}",
            expected="a budget of at least one step",
            next_step="lower batch_sequences, joint_dim or the model's size, or raise the budget",
        )
    return steps


def largest_num_negatives(budget: float, p: int, *, B: int, L: int, h: int, min_steps: int = 200) -> int | None:
    """The largest K that leaves `min_steps` steps of stage 2 in the budget; None where K = 0 does not."""
    K = int((budget / (min_steps * 6 * B * L) - p) / (3 * h)) - B * L
    return K if K >= 0 else None
