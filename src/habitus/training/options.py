"""How a run is carried out, and what is refused before a model is built.

Nothing in TrainOptions changes what a run computes beyond rounding, so none of it is hashed.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError, DataError, RunError
from habitus.evaluation import EvaluateOptions, catalogue_subset, check_contexts, horizon_queries, query_set
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import HISTORY_SLICE, HORIZON_METRICS, METRICS, SLICES, horizon_regime, read_run_record
from habitus.units import MAX_THREADS

# Going on with a run whose log has grown, by what was measured (docs/guides/tomorrow.md): at the full rate a model
# first loses what it knew, at a tenth it hardly moves, and a tenth of the steps bring nothing.
_RATE_SHARE, _STEP_SHARE = 0.25, 0.3


@dataclass(frozen=True)
class TrainOptions:
    """Device, threads, checkpoints: how, not what."""

    device: str = "auto"  # auto, cpu, cuda or cuda:1
    threads: int | None = None  # CPU threads; where None, as many as a step feeds and idle cores carry
    deterministic: bool = False  # the same bits on CUDA as well
    save_every: int = 0  # steps between checkpoints; 0: only on SIGTERM and at the end
    keep: int = 2  # newest checkpoints kept
    best: str | None = None  # metric of the evaluations during the run whose best checkpoint is kept as well
    trunk: str | Path | None = None  # folder that runs with schedule wsd share until they decay
    resume: bool = False  # go on from the newest intact checkpoint, start from the beginning where there is none
    accumulate: int = 1  # micro-batches per step; the candidates stay those of the full batch
    compile: bool | None = None  # compiled kernels on a GPU; None: where the run is long enough to pay for it
    capture: bool | None = None  # steps as captured graphs; None: on a GPU, where that is possible
    flops_budget: float | None = None  # copied into the Record
    keep_checkpoints_at_end: bool = False
    force: bool = False  # train even where a step seems to take more memory than there is
    card: bool = True  # write README.md beside the Record
    shard: bool | None = None  # weights sharded over processes (FSDP2); None: above a size

    def check(self) -> None:
        """Refuse numbers that mean nothing."""
        for name, least in (("save_every", 0), ("keep", 1), ("accumulate", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}", expected=f"{least} or more")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"threads is {self.threads:,}", expected=f"at most {MAX_THREADS:,}")


@dataclass(frozen=True)
class ParentRun:
    """The run whose weights this one begins with."""

    path: Path
    record: Record


def evaluate_options(recipe: Recipe) -> EvaluateOptions:
    """The evaluation that a recipe asks for."""
    settings = recipe.evaluate
    return EvaluateOptions(
        regimes=settings.regimes,
        queries=settings.queries,
        batch_sequences=settings.batch_sequences,
        catalogue_items=settings.catalogue_items,
        metrics=settings.metrics,
        horizons=settings.horizons,
        seed=settings.seed,
    )


def check_recipe(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse a recipe that this dataset cannot carry out; windows have the recipe's data.seq_len."""
    dataset = dataset.training_view(recipe.data)
    stored = dataset.fields.text_len
    if stored and recipe.model.text_len > stored:
        raise ConfigError(
            f"the recipe reads model.text_len = {recipe.model.text_len} tokens per item, "
            f"and {dataset.path} stores {stored}",
            expected="as many tokens as are stored, or fewer",
            next_step=f"set model.text_len={stored}, or prepare with --text-len {recipe.model.text_len}",
        )
    if dataset.counts("train").windows == 0:
        if recipe.data.user_share < 1:
            raise ConfigError(
                f"part {recipe.data.user_part} of data.user_share = {recipe.data.user_share:g} has no training windows",
                expected=f"a share of the {dataset.with_users(1).counts('train').users:,} training users that holds "
                "one with two events or more",
                next_step="raise data.user_share",
            )
        raise DataError(
            f"{dataset.path} has no training windows",
            expected="training users with two events or more, the later of them a target",
            next_step="prepare again with another --split or a smaller --validation-share",
        )
    if recipe.train.num_negatives > dataset.num_candidates:
        of = f"{dataset.num_items:,} items"
        if dataset.num_candidates < dataset.num_items:
            of += f", {dataset.num_candidates:,} of them candidates by [targets]"
        raise ConfigError(
            f"train.num_negatives is {recipe.train.num_negatives:,}, and the catalogue has {of}",
            expected="at most the full catalogue",
            next_step=f"set train.num_negatives={dataset.num_candidates} for the exact softmax, or fewer",
        )
    if recipe.data.include_validation and recipe.evaluate.every:
        raise ConfigError(
            f"evaluate.every is {recipe.evaluate.every}, and data.include_validation trains on the validation events",
            expected="evaluate.every = 0: nothing is left to evaluate on while training",
        )
    options = evaluate_options(recipe)
    if recipe.evaluate.contexts and not recipe.data.include_validation:
        check_contexts(dataset, recipe.evaluate.contexts, options)
    queries = query_set(dataset, options)
    if "catalogue" in options.regimes:
        catalogue_subset(dataset, queries, options)
    horizon_queries(dataset, options)


