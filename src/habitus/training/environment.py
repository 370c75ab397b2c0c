"""Where a run takes place: memory, threads, signals, the compiler; and what its Record says of the machine."""

import gc
import os
import platform
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from habitus import __version__
from habitus.data import Dataset
from habitus.errors import ConfigError, OutOfMemory
from habitus.machine import available_memory, idle_cores, usable_cores
from habitus.recipe import Recipe
from habitus.sizing import Inputs, Workload, breakdown, cell_of_recipe, training_bytes
from habitus.softmax import choose_backend
from habitus.store import gpu_reported
from habitus.training.checkpoints import saved_threads
from habitus.training.options import TrainOptions
from habitus.typed import content_hash
from habitus.units import format_bytes

# Threads meet after every operation, hundreds of times in a step. Where a step is small, or another process has a core,
# they wait for each other longer than they work; one thread waits for nobody.
_STEP_FLOPS_PER_THREAD = 1e9  # executed; some tens of milliseconds of work
_MOST_LAYERS = 4096  # building more takes minutes, whatever their width
_SAMPLED_ITEMS = 4096
_STOPS = (signal.SIGTERM, signal.SIGUSR1)  # the second is what schedulers send some time before the end
# What uncompiled steps of a small model may reach on a current GPU, and the run lengths at which compiling (19 to 29 s
# on an H200, docs/measurements) begins to pay. Guesses on the safe side; only the choice depends on them.
_UNCOMPILED_FLOPS_PER_SECOND = 60e12
_PAYS_FROM_SECONDS = 60.0  # a run of this length, uncompiled, gains more than compiling takes
_PAYS_FROM_SECONDS_CACHED = 20.0  # the same where the kernels lie ready
_DROPOUTS = ("dropout", "token_dropout", "field_dropout", "item_dropout")


# Before a run ---------------------------------------------------------------------------------------------------------


def check_memory(
    recipe: Recipe, dataset: Dataset, device: torch.device, *, accumulate: int = 1, processes: int = 1
) -> None:
    """Refuse a run whose steps take more memory than the device, or this process on it, can have."""
    layers = recipe.model.depth + recipe.model.text_depth
    if layers > _MOST_LAYERS:
        raise ConfigError(f"the model has {layers:,} layers", expected=f"at most {_MOST_LAYERS:,}")
    room = _memory_of_device(device)
    needed = _expected_bytes(
        recipe, dataset, on_cpu=device.type == "cpu", parts=accumulate * processes, processes=processes
    )
    if processes > 1:  # which share the weights too, at the latest where they are too large for one
        for part in ("weights", "gradients", "optimizer"):
            needed[part] //= processes
        needed["total"] = sum(count for part, count in needed.items() if part != "total")
    if room is None or needed["total"] <= room:
        return
    largest = sorted((part for part in needed if part != "total"), key=lambda part: -needed[part])
    named = ", ".join(f"{part} {format_bytes(needed[part])}" for part in largest[:3])
    raise OutOfMemory(
        f"a step of this recipe takes about {format_bytes(needed['total'])} ({named}), "
        f"and {device} has {format_bytes(room)}",
        expected="a step that fits; a container's limit counts as well",
        next_step="lower train.batch_sequences or the model's sizes, or pass --accumulate 2 or more; "
        "--force trains without this check",
    )


