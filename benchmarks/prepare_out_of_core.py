"""What `prepare` takes of time, memory and disk on logs that do not fit into the memory.

    python benchmarks/prepare_out_of_core.py --memory 8GiB 1e8x1e6 3e8x1e7 1e8x1e8     # events x items
    python benchmarks/prepare_out_of_core.py --memory 512MiB 1e6x1e4                   # a quick look
    python benchmarks/prepare_out_of_core.py --memory 1GiB --kill 1e7x1e5              # kill -9 in every phase
    python benchmarks/prepare_out_of_core.py --memory 4GiB --against-ray 1e7x1e5       # on a cluster of three nodes

Every measurement is a process of its own. Disk is sampled twice a second: scratch files and the dataset, without the
input. CPU seconds stand beside wall seconds, since a machine may have other work. With --against-ray every log is
prepared in both ways, plain and on a cluster of this machine's processes (a head and two nodes of one CPU each) that
was started before; CPU seconds are those of prepare and its tasks, without the cluster's own services. The last line
is JSON.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from prepare import SCHEMA, hardware

GIB = 2**30
LONG_PHASES = {"writing events", "encoding items"}  # killed half-way; others as they begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="EVENTSxITEMS")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the tables are made (default: a temporary folder)")
    parser.add_argument("--kill", action="store_true", help="kill -9 in every phase, then prepare to the end")
    parser.add_argument("--against-ray", action="store_true", help="prepare on a local Ray cluster, too")
    parser.add_argument("--repeats", type=int, default=1, help="of each way, in turn; the least CPU time counts")
    parser.add_argument("--backend", default="local", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        options = {"memory": arguments.memory, "threads": arguments.threads, "backend": arguments.backend}
        print(json.dumps(prepare_here(arguments.folder, options, arguments.kill_at)))
        return
    rows = []
    for log in arguments.logs:
        num_events, num_items = (int(float(number)) for number in log.split("x"))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            place = Path(folder)
            make_tables(place, num_events, num_items)
            options = ["--memory", arguments.memory, "--threads", str(arguments.threads), "--folder", folder]
            command = [sys.executable, __file__, *options, "--one", log]
            if arguments.kill:
                rows.append(
                    {"events": num_events, "items": num_items, "killed_in": kill_in_every_phase(command, place)}
                )
                continue
            if arguments.against_ray:
                rows += [
                    {"events": num_events, "items": num_items, **row} for row in compare(command, arguments.repeats)
                ]
                continue
            measured = last_line(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True))
            input_gib = sum(path.stat().st_size for path in place.glob("*.parquet")) / GIB
        rows.append({"events": num_events, "items": num_items, "input_gib": round(input_gib, 2), **measured})
        print(json.dumps(rows[-1]), file=sys.stderr)
    if arguments.against_ray:
        print_comparison(rows)
    elif not arguments.kill:
        print_table(rows)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    result = {"benchmark": "prepare_out_of_core", "date": date, "hardware": hardware(), "memory": arguments.memory}
    print(json.dumps({**result, "threads": arguments.threads, "rows": rows}))


def last_line(finished: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(finished.stdout.splitlines()[-1])


def compare(command: list[str], repeats: int) -> list[dict]:
    """The preparation with the least CPU time of each backend; they take turns."""
    measured: dict[str, list[dict]] = {"local": [], "ray": []}
    with local_cluster() as address:
        for _ in range(repeats):
            for backend, rows in measured.items():
                with watched_processes() as watch:
                    environment = {**os.environ, "RAY_ADDRESS": address}
                    options = {"stdout": subprocess.PIPE, "text": True, "check": True, "env": environment}
                    row = last_line(subprocess.run([*command, "--backend", backend], **options))
                measures = watch.summary()
                tasks = measures["task_cpu_seconds"] if backend == "ray" else 0.0  # workers that wait for work
                row["cpu_seconds"] = round(measures["driver_cpu_seconds"] + tasks, 1)
                rows.append({"backend": backend, **row, **measures})
                print(json.dumps(rows[-1]), file=sys.stderr)
                shutil.rmtree(Path(command[command.index("--folder") + 1], "work"))
    checksums = {row["checksum"] for rows in measured.values() for row in rows}
    assert len(checksums) == 1, checksums
    best = [min(rows, key=lambda row: row["cpu_seconds"]) for rows in measured.values()]
    return [{**row, "seconds_of_all": [one["seconds"] for one in measured[row["backend"]]]} for row in best]


@contextmanager
def local_cluster() -> Iterator[str]:
    """The address of a Ray cluster of a head and two nodes of one CPU each, whose workers have started."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 200 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **store)
        yield cluster.address
    finally:
        cluster.shutdown()


