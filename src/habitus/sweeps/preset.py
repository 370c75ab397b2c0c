"""Presets: the grids, batches and rates of every axis, as TOML files that a user can read, copy and change."""

import math
from operator import not_
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from habitus.data import Dataset, PrepareOptions, prepare_world
from habitus.errors import ConfigError
from habitus.events import WORLD_SCHEMA, Likeness, World, WorldConfig
from habitus.recipe import Horizon, Init, Optimizer, Precision, Regime, Schedule
from habitus.store import AXES, LOG_AXIS
from habitus.typed import Typed, content_hash, suggest_name

_FOLDER = Path(__file__).parent / "presets"

Regimes = tuple[Regime, ...]


class WorldSize(Typed):
    """The synthetic world that the preset was tuned on; a dataset of one's own may differ."""

    num_items: int = Field(ge=2)
    num_users: int = Field(ge=1)
    events_per_user: float = Field(64.0, ge=1)
    seq_len: int = Field(256, ge=2, description="Events per window.")
    text_len: int = Field(24, ge=1, description="Text tokens per item.")
    like: Likeness = Field(
        "shop", exclude_if=lambda like: like == "shop", description="'logs': with the structure of real logs."
    )


class CommonSettings(Typed):
    """What all cells of all axes share."""

    text_depth: int = Field(4, ge=1, description="Layers of the text encoder.")
    head_dim: int | None = Field(None, ge=2, description="Of the contextualizer; absent: the solver's choice.")
    share: float = Field(0.02, gt=0, lt=1, description="Embedder share where the store knows no better.")
    data_ratio: float = Field(15.0, gt=0, description="D/N where an axis fixes it.")
    min_steps: int = Field(100, ge=1, description="Stage-1 cells with fewer steps are not affordable.")
    min_joint_dim: int = Field(
        4,
        ge=4,
        exclude_if=lambda h: h == 4,
        description="Of shares and sizes; smaller embedders hardly tell items apart.",
    )
    copying: bool = Field(False, exclude_if=not_, description="Score the items of a user's own past by its events too.")
    log_q: bool = Field(
        False, exclude_if=not_, description="Correct logits by -log q, the chance of a candidate to be drawn."
    )
    optimizer: Optimizer = "adamw"
    learning_rate: float = Field(2e-3, gt=0, description="At 512 windows per step; times sqrt(batch / 512).")
    learning_rate_exponent: float = Field(0.0, ge=-1, le=1, description="Of a budget over the preset's smallest.")
    schedule: Schedule = "cosine"
    warmup: float = Field(0.05, ge=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1, exclude_if=not_)
    clip: float = Field(1.0, gt=0)
    precision: Precision = "bf16"


class EvaluationSettings(Typed):
    """Fixed for a whole store, or its losses could not be compared."""

    queries: int = Field(20_000, ge=1)
    batch_sequences: int = Field(64, ge=1, description="Windows that form one batch-local candidate pool.")
    catalogue_items: int | Literal["all"] = "all"
    horizons: tuple[Horizon, ...] = Field((), exclude_if=not_, description="As in a recipe; of a split by time.")
    seed: int = Field(0, ge=0)


class AxisSettings(Typed):
    """What every axis has."""

    budgets: tuple[float, ...] = Field((), description="Empty: the preset's.")
    learning_rates: tuple[float, ...] = Field((1.0,), min_length=1, description="Multiples of the rule's rate.")
    extend: int = Field(2, ge=0, description="Rates added beyond an edge where the best one lies, at most.")
    seeds: int = Field(1, ge=1)
    regimes: Regimes = ("batch",)


class ReplicatedAxis(AxisSettings):
    """An axis that runs three cells of each budget with several seeds: small, middle and large."""

    replicates: int = Field(
        1, ge=1, exclude_if=lambda n: n == 1, description="Seeds of these three, by which noise is known."
    )
    replicates_until: float | None = Field(
        None, gt=0, exclude_if=lambda budget: budget is None, description="Larger budgets have one seed."
    )

    def replicates_at(self, budget: float) -> int:
        return self.replicates if self.replicates_until is None or budget <= self.replicates_until else 1


