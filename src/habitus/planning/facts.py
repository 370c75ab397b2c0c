"""What a plan reads before it asks the laws: the dataset's fields, and the runs behind a laws.json."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.recipe import EvaluateRecipe, Recipe
from habitus.record import Record
from habitus.sizing import TYPICAL_INPUTS, Inputs, StepSpeed, step_speeds
from habitus.store import AXES, INFO_FILE, Laws, SweepManifest, manifest_paths, read_records, read_store_info


@dataclass(frozen=True)
class DatasetProfile:
    """The dataset's side of a plan, or what is assumed without one."""

    inputs: Inputs = TYPICAL_INPUTS
    seq_len: int = 256
    text_len: int = 24
    num_items: int | None = None
    train_slots: int | None = None  # of one epoch
    dataset_checksum: str | None = None
    num_candidates: int | None = None  # of the items: negatives are drawn from them

    @classmethod
    def of(cls, dataset: Dataset) -> "DatasetProfile":
        return cls(
            inputs=Inputs.of(dataset.fields),
            seq_len=dataset.seq_len,
            text_len=dataset.fields.text_len or 24,
            num_items=dataset.num_items,
            train_slots=dataset.counts("train").windows * dataset.seq_len,
            dataset_checksum=dataset.checksum,
            num_candidates=dataset.num_candidates,
        )


# How the warnings begin that a plan's forecasts and what its run will measure are two things.
OTHER_EVALUATION = "forecasts are of the evaluation that the laws' runs had"
_EVALUATION_KEYS = ("queries", "batch_sequences", "catalogue_items", "horizons", "seed")
StageTwoKey = tuple[float, float, float, int]  # budget, K, learning rate and seed of a stage-2 run


@dataclass(frozen=True)
class ParentMetrics:
    """What the stage-1 run measured that a stage-2 run continued."""

    budget: float
    metrics: dict[str, float]
    batch_sequences: int = 0  # 0: not known


@dataclass(frozen=True)
class StoreFacts:
    """What the Records beside a laws.json say that the laws themselves do not."""

    dataset_checksum: str | None = None
    recipe: Recipe | None = None  # a stage-1 recipe of the largest budget: what all runs have in common
    stage2_batch: int | None = None
    hardware: str | None = None
    threads: int | None = None  # of each run, where all ran on a CPU with as many
    speeds: tuple[StepSpeed, ...] = ()
    parents: dict[StageTwoKey, ParentMetrics] = field(default_factory=dict)

    @property
    def evaluate(self) -> EvaluateRecipe | None:
        return None if self.recipe is None else self.recipe.evaluate

    @property
    def stage2_compute(self) -> float | None:
        """Of its parent's, what a stage-2 run of the store had at most; None where none knows its parent."""
        return max((budget / parent.budget for (budget, *_), parent in self.parents.items()), default=None)


def read_store_facts(laws_path: Path | None) -> StoreFacts:
    """The facts of the store that a laws.json lies in; empty where it lies elsewhere."""
    if laws_path is None:
        return StoreFacts()
    store = laws_path.parent
    info = read_store_info(store) if (store / INFO_FILE).exists() else None
    checksum = None if info is None else info.dataset_checksum
    records = [record for record in read_records(store) if record.status == "done"]
    if not records:
        return StoreFacts(dataset_checksum=checksum)
    stage1 = [r for r in records if r.recipe.train.stage == 1]
    stage2 = [r for r in records if r.recipe.train.stage == 2]
    aside = _runs_on_request(store)
    usual = [r for r in stage1 if r.recipe_hash not in aside] or stage1
    typical = max(usual, key=lambda r: (r.flops_budget or 0.0, r.recipe_hash), default=None)
    return StoreFacts(
        dataset_checksum=checksum or records[0].dataset_checksum,
        recipe=None if typical is None else typical.recipe,
        stage2_batch=max((r.recipe.train.batch_sequences for r in stage2), default=None),
        hardware=_usual_hardware(records),
        threads=_common_threads(records),
        speeds=tuple(step_speeds(records)),
        parents=_parents(stage1, stage2),
    )


