"""Before the first sweep: the preset adapted and scaled, the probes, the cost, all written down."""

import atexit
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.sizing import Parts, wall_seconds
from habitus.studies.envelope import ScaledPreset, adapt_preset, choose_copying, fill_gpu, fit_envelope
from habitus.studies.options import StudyOptions
from habitus.studies.probes import PROBES, ProbeResults, parts_of, probe, stated_speeds
from habitus.studies.progress import StudyMonitor
from habitus.studies.state import AxisCost, StudyState, request_values
from habitus.sweeps import (
    DatasetFacts,
    Design,
    Preset,
    device_kind,
    likely_to_go_on,
    preset_dataset,
    speed_of_store,
    usual_workers,
)

LARGE_WORLD = 1e7  # events: a dry run takes the fields of a small world instead of making such a one
_STAND_IN_ITEMS, _STAND_IN_USERS = 500, 1_000
_SWEEPS_SHARE = 0.95  # of an envelope; the rest is for probes and for shapes added at an edge
_USED = 0.5  # of an envelope: where less is, the study says why
_FINISH_SECONDS = 10.0  # laws, plan and page


def design_study(
    out: Path,
    options: StudyOptions,
    preset: Preset,
    dataset: Dataset,
    monitor: StudyMonitor,
    hours_left: Callable[[], float | None],
    share: float = 1.0,
) -> StudyState:
    """Adapt and scale the preset to a share of the envelope, probe, and state the cost."""
    facts, axes = _facts_of(dataset, options, preset), options.chosen_axes()
    envelope = share * _SWEEPS_SHARE
    if options.data is not None and device_kind(options.device) == "cuda":
        preset = fill_gpu(preset)
    preset, notes = (preset, []) if facts.num_items != dataset.num_items else adapt_preset(preset, dataset)
    preset, copying_notes = choose_copying(preset, dataset, options)
    notes += copying_notes

    scale = partial(fit_envelope, preset, facts, axes, allow_repeats=options.allow_repeats)
    limit = None if options.flops is None else envelope * options.flops
    scaled = scale(limit=limit, cost=_total_flops, unit="FLOPs", envelope_for=lambda cost: cost / envelope)
    probed_budget = min(scaled.preset.budgets)
    if options.dry_run and not (out / PROBES).exists():
        probes = _assume_speeds(options, facts, scaled.preset)
        notes.append("a dry run does not probe: times are assumed, and the learning rate is the preset's")
    else:
        monitor.note("probing learning rates and speed")
        progress = monitor.sweep_progress(0, 1 + len(axes))
        probes = probe(scaled.preset, dataset, out, options, progress, monitor.note, hours_left)
        notes.append(probes.summary)
    if options.gpu_hours is not None:
        seconds = _seconds_for_sweeps(envelope * options.gpu_hours, probes)
        limit = seconds
        scaled = scale(
            limit=limit,
            cost=lambda designs: sum(_wall_seconds(design, probes) for design in designs),
            unit="hours",
            envelope_for=lambda cost: (cost + probes.seconds + _FINISH_SECONDS) / envelope / 3600,
        )
    notes += _scale_notes(preset, scaled)
    if limit is not None and scaled.cost < _USED * limit:
        notes.append(f"one pass over the log pays no larger budgets: {scaled.cost / limit:.0%} of the envelope is used")
    return StudyState(
        dataset_checksum=dataset.checksum,
        request=request_values(options),
        preset=_with_probed_rate(scaled.preset, probes, probed_budget),
        axes=axes,
        costs=tuple(_axis_cost(design, probes) for design in scaled.designs),
        probe_seconds=probes.seconds,
        workers=probes.workers,
        speeds=stated_speeds(probes),
        notes=tuple(notes),
    )


def open_stand_in(preset: Preset) -> Dataset:
    """A small world with the fields of the preset's, for a dry run; its folder goes with the process."""
    size = {"num_items": _STAND_IN_ITEMS, "num_users": _STAND_IN_USERS}
    small = preset.model_copy(update={"world": preset.world.model_copy(update=size)})
    scratch = tempfile.TemporaryDirectory()
    atexit.register(scratch.cleanup)
    return preset_dataset(small, Path(scratch.name) / "dataset")


