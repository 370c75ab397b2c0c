"""Before the first sweep: the preset adapted and scaled, the probes, the cost, all written down."""

from collections.abc import Callable, Sequence
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.studies.envelope import ScaledPreset, adapted, fitting
from habitus.studies.options import StudyOptions
from habitus.studies.probes import PROBES, ProbeResults, probe, seconds_of
from habitus.studies.progress import StudyMonitor
from habitus.studies.repeat_share import with_copying
from habitus.studies.state import STATE_FILE, AxisCost, StudyState, request_of
from habitus.sweeps import DatasetFacts, Design, Preset, Speeds, wall_seconds

_PROBE_SHARE = 0.95  # of an envelope; the rest is for probes and for shapes added at an edge
_FINISH_SECONDS = 10.0  # laws, plan and page


def decide(
    out: Path,
    options: StudyOptions,
    preset: Preset,
    dataset: Dataset,
    story: StudyMonitor,
    hours_left: Callable[[], float | None],
) -> StudyState:
    """Adapt and scale the preset, probe, state the cost, and write it all down."""
    facts, axes = DatasetFacts.of(dataset), options.chosen_axes()
    preset, notes = adapted(preset, dataset)
    preset, why = with_copying(preset, dataset, options)
    notes += why
    limit = None if options.flops is None else _PROBE_SHARE * options.flops
    chosen = _fitting(preset, facts, axes, options, limit, _flops, "FLOPs")
    probed_from = min(chosen.preset.budgets)
    if options.dry_run and not (out / PROBES).exists():
        probed = _unprobed(options, facts, chosen.preset)
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
    # The rate was probed at the smallest budget of then, and holds at that of now.
    longer, exponent = min(chosen.preset.budgets) / probed_from, probed.learning_rate_exponent
    rates = {"learning_rate": probed.learning_rate * longer**exponent, "learning_rate_exponent": exponent}
    common = chosen.preset.common.model_copy(update=rates)
    state = StudyState(
        dataset_checksum=dataset.checksum,
        request=request_of(options),
        preset=chosen.preset.model_copy(update={"common": common}),
        axes=axes,
        costs=tuple(
            AxisCost(
                axis=one.axis,
                budgets=tuple(sorted({planned.row.flops_budget for planned in one.cells})),
                runs=len(one.distinct_runs()),
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
        state.write(out / STATE_FILE)
    story.stated(state)
    return state


def _fitting(
    preset: Preset,
    facts: DatasetFacts,
    axes: Sequence[str],
    options: StudyOptions,
    limit: float | None,
    cost: Callable[[Sequence[Design]], float],
    unit: str,
) -> ScaledPreset:
    return fitting(preset, facts, axes, allow_repeats=options.allow_repeats, limit=limit, cost=cost, unit=unit)


def _flops(made: Sequence[Design]) -> float:
    return sum(one.flops for one in made)


def _seconds(one: Design, probed: ProbeResults) -> float:
    """The wall time of one axis on the workers there are."""
    each = [seconds_of(planned, probed) for planned in one.distinct_runs()]
    return wall_seconds(each, probed.workers) + probed.overhead


def _unprobed(options: StudyOptions, facts: DatasetFacts, preset: Preset) -> ProbeResults:
    from habitus.sweeps import device_kind, speeds_of, usual_workers

    kind = device_kind(options.device)
    speeds: Speeds = speeds_of(None, kind, facts.inputs)
    evaluate = {"batch": speeds.evaluate, "catalogue": speeds.evaluate}
    workers = options.workers or usual_workers(kind)
    common = preset.common
    return ProbeResults(common.learning_rate, common.learning_rate_exponent, "", speeds, evaluate, 2.0, 0.0, workers)
