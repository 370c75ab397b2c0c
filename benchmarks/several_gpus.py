"""What one GPU can show of training on several: the same code path in a process group of one.

Run: python benchmarks/several_gpus.py [--parts 1e15 1e16 1e17 1e18 stage2 train fsdp gloo] [--out FILE] [--device cpu]
  1e15 … 1e18   captured and compiled steps without a group and in a group of one with NCCL, by turns: speed and losses
  stage2        the same with a table of 10^8 vectors of width 128 in bfloat16 and K = 2,097,152 extra negatives
  train         `train` from start to Record in such a group, evaluation included, against one without
  fsdp          ten steps with weights sharded by FSDP2 over a mesh of one, against ten without
  gloo          ten steps of both stages by two processes on the one GPU, by way of gloo, against one process
On a CPU (--device cpu) only the last two run. Each part is a process of its own with a time limit: one that fails is
told as such and loses no other. First everything is compiled at once, then steps are timed alone. Prints a table, ends
with one JSON line; two to three minutes on an H200. Kept results are benchmarks/results/several-gpus-*.json.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from train import CELLS, draw_from_table, make_data, recipe_of

BLOCKS = {"1e15": 60, "1e16": 40, "1e17": 16, "1e18": 6, "stage2": 8}  # steps of a turn
TURNS = 4
TABLE_ROWS, TABLE_WIDTH, NUM_NEGATIVES = 100_000_000, 128, 1 << 21
TIMED = (*CELLS, "stage2")
UNTIMED = ("train", "fsdp", "gloo")
LIMIT_SECONDS = {"cuda": 75.0, "cpu": 900.0}  # of one part, which may wait for cores on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=[*TIMED, *UNTIMED], choices=[*TIMED, *UNTIMED])
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--users", type=int, default=12_000)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "habitus-several-gpus")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--one-message", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(child(arguments.child, arguments)), flush=True)
        os._exit(0)  # all is said; nothing should wait for threads of a process group
    parts = [part for part in arguments.parts if arguments.device == "cuda" or part in ("fsdp", "gloo")]
    began = time.perf_counter()
    make_data(arguments.data, arguments.items, arguments.users)
    result: dict[str, Any] = {"benchmark": "several_gpus", "date": datetime.date.today().isoformat(), "rows": []}
    if arguments.device == "cuda":
        result |= in_process("machine", arguments)

    def note(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        result["seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with ThreadPoolExecutor(8) as pool:
        warm = [pool.submit(in_process, f"warm-{part}", arguments) for part in TIMED if part in parts]
        untimed = [pool.submit(in_process, part, arguments) for part in UNTIMED if part in parts]
        for future in untimed:
            note(future.result())
        errors = [row.result() for row in warm]
    for row in errors:
        if "error" in row:
            note(row)
    for part in TIMED:
        if part in parts:
            row = in_process(part, arguments)
            if "error" in row:
                note(row)
                row = in_process(part, arguments, "--one-message")  # were it the exchange during backward
            note(row)
    show(result["rows"])
    print(json.dumps(result))


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'part':8} {'alone':>10} {'in a group':>10} {'ratio':>7}  losses differ by at most (relative)")
    for row in rows:
        if "error" in row:
            print(f"{row['part']:8} failed: {row['error'].strip().splitlines()[-1][:140]}")
            continue
        times = [f"{row[name]:8.3f}ms" if name in row else " " * 10 for name in ("alone_ms", "group_ms")]
        ratio = f"{row['ratio']:7.3f}" if "ratio" in row else " " * 7
        print(f"{row['part']:8} {times[0]} {times[1]} {ratio}  {row.get('losses_differ', math.nan):.1e}")


def in_process(part: str, arguments: argparse.Namespace, *flags: str, **environment: str) -> dict[str, Any]:
    """The row of a part, from a fresh process."""
    if part == "gloo":
        return two_processes(arguments)
    command = [sys.executable, __file__, "--child", part, "--data", str(arguments.data), "--device", arguments.device]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    inherited |= {"PYTHONPYCACHEPREFIX": f"{arguments.data}-bytecode", "GLOO_SOCKET_IFNAME": "lo"}
    inherited |= {"TORCHINDUCTOR_CACHE_DIR": f"{arguments.data}-kernels", "NCCL_SOCKET_IFNAME": "lo"}
    limit = LIMIT_SECONDS[arguments.device]
    try:
        done = subprocess.run(
            [*command, *flags], capture_output=True, text=True, env=inherited | environment, timeout=limit
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode()[-1500:] if error.stderr else ""
        return {"part": part, "error": f"{said}\nno result after {limit:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            row: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return row
    return {"part": part, "error": (done.stderr or done.stdout or f"exit code {done.returncode}")[-2000:]}


def two_processes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both stages by two processes against one."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        ranks = [
            pool.submit(
                in_process, "gloo-run", arguments, "--out", folder, **common, RANK=str(rank), LOCAL_RANK=str(rank)
            )
            for rank in range(2)
        ]
        alone = pool.submit(in_process, "gloo-run", arguments, "--out", f"{folder}/alone").result()
        rows = [rank.result() for rank in ranks]
    for row in (*rows, alone):
        if "error" in row:
            return {**row, "part": "gloo"}
    differences = {name: largest(rows[0][name], alone[name]) for name in ("stage1", "stage2")}
    differ = {"losses_differ": max(differences.values()), "batch_loss": [rows[0]["batch_loss"], alone["batch_loss"]]}
    return {"part": "gloo", "steps": 10, **differences, **differ, "processes": rows[0]["processes"]}


def largest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


# In processes of their own ------------------------------------------------------------------------------------------


def child(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    if part == "machine":
        return {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "nccl": torch.cuda.nccl.version()}
    if part == "fsdp":
        return fsdp(arguments)
    if part == "train":
        return whole_run(arguments)
    if part == "gloo-run":
        return both_stages(arguments)
    return timed(part.removeprefix("warm-"), arguments, only_warm=part.startswith("warm-"))


def join_group_of_one(device: str) -> None:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def timed(part: str, arguments: argparse.Namespace, *, only_warm: bool) -> dict[str, Any]:
    """Steps without a group and in a group of one, by turns."""
    import torch

    from habitus.data import Dataset
    from habitus.evaluation import Ranks
    from habitus.model import BehaviorModel
    from habitus.training import cuda_graph

    if arguments.one_message:
        exchange = cuda_graph.GradientExchange
        cuda_graph.GradientExchange = lambda parameters, overlapped: exchange(parameters, overlapped=False)  # type: ignore[assignment,misc]
    dataset, device = Dataset.open(arguments.data, verify=False), torch.device("cuda", 0)
    block = BLOCKS[part]
    arguments.steps, arguments.optimizer = block * TURNS + 3, "adamw"
    recipe, table = recipe_of("1e17" if part == "stage2" else part, dataset, arguments), None
    if part == "stage2":
        update = {"stage": 2, "parent": "0" * 64, "batch_sequences": 64, "num_negatives": 100_000}
        model = recipe.model.model_copy(update={"joint_dim": TABLE_WIDTH})
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=update), "model": model})
        generator = torch.Generator(device).manual_seed(0)
        rows = TABLE_ROWS if not only_warm else 4 * NUM_NEGATIVES
        table = torch.empty(rows, TABLE_WIDTH, dtype=torch.bfloat16, device=device)
        for some in table.split(1 << 22):
            some.normal_(generator=generator)

    def engine() -> Any:
        model = BehaviorModel(dataset.fields, recipe.model, seed=0).to(device)
        if table is not None:
            model.freeze()
        made = cuda_graph.CapturedEngine(model, dataset, recipe, device, table, compiled=True, ranks=Ranks())
        if table is not None:
            draw_from_table(made.stage, len(table), NUM_NEGATIVES)
        return made

    engines = {"alone": engine()}
    losses: dict[str, list[float]] = {"alone": run_steps(engines["alone"], 0, 3)[1]}
    if only_warm:
        return {"part": f"warm-{part}"}
    join_group_of_one("cuda")
    engines["group"] = engine()
    assert (engines["alone"].exchange is None) and engines["group"].exchange is not None
    losses["group"] = run_steps(engines["group"], 0, 3)[1]
    times: dict[str, list[float]] = {"alone": [], "group": []}
    for turn in range(TURNS):
        for name in ("alone", "group") if turn % 2 else ("group", "alone"):
            spent, some_losses = run_steps(engines[name], 3 + turn * block, block)
            times[name].append(1e3 * spent / block)
            losses[name] += some_losses
    alone_ms, group_ms = (statistics.median(times[name]) for name in ("alone", "group"))
    events = engines["alone"].order.totals(3, block * TURNS)["events"] / (block * TURNS)
    row = {
        "part": part,
        "steps": 3 + block * TURNS,
        "alone_ms": round(alone_ms, 3),
        "group_ms": round(group_ms, 3),
        "ratio": round(group_ms / alone_ms, 4),
        "turns_ms": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "events_per_s": round(1e3 * events / group_ms),
        "losses_differ": largest(losses["group"], losses["alone"]),
        "first_losses": [losses["group"][0], losses["alone"][0]],
        "last_losses": [losses["group"][-1], losses["alone"][-1]],
        "device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "exchange": "one message" if arguments.one_message else "during backward",
    }
    if table is not None:
        row |= {"table": [len(table), TABLE_WIDTH, "bf16"], "table_gib": round(table.nbytes / 2**30, 2)}
        row["num_negatives"] = NUM_NEGATIVES
    return row


def run_steps(engine: Any, first: int, count: int) -> tuple[float, list[float]]:
    """Seconds and losses of some steps."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(first, first + count):
        engine.step(step)
    results = engine.results(wait=True)
    spent = time.perf_counter() - began
    problems = [result.problem for result in results if result.problem]
    if problems:
        raise RuntimeError(problems[0])
    return spent, [result.loss for result in results]


