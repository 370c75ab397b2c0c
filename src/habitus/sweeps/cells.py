"""Planned runs: what a sweep will run, before anything has run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from habitus.data import Dataset, history_reach
from habitus.recipe import DataRecipe, Recipe
from habitus.sizing import Cell, Inputs
from habitus.store import LeftOut, ManifestRow
from habitus.typed import content_hash


@dataclass(frozen=True)
class DatasetFacts:
    """What a dataset decides about cells."""

    checksum: str
    inputs: Inputs
    seq_len: int
    text_len: int
    num_items: int
    train_windows: int
    part_windows: Mapping[tuple[float, int], int] = field(default_factory=dict)  # of (user_share, user_part)
    length_windows: Mapping[int, int] = field(default_factory=dict)  # training windows of other lengths than seq_len
    longest_history: int = 0  # of a training user
    reach: int = 0  # history that enough validation users have before an event
    num_candidates: int | None = None  # of the items, where not all are: negatives are drawn from them

    @classmethod
    def of(
        cls, dataset: Dataset, user_parts: Iterable[tuple[float, int]] = (), seq_lens: Iterable[int] = ()
    ) -> "DatasetFacts":
        """The facts of a dataset; windows of the shares `user_parts` of its users and of other lengths count too."""
        return cls(
            checksum=dataset.checksum,
            inputs=Inputs.of(dataset.fields),
            seq_len=dataset.seq_len,
            text_len=max(1, dataset.fields.text_len),
            num_items=dataset.num_items,
            train_windows=dataset.counts("train").windows,
            part_windows={part: dataset.with_users(*part).counts("train").windows for part in user_parts},
            length_windows={length: dataset.with_seq_len(length).counts("train").windows for length in seq_lens},
            longest_history=int(dataset.user_parts.train_lengths.max(initial=0)),
            reach=history_reach(dataset),
            num_candidates=None if dataset.candidate_rows is None else dataset.num_candidates,
        )

    def windows_of(self, data: DataRecipe) -> int:
        """Training windows of a recipe's length and share of the users; about so many where they were not counted."""
        if data.seq_len != self.seq_len:
            whole = self.length_windows.get(data.seq_len, round(self.train_windows * self.seq_len / data.seq_len))
            return round(data.user_share * whole)
        return self.part_windows.get((data.user_share, data.user_part), round(data.user_share * self.train_windows))

    def epochs(self, batch_sequences: int, steps: int, data: DataRecipe | None = None) -> float:
        """How often a run passes over its training windows."""
        windows = self.train_windows if data is None else self.windows_of(data)
        return batch_sequences * steps / max(1, windows)


@dataclass(frozen=True)
class PlannedRun:
    """One row of a manifest with its recipe and its sizes."""

    row: ManifestRow
    recipe: Recipe
    cell: Cell

    @property
    def hash(self) -> str:
        return self.row.recipe_hash

    @property
    def parent(self) -> str | None:
        return self.recipe.train.parent

    @property
    def trunk(self) -> str:
        """What runs have in common that are the same until they decay; a run of another schedule stands alone."""
        return self.recipe.trunk_hash("") if self.recipe.train.schedule == "wsd" else self.hash

    def with_learning_rate(self, rate: float, facts: DatasetFacts) -> "PlannedRun":
        """The same cell at another learning rate."""
        return self._changed(facts, learning_rate=rate)

    def with_seed(self, seed: int, facts: DatasetFacts) -> "PlannedRun":
        """The same cell with another seed."""
        return self._changed(facts, seed=seed)

    def _changed(self, facts: DatasetFacts, **changes: Any) -> "PlannedRun":
        recipe = self.recipe.model_copy(update={"train": self.recipe.train.model_copy(update=changes)})
        row = self.row.model_copy(update={**changes, "recipe_hash": recipe.hash(facts.checksum)})
        return PlannedRun(row, recipe, self.cell)


@dataclass(frozen=True)
class Design:
    """All cells of an axis at some budgets."""

    axis: str
    cells: tuple[PlannedRun, ...]
    left_out: tuple[LeftOut, ...] = ()
    parents: tuple[PlannedRun, ...] = ()  # stage-1 runs that cells continue and the store may not have yet
    decided: tuple[str, ...] = ()  # what was taken from the store or the preset, in words

    @property
    def flops(self) -> float:
        """Nominal FLOPs of every distinct run, the parents among them; what runs of one trunk share counts once."""
        runs = self.distinct_runs()
        shares = own_shares(runs)
        return float(sum(planned.cell.flops * shares[planned.hash] for planned in runs))

    @property
    def budgets(self) -> list[float]:
        return sorted({p.row.flops_budget for p in self.cells} | {out.flops_budget for out in self.left_out})

    def distinct_runs(self) -> list[PlannedRun]:
        """Every run once, parents first."""
        return list({planned.hash: planned for planned in (*self.parents, *self.cells)}.values())


def own_shares(runs: Iterable[PlannedRun]) -> dict[str, float]:
    """The share of its steps that each run has to take itself: one of schedule wsd begins where the next shorter of
    its trunk begins to decay."""
    shares: dict[str, float] = {}
    reached: dict[str, int] = {}  # by trunk
    for planned in sorted(runs, key=lambda planned: planned.recipe.train.stable_steps):
        shares[planned.hash] = 1 - reached.get(planned.trunk, 0) / planned.recipe.train.steps
        reached[planned.trunk] = planned.recipe.train.stable_steps
    return shares


def plan_run(
    recipe: Recipe, cell: Cell, facts: DatasetFacts, *, budget: float, label: str, wanted: dict[str, Any] | None = None
) -> PlannedRun:
    """The run of a recipe. Recipes that differ only in learning rate and seed share their cell_id."""
    realised = {
        "params": cell.params,
        "embedder_params": cell.embedder_params,
        "contextualizer_params": cell.contextualizer_params,
        "embedder_share": cell.embedder_share,
        "data_ratio": cell.data_ratio,
        "joint_dim": recipe.model.joint_dim,
        "text_depth": recipe.model.text_depth,
        "width": recipe.model.width,
        "depth": recipe.model.depth,
        "batch_sequences": recipe.train.batch_sequences,
        "num_negatives": recipe.train.num_negatives,
        "steps": recipe.train.steps,
        "slots_seen": cell.slots_seen,
        "epochs": facts.epochs(recipe.train.batch_sequences, recipe.train.steps, recipe.data),
        "flops": cell.flops,
    }
    if cell.seq_len != facts.seq_len:
        realised["seq_len"] = cell.seq_len
    if cell.embedder_flop_share is not None:
        realised["embedder_flop_share"] = cell.embedder_flop_share
    row = ManifestRow(
        cell_id=f"{label}-{_cell_hash(recipe)}",
        flops_budget=budget,
        wanted={**cell.wanted, **(wanted or {})},
        realised=realised,
        learning_rate=recipe.train.learning_rate,
        seed=recipe.train.seed,
        recipe_hash=recipe.hash(facts.checksum),
    )
    return PlannedRun(row, recipe, cell)


def _cell_hash(recipe: Recipe) -> str:
    """Eight digits of the hash of everything but learning rate and seed."""
    values = recipe.to_values()
    del values["train"]["learning_rate"], values["train"]["seed"]
    return content_hash(values)[:8]
