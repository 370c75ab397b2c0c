"""The whole study in miniature: six axes on a small world, then every law. Prints a table and one JSON line.

    python benchmarks/miniature.py --folder /tmp/miniature --workers 2 --out benchmarks/results/miniature.json

Running it again in the same folder goes on where it was. Times are wall-clock; the CPU seconds of all workers
stand beside them, since a machine that is shared makes the first longer and hardly the second.
"""

import argparse
import json
import multiprocessing.forkserver
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from habitus.store import AXES
from habitus.sweeps import load_preset, preset_dataset, sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--preset", default=str(Path(__file__).with_suffix(".toml")))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--axes", nargs="*", default=list(AXES), choices=AXES)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    preset = load_preset(arguments.preset)
    began, cpu = time.monotonic(), cpu_seconds()
    dataset = preset_dataset(preset, arguments.folder / "dataset", seed=1)
    store = arguments.folder / "store"
    rows = []
    for axis in arguments.axes:
        at, cpu_at = time.monotonic(), cpu_seconds()
        result = sweep(
            axis, dataset, store, preset=preset, workers=arguments.workers, note=lambda text: print(" ", text)
        )
        rows.append(
            {
                "axis": axis,
                "runs": len(result.runs),
                "done": result.number("done"),
                "failed": result.number("failed"),
                "missing": result.number("missing"),
                "left_out": len(result.design.left_out),
                "flops": result.design.flops,
                "seconds": round(time.monotonic() - at, 1),
                "cpu_seconds": round(cpu_seconds() - cpu_at, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    at = time.monotonic()
    subprocess.run([sys.executable, "-m", "habitus", "fit", str(store)], check=True, stdout=subprocess.DEVNULL)
    fitted = time.monotonic() - at
    laws = json.loads((store / "laws.json").read_text(encoding="utf-8"))
    print_laws(laws)
    summary = {
        "benchmark": "miniature",
        "preset": preset.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_before": [round(value, 1) for value in os.getloadavg()],
        "workers": arguments.workers,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),
        "fit_seconds": round(fitted, 1),
        "axes": rows,
        "laws": {name: statuses_of(laws, name) for name in sorted({entry["name"] for entry in laws["entries"]})},
    }
    line = json.dumps(summary)
    print(line)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")


def print_laws(laws: dict) -> None:
    """Each law of the losses with its status and values."""
    for entry in laws["entries"]:
        if entry["metric"] not in ("batch/loss", "catalogue/loss"):
            continue
        values = {name: float(f"{value:.4g}") for name, value in entry["law"].get("values", {}).items() if plain(value)}
        at = "" if entry.get("budget") is None else f" at {entry['budget']:.3g}"
        print(f"{entry['name']}{at} · {entry['metric']}: {entry['law']['status']} {values or ''}")


def plain(value: object) -> bool:
    return isinstance(value, int | float)


def statuses_of(laws: dict, name: str) -> dict[str, int]:
    found = [entry["law"]["status"] for entry in laws["entries"] if entry["name"] == name]
    return {status: found.count(status) for status in sorted(set(found))}


def cpu_seconds() -> float:
    """User and system time of this process, of its children, and of the workers that the fork server has seen end."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        fields = Path(f"/proc/{server}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")  # its own and its children's
    return total


if __name__ == "__main__":
    main()
