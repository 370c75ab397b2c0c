"""What a user may say about a study."""

import math
from dataclasses import dataclass
from pathlib import Path

from habitus.errors import ConfigError, Interrupted

ORDER = ("share", "depth", "batch", "allocation", "negatives", "init")  # each feeds the next
# Initialisations matter for learning rates across sizes, not for a recipe: only the full programme sweeps them.
WITHOUT_INIT = ORDER[:-1]


@dataclass(frozen=True)
class StudyOptions:
    """Everything but the folder. What decides the runs is kept in study.json and may not change on the way."""

    data: Path | None = None  # a prepared dataset; else the preset's own synthetic world
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
        """Refuse what cannot be meant."""
        if self.flops is not None and self.gpu_hours is not None:
            raise ConfigError("--flops and --gpu-hours given", expected="one envelope")
        for name, value in (
            ("--flops", self.flops),
            ("--gpu-hours", self.gpu_hours),
            ("--plan-flops", self.plan_flops),
            ("--max-minutes", self.max_minutes),
        ):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} {value:g}", expected="a positive number")
        for axis in self.axes:
            if axis not in ORDER:
                raise ConfigError(f"axis {axis!r} is unknown", expected=f"some of {', '.join(ORDER)}")

    def chosen_axes(self) -> tuple[str, ...]:
        """The axes in the order in which they run."""
        asked = self.axes or (ORDER if self.preset == "paper" else WITHOUT_INIT)
        return tuple(axis for axis in ORDER if axis in asked)


def stopped(out: Path, where: str, why: str) -> Interrupted:
    """What a study says when it ends before its end."""
    return Interrupted(
        f"{why or 'stopped'} during the {where}; what is finished stays in {out}",
        next_step="give the same command again: it goes on where it stopped",
    )
