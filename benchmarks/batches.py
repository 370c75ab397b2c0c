"""How fast a warm dataset hands out batches: targets, positions, segments, boundaries and event fields included.

    python benchmarks/batches.py

Compared in the same run with the least that any batch costs: gathering the records of as many events by index. One
process, numpy. The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
from prepare import hardware

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=60_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--batch-sequences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world = World(WorldConfig(num_users=arguments.users, num_items=arguments.items))
        prepare_world(world, WORLD_SCHEMA, Path(folder) / "d", PrepareOptions(test_share=0, threads=2), lambda *_: None)
        dataset = Dataset.open(Path(folder) / "d")
        rows = [
            measure("train", dataset, arguments.batch_sequences, arguments.rounds),
            measure("validation", dataset, arguments.batch_sequences, arguments.rounds),
        ]
        print(f"{dataset.num_events:,} events, {dataset.num_items:,} items, {len(dataset.fields.event)} event fields")
    print(
        f"{'split':>12}  {'µs a batch':>10}  {'M events/s':>10}  {'spread':>13}  {'bare gather µs':>14}  {'ratio':>6}"
    )
    for row in rows:
        spread = f"{row['slowest_mevents']:.0f}..{row['fastest_mevents']:.0f}"
        print(
            f"{row['split']:>12}  {row['batch_us']:>10.0f}  {row['mevents']:>10.1f}  {spread:>13}  "
            f"{row['bare_us']:>14.1f}  {row['batch_us'] / row['bare_us']:>6.1f}"
        )
    print(
        json.dumps(
            {"benchmark": "batches", "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), "rows": rows}
        )
    )


def measure(split: str, dataset: Dataset, batch_sequences: int, rounds: int) -> dict[str, float | str]:
    slots = batch_sequences * dataset.seq_len
    index = np.concatenate([np.arange(n, n + dataset.seq_len) for n in range(0, slots * 3, dataset.seq_len * 3)])
    batches = max(20, min(100, dataset.num_batches(split, batch_sequences)))
    batch_us, bare_us = [], []
    for _ in range(rounds + 1):
        batch_us.append(timed(lambda n: dataset.batch(split, batch_sequences, position=n), batches))
        bare_us.append(timed(lambda _: dataset.records.take(index), batches))
    batch_us, bare_us = batch_us[1:], bare_us[1:]  # the first round warms up
    return {
        "split": split,
        "batch_us": median(batch_us),
        "mevents": slots / median(batch_us),
        "slowest_mevents": slots / max(batch_us),
        "fastest_mevents": slots / min(batch_us),
        "bare_us": median(bare_us),
    }


def timed(call, times: int) -> float:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    for number in range(times):
        call(number)
    return (time.perf_counter() - began) / times * 1e6


if __name__ == "__main__":
    main()