class ShareAxis(AxisSettings):
    shares: tuple[float, ...] = Field(description="Embedder shares; the floor is added.")
    floor: bool = Field(True, description="Also the smallest embedder that can be built.")
    depth: int | None = Field(
        None,
        ge=1,
        description="Of the contextualizer, for all cells, with D/N as near as the widths allow; "
        "absent: the solver's choice, with D/N within 5%.",
    )
    head_dim: int | None = Field(None, ge=2, description="Instead of the common one: small heads fit more widths.")


class DepthRow(Typed):
    """The depth axis at one budget: depth + text_depth is constant, joint_dim and width are fixed."""

    budget: float = Field(gt=0)
    depth_sum: int = Field(ge=2)
    joint_dim: int = Field(ge=4)
    width: int = Field(ge=4)
    depths: tuple[int, ...] = Field(min_length=1)
    off_diagonal: tuple[int, ...] = Field((), description="Deeper, with the text encoder of the deepest above.")


class DepthAxis(AxisSettings):
    rows: tuple[DepthRow, ...] = Field(min_length=1)


class BatchAxis(AxisSettings):
    batch_sequences: tuple[int, ...] = Field(min_length=2)
    evaluations: int = Field(40, ge=2, description="Evaluations per run, more where 50 steps lie between.")
    max_every: int = Field(50, ge=1, description="Steps between evaluations, at most.")
    flops_multiple: float = Field(1.0, gt=0, description="Compute of each run as a multiple of the budget.")
    max_multiple: float = Field(
        1.0, ge=1, exclude_if=lambda multiple: multiple == 1,
        description="Batch sizes that miss the loss of the middle one are run for twice as long, up to this multiple.",
    )  # fmt: skip
    pool_sequences: int | None = Field(
        None, ge=1,
        description="A second arm: candidates of so many windows at every batch size, so that only gradient noise "
        "depends on it. Absent: none.",
    )  # fmt: skip


class BatchSizeAxis(AxisSettings):
    """One model per budget at several batch sizes for the same compute, with the schedule of all other runs."""

    multiples: tuple[float, ...] = Field(
        (0.5, 1, 2, 4, 8), min_length=4, description="Of the windows per step that other axes have at the budget."
    )
    min_steps: int = Field(10, ge=1, description="A batch that leaves fewer is not run.")
    extend: int = Field(0, ge=0)
    regimes: Regimes = ("batch", "catalogue")


class AllocationAxis(ReplicatedAxis):
    """Iso-FLOP lines. `ladder` holds all shapes by size; a budget takes `num_shapes` neighbours of it.

    Of six sizes and more the outermost have one seed.
    """

    ladder: tuple[tuple[int, int], ...] = Field(min_length=3, description="(width, depth), small to large.")
    num_shapes: int = Field(6, ge=3)
    centres: tuple[tuple[float, float], ...] = Field(description="(budget, params) to centre on before any law.")
    widen: int = Field(2, ge=0, description="Shapes added beyond an edge where the best size lies, at most.")
    top_rates: tuple[float, ...] = Field(
        (), exclude_if=not_,
        description="Multiples of the rule's rate that these three sizes of the largest budget are run with as well.",
    )  # fmt: skip


class NegativesAxis(ReplicatedAxis):
    num_negatives: tuple[int, ...] = Field(min_length=2)
    batch_sequences: int = Field(64, ge=1, description="One stage-2 batch for the whole store.")
    min_steps: int = Field(200, ge=1, description="A K that leaves fewer steps is not affordable.")


class InitRow(Typed):
    width: int = Field(ge=4)
    depth: int = Field(ge=1)
    budget: float = Field(gt=0)


class InitAxis(AxisSettings):
    inits: tuple[Init, ...] = ("default", "mup_lr", "mup")
    sizes: tuple[InitRow, ...] = Field(min_length=1, description="One budget per size.")
    rates: tuple[float, ...] = Field(min_length=1, description="Learning rates themselves, not multiples.")


