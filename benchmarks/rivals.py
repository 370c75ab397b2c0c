"""Rivals on the same test users: RecTools' SASRec and HSTU, RePlay's SasRec, and a plain SASRec of ours.

    python benchmarks/rivals.py train DATASET --rivals plain --out OUT [--settings 0 1 2 3] [--device cpu]
    python benchmarks/rivals.py gpu --logs DIR --minutes 6.5 --out OUT [--slots 14]
    python benchmarks/rivals.py ours RUN DATASET --out OURS/NAME-SEED.npz
    python benchmarks/rivals.py table OUT --ours OURS/*.json [--json FILE]

`train` runs the settings of rivals on one prepared dataset, one after another, in this environment (RecTools and RePlay
each want their own: VENV/bin/python with `src` on PYTHONPATH). `gpu` shares one GPU among all trainings of a folder of
datasets, --slots at a time, a third of them for large catalogues: each has its part of the minutes that are left. A
training goes on until validation stops improving or its time is up; validation picks the setting, which is trained
again on training and validation events, as our runs are. OUT gets a row of JSON and the ranks of the test queries of
each. `ours` writes the same of a run of `habitus train`. `table` compares: recall@10 and NDCG@10 of each rival's best
setting, ours less theirs with a 95% interval over users, and the seconds until our validation curve passed their best.
The last line is JSON.
"""

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RIVALS = {
    "rectools_sasrec": ("rivals_rectools", "sasrec"),
    "rectools_hstu": ("rivals_rectools", "hstu"),
    "replay_sasrec": ("rivals_replay", "sasrec"),
    "plain": ("rivals_plain", "PlainSASRec"),
}
GPU_RIVALS = ("rectools_sasrec", "rectools_hstu", "plain")
TEST_SECONDS = 15.0  # of a training's time, kept for its last evaluation
HUGE_WORK = 2e11  # events times items from which on two settings are tried, not four
REFIT_SHARE = 0.2  # of the minutes, kept for the last refits
METRICS = ("recall@10", "ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("dataset", type=Path)
    train.add_argument("--seconds", type=float, default=300.0, help="of each training, validation included")
    train.add_argument("--device", default="cpu")
    train.add_argument("--validation-queries", type=int, help="those of our runs unless given")
    train.add_argument("--batch", type=int, help="sequences of a step; by the log unless given")
    gpu = commands.add_parser("gpu")
    gpu.add_argument("--logs", type=Path, required=True, help="a folder of prepared datasets")
    gpu.add_argument("--only", nargs="+", help="names of datasets")
    gpu.add_argument("--minutes", type=float, default=6.5)
    gpu.add_argument("--slots", type=int, default=14)
    gpu.add_argument("--device", default="cuda")
    for command, rivals in ((train, ("plain",)), (gpu, GPU_RIVALS)):
        command.add_argument("--rivals", nargs="+", choices=list(RIVALS), default=list(rivals))
        command.add_argument("--settings", type=int, nargs="+", default=[0, 1, 2, 3])
        command.add_argument("--seed", type=int, default=0)
    ours = commands.add_parser("ours")
    ours.add_argument("run", type=Path)
    ours.add_argument("dataset", type=Path)
    ours.add_argument("--device", default="auto")
    for command in (train, gpu, ours):
        command.add_argument("--out", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("out", type=Path, nargs="+", help="folders with rows and ranks of rivals")
    table.add_argument("--ours", type=Path, nargs="*", default=[], help="rows that `ours` wrote; seeds are averaged")
    table.add_argument("--json", type=Path)
    given = parser.parse_args()
    {"train": run_train, "gpu": run_gpu, "ours": run_ours, "table": run_table}[given.command](given)


def run_train(given: argparse.Namespace) -> None:
    """Trainings on one dataset, one after another; the setting that validation picks is refitted."""
    how = {"device": given.device, "seed": given.seed, "batch": given.batch}
    how["validation_queries"] = given.validation_queries
    for rival in given.rivals:
        rows = []
        for number in given.settings:
            rows.append(train_one(given.dataset, rival, number, given.out, given.seconds, **how))
            print(describe(rows[-1]), flush=True)
        if chosen := pick(rows):
            refit = {**how, "refit_passes": chosen["validation"]["passes"]}
            row = train_one(given.dataset, rival, chosen["number"], given.out, given.seconds, **refit)
            print(describe(row), flush=True)


def run_gpu(given: argparse.Namespace) -> None:
    """All trainings of a folder of datasets on one GPU, those with large catalogues beside the others."""
    began = time.monotonic()
    jobs = plan_jobs(given)
    for_large = max(1, given.slots // 3)
    end = time.time() + given.minutes * 60 - TEST_SECONDS
    choice_end = end - given.minutes * 60 * REFIT_SHARE
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    rows: dict[Job, dict[str, Any]] = {}
    with ExitStack() as stack:
        futures, pools = {}, {}
        for large, slots in ((True, for_large), (False, max(1, given.slots - for_large))):
            queue = [job for job in jobs if job.large == large]
            pools[large] = stack.enter_context(ProcessPoolExecutor(slots, multiprocessing.get_context("spawn")))
            for place, job in enumerate(queue):
                share = slots * job.weight / sum(other.weight for other in queue[place:])
                arguments = (job, given.out, choice_end, share, given.device, given.seed)
                futures[pools[large].submit(train_in_time, *arguments)] = job
        while futures:
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                job = futures.pop(future)
                rows[job] = outcome(future, job)
                print(f"{time.monotonic() - began:5.0f} s  {describe(rows[job])}", flush=True)
                others = [other for other in jobs if (other.log, other.rival) == (job.log, job.rival)]
                if job.passes is None and all(other in rows for other in others):
                    chosen = pick([rows[other] for other in others])
                    if chosen:
                        refit = job._replace(setting=chosen["number"], passes=chosen["validation"]["passes"])
                        arguments = (refit, given.out, end, 1.0, given.device, given.seed)
                        futures[pools[job.large].submit(train_in_time, *arguments)] = refit
    failed = sum("failed" in row for row in rows.values())
    print(json.dumps({"trainings": len(rows), "failed": failed, "seconds": round(time.monotonic() - began)}))


def outcome(future: Future[dict[str, Any]], job: "Job") -> dict[str, Any]:
    """The row of a training; one that failed has a row too."""
    try:
        return future.result()
    except Exception as error:  # a worker that died takes the others of its pool with it
        return {"log": job.log.name, "rival": job.rival, "failed": repr(error)[:200]}


def pick(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that validation prefers; None where all failed."""
    rows = [row for row in rows if row.get("validation")]
    return max(rows, key=lambda row: row["validation"]["ndcg@10"]) if rows else None


class Job(NamedTuple):
    """One training: a log, a rival, the number of a setting, and its part of the time."""

    log: Path
    rival: str
    setting: int
    weight: float
    large: bool
    passes: int | None = None  # of a refit on training and validation events


def plan_jobs(given: argparse.Namespace) -> list[Job]:
    """Small logs first, so that what they leave of their time goes to the others; our stand-in last."""
    from rivals_scoring import LARGE_CATALOGUE

    jobs = []
    for file in sorted(given.logs.glob("*/manifest.json")):
        if given.only and file.parent.name not in given.only:
            continue
        manifest = json.loads(file.read_text(encoding="utf-8"))
        events, items = manifest["train"]["events"], manifest["num_items"]
        large = items > LARGE_CATALOGUE
        for rival in given.rivals:
            if large and rival == "plain" and len(given.rivals) > 1:
                continue  # RecTools runs there, and the GPU's time is short
            chosen = given.settings if events * items < HUGE_WORK else given.settings[1:3]
            weight = (events * items / 4e10) ** 0.5 if large else max(1.0, events / 4e5)
            jobs += [Job(file.parent, rival, setting, weight, large) for setting in chosen]
    return sorted(jobs, key=lambda job: (job.rival == "plain" and len(given.rivals) > 1, job.weight))


def train_in_time(job: Job, out: Path, deadline: float, share: float, device: str, seed: int) -> dict[str, Any]:
    """One training with its share of the time left."""
    seconds = (deadline - time.time()) * min(1.0, share)
    if seconds < 5.0:
        return {"log": job.log.name, "rival": job.rival, "setting": str(job.setting), "failed": "no time left"}
    return train_one(job.log, job.rival, job.setting, out, seconds, device=device, seed=seed, refit_passes=job.passes)


def train_one(
    path: Path,
    rival: str,
    number: int,
    out: Path,
    seconds: float,
    *,
    device: str,
    seed: int,
    batch: int | None = None,
    validation_queries: int | None = None,
    refit_passes: int | None = None,
) -> dict[str, Any]:
    """One training; its row and the ranks of its test queries go to `out`."""
    import torch
    from rivals_scoring import SETTINGS, train_rival

    from habitus.data import Dataset

    torch.set_num_threads(1)
    module, name = RIVALS[rival]
    stem = f"{path.name}-{rival}-{number if refit_passes is None else 'refit'}"
    out.mkdir(parents=True, exist_ok=True)
    try:
        build = getattr(importlib.import_module(module), name)
        trained = train_rival(
            rival, build, Dataset.open(path, verify=False), SETTINGS[number], device=device, seconds=seconds,
            batch=batch, validation_queries=validation_queries, seed=seed, refit_passes=refit_passes,
        )  # fmt: skip
    except Exception as error:
        (out / f"{stem}.error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return {"log": path.name, "rival": rival, "setting": str(SETTINGS[number]), "failed": repr(error)[:200]}
    finally:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    values = trained.test
    row = trained.row | {
        "device": device_name(device),
        "date": datetime.date.today().isoformat(),
        "ranks": f"{stem}.npz",
        "number": number,
    }
    save_ranks(out / f"{stem}.npz", values.event, values.user, values.rank)
    write_json(out / f"{stem}.json", row)
    return row


def run_ours(given: argparse.Namespace) -> None:
    """The ranks of a run of ours on the same test queries, and its validation curve over seconds."""
    from rivals_scoring import evaluate_options

    from habitus.data import Dataset
    from habitus.evaluation import ComputeOptions, evaluate_runs, resolve_device

    dataset = Dataset.open(given.dataset, verify=False)
    kept: list[Any] = []
    [evaluation] = evaluate_runs(
        [given.run], dataset, evaluate_options(dataset, "test"),
        ComputeOptions(resolve_device(given.device)), keep=lambda _scorer, _regime, values: kept.append(values),
    )  # fmt: skip
    row = {
        "log": dataset.path.name, "rival": "habitus", "curve": our_curve(given.run),
        "test": {name.partition("/")[2]: metric.to_values() for name, metric in evaluation.metrics.items()},
        "dataset_checksum": dataset.checksum,
        "query_set_checksum": evaluation.specification["catalogue"].query_set_checksum,
        "ranks": given.out.name, "date": datetime.date.today().isoformat(), "device": device_name(given.device),
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_ranks(given.out, kept[0].event, kept[0].user, kept[0].rank)
    write_json(given.out.with_suffix(".json"), row)
    print(describe(row))


def our_curve(run: Path) -> list[dict[str, float]]:
    """Validation over training seconds: the trajectory of the run, or the candidates of `habitus train --data`."""
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    spent = (record.get("seconds") or {}).get("train", 0.0)
    points = [point for point in record.get("trajectory", ()) if point["metric"] == "catalogue/ndcg@10"]
    if len(points) > 1:
        return [{"seconds": spent * point["step"] / record["steps"], "ndcg@10": point["value"]} for point in points]
    choice = run.resolve().parent / "choice.json"
    candidates = json.loads(choice.read_text(encoding="utf-8"))["candidates"] if choice.exists() else []
    ends = np.cumsum([candidate["seconds"] for candidate in candidates])
    return [{"seconds": float(end), "ndcg@10": one["value"]} for end, one in zip(ends, candidates, strict=True)]


def run_table(given: argparse.Namespace) -> None:
    """Ours against the best setting of each rival, log by log."""
    files = [file for folder in given.out for file in sorted(folder.glob("*.json"))]
    rows = [json.loads(file.read_text(encoding="utf-8")) | {"folder": str(file.parent)} for file in files + given.ours]
    compared = []
    for log in sorted({row["log"] for row in rows}):
        ours = [row for row in rows if row["log"] == log and row["rival"] == "habitus"]
        theirs = [row for row in rows if row["log"] == log and row["rival"] != "habitus"]
        if ours:
            means = {name: np.mean([row["test"][name]["value"] for row in ours]) for name in METRICS}
            print(f"{log:20} habitus          {means['recall@10']:.4f}  {means['ndcg@10']:.4f}  ({len(ours)} runs)")
        for rival in sorted({row["rival"] for row in theirs}):
            tried = [row for row in theirs if row["rival"] == rival]
            chosen = pick(tried)
            if chosen:
                compared.append(compare(ours, chosen, refit_of(chosen, tried) or chosen))
                print(line(compared[-1]))
    result = {"benchmark": "rivals", "date": datetime.date.today().isoformat(), "rows": compared}
    if given.json:
        write_json(given.json, result)
    print(json.dumps(result))


def refit_of(chosen: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The refit of a chosen row, if it had the time for all of its passes."""
    keys = ("folder", "setting")
    refits = [row for row in rows if row["refit"] and all(row[key] == chosen[key] for key in keys)]
    return next((row for row in refits if row["stopped"] == "passes"), None)


def compare(ours: list[dict[str, Any]], chosen: dict[str, Any], final: dict[str, Any]) -> dict[str, Any]:
    """A rival's best setting, refitted like ours, the mean of ours less it, and our time to its quality."""
    from habitus.evaluation.metrics import RANKING_METRICS, means

    keys = ("log", "rival", "setting", "stopped", "train_seconds", "device")
    row: dict[str, Any] = {key: chosen[key] for key in keys}
    row["test"] = {name: final["test"][name]["value"] for name in METRICS}
    row["refit"] = final["refit"]
    row["validation"] = chosen["validation"]["ndcg@10"]
    row["runs"] = len(ours)
    if not ours:
        return row
    theirs = load_ranks(final)
    our_ranks = [load_ranks(run) for run in ours]
    for ranks in our_ranks:
        if not np.array_equal(ranks["event"], theirs["event"]):
            raise SystemExit(f"{row['log']}: ours and {row['rival']} answered different queries; use one dataset")
    for name in METRICS:
        metric, _, k = name.partition("@")
        per_query = RANKING_METRICS[metric]
        difference = np.mean([per_query(ranks["rank"], int(k)) for ranks in our_ranks], axis=0)
        difference = difference - per_query(theirs["rank"], int(k))
        [mean] = means(difference[None], theirs["user"])
        half = None if mean.se is None else 1.959964 * mean.se
        row[f"difference {name}"] = [mean.value] if half is None else [mean.value, mean.value - half, mean.value + half]
    reached = [time_to(run["curve"], row["validation"]) for run in ours]
    row["seconds_to_quality"] = None if None in reached or not reached else float(np.median(reached))  # type: ignore[arg-type]
    row["seconds_of_rival"] = time_to(chosen["curve"], row["validation"])
    return row


def time_to(curve: list[dict[str, float]], value: float) -> float | None:
    """Seconds at the first point of a validation curve that reaches a value."""
    return next((point["seconds"] for point in curve if point["ndcg@10"] >= value), None)


def line(row: dict[str, Any]) -> str:
    """A row of the table as text."""
    text = f"{row['log']:20} {row['rival']:16} {row['test']['recall@10']:.4f}  {row['test']['ndcg@10']:.4f}"
    for name in METRICS:
        difference = row.get(f"difference {name}")
        if difference:
            bounds = f" [{difference[1]:+.4f}, {difference[2]:+.4f}]" if len(difference) == 3 else ""
            text += f"  {difference[0]:+.4f}{bounds}"
    to_quality = row.get("seconds_to_quality")
    text += f"  {row['setting']}, {row['train_seconds']:.0f} s, stopped by {row['stopped']}"
    return text + (f"; ours passes its best after {to_quality:.0f} s" if to_quality is not None else "")


def describe(row: dict[str, Any]) -> str:
    """One training in a line."""
    if "failed" in row:
        return f"{row['log']:20} {row['rival']:16} {row.get('setting', '')}  FAILED: {row['failed']}"
    test = row["test"]
    text = f"{row['log']:20} {row['rival']:16} test {test['recall@10']['value']:.4f} {test['ndcg@10']['value']:.4f}"
    if "curve" not in row or row["rival"] == "habitus":
        return text
    validation = f"validation {row['validation']['ndcg@10']:.4f}" if row["validation"] else "refitted"
    return (
        f"{text}  {validation}  {row['setting']}, batch {row['batch']}: {row['passes']} passes, "
        f"{row['train_seconds']:.0f} s, stopped by {row['stopped']}"
    )


def save_ranks(path: Path, event: np.ndarray, user: np.ndarray, rank: np.ndarray) -> None:
    """Ranks with what identifies their queries: the row of the last visible event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial.npz")
    np.savez_compressed(partial, event=event, user=user.astype(np.int32), rank=rank.astype(np.int32))
    partial.replace(path)


def load_ranks(row: dict[str, Any]) -> dict[str, np.ndarray]:
    with np.load(Path(row["folder"]) / row["ranks"]) as file:
        return {name: file[name] for name in file.files}


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def device_name(device: str) -> str:
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} thread"


if __name__ == "__main__":
    main()
