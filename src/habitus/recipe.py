"""The Recipe: everything that determines one stage of one run, and nothing else."""

import re
from operator import not_
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from habitus.typed import Typed, content_hash, suggest_name


class OptimizerKind(NamedTuple):
    """What others than training need to know of an optimizer."""

    hidden_moments: int  # state tensors per matrix of a transformer layer; AdamW moves all else


# A new optimizer is a line here, and how it moves those matrices in `habitus.training.optimizers`.
OPTIMIZERS = {"adamw": OptimizerKind(hidden_moments=2), "muon": OptimizerKind(hidden_moments=1)}


def _check_optimizer(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(f"not an optimizer ({suggest_name(name, list(OPTIMIZERS))})")
    return name


Optimizer = Annotated[str, AfterValidator(_check_optimizer)]
Init = Literal["default", "plain", "mup_lr", "mup"]
Schedule = Literal["cosine", "constant", "wsd"]  # wsd: warm-up, stable, decay
_DECAY_SHARE = 0.2
Precision = Literal["bf16", "fp32"]
Regime = Literal["batch", "catalogue"]  # the candidates of an evaluation: a batch's own, or the catalogue
MetricGroup = Literal["loss", "ranking", "coverage", "classic", "auc", "lists"]  # what an evaluation can be asked for
METRIC_GROUPS: tuple[MetricGroup, ...] = ("loss", "ranking", "coverage")  # what it measures unless asked for others

HORIZON = re.compile(r"([1-9]\d{0,4})([hd])(_new)?")  # 7d, 36h; with _new items that a user had before are left out


def _check_horizon(text: str) -> str:
    if not HORIZON.fullmatch(text):
        raise ValueError(f"{text!r} is not a horizon, such as 7d, 36h, or 7d_new without what a user had before")
    return text


Horizon = Annotated[str, AfterValidator(_check_horizon)]

# Raised when the numerics change, so that Records from before and after are not mixed up.
RECIPE_VERSION = 1
# Keys added later are left out (`exclude_if`) at their default, so that recipes written before keep their hash.


class DataRecipe(Typed):
    seq_len: int = Field(256, ge=2, description="Events per window.")
    user_share: float = Field(
        1.0, gt=0, le=1, exclude_if=lambda share: share == 1, description="Share of the training users that train."
    )
    user_part: int = Field(0, ge=0, exclude_if=not_, description="Which of the disjoint parts of that share.")
    include_validation: bool = Field(
        False, exclude_if=not_, description="Train on the validation events too; then only the test side evaluates."
    )

    @model_validator(mode="after")
    def _the_part_exists(self) -> Self:
        num_parts = int(1 / self.user_share + 1e-9)
        if self.user_part >= num_parts:
            raise ValueError(
                f"user_part = {self.user_part}, but a share of {self.user_share:g} has {num_parts} disjoint "
                f"part{'' if num_parts == 1 else 's'}, counted from 0"
            )
        return self


class ModelRecipe(Typed):
    joint_dim: int = Field(ge=4, description="Width of the embedder, of an event embedding and of scoring.")
    text_len: int = Field(24, ge=1, description="Text tokens per item.")
    text_depth: int = Field(4, ge=1, description="Layers of the text encoder.")
    width: int = Field(ge=4, description="Width of the contextualizer.")
    depth: int = Field(ge=1, description="Layers of the contextualizer.")
    head_dim: int = Field(32, ge=2, description="Width of one attention head of the contextualizer.")
    copying: bool = Field(
        False, exclude_if=not_, description="Add a copy head: past events raise the scores of their own items."
    )
    event_text: Literal["own", "shared"] = Field(
        "own",
        exclude_if=lambda kind: kind == "own",
        description="Texts of events: the mean of token vectors of their own, or the items' text encoder.",
    )
    init: Init = Field("default", description="Initialisation and rate scaling.")

    @model_validator(mode="after")
    def _heads_fill_the_width(self) -> Self:
        if self.width % self.head_dim:
            multiple = max(self.head_dim, round(self.width / self.head_dim) * self.head_dim)
            raise ValueError(
                f"width {self.width} is not a multiple of head_dim {self.head_dim}; the nearest is {multiple}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions rotate pairs")
        return self


class TrainRecipe(Typed):
    stage: Literal[1, 2] = Field(1, description="1 trains both parts; 2 freezes the embedder.")
    parent: str | None = Field(None, description="Hash of the run whose weights this one begins with; stage 2 has one.")
    num_negatives: int = Field(0, ge=0, description="Extra negatives per step in stage 2.")
    extra_pool: Literal["union", "extras"] = Field("union", description="Candidates of the second channel.")
    log_q: bool = Field(False, description="Correct logits by -log q of the candidate's inclusion.")
    batch_sequences: int = Field(ge=1, description="Windows per optimizer step, over all processes.")
    pool_sequences: int | None = Field(
        None,
        ge=1,
        description="Of stage 1: windows whose targets are each other's candidates; absent: the whole batch.",
    )
    steps: int = Field(ge=1, description="Optimizer steps.")
    optimizer: Optimizer = Field("muon", description="Muon takes the hidden matrices only; the rest AdamW.")
    learning_rate: float = Field(gt=0, description="Peak learning rate.")
    schedule: Schedule = Field("cosine", description="After the warm-up.")
    warmup: float = Field(0.05, ge=0, le=1, description="Share of the steps that warm up linearly.")
    warmup_steps: int | None = Field(None, ge=0, description="Their number, instead of the share; wsd needs it.")
    decay_share: float = Field(
        _DECAY_SHARE,
        gt=0,
        le=1,
        exclude_if=lambda share: share == _DECAY_SHARE,
        description="Of wsd: share of the steps, at the end, in which the rate falls linearly to zero.",
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay of matrices.")
    embedder_weight_decay: float | None = Field(None, ge=0, description="Of the embedder's; absent: the same.")
    table_weight_decay: float = Field(0.0, ge=0, exclude_if=not_, description="Of token and category tables.")
    dropout: float = Field(0.0, ge=0, lt=1, exclude_if=not_, description="Of the contextualizer's inputs and branches.")
    # Of the embedder, so in stage 1 alone.
    token_dropout: float = Field(0.0, ge=0, lt=1, exclude_if=not_, description="Of the text tokens of an item.")
    field_dropout: float = Field(0.0, ge=0, lt=1, exclude_if=not_, description="Of fields of an item, never of all.")
    item_dropout: float = Field(0.0, ge=0, lt=1, exclude_if=not_, description="Of entries of item vectors.")
    clip: float = Field(1.0, gt=0, description="Largest norm of the gradient.")
    precision: Precision = Field("bf16", description="Of the matrix products.")
    attention_flops: bool = Field(
        False, exclude_if=not_, description="Nominal FLOPs count attention's own term, 6·D·seq_len·width·depth."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Keys every random stream of the run.")

    @model_validator(mode="after")
    def _stages_do_not_mix(self) -> Self:
        if self.stage == 1 and self.num_negatives:
            raise ValueError(
                f"num_negatives = {self.num_negatives}, but stage 1 has in-batch candidates only; leave it at 0"
            )
        if self.stage == 2 and self.parent is None:
            raise ValueError("stage 2 continues a stage-1 run; parent must be its hash")
        return self

    @model_validator(mode="after")
    def _pools_divide_the_batch(self) -> Self:
        pool, batch = self.pool_sequences, self.batch_sequences
        if pool is None:
            return self
        if self.stage == 2:
            raise ValueError(f"pool_sequences = {pool} is of stage 1; stage 2 has num_negatives")
        if pool == batch or batch % pool:
            raise ValueError(
                f"pool_sequences = {pool} does not divide a batch of {batch} windows into two pools or more"
            )
        return self

    @model_validator(mode="after")
    def _the_trunk_is_the_same_for_all_lengths(self) -> Self:
        if self.schedule != "wsd":
            return self
        if self.warmup_steps is None:
            raise ValueError("schedule 'wsd' counts its warm-up in steps; set warmup_steps, as in warmup_steps = 100")
        if self.warmup_steps > self.stable_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps:,}, but {self.steps:,} steps begin to decay after "
                f"{self.stable_steps:,}; warm up in fewer"
            )
        return self

    @property
    def stable_steps(self) -> int:
        """Of wsd: the steps before the decay, which are those of every longer run too."""
        return self.steps - max(1, round(self.decay_share * self.steps))


class EvaluateRecipe(Typed):
    queries: int = Field(20_000, ge=1, description="Validation queries scored.")
    batch_sequences: int = Field(64, ge=1, description="Windows that form one batch-local candidate pool.")
    catalogue_items: int | Literal["all"] = Field("all", description="Candidates of the catalogue regime.")
    every: int = Field(0, ge=0, description="Steps between evaluations during training; 0: only at the end.")
    regimes: tuple[Regime, ...] = Field(("batch",), min_length=1, description="Whom targets are ranked against.")
    metrics: tuple[MetricGroup, ...] = Field(
        METRIC_GROUPS,
        min_length=1,
        exclude_if=lambda groups: groups == METRIC_GROUPS,
        description="Groups of metrics measured: loss, ranking, coverage; classic, auc, lists.",
    )
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), exclude_if=not_, description="Also, at the end: the same queries with so many events each, as in [10, 100]."
    )
    horizons: tuple[Horizon, ...] = Field(
        (),
        exclude_if=not_,
        description="Under a split by time, also the items of the days after the cut: 7d; 7d_new without repeats.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Chooses queries and candidate subset.")

    @model_validator(mode="after")
    def _contexts_need_the_catalogue(self) -> Self:
        if self.contexts and "catalogue" not in self.regimes:
            raise ValueError('contexts are measured against the catalogue; add "catalogue" to regimes')
        return self


class Recipe(Typed):
    """One stage of one run. Names, paths, hardware and workers are not part of it."""

    data: DataRecipe = DataRecipe()
    model: ModelRecipe
    train: TrainRecipe
    evaluate: EvaluateRecipe = EvaluateRecipe()

    def hash(self, dataset_checksum: str) -> str:
        """The run's identity: this recipe (its parent's hash included) on that dataset, at this version."""
        return content_hash({"recipe": self.to_values(), "dataset": dataset_checksum, "version": RECIPE_VERSION})

    def trunk_hash(self, dataset_checksum: str) -> str:
        """What runs with schedule wsd have in common that are the same until they decay: all but their length."""
        values = self.to_values()
        for name in ("steps", "decay_share"):
            values["train"].pop(name, None)
        return content_hash({"recipe": values, "dataset": dataset_checksum, "version": RECIPE_VERSION})
