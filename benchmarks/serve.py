"""Serving on two cores: throughput and latency of the HTTP service, batched and not, exact and approximate.

    python benchmarks/serve.py [--items 100000 1000000] [--index exact hnsw] [--folder DIR] [--keep FILE]

For each size of the catalogue a world is prepared, a small model trained for a moment, and its items embedded and
indexed (kept in --folder, so that a second run starts at once). Then, for each index, two servers are started: one that
computes concurrent requests together, and one with --max-batch 1. Clients in a second process ask over loopback,
histories of 50 raw events, the 10 best items; the two servers take turns, several rounds, and medians are printed.
Beside them a plain loop without a server: torch for the model and faiss for the search (IndexFlatIP, or the same HNSW
graph with the same effort), on events encoded beforehand, one at a time and 32 at a time. It answers with scores
only; the service also gives each item's probability, which exact search pays for with a sum over the catalogue.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from softmax import machine

EVENTS = 50
BODIES = 256
K = 10
LOOP_BATCH = 32


def main() -> None:
    """Print a line per measurement, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--index", nargs="+", default=["exact", "hnsw"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="at most, of one measurement")
    parser.add_argument("--count", type=int, default=2_000, help="requests at most, of one measurement")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/habitus-serve-benchmark"))
    parser.add_argument("--threads", type=int, default=2, help="of a computation, in the servers and in the loop")
    parser.add_argument("--prepare", action="store_true", help="stop once the folder holds all that is needed")
    parser.add_argument("--keep", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for items in options.items:
        folder = prepare(options.folder / str(items), items, options.index)
        for index in [] if options.prepare else options.index:
            rows += measure(folder, items, index, options)
    ratios(rows)
    result = {"benchmark": "serve", **machine(), "threads": options.threads, "events": EVENTS, "k": K, "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def prepare(folder: Path, items: int, indexes: list[str]) -> Path:
    """A folder with a dataset, a trained run with its vectors and indexes, and request bodies."""
    from habitus.data import Dataset, PrepareOptions
    from habitus.data.from_world import prepare_world
    from habitus.events.world import World, WorldConfig
    from habitus.events.world.writing import schema_of
    from habitus.recipe import Recipe
    from habitus.serving import Retriever
    from habitus.training import TrainOptions, train

    folder.mkdir(parents=True, exist_ok=True)
    world = World(WorldConfig(num_users=3_000, num_items=items, events_per_user=EVENTS + 14, seed=1))
    if not (folder / "dataset").exists():
        options = PrepareOptions(
            seq_len=64, text_len=8, vocabulary_size=4_000, validation_share=0.2, test_share=0, threads=2
        )
        prepare_world(world, schema_of(world), folder / "dataset", options, lambda *_: None)
        print(f"{items:,} items prepared", file=sys.stderr)
    dataset = Dataset.open(folder / "dataset")
    if not (folder / "run" / "record.json").exists():
        model = {"joint_dim": 64, "text_len": 8, "text_depth": 1, "width": 128, "depth": 2, "head_dim": 32}
        steps = {"batch_sequences": 16, "steps": 100, "learning_rate": 3e-3, "precision": "fp32", "seed": 0}
        recipe = Recipe.parse({"data": {"seq_len": 64}, "model": model, "train": steps}, "benchmark")
        train(recipe, dataset, folder / "run", options=TrainOptions(device="cpu", threads=1))
        print("trained", file=sys.stderr)
    for index in indexes:
        began = time.perf_counter()
        Retriever.open(folder / "run", data=folder / "dataset", device="cpu", index=index).close()  # type: ignore[arg-type]
        print(f"{index} opened in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if not (folder / "bodies.json").exists():
        bodies = [json.dumps({"history": history, "k": K}) for history in histories(world)]
        (folder / "bodies.json").write_text(json.dumps(bodies), encoding="utf-8")
    return folder


def histories(world: Any) -> list[list[dict[str, Any]]]:
    """Raw events of some users, the newest `EVENTS` of each, as JSON carries them."""
    events: dict[int, list[dict[str, Any]]] = {}
    for block in world.event_blocks():
        for event in block.to_pylist():
            event["timestamp"] = event["timestamp"].isoformat()
            events.setdefault(event.pop("user_id"), []).append(event)
    return [history[-EVENTS:] for history in list(events.values())[:BODIES]]


def measure(folder: Path, items: int, index: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of both servers for every number of clients, and of the loop."""
    rows = plain_loop(folder, items, index, options)
    threads = ["--threads", str(options.threads)]
    servers = {
        "batched": Server(folder, index, *threads),
        "one at a time": Server(folder, index, *threads, "--max-batch", "1"),
    }
    try:
        for clients in options.clients:
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
            for turn in range(options.rounds + 1):
                for name, server in servers.items():
                    measurement = server.measure(folder, clients, options)
                    if turn:  # the first round warms up
                        rounds[name].append(measurement)
            for name, measurements in rounds.items():
                keys = [key for key in measurements[0] if key != "first_ids"]
                medians = {key: statistics.median(one[key] for one in measurements) for key in keys}
                rows.append({"items": items, "index": index, "mode": name, "clients": clients, **medians})
                show(rows[-1])
    finally:
        for server in servers.values():
            server.process.kill()
            server.process.wait()
    return rows


class Server:
    """`habitus serve` in a process of its own."""

    def __init__(self, folder: Path, index: str, *more: str) -> None:
        run = [str(folder / "run"), "--port", "0", "--device", "cpu", "--index", index, "--read-only"]
        self.process = subprocess.Popen([sys.executable, "-m", "habitus", "serve", *run, *more], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        match = re.search(r":(\d+)$", line.strip())
        assert match, line
        self.port = match[1]

    def measure(self, folder: Path, clients: int, options: argparse.Namespace) -> dict[str, Any]:
        """What one client process measured, and the server's processor time per request."""
        before, batches = processor_seconds(self.process.pid), self.batches()
        client = Path(__file__).with_name("serve_client.py")
        sizes = [str(clients), str(options.seconds), str(options.count)]
        done = subprocess.run(
            [sys.executable, str(client), self.port, str(folder / "bodies.json"), *sizes],
            stdout=subprocess.PIPE,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout)
        result["server_cpu_ms"] = 1e3 * (processor_seconds(self.process.pid) - before) / result["requests"]
        result["batch_size"] = result["requests"] / max(1, self.batches() - batches)
        result["load"] = os.getloadavg()[0]  # of the whole machine: above 2, others compute here too
        result["client_cpu_ms"] = 1e3 * result.pop("client_cpu_s") / result["requests"]
        return result

    def batches(self) -> int:
        """Batches computed so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            match = re.search(rb'batch_size_count{lane="recommend"} (\S+)', answer.read())
        return int(float(match[1])) if match else 0


def plain_loop(folder: Path, items: int, index: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same model and catalogue in a loop: encoded events in, the 10 best rows out."""
    import faiss
    import torch

    from habitus.model import batch_tensors
    from habitus.serving import Retriever, pack_histories

    retriever = Retriever.open(folder / "run", device="cpu", index=index, read_only=True)  # type: ignore[arg-type]
    bodies = [json.loads(body)["history"] for body in json.loads((folder / "bodies.json").read_text())]
    encoded = [retriever.encode_history(history) for history in bodies]
    table = retriever.candidates.trained_vectors[0]
    if index == "exact":
        search = faiss.IndexFlatIP(table.shape[1])
        search.add(table.numpy())
        parameters = None
    else:
        search, parameters = retriever.index.index, retriever.index.search_parameters()  # type: ignore[attr-defined]
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)

    def answer(histories: list[Any]) -> np.ndarray:
        batch, windows, slots = pack_histories(histories, retriever.encoder.fields)
        events = table[torch.from_numpy(batch.items)]
        with torch.no_grad():
            queries = retriever.bundle.model.queries(batch_tensors(batch, torch.device("cpu")), events)
        vectors = queries[torch.from_numpy(windows), torch.from_numpy(slots)].numpy()
        return np.asarray(search.search(vectors, K, params=parameters)[1])

    rows = []
    for size in (1, LOOP_BATCH):
        rates, times = [], []
        for turn in range(options.rounds + 1):
            began, done, steps = time.perf_counter(), 0, []
            while done < options.count and time.perf_counter() - began < options.seconds:
                at = done % (len(encoded) - size + 1)
                step = time.perf_counter()
                answer(encoded[at : at + size])
                steps.append(time.perf_counter() - step)
                done += size
            if turn:
                rates.append(done / (time.perf_counter() - began))
                times.append(1e3 * np.percentile(steps, [50, 95, 99]))
        p50, p95, p99 = np.median(times, axis=0).tolist()
        name = f"loop, {size} at a time"
        rows.append({"items": items, "index": index, "mode": name, "clients": 0, "per_s": statistics.median(rates)})
        rows[-1] |= {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99, "recall_at_10": retriever.index_info.recall_at_10}
        show(rows[-1])
    return rows


def ratios(rows: list[dict[str, Any]]) -> None:
    """Print what batching and the approximate index are worth at the largest number of clients."""
    most = max((row["clients"] for row in rows), default=0)
    by_mode = {(row["items"], row["index"], row["mode"]): row for row in rows if row["clients"] == most}
    for (items, index, mode), row in by_mode.items():
        if mode != "batched":
            continue
        alone, exact = by_mode[items, index, "one at a time"], by_mode.get((items, "exact", "batched"), row)
        print(
            f"{items:>9,} {index:<6} {most} clients: batched {row['per_s'] / alone['per_s']:.1f} times one at a time "
            f"({alone['server_cpu_ms'] / row['server_cpu_ms']:.1f} by processor time), "
            f"{row['per_s'] / exact['per_s']:.1f} times exact ({exact['server_cpu_ms'] / row['server_cpu_ms']:.1f})"
        )


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(row: dict[str, Any]) -> None:
    cpu = (
        f"{row['server_cpu_ms']:7.2f} ms of server CPU, {row['batch_size']:.1f} a batch"
        if "server_cpu_ms" in row
        else ""
    )
    times = "".join(f"{row[name]:8.1f}" for name in ("p50_ms", "p95_ms", "p99_ms"))
    print(
        f"{row['items']:>9,} {row['index']:<6} {row['mode']:<20} {row['clients']:>3} clients "
        f"{row['per_s']:8.1f}/s  p50 p95 p99 {times} ms {cpu}",
        flush=True,
    )


if __name__ == "__main__":
    main()
