"""The run as laws see it: its place in a study, its knobs and what it measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What an axis varies or a law needs, as the columns of a CSV and of laws.json name it.
KNOBS = (
    "params", "embedder_params", "contextualizer_params", "embedder_share", "embedder_flop_share",
    "slots_seen", "batch_sequences", "num_negatives", "steps", "epochs", "width", "depth", "text_depth",
    "joint_dim", "flops_nominal", "flops_executed", "unique_events", "user_share", "user_part", "dropout",
    "token_dropout", "field_dropout", "item_dropout", "weight_decay", "seq_len", "pool_sequences",
    "text_len", "events_seen", "catalogue_items",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredRun:
    """One row of a sweep manifest with what its Record measured."""

    axis: str
    cell_id: str
    budget: float
    learning_rate: float
    seed: int
    status: str = "done"
    reason: str = ""
    recipe_hash: str = ""
    init: str = "default"
    optimizer: str = ""
    query_set: str = ""  # checksum of the queries its metrics were measured on
    on_diagonal: bool = True
    knobs: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # train/... losses included
    trajectory: tuple[tuple[float, str, float], ...] = ()  # step, metric, value
    errors: Mapping[str, float] = field(default_factory=dict)  # standard errors of metrics over users

    @property
    def group(self) -> str:
        """Runs of two groups are never pooled: optimizer and init are part of the law."""
        return f"{self.optimizer or 'any'}/{self.init}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it apart from all other runs."""
        return (self.axis, self.budget, self.cell_id, self.init, self.learning_rate, self.seed)