class PassesAxis(AxisSettings):
    """Sizes × passes × dropout × shares of the users, on a log that ends before the compute does.

    Cells that differ in their passes alone are one trunk with several decays (schedule wsd), so they have one learning
    rate, and together cost little more than the longest of them.
    """

    sizes: tuple[tuple[int, int, int, int], ...] = Field(
        ((64, 1, 128, 3), (128, 1, 256, 3), (192, 1, 384, 4)),
        min_length=1,
        description="(joint_dim, text_depth, width, depth).",
    )
    passes: tuple[float, ...] = Field((2, 4, 8, 16, 32), min_length=1, description="Over the share of the users.")
    dropouts: tuple[float, ...] = Field((0.2, 0.4), min_length=1)
    user_shares: tuple[float, ...] = Field((0.125, 0.25, 0.5, 1), min_length=1, description="Of the training users.")
    num_parts: int = Field(1, ge=1, description="Disjoint parts of each share, as far as there are so many.")
    batch_sequences: int = Field(16, ge=1)
    min_steps: int = Field(10, ge=1, description="A cell with fewer is not run.")
    warmup: float = Field(0.25, ge=0, le=0.8, description="Share of the steps of the shortest run, for all of them.")
    decay_share: float = Field(0.2, gt=0, le=1)
    optimizer: Optimizer = "muon"
    learning_rate: float = Field(4e-2, gt=0, description="At 512 windows per step; times sqrt(batch / 512).")
    copying: bool = True
    log_q: bool = True
    regimes: Regimes = ("batch", "catalogue")

    def user_parts(self) -> list[tuple[float, int]]:
        """(share, part) of every set of users."""
        return [
            (share, part) for share in self.user_shares for part in range(min(self.num_parts, int(1 / share + 1e-9)))
        ]


class ContextAxis(AxisSettings):
    """Windows of different lengths at equal compute and equal slots per step, judged on the same queries."""

    seq_lens: tuple[int, ...] = Field((32, 64, 128, 256, 512, 1024, 2048), min_length=1, description="Events.")
    histories: tuple[int, ...] = Field(
        (3, 5, 10, 20, 50, 100, 200, 500, 1000),
        min_length=1,
        description="Events that each query is shown; longer ones than the validation users have are left out.",
    )
    attention: bool = Field(True, description="Pay for attention's own term too, or long windows would cost nothing.")
    extend: int = Field(0, ge=0)
    regimes: Regimes = ("batch", "catalogue")


class ShapeAxis(AxisSettings):
    """Six knobs at once around a centre: a space-filling design, and a quadratic in their logarithms."""

    points: int = Field(60, ge=31, description="Cells that the surface is fitted to: 28 coefficients.")
    held_out: int = Field(10, ge=0, description="Cells more, by which its error is known.")
    centre_seeds: int = Field(3, ge=1, description="Runs of the centre itself.")
    span: float = Field(2.0, gt=1, description="Widths and depths go from centre / span to centre · span.")
    wide_span: float = Field(4.0, gt=1, description="The same of batch and learning rate.")
    extend: int = Field(0, ge=0)
    regimes: Regimes = ("batch", "catalogue")


class RegularisationAxis(AxisSettings):
    """Shares with and without dropout in the embedder: does a regularised one bear more parameters?"""

    shares: tuple[float, ...] = Field((0.02, 0.05, 0.10, 0.18, 0.30, 0.50), min_length=1)
    dropouts: tuple[float, ...] = Field(
        (0.0, 0.2), min_length=2, description="Of text tokens, fields and entries of item vectors alike; 0 is one."
    )
    extend: int = Field(0, ge=0)
    regimes: Regimes = ("batch", "catalogue")


# Axes younger than presets, whose sections those before them do not read.
_YOUNGER = (LOG_AXIS, "context", "shape", "regularisation", "batch_size")


