"""Cards: a README.md in Hugging Face's form beside a run, a dataset or a study."""

from habitus.cards.dataset import dataset_card
from habitus.cards.facts import (
    CARD_FILE,
    FACTS_FILE,
    CardFacts,
    DataFacts,
    FieldFacts,
    SearchFacts,
    SideFacts,
    Trial,
    read_plan,
    shareable_plan,
)
from habitus.cards.run import add_plan, follows, metrics_where_worse, run_card, update_run_card, write_run_card
from habitus.cards.study import write_study_card

__all__ = [
    "CARD_FILE",
    "FACTS_FILE",
    "CardFacts",
    "DataFacts",
    "FieldFacts",
    "SearchFacts",
    "SideFacts",
    "Trial",
    "add_plan",
    "dataset_card",
    "follows",
    "metrics_where_worse",
    "read_plan",
    "run_card",
    "shareable_plan",
    "update_run_card",
    "write_run_card",
    "write_study_card",
]
