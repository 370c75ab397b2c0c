"""How fast a warm dataset hands out batches: targets, positions, segments, boundaries and event fields included.

    python benchmarks/batches.py --seq-lens 64,256,1024
    python benchmarks/batches.py --seq-lens 64,256,1024 --against 2c39af9

Compared in the same run with the least that any batch costs: gathering the records of as many events by index; with
--against also with the batches of an earlier revision, in turns, whose arrays must be equal. One process, numpy. The
last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
from prepare import hardware

from habitus.data import Batch, Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.store import SplitName


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=60_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--batch-sequences", type=int, default=64)
    parser.add_argument("--seq-lens", default="256", help="events per window; batches keep the slots of 256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", help="a git revision whose dataset.py and slots.py are measured beside, in turns")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world = World(WorldConfig(num_users=arguments.users, num_items=arguments.items))
        prepare_world(world, WORLD_SCHEMA, Path(folder) / "d", PrepareOptions(test_share=0, threads=2), lambda *_: None)
        dataset = Dataset.open(Path(folder) / "d")
        before = earlier_dataset(arguments.against).open(dataset.path) if arguments.against else None
        rows = []
        for seq_len in map(int, arguments.seq_lens.split(",")):
            windows = max(1, arguments.batch_sequences * dataset.manifest.seq_len // seq_len)
            splits: tuple[SplitName, ...] = ("train", "validation")
            for split in splits:
                earlier = None if before is None else before.with_seq_len(seq_len)
                rows.append(measure(split, dataset.with_seq_len(seq_len), windows, arguments.rounds, earlier))
        print(f"{dataset.num_events:,} events, {dataset.num_items:,} items, {len(dataset.fields.event)} event fields")
    header = (
        "split",
        "events",
        "filled",
        "µs a batch",
        "M events/s",
        "spread",
        "of CPU",
        "best",
        "bare gather µs",
        "ratio",
        "before, of CPU",
    )
    widths = (12, 6, 6, 10, 10, 13, 6, 6, 14, 6, 14)
    print("  ".join(name.rjust(width) for name, width in zip(header, widths, strict=True)))
    for row in rows:
        cells = (
            row["split"],
            f"{row['seq_len']}",
            f"{row['filled']:.1%}",
            f"{row['batch_us']:.0f}",
            f"{row['mevents']:.1f}",
            f"{row['slowest_mevents']:.0f}..{row['fastest_mevents']:.0f}",
            f"{row['cpu_mevents']:.1f}",
            f"{row['fastest_cpu_mevents']:.1f}",
            f"{row['bare_us']:.1f}",
            f"{row['batch_us'] / row['bare_us']:.1f}",
            f"{row['before_cpu_mevents']:.1f}" if "before_cpu_mevents" in row else "",
        )
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    print(
        json.dumps(
            {"benchmark": "batches", "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), "rows": rows}
        )
    )


def measure(
    split: SplitName, dataset: Dataset, batch_sequences: int, rounds: int, before: Dataset | None
) -> dict[str, Any]:
    slots = batch_sequences * dataset.seq_len
    index = np.concatenate([np.arange(n, n + dataset.seq_len) for n in range(0, slots * 3, dataset.seq_len * 3)])
    batches = max(20, min(100, dataset.num_batches(split, batch_sequences)))
    if before is not None:
        for number in range(batches):
            check_equal(*(one.batch(split, batch_sequences, position=number) for one in (dataset, before)))
    batch_us, cpu_us, bare_us, before_us = [], [], [], []
    for _ in range(rounds + 1):
        cpu = time.process_time()
        batch_us.append(timed(lambda n: dataset.batch(split, batch_sequences, position=n), batches))
        cpu_us.append((time.process_time() - cpu) / batches * 1e6)
        bare_us.append(timed(lambda _: dataset.records.take(index), batches))
        if before is not None:
            cpu = time.process_time()
            timed(lambda n: before.batch(split, batch_sequences, position=n), batches)
            before_us.append((time.process_time() - cpu) / batches * 1e6)
    # The first round warms up.
    batch_us, cpu_us, bare_us, before_us = batch_us[1:], cpu_us[1:], bare_us[1:], before_us[1:]
    row = {
        "split": split,
        "seq_len": dataset.seq_len,
        "filled": dataset.counts(split).fill(dataset.seq_len),
        "batch_us": median(batch_us),
        "mevents": slots / median(batch_us),
        "slowest_mevents": slots / max(batch_us),
        "fastest_mevents": slots / min(batch_us),
        "cpu_mevents": slots / median(cpu_us),  # per second of CPU: what a busy machine takes away is not counted
        "fastest_cpu_mevents": slots / min(cpu_us),
        "bare_us": median(bare_us),
    }
    return row if before is None else {**row, "before_cpu_mevents": slots / median(before_us)}


def earlier_dataset(revision: str) -> Any:
    """The class Dataset of an earlier revision: two modules, which read the same files and import all else as it is."""
    for name in ("slots", "dataset"):
        path = f"src/habitus/data/{name}.py"
        source = subprocess.run(
            ["git", "show", f"{revision}:{path}"], capture_output=True, text=True, check=True
        ).stdout
        module = sys.modules[f"earlier_{name}"] = ModuleType(f"earlier_{name}")
        exec(compile(source.replace("habitus.data.slots", "earlier_slots"), path, "exec"), module.__dict__)
    return sys.modules["earlier_dataset"].Dataset


def check_equal(one: Batch, other: Batch) -> None:
    for name in ("items", "targets", "positions", "segments", "boundaries", "users"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    for name, values in one.fields.items():
        np.testing.assert_array_equal(values, other.fields[name], strict=True)


def timed(call, times: int) -> float:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    for number in range(times):
        call(number)
    return (time.perf_counter() - began) / times * 1e6


if __name__ == "__main__":
    main()
