"""test_table.json: a model and the baselines on users that chose nothing, each difference with its interval."""

from pydantic import Field

from habitus.record import Metric
from habitus.typed import Typed

TEST_TABLE_FILE = "test_table.json"
TABLE_METRICS = ("recall@10", "ndcg@10", "loss")


class BaselineDifference(Typed):
    """The model less a baseline; 95% over users."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:+.4f}"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


class TableRow(Typed):
    """One scorer."""

    scorer: str
    metrics: dict[str, Metric]
    differences: dict[str, BaselineDifference] = Field(default_factory=dict)


class TestTable(Typed):
    """The model first, then the baselines."""

    __test__ = False  # not a test of pytest's

    side: str
    queries: int
    users: int
    rows: tuple[TableRow, ...]

    def lines(self) -> list[str]:
        """The table as text."""
        header = f"{'':20}" + "".join(f"{name:>12}" for name in TABLE_METRICS)
        lines = [f"{self.queries:,} queries of {self.users:,} {self.side} users, whole catalogue", header]
        for row in self.rows:
            lines.append(f"{row.scorer:20}" + "".join(f"{row.metrics[name].value:12.4f}" for name in TABLE_METRICS))
        lines.append("model less baseline [95% over users]")
        for row in self.rows[1:]:
            cells = (f"{name} {row.differences[name]}" for name in TABLE_METRICS[:2])
            lines.append(f"  {row.scorer:20} {', '.join(cells)}")
        return lines
