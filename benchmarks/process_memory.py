"""What each of several processes holds on CPUs: item fields, frozen vectors, candidates and memory, both stages.

Run: python benchmarks/process_memory.py [--items 1000000] [--processes 1 2 4] [--out FILE]
Every process trains a few steps in the plain way (gloo). `held` are the bytes that belong to its items: encoded fields
in stage 1, vectors in stage 2. `candidates` are the rows that it scores. Memory is the peak of the steps: `private`,
which no other process shares, sampled every few milliseconds, and `resident`, in which the mapped files of the dataset
are counted once in every process. Both are also given without what the process had before it read an item. Shown is
the largest over the processes, and the processor time of a step, added up over them. Prints a table, ends with one
JSON line, kept in benchmarks/results/several-processes-cpu.json.
"""

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from train import make_data

TIMED = 6  # further steps, for their processor time
STEPS, BATCH, NUM_NEGATIVES = 3, 8, 65_536
MODEL = {"joint_dim": 64, "text_len": 16, "text_depth": 1, "width": 64, "depth": 2, "head_dim": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=1_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "habitus-process-memory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=["parent", "1", "2"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(child(arguments.child, arguments)), flush=True)
        os._exit(0)  # all is said; nothing should wait for threads of a process group
    began = time.perf_counter()
    make_data(arguments.data, arguments.items, arguments.users)
    (built,) = in_processes("parent", 1, arguments)
    result = {"benchmark": "process_memory", "date": datetime.date.today().isoformat(), "items": arguments.items}
    result |= {"model": MODEL, "batch_sequences": BATCH, "num_negatives": NUM_NEGATIVES, **built, "rows": []}
    for stage in ("1", "2"):
        for world in arguments.processes:
            rows = in_processes(stage, world, arguments)
            row = {name: max(one[name] for one in rows) for name in rows[0]}
            row["cpu_s"] = round(sum(one["cpu_s"] for one in rows), 1)
            row["step_cpu_s"] = round(sum(one["step_cpu_s"] for one in rows), 4)
            result["rows"].append({"stage": int(stage), "processes": world, **row})
            print(json.dumps(result["rows"][-1]), flush=True)
    result["seconds"] = round(time.perf_counter() - began, 1)
    show(result["rows"])
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def show(rows: list[dict[str, Any]]) -> None:
    print("\nstage processes   held MB  candidates  private MB (peak, added)  resident MB (peak, added)  cpu s/step")
    for row in rows:
        held, candidates = row["held_bytes"] / 1e6, row["candidates"]
        memory = [row[name] / 1e6 for name in ("private_peak", "private_added", "resident_peak", "resident_added")]
        print(f"{row['stage']:5} {row['processes']:9} {held:9.1f} {candidates:11,}", end="")
        print("    {:10.0f} {:10.0f}    {:11.0f} {:10.0f}".format(*memory), f"  {row['step_cpu_s']:10.3f}")


def in_processes(part: str, world: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each of so many processes says of a part."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--child", part, "--data", str(arguments.data)]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world)}

    def run(rank: int) -> dict[str, Any]:
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                row: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return row
        raise RuntimeError(f"process {rank} of {world}, {part}: {done.stderr[-2000:]}")

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


# In processes of their own ------------------------------------------------------------------------------------------


def child(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from habitus.data import Dataset
    from habitus.evaluation import join_ranks
    from habitus.model import build_cache, load_bundle
    from habitus.training import TrainOptions, train

    dataset, parent = Dataset.open(arguments.data, verify=False), Path(f"{arguments.data}-parent")
    if part == "parent":
        if not (parent / "catalogue" / "manifest.json").exists():
            options = TrainOptions(device="cpu", threads=1, card=False, resume=True)
            train(recipe_of(dataset), dataset, parent, options=options)
            build_cache(load_bundle(parent), dataset, parent / "catalogue")
        return {"events": dataset.num_events}
    with join_ranks("cpu") as (ranks, _):
        return measure(int(part), dataset, parent, ranks)


def recipe_of(dataset: Any, **train: Any) -> Any:
    from habitus.recipe import Recipe

    values = {"batch_sequences": BATCH, "steps": STEPS + TIMED, "learning_rate": 3e-3, "precision": "fp32"} | train
    evaluate = {"queries": 100, "regimes": ["batch"]}
    recipe = {"data": {"seq_len": dataset.seq_len}, "model": MODEL, "train": values, "evaluate": evaluate}
    return Recipe.parse(recipe, "the benchmark's recipe")


def measure(stage: int, dataset: Any, parent: Path, ranks: Any) -> dict[str, Any]:
    """Steps of one stage by this process, and what it held."""
    import torch

    from habitus.model import BehaviorModel, EmbeddingCache, load_bundle
    from habitus.training.batches import HostBatches
    from habitus.training.items import FrozenVectors
    from habitus.training.step import EagerEngine

    torch.set_num_threads(1)
    cpu, vectors = torch.device("cpu"), None
    recipe = recipe_of(dataset)
    model = BehaviorModel(dataset.fields, recipe.model)
    cache = None
    if stage == 2:
        bundle = load_bundle(parent)
        cache = EmbeddingCache.open(parent / "catalogue", bundle, dataset, verify=False)
        model = bundle.model.freeze().train()
        recipe = recipe_of(dataset, stage=2, parent="0" * 64, num_negatives=NUM_NEGATIVES)
    ranks.barrier()
    before = memory_now()
    with Peaks() as peaks:
        if cache is not None:
            vectors = FrozenVectors(cache, cpu, ranks=ranks)
        batches = HostBatches(dataset, recipe, cpu, ranks, 1)
        engine = EagerEngine(model, dataset, recipe, batches, vectors)
        for step in range(STEPS):
            engine.step(step)
    began = time.process_time()
    for step in range(STEPS, STEPS + TIMED):
        engine.step(step)
    step_cpu = (time.process_time() - began) / TIMED
    problems = [result.problem for result in engine.results() if result.problem]
    assert not problems, problems
    first = batches.read(0)
    candidates = len(first.own_targets) + (0 if first.own_extras is None else len(first.own_extras))
    if vectors is None:
        held = engine.stage.items.held
        assert held is not None and held.tokens is not None
        held_bytes = held.tokens.nbytes + sum(values.nbytes for values in held.fields.values())
    else:
        assert vectors.table is not None
        held_bytes = vectors.table.nbytes
    ranks.barrier()
    return {
        "held_bytes": held_bytes,
        "candidates": candidates,
        "private_peak": peaks.private,
        "private_added": peaks.private - before[0],
        "resident_peak": peaks.resident,
        "resident_added": peaks.resident - before[1],
        "step_cpu_s": step_cpu,
        "cpu_s": time.process_time(),
    }


def memory_now() -> tuple[int, int]:
    """(private, resident) bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))
    }
    return values["RssAnon"], values["VmRSS"]


class Peaks:
    """The most private and resident bytes within a block."""

    def __enter__(self) -> "Peaks":
        self.private, self.resident = memory_now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            private, resident = memory_now()
            self.private, self.resident = max(self.private, private), max(self.resident, resident)


if __name__ == "__main__":
    main()
