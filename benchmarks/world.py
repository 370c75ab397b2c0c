"""How fast a world is made and asked: events/s on one and two threads, whole folders, oracle queries/s, memory.

Rates per second of wall clock suffer from other work on the machine (the load is kept with the result); rates
per second of processor time do so less. The `_mib` rows are the process's peak memory up to that point.

Run: python benchmarks/world.py [--items 100000 10000000] [--events 10000000]
Prints a table and ends with one JSON line, which is also kept in benchmarks/results/world.json.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "world.json"
TARGET_EVENTS_PER_SECOND = 1_000_000  # on two cores at 100k items
QUERIES = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[2_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--events", type=int, default=6_400_000)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measured(arguments.worker, arguments.events)))
        return
    rows = [in_its_own_process(items, arguments.events) for items in arguments.items]
    print_table(rows)
    result = {
        "benchmark": "world",
        "date": datetime.date.today().isoformat(),
        "hardware": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "events": arguments.events,
        "target": {"items": 100_000, "events_per_second_two_threads": TARGET_EVENTS_PER_SECOND},
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def in_its_own_process(items: int, events: int) -> dict[str, float]:
    """One row, measured in a fresh process so that peak memory is that row's own."""
    command = [sys.executable, __file__, "--worker", str(items), "--events", str(events)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(items: int, events: int) -> dict[str, float]:
    from habitus.events.world import World, WorldConfig
    from habitus.events.world.writing import write_world

    start = time.perf_counter()
    world = World(WorldConfig(num_items=items, num_users=max(2, round(events / 64))))
    row: dict[str, float] = {"items": items, "build_s": time.perf_counter() - start}
    row["build_mib"] = peak_mib()
    for threads in (1, 2):
        start, busy = time.perf_counter(), time.process_time()
        count = sum(block.num_rows for block in world.event_blocks(threads=threads))
        row[f"events_per_s_{threads}"] = count / (time.perf_counter() - start)
        row[f"events_per_cpu_s_{threads}"] = count / (time.process_time() - busy)
    row["events_mib"] = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_world(world, Path(folder) / "w", threads=2, progress=lambda *_: None)
        row["write_s"] = time.perf_counter() - start
        row["disk_mib"] = sum(file.stat().st_size for file in Path(folder, "w").iterdir()) / 2**20
    row["write_mib"] = peak_mib()

    sample = world.sample(QUERIES)
    for name in ("log_probs", "entropies", "ranks"):
        start = time.perf_counter()
        getattr(world.oracle, name)(sample)
        row[f"{name}_per_s"] = QUERIES / (time.perf_counter() - start)
    start = time.perf_counter()
    world.oracle.top(sample, 10)
    row["top10_per_s"] = QUERIES / (time.perf_counter() - start)
    floor, recall = world.entropy_floor(sample), world.best_recall(10, sample)
    row |= {"entropy_floor": floor.value, "entropy_floor_se": floor.se, "best_recall@10": recall.value}
    row["peak_mib"] = peak_mib()
    return {name: float(f"{value:.5g}") for name, value in row.items()}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def print_table(rows: list[dict[str, float]]) -> None:
    for name in rows[0]:
        cells = "".join(f"{row.get(name, float('nan')):>16,.6g}" for row in rows)
        print(f"{name:<24}{cells}")


if __name__ == "__main__":
    main()
