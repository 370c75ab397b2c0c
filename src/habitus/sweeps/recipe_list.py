"""Recipes that someone else chose, run in a store like the cells of an axis."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from habitus.data import Dataset
from habitus.files import write_once
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.sizing import SpeedModel, cell_of_recipe
from habitus.store import SweepManifest, manifest_path
from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun, plan_run
from habitus.sweeps.estimate import device_bytes, device_kind, parts_of, speed_of_store, usual_workers
from habitus.sweeps.manifest import load_manifests
from habitus.sweeps.mps import mps_environment
from habitus.sweeps.outcome import SweepMonitor, SweepProgress
from habitus.sweeps.preset import EvaluationSettings
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, Worker, WorkerOptions


@dataclass
class RecipeRunner:
    """Runs lists of recipes in one store, on the workers of one machine."""

    dataset: Dataset
    path: Path
    evaluation: EvaluationSettings
    device: str = "auto"
    workers: int | None = None
    threads: int | None = None
    compile: bool | None = False  # as in TrainOptions
    progress: Callable[[SweepProgress], None] | None = None
    note: Note | None = None

    def __post_init__(self) -> None:
        self.kind = device_kind(self.device)
        cores = usual_workers("cpu")
        usual = max(1, cores // (self.threads or 1)) if self.kind == "cpu" else usual_workers(self.kind)
        self.num_workers = self.workers or usual
        threads = self.threads or (1 if self.kind == "cpu" else max(1, cores // self.num_workers))
        self.options = WorkerOptions(
            device=self.device if self.device != "auto" else self.kind, threads=threads, compile=self.compile
        )
        self.facts = DatasetFacts.of(self.dataset)
        self.store = Store.create(self.path, self.dataset, self.evaluation)

    def run(self, label: str, recipes: Sequence[Recipe], seconds_left: float | None = None) -> list[Record | None]:
        """The Records of the recipes, which are run where the store has none; None where the time was up before."""
        design = self.design(label, recipes)
        for planned in design.cells:
            self.store.add(planned.hash, planned.recipe)
        self._run_jobs(design, seconds_left)
        return [self.store.record(planned.hash) for planned in design.cells]

    def write_manifest(self, axis: str, recipes: Sequence[Recipe], preset: str, request: dict[str, Any]) -> None:
        """Make the recipes cells of an axis, under its next free number; once for each request."""
        files = load_manifests(self.path, axis)
        if any(file.manifest.request == request for file in files):
            return
        design = self.design(axis, recipes)
        manifest = SweepManifest(
            axis=axis,
            preset=preset,
            cells=tuple(planned.row for planned in design.cells),
            recipes={planned.row.cell_id: planned.recipe for planned in design.cells},
            request=request,
        )
        number = 1 + len(files)
        while not write_once(manifest_path(self.path, axis, number), manifest.to_json().encode()):
            number += 1

    def design(self, axis: str, recipes: Sequence[Recipe]) -> Design:
        return Design(axis, tuple(self._plan(axis, recipe) for recipe in recipes))

    def speed(self) -> SpeedModel:
        """How fast the store's runs were, under the load that they had."""
        return speed_of_store(self.store, self.kind, self.facts.inputs)

    def _plan(self, label: str, recipe: Recipe) -> PlannedRun:
        cell = cell_of_recipe(recipe, self.facts.inputs, catalogue_items=self.facts.num_items)
        return plan_run(recipe, cell, self.facts, budget=cell.flops, label=label)

    def _run_jobs(self, design: Design, seconds_left: float | None) -> None:
        runs = [planned for planned in design.distinct_runs() if not self.store.settled(planned.hash)]
        stated = parts_of(self.speed(), runs)
        seconds = {digest: sum(parts) for digest, parts in stated.items()}
        runs.sort(key=lambda planned: -seconds[planned.hash])  # the longest first, so that none is left to one worker
        jobs = [Job.of(planned, seconds[planned.hash]) for planned in runs]
        if not jobs or (seconds_left is not None and seconds_left <= 0):
            return
        note = self.note or (lambda _text: None)
        options = replace(self.options, seconds_left=seconds_left)
        monitor = SweepMonitor(
            design.axis, self.store, design, stated, self.num_workers, self.progress or (lambda _progress: None)
        )
        workers = min(self.num_workers, len(jobs))
        if workers == 1 and self.kind == "cpu":
            Worker(self.store, self.dataset, options, progress=lambda _digest, _now: monitor(), note=note).work(jobs)
            return
        from habitus.sweeps.pool import Pool

        Pool(
            self.store,
            self.dataset,
            jobs,
            options,
            workers,
            device_bytes=device_bytes(self.kind),
            environment=mps_environment(note) if self.kind == "cuda" else {},
            note=note,
        ).run(monitor)