def check_dataset(dataset: DatasetProfile, facts: StoreFacts, laws: Laws, laws_path: Path | None) -> str | None:
    """Refuse laws of another dataset; a warning where nothing says which dataset they are of."""
    stated = facts.dataset_checksum or laws.extra.get("dataset_checksum")
    if dataset.dataset_checksum is None:
        return None
    if stated is None:
        return f"{laws_path} does not say which dataset its laws are of: whether they hold for --data cannot be checked"
    if stated != dataset.dataset_checksum:
        raise ConfigError(
            f"{laws_path} holds laws of another dataset: its checksum is {str(stated)[:12]}…, "
            f"that of --data {dataset.dataset_checksum[:12]}…",
            expected="laws that were measured on the dataset to be trained on",
            next_step="habitus study --data DATASET measures them; --published plans without",
        )
    return None


def planned_evaluation(
    dataset: DatasetProfile, facts: StoreFacts, laws: Laws | None, laws_path: Path | None
) -> tuple[EvaluateRecipe, str | None]:
    """The evaluation of the runs behind the laws, which forecasts are of; a warning where the plan cannot have it."""
    evaluate = facts.evaluate or EvaluateRecipe()
    if laws is not None and laws.evaluation is not None:
        evaluate = evaluate.model_copy(update={name: getattr(laws.evaluation, name) for name in _EVALUATION_KEYS})
    elif laws is not None and facts.evaluate is None:
        return evaluate, (
            f"{OTHER_EVALUATION}, and {laws_path} does not say which: the recipes score {evaluate.queries:,} queries "
            "against the whole catalogue. Plan with the laws.json that `habitus fit STORE` writes, or set [evaluate] "
            "of the recipes as the runs had it"
        )
    items, held = evaluate.catalogue_items, dataset.num_candidates
    if items != "all" and held is not None and items > held:
        return evaluate.model_copy(update={"catalogue_items": "all"}), (
            f"{OTHER_EVALUATION}, over {items:,} candidates: --data holds {held:,}, and the recipes take all of them"
        )
    return evaluate, None


def _runs_on_request(store: Path) -> set[str]:
    """Recipe hashes of axes that vary what all other runs have in common: windows, text layers, dropout, batch."""
    axes = tuple(f"{name}-" for name, axis in AXES.items() if axis.on_request)
    manifests = [SweepManifest.read(path) for path in manifest_paths(store) if path.name.startswith(axes)]
    return {row.recipe_hash for manifest in manifests for row in manifest.cells}


def _usual_hardware(records: Iterable[Record]) -> str | None:
    """The device that most runs name."""
    names = [str(r.hardware.get("device_name") or r.hardware.get("device") or "") for r in records]
    names = [name for name in names if name]
    return max(sorted(set(names)), key=names.count) if names else None


def _common_threads(records: Iterable[Record]) -> int | None:
    """The threads of every run, where all ran on a CPU with as many."""
    counts = {r.hardware.get("threads") if r.hardware.get("device") == "cpu" else None for r in records}
    (first, *others) = counts
    return first if not others and isinstance(first, int) else None


def _parents(stage1: Iterable[Record], stage2: Iterable[Record]) -> dict[StageTwoKey, ParentMetrics]:
    """What each stage-2 run started from, as far as the parent's Record is in the store too."""
    by_hash = {
        r.recipe_hash: ParentMetrics(
            r.flops_budget,
            {name: metric.value for name, metric in r.metrics.items()},
            r.recipe.train.batch_sequences,
        )
        for r in stage1
        if r.flops_budget
    }
    parents = {}
    for record in stage2:
        train = record.recipe.train
        if record.flops_budget and record.parent_hash in by_hash:
            key = (record.flops_budget, float(train.num_negatives), train.learning_rate, record.seed)
            parents[key] = by_hash[record.parent_hash]
    return parents
