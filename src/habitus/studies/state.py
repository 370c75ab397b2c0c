"""study.json: what was decided once, so that the same command goes on where it stopped."""

from pathlib import Path
from typing import Any

from pydantic import Field

from habitus.errors import ConfigError
from habitus.studies.options import StudyOptions
from habitus.sweeps import Preset
from habitus.typed import Typed

STATE_FILE = "study.json"
STATE_VERSION = 1


class AxisCost(Typed):
    """One axis as it was stated before it ran."""

    axis: str
    budgets: tuple[float, ...] = Field(description="Those at which there is anything to run.")
    runs: int
    flops: float
    seconds: float


class StudyState(Typed):
    """The decisions of a study. Written after the probes, before the first sweep."""

    version: int = STATE_VERSION
    dataset_checksum: str
    request: dict[str, Any] = Field(description="What was asked for, as far as it decides the runs.")
    preset: Preset = Field(description="With the budgets and the learning rate that were chosen.")
    axes: tuple[str, ...]
    costs: tuple[AxisCost, ...]
    probe_seconds: float
    workers: int
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs)

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)


def request_of(options: StudyOptions) -> dict[str, Any]:
    """What must be the same when a study is continued."""
    return {
        "preset": options.preset,
        "axes": list(options.chosen_axes()),
        **({} if options.flops is None else {"flops": options.flops}),
        **({} if options.gpu_hours is None else {"gpu_hours": options.gpu_hours}),
        **({} if options.copying is None else {"copying": options.copying}),
        "allow_repeats": options.allow_repeats,
        "seed": options.seed,
        "embedded_world": options.data is None,
    }


def read_state(out: Path, options: StudyOptions, checksum: str) -> StudyState | None:
    """The decisions of an earlier call in this folder; refused where something else was asked for then."""
    path = out / STATE_FILE
    if not path.exists():
        return None
    state = StudyState.read(path)
    now = request_of(options)
    changed = [key for key in sorted({*now, *state.request}) if now.get(key) != state.request.get(key)]
    if changed:
        told = "; ".join(f"{key} was {state.request.get(key)!r} and is {now.get(key)!r}" for key in changed)
        raise ConfigError(
            f"{out} holds another study: {told}",
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
