"""A good model for any log, without a recipe: a few candidates within a time, chosen on validation, reported on test.

probe the speed ─▶ candidates: passes, then another shape ─▶ stage 2 ─▶ refit with the validation events ─▶ table
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from habitus.cards import CARD_FILE, SearchFacts, Trial, update_run_card
from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.files import write_atomic
from habitus.planning import (
    LEAST_PASSES,
    SHAPES,
    DeviceKind,
    Shape,
    refit_recipe,
    stage1_recipe,
    stage2_recipe,
    usual_passes,
)
from habitus.progress import Note
from habitus.recipe import EvaluateRecipe, Recipe
from habitus.record import Record
from habitus.store import HORIZON_METRICS, METRICS, direction_of, horizon_of
from habitus.studies.envelope import repeat_share
from habitus.studies.log_table import TestTable, compare_on_test
from habitus.typed import Typed, suggest_name
from habitus.units import format_seconds

if TYPE_CHECKING:
    from habitus.training import TrainingProgress, TrainOptions

CHOICE_FILE = "choice.json"
BEST = "best"  # a link to the stage that validation chose, refitted where the time lasted
REFIT = "refit-stage"
DEFAULT_HOURS: dict[DeviceKind, float] = {"gpu": 0.04, "cpu": 0.13}
_PROBE_STEPS: dict[DeviceKind, int] = {"gpu": 40, "cpu": 6}
_STAGE2_COST = 0.3  # of a candidate's time, for its second stage
_REFIT_COST = 1.3  # likewise, for both stages again on more events
_GROWTH = 2.0  # from one number of passes to the next
_LEAST_GAIN = 0.003  # of the metric: a smaller one is no reason to go on in the same direction


@dataclass(frozen=True)
class LogTrainingOptions:
    """Everything but the dataset and the folder."""

    hours: float | None = None  # for all training; the closing table comes on top
    metric: str = "catalogue/ndcg@10"  # candidates are chosen by it, on validation
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    refit: bool = True  # train the choice again on training and validation events, if the time lasts


class Candidate(Typed):
    """One recipe that was tried."""

    shape: str
    passes: float
    steps: int
    value: float
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.passes:.3g}"


class LogTraining(Typed):
    """choice.json: what was tried, what was chosen, and how it does on users that chose nothing."""

    metric: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    stage: int
    value: float
    stage1: Recipe
    refit: bool = False
    table: TestTable
    seconds: float


def train_log(
    dataset: Dataset,
    out: str | Path,
    options: LogTrainingOptions | None = None,
    *,
    progress: "Callable[[str, TrainingProgress], None] | None" = None,
    note: Note | None = None,
) -> LogTraining:
    """Train on a log within a time and keep the best of what was tried; the same call continues where it stopped.

    `out` then holds stage1 and stage2, which validation compares, the choice among them refitted on training and
    validation events, a link `best` to what should be served, and choice.json. `note` gets a line per decision.
    """
    options, note = options or LogTrainingOptions(), note or (lambda _: None)
    search = _Search(dataset, Path(out), options, progress, note)
    if (search.out / CHOICE_FILE).exists():
        raise RunError(
            f"{search.out} holds a finished training already ({CHOICE_FILE})",
            expected="a new folder",
            next_step="name another --out, or remove this one",
        )
    note(_describe_log(dataset))
    chosen = search.finished_choice() or search.choose()
    first = Record.read(search.out / "stage1" / "record.json")
    stage, value = search.train_stage2(first, chosen)
    refit = search.refit(first, stage)
    best = f"{REFIT}{stage}" if refit else f"stage{stage}"
    note("comparing with baselines on test users")
    table = compare_on_test(search.out / best, dataset, options.device)
    result = LogTraining(
        metric=options.metric,
        candidates=tuple(search.candidates),
        chosen=chosen,
        stage=stage,
        value=value,
        stage1=first.recipe,
        refit=refit,
        table=table,
        seconds=time.monotonic() - search.began,
    )
    (search.out / BEST).unlink(missing_ok=True)
    (search.out / BEST).symlink_to(best)
    _write_card(search.out, result)
    result.write(search.out / CHOICE_FILE)
    shutil.rmtree(search.out / "candidates", ignore_errors=True)
    return result


def _write_card(out: Path, result: LogTraining) -> None:
    """The card of the model to serve, in its own folder and in the folder that the user named."""
    found = SearchFacts(
        metric=result.metric,
        trials=tuple(Trial(name=one.name, value=one.value) for one in result.candidates),
        chosen=result.chosen.name,
        seconds=result.seconds,
    )
    card = update_run_card(out / BEST, table=result.table, search=found)
    write_atomic(out / CARD_FILE, card.encode())


def _check_metric(metric: str) -> None:
    """Refuse a metric that no candidate would measure, before one is trained."""
    regime, _, name = metric.partition("/")
    if horizon_of(metric) is None:
        regime, groups = "catalogue", EvaluateRecipe().metrics
        kinds = [kind for kind in METRICS.values() if kind.group in groups]
    else:
        kinds = [METRICS[name] for name in HORIZON_METRICS]
    known = [f"{regime}/{one}" for kind in kinds for one in kind.names()]
    if metric in known:
        return
    guess = metric if name else f"{regime}/{metric}"  # ndcg@10 of catalogue/ndcg@10
    raise ConfigError(
        f"the metric {metric!r} is not measured here ({suggest_name(guess, known)})",
        expected="one over the whole catalogue, as catalogue/ndcg@10, or, after prepare --split time, of a horizon, as "
        "horizon7d/ndcg@10",
    )


def _describe_log(dataset: Dataset) -> str:
    counts = dataset.counts("train")
    return (
        f"log: {counts.events:,} training events of {counts.users:,} users on {dataset.num_items:,} items; "
        f"{repeat_share(dataset):.0%} of next items are in the visible past"
    )


@dataclass
class _Search:
    """Candidates on one log, as far as the time goes."""

    dataset: Dataset
    out: Path
    options: LogTrainingOptions
    progress: "Callable[[str, TrainingProgress], None] | None"
    note: Note
    candidates: list[Candidate] = field(default_factory=list)
    seconds_per_pass: float = 0.0
    overhead_seconds: float = 0.0  # start and evaluation of one run

    def __post_init__(self) -> None:
        from habitus.evaluation import resolve_device

        self.began = time.monotonic()
        self.device: DeviceKind = "gpu" if resolve_device(self.options.device).type == "cuda" else "cpu"
        hours = DEFAULT_HOURS[self.device] if self.options.hours is None else self.options.hours
        if not 0 < hours < 1e6:
            raise ConfigError(f"--hours {hours:g}", expected="a positive number of hours")
        self.hours = hours
        _check_metric(self.options.metric)
        self.sign = 1.0 if direction_of(self.options.metric) == "max" else -1.0

    @property
    def seconds_left(self) -> float:
        return self.hours * 3600 - (time.monotonic() - self.began)

    def finished_choice(self) -> Candidate | None:
        """The choice of an earlier call that stopped after it, if there was one."""
        path = self.out / "stage1" / "candidate.json"
        return Candidate.read(path) if path.exists() else None

    def choose(self) -> Candidate:
        """Probe, try candidates, and leave the best as stage1."""
        self._probe()
        first, *others = SHAPES[self.device]
        usual, affordable = usual_passes(self.dataset), self._affordable_passes()
        why = "the usual passes for a log of this size"
        if affordable < usual:
            why = f"as many as the hours pay, of {usual:.3g} that are usual for a log of this size"
        best = self._try(first, min(usual, affordable), why)
        best = self._search_passes(first, best)
        for shape in others:
            passes = best.passes * shape.pass_factor
            if self._fits(passes):
                candidate = self._try(shape, passes, "another shape")
                if self._better(best, candidate) is candidate:
                    best = self._search_passes(shape, candidate)
        self.note(
            f"chosen: {best.shape}, {best.passes:.3g} passes, {self.options.metric} {best.value:.4f} on validation"
        )
        folder = self._folder(best)
        best.write(folder / "candidate.json")
        folder.rename(self.out / "stage1")
        return best

    def train_stage2(self, first: Record, chosen: Candidate) -> tuple[int, float]:
        """The stage to serve and its metric: the second where it is better on validation."""
        recipe = stage2_recipe(first.recipe, self.dataset)
        record = self._train(recipe, self.out / "stage2", parent=self.out / "stage1", name="stage 2")
        value = self._value(record)
        better = self.sign * (value - chosen.value) > 0
        self.note(
            f"stage 2: {self.options.metric} {value:.4f}, {'better: kept' if better else 'not better: stage 1 stays'}"
        )
        return (2, value) if better else (1, chosen.value)

    def refit(self, first: Record, stage: int) -> bool:
        """Train the choice again, as many passes, on training and validation events; whether there was a reason to."""
        if not self.options.refit or not self.dataset.has_side("test"):
            return False  # without a test side nothing could say how good it is
        whole = self.dataset.with_validation()
        if whole.counts("train").events == self.dataset.counts("train").events:
            return False
        recipe = refit_recipe(first.recipe, self.dataset)
        parent = self.out / f"{REFIT}1"
        self._train(recipe, parent, name="refit")
        if stage == 2:
            recipe = stage2_recipe(recipe, self.dataset)
            self._train(recipe, self.out / f"{REFIT}2", parent=parent, name="refit of stage 2")
        self.note(f"refitted on {whole.counts('train').events:,} events, those of validation among them")
        return True

    def _probe(self) -> None:
        """Measure how fast the first shape trains here; refuse a time that does not pay one pass."""
        shape = SHAPES[self.device][0]
        recipe = self._recipe(shape, 1.0)
        steps = min(recipe.train.steps, _PROBE_STEPS[self.device])
        probe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})
        folder = self.out / "probe"
        shutil.rmtree(folder, ignore_errors=True)
        record = self._train(probe, folder, name="probe")
        shutil.rmtree(folder)
        assert record.seconds is not None
        rate = record.throughput.get("events_per_second") or record.events_seen / max(record.seconds.train, 1e-3)
        self.seconds_per_pass = self.dataset.counts("train").events / rate
        self.overhead_seconds = record.seconds.warmup + record.seconds.evaluate
        affordable = self._affordable_passes()
        self.note(
            f"device: {rate:,.0f} events/s, so a pass takes {format_seconds(self.seconds_per_pass)}; "
            f"{self.hours:g} hours pay {affordable:.3g} passes"
        )
        if affordable < 1:
            least = (self.seconds_per_pass * self._pass_cost + self._starts * self.overhead_seconds) / 3600
            enough = 1.2 * least + (self.hours - self.seconds_left / 3600)
            raise ConfigError(
                f"--hours {self.hours:g} does not pay one pass over {self.dataset.path}",
                expected=f"at least {enough:.2g} hours on this device",
                next_step=f"the same with --hours {1.5 * enough:.2g}, on a machine with less to do, or on a GPU",
            )

    @property
    def _pass_cost(self) -> float:
        """What a pass of a candidate costs in all if it is chosen, in passes."""
        return 1 + _STAGE2_COST + (_REFIT_COST if self.options.refit else 0)

    @property
    def _starts(self) -> int:
        """Runs that are to be started for a candidate that is chosen."""
        return 4 if self.options.refit else 2

    def _affordable_passes(self) -> float:
        seconds = self.seconds_left - self._starts * self.overhead_seconds
        return max(0.0, seconds / (self.seconds_per_pass * self._pass_cost))

    def _fits(self, passes: float) -> bool:
        return passes <= self._affordable_passes() and passes >= LEAST_PASSES / 2

    def _search_passes(self, shape: Shape, first: Candidate) -> Candidate:
        """More passes for as long as that helps and the time lasts; fewer where more did not help."""
        best = self._follow(shape, first, _GROWTH, "more passes")
        return best if best is not first else self._follow(shape, first, 1 / _GROWTH, "fewer passes")

    def _follow(self, shape: Shape, best: Candidate, factor: float, why: str) -> Candidate:
        while True:
            if not self._fits(best.passes * factor):
                if factor > 1:
                    self._note_hours(shape, best.passes * factor)
                break
            candidate = self._try(shape, best.passes * factor, why)
            gain = self.sign * (candidate.value - best.value)
            best = self._better(best, candidate)
            if gain < _LEAST_GAIN * abs(best.value):
                break
        return best

    def _note_hours(self, shape: Shape, passes: float) -> None:
        """Say that the time, and not the metric, ended the search, and what would have sufficed."""
        more = self._starts * self.overhead_seconds + passes * self.seconds_per_pass * self._pass_cost
        enough = 1.1 * (self.hours * 3600 - self.seconds_left + more) / 3600
        self.note(f"{shape.name}, {passes:.3g} passes: not tried, --hours {enough:.2g} would pay them")

    def _try(self, shape: Shape, passes: float, why: str) -> Candidate:
        recipe = self._recipe(shape, passes)
        candidate = Candidate(shape=shape.name, passes=passes, steps=recipe.train.steps, value=0.0, seconds=0.0)
        began = time.monotonic()
        record = self._train(recipe, self._folder(candidate), name=f"{shape.name}, {passes:.3g} passes")
        seconds = time.monotonic() - began
        rate = record.throughput.get("events_per_second")
        if rate and shape == SHAPES[self.device][0]:  # the probe's shape, over more steps; others are not dearer
            self.seconds_per_pass = self.dataset.counts("train").events / rate
        candidate = candidate.model_copy(update={"value": self._value(record), "seconds": seconds})
        self.note(
            f"{shape.name}, {passes:.3g} passes ({why}): {self.options.metric} {candidate.value:.4f} on validation, "
            f"{format_seconds(seconds)}"
        )
        self.candidates.append(candidate)
        return candidate

    def _recipe(self, shape: Shape, passes: float) -> Recipe:
        """A recipe whose run measures what candidates are chosen by."""
        recipe = stage1_recipe(shape, self.dataset, passes, self.device, seed=self.options.seed)
        horizon = horizon_of(self.options.metric)
        if horizon is None:
            return recipe
        return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"horizons": (horizon,)})})

    def _better(self, first: Candidate, second: Candidate) -> Candidate:
        return second if self.sign * (second.value - first.value) > 0 else first

    def _folder(self, candidate: Candidate) -> Path:
        return self.out / "candidates" / candidate.name

    def _value(self, record: Record) -> float:
        metric = record.metrics.get(self.options.metric)
        if metric is None:
            raise ConfigError(
                f"{self.options.metric!r} is not measured", expected="one as catalogue/ndcg@10 or horizon7d/ndcg@10"
            )
        return metric.value

    def _train(self, recipe: Recipe, folder: Path, *, name: str, parent: Path | None = None) -> Record:
        from habitus.training import train

        show = None if self.progress is None else lambda now: self.progress(name, now)  # type: ignore[misc]
        record = train(recipe, self.dataset, folder, parent=parent, options=self._train_options(), progress=show)
        if record.status == "failed":
            raise RunError(f"{folder}: {record.reason}", next_step="see the journal in the folder")
        return record

    def _train_options(self) -> "TrainOptions":
        from habitus.training import TrainOptions

        return TrainOptions(device=self.options.device, threads=self.options.threads, resume=True, compile=False)
