"""Parameters, FLOPs and bytes, counted by structure; and the cell that a budget buys. No torch here."""

from habitus.sizing.cell import Cell, cell_of, cell_of_recipe, ladder_batch_sequences
from habitus.sizing.executed import Workload, executed_step_flops
from habitus.sizing.memory import training_bytes
from habitus.sizing.nominal import (
    embedder_flop_share,
    item_cache_flops,
    largest_num_negatives,
    stage1_step_flops,
    stage2_step_flops,
    steps_for,
)
from habitus.sizing.request import CellRequest
from habitus.sizing.solver import joint_dims, solve
from habitus.sizing.speed import (
    H200_RATES,
    NEAR_FACTOR,
    SpeedModel,
    StepSpeed,
    count_evaluations,
    fit_speed,
    nearest_speeds,
    pace,
    step_rate,
    step_speeds,
    wall_seconds,
)
from habitus.sizing.structure import (
    LAG_KNOTS,
    NUMBER_FEATURES,
    NUMBER_FREQUENCIES,
    ONE_HOT_ROWS,
    TYPICAL_INPUTS,
    Inputs,
    breakdown,
    contextualizer_parts,
    copy_dim,
    embedder_parts,
    text_heads,
    tokens_per_item,
)

__all__ = [
    "H200_RATES",
    "LAG_KNOTS",
    "NEAR_FACTOR",
    "NUMBER_FEATURES",
    "NUMBER_FREQUENCIES",
    "ONE_HOT_ROWS",
    "TYPICAL_INPUTS",
    "Cell",
    "CellRequest",
    "Inputs",
    "SpeedModel",
    "StepSpeed",
    "Workload",
    "breakdown",
    "cell_of",
    "cell_of_recipe",
    "contextualizer_parts",
    "copy_dim",
    "count_evaluations",
    "embedder_flop_share",
    "embedder_parts",
    "executed_step_flops",
    "fit_speed",
    "item_cache_flops",
    "joint_dims",
    "ladder_batch_sequences",
    "largest_num_negatives",
    "nearest_speeds",
    "pace",
    "solve",
    "stage1_step_flops",
    "stage2_step_flops",
    "step_rate",
    "step_speeds",
    "steps_for",
    "text_heads",
    "tokens_per_item",
    "training_bytes",
    "wall_seconds",
]