def check_parent(recipe: Recipe, dataset: Dataset, parent: Path | None) -> ParentRun | None:
    """The parent's Record; refused where it is not the one that the recipe names, or of another shape or dataset.

    Stage 2 goes on with the dataset of stage 1. A stage-1 run may go on with later events: its dataset may be another,
    encoded in the same way (`check_same_fields`), and its parent a run of either stage.
    """
    stage = recipe.train.stage
    if parent is None and recipe.train.parent is None:
        return None
    if parent is None:
        raise ConfigError(
            f"a stage-{stage} recipe with a parent needs the run that it continues",
            next_step="pass its folder: --from RUN",
        )
    if recipe.train.parent is None:
        raise ConfigError(
            f"{parent} was given as the run to continue, and the recipe names no parent",
            expected="the parent's hash in train.parent: the run's identity depends on where it begins",
            next_step="pass the recipe to habitus train --from RUN, which fills it in",
        )
    path = parent / "record.json"
    expected = "a run that is done" if stage == 1 else "a stage-1 run that is done"
    if not path.exists():
        raise RunError(
            f"{parent} holds no record.json", expected=f"the folder of {expected}", next_step="train it first"
        )
    record = read_run_record(parent)
    if record.status != "done" or (stage == 2 and record.recipe.train.stage != 1):
        raise RunError(
            f"{parent} is a stage-{record.recipe.train.stage} run with status {record.status!r}", expected=expected
        )
    if record.recipe_hash != recipe.train.parent:
        raise ConfigError(
            f"the recipe continues {str(recipe.train.parent)[:12]}, and {parent} is {record.recipe_hash[:12]}",
            expected="the parent that train.parent names",
            next_step=f"set train.parent={record.recipe_hash}, or pass the other run",
        )
    if record.recipe.model != recipe.model:
        here, there = recipe.model.to_values(), record.recipe.model.to_values()
        differing = ", ".join(f"{k} {there.get(k)} there, {v} here" for k, v in here.items() if there.get(k) != v)
        raise ConfigError(
            f"the recipe's model is not that of {parent}: {differing}", expected="the same [model] in both runs"
        )
    if stage == 1:
        return ParentRun(parent, record)
    if record.recipe.train.precision != recipe.train.precision:
        raise ConfigError(
            f"the recipe has precision {recipe.train.precision}, and {parent} had {record.recipe.train.precision}",
            expected="one precision for both stages: item vectors depend on it",
        )
    ours, theirs = ((r.data.user_share, r.data.user_part) for r in (recipe, record.recipe))
    if ours != theirs:
        raise ConfigError(
            f"the recipe trains on data.user_share = {ours[0]:g}, user_part = {ours[1]}, and {parent} on "
            f"{theirs[0]:g} and {theirs[1]}",
            expected="the same training users in both stages",
        )
    if record.dataset_checksum != dataset.checksum:
        raise ConfigError(
            f"{parent} was trained on another dataset than {dataset.path} "
            f"(checksum {record.dataset_checksum[:12]}, not {dataset.checksum[:12]})",
            expected="one dataset for both stages",
        )
    return ParentRun(parent, record)


