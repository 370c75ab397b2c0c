"""How the benchmark of the model times a step, and shows where its time goes."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], None]


def milliseconds_of(step: Step, module: torch.nn.Module, *, capture: bool) -> float:
    """Median milliseconds of a step on CUDA, replayed from a captured graph or launched anew."""
    run = step
    if capture:
        run = _captured(step, module)
    else:
        warmed(step, module)
    samples, spent = [], 0.0
    while len(samples) < 10 or (spent < 300 and len(samples) < 100):
        if not capture:
            module.zero_grad(set_to_none=True)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
        spent += samples[-1]
    return round(statistics.median(samples), 4)


def kernels_of(step: Step, module: torch.nn.Module, most: int = 16) -> dict[str, float]:
    """Microseconds per step of the dearest kernels of a captured step, dearest first."""
    replay, times = _captured(step, module), 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            replay()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    return {
        f"{row.key[:90]} x{row.count // times}": round(row.self_device_time_total / times, 1) for row in rows[:most]
    }


def processor_milliseconds(steps: dict[str, Step], module: torch.nn.Module) -> dict[str, float]:
    """Median milliseconds of processor time, taken in turns: the machine may have other things to do."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(8):
        for name, step in steps.items():
            module.zero_grad(set_to_none=True)
            begin = time.process_time()
            step()
            samples[name].append(1e3 * (time.process_time() - begin))
    return {name: round(statistics.median(values[1:]), 2) for name, values in samples.items()}


def tried(measure: Callable[[], Any]) -> Any:
    """What was measured, or the reason why nothing was; leaves the device empty."""
    try:
        return measure()
    except Exception as error:  # one figure that cannot be had should lose no other
        return f"{type(error).__name__}: {str(error)[:150]}".splitlines()[0]
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _captured(step: Step, module: torch.nn.Module) -> Step:
    warmed(step, module)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def warmed(step: Step, module: torch.nn.Module) -> None:
    """Run a step often enough that everything is compiled; no gradients are left."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            step()
    torch.cuda.synchronize()
    module.zero_grad(set_to_none=True)
