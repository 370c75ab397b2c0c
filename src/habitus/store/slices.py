"""Where a run errs: a metric by the values of a column, and how far its probabilities can be believed."""

from pydantic import Field

from habitus.record import Metric
from habitus.typed import Typed


class SliceRow(Typed):
    """The queries with one value of a column. Intervals are over users, of this row alone."""

    value: str
    users: int
    metric: Metric
    reference: float | None = Field(None, description="The metric of what the run is compared with.")
    difference: float | None = Field(None, description="The run less the reference, query by query.")
    low: float | None = None
    high: float | None = None
    p_value: float | None = Field(None, description="Adjusted by Holm over all rows of the run and metric.")

    @property
    def is_significant(self) -> bool:
        return self.p_value is not None and self.p_value < 0.05


class QueryExample(Typed):
    """One query: what the user did, what came, and what the run said."""

    user: str
    history: tuple[str, ...] = Field(description="The last items, oldest first.")
    target: str
    rank: int
    first: tuple[str, ...] = Field((), description="The run's own first items.")


class SliceTable(Typed):
    """A metric by the values of one column."""

    by: str
    source: str = Field(description="What the column is of.")
    metric: str
    reference: str | None = None
    comparisons: int = Field(0, description="Rows over which p values are adjusted, those of other columns included.")
    rows: tuple[SliceRow, ...]
    worst: str | None = Field(None, description="The value whose metric is worst, of those with enough users.")
    examples: tuple[QueryExample, ...] = Field((), description="Its worst queries.")


class ReliabilityBin(Typed):
    """Items that were listed with about the same probability."""

    predicted: float
    observed: float
    se: float | None = None
    listed: int


class Reliability(Typed):
    """Predicted probabilities beside what came, at one temperature."""

    temperature: float
    loss: float
    entropy: float
    expected_error: dict[str, float] = Field(description="Expected calibration error of the first k, by k.")
    bins: tuple[ReliabilityBin, ...]


class Calibration(Typed):
    """A run's probabilities as they are and at the temperature that was fitted."""

    temperature: float
    fitted_side: str
    fitted_queries: int
    plain: Reliability
    scaled: Reliability


class ErrorPage(Typed):
    """What the page of an evaluation shows of one run."""

    run: str
    side: str
    regime: str
    queries: int
    candidates: int
    metrics: dict[str, dict[str, Metric]] = Field(description="By scorer, the run first.")
    slices: tuple[SliceTable, ...] = ()
    calibration: Calibration | None = None
