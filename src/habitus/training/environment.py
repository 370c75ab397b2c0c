"""Where a run takes place: threads, device, versions, memory; what the Record says of them."""

import gc
import os
import platform
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from habitus import __version__
from habitus.softmax import choose_backend
from habitus.store import gpu_reported
from habitus.training.options import TrainOptions

_STOPS = (signal.SIGTERM, signal.SIGUSR1)  # the second is what schedulers send some time before the end


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.received = False
        self.number = signal.SIGTERM

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received, self.number = True, signal.Signals(number)


@contextmanager
def training_environment(options: TrainOptions, device: torch.device) -> Iterator[StopRequest]:
    """Threads, determinism and the signals that stop a run set for the block, and as before afterwards.

    A signal that came too late for the run, as when it was evaluated, is passed on to whoever runs it.
    """
    stop = StopRequest()
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    is_main = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
    before = {number: signal.signal(number, stop) for number in _STOPS} if is_main else {}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if options.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    heeded = True
    try:
        yield stop
        heeded = False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        gc.unfreeze()  # objects made at the start
        if device.type == "cuda":  # graphs and buffers of this run make room for the next one in the same process
            gc.collect()
            torch.cuda.empty_cache()
    if stop.received and not heeded:
        os.kill(os.getpid(), stop.number)


def hardware(device: torch.device, options: TrainOptions, world: int) -> dict[str, Any]:
    """What the run is on, and the choices that may show in the last digits."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "processes": world,
        "deterministic": options.deterministic or device.type == "cpu",
        "accumulate": options.accumulate,
    }


def softmax_backend(device: torch.device, joint_dim: int, precision: str) -> str:
    """The softmax that the run's candidates were scored by."""
    dtype = torch.bfloat16 if precision == "bf16" and device.type == "cuda" else torch.float32
    return choose_backend(torch.empty(1, joint_dim, dtype=dtype, device=device), biased=True)


def versions() -> dict[str, str]:
    return {
        "habitus": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def memory(device: torch.device) -> dict[str, int]:
    """The most bytes in use at once, by this process and on its device."""
    peaks = {"process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peaks["device_peak"] = torch.cuda.max_memory_allocated(device)
    return peaks


def peak_flops(device: torch.device) -> float | None:
    """The device's stated bfloat16 rate, where it is known."""
    if device.type != "cuda":
        return None
    reported = gpu_reported(torch.cuda.get_device_name(device))
    return None if reported is None else reported.peak_flops


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
