"""Forward and backward time of the model against the same transformer written plainly, in one run.

Run: python benchmarks/model.py [--parts contextualizer model attention tiles] [--warm 8] [--out FILE]
Every figure is printed, and FILE written, as soon as it is known. The comparison that matters comes first: ours
captured, then the plain one compiled and captured, then what else was tried, then eager code. --warm N first fills the
compile caches in N processes at a time. Ends with one JSON line; kept results are benchmarks/results/model-*.json.
On CUDA in bf16 autocast. On CPU in float32 on one thread, nothing compiled, in processor time.
Rates are executed FLOPs (habitus.sizing); those of the contextualizer alone are 6·p·slots, as in the anchors.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from model_inputs import ANCHORS, CELLS, CPU_CELLS, processor
from model_jobs import FIRST, Job, attention_jobs, contextualizer_jobs, model_jobs, tile_jobs, whole_model_on_cpu
from model_timing import tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", default=["contextualizer", "model", "attention", "tiles"])
    parser.add_argument("--cells", nargs="+", default=[*CELLS, *ANCHORS], help="such as 1e15 or 192/4/128")
    parser.add_argument("--variants", nargs="+", help="of what is timed; all unless said, as in --variants ours plain")
    parser.add_argument("--warm", type=int, default=0, help="processes that fill the compile caches beforehand")
    parser.add_argument("--only", help="one job, as part:cell:variant")
    parser.add_argument("--once", action="store_true", help="run without timing, to fill the caches")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device == "cpu":
        results = Results(arguments.out, f"{processor()}, one thread")
        for name in arguments.cells:
            if name in CPU_CELLS:
                for variant, figures in whole_model_on_cpu(CPU_CELLS[name]).items():
                    results.add("model", name, variant, figures)
        return results.end()
    jobs = chosen_jobs(arguments)
    if arguments.once:
        for job in jobs:
            job.run(True)
        return None
    results = Results(arguments.out, torch.cuda.get_device_name())
    if arguments.warm:
        warm([job for job in jobs if job.compiles], arguments.warm)
    for job in jobs:
        results.add(job.part, job.cell, job.variant, tried(lambda job=job: job.run(False)))
    return results.end()


def chosen_jobs(arguments: argparse.Namespace) -> list[Job]:
    """What was asked for, the main comparison first."""
    every = [*contextualizer_jobs(), *model_jobs(), *attention_jobs(), *tile_jobs()]
    if arguments.only:
        return [job for job in every if job.key == arguments.only]
    every = [job for job in every if job.part in arguments.parts and job.cell in (*arguments.cells, "")]
    if arguments.variants:
        every = [job for job in every if job.variant in arguments.variants]
    # A stable sort: ours of all parts, plain of all parts, then the order of the lists.
    return sorted(every, key=lambda job: FIRST.index(job.variant) if job.variant in FIRST else len(FIRST))


def warm(jobs: list[Job], processes: int) -> None:
    """Run every job once in a process of its own: what it compiles is found in the caches later."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}

    def run(job: Job) -> None:
        command = [sys.executable, __file__, "--only", job.key, "--once"]
        begin = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = "" if done.returncode == 0 else f": {done.stderr.strip().splitlines()[-1:]}"
        print(f"warm {job.key}: {time.perf_counter() - begin:.0f} s{said}", flush=True)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, jobs))


class Results:
    """The figures so far, printed and written as they come."""

    def __init__(self, out: Path | None, hardware: str) -> None:
        self.out = out
        self.values: dict[str, Any] = {
            "benchmark": "model",
            "date": datetime.date.today().isoformat(),
            "hardware": hardware,
            "torch": torch.__version__,
        }

    def add(self, part: str, cell: str, variant: str, figures: Any) -> None:
        """Take in what one job measured: a dict, or the reason why there is nothing."""
        self.values.setdefault(part, {}).setdefault(cell or "all", {})[variant] = figures
        shown = figures if not isinstance(figures, dict) else ", ".join(f"{k} {v}" for k, v in figures.items())
        print(f"{part} {cell} | {variant} | {shown}", flush=True)
        if self.out:
            self.out.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")

    def end(self) -> None:
        print(json.dumps(self.values))


if __name__ == "__main__":
    main()
