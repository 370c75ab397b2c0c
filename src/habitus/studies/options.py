"""What a user may set for a study."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from habitus.errors import ConfigError
from habitus.store import (
    AXES,
    CUTOFFS,
    HORIZON_METRICS,
    LOG_AXIS,
    METRIC_GROUPS,
    METRICS,
    REGIMES,
    direction_of,
    horizon_of,
)
from habitus.sweeps import load_preset
from habitus.typed import suggest_name
from habitus.units import MAX_THREADS

LOG_METRIC, WORLD_METRIC = "catalogue/ndcg@10", "catalogue/recall@10"
GRID_AXES = tuple(axis for axis in AXES if axis != LOG_AXIS)  # one pass, at the budgets of a preset
_LOG_PRESETS = {"cpu": "quick", "cuda": "standard"}


@dataclass(frozen=True)
class StudyOptions:
    """Everything but the folder. What decides the runs is kept in study.json and must stay the same on the way."""

    data: Path | None = None  # a prepared dataset; else the preset's own synthetic world
    items: int | None = None  # of the synthetic world; else the preset's
    users: int | None = None  # of the synthetic world; else the preset's
    preset: str | None = None  # None: by the device for a log of one's own, `quick` for a world
    axes: tuple[str, ...] = ()  # empty: by the regime; all but init, which preset `paper` has too
    flops: float | None = None  # envelope: nominal FLOPs of all runs together
    gpu_hours: float | None = None  # envelope: hours on this machine
    metric: str | None = None  # None: NDCG@10 on a log, as `train --data`; recall@10 on a world
    plan_flops: float | None = None  # budget of the recipe; else ten times the largest budget of the study
    copying: bool | None = None  # None: on a log of one's own whose users often come back to items
    allow_repeats: bool = False  # runs of more than one epoch, which laws leave out otherwise
    workers: int | None = None
    threads: int | None = None  # CPU threads of each run; one where None
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
            ("--threads", self.threads),
        ):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} {value:g}", expected="a positive number")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"--threads {self.threads:,}", expected=f"at most {MAX_THREADS:,}")
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
            if axis not in GRID_AXES:
                raise ConfigError(
                    f"axis {axis!r} is unknown ({suggest_name(axis, list(GRID_AXES))})",
                    expected=f"some of {', '.join(GRID_AXES)}",
                )
        if self.metric is not None:
            check_metric(self.metric)

    def for_device(self, kind: str) -> "StudyOptions":
        """The options with a preset and a metric where none were given; `kind` is cpu or cuda."""
        log = self.data is not None
        return replace(
            self,
            preset=self.preset or (_LOG_PRESETS[kind] if log else "quick"),
            metric=self.metric or (LOG_METRIC if log else WORLD_METRIC),
        )

    def chosen_axes(self) -> tuple[str, ...]:
        """The axes in the order in which they run."""
        # Initialisations matter for learning rates across sizes, not for a recipe: only the full programme has them.
        default = [a for a in GRID_AXES if not AXES[a].on_request and (a != "init" or self.preset == "paper")]
        if self.preset is not None and load_preset(self.preset).batch_size.budgets:
            default.append("batch_size")
        return tuple(axis for axis in GRID_AXES if axis in (self.axes or default))


def check_metric(metric: str) -> None:
    """Refuse a metric that no run of a study records, before anything is spent."""
    regime, _, bare = metric.partition("/")
    if horizon_of(metric) is not None and bare in [name for kind in HORIZON_METRICS for name in METRICS[kind].names()]:
        return
    kinds = [kind for kind in METRICS.values() if kind.group in METRIC_GROUPS]
    if regime not in REGIMES or bare.partition("/")[0] not in [name for kind in kinds for name in kind.names()]:
        plain, ranked = (", ".join(k.name for k in kinds if k.at_cutoff is at) for at in (False, True))
        raise ConfigError(
            f"--metric {metric!r} is not recorded",
            expected=f"{'/ or '.join(REGIMES)}/ and {plain}, or {ranked} at @{', '.join(map(str, CUTOFFS))}, "
            "as in catalogue/recall@10; or of a split by time horizon7d/ and "
            f"{', '.join(HORIZON_METRICS)}, as in horizon7d/ndcg@10",
        )
    direction_of(metric)