def continuing_recipe(record: Record, run: Path) -> Recipe:
    """The recipe of a stage-1 run, for as long and at such a rate as continuing it takes."""
    train = record.recipe.train
    if train.stage != 1:
        raise ConfigError(
            f"{run} is a run of stage 2, whose rate and steps are not those of both parts",
            expected="a stage-1 run to continue, or a recipe",
            next_step="name the stage-1 run before it: stage1, or refit-stage1",
        )
    changes = {
        "parent": record.recipe_hash,
        "steps": max(1, round(_STEP_SHARE * train.steps)),
        "learning_rate": _RATE_SHARE * train.learning_rate,
        "schedule": "cosine",
        "warmup_steps": None,
    }
    return record.recipe.model_copy(update={"train": train.model_copy(update=changes)})


def check_best(recipe: Recipe, metric: str | None) -> None:
    """Refuse to choose checkpoints by a metric that the recipe's evaluations do not measure."""
    if metric is None:
        return
    kinds = [kind for kind in METRICS.values() if kind.group in recipe.evaluate.metrics]
    names = [f"{regime}/{name}" for regime in recipe.evaluate.regimes for kind in kinds for name in kind.names()]
    horizons = [horizon_regime(horizon) for horizon in recipe.evaluate.horizons]
    names += [f"{one}/{name}" for one in horizons for kind in HORIZON_METRICS for name in METRICS[kind].names()]
    regime, _, rest = metric.partition("/")
    name, _, cut = rest.partition("/")
    if f"{regime}/{name}" not in names or not (cut in ("", *SLICES) or cut.startswith(HISTORY_SLICE)):
        raise ConfigError(
            f"--best {metric} is not among the metrics that this recipe's evaluations measure",
            expected="<regime>/<metric>[@k][/<slice>], as in batch/loss, of the regimes "
            + ", ".join([*recipe.evaluate.regimes, *horizons]),
        )


def check_trunk(recipe: Recipe, trunk: str | Path | None) -> None:
    """Refuse a trunk for a run that has none."""
    if trunk is not None and recipe.train.schedule != "wsd":
        raise ConfigError(
            f"the trunk {trunk} was given to a run with schedule {recipe.train.schedule!r}",
            expected="train.schedule = 'wsd': others decay from the beginning, or never",
        )


def check_processes(dataset: Dataset, processes: int) -> None:
    """Refuse more processes than items, of which each must own one."""
    if processes > dataset.num_items:
        raise ConfigError(
            f"{processes} processes were started, and {dataset.path} has {dataset.num_items:,} items",
            expected="at most one process per item: items are divided among them",
            next_step=f"start {dataset.num_items} or fewer",
        )


@contextmanager
def hold_folder(out: Path) -> Iterator[None]:
    """Keep other trainers out of a folder until this one ends, however it ends; refuse one that is held."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{out} is in use: another trainer writes to it",
                expected="a folder of its own for each run",
                next_step="wait until that one has ended, or name another folder",
            ) from None
        except OSError:  # a file system without locks: the Record is still written only once
            pass
        yield
    finally:
        os.close(descriptor)


def check_folder(out: Path, *, resume: bool) -> None:
    """Refuse an output that holds another run already, or that cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".{os.getpid()}.probe"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # on another machine a process may have the same number
    except OSError as error:
        raise RunError(
            f"{out} cannot be written to: {error.strerror}", expected="a folder that can be created or written to"
        ) from error
    names = [name for name in ("record.json", "checkpoints", "bundle") if (out / name).exists()]
    if names and not resume:
        raise RunError(
            f"{out} holds a run already ({', '.join(names)})",
            expected="a new folder",
            next_step="pass --resume to go on with it, or name another folder",
        )
