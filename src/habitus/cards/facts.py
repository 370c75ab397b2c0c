"""What a card says beyond the Record: card.json beside it, from which the card can be written again."""

from pathlib import Path
from typing import Any

from pydantic import Field

from habitus.cards.markup import hide_paths
from habitus.errors import ConfigError
from habitus.store import Plan, RegisteredPlan, TestTable
from habitus.typed import Typed

CARD_FILE, FACTS_FILE = "README.md", "card.json"


class FieldFacts(Typed):
    """One field of items or of events."""

    name: str
    kind: str
    filled: float | None = Field(None, description="Share of items or events that have a value.")


class SideFacts(Typed):
    """One side of the split."""

    users: int
    events: int
    queries: int


class DataFacts(Typed):
    """A prepared log."""

    checksum: str
    events: int
    users: int
    items: int
    days: tuple[str, str] | None = Field(None, description="First and last day; absent where times are an order.")
    split: str
    seq_len: int
    sides: dict[str, SideFacts]
    item_fields: tuple[FieldFacts, ...]
    event_fields: tuple[FieldFacts, ...]
    dropped: dict[str, int] = Field(default_factory=dict, description="Rows that preparation left out, by reason.")
    synthetic: bool = False


class Trial(Typed):
    """One recipe that was tried before this one was chosen."""

    name: str
    value: float


class SearchFacts(Typed):
    """How a recipe was found without laws."""

    metric: str
    trials: tuple[Trial, ...]
    chosen: str
    seconds: float


class CardFacts(Typed):
    """card.json."""

    data: DataFacts | None = None
    table: TestTable | None = Field(None, description="The run and baselines on test users.")
    plan: Plan | None = Field(None, description="The plan that the recipe comes from.")
    search: SearchFacts | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> "CardFacts":
        """Those of a folder; empty where it has none yet."""
        path = folder / FACTS_FILE
        return cls.read(path) if path.exists() else cls()


def shareable_plan(plan: Plan) -> Plan:
    """A plan without paths of the machine that it was made on."""
    values = {name: value for name, value in plan.to_values().items() if name in Plan.model_fields}
    return Plan.parse(_hide_paths_in(values | {"laws": Path(plan.laws).name}), "the plan")


def _hide_paths_in(value: Any) -> Any:
    if isinstance(value, str):
        return hide_paths(value)
    if isinstance(value, dict):
        return {name: _hide_paths_in(inner) for name, inner in value.items()}
    return [_hide_paths_in(inner) for inner in value] if isinstance(value, list) else value


def read_plan(path: Path) -> Plan:
    """A plan as `habitus plan --json` prints it, or as a study registers it."""
    values = Plan.read_values(path)
    kind = RegisteredPlan if "registered_hash" in values else Plan
    return kind.parse(values, str(path))


def find_plan(recipe_file: Path) -> Plan | None:
    """The plan that stands beside a recipe's file or a folder or two above it, as plan and study write it."""
    for folder in list(recipe_file.absolute().parents)[:3]:
        path = folder / "plan.json"
        if path.is_file():
            try:
                return read_plan(path)
            except ConfigError:  # another tool's plan.json
                return None
    return None