def _memory_of_device(device: torch.device) -> int | None:
    """Bytes of the device that a run may take; of a machine, what is free now within its limits."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_memory()


def _expected_bytes(
    recipe: Recipe, dataset: Dataset, *, on_cpu: bool, parts: int = 1, processes: int = 1
) -> dict[str, int]:
    """Bytes of a step by part, as `--dry-run` counts them, but with the dataset's own items and texts.

    Of several processes, each of which scores its share of the extra negatives.
    """
    model, train, inputs = recipe.model, recipe.train, Inputs.of(dataset.fields)
    slots = max(1, train.batch_sequences // parts) * recipe.data.seq_len
    work = Workload.expected(
        B=max(1, train.batch_sequences // parts),
        L=recipe.data.seq_len,
        t=1,
        K=-(-train.num_negatives // processes),
        stage=train.stage,
    )
    items = min(work.items, dataset.num_items)
    text_tokens = round(items * _mean_tokens(dataset, model.text_len))
    work = Workload(
        slots=slots,
        items=items,
        text_tokens=text_tokens,
        text_pairs=0,
        context_pairs=0,
        queries=work.queries,
        candidates=min(work.candidates, dataset.num_items),
        copied_pairs=work.copied_pairs,
    )
    precision = "fp32" if on_cpu else train.precision
    return training_bytes(model, inputs, breakdown(model, inputs), work, precision=precision, optimizer=train.optimizer)


def _mean_tokens(dataset: Dataset, text_len: int) -> float:
    """Text tokens of an item, on average over some of the catalogue."""
    rows = np.unique(np.linspace(0, dataset.num_items - 1, min(dataset.num_items, _SAMPLED_ITEMS)).astype(np.int64))
    tokens = dataset.item_features(rows).tokens
    return 0.0 if tokens is None else float((tokens[:, :text_len] != 0).sum(1).mean())


def with_threads(
    options: TrainOptions, recipe: Recipe, dataset: Dataset, device: torch.device, out: Path
) -> TrainOptions:
    """The options with a number of threads: those of the checkpoint that is resumed, or as step and machine allow."""
    if options.threads is not None or device.type != "cpu":
        return options
    saved = saved_threads(out) if options.resume else None  # a resumed run is the same to the bit
    return replace(options, threads=saved or choose_threads(recipe, dataset))


def choose_threads(recipe: Recipe, dataset: Dataset) -> int:
    """As many threads as the step feeds and idle cores carry; one at least."""
    most = min(torch.get_num_threads(), usable_cores())  # OMP_NUM_THREADS is the former
    cell = cell_of_recipe(recipe, Inputs.of(dataset.fields))
    threads = min(most, int(cell.executed_flops / cell.steps / _STEP_FLOPS_PER_THREAD))
    if threads <= 1:
        return 1
    return max(1, min(threads, round(idle_cores())))


# While it lasts -------------------------------------------------------------------------------------------------------


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


# The compiler ---------------------------------------------------------------------------------------------------------


def should_compile(recipe: Recipe, dataset: Dataset, device: torch.device, choice: bool | None) -> bool:
    """Whether to compile: the user's choice, else where it saves more time than it takes, judged by the run's FLOPs."""
    if choice is not None:
        return choice
    seconds = cell_of_recipe(recipe, Inputs.of(dataset.fields)).flops / _UNCOMPILED_FLOPS_PER_SECOND
    return seconds > (
        _PAYS_FROM_SECONDS_CACHED if _kernel_mark(recipe, dataset, device).exists() else _PAYS_FROM_SECONDS
    )


@cache
def load_compiler() -> "Future[None]":
    """Start importing PyTorch's compiler in a thread, once per process; the caller loads data meanwhile."""
    _use_compile_cache()
    pool = ThreadPoolExecutor(1)
    future = pool.submit(_import_compiler)
    pool.shutdown(wait=False)
    return future


def _import_compiler() -> None:
    """Import the compiler, and let it do meanwhile what it would do before its first kernel."""
    # All of this is cached. But two threads that ask at the same time would both do the work, so nothing should be
    # compiled before this function's end. What fails here fails again, and is raised, where it is needed.
    with ThreadPoolExecutor(1) as thread:
        import triton.compiler  # noqa: F401 (no two threads should import the same)
        from torch._inductor.runtime import triton_compat

        thread.submit(lambda: triton_compat.triton_key())  # reads and hashes all of Triton: half a second
        from torch._inductor import async_compile, codecache

        thread.submit(lambda: async_compile.AsyncCompile.wakeup())  # hashes PyTorch, starts processes that compile
        thread.submit(lambda: codecache.CacheBase.get_system())
        from torch._inductor import compile_fx  # noqa: F401 (most of a second)


def configure_compiler() -> None:
    """Settings of PyTorch's compiler for training. They hold in the thread that sets them."""
    from torch._inductor import config

    # The embedder holds a Function of our own; unless this is set, PyTorch works its graphs out in every process.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # Variants of small kernels would be compiled and timed, and gain nothing here. Odd sizes get their zeros in
    # `habitus.model.layers`.
    config.triton.autotune_pointwise = False
    config.shape_padding = False
    torch._dynamo.config.run_gc_after_compile = False  # see `pause_garbage_collection`


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """No garbage collection while imports and a compiler make a great many objects that stay.

    Nor are they looked at afterwards, a third of a second, until the run is over (`training_environment`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def mark_kernels_cached(recipe: Recipe, dataset: Dataset, device: torch.device) -> None:
    """Note that the kernels of such a run lie in the cache."""
    mark = _kernel_mark(recipe, dataset, device)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:  # the run does not depend on a cache
        return


def _kernel_mark(recipe: Recipe, dataset: Dataset, device: torch.device) -> Path:
    """A file that exists where the kernels of such a run are cached; its name holds all that they depend on."""
    shape = {
        "model": recipe.model.to_values(),
        "fields": dataset.fields.to_values(),
        "stage": recipe.train.stage,
        "batch_sequences": recipe.train.batch_sequences,
        "seq_len": recipe.data.seq_len,
        "precision": recipe.train.precision,
        **{name: True for name in _DROPOUTS if getattr(recipe.train, name)},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device),
    }
    return _use_compile_cache() / "habitus-runs" / content_hash(shape)[:24]


def _use_compile_cache() -> Path:
    """The folder where compiled kernels outlive the process: the user's cache, unless the environment names one."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / "habitus" / "compiled")))


# What its Record says -------------------------------------------------------------------------------------------------


def hardware(recipe: Recipe, options: TrainOptions, device: torch.device, world: int) -> dict[str, Any]:
    """What the run is on, and the choices that may show in the last digits."""
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" and device.type == "cuda" else torch.float32
    queries = torch.empty(1, recipe.model.joint_dim, dtype=dtype, device=device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "processes": world,
        "deterministic": options.deterministic or device.type == "cpu",
        "accumulate": options.accumulate,
        "precision": recipe.train.precision,
        "softmax": choose_backend(queries, biased=True),
    }


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
