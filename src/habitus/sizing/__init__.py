"""Parameters, FLOPs and bytes, counted by structure; and the cell that a budget buys. No torch here."""

from habitus.sizing.cell import Cell, cell_of, cell_of_recipe, ladder_batch_sequences
from habitus.sizing.executed import Workload, executed_step_flops
from habitus.sizing.memory import item_cache_bytes, training_bytes
from habitus.sizing.nominal import (
    effective_params,
    embedder_flop_share,
    item_cache_flops,
    largest_num_negatives,
    stage1_step_flops,
    stage2_step_flops,
    steps_for,
)
from habitus.sizing.request import Request
from habitus.sizing.solver import joint_dims, solve
from habitus.sizing.structure import TYPICAL_INPUTS, Breakdown, Inputs, breakdown, tokens_per_item

__all__ = [
    "TYPICAL_INPUTS",
    "Breakdown",
    "Cell",
    "Inputs",
    "Request",
    "Workload",
    "breakdown",
    "cell_of",
    "cell_of_recipe",
    "effective_params",
    "embedder_flop_share",
    "executed_step_flops",
    "item_cache_bytes",
    "item_cache_flops",
    "joint_dims",
    "ladder_batch_sequences",
    "largest_num_negatives",
    "solve",
    "stage1_step_flops",
    "stage2_step_flops",
    "steps_for",
    "tokens_per_item",
    "training_bytes",
]
