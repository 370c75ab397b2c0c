"""The Record: what one run measured. It is written once, and analysis reads nothing else."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from habitus.recipe import Recipe
from habitus.typed import Typed

RECORD_VERSION: Literal[1] = 1


class Params(Typed):
    embedder: int = Field(ge=0)
    contextualizer: int = Field(ge=0)
    vocabulary: int = Field(ge=0, description="Token and category tables, which neither part counts.")

    @property
    def total(self) -> int:
        """N of the laws: without vocabulary tables."""
        return self.embedder + self.contextualizer


class TrainLosses(Typed):
    """Means of the last 100 steps."""

    in_batch_loss: float
    extra_loss: float | None = None
    loss: float


class Metric(Typed):
    value: float
    se: float | None = None
    n: int = Field(ge=0)


class EvaluationSpec(Typed):
    queries: int
    query_set_checksum: str
    batch_sequences: int
    candidates: int
    # Absent for validation, so that Records written before there was a test side stay as they are.
    side: Literal["validation", "test"] = Field("validation", exclude_if=lambda side: side == "validation")


class TrajectoryPoint(Typed):
    step: int = Field(ge=0)
    metric: str
    value: float


class Seconds(Typed):
    warmup: float
    train: float
    evaluate: float


class Record(Typed):
    """A missing value is absent, never zero. A failed run has a Record too, with its reason."""

    schema_version: Literal[1] = RECORD_VERSION
    recipe: Recipe
    recipe_hash: str
    parent_hash: str | None = None
    dataset_checksum: str
    status: Literal["done", "failed"]
    reason: str | None = None

    params: Params | None = None
    embedder_share: float | None = None
    embedder_flop_share: float | None = None
    flops_budget: float | None = None
    flops_nominal: float | None = None
    flops_executed: float | None = None
    flops_item_cache: float | None = None

    steps: int = 0
    slots_seen: int = 0
    events_seen: int = 0
    queries_seen: int = 0
    unique_events: int = 0
    unique_targets: int | None = Field(
        None, description="Distinct events that were predicted; absent where the schema has no [targets]: all are."
    )
    epochs: float = 0.0
    trained_until: int | None = Field(
        None, description="Time of the last training event, in microseconds since 1970; absent without real times."
    )

    train: TrainLosses | None = None
    metrics: dict[str, Metric] = Field(default_factory=dict)
    evaluation: EvaluationSpec | None = None
    trajectory: tuple[TrajectoryPoint, ...] = ()

    throughput: dict[str, float] = Field(default_factory=dict)
    memory: dict[str, int] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seed: int
    seconds: Seconds | None = None

    @model_validator(mode="after")
    def _status_and_reason_agree(self) -> Self:
        if self.status == "failed" and not self.reason:
            raise ValueError("a failed Record must have a reason")
        if self.status == "done" and (self.train is None or self.params is None):
            raise ValueError("a Record that is done must have params and train losses")
        return self
