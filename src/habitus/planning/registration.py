"""Pre-registration: the prediction is written with its hash before the run, and compared with the Record later."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError, RunError
from habitus.planning.facts import OTHER_EVALUATION
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import RECORD_FILE, Comparison, Plan, PlanCheck, RegisteredPlan, read_run_record

_PLAN_FILE = "plan.json"


def register_plan(plan: Plan, path: Path) -> RegisteredPlan:
    """Write the plan with its hash; refused where the file exists, because a prediction is made once."""
    if path.exists():
        raise ConfigError(
            f"{path} exists already",
            expected="a new file: a prediction is registered once, before the run",
            next_step="choose another name, or compare with it: habitus plan --check RUN --against " + str(path),
        )
    if path.suffix != ".json" or not path.parent.is_dir():
        raise ConfigError(f"--register {path}", expected="a name that ends in .json, in a folder that exists")
    registered = RegisteredPlan.of(plan, datetime.now(UTC).isoformat(timespec="seconds"))
    registered.write(path)
    return registered


def check_plan(run: Path, against: Path | None = None) -> PlanCheck:
    """What the registered plan said against what the run measured."""
    plan_path = against or _find_plan(run)
    plan = RegisteredPlan.read(plan_path)
    if not plan.unchanged():
        raise ConfigError(
            f"{plan_path} was changed after it was registered: its hash is not that of its content",
            expected="the file as `habitus plan --register` wrote it",
        )
    records = _records(run)
    notes = []
    same = {}
    for stage, record in records.items():
        planned = plan.stage1 if stage == 1 else plan.stage2
        same[f"stage {stage}"] = planned is not None and _without_parent(record.recipe) == _without_parent(planned)
        if record.status != "done":
            notes.append(f"stage {stage} failed: {record.reason}")
        if plan.dataset_checksum not in (None, record.dataset_checksum):
            notes.append(f"stage {stage} was trained on another dataset than the plan was made for")
        if planned is not None and (differences := _other_evaluation(planned, record)):
            notes.append(
                f"stage {stage} was evaluated otherwise than planned: {differences}. Metrics are not comparable"
            )
    notes += [warning for warning in plan.warnings if warning.startswith(OTHER_EVALUATION)]
    notes += [f"{name} did not run the registered recipe" for name, is_same in same.items() if not is_same]
    return PlanCheck(
        registered_at=plan.registered_at,
        hash=plan.registered_hash,
        same_recipe=same,
        comparisons=tuple(_comparisons(plan, records)),
        notes=tuple(notes),
    )


def _comparisons(plan: Plan, records: dict[int, Record]) -> list[Comparison]:
    comparisons = []
    for prediction in plan.predictions:
        record = records.get(prediction.stage)
        measured = None if record is None else _measured_value(record, prediction.metric)
        comparisons.append(
            _compare(prediction.metric, prediction.stage, prediction.value, prediction.low, prediction.high, measured)
        )
    seconds = [r.seconds.train + r.seconds.warmup for r in records.values() if r.seconds is not None]
    hours = plan.quantities.get("hours")
    stages = 1 if plan.stage2 is None else 2
    if hours is not None and len(seconds) == stages:
        comparisons.append(_compare("hours", 0, hours.value, hours.low, hours.high, math.fsum(seconds) / 3600))
    return comparisons


def _compare(
    name: str, stage: int, predicted: float, low: float | None, high: float | None, measured: float | None
) -> Comparison:
    inside = None
    if measured is not None and (low is not None or high is not None):
        inside = (low is None or low <= measured) and (high is None or measured <= high)
    return Comparison(name=name, stage=stage, predicted=predicted, low=low, high=high, measured=measured, inside=inside)


def _measured_value(record: Record, metric: str) -> float | None:
    if metric.startswith("train/"):
        return None if record.train is None else getattr(record.train, metric.removeprefix("train/"), None)
    measured = record.metrics.get(metric)
    return None if measured is None else measured.value


def _other_evaluation(planned: Recipe, record: Record) -> str:
    """In what the measured evaluation cannot be the planned one; a small dataset may hold fewer queries than asked."""
    asked, own, measured = planned.evaluate, record.recipe.evaluate, record.evaluation
    if measured is None:
        return ""
    differences = []
    if measured.queries > asked.queries or measured.queries == own.queries < asked.queries:
        differences.append(f"{measured.queries:,} queries, not {asked.queries:,}")
    if own.seed != asked.seed:
        differences.append(f"queries of seed {own.seed}, not {asked.seed}")
    if measured.batch_sequences != asked.batch_sequences:
        differences.append(f"batches of {measured.batch_sequences:,} windows, not {asked.batch_sequences:,}")
    if own.regimes[-1] == "catalogue":  # whose candidates a Record counts
        if asked.catalogue_items == "all" and own.catalogue_items != "all":
            differences.append(f"{measured.candidates:,} candidates, not the whole catalogue")
        elif asked.catalogue_items not in ("all", measured.candidates):
            differences.append(f"{measured.candidates:,} candidates, not {asked.catalogue_items:,}")
    return ", ".join(differences)


def _without_parent(recipe: Recipe) -> dict[str, Any]:
    """A recipe without its parent, which the plan cannot know."""
    values = recipe.to_values()
    values["train"].pop("parent", None)
    return values


def _records(run: Path) -> dict[int, Record]:
    """The Records of a run, or of the stages in a folder of runs, by stage."""
    paths = [run / RECORD_FILE] if (run / RECORD_FILE).exists() else sorted(run.glob(f"*/{RECORD_FILE}"))
    records: dict[int, Record] = {}
    for path in paths:
        record = read_run_record(path.parent)
        if record.recipe.train.stage in records:
            raise RunError(
                f"{run} holds several runs of stage {record.recipe.train.stage}", expected="the folder of one run"
            )
        records[record.recipe.train.stage] = record
    if not records:
        raise RunError(
            f"{run} holds no record.json",
            expected="a folder that `habitus train` wrote, after the run has ended",
            next_step="wait for the run, or name its folder",
        )
    return records


def _find_plan(run: Path) -> Path:
    for folder in (run, run.parent, run.parent.parent):
        if (folder / _PLAN_FILE).exists():
            return folder / _PLAN_FILE
    raise ConfigError(
        f"no {_PLAN_FILE} in {run} or the two folders above",
        expected="the file that `habitus plan --register` wrote before the run",
        next_step="name it: habitus plan --check RUN --against plan.json",
    )