def _facts_of(dataset: Dataset, options: StudyOptions, preset: Preset) -> DatasetFacts:
    """The facts of a dataset; of a stand-in, those of the world that it stands for."""
    facts = DatasetFacts.of(dataset)
    users = options.users or preset.world.num_users
    if options.data is not None or not options.dry_run or users * preset.world.events_per_user <= LARGE_WORLD:
        return facts
    if dataset.num_items != _STAND_IN_ITEMS:
        return facts
    windows = round(facts.train_windows * users / _STAND_IN_USERS)
    return replace(facts, num_items=options.items or preset.world.num_items, train_windows=windows)


def _seconds_for_sweeps(hours: float, probes: ProbeResults) -> float:
    """What so many hours leave for the sweeps after the probes."""
    seconds = hours * 3600 - probes.seconds - _FINISH_SECONDS
    if seconds <= 0:
        raise ConfigError(
            f"{hours:.3g} hours of the envelope were spent on the probes ({probes.seconds:.0f} s)",
            expected="more time, or a smaller preset",
        )
    return seconds


def _scale_notes(preset: Preset, scaled: ScaledPreset) -> list[str]:
    notes = []
    if scaled.factor != 1:
        budgets = ", ".join(f"{b:.3g}" for b in scaled.preset.budgets)
        notes.append(f"budgets {scaled.factor:.3g} times those of preset {preset.name}: {budgets} FLOPs")
    if scaled.preset.negatives.num_negatives != preset.negatives.num_negatives:
        notes.append("K = " + ", ".join(f"{k:,}" for k in scaled.preset.negatives.num_negatives))
    return notes


def _with_probed_rate(preset: Preset, probes: ProbeResults, probed_budget: float) -> Preset:
    """The preset with the rate of the probes, which was found at the smallest budget before the last scaling."""
    exponent = probes.learning_rate_exponent
    rate = probes.learning_rate * (min(preset.budgets) / probed_budget) ** exponent
    common = preset.common.model_copy(update={"learning_rate": rate, "learning_rate_exponent": exponent})
    return preset.model_copy(update={"common": common})


def _axis_cost(design: Design, probes: ProbeResults) -> AxisCost:
    seconds, parts = _wall_seconds(design, probes), _parts(design, probes)
    run_seconds = sum(map(sum, parts))
    share = (seconds - probes.overhead) / run_seconds if run_seconds else 0.0
    fixed, steps, work = (share * sum(part) for part in zip(*parts, strict=True)) if parts else (0.0, 0.0, 0.0)
    return AxisCost(
        axis=design.axis,
        budgets=tuple(sorted({planned.row.flops_budget for planned in design.cells})),
        runs=len(design.distinct_runs()),
        flops=design.flops,
        seconds=seconds,
        parts=(fixed + probes.overhead, steps, work),
    )


def _total_flops(designs: Sequence[Design]) -> float:
    return sum(design.flops for design in designs)


def _wall_seconds(design: Design, probes: ProbeResults) -> float:
    """The wall time of one axis on the workers there are."""
    return wall_seconds([sum(parts) for parts in _parts(design, probes)], probes.workers) + probes.overhead


def _parts(design: Design, probes: ProbeResults) -> list[Parts]:
    """What each run takes, those that a sweep of batches will most likely add included."""
    speeds = stated_speeds(probes)
    parts = [parts_of(planned, speeds) for planned in design.distinct_runs()]
    if design.axis == "batch":
        for fixed, steps, work in (parts_of(planned, speeds) for planned in likely_to_go_on(design.cells)):
            parts.append((fixed, 2 * steps, 2 * work))
    return parts


def _assume_speeds(options: StudyOptions, facts: DatasetFacts, preset: Preset) -> ProbeResults:
    """What stands in for the probes in a dry run."""
    kind = device_kind(options.device)
    speeds = speed_of_store(None, kind, facts.inputs)
    return ProbeResults(
        learning_rate=preset.common.learning_rate,
        learning_rate_exponent=preset.common.learning_rate_exponent,
        summary="",
        speeds=speeds,
        evaluate={"batch": speeds.evaluate, "catalogue": speeds.evaluate},
        overhead=2.0,
        seconds=0.0,
        workers=options.workers or usual_workers(kind),
    )
