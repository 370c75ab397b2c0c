"""Rivals on the same test users: RecTools' SASRec and HSTU, RePlay's SasRec, and a plain SASRec of ours.

    python benchmarks/rivals.py train DATASET --rivals plain --out OUT [--settings 0 1 2 3] [--device cpu]
    python benchmarks/rivals.py gpu --logs DIR --minutes 5 --out OUT [--only NAMES] [--slots 8] [--seconds 120]
    python benchmarks/rivals.py ours RUN DATASET --out OURS/NAME-SEED.npz
    python benchmarks/rivals.py table OUT --ours OURS/*.json [--json FILE]

`train` runs the settings of rivals on one prepared dataset, one after another, in this environment (RecTools and RePlay
each want their own: VENV/bin/python with `src` on PYTHONPATH). `gpu` trains the settings of all rivals on a folder of
datasets, --slots at a time on one GPU. It begins only what the minutes still pay; the same call goes on with what is
missing in OUT, or was stopped by a shorter --seconds. A training goes on until validation stops improving or its
seconds are up; validation picks the setting, which is trained
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RIVALS = {
    "rectools_sasrec": ("rivals_rectools", "sasrec"),
    "rectools_hstu": ("rivals_rectools", "hstu"),
    "replay_sasrec": ("rivals_replay", "sasrec"),
    "plain": ("rivals_plain", "PlainSASRec"),
}
GPU_RIVALS = ("rectools_hstu", "rectools_sasrec")
TEST_SECONDS = 15.0  # of a training's time, kept for its last evaluation
METRICS = ("recall@10", "ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("dataset", type=Path)
    train.add_argument(
        "--seconds", type=float, default=300.0, help="of each training, validation included; CPU seconds on a CPU"
    )
    train.add_argument("--device", default="cpu")
    train.add_argument("--choice-queries", type=int, default=5_000, help="of the validation after a pass")
    train.add_argument("--batch", type=int, help="sequences of a step; by the log unless given")
    gpu = commands.add_parser("gpu")
    gpu.add_argument("--logs", type=Path, required=True, help="a folder of prepared datasets")
    gpu.add_argument("--only", nargs="+", help="names of datasets")
    gpu.add_argument("--minutes", type=float, default=5.0)
    gpu.add_argument("--seconds", type=float, default=120.0, help="of each training, validation included")
    gpu.add_argument("--slots", type=int, default=8)
    gpu.add_argument("--device", default="cuda")
    for command, rivals in ((train, ("plain",)), (gpu, GPU_RIVALS)):
        command.add_argument("--rivals", nargs="+", choices=list(RIVALS), default=list(rivals))
        command.add_argument("--settings", type=int, nargs="+", default=[0, 1, 2, 3] if command is train else [0, 1])
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
    how["choice_queries"] = given.choice_queries
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
    """What is missing of all trainings of a folder of datasets, on one GPU."""
    began = time.monotonic()
    end = time.time() + given.minutes * 60
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    jobs = plan_jobs(given)
    rows: dict[Job, dict[str, Any]] = {}
    refits: set[tuple[Path, str]] = set()
    with ProcessPoolExecutor(given.slots, multiprocessing.get_context("spawn")) as pool:
        how = (given.out, given.seconds, end, given.device, given.seed)
        futures = {pool.submit(train_if_missing, job, *how): job for job in jobs}
        while futures:
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                job = futures.pop(future)
                rows[job] = outcome(future, job)
                print(f"{time.monotonic() - began:5.0f} s  {describe(rows[job])}", flush=True)
                pair = job.log, job.rival
                settings = [rows.get(other) for other in jobs if (other.log, other.rival) == pair]
                if pair not in refits and all(row and row.get("validation") for row in settings):
                    refits.add(pair)
                    chosen = pick([row for row in settings if row])
                    assert chosen is not None
                    refit = Job(*pair, chosen["number"], chosen["validation"]["passes"])
                    futures[pool.submit(train_if_missing, refit, *how)] = refit
    failed = sum("failed" in row for row in rows.values())
    missing = sum("missing" in row for row in rows.values())
    took = round(time.monotonic() - began)
    print(json.dumps({"trainings": len(rows), "failed": failed, "missing": missing, "seconds": took}))


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
    """One training: a log, a rival, the number of a setting, and the passes where it is a refit."""

    log: Path
    rival: str
    setting: int
    passes: int | None = None

    @property
    def stem(self) -> str:
        """The name of its files."""
        return f"{self.log.name}-{self.rival}-{self.setting}{'' if self.passes is None else '-refit'}"


def plan_jobs(given: argparse.Namespace) -> list[Job]:
    """The first setting of everything before the second; small logs first; the stand-in where RecTools is not asked."""
    logs = [file.parent for file in sorted(given.logs.glob("*/manifest.json"))]
    logs = [log for log in logs if not given.only or log.name in given.only]
    jobs = [Job(log, rival, setting) for log in logs for rival in given.rivals for setting in given.settings]
    return sorted(jobs, key=lambda job: (given.settings.index(job.setting), job.rival == "plain", work(job.log)))


def work(log: Path) -> int:
    """Scores that a pass over a log computes: events times items."""
    manifest = json.loads((log / "manifest.json").read_text(encoding="utf-8"))
    return manifest["train"]["events"] * manifest["num_items"]


def train_if_missing(job: Job, out: Path, seconds: float, end: float, device: str, seed: int) -> dict[str, Any]:
    """The row of a training: the one that is there, if it ended by itself or had as much time, else a new one."""
    file = out / f"{job.stem}.json"
    row = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if row and (row["stopped"] != "time" or row["limit"] >= seconds) and row["refit_passes"] == job.passes:
        return row | {"kept": True}
    if time.time() + seconds + TEST_SECONDS > end:
        return {"log": job.log.name, "rival": job.rival, "setting": str(job.setting), "missing": "no time was left"}
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
    choice_queries: int = 5_000,
    refit_passes: int | None = None,
) -> dict[str, Any]:
    """One training; its row and the ranks of its test queries go to `out`."""
    import torch
    from rivals_scoring import SETTINGS, train_rival

    from habitus.data import Dataset

    torch.set_num_threads(1)
    module, name = RIVALS[rival]
    stem = Job(path, rival, number, refit_passes).stem
    out.mkdir(parents=True, exist_ok=True)
    try:
        build = getattr(importlib.import_module(module), name)
        trained = train_rival(
            rival, build, Dataset.open(path, verify=False), SETTINGS[number], device=device, seconds=seconds,
            batch=batch, choice_queries=choice_queries, seed=seed, refit_passes=refit_passes,
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
        "refit_passes": refit_passes,
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
    row["validation"] = chosen["validation"].get("on our queries")
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
    row["seconds_to_quality"] = None if None in reached else float(np.median(reached))  # type: ignore[arg-type]
    row["seconds_of_rival"] = chosen["validation"]["seconds"]
    return row


def time_to(curve: list[dict[str, float]], value: float | None) -> float | None:
    """Seconds at the first point of a validation curve that reaches a value; None where none does."""
    if value is None:
        return None
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
    for trouble in ("failed", "missing"):
        if trouble in row:
            return f"{row['log']:20} {row['rival']:16} {row.get('setting', '')}  {trouble}: {row[trouble]}"
    test = row["test"]
    text = f"{row['log']:20} {row['rival']:16} test {test['recall@10']['value']:.4f} {test['ndcg@10']['value']:.4f}"
    if "curve" not in row or row["rival"] == "habitus":
        return text
    validation = f"validation {row['validation']['ndcg@10']:.4f}" if row["validation"] else "refitted"
    return (
        f"{text}  {validation}  {row['setting']}, batch {row['batch']}: {row['passes']} passes, "
        f"{row['train_seconds']:.0f} s, stopped by {row['stopped']}{' (kept)' if row.get('kept') else ''}"
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
