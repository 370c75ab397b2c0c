"""How long `prepare` takes and how much memory, against plain DuckDB sorting and writing the same table.

    python benchmarks/prepare.py                     # 10^7 and 10^8 events, as the results are kept
    python benchmarks/prepare.py --events 1000000    # a quick look

Every measurement is a process of its own, so that its peak memory is its own. The last line is JSON.
"""

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

SCHEMA = """
[events]
user = "user_id"
item = "item_id"
timestamp = "timestamp"

[events.fields]
event_type = "category"
price = "number"

[items]
item = "item_id"

[items.fields]
title = "text"
category = "category"
price = "number"
"""
ITEM_PHASES = {"surveying items", "training the tokenizer", "encoding items"}  # all others are the events'
ITEMS_OF = {10**7: 10**5, 10**8: 10**6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[10**7, 10**8])
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--folder", type=Path, help="where the tables are made (default: a temporary folder)")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure_here(arguments.one[0], Path(arguments.one[1]), arguments.memory)
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for num_events in arguments.events:
            place = Path(folder) / str(num_events)
            make_tables(place, num_events, ITEMS_OF.get(num_events, max(1000, num_events // 100)))
            rows.append({"events": num_events, "memory": arguments.memory})
            repeats = 3 if num_events <= 10**7 else 1  # short runs are noisy: alternate, and keep the median of each
            runs = [
                (measure("duckdb", place, arguments.memory), measure("prepare", place, arguments.memory))
                for _ in range(repeats)
            ]
            rows[-1]["duckdb"] = sorted((plain for plain, _ in runs), key=lambda run: run["seconds"])[repeats // 2]
            rows[-1]["prepare"] = sorted((ours for _, ours in runs), key=lambda run: run["event_seconds"])[repeats // 2]
            shutil.rmtree(place)
    report(rows)


def make_tables(place: Path, num_events: int, num_items: int) -> None:
    """A log in time order: heavy-tailed users and items, so that sorting by user moves every row."""
    import duckdb

    place.mkdir(parents=True)
    (place / "schema.toml").write_text(SCHEMA)
    with duckdb.connect(":memory:", config={"threads": 2, "memory_limit": "4GiB"}) as con:
        con.execute("SELECT setseed(0.5)").fetchall()
        con.execute(
            f"COPY (SELECT CAST(pow(random(), 2) * {num_events // 100} AS BIGINT) AS user_id, "
            f"CAST(pow(random(), 3) * {num_items - 1} AS BIGINT) AS item_id, "
            "TIMESTAMP '2024-01-01' + to_milliseconds(range * 300) AS timestamp, "
            "['view', 'click', 'purchase'][1 + CAST(floor(random() * 3) AS BIGINT)] AS event_type, "
            f"CAST(random() * 100 AS FLOAT) AS price FROM range({num_events})) "
            f"TO '{place}/events.parquet' (FORMAT parquet)"
        )
        con.execute(
            "COPY (SELECT range AS item_id, concat('item ', md5(CAST(range AS VARCHAR))[:6], ' of kind ', range % 997) "
            "AS title, concat('category ', range % 200) AS category, CAST(random() * 100 AS FLOAT) AS price "
            f"FROM range({num_items})) TO '{place}/items.parquet' (FORMAT parquet)"
        )


def measure(what: str, place: Path, memory: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory", memory, "--one", what, str(place)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def measure_here(what: str, place: Path, memory: str) -> None:
    began = time.perf_counter()
    phases = sort_plainly(place, memory) if what == "duckdb" else prepare_here(place, memory)
    seconds = time.perf_counter() - began
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": seconds, "peak_gib": peak_gib, **phases}))


def sort_plainly(place: Path, memory: str) -> dict[str, float]:
    import duckdb

    config = {"threads": 2, "memory_limit": memory, "temp_directory": str(place / "spill")}
    with duckdb.connect(":memory:", config=config) as con:
        con.execute(
            f"COPY (SELECT * FROM '{place}/events.parquet' ORDER BY user_id, timestamp) "
            f"TO '{place}/sorted.parquet' (FORMAT parquet)"
        )
    (place / "sorted.parquet").unlink()
    return {}


def prepare_here(place: Path, memory: str) -> dict[str, float]:
    from habitus.data import PrepareOptions, prepare
    from habitus.events import Schema

    spent: dict[str, float] = {}
    current, since = "importing", time.perf_counter()

    def progress(phase: str, _: float) -> None:
        nonlocal current, since
        if phase and phase != current:
            now = time.perf_counter()
            spent[current] = spent.get(current, 0.0) + now - since
            current, since = phase, now

    prepare(
        f"{place}/events.parquet",
        f"{place}/items.parquet",
        Schema.read(place / "schema.toml"),
        place / "dataset",
        PrepareOptions(memory=memory, test_share=0, threads=2),
        progress,
    )
    progress("end", 1.0)
    shutil.rmtree(place / "dataset")
    item_side = sum(seconds for phase, seconds in spent.items() if phase in ITEM_PHASES)
    return {"item_seconds": item_side, "event_seconds": sum(spent.values()) - item_side, "phases": spent}


def report(rows: list[dict]) -> None:
    head = ("events", "DuckDB s", "GiB", "prepare: events s", "items s", "GiB", "events / DuckDB")
    print(("{:>12}  {:>9} {:>5}  {:>17} {:>8} {:>5}  {:>15}").format(*head))
    for row in rows:
        ours, plain = row["prepare"], row["duckdb"]
        row["event_ratio"] = ours["event_seconds"] / plain["seconds"]
        print(
            f"{row['events']:>12,}  {plain['seconds']:>9.1f} {plain['peak_gib']:>5.2f}  {ours['event_seconds']:>17.1f} "
            f"{ours['item_seconds']:>8.1f} {ours['peak_gib']:>5.2f}  {row['event_ratio']:>14.2f}×"
        )
    result = {"benchmark": "prepare", "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), "rows": rows}
    if len(rows) > 1:
        growth = {w: rows[-1][w][k] / rows[0][w][k] for w, k in (("duckdb", "seconds"), ("prepare", "event_seconds"))}
        result["growth_over_duckdb"] = growth["prepare"] / growth["duckdb"]
        print(
            f"growth from {rows[0]['events']:,} to {rows[-1]['events']:,} events: DuckDB {growth['duckdb']:.1f}×, "
            f"prepare {growth['prepare']:.1f}×, ratio {result['growth_over_duckdb']:.2f}"
        )
    print(json.dumps(result))


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return f"{model}, 2 threads, {platform.system()}"


if __name__ == "__main__":
    main()
