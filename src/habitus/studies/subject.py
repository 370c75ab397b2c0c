"""What a user names by a path: a recipe file, a run, or a study; with all that the files around it know."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from habitus.data import Dataset, Encoders
from habitus.errors import ConfigError
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.sizing import TYPICAL_INPUTS, Cell, Inputs, SpeedModel, cell_of_recipe, count_evaluations, fit_speed
from habitus.store import (
    INFO_FILE,
    RECIPE_FILE,
    RECORD_FILE,
    Plan,
    RegisteredPlan,
    SweepManifest,
    manifest_paths,
    read_records,
    read_run_record,
)
from habitus.studies.log_training import BEST, CHOICE_FILE, LogTraining
from habitus.studies.search_state import SEARCH_FILE, SearchState
from habitus.studies.state import STATE_FILE

_ENCODERS = "bundle/encoders.json"
_MOST_RECORDS = 200  # of a store, for its speed


@dataclass(frozen=True)
class Subject:
    """A recipe, the Record of its run where it has one, and how fast such runs are."""

    path: Path  # the file, or the run's folder
    recipe: Recipe
    record: Record | None = None
    dataset: Dataset | None = field(default=None, compare=False)
    device: str = "cuda"  # whose speed is assumed where none was measured: cpu or cuda

    @property
    def store(self) -> Path | None:
        """The store that the run is a cell of, or that the study around the recipe wrote."""
        folder = self.path.parent
        for store in (folder.parent if folder.name == "cells" else None, *(p / "store" for p in self._around())):
            if store is not None and (store / INFO_FILE).exists():
                return store
        return None

    @cached_property
    def inputs(self) -> Inputs:
        """The fields that count: of the dataset named, else of the run's or its store's models, else typical ones."""
        if self.dataset is not None:
            return Inputs.of(self.dataset.fields)
        files = [self.path / _ENCODERS] if (self.path / _ENCODERS).is_file() else []
        if not files and self.store is not None:
            files = [*islice(self.store.glob(f"cells/*/{_ENCODERS}"), 1)]
        return Inputs.of(Encoders.read(files[0]).fields) if files else TYPICAL_INPUTS

    @property
    def has_model(self) -> bool:
        """Whether it can be evaluated."""
        return (self.path / _ENCODERS).is_file()

    @property
    def knows_fields(self) -> bool:
        return self.inputs is not TYPICAL_INPUTS

    @cached_property
    def cell(self) -> Cell:
        return self.size(self.recipe)

    def size(self, recipe: Recipe) -> Cell:
        """What a recipe like this one amounts to."""
        items = None if self.dataset is None else self.dataset.num_items
        return cell_of_recipe(recipe, self.inputs, catalogue_items=items)

    @cached_property
    def speed(self) -> SpeedModel:
        """As measured on the runs of the store, else on this run, else as assumed."""
        records = [] if self.store is None else [*islice(read_records(self.store), _MOST_RECORDS)]
        own = self.record
        device = self.device
        for record in [*([own] if own else []), *records[:1]]:
            device = "cpu" if "cpu" in str(record.hardware.get("device", "cpu")) else "cuda"
        speed = fit_speed(records, device, self.inputs)
        if speed.source.startswith("measured") or own is None or own.seconds is None or own.seconds.train <= 0:
            return speed
        train = own.seconds.train / own.steps
        return SpeedModel(
            own.seconds.warmup, 0.0, self.cell.executed_flops / self.cell.steps / train, own.seconds.evaluate,
            speed.again, "as fast as this run",
        )  # fmt: skip

    def seconds(self, recipe: Recipe) -> float:
        """How long a run of the recipe is expected to take."""
        return self.speed.seconds(self.size(recipe), count_evaluations(recipe))

    def plan(self) -> Plan | None:
        """The plan that the recipe is of."""
        for folder in self._around():
            path = folder / "plan.json"
            if path.is_file():
                values = Plan.read_values(path)
                plan = (RegisteredPlan if "registered_hash" in values else Plan).parse(values, str(path))
                if any(one is not None and _same(one, self.recipe) for one in (plan.stage1, plan.stage2)):
                    return plan
        return None

    def manifest_rows(self) -> Iterator[tuple[str, str, float]]:
        """Axis, cell and budget of the sweeps that the run belongs to."""
        if self.store is None or self.record is None:
            return
        for path in manifest_paths(self.store):
            manifest = SweepManifest.read(path)
            for row in manifest.cells:
                if row.recipe_hash == self.record.recipe_hash:
                    yield manifest.axis, row.cell_id, row.flops_budget

    def search_change(self) -> str | None:
        """What a search changed to arrive at this recipe, in its own words; None where no search did."""
        for folder in self._around():
            if self.record is not None and (folder / CHOICE_FILE).is_file():
                choice = LogTraining.read(folder / CHOICE_FILE)
                return f"candidate '{choice.chosen.name}' of {len(choice.candidates)} that `train --data` tried"
        if self.record is None or self.store is None or not (self.store.parent / SEARCH_FILE).is_file():
            return None
        search = SearchState.read(self.store.parent / SEARCH_FILE)
        for number, one in enumerate(search.rounds, 1):
            for trial in one.trials:
                if trial.recipe_hash == self.record.recipe_hash:
                    return f"round {number} ({one.kind}) of the study's search: {trial.change}"
        return None

    def _around(self) -> Iterator[Path]:
        """The folders in which a plan or the trace of a search may lie: its own, and those that it lies in."""
        yield from (self.path, *self.path.resolve().parents[:2])


def open_subject(path: str | Path, *, dataset: Dataset | None = None, device: str = "cuda") -> Subject:
    """The recipe or run at a path; of a study its recipe, of two stages the last, of `train --data` the best."""
    path = Path(path)
    if path.is_file():
        return Subject(path, Recipe.read(path), dataset=dataset, device=device)
    for inner in ("", BEST, "stage2", "stage1"):
        folder = path / inner
        if (folder / RECORD_FILE).is_file():
            record = read_run_record(folder)
            return Subject(folder, record.recipe, record, dataset, device)
        for recipe in (folder / RECIPE_FILE, folder / "bundle" / RECIPE_FILE):
            if recipe.is_file():
                return Subject(folder, Recipe.read(recipe), None, dataset, device)
    if (path / STATE_FILE).is_file():
        recipe = path / "recipe" / "stage1.toml"
        if not recipe.is_file():
            raise ConfigError(f"{path} is a study without a recipe yet", expected="a study that has ended")
        return open_subject(recipe, dataset=dataset, device=device)
    if (path / INFO_FILE).is_file():
        raise ConfigError(
            f"{path} is a store of runs",
            expected="one recipe or run",
            next_step=f"name one of its cells, as in {path}/cells/HASH; `habitus runs {path}` lists them",
        )
    what = "holds neither a Record nor a recipe" if path.is_dir() else "does not exist"
    raise ConfigError(f"{path} {what}", expected="a recipe in TOML, the folder of a run, or that of a study")


def _same(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes agree in the model and in how it is trained, whoever the parent is."""

    def comparable(recipe: Recipe) -> tuple[object, ...]:
        train = recipe.train.model_dump(exclude={"parent", "seed"})
        return recipe.model, tuple(sorted(train.items(), key=lambda pair: pair[0]))

    return comparable(one) == comparable(other)
