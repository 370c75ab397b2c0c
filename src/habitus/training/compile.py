"""Whether a run should be compiled, how the compiler is set up, and where its kernels are kept between runs."""

import gc
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from habitus.data import Dataset
from habitus.recipe import Recipe
from habitus.sizing import Inputs, cell_of_recipe
from habitus.typed import content_hash

# What uncompiled steps of a small model may reach on a current GPU, and the run lengths at which compiling (19 to 29 s
# on an H200, docs/measurements) begins to pay. Guesses on the safe side; only the choice depends on them.
_UNCOMPILED_FLOPS_PER_SECOND = 60e12
_PAYS_FROM_SECONDS = 60.0  # a run of this length, uncompiled, gains more than compiling takes
_PAYS_FROM_SECONDS_CACHED = 20.0  # the same where the kernels lie ready


def _use_compile_cache() -> Path:
    """The folder where compiled kernels outlive the process: the user's cache, unless the environment names one."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / "habitus" / "compiled")))


_DROPOUTS = ("dropout", "token_dropout", "field_dropout", "item_dropout")


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

    Nor are they looked at afterwards, a third of a second, until the run is over (`habitus.training.environment`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def should_compile(recipe: Recipe, dataset: Dataset, device: torch.device, choice: bool | None) -> bool:
    """Whether to compile: the user's choice, else where it saves more time than it takes, judged by the run's FLOPs."""
    if choice is not None:
        return choice
    seconds = cell_of_recipe(recipe, Inputs.of(dataset.fields)).flops / _UNCOMPILED_FLOPS_PER_SECOND
    return seconds > (
        _PAYS_FROM_SECONDS_CACHED if _kernel_mark(recipe, dataset, device).exists() else _PAYS_FROM_SECONDS
    )


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
