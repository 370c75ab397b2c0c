"""The nearest buildable cell to 'this budget, this share, this much data'.

For every embedder width h, Equation 1 is solved for the contextualizer's size p as a real number. The buildable
(width, depth) around it are compared, and steps take up the rest of the budget.
`tests/sizing` holds a brute-force twin that searches everything and must agree.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from habitus.errors import ConfigError
from habitus.recipe import ModelRecipe
from habitus.sizing.cell import Cell, cell_of
from habitus.sizing.nominal import attention_term, stage1_step_flops
from habitus.sizing.request import CellRequest, check_request
from habitus.sizing.structure import (
    TYPICAL_INPUTS,
    Inputs,
    block_params,
    contextualizer_parts,
    embedder_parts,
    tokens_per_item,
)

_RATIO_TOLERANCE = 0.05  # of D/N, or of the steps requested
_HEAD_DIMS = (32, 40, 24, 48, 56, 64, 16, 8, 4)  # where the request leaves head_dim free; 32 is preferred
_TARGET_ASPECT = 40.0  # width / depth; the paper's cells lie between 16 and 80

# What a deviation weighs, in units of ln: 5% of D/N as much as a factor 1.65 in aspect, any head size but 32 (small
# heads are slow on every device, and fused attention pads the others) as much as a factor 2.3 or more.
_RATIO_WEIGHT = 10.0
# How far, in ln, a realised share may stray from the one of real-numbered p while D/N is within tolerance. Under
# a budget with a number of steps only the total is held, and p, a small part of it at large shares, may go far.
_SHARE_SLACK = 0.15
_SHARE_SLACK_BY_STEPS = 2.0


@dataclass(frozen=True)
class _Candidate:
    """A buildable model with its steps, and how far it is from the request."""

    joint_dim: int
    width: int
    depth: int
    head_dim: int
    steps: int
    share: float
    data_ratio: float
    miss: float  # largest |ln(realised / requested)| of D/N and steps
    cost: float


def solve(request: CellRequest, inputs: Inputs = TYPICAL_INPUTS, *, catalogue_items: int | None = None) -> Cell:
    """The cell nearest to the request: first in share, then in D/N and shape; its total meets the budget.

    The total is within half a step of `flops`, and D/N (or `steps`) within 5% of the request.
    """
    check_request(request)
    best = _nearest_candidate(request, inputs)
    model = ModelRecipe(
        joint_dim=best.joint_dim,
        text_len=request.text_len,
        text_depth=request.text_depth,
        width=best.width,
        depth=best.depth,
        head_dim=best.head_dim,
        copying=request.copying,
    )
    return cell_of(
        model,
        batch_sequences=request.batch_sequences,
        steps=best.steps,
        seq_len=request.seq_len,
        inputs=inputs,
        attention=request.attention,
        wanted=request.targets(),
        catalogue_items=catalogue_items,
    )


def joint_dims() -> Iterator[int]:
    """The buildable embedder widths in rising order: multiples of 4 below 64, of 8 from there."""
    yield from range(4, 64, 4)
    yield from range(64, 65_536, 8)


def _nearest_candidate(request: CellRequest, inputs: Inputs) -> _Candidate:
    if request.joint_dim is not None:
        candidate = _best_shape(request, inputs, request.joint_dim)
        if candidate is None:
            raise _impossible(request, inputs, request.joint_dim)
        return candidate

    assert request.share is not None
    by_distance = sorted(_continuous_distances(request, inputs))
    slack = _SHARE_SLACK if request.data_ratio is not None or request.shape_given else _SHARE_SLACK_BY_STEPS
    best, best_distance = None, math.inf
    for distance, h in by_distance:
        if distance > best_distance + slack:
            break
        candidate = _best_shape(request, inputs, h)
        if candidate is not None and abs(math.log(candidate.share / request.share)) < best_distance:
            best, best_distance = candidate, abs(math.log(candidate.share / request.share))
    if best is None:
        raise _impossible(request, inputs, by_distance[0][1])
    return best


def _continuous_distances(request: CellRequest, inputs: Inputs) -> Iterator[tuple[float, int]]:
    """(|ln(share / request.share)|, h) with p as a real number, until the share is far beyond the requested one.

    Where p would have to be smaller than any contextualizer, the smallest one stands for it: within tolerance
    such a cell may still be buildable.
    """
    assert request.share is not None
    beyond = 0
    for h in joint_dims():
        p_e = sum(embedder_parts(h, request.text_depth, request.text_len, inputs).values())
        p = _target_contextualizer(request, inputs, h)
        beyond += p <= 0
        share = p_e / (
            p_e + max(p, sum(contextualizer_parts(h, min(_HEAD_DIMS), 1, inputs, copying=request.copying).values()))
        )
        yield abs(math.log(share / request.share)), h
        if share > request.share * 8 or beyond > 2:
            return


def _target_contextualizer(request: CellRequest, inputs: Inputs, h: int, width: int | None = None) -> float:
    """p as a real number, at which the request is met exactly with an embedder of width h.

    With D = r·N the budget reads C = 6·r·(p_e + p)·(k·p + a), a = t·p_e + 3·B·L·h: a quadratic in p. k is 1, or where
    attention is counted 1 + L/(12·width), about: exactly so for the layers, and a takes off what is no layer.
    """
    if request.width is not None and request.depth is not None:
        return sum(contextualizer_parts(h, request.width, request.depth, inputs, copying=request.copying).values())
    p_e = sum(embedder_parts(h, request.text_depth, request.text_len, inputs).values())
    slots = request.batch_sequences * request.seq_len
    a: float = tokens_per_item(request.text_len, inputs) * p_e + 3 * slots * h
    k = 1.0
    if request.attention and request.flops is not None:
        width = width or request.width or _typical_width(request, inputs, h)
        k += request.seq_len * width / block_params(width)
        a -= (k - 1) * sum(contextualizer_parts(h, width, 0, inputs, copying=request.copying).values())
    if request.flops is not None and request.data_ratio is not None:
        half = (p_e + a / k) / 2
        return -half + math.sqrt(half * half - p_e * a / k + request.flops / (6 * request.data_ratio) / k)
    assert request.steps is not None
    if request.flops is not None:
        return (request.flops / (6 * slots * request.steps) - a) / k
    assert request.data_ratio is not None
    return request.steps * slots / request.data_ratio - p_e


def _typical_width(request: CellRequest, inputs: Inputs, h: int) -> int:
    """The width of a contextualizer of the preferred aspect at which the request is met; attention costs by it."""
    depth, width = request.depth, 64
    for _ in range(8):  # from any start the width settles within a few rounds
        p = max(1.0, _target_contextualizer(request, inputs, h, width))
        width = max(4, round((p * _TARGET_ASPECT / 12) ** (1 / 3) if depth is None else math.sqrt(p / (12 * depth))))
    return width


def _best_shape(request: CellRequest, inputs: Inputs, h: int) -> _Candidate | None:
    """The cheapest candidate with this joint_dim whose D/N (or steps) is within tolerance, if there is one."""
    within = [c for c in _candidates(request, inputs, h) if c.miss <= math.log1p(_RATIO_TOLERANCE)]
    return min(within, key=lambda c: (c.cost, c.width, c.head_dim), default=None)


def _candidates(request: CellRequest, inputs: Inputs, h: int) -> Iterator[_Candidate]:
    # Without attention's term no model is larger, so that it bounds the widths.
    largest = _target_contextualizer(replace(request, attention=False), inputs, h)
    head_dims = _HEAD_DIMS if request.head_dim is None else (request.head_dim,)
    for head_dim in head_dims:
        for width in _widths(request, head_dim, largest):
            target = _target_contextualizer(request, inputs, h, width) if request.attention else largest
            for depth in _depths(request, inputs, h, width, target):
                candidate = _build_candidate(request, inputs, h, width, depth, head_dim)
                if candidate is not None:
                    yield candidate


def _widths(request: CellRequest, head_dim: int, target: float) -> Iterator[int]:
    if request.width is not None:
        if request.width % head_dim == 0:
            yield request.width
        return
    # One layer of width w already holds 12w², so nothing above sqrt(target / 12) can fit, tolerance aside.
    depth = request.depth or 1
    yield from range(head_dim, int(1.1 * math.sqrt(max(0.0, target) / (12 * depth))) + head_dim + 1, head_dim)


def _depths(request: CellRequest, inputs: Inputs, h: int, width: int, target: float) -> tuple[int, ...]:
    if request.depth is not None:
        return (request.depth,)
    outside = sum(contextualizer_parts(h, width, 0, inputs, copying=request.copying).values())
    layers = (target - outside) / block_params(width)
    below = max(1, math.floor(layers))
    return (below, below + 1)


def _build_candidate(
    request: CellRequest, inputs: Inputs, h: int, width: int, depth: int, head_dim: int
) -> _Candidate | None:
    """The candidate of these dimensions; None where not even one step fits the budget."""
    p_e = sum(embedder_parts(h, request.text_depth, request.text_len, inputs).values())
    p = sum(contextualizer_parts(h, width, depth, inputs, copying=request.copying).values())
    t = tokens_per_item(request.text_len, inputs)
    B, L = request.batch_sequences, request.seq_len
    counted = p + (attention_term(width, depth, L=L) if request.attention else 0)
    step_flops = stage1_step_flops(p_e, counted, B=B, L=L, t=t, h=h)
    if request.flops is not None:
        steps = round(request.flops / step_flops)
    elif request.steps is not None:
        steps = request.steps
    else:
        assert request.data_ratio is not None
        steps = round(request.data_ratio * (p_e + p) / (B * L))
    if steps < 1:
        return None
    ratio = steps * B * L / (p_e + p)
    misses = [0.0]
    if request.data_ratio is not None:
        misses.append(abs(math.log(ratio / request.data_ratio)))
    if request.steps is not None:
        misses.append(abs(math.log(steps / request.steps)))
    aspect = abs(math.log(width / depth / _TARGET_ASPECT))
    cost = aspect + _RATIO_WEIGHT * max(misses) + _head_cost(head_dim)
    return _Candidate(h, width, depth, head_dim, steps, p_e / (p_e + p), ratio, max(misses), cost)


def _head_cost(head_dim: int) -> float:
    """How far a head is from the preferred size, and how much fused attention pads it, in powers of two."""
    padded = max(16, 1 << (head_dim - 1).bit_length())
    return abs(math.log2(_HEAD_DIMS[0] / head_dim)) + math.log2(padded / head_dim)


def _impossible(request: CellRequest, inputs: Inputs, h: int) -> ConfigError:
    """The error that names the constraint which cannot be met, and what comes nearest."""
    target = _target_contextualizer(request, inputs, h)
    if target <= 0:
        slots = request.batch_sequences * request.seq_len
        return ConfigError(
            f"an embedder of joint_dim {h} leaves no compute for a contextualizer: with {slots} slots per "
            "step its share of Equation 1, t·p_e + 3·B·L·h, already exceeds the budget",
            expected="a budget, or a number of steps, that pays for both parts",
            next_step="lower batch_sequences, joint_dim or steps, or raise flops",
        )
    candidates = list(_candidates(request, inputs, h))
    head_dim = request.head_dim or min(_HEAD_DIMS)
    if not candidates:
        multiple = request.width is not None and request.width % head_dim
        return ConfigError(
            f"width = {request.width} is not a multiple of any head size (smallest {head_dim})"
            if multiple
            else "one step of the smallest buildable model costs more than the budget",
            expected=f"a multiple of {head_dim}" if multiple else "a budget of at least one step",
            next_step=f"take width = {max(1, round((request.width or 0) / head_dim)) * head_dim}"
            if multiple
            else "lower batch_sequences, or raise flops",
        )
    closest = min(candidates, key=lambda c: c.miss)
    if request.data_ratio is not None:
        goal, realised = f"data_ratio = {request.data_ratio:g}", f"data_ratio {closest.data_ratio:.4g}"
    else:
        goal, realised = f"steps = {request.steps}", f"{closest.steps} steps"
    smallest = sum(contextualizer_parts(h, head_dim, request.depth or 1, inputs, copying=request.copying).values())
    if request.shape_given:
        why = "width, depth and the rest decide it"
    elif target < smallest:
        why = f"it needs a contextualizer of {target:.0f} parameters, and the smallest buildable one has {smallest}"
    else:
        why = "width is a multiple of the head size and depth a whole number"
    return ConfigError(
        f"{goal} cannot be met within {_RATIO_TOLERANCE:.0%} at joint_dim {h}: {why}; "
        f"width {closest.width} with depth {closest.depth} comes closest, with {realised}",
        expected=f"a request that some width, depth and joint_dim meet within {_RATIO_TOLERANCE:.0%}",
        next_step="leave width, depth or head_dim free, lower share or batch_sequences, or change the budget",
    )
