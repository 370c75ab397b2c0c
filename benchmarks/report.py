"""Time, memory and size of a report: the planted store of 600 runs and one of 10,101.

python benchmarks/report.py OUT [--kind planted|large]

Stores are written to OUT once (`tests/reporting/make_store.py`), with their laws; each report is made by a process of
its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=("planted", "large"), action="append")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.out / options.kind[0])))
        return
    rows = []
    for kind in options.kind or ("planted", "large"):
        make_store(options.out / kind, kind)
        command = [sys.executable, __file__, str(options.out), "--kind", kind, "--child"]
        rows.append({"store": kind} | json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    print(f"{'store':10}{'runs':>8}{'seconds':>9}{'CPU s':>8}{'peak MB':>9}{'page MiB':>10}{'beside MiB':>12}")
    for row in rows:
        print(
            f"{row['store']:10}{row['runs']:8,}{row['seconds']:9.1f}{row['cpu_seconds']:8.1f}{row['peak_mb']:9.0f}"
            f"{row['page_bytes'] / 2**20:10.2f}{row['beside_bytes'] / 2**20:12.2f}"
        )
    print(json.dumps(rows))


def make_store(store: Path, kind: str) -> None:
    if (store / "laws.json").is_file():
        return
    from habitus.laws import fit

    if not store.exists():
        store.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "tests.reporting.make_store", kind, str(store)], check=True, cwd=ROOT)
    fit(store).write(store / "laws.json")


def measure(store: Path) -> dict[str, float]:
    """A report of a store whose laws are fresh, in this process."""
    start = time.perf_counter()
    from habitus.laws import read_runs
    from habitus.reporting import report

    page = report(store, store.with_suffix(".html"))
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    beside = page.with_name(f"{page.stem}-data")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1000,
        "page_bytes": page.stat().st_size,
        "beside_bytes": sum(path.stat().st_size for path in beside.glob("*.csv")),
        "runs": len(read_runs(store)),
    }


if __name__ == "__main__":
    main()
