"""The verb: event log in; laws, a recipe and a page out."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from habitus.data.dataset import Dataset
from habitus.errors import ConfigError, Interrupted
from habitus.fit import LawsFile, direction_of, fit
from habitus.fit.laws import HEADLINE
from habitus.plan import Plan, PlanOptions, Registered, register
from habitus.plan import plan as make_plan
from habitus.study.envelope import Fitting, adapted, fitting
from habitus.study.options import StudyOptions, stopped
from habitus.study.probing import PROBES, Probed, probe
from habitus.study.progress import Story, StudyProgress
from habitus.study.state import NAME, AxisCost, State, read_state, request_of
from habitus.sweep.cells import Design, Facts
from habitus.sweep.estimate import Speeds, seconds_of, wall_seconds
from habitus.sweep.preset import Preset, load_preset
from habitus.sweep.preset_world import preset_dataset
from habitus.sweep.running import sweep

STORE, DATASET, RECIPE, PLAN, REPORT = "store", "dataset", "recipe", "plan.json", "report.html"
_PROBE_SHARE = 0.95  # of an envelope; the rest is for probes and for shapes added at an edge
_FINISH_SECONDS = 10.0  # laws, plan and page


@dataclass(frozen=True)
class StudyResult:
    """What a study leaves behind."""

    out: Path
    state: State | None  # absent where only the size of a dry run is known
    laws: Path | None = None
    plan: Path | None = None
    recipes: tuple[Path, ...] = ()
    report: Path | None = None
    data: Path | None = None
    seconds: float = 0.0  # of this call
    identified: dict[str, str] = field(default_factory=dict)  # law -> status
    dry_run: bool = False

    @property
    def next_command(self) -> str:
        """What to type next; works as it stands."""
        from shlex import quote

        names = " ".join(quote(str(path)) for path in self.recipes)
        return f"habitus train {names} --data {quote(str(self.data))} --out {quote(str(self.out / 'run'))}"


def study(
    out: str | Path,
    options: StudyOptions | None = None,
    *,
    progress: Callable[[StudyProgress], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> StudyResult:
    """Probe, state a plan, sweep, fit, plan and report into a folder; the same call goes on where it stopped."""
    options = options or StudyOptions()
    options.check()
    check_metric(options.metric)
    out, began = Path(out), time.monotonic()
    preset = load_preset(options.preset)

    def hours_left() -> float | None:
        if options.max_minutes is None:
            return None
        return max(1e-9, options.max_minutes / 60 - (time.monotonic() - began) / 3600)

    story = Story(out / STORE, options.metric, progress, note)
    with _stoppable():
        dataset = _dataset(out, options, preset, story)
        state = read_state(out, options, dataset.checksum)
        if state is None:
            state = _decide(out, options, preset, dataset, story, hours_left)
        if options.dry_run:
            return StudyResult(out, state, data=dataset.path, seconds=time.monotonic() - began, dry_run=True)
        _sweep_all(out, options, state, dataset, story, hours_left)
        laws = _fit(out, options, state, dataset)
        made = _plan(out, options, laws, dataset)
        page = _report(out)
    return StudyResult(
        out=out,
        state=state,
        laws=out / STORE / "laws.json",
        plan=out / PLAN,
        recipes=tuple(made.write_recipes(out / RECIPE)),
        report=page,
        data=dataset.path,
        seconds=time.monotonic() - began,
        identified=_identified(laws, options.metric),
    )


def check_metric(metric: str) -> None:
    """Refuse a metric that no run of a study records, before anything is spent."""
    regime, _, bare = metric.partition("/")
    recorded = ["loss", "perplexity", "entropy"]
    recorded += [f"{name}@{k}" for name in ("recall", "ndcg", "mrr", "coverage") for k in (1, 5, 10, 20, 50, 100)]
    if regime not in ("batch", "catalogue") or bare.partition("/")[0] not in recorded:
        raise ConfigError(
            f"--metric {metric!r} is not recorded",
            expected="batch/ or catalogue/ and loss, perplexity, entropy, or recall, ndcg, mrr, coverage at "
            "@1, 5, 10, 20, 50, 100, as in catalogue/recall@10",
        )
    direction_of(metric)


def _dataset(out: Path, options: StudyOptions, preset: Preset, story: Story) -> Dataset:
    if options.data is not None:
        return Dataset.open(options.data)
    path = out / DATASET
    if not path.exists():
        world = preset.world
        story.note(f"making a synthetic world of {world.num_items:,} items and {world.num_users:,} users in {path}")
    out.mkdir(parents=True, exist_ok=True)
    return preset_dataset(preset, path, seed=options.seed, threads=options.workers or 2)


def _decide(
    out: Path,
    options: StudyOptions,
    preset: Preset,
    dataset: Dataset,
    story: Story,
    hours_left: Callable[[], float | None],
) -> State:
    """Adapt and scale the preset, probe, state the cost, and write it all down."""
    facts, axes = Facts.of(dataset), options.chosen_axes()
    preset, notes = adapted(preset, dataset)
    limit = None if options.flops is None else _PROBE_SHARE * options.flops
    chosen = _fitting(preset, facts, axes, options, limit, _flops, "FLOPs")
    if options.dry_run and not (out / PROBES).exists():
        probed = _unprobed(options, facts, preset)
        notes.append("a dry run does not probe: times are assumed, and the learning rate is the preset's")
    else:
        story.note("probing learning rates and speed")
        listen = story.sweeping(0, 1 + len(axes))
        probed = probe(chosen.preset, dataset, out, options, listen, story.note, hours_left)
        notes.append(probed.told)
    if options.gpu_hours is not None:
        limit = _PROBE_SHARE * options.gpu_hours * 3600 - probed.seconds - _FINISH_SECONDS

        def seconds(made: Sequence[Design]) -> float:
            return sum(_seconds(one, probed) for one in made)

        if limit <= 0:
            raise ConfigError(
                f"--gpu-hours {options.gpu_hours:g} were spent on the probes ({probed.seconds:.0f} s)",
                expected="more time, or a smaller preset",
            )
        chosen = _fitting(preset, facts, axes, options, limit, seconds, "seconds")
    if chosen.factor != 1:
        budgets = ", ".join(f"{b:.3g}" for b in chosen.preset.budgets)
        notes.append(f"budgets {chosen.factor:.3g} times those of preset {preset.name}: {budgets} FLOPs")
    if chosen.preset.negatives.num_negatives != preset.negatives.num_negatives:
        notes.append("K = " + ", ".join(f"{k:,}" for k in chosen.preset.negatives.num_negatives))
    common = chosen.preset.common.model_copy(update={"learning_rate": probed.learning_rate})
    state = State(
        dataset_checksum=dataset.checksum,
        request=request_of(options),
        preset=chosen.preset.model_copy(update={"common": common}),
        axes=axes,
        costs=tuple(
            AxisCost(
                axis=one.axis,
                budgets=tuple(sorted({planned.row.flops_budget for planned in one.cells})),
                runs=len(one.distinct()),
                flops=one.flops,
                seconds=_seconds(one, probed),
            )
            for one in chosen.designs
        ),
        probe_seconds=probed.seconds,
        workers=probed.workers,
        notes=tuple(notes),
    )
    if not options.dry_run:
        out.mkdir(parents=True, exist_ok=True)
        state.write(out / NAME)
    story.stated(state)
    return state


def _fitting(
    preset: Preset,
    facts: Facts,
    axes: Sequence[str],
    options: StudyOptions,
    limit: float | None,
    cost: Callable[[Sequence[Design]], float],
    unit: str,
) -> Fitting:
    return fitting(preset, facts, axes, allow_repeats=options.allow_repeats, limit=limit, cost=cost, unit=unit)


def _flops(made: Sequence[Design]) -> float:
    return sum(one.flops for one in made)


def _seconds(one: Design, probed: Probed) -> float:
    """The wall time of one axis on the workers there are."""
    each = list(seconds_of(probed.speeds, one.distinct()).values())
    return wall_seconds(each, probed.workers) + probed.overhead


def _unprobed(options: StudyOptions, facts: Facts, preset: Preset) -> Probed:
    from habitus.sweep.estimate import device_kind, speeds_of, usual_workers

    kind = device_kind(options.device)
    speeds: Speeds = speeds_of(None, kind, facts.inputs)
    return Probed(preset.common.learning_rate, "", speeds, 2.0, 0.0, options.workers or usual_workers(kind))


def _sweep_all(
    out: Path,
    options: StudyOptions,
    state: State,
    dataset: Dataset,
    story: Story,
    hours_left: Callable[[], float | None],
) -> None:
    story.begin(state)
    for number, (axis, cost) in enumerate(zip(state.axes, state.costs, strict=True)):
        if not cost.budgets:
            story.note(f"{axis}: no cell can be run at these budgets; the axis is left out")
            continue
        result = sweep(
            axis,
            dataset,
            out / STORE,
            budgets=cost.budgets,
            preset=state.preset,
            workers=options.workers,
            backend=options.backend,  # type: ignore[arg-type]
            device=options.device,
            max_hours=hours_left(),
            allow_repeats=options.allow_repeats,
            progress=story.sweeping(1 + number, 1 + len(state.axes)),
            note=story.note,
        )
        if not result.complete:
            raise stopped(out, f"{axis} axis", result.stopped)
        story.finished(result)


def _fit(out: Path, options: StudyOptions, state: State, dataset: Dataset) -> LawsFile:
    """The laws of the store, with the dataset they belong to."""
    store = out / STORE
    first = fit(store, allow_repeats=options.allow_repeats)
    wanted = [name for name in HEADLINE if name in first.metrics]
    if options.metric not in wanted:
        if not any(options.metric in run.metrics for run in first.runs):
            raise ConfigError(
                f"--metric {options.metric} stands in no Record of {store}", expected=f"one of {', '.join(wanted)}"
            )
        first = fit(store, [*wanted, options.metric], allow_repeats=options.allow_repeats)
    laws = first.model_copy(update={"extra": {**first.extra, "dataset_checksum": dataset.checksum}})
    laws.write(store / "laws.json")
    return laws


def _plan(out: Path, options: StudyOptions, laws: LawsFile, dataset: Dataset) -> Plan:
    """The recipe for the next larger budget, registered before anyone runs it."""
    top = max(run.budget for run in laws.runs)
    made = make_plan(
        options.plan_flops or float(f"{10 * top:.3g}"),
        options.metric,
        PlanOptions(laws=out / STORE / "laws.json", dataset=dataset, gpu=options.gpu),
    )
    path = out / PLAN
    if path.exists() and not _same_promise(Registered.read(path), made):
        path.replace(path.with_name("plan-before.json"))
    if not path.exists():
        register(made, path)
    return made


def _same_promise(registered: Plan, made: Plan) -> bool:
    """Whether two plans ask and promise the same; the hours may differ, since machines do."""
    return (registered.stage1, registered.stage2, registered.predictions) == (
        made.stage1,
        made.stage2,
        made.predictions,
    )


def _report(out: Path) -> Path:
    from habitus.report import report

    return report(out / STORE, out / REPORT, plan=out / PLAN)


def _identified(laws: LawsFile, metric: str) -> dict[str, str]:
    """The laws that the recipe rests on, and whether each is identified."""
    found: dict[str, str] = {}
    for name in ("share_law", "share_optimum", "depth_optimum", "critical_batch", "size_law", "size_optimum",
                 "loss_law", "negatives_law", "negatives_optimum"):  # fmt: skip
        for entry in laws.entries:
            if entry.name == name and entry.metric in (metric, "batch/loss", "catalogue/loss"):
                at = "" if entry.budget is None else f" at {entry.budget:.3g}"
                found[f"{name} of {entry.metric}{at}"] = entry.law.status
    return found


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that workers are asked to save before this process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted("asked to stop", next_step="give the same command again: it goes on where it stopped")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
