"""How a run is carried out: nothing here changes what it computes beyond rounding, so none of it is hashed."""

from dataclasses import dataclass

from habitus.errors import ConfigError


@dataclass(frozen=True)
class TrainOptions:
    """Device, threads, checkpoints: how, not what."""

    device: str = "auto"  # auto, cpu, cuda or cuda:1
    threads: int | None = None  # CPU threads; as torch chooses where None
    deterministic: bool = False  # the same bits on CUDA as well
    save_every: int = 0  # steps between checkpoints; 0: only on SIGTERM and at the end
    keep: int = 2  # newest checkpoints kept
    best: str | None = None  # metric of the evaluations during the run whose best checkpoint is kept as well
    resume: bool = False  # go on from the newest good checkpoint, start fresh where there is none
    accumulate: int = 1  # micro-batches per step; the candidates stay those of the whole batch
    compile: bool | None = None  # compiled kernels on a GPU; None: where the run is long enough to pay for it
    capture: bool | None = None  # steps as captured graphs; None: on a GPU, where nothing stands against it
    flops_budget: float | None = None  # copied into the Record
    keep_checkpoints_at_end: bool = False
    shard: bool | None = None  # weights spread over processes (FSDP2); None: above a size

    def check(self) -> None:
        """Refuse numbers that mean nothing."""
        for name, least in (("save_every", 0), ("keep", 1), ("accumulate", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}", expected=f"{least} or more")


@dataclass(frozen=True)
class Progress:
    """Where a run is, for a bar on a screen."""

    phase: str  # starting, training, evaluating, embedding items
    step: int
    steps: int
    share: float  # of the phase
    loss: float | None = None
    events_per_second: float | None = None
    share_of_peak: float | None = None
    seconds_left: float | None = None
