"""`habitus fit` on a store of ten thousand runs: seconds, processor time and peak memory.

    python -m benchmarks.fit --runs 10101 --store /tmp/large-store

The store is the planted study of the tests, seed after seed, and is made where it does not exist yet. Prints a table
and one JSON line.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.reporting.make_store import planted_rows, write_store


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_101)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--bootstrap", type=int, default=0)
    options = parser.parse_args()
    if not options.store.exists():
        make_store(options.store, options.runs)
    began = time.perf_counter()
    command = [sys.executable, "-m", "habitus", "fit", str(options.store), "--bootstrap", str(options.bootstrap)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    laws_bytes = (options.store / "laws.json").stat().st_size
    print(
        f"{options.runs:,} runs: {seconds:.1f} s, {cpu_s:.1f} s of processor time, {peak / 1e9:.2f} GB, "
        f"laws.json {laws_bytes / 1e6:.1f} MB"
    )
    values = {
        "benchmark": "fit", "runs": options.runs, "bootstrap": options.bootstrap, "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_s, 2),
        "peak_bytes": peak, "laws_bytes": laws_bytes, "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    print(json.dumps(values))


def make_store(store: Path, runs: int) -> None:
    """The planted study again and again, with other noise and another seed each time."""
    rows = ({**row, "seed": seed} for seed in itertools.count() for row in planted_rows(seed=seed))
    write_store(store, itertools.islice(rows, runs))


if __name__ == "__main__":
    main()
