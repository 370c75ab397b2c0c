"""A Cell: a model that can be built, how long it trains, and everything that it costs.

Letters: B batch_sequences, L seq_len, t tokens per item, h joint_dim, K num_negatives, T steps, N params, D slots.
"""

import math
from typing import Literal

from pydantic import Field

from habitus.recipe import ModelRecipe, Optimizer, Precision, Recipe
from habitus.sizing.executed import Workload, executed_step_flops
from habitus.sizing.memory import item_cache_bytes, training_bytes
from habitus.sizing.nominal import (
    attention_term,
    embedder_flop_share,
    item_cache_flops,
    stage1_step_flops,
    stage2_step_flops,
)
from habitus.sizing.structure import TYPICAL_INPUTS, Inputs, breakdown, tokens_per_item
from habitus.typed import Typed


class Cell(Typed):
    """One point of a sweep before it is trained. Shares and ratios are those of the model as built."""

    model: ModelRecipe
    stage: Literal[1, 2] = 1
    batch_sequences: int
    seq_len: int
    steps: int
    num_negatives: int = 0

    params: int = Field(description="N = embedder_params + contextualizer_params.")
    embedder_params: int
    contextualizer_params: int
    vocabulary_params: int
    embedder_share: float
    slots_seen: int = Field(description="D = steps · batch_sequences · seq_len.")
    data_ratio: float = Field(description="D/N.")

    flops_per_step: int = Field(description="Equation 1; stage 2 by its own formula.")
    flops: int = Field(description="Nominal training FLOPs.")
    embedder_flop_share: float | None = Field(None, description="f; stage 1 only.")
    executed_flops: float = Field(description="As run: unique items, real tokens, attention, softmax.")
    bytes: dict[str, int] = Field(description="Of one training step, by part; `item_cache` apart from the total.")
    flops_item_cache: int | None = Field(None, description="Embedding the catalogue once, where its size is known.")
    breakdown: dict[str, int] = Field(description="Parameters by module.")
    wanted: dict[str, float] = Field(
        default_factory=dict, description="What was requested, where the cell may differ from it."
    )


def cell_of(
    model: ModelRecipe,
    *,
    batch_sequences: int,
    steps: int,
    seq_len: int = 256,
    stage: Literal[1, 2] = 1,
    num_negatives: int = 0,
    inputs: Inputs = TYPICAL_INPUTS,
    work: Workload | None = None,
    attention: bool = False,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    wanted: dict[str, float] | None = None,
    catalogue_items: int | None = None,
) -> Cell:
    """The cell of a model that trains for `steps`; `work` replaces the expected content of one step.

    With `attention` its own term counts among the nominal FLOPs.
    """
    parts = breakdown(model, inputs)
    p_e, p = parts.embedder_params, parts.contextualizer_params
    B, L, h, t = batch_sequences, seq_len, model.joint_dim, tokens_per_item(model.text_len, inputs)
    counted = p + (attention_term(model.width, model.depth, L=L) if attention else 0)
    if stage == 1:
        step_flops = stage1_step_flops(p_e, counted, B=B, L=L, t=t, h=h)
    else:
        step_flops = stage2_step_flops(counted, B=B, L=L, h=h, K=num_negatives)
    work = work or Workload.expected(B=B, L=L, t=t, K=num_negatives, stage=stage)
    memory = training_bytes(model, inputs, parts, work, precision=precision, optimizer=optimizer)
    cache_flops = None
    if catalogue_items is not None:
        memory["item_cache"] = item_cache_bytes(h, catalogue_items)
        cache_flops = item_cache_flops(p_e, t=t, items=catalogue_items)
    return Cell(
        model=model,
        stage=stage,
        batch_sequences=B,
        seq_len=L,
        steps=steps,
        num_negatives=num_negatives,
        params=parts.params,
        embedder_params=p_e,
        contextualizer_params=p,
        vocabulary_params=parts.vocabulary_params,
        embedder_share=parts.share,
        slots_seen=steps * B * L,
        data_ratio=steps * B * L / parts.params,
        flops_per_step=step_flops,
        flops=step_flops * steps,
        embedder_flop_share=embedder_flop_share(p_e, counted, B=B, L=L, t=t, h=h) if stage == 1 else None,
        executed_flops=sum(executed_step_flops(model, inputs, work).values()) * steps,
        bytes=memory,
        flops_item_cache=cache_flops,
        breakdown={**parts.embedder, **parts.contextualizer, **parts.vocabulary},
        wanted=wanted or {},
    )


def cell_of_recipe(recipe: Recipe, inputs: Inputs = TYPICAL_INPUTS, *, catalogue_items: int | None = None) -> Cell:
    """The cell that a recipe describes."""
    return cell_of(
        recipe.model,
        batch_sequences=recipe.train.batch_sequences,
        steps=recipe.train.steps,
        seq_len=recipe.data.seq_len,
        stage=recipe.train.stage,
        num_negatives=recipe.train.num_negatives,
        inputs=inputs,
        attention=recipe.train.attention_flops,
        precision=recipe.train.precision,
        optimizer=recipe.train.optimizer,
        catalogue_items=catalogue_items,
    )


def ladder_batch_sequences(budget: float) -> int:
    """The batch of the study's ladder: 64 at 10¹⁵, twice that per decade up to 512, half of it downwards."""
    return max(1, min(512, round(64 * 2.0 ** round(math.log10(budget) - 15))))
