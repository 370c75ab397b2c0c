"""STORE/evaluations: what `habitus evaluate STORE --keep NAME` measured after the runs had ended."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from habitus.errors import ConfigError
from habitus.record import EvaluationSpec, Metric, Record
from habitus.store.metrics import horizon_of
from habitus.typed import Typed

EVALUATIONS = "evaluations"
EVALUATION_SLICE = "eval="  # the last part of a metric's name, as in catalogue/recall@10/eval=big


class StoreEvaluation(Typed):
    """The metrics of every cell of a store under one specification."""

    name: str
    dataset_checksum: str
    specification: dict[str, EvaluationSpec] = Field(description="By regime.")
    runs: dict[str, dict[str, Metric]] = Field(description="By recipe hash, then by metric.")
    catalogue_items: int | Literal["all"] | None = Field(
        None, exclude_if=lambda items: items is None, description="Candidates of the catalogue regime, as asked for."
    )

    def metrics_of(self, record: Record) -> dict[str, Metric]:
        """What it adds to a Record: its metrics under their own names where it was measured as the Record was, and
        otherwise with the evaluation's name behind."""
        named = {}
        for metric, value in self.runs.get(record.recipe_hash, {}).items():
            if not self._measured_alike(metric.partition("/")[0], record):
                named[f"{metric}/{EVALUATION_SLICE}{self.name}"] = value
            elif metric not in record.metrics:
                named[metric] = value
        return named

    def _measured_alike(self, regime: str, record: Record) -> bool:
        own, spec = self.specification[regime], record.evaluation
        if horizon_of(regime) is not None:  # users and cut follow from the dataset, as in a Record
            return own.side == "validation"
        if spec is None or (own.query_set_checksum, own.side) != (spec.query_set_checksum, spec.side):
            return False
        if regime == "batch":
            return own.batch_sequences == spec.batch_sequences
        if self.catalogue_items is not None and "catalogue" not in record.recipe.evaluate.regimes:
            # The Record counts the candidates of its batches.
            return self.catalogue_items == record.recipe.evaluate.catalogue_items
        return own.candidates == spec.candidates


def evaluation_path(store: Path, name: str) -> Path:
    """The file of an evaluation; its values per query stand beside it, as .parquet."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise ConfigError(f"--keep {name!r}", expected="a name of letters, digits, '_', '.' and '-'")
    return store / EVALUATIONS / f"{name}.json"


def read_evaluations(store: Path) -> list[StoreEvaluation]:
    """All of a store, by name."""
    return [StoreEvaluation.read(path) for path in sorted((store / EVALUATIONS).glob("*.json"))]