class Preset(Typed):
    """Everything that turns an axis and a budget into cells."""

    name: str
    description: str = ""
    budgets: tuple[float, ...] = Field(min_length=1)
    batch_by_budget: tuple[tuple[float, int], ...] = Field(min_length=1, description="(budget, windows per step).")
    world: WorldSize
    common: CommonSettings = CommonSettings()
    evaluate: EvaluationSettings = EvaluationSettings()
    share: ShareAxis
    depth: DepthAxis
    batch: BatchAxis
    allocation: AllocationAxis
    negatives: NegativesAxis
    init: InitAxis
    passes: PassesAxis = PassesAxis()
    context: ContextAxis = ContextAxis()
    shape: ShapeAxis = ShapeAxis()
    regularisation: RegularisationAxis = RegularisationAxis()
    batch_size: BatchSizeAxis = BatchSizeAxis()

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        for axis in AXES:
            for budget in (*self.budgets, *self.axis(axis).budgets):
                if not 0 < budget < math.inf:
                    raise ValueError(f"budget {budget:g} is not a positive number of FLOPs")
        return self

    def for_catalogue(self, num_candidates: int) -> Self:
        """The same preset, against all candidates where there are fewer than its evaluation asks for."""
        wanted = self.evaluate.catalogue_items
        if wanted == "all" or wanted <= num_candidates:
            return self
        return self.model_copy(update={"evaluate": self.evaluate.model_copy(update={"catalogue_items": "all"})})

    def axis(self, name: str) -> AxisSettings:
        settings = getattr(self, name)
        assert isinstance(settings, AxisSettings)
        return settings

    def hash(self, axis: str) -> str:
        """What a manifest knows a preset by. Axes do not read the sections of younger ones.

        What the world is like is the dataset's to say: designs depend on its size alone.
        """
        values = {k: v for k, v in self.to_values().items() if k not in _YOUNGER or k == axis}
        world = {k: v for k, v in values["world"].items() if k != "like"}
        return content_hash({**values, "world": world})

    def budgets_of(self, axis: str) -> tuple[float, ...]:
        """The budgets that an axis takes where the user names none; those of `passes` follow from its cells."""
        if axis == "init":
            return tuple(sorted({row.budget for row in self.init.sizes}))
        return self.axis(axis).budgets or self.budgets

    def batch_sequences(self, budget: float) -> int:
        """Windows per step at a budget: those of the nearest budget in the table, on a logarithmic scale."""
        return min(self.batch_by_budget, key=lambda row: abs(math.log(row[0] / budget)))[1]

    def rule_rate(self, batch_sequences: int, budget: float) -> float:
        """The learning rate of the √B rule, which may fall with the budget: longer runs want less."""
        ratio = budget / min(self.budgets)
        return self.common.learning_rate * ratio**self.common.learning_rate_exponent * math.sqrt(batch_sequences / 512)


def load_preset(name: str | Path | Preset) -> Preset:
    """A preset by its name, or from a TOML file of one's own."""
    if isinstance(name, Preset):
        return name
    text = str(name)
    if text.endswith(".toml"):
        return Preset.read(text)
    names = preset_names()
    if text not in names:
        raise ConfigError(
            f"preset {text!r} is unknown ({suggest_name(text, names)})",
            expected=f"one of {', '.join(names)}, or the path of a .toml file",
            next_step="to change one: `habitus sweep share --preset quick --print-preset > mine.toml`",
        )
    return Preset.read(_FOLDER / f"{text}.toml")


def preset_text(name: str) -> str:
    """The TOML text of a preset, comments included."""
    preset = load_preset(name)
    path = Path(name) if str(name).endswith(".toml") else _FOLDER / f"{preset.name}.toml"
    return path.read_text(encoding="utf-8")


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def preset_dataset(preset: Preset, out: Path, *, seed: int = 0, threads: int = 1) -> Dataset:
    """The dataset of the preset's synthetic world, generated where `out` does not exist yet."""
    size = preset.world
    if not out.exists():
        config = WorldConfig.like(
            size.like,
            num_users=size.num_users,
            num_items=size.num_items,
            events_per_user=size.events_per_user,
            seed=seed,
        )
        schema = WORLD_SCHEMA.model_copy(update={"world": config})
        # No test side: a world's oracle says how good a run is, and all users but the validation ones train.
        options = PrepareOptions(seq_len=size.seq_len, text_len=size.text_len, test_share=0, threads=threads)
        prepare_world(World(config), schema, out, options, lambda _what, _done: None)
    return Dataset.open(out, verify=False)
