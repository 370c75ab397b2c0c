"""study.json: what was decided once, so that the same command continues where it stopped."""

from operator import not_
from pathlib import Path
from typing import Any

from pydantic import Field

from habitus.errors import ConfigError
from habitus.planning import LogRegime
from habitus.recipe import Recipe
from habitus.sizing import Parts, SpeedModel, count_evaluations, ranks_catalogue
from habitus.studies.options import StudyOptions
from habitus.sweeps import Preset
from habitus.typed import Typed

STATE_FILE, TOOK_FILE = "study.json", "took.json"
STATE_VERSION = 1


class AxisCost(Typed):
    """One axis as it was stated before it ran."""

    axis: str
    budgets: tuple[float, ...] = Field(description="Those at which there is anything to run.")
    runs: int
    flops: float
    seconds: float
    parts: Parts | None = Field(
        None, exclude_if=lambda parts: parts is None, description="Of the seconds: start and evaluations, steps, FLOPs."
    )


class StatedSpeeds(Typed):
    """The speeds by which a study was stated; finished runs correct them part by part."""

    start: float
    per_step: float
    flops_per_second: float
    again: float = Field(description="A further evaluation of a run, as a share of the first.")
    evaluate: dict[str, float] = Field(description="Seconds of one evaluation: batch alone, or with the catalogue.")
    source: str

    def model(self) -> SpeedModel:
        values = self.start, self.per_step, self.flops_per_second, self.evaluate["batch"], self.again, self.source
        return SpeedModel(*values, evaluate_catalogue=self.evaluate["catalogue"])

    def parts(self, recipe: Recipe, steps: int, executed_flops: float) -> Parts:
        """The stated time of a run in its parts, by what it evaluates and how often."""
        return self.model().parts(steps, executed_flops, count_evaluations(recipe), ranks_catalogue(recipe))


class Baseline(Typed):
    """A scorer that a model must beat."""

    scorer: str
    value: float


class StudyState(Typed):
    """The decisions of a study. Written after the probes, before the first sweep."""

    version: int = STATE_VERSION
    dataset_checksum: str
    request: dict[str, Any] = Field(description="The options that decide the runs.")
    preset: Preset = Field(description="With the budgets and the learning rate that were chosen.")
    axes: tuple[str, ...]
    costs: tuple[AxisCost, ...]
    probe_seconds: float
    workers: int
    speeds: StatedSpeeds | None = Field(None, exclude_if=lambda speeds: speeds is None)
    notes: tuple[str, ...] = ()
    regime: LogRegime | None = Field(None, description="Of a log of one's own; absent for a synthetic world.")
    search: bool = Field(
        False, exclude_if=not_, description="Whether recipes of several passes are searched, after the axes if any."
    )
    baseline: Baseline | None = Field(None, description="The best of the baselines on the validation users.")

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs)

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)


class Took(Typed):
    """took.json: the time of all calls together."""

    seconds: float = 0.0
    calls: int = 0


def add_seconds(out: Path, seconds: float, *, calls: int) -> Took:
    """Count the time of one more call, or of none."""
    path = out / TOOK_FILE
    before = Took.read(path) if path.exists() else Took()
    took = Took(seconds=before.seconds + seconds, calls=before.calls + calls)
    if out.is_dir():
        took.write(path)
    return took


def request_values(options: StudyOptions) -> dict[str, Any]:
    """What must be the same when a study is continued."""
    optional = {name: getattr(options, name) for name in ("flops", "gpu_hours", "copying", "items", "users")}
    return {
        "preset": options.preset,
        "axes": list(options.chosen_axes()),
        **{name: value for name, value in optional.items() if value is not None},
        "allow_repeats": options.allow_repeats,
        "seed": options.seed,
        "embedded_world": options.data is None,
    }


def load_state(out: Path, options: StudyOptions, checksum: str) -> StudyState | None:
    """The decisions of an earlier call in this folder; None where there are none, refused where the options differ."""
    path = out / STATE_FILE
    if not path.exists():
        return None
    state = StudyState.read(path)
    now = request_values(options)
    changed = [key for key in sorted({*now, *state.request}) if now.get(key) != state.request.get(key)]
    if changed:
        differences = "; ".join(f"{key} was {state.request.get(key)!r} and is {now.get(key)!r}" for key in changed)
        raise ConfigError(
            f"{out} holds another study: {differences}",
            expected="the options that the study was begun with",
            next_step="give them again, or another --out",
        )
    if state.dataset_checksum != checksum:
        raise ConfigError(
            f"{out} holds a study of another dataset: {state.dataset_checksum[:12]}…, and this is {checksum[:12]}…",
            expected="the dataset that the study was begun with",
            next_step="give that dataset, or another --out",
        )
    return state
