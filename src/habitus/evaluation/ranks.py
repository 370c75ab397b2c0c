"""The processes that share one evaluation: a single one, or those that torchrun started.

Every process scores the same queries in the same order against its own shard of the candidates; results are gathered,
so that all of them end with the same numbers.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from habitus.errors import ConfigError, HabitusError, RunError

# How long processes wait for a slow one: the first may be hashing or embedding a catalogue meanwhile.
_PATIENCE = timedelta(hours=2)
# How long one waits to see a file that the first has written: clients of a shared file system remember for up to a
# minute that a name was not there.
_SEEN_WITHIN = 120.0


class Ranks:
    """This process among those of the default group; the only one where none was set up."""

    def __init__(self) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if initialized else 0
        self.world = dist.get_world_size() if initialized else 1
        self.in_group = initialized  # also where the group has one process: it then exchanges with itself

    @property
    def host_device(self) -> str:
        """Where tensors must lie to be exchanged while the GPU is left alone; on it where only NCCL carries them."""
        return "cpu" if "cpu:gloo" in str(dist.get_backend_config()) else "cuda"

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this process is the first on its machine."""
        return self.world == 1 or int(os.environ.get("LOCAL_RANK", str(self.rank))) == 0

    def shard_range(self, size: int) -> tuple[int, int]:
        """(start, stop) of this process's shard of range(size); shards differ by one row at most."""
        return self.rank * size // self.world, (self.rank + 1) * size // self.world

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have one shape, in rank order."""
        if self.world == 1:
            return [values]
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)
        return parts

    def broadcast(self, values: Tensor) -> Tensor:
        """The first process's tensor, on every process."""
        if self.world > 1:
            values = values.contiguous()
            dist.broadcast(values, 0)
        return values

    def barrier(self, written: Path | None = None) -> None:
        """Wait until all processes have come here, and see what the first has written."""
        if self.world > 1:
            dist.barrier()
            if written is not None and not self.is_first:
                wait_for_file(written)

    def answer_of_first(self, answer: bool) -> bool:
        """What the first process answers, on all: files may look different to others for a while."""
        return bool(self.number_of_first(int(answer)))

    def number_of_first(self, number: int) -> int:
        """The first process's number, on all."""
        return int(self.broadcast(torch.tensor([number], device=self.host_device))) if self.world > 1 else number

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block at whose end all processes meet: where one of them raises an error of ours, all do.

        Otherwise the others would wait for it in the next exchange, for hours in the worst case.
        """
        error: HabitusError | None = None
        try:
            yield
        except HabitusError as raised:
            if self.world == 1:
                raise
            error = raised
        if self.world == 1:
            return
        failed = self.gather(torch.tensor([error is not None], device=self.host_device))
        if error is not None:
            raise error
        for rank, flag in enumerate(failed):
            if flag:
                raise RunError(
                    f"process {rank} of {self.world} could not begin, so this one stops too",
                    expected="one command, and the same files, for all processes",
                    next_step="read what that process said",
                )


def wait_for_file(path: Path, seconds: float | None = None) -> None:
    """Wait until a file is seen that another process has written."""
    seconds = _SEEN_WITHIN if seconds is None else seconds
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise RunError(
                f"{path} was written by the first process, and this one has not seen it within {seconds:g} s",
                expected="a folder on a file system that all processes share",
                next_step="name a folder on shared storage with --out; see docs/cluster.md",
            )
        time.sleep(0.1)


@contextmanager
def join_ranks(device: str) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks that torchrun started, set up for the block, and this process's device; one rank without torchrun."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    resolved = resolve_device(device)
    if count == 1 or dist.is_initialized():
        yield Ranks(), resolved
        return
    if resolved.type == "cuda":
        torch.cuda.set_device(resolved)
    backend = _backend(resolved, named=":" in device)
    dist.init_process_group(backend, timeout=_PATIENCE)
    failed = True
    try:
        yield Ranks(), resolved
        failed = False
    finally:
        # NCCL takes a group down together: a process that fails alone would wait for the others, and torchrun, which
        # ends them once it has ended, for this one.
        if not failed or backend == "gloo":
            dist.destroy_process_group()


def _backend(device: torch.device, *, named: bool) -> str:
    """Who carries the messages: on GPUs NCCL, and gloo for what lies on the host or where processes share a GPU.

    They do where there are more of them than GPUs, and where the user has `named` one for all.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cpu" or processes > torch.cuda.device_count() or (named and processes > 1):
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def resolve_device(name: str) -> torch.device:
    """The device of a name; 'auto' is a GPU where there is one, and under torchrun each process has its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"there is no device {name!r}", expected="auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported", expected="auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} cannot be used: torch sees no GPU here", next_step="pass --device cpu, or auto"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return device
