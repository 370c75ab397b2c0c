"""The stage-1 cell that a plan buys: Equation 1 solved for D given N, B and s."""

import math
from dataclasses import dataclass, field

from habitus.errors import ConfigError
from habitus.planning.facts import DatasetProfile
from habitus.recipe import EvaluateRecipe, Precision
from habitus.sizing import (
    Cell,
    CellRequest,
    cell_of,
    contextualizer_parts,
    embedder_parts,
    solve,
    stage1_step_flops,
    tokens_per_item,
)

MIN_STEPS = 200
# Where no buildable model has exactly N*, the sizes that are tried instead; the nearest wins.
_SIZE_FACTORS = (1.0, 1.04, 0.96, 1.08, 0.92, 1.13, 0.88, 1.2, 0.83, 1.3, 0.77, 1.5, 0.67)
_NEAR = 0.1  # near enough to stop looking: 3% in N and 4% in s, for example


@dataclass(frozen=True)
class FixedSettings:
    """What does not depend on the budget."""

    dataset: DatasetProfile
    text_depth: int = 4
    head_dim: int | None = None  # None: the solver's choice
    optimizer: str = "adamw"
    precision: Precision = "bf16"
    copying: bool = False
    init: str | None = None  # of the laws, where they say
    evaluate: EvaluateRecipe = field(default_factory=EvaluateRecipe)  # as the runs behind the laws had it
    contexts: tuple[int, ...] = ()  # histories that the planned run is evaluated with
    batch_scale: float = 1.0  # windows of the plan for each that the laws mean, where its windows have another length

    def in_windows(self, batch: float) -> int:
        """A batch of the laws' windows in windows of the plan, with as many slots."""
        return max(1, round(batch * self.batch_scale))


def stage1_cell(C: float, N: float, s: float, B: int, fixed: FixedSettings) -> Cell:
    """The buildable model nearest to N with share s, trained for as long as C pays at batch B."""
    if _data_ratio(C, N, s, B, fixed) * N < B * fixed.dataset.seq_len:
        raise _too_small(C, fixed)  # not one step; and the search among shapes so large would take for ever
    last: ConfigError | None = None
    best, best_distance = None, math.inf
    for factor in _SIZE_FACTORS:
        request = CellRequest(
            batch_sequences=B,
            flops=C,
            share=s,
            data_ratio=_data_ratio(C, factor * N, s, B, fixed),
            seq_len=fixed.dataset.seq_len,
            text_len=fixed.dataset.text_len,
            text_depth=fixed.text_depth,
            head_dim=fixed.head_dim,
            copying=fixed.copying,
        )
        try:
            cell = solve(request, fixed.dataset.inputs)
        except ConfigError as error:
            last = error
            continue
        # The share has a broad valley and coarse steps, the size a narrow one: N counts twice.
        distance = 2 * abs(math.log(cell.params / N)) + abs(math.log(cell.embedder_share / s))
        if distance < best_distance:
            best, best_distance = cell, distance
        if distance < _NEAR:
            break
    if best is None:
        assert last is not None
        raise last
    return _with_plan_bytes(best, fixed)


def _with_plan_bytes(cell: Cell, fixed: FixedSettings) -> Cell:
    """The same cell with the bytes of the plan's own optimizer and precision."""
    return cell_of(
        cell.model,
        batch_sequences=cell.batch_sequences,
        steps=cell.steps,
        seq_len=cell.seq_len,
        stage=cell.stage,
        num_negatives=cell.num_negatives,
        inputs=fixed.dataset.inputs,
        precision=fixed.precision,
        optimizer=fixed.optimizer,
        wanted=cell.wanted,
        catalogue_items=fixed.dataset.num_items,
    )


def slots_for(C: float, N: float, s: float, B: int, fixed: FixedSettings) -> float:
    """D of Equation 1 at a real-numbered N."""
    return _data_ratio(C, N, s, B, fixed) * N


def _data_ratio(C: float, N: float, s: float, B: int, fixed: FixedSettings) -> float:
    """D/N of Equation 1 at a real-numbered N: C = 6·D·(t·s·N + (1 − s)·N + 3·B·L·h), h from p_e = s·N."""
    t = tokens_per_item(fixed.dataset.text_len, fixed.dataset.inputs)
    h = _joint_dim(s * N, fixed)
    per_slot = t * s * N + (1 - s) * N + 3 * B * fixed.dataset.seq_len * h
    return C / (6 * per_slot) / N


def _joint_dim(p_e: float, fixed: FixedSettings) -> float:
    """h as a real number whose embedder has p_e parameters: p_e is a quadratic in h."""

    def count(h: int) -> int:
        return sum(embedder_parts(h, fixed.text_depth, fixed.dataset.text_len, fixed.dataset.inputs).values())

    one, two = count(1), count(2)
    a = (two - 2 * one) / 2
    b = one - a
    return max(4.0, (-b + math.sqrt(b * b + 4 * a * p_e)) / (2 * a))


def largest_batch(C: float, N: float, s: float, B: int, fixed: FixedSettings) -> int:
    """The largest power of two up to B that leaves MIN_STEPS steps of stage 1; refused where not even 1 does."""
    while B >= 1:
        steps = _data_ratio(C, N, s, B, fixed) * N / (B * fixed.dataset.seq_len)
        if steps >= MIN_STEPS:
            return B
        B //= 2
    raise _too_small(C, fixed)


def _too_small(C: float, fixed: FixedSettings) -> ConfigError:
    """The error that names the least budget with MIN_STEPS steps of the smallest model."""
    least = _least_flops(fixed)
    return ConfigError(
        f"{C:.3g} FLOPs for stage 1 do not pay {MIN_STEPS} steps of the model that the laws ask for, at any batch",
        expected=f"at least {least:.2g} FLOPs for stage 1, {MIN_STEPS} steps of the smallest model",
        next_step="raise --flops, or lower --stage2-share",
    )


def _least_flops(fixed: FixedSettings) -> float:
    """MIN_STEPS steps of the smallest buildable model, one window each."""
    dataset = fixed.dataset
    p_e = sum(embedder_parts(4, fixed.text_depth, dataset.text_len, dataset.inputs).values())
    p = sum(contextualizer_parts(4, 4, 1, dataset.inputs, copying=fixed.copying).values())
    t = tokens_per_item(dataset.text_len, dataset.inputs)
    return float(MIN_STEPS * stage1_step_flops(p_e, p, B=1, L=dataset.seq_len, t=t, h=4))
