"""A trained run in Python: its Record, and the questions that people ask of a model."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data import Dataset
from habitus.display import html_table, text_table
from habitus.errors import ConfigError, RunError
from habitus.recipe import Recipe
from habitus.store import read_run_record

if TYPE_CHECKING:
    from habitus.evaluation import Evaluation
    from habitus.serving import RecommendedItem, Retriever

_HEADLINES = ("batch/loss", "catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10")


class Run:
    """The folder of one trained stage. Models and indexes are loaded when they are first needed."""

    def __init__(self, path: str | Path, dataset: Dataset | str | Path | None = None) -> None:
        """The run in `path`; of a folder with both stages, the better where one was chosen, else the second.

        `dataset` is what it was trained on.
        """
        self.path = _stage_folder(Path(path))
        self.record = read_run_record(self.path)
        self._dataset = dataset

    @property
    def recipe(self) -> Recipe:
        return self.record.recipe

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that training measured at its end; `record.metrics` has their standard errors."""
        return {name: metric.value for name, metric in self.record.metrics.items()}

    @cached_property
    def dataset(self) -> Dataset:
        """The prepared dataset of the run."""
        if self._dataset is None:
            raise RunError(
                f"{self.path} was opened without its dataset",
                expected="the dataset that the run was trained on",
                next_step=f"Run({str(self.path)!r}, dataset=...)",
            )
        return self._dataset if isinstance(self._dataset, Dataset) else Dataset.open(self._dataset)

    @cached_property
    def retriever(self) -> "Retriever":
        """The model with its catalogue, as it is served."""
        from habitus.serving import Retriever

        return Retriever.open(self.path, data=None if self._dataset is None else self.dataset.path)

    def evaluate(self, dataset: Dataset | str | Path | None = None, **options: Any) -> "Evaluation":
        """Metrics on validation queries, or with side="test" on test queries; `options` as in `habitus.evaluate`."""
        from habitus.api.verbs import evaluate

        return evaluate(self.path, self.dataset if dataset is None else dataset, **options)[0]

    def recommend(
        self, history: Sequence[Mapping[str, Any] | Any], k: int = 10, *, exclude_seen: bool = False, **conditions: Any
    ) -> "list[RecommendedItem]":
        """The k next items for a history: events as dictionaries, or plain item ids; oldest first. Popular items for an
        empty one. `conditions` as in RecommendRequest: allow, deny, ranges, only_items, exclude_items."""
        from habitus.serving import RecommendRequest

        request = RecommendRequest(history=self._events(history), k=k, exclude_seen=exclude_seen, **conditions)
        return list(self.retriever.recommend([request])[0].items)

    def score(self, history: Sequence[Mapping[str, Any] | Any], item_ids: Sequence[Any]) -> list[float | None]:
        """The scores of given items for a history, as `recommend` gives them; None for items that are unknown."""
        from habitus.serving import ScoreRequest

        request = ScoreRequest(histories=[self._events(history)], item_ids=list(item_ids))
        return list(self.retriever.score([request])[0].answers[0].scores)

    def _events(self, history: Sequence[Mapping[str, Any] | Any]) -> list[dict[str, Any]]:
        item = self.retriever.bundle.schema.events.item_column
        if isinstance(history, str | Mapping):  # a text would be read letter by letter
            raise ConfigError(
                f"the history is {history!r}",
                expected=f"a list of item ids or of events, as ['A17'] or [{{{item!r}: 'A17'}}]",
                next_step="put it into a list",
            )
        return [dict(event) if isinstance(event, Mapping) else {item: event} for event in history]

    def item_vectors(self) -> pa.Table:
        """Id and vector of every item of the catalogue; a query's dot product with a vector is the item's score."""
        from habitus.exporting import export_items

        with tempfile.TemporaryDirectory() as folder:
            export_items(self.retriever, Path(folder) / "items.parquet")
            return pq.read_table(Path(folder) / "items.parquet")

    def __repr__(self) -> str:
        return text_table(f"Run {self.path}", self._rows())

    def _repr_html_(self) -> str:
        return html_table(f"Run {self.path}", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        record = self.record
        rows = [("status", record.status if record.reason is None else f"{record.status}: {record.reason}")]
        rows.append(("stage", f"{record.recipe.train.stage}, {record.steps:,} steps, {record.epochs:.3g} epochs"))
        if record.params is not None:
            rows.append(("parameters", f"{record.params.total:,} (embedder {record.params.embedder:,})"))
        if record.train is not None:
            rows.append(("training loss", f"{record.train.loss:.4f}"))
        for name in _HEADLINES:
            if name in record.metrics:
                metric = record.metrics[name]
                rows.append((name, f"{metric.value:.4f}" + (f" ± {metric.se:.4f}" if metric.se else "")))
        return rows


def _stage_folder(path: Path) -> Path:
    for folder in (path, path / "best", path / "stage2", path / "stage1"):
        if (folder / "record.json").exists():
            return folder
    raise RunError(
        f"{path} holds no record.json",
        expected="the folder of a finished run, or one with stage1 and stage2",
        next_step="train it with habitus.train(recipe, dataset, out=...)",
    )
