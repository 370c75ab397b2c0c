"""The Plan: the next Recipe, with where every number of it comes from and how sure it is."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from habitus.display import html_table, text_table
from habitus.errors import ConfigError
from habitus.recipe import Recipe
from habitus.typed import Typed, content_hash

PLAN_VERSION: Literal[1] = 1
QuantitySource = Literal["this study", "published", "default"]
RangeKind = Literal["95%", "tried", "assumed"]


class Quantity(Typed):
    """One number of the plan. An absent end of the interval is open, or unknown where both are absent."""

    value: float
    low: float | None = None
    high: float | None = None
    source: QuantitySource
    how: str = Field(description="Which law or rule gave it, in words.")
    doubts: tuple[str, ...] = Field((), description="What the law itself warns of.")
    range: RangeKind = Field(
        "95%",
        exclude_if=lambda kind: kind == "95%",
        description="What low and high are: a 95% interval; the ends of what was tried or printed; or assumed, an "
        "interval that a rule carried to where nothing was measured.",
    )


class Prediction(Typed):
    """What a stage is expected to measure; 95% for one more run."""

    metric: str
    stage: Literal[1, 2]
    value: float
    low: float | None = None
    high: float | None = None
    source: QuantitySource
    how: str


def range_word(estimate: Typed) -> str:
    """What stands behind the ends of a quantity's range where they are no 95% interval: ' tried' or ' assumed'."""
    kind = getattr(estimate, "range", "95%")
    return "" if kind == "95%" else f" {kind}"


class MemoryEstimate(Typed):
    """Bytes of a training step by part, and whether they fit the device."""

    stage: Literal[1, 2]
    bytes: dict[str, int]
    device: str | None = None
    device_bytes: int | None = None
    fits: bool | None = Field(None, description="Absent where no device is named.")
    change: str | None = Field(None, description="The setting to change where it does not fit.")


class PrintedRecipe(Typed):
    """The paper's recipe at this budget, as printed: D/N in the 6ND convention. Never as affordable."""

    params: float
    data_ratio_6nd: float
    slots: float
    embedder_share: float
    batch_sequences: int
    learning_rate: float
    num_negatives: tuple[float, float]
    flops: float = Field(description="What Equation 1 charges for it.")
    times_budget: float = Field(description="flops over the budget it is printed for.")


class Difference(Typed):
    """One knob under both sets of laws."""

    knob: str
    ours: float
    published: float
    ratio: float = Field(description="ours / published")
    inside: bool | None = Field(
        None, description="Whether the published value lies in our interval, where there is one."
    )


class Extrapolation(Typed):
    budget: float = Field(description="Stage 1's budget.")
    smallest: float = Field(description="Smallest budget at which sizes were measured.")
    largest: float = Field(description="Largest such budget, whichever law is used.")
    factor: float = Field(description="budget / largest; below 1 inside or under the range.")


class Plan(Typed):
    """For a budget and a metric: both recipes, every number with interval and source, and the warnings."""

    schema_version: Literal[1] = PLAN_VERSION
    metric: str
    flops: float = Field(description="Of both stages together, nominal.")
    stage1_flops: float
    stage2_flops: float
    flops_item_cache: float | None = Field(None, description="Embedding the catalogue once; apart from both stages.")
    optimizer: str
    laws: str = Field(description="Where the laws come from.")
    dataset_checksum: str | None = None
    quantities: dict[str, Quantity]
    predictions: tuple[Prediction, ...] = ()
    memory: tuple[MemoryEstimate, ...] = ()
    extrapolation: Extrapolation | None = None
    printed: PrintedRecipe | None = None
    differences: tuple[Difference, ...] = ()
    warnings: tuple[str, ...] = ()
    stage1: Recipe
    stage2: Recipe | None = None

    def __getitem__(self, name: str) -> Quantity:
        return self.quantities[name]

    def __repr__(self) -> str:
        return text_table(self._title(), [(name, value) for name, value, _ in self._summary()])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table(
            self._title(),
            self._summary(),
            header=("knob", "value [95%; tried: ends of what was tried; assumed: by a rule]", "from"),
        )

    def _title(self) -> str:
        return f"Plan for {self.metric} at {self.flops:.3g} FLOPs, laws of {self.laws}"

    def _summary(self) -> list[tuple[str, str, str]]:
        rows = [(name, _format_interval(quantity), quantity.source) for name, quantity in self.quantities.items()]
        rows += [
            (f"{one.metric} after stage {one.stage}", _format_interval(one), one.source) for one in self.predictions
        ]
        return rows + [("warning", warning, "") for warning in self.warnings]

    def hash(self) -> str:
        """SHA-256 of the plan's content."""
        return content_hash(self.to_values())

    def write_recipes(self, folder: str | Path) -> list[Path]:
        """stage1.toml and stage2.toml in a folder (or beside a name that ends in .toml, which becomes stage 1)."""
        target = Path(folder)
        first = target if target.suffix == ".toml" else target / "stage1.toml"
        try:
            first.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{first.parent} cannot be made: {error.strerror}", expected="a folder") from None
        second = first.with_name("stage2.toml" if first.name == "stage1.toml" else f"{first.stem}-stage2.toml")
        self.stage1.write(first)
        if self.stage2 is None:
            second.unlink(missing_ok=True)
            return [first]
        self.stage2.write(second)
        return [first, second]


class RegisteredPlan(Plan):
    """A plan as it was before the run. `registered_hash` is of everything else in the file."""

    registered_at: str
    registered_hash: str

    @classmethod
    def of(cls, plan: Plan, registered_at: str) -> "RegisteredPlan":
        values = {**plan.to_values(), "registered_at": registered_at}
        return cls.parse({**values, "registered_hash": content_hash(values)}, "the plan")

    def unchanged(self) -> bool:
        values = self.to_values()
        return values.pop("registered_hash") == content_hash(values)


class Comparison(Typed):
    """One number, as predicted and as measured. `inside` is absent where the prediction has no interval."""

    name: str
    stage: int
    predicted: float
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    inside: bool | None = None


class PlanCheck(Typed):
    """A registered plan against the run that followed it."""

    registered_at: str
    hash: str
    same_recipe: dict[str, bool]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()


def _format_interval(estimate: Quantity | Prediction) -> str:
    """The value, and its interval where there is one."""
    if estimate.low is None and estimate.high is None:
        return f"{estimate.value:.4g}"
    ends = ("open" if end is None else f"{end:.3g}" for end in (estimate.low, estimate.high))
    return f"{estimate.value:.4g} [{', '.join(ends)}{range_word(estimate)}]"