def small_recipe(dataset: Any, **train: Any) -> Any:
    from habitus.recipe import Recipe

    model = {"joint_dim": 32, "text_len": 8, "text_depth": 1, "width": 64, "depth": 2, "head_dim": 32}
    values = {"batch_sequences": 16, "steps": 10, "learning_rate": 3e-3, "precision": "fp32"} | train
    recipe = {"data": {"seq_len": dataset.seq_len}, "model": model, "train": values, "evaluate": {"queries": 500}}
    return Recipe.parse(recipe, "the benchmark's recipe")


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def fsdp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ten steps with and without sharded weights, on a mesh of one."""
    from habitus.data import Dataset
    from habitus.training import TrainOptions, train

    dataset, row = Dataset.open(arguments.data, verify=False), {"part": "fsdp", "steps": 10}
    with tempfile.TemporaryDirectory() as folder:
        for group in ("alone", "group"):
            if group == "group":
                join_group_of_one(arguments.device)
            for optimizer in ("adamw", "muon"):
                recipe, out = small_recipe(dataset, optimizer=optimizer), Path(folder) / f"{group}-{optimizer}"
                notes: list[str] = []
                options = TrainOptions(device=arguments.device, capture=False, shard=group == "group", card=False)
                record = train(recipe, dataset, out, options=options, note=notes.append)
                row[f"{group}_{optimizer}"] = losses_of(out)
                row[f"{group}_{optimizer}_batch_loss"] = record.metrics["batch/loss"].value
                if group == "group":
                    assert any("sharded over 1 process" in note for note in notes), notes
    differences = {name: largest(row[f"group_{name}"], row[f"alone_{name}"]) for name in ("adamw", "muon")}
    return {**row, **differences, "losses_differ": max(differences.values())}


def whole_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """`train` from start to Record, captured, in a group of one and without."""
    from habitus.data import Dataset
    from habitus.training import TrainOptions, train

    dataset, row = Dataset.open(arguments.data, verify=False), {"part": "train"}
    with tempfile.TemporaryDirectory() as folder:
        for group in ("alone", "group"):
            if group == "group":
                join_group_of_one(arguments.device)
            out = Path(folder) / group
            options = TrainOptions(device=arguments.device, compile=False, capture=True, save_every=40, card=False)
            record = train(small_recipe(dataset, steps=100), dataset, out, options=options)
            row[group] = {"engine": record.hardware["engine"], "batch_loss": record.metrics["batch/loss"].value}
            row[f"{group}_losses"] = losses_of(out)
    row["losses_differ"] = largest(row.pop("group_losses"), row.pop("alone_losses"))
    return row


def both_stages(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ten steps of both stages by the processes that the environment tells of."""
    from habitus.data import Dataset
    from habitus.evaluation import join_ranks
    from habitus.training import TrainOptions, train

    dataset = Dataset.open(arguments.data, verify=False)
    with join_ranks(arguments.device) as (ranks, device):
        options = TrainOptions(device=str(device), capture=False, card=False)
        one, two = arguments.out / "one", arguments.out / "two"
        parent = train(small_recipe(dataset), dataset, one, options=options)
        num_negatives = min(4096, dataset.num_items // 2)
        recipe = small_recipe(dataset, stage=2, parent=parent.recipe_hash, num_negatives=num_negatives)
        record = train(recipe, dataset, two, parent=one, options=options)
        row = {"part": "gloo", "rank": ranks.rank, "processes": record.hardware["processes"]}
        row |= {"stage1": losses_of(one), "stage2": losses_of(two), "batch_loss": record.metrics["batch/loss"].value}
        ranks.barrier()
    return row


if __name__ == "__main__":
    main()
