"""What a user may set for a study."""

import math
from dataclasses import dataclass
from pathlib import Path

from habitus.errors import ConfigError
from habitus.store import AXES, CUTOFFS, METRICS, REGIMES, direction_of
from habitus.typed import suggest_name


@dataclass(frozen=True)
class StudyOptions:
    """Everything but the folder. What decides the runs is kept in study.json and must stay the same on the way."""

    data: Path | None = None  # a prepared dataset; else the preset's own synthetic world
    items: int | None = None  # of the synthetic world; else the preset's
    users: int | None = None  # of the synthetic world; else the preset's
    preset: str = "quick"
    axes: tuple[str, ...] = ()  # empty: all but init, which preset `paper` has too
    flops: float | None = None  # envelope: nominal FLOPs of all runs together
    gpu_hours: float | None = None  # envelope: hours on this machine
    metric: str = "catalogue/recall@10"
    plan_flops: float | None = None  # budget of the recipe; else ten times the largest budget of the study
    copying: bool | None = None  # None: on a log of one's own whose users often come back to items
    allow_repeats: bool = False  # runs of more than one epoch, which laws leave out otherwise
    workers: int | None = None
    backend: str = "local"
    device: str = "auto"
    gpu: str | None = None  # named hardware for the plan's hours and memory
    seed: int = 0  # of the synthetic world
    max_minutes: float | None = None  # stop after so long, to be continued
    dry_run: bool = False

    def check(self) -> None:
        """Refuse options that contradict each other or are out of range."""
        if self.flops is not None and self.gpu_hours is not None:
            raise ConfigError("both --flops and --gpu-hours were given", expected="one envelope")
        for name, value in (
            ("--flops", self.flops),
            ("--gpu-hours", self.gpu_hours),
            ("--plan-flops", self.plan_flops),
            ("--max-minutes", self.max_minutes),
        ):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} {value:g}", expected="a positive number")
        for name, count, least in (("--items", self.items, 2), ("--users", self.users, 1)):
            if count is None:
                continue
            if self.data is not None:
                raise ConfigError(
                    f"both --data and {name} were given",
                    expected=f"{name} for a synthetic world only",
                    next_step=f"omit --data or {name}",
                )
            if count < least:
                raise ConfigError(f"{name} {count}", expected=f"{least} or more")
        for axis in self.axes:
            if axis not in AXES:
                raise ConfigError(
                    f"axis {axis!r} is unknown ({suggest_name(axis, list(AXES))})",
                    expected=f"some of {', '.join(AXES)}",
                )
        check_metric(self.metric)

    def chosen_axes(self) -> tuple[str, ...]:
        """The axes in the order in which they run."""
        # Initialisations matter for learning rates across sizes, not for a recipe: only the full programme has them.
        default = [axis for axis in AXES if axis != "init" or self.preset == "paper"]
        return tuple(axis for axis in AXES if axis in (self.axes or default))


def check_metric(metric: str) -> None:
    """Refuse a metric that no run of a study records, before anything is spent."""
    regime, _, bare = metric.partition("/")
    kinds = [kind for kind in METRICS.values() if kind.group is not None]
    if regime not in REGIMES or bare.partition("/")[0] not in [name for kind in kinds for name in kind.names()]:
        plain, ranked = (", ".join(k.name for k in kinds if k.at_cutoff is at) for at in (False, True))
        raise ConfigError(
            f"--metric {metric!r} is not recorded",
            expected=f"{'/ or '.join(REGIMES)}/ and {plain}, or {ranked} at @{', '.join(map(str, CUTOFFS))}, "
            "as in catalogue/recall@10",
        )
    direction_of(metric)