class ProcessWatch:
    """CPU seconds and memory of this process's descendants, sampled: of prepare, of its tasks, and of the cluster's
    own services, which run whether there is work or not."""

    def __init__(self) -> None:
        self.first: dict[tuple[int, float], float] | None = None  # CPU seconds by process as the watch began
        self.cpu: dict[str, dict[tuple[int, float], float]] = {"driver": {}, "task": {}, "cluster": {}}
        self.peaks = {"driver": 0, "task": 0}

    def sample(self) -> None:
        import psutil

        seen = {}
        for process in psutil.Process().children(recursive=True):
            try:
                with process.oneshot():
                    times, rss, words = process.cpu_times(), process.memory_info().rss, " ".join(process.cmdline())
                    key = process.pid, process.create_time()
            except psutil.Error:  # gone meanwhile
                continue
            kind = kind_of_process(words)
            seen[key] = times.user + times.system
            self.cpu["task" if key in self.cpu["task"] else kind][key] = seen[key] - (self.first or {}).get(key, 0.0)
            if kind in self.peaks:
                self.peaks[kind] = max(self.peaks[kind], rss)
        if self.first is None:
            self.first, self.cpu = seen, {kind: {} for kind in self.cpu}

    def summary(self) -> dict[str, float]:
        peaks = {f"peak_{kind}_gib": round(rss / GIB, 2) for kind, rss in self.peaks.items()}
        return {**{f"{kind}_cpu_seconds": round(sum(cpu.values()), 1) for kind, cpu in self.cpu.items()}, **peaks}


def kind_of_process(words: str) -> str:
    if "--one" in words or "ray_driver import serve" in words:
        return "driver"
    return "task" if words.startswith("ray::") or "default_worker.py" in words else "cluster"


@contextmanager
def watched_processes() -> Iterator[ProcessWatch]:
    watch, stop = ProcessWatch(), threading.Event()
    watch.sample()

    def sample() -> None:
        while not stop.wait(0.2):
            watch.sample()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield watch
    stop.set()
    thread.join()


def print_comparison(rows: list[dict]) -> None:
    print(f"{'events':>14} {'items':>12} {'backend':>8} {'s':>8} {'CPU s':>8} {'GiB driver':>11} {'GiB task':>9}")
    for row in rows:
        print(
            f"{row['events']:>14,} {row['items']:>12,} {row['backend']:>8} {row['seconds']:>8.1f} "
            f"{row['cpu_seconds']:>8.1f} {row['peak_driver_gib']:>11.2f} {row['peak_task_gib']:>9.2f}"
        )
    for plain, ray in zip(rows[::2], rows[1::2], strict=True):
        print(f"{plain['events']:,}: ray takes {ray['seconds'] / plain['seconds']:.2f} times the seconds of plain")


def kill_in_every_phase(command: list[str], place: Path) -> list[str]:
    """The phases in which a preparation was killed; after each the next one clears up, and the last one succeeds."""
    whole = last_line(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True))
    shutil.rmtree(place / "work")
    phases = [phase for phase in whole["phases"] if phase != "importing"]
    for phase in phases:
        killed = subprocess.run([*command, "--kill-at", phase], stdout=subprocess.PIPE)
        left = [path.name for path in (place / "work").iterdir()]
        assert killed.returncode == -signal.SIGKILL, f"{phase}: exit {killed.returncode}"
        assert "dataset" not in left, f"{phase}: a half-written dataset"
        assert len(left) == 1, f"{phase}: {left}"
        print(f"killed while {phase}; left {left}", file=sys.stderr)
    again = last_line(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True))
    assert again["checksum"] == whole["checksum"]
    assert [path.name for path in (place / "work").iterdir()] == ["dataset"]
    return phases


