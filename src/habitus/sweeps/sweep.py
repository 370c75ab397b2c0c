"""The verb: run every cell of an axis that the store does not have yet."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.progress import Note
from habitus.sizing import SpeedModel, wall_seconds
from habitus.store import INFO_FILE, LOG_AXIS, LeftOut
from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun
from habitus.sweeps.design import design_axis
from habitus.sweeps.estimate import device_bytes, device_kind, parts_of, speed_of_store, usual_workers
from habitus.sweeps.lease import LEASE_SECONDS
from habitus.sweeps.manifest import ManifestFile, load_manifests, write_manifest
from habitus.sweeps.mps import mps_environment
from habitus.sweeps.outcome import SweepMonitor, SweepProgress, SweepResult, run_outcomes
from habitus.sweeps.preset import Preset, load_preset
from habitus.sweeps.prior_results import PriorResults, allocation_winners, prior_results
from habitus.sweeps.refinement import more_rates, more_sizes, more_steps
from habitus.sweeps.request import LearningRates, SweepRequest, check_axis, rate_grid
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, Tally, Worker, WorkerOptions, deadline


def sweep(
    axis: str,
    dataset: Dataset,
    store: str | Path,
    *,
    budgets: Sequence[float] = (),
    preset: str | Path | Preset = "standard",
    learning_rates: LearningRates = None,
    seeds: int | None = None,
    workers: int | None = None,
    backend: str = "local",  # or ray
    device: str = "auto",
    threads: int | None = None,  # of each run; None: one on a CPU
    max_hours: float | None = None,
    allow_repeats: bool = False,
    dry_run: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    speeds: SpeedModel | None = None,  # of runs like these, until the store has some
    progress: Callable[[SweepProgress], None] | None = None,
    note: Note | None = None,
) -> SweepResult:
    """Run the cells of an axis at some budgets; what the store already has is not run again.

    With `dry_run` nothing is written but what `habitus fit` writes, and the result holds every cell with its cost.
    """
    check_axis(axis)
    _check_options(workers, seeds, max_hours, backend)
    preset = load_preset(preset).for_catalogue(dataset.num_candidates)
    if axis == LOG_AXIS and budgets:
        raise ConfigError(
            f"budgets were given to the {axis} axis",
            expected="none: what its cells cost follows from their sizes and passes",
            next_step="omit --budgets, or change [passes] in a preset of your own (--print-preset)",
        )
    note = note or (lambda _text: None)
    kind = device_kind(device)
    workers = workers or (max(1, usual_workers(kind) // (threads or 1)) if kind == "cpu" else usual_workers(kind))
    # Sums depend on the number of threads on a CPU only; with a GPU the workers divide the cores.
    threads = threads or (1 if kind == "cpu" else max(1, usual_workers("cpu") // workers))
    options = WorkerOptions(device=device if device != "auto" else kind, threads=threads, lease_seconds=lease_seconds)
    running = _Sweep(
        axis=axis,
        dataset=dataset,
        facts=DatasetFacts.of(
            dataset,
            preset.passes.user_parts() if axis == LOG_AXIS else (),
            preset.context.seq_lens if axis == "context" else (),
        ),
        path=Path(store),
        preset=preset,
        request=SweepRequest(tuple(sorted(set(budgets))), learning_rates, seeds, allow_repeats),
        workers=workers,
        backend=backend,
        kind=kind,
        options=options,
        speeds=speeds,
        progress=progress or (lambda _progress: None),
        note=note,
    )
    return running.estimate() if dry_run else running.run(max_hours)


@dataclass
class _Sweep:
    """One sweep under way."""

    axis: str
    dataset: Dataset
    facts: DatasetFacts
    path: Path
    preset: Preset
    request: SweepRequest
    workers: int
    backend: str
    kind: str
    options: WorkerOptions
    speeds: SpeedModel | None
    progress: Callable[[SweepProgress], None]
    note: Note

    def estimate(self) -> SweepResult:
        """The result of a dry run."""
        store = self._existing_store()
        designed, files = self._design(store)
        return replace(self._result(store, designed, files, Tally(), 0.0), dry_run=True)

    def run(self, max_hours: float | None) -> SweepResult:
        began = time.monotonic()
        left = deadline(None if max_hours is None else max_hours * 3600)
        designed, files = self._design(self._existing_store())
        self._refuse_empty_budgets(designed)
        store = Store.create(self.path, self.dataset, self.preset.evaluate)
        written = {budget for file in files for budget in file.manifest.budgets()}
        fresh = _at_budgets(designed, [budget for budget in designed.budgets if budget not in written])
        if fresh.cells or fresh.left_out:
            files.append(write_manifest(store, fresh, self.preset, self.request.to_values(self.preset, self.axis)))
        for planned in designed.distinct_runs():
            store.add(planned.hash, planned.recipe)  # again, where its folder was deleted
        total, stopped = Tally(), ""
        while True:
            total.add(self._run_jobs(store, designed, left()))
            if any(not store.settled(planned.hash) for planned in designed.distinct_runs()):
                remaining = left()
                stopped = "time is up" if remaining is not None and remaining <= 0 else "asked to stop"
                break
            extended = self._extend(store, designed, files)
            if extended is None:
                break
            designed = extended
        result = self._result(store, designed, files, total, time.monotonic() - began)
        return replace(result, stopped=stopped)

    def _existing_store(self) -> Store | None:
        """The store where there is one already, checked to be for this dataset and evaluation."""
        if not (self.path / INFO_FILE).exists():
            return None
        store = Store.open(self.path)
        store.check(self.dataset.checksum, self.preset.evaluate)
        return store

    def _design(self, store: Store | None) -> tuple[Design, list[ManifestFile]]:
        """The cells of the request: those of earlier sweeps with the same request stay as they were designed."""
        files, parts, missing = [], [], self._budgets()
        for file in load_manifests(store.path, self.axis) if store else ():
            budgets = [budget for budget in missing if budget in file.manifest.budgets()]
            if file.manifest.request == self.request.to_values(self.preset, self.axis) and budgets:
                assert store is not None
                parts.append(file.design(store, self.facts, budgets))
                files.append(file)
                missing = [budget for budget in missing if budget not in budgets]
        if missing:
            prior = prior_results(self.axis, store, self.note) if store else PriorResults()
            winners = allocation_winners(prior, store, self.facts) if store and self.axis == "negatives" else {}
            request = replace(self.request, budgets=tuple(missing))
            parts.append(design_axis(self.axis, self.facts, self.preset, prior=prior, request=request, winners=winners))
        design = _join_designs(self.axis, parts)
        return (self._with_deleted_parents(store, design) if store else design), files

    def _with_deleted_parents(self, store: Store, design: Design) -> Design:
        """The design with the stage-1 runs that cells still to be run continue and that the store has lost."""
        designed = {planned.hash for planned in design.distinct_runs()}
        parents = {planned.parent for planned in design.cells if planned.parent and not store.settled(planned.hash)}
        lost = {parent for parent in parents - designed if not store.settled(parent)}
        if not lost:
            return design
        restored = {
            row.recipe_hash: file.load_run(store, row, self.facts)
            for file in load_manifests(store.path)
            for row in (*file.manifest.cells, *file.manifest.parents)
            if row.recipe_hash in lost
        }
        if lost - restored.keys():
            raise RunError(
                f"{store.cell(min(lost - restored.keys()))} is gone, and no manifest says how to train it",
                expected="the stage-1 run that the cells continue",
                next_step="restore the folder, or sweep into a new store",
            )
        return replace(design, parents=(*design.parents, *restored.values()))

    def _budgets(self) -> list[float]:
        if self.axis == LOG_AXIS:
            return design_axis(self.axis, self.facts, self.preset, request=self.request).budgets
        return list(self.request.budgets or self.preset.budgets_of(self.axis))

    def _refuse_empty_budgets(self, designed: Design) -> None:
        if self.axis == LOG_AXIS:
            if not designed.cells:
                raise ConfigError(
                    f"no cell of the {self.axis} axis can be run on {self.dataset.path}: {designed.left_out[0].reason}",
                    expected="a log with more users, or a preset with smaller batches or more passes",
                    next_step="change [passes] in a preset of your own (--print-preset)",
                )
            return
        for budget in self._budgets():
            if not any(planned.row.flops_budget == budget for planned in designed.cells):
                reasons = [out.reason for out in designed.left_out if out.flops_budget == budget]
                raise ConfigError(
                    f"no cell of the {self.axis} axis can be run at {budget:g} FLOPs: "
                    + (reasons[0] if reasons else "the preset names none"),
                    expected=f"a budget near those of preset {self.preset.name}: "
                    + ", ".join(f"{b:g}" for b in self.preset.budgets_of(self.axis)),
                    next_step="see `--dry-run`, or choose another budget, preset or dataset",
                )

    def _run_jobs(self, store: Store, designed: Design, seconds_left: float | None) -> Tally:
        speeds = speed_of_store(store, self.kind, self.facts.inputs, self.speeds)
        stated = parts_of(speeds, designed.distinct_runs())
        cells = [planned for planned in designed.distinct_runs() if not store.settled(planned.hash)]
        stated = {planned.hash: stated[planned.hash] for planned in cells}
        seconds = {digest: sum(parts) for digest, parts in stated.items()}
        parents = {planned.hash for planned in designed.parents}
        together: defaultdict[str, float] = defaultdict(float)  # runs of one trunk wait for each other
        for planned in cells:
            together[planned.trunk] += seconds[planned.hash]
        # Parents first, since others wait for them; then the longest, so that none is left to one worker at the end.
        cells.sort(key=lambda planned: (planned.hash not in parents, -together[planned.trunk], -seconds[planned.hash]))
        jobs = [Job.of(planned, seconds[planned.hash]) for planned in cells]
        if not jobs or (seconds_left is not None and seconds_left <= 0):
            return Tally()
        options = replace(self.options, seconds_left=seconds_left)
        monitor = SweepMonitor(self.axis, store, designed, stated, self.workers, self.progress)
        if self.backend == "ray":
            from habitus.sweeps.ray_tasks import run_on_ray

            return run_on_ray(store, self.dataset, jobs, options, self.workers, watch=monitor, note=self.note)
        workers = min(self.workers, len(jobs))
        if workers == 1:
            worker = Worker(store, self.dataset, options, progress=lambda _digest, _where: monitor(), note=self.note)
            return worker.work(jobs)
        from habitus.sweeps.pool import Pool

        environment = mps_environment(self.note) if self.kind == "cuda" else {}
        pool = Pool(
            store,
            self.dataset,
            jobs,
            options,
            workers,
            device_bytes=device_bytes(self.kind),
            environment=environment,
            note=self.note,
        )
        return pool.run(monitor)

    def _extend(self, store: Store, designed: Design, files: list[ManifestFile]) -> Design | None:
        """The design with runs beyond the edges of its grids, written into its manifests; None where there are none."""
        settings = self.preset.axis(self.axis)
        added: list[PlannedRun] = []
        left_out: list[LeftOut] = []
        if self.axis != "init":  # there the learning rate is what is swept
            grid = len(rate_grid(self.request.learning_rates, settings.learning_rates, 1.0))
            added = more_rates(store, self.facts, designed.cells, grid, settings.extend)
        if not added and self.axis == "allocation":
            added, left_out = more_sizes(store, self.facts, self.preset, self.request, designed.cells)
        if not added and self.axis == "batch":
            added, left_out = more_steps(store, self.facts, self.preset, self.request, designed.cells)
        left_out = [out for out in left_out if out not in designed.left_out]
        hashes = {planned.hash for planned in designed.cells}
        added = [planned for planned in added if planned.hash not in hashes]
        if not added and not left_out:
            return None
        for planned in added:
            store.add(planned.hash, planned.recipe)
        for file in files:
            budgets = file.manifest.budgets()
            cells = [planned for planned in added if planned.row.flops_budget in budgets]
            file.extend(cells, [out for out in left_out if out.flops_budget in budgets])
        names = sorted({f"{p.row.cell_id} at {p.row.flops_budget:.3g} FLOPs" for p in added})
        if names:
            why = "whose best learning rate or size lies at the edge of its grid"
            if self.axis == "batch" and any(planned.recipe.train.warmup_steps is not None for planned in added):
                why = "that have not reached the loss of the middle batch size"
            self.note(
                f"{len(added)} more {'run' if len(added) == 1 else 'runs'} for cells {why}: "
                + ", ".join(names[:4])
                + (" and others" if len(names) > 4 else "")
            )
        return replace(designed, cells=(*designed.cells, *added), left_out=(*designed.left_out, *left_out))

    def _result(
        self, store: Store | None, designed: Design, files: Sequence[ManifestFile], tally: Tally, seconds: float
    ) -> SweepResult:
        speeds = speed_of_store(store, self.kind, self.facts.inputs, self.speeds)
        runs = run_outcomes(store, designed, speeds)
        missing = [run.seconds for run in runs if run.status == "missing"]
        return SweepResult(
            axis=self.axis,
            store=self.path,
            design=designed,
            runs=tuple(runs),
            manifests=tuple(file.path for file in files),
            seconds=seconds,
            estimated_seconds=wall_seconds(missing, self.workers),
            estimate_source=speeds.source,
            workers=self.workers,
            counts=tally.counts(),
        )


def _check_options(workers: int | None, seeds: int | None, max_hours: float | None, backend: str) -> None:
    for name, value in (("workers", workers), ("seeds", seeds)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}", expected="1 or more")
    if max_hours is not None and not max_hours > 0:
        raise ConfigError(f"max_hours = {max_hours:g}", expected="more than 0")
    if backend not in ("local", "ray"):
        raise ConfigError(f"backend {backend!r}", expected="local or ray")


def _at_budgets(designed: Design, budgets: Sequence[float]) -> Design:
    """The part of a design at some budgets."""
    return replace(
        designed,
        cells=tuple(p for p in designed.cells if p.row.flops_budget in budgets),
        left_out=tuple(out for out in designed.left_out if out.flops_budget in budgets),
        parents=tuple(p for p in designed.parents if p.row.flops_budget in budgets),
    )


def _join_designs(axis: str, parts: Sequence[Design]) -> Design:
    return Design(
        axis,
        tuple(planned for part in parts for planned in part.cells),
        tuple(out for part in parts for out in part.left_out),
        tuple(planned for part in parts for planned in part.parents),
        tuple(dict.fromkeys(text for part in parts for text in part.decided)),
    )