def make_tables(place: Path, num_events: int, num_items: int) -> None:
    """A log in time order on heavy-tailed users and items; titles of four words of a vocabulary of 4,096."""
    import duckdb

    (place / "schema.toml").write_text(SCHEMA)
    config = {"threads": 2, "memory_limit": "4GiB", "temp_directory": str(place / "spill")}
    with duckdb.connect(":memory:", config=config) as con:
        con.execute("SET preserve_insertion_order = false")
        letters = "translate(md5(CAST(range AS VARCHAR)), '0123456789', 'ghijklmnop')"
        con.execute(f"CREATE TABLE words AS SELECT {letters}[:5] AS word FROM range(4096)")
        (words,) = con.execute("SELECT list(word) FROM words").fetchall()[0]
        con.execute("SET VARIABLE words = $words", {"words": words})
        con.execute(
            f"COPY (SELECT CAST(pow(random(), 2) * {num_events // 100} AS BIGINT) AS user_id, "
            f"CAST(pow(random(), 3) * {num_items - 1} AS BIGINT) AS item_id, "
            "TIMESTAMP '2024-01-01' + to_milliseconds(range * 300) AS timestamp, "
            "['view', 'click', 'purchase'][1 + CAST(floor(random() * 3) AS BIGINT)] AS event_type, "
            f"CAST(random() * 100 AS FLOAT) AS price FROM range({num_events})) "
            f"TO '{place}/events.parquet' (FORMAT parquet)"
        )
        title = ", ' ', ".join(["getvariable('words')[1 + CAST(floor(random() * 4096) AS BIGINT)]"] * 4)
        con.execute(
            f"COPY (SELECT range AS item_id, concat({title}) AS title, "
            "concat('category ', range % 200) AS category, CAST(random() * 100 AS FLOAT) AS price "
            f"FROM range({num_items})) TO '{place}/items.parquet' (FORMAT parquet)"
        )


def prepare_here(place: Path, options: dict, kill_at: str) -> dict[str, object]:
    from habitus.data import PrepareOptions, prepare
    from habitus.events import Schema

    clock = PhaseClock(kill_at)
    work = place / "work"
    began = time.perf_counter()
    with watched_disk(work) as disk:
        manifest = prepare(
            f"{place}/events.parquet",
            f"{place}/items.parquet",
            Schema.read(place / "schema.toml"),
            work / "dataset",
            PrepareOptions(test_share=0, **options),
            clock.progress,
        )
        clock.progress("end", 1.0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    dataset_bytes = sum(entry.bytes for entry in manifest.files.values())
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(usage.ru_maxrss * 1024 / GIB, 2),
        "peak_disk_gib": round(disk[0] / GIB, 2),
        "dataset_gib": round(dataset_bytes / GIB, 2),
        "phases": clock.phases,
        "checksum": manifest.checksum[:16],
    }


class PhaseClock:
    """Wall and CPU seconds of each phase that `prepare` reports; may kill its process half-way through one."""

    def __init__(self, kill_at: str) -> None:
        self.kill_at = kill_at
        self.phases: dict[str, tuple[float, float]] = {}
        self.current, self.since, self.cpu = "importing", time.perf_counter(), time.process_time()

    def progress(self, phase: str, done: float) -> None:
        if phase == self.kill_at and phase == "partitioning events":  # which reports only its beginning
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif phase == self.kill_at and (done >= 0.5 or phase not in LONG_PHASES):
            os.kill(os.getpid(), signal.SIGKILL)
        if phase and phase != self.current:
            now, cpu = time.perf_counter(), time.process_time()
            wall_before, cpu_before = self.phases.get(self.current, (0.0, 0.0))
            spent = wall_before + now - self.since, cpu_before + cpu - self.cpu
            self.phases[self.current] = round(spent[0], 1), round(spent[1], 1)
            self.current, self.since, self.cpu = phase, now, cpu


@contextmanager
def watched_disk(folder: Path) -> Iterator[list[int]]:
    """The most bytes that the files below a folder have taken, as the only entry of a list."""
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            sizes = []
            for directory, _, names in os.walk(folder):  # which passes over folders that are gone meanwhile
                for name in names:
                    with suppress(FileNotFoundError):
                        sizes.append(Path(directory, name).stat().st_blocks * 512)
            most[0] = max(most[0], sum(sizes))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield most
    stop.set()
    thread.join()


def print_table(rows: list[dict]) -> None:
    head = ("events", "items", "s", "CPU s", "µs CPU/event", "GiB memory", "GiB disk", "input", "dataset")
    print(("{:>14} {:>12} {:>8} {:>8} {:>13} {:>11} {:>9} {:>6} {:>8}").format(*head))
    for row in rows:
        row["cpu_us_per_event"] = round(row["cpu_seconds"] / row["events"] * 1e6, 3)
        print(
            f"{row['events']:>14,} {row['items']:>12,} {row['seconds']:>8.1f} {row['cpu_seconds']:>8.1f} "
            f"{row['cpu_us_per_event']:>13.3f} {row['peak_gib']:>11.2f} {row['peak_disk_gib']:>9.2f} "
            f"{row['input_gib']:>6.2f} {row['dataset_gib']:>8.2f}"
        )


if __name__ == "__main__":
    main()
