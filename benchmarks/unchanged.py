"""Whether two checkouts compute the same: the same commands under each, files and answers compared.

    python benchmarks/unchanged.py --before ../habitus-before --after .
    python benchmarks/unchanged.py --before ../habitus-before --after . --cases train sweep
    python benchmarks/unchanged.py --before before --after after --device cuda

Only the command line and the files that it writes are looked at, so modules may be called what they like. Everything is
tiny and seeded. On a CPU, with one thread, all that is compared must be equal to the bit; measured times, throughput,
memory and names of workers are left out. Sentences may be worded anew where the numbers in them stay: the table says
so, and it is no difference. Commands and options may be added, not removed. Datasets are compared by themselves; all
that follows takes those of the first checkout. The case `old files` gives its runs and its store to both.

With --device cuda runs are trained as on any GPU: captured, in fp32 and bf16, and compiled. The first checkout trains
twice, and what differs between its own two runs is the rounding that the second is allowed (ten times, and at least
ROUNDING). That needs no more than what `habitus train` itself imports; packages may come by PYTHONPATH.

Ends with exit code 1 where something differs that should not. The last line is JSON.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 900
ROUNDING = {"fp32": 1e-5, "bf16": 1e-3}  # relative differences of losses that mean nothing on a GPU
MEASURED = {"throughput", "memory", "seconds"}  # in a Record
CHANGING = {  # file → what in it changes from run to run
    "record.json": MEASURED,
    "seal.json": {"record_sha256", "worker"},
    "state.json": {"seconds", "state_sha256"},
    "manifest.json": {"shards"},  # checksums of safetensors files, see `tensors`
}
ABSENT = "absent"
EVERY_AXIS = ("share", "depth", "batch", "allocation", "negatives", "init")
SWEPT = ("share", "batch", "allocation", "negatives")

RECIPE = """\
[data]
seq_len = 32
[model]
joint_dim = 8
text_len = 4
text_depth = 1
width = 16
depth = 2
head_dim = 8
[train]
batch_sequences = 8
steps = 16
learning_rate = 0.01
precision = "fp32"
seed = 5
[evaluate]
queries = 150
batch_sequences = 8
every = 8
regimes = ["batch", "catalogue"]
"""
COPYING = RECIPE.replace("[train]", "copying = true\n[train]\ndropout = 0.2\nlog_q = true")
ADAMW = RECIPE.replace("[train]", 'init = "mup"\n[train]\noptimizer = "adamw"\nschedule = "constant"')
ON_GPU = """\
[data]
seq_len = 64
[model]
joint_dim = 16
text_len = 8
text_depth = 2
width = 64
depth = 2
head_dim = 16
copying = true
[train]
batch_sequences = 32
steps = 30
learning_rate = 0.005
log_q = true
dropout = 0.1
seed = 5
[evaluate]
queries = 1000
regimes = ["batch", "catalogue"]
"""


def second_stage(recipe: str, pool: str = "union") -> str:
    lines = f'[train]\nstage = 2\nparent = "previous"\nnum_negatives = 16\nextra_pool = "{pool}"'
    return recipe.replace("[train]", lines)


RECIPES = {
    "stage1.toml": RECIPE,
    "stage2.toml": second_stage(RECIPE),
    "copying1.toml": COPYING,
    "copying2.toml": second_stage(COPYING, "extras"),
    "adamw.toml": ADAMW,
    "gpu1.toml": ON_GPU,
    "gpu2.toml": second_stage(ON_GPU).replace("num_negatives = 16", "num_negatives = 256"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout: the folder with src/habitus")
    parser.add_argument("--after", type=Path, required=True, help="another one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="only these, and what they need")
    parser.add_argument("--folder", type=Path, help="keep what the commands write here (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="write the last line here too")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    wanted = needed(given.cases or [name for name, case in CASES.items() if case.on_gpu == on_gpu])
    if any(CASES[name].on_gpu != on_gpu for name in wanted):
        parser.error("the cases of --device cuda and those of a CPU are run apart")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or Path(scratch)).resolve()
        roots = {"before": given.before, **({"again": given.before} if on_gpu else {}), "after": given.after}
        sides = [Side(name, root.resolve(), folder) for name, root in roots.items()]
        for side in sides:
            side.start(given.before.resolve())
        rows = []
        print(f"{'case':<11} {'compared':<38} {'values':>7}  result", flush=True)
        for name in wanted:
            for row in compared(name, sides):
                rows.append(row)
                print(f"{row['case']:<11} {row['compared']:<38} {row['values']:>7,}  {said(row)}", flush=True)
    changed = sum(not row["equal"] for row in rows)
    result = {
        "benchmark": "unchanged",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": hardware(given.device),
        "before": version(given.before),
        "after": version(given.after),
        "seconds": round(time.monotonic() - began, 1),
        "values": sum(row["values"] for row in rows),
        "changed": changed,
        "rows": rows,
    }
    if given.out:
        given.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{len(rows)} comparisons, {changed} with differences")
    print(json.dumps(result))
    sys.exit(1 if changed else 0)


# Two sides, the same commands ---------------------------------------------------------------------------------------


class Failed(Exception):
    """A command did not end as it should; the text says which and what it printed."""


class Side:
    """A checkout, and the folder that its commands run in."""

    def __init__(self, name: str, root: Path, folder: Path) -> None:
        self.name, self.root, self.folder = name, root, folder / name
        self.theirs = folder / "before"  # what the first checkout wrote
        paths = [str(root / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
        }

    def start(self, inputs: Path) -> None:
        """Make the folder with the inputs, which are the same on every side; check which package is imported."""
        self.folder.mkdir(parents=True)
        for name, text in RECIPES.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        for source in ("tests/brief.toml", "docs/studies/h200-standard/runs.csv"):
            if (inputs / source).exists():
                shutil.copy(inputs / source, self.folder)
        write_curve(self.folder / "curve.csv")
        imported = self._done([sys.executable, "-c", "import habitus; print(habitus.__file__)"]).strip()
        if not Path(imported).resolve().is_relative_to(self.root / "src"):
            sys.exit(f"{self.root} was asked for, but {imported} is imported")

    def run(self, command: str, *, processes: int = 1, fails: bool = False) -> str:
        """What a command of `habitus` prints; with `fails` it must not end with 0, and both outputs are returned."""
        start = [sys.executable, "-m", "habitus"]
        if processes > 1:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            start = [sys.executable, "-m", *launcher, "-m", "habitus"]
        return self._done([*start, *shlex.split(command)], fails=fails)

    def json(self, command: str) -> Any:
        return json.loads(self.run(command + " --json"))

    def _done(self, command: list[str], *, fails: bool = False) -> str:
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{shlex.join(command[2:])}: not done after {COMMAND_SECONDS} s") from None
        if (done.returncode != 0) != fails:
            told = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
            raise Failed(f"{shlex.join(command[2:])}: exit code {done.returncode}\n{told}")
        return f"{done.returncode}\n{done.stdout}\n{done.stderr}" if fails else done.stdout


@dataclass(frozen=True)
class Rounded:
    """Numbers that need not be equal to the bit."""

    values: Any
    least: float  # relative difference that means nothing


@dataclass(frozen=True)
class Kept:
    """Values of which more may have come, but none may be lost."""

    values: Any


@dataclass(frozen=True)
class Case:
    found: Callable[[Side], dict[str, Any]]  # what was compared → its values, as JSON holds them
    needs: tuple[str, ...] = ()
    on_gpu: bool = False
    shared: tuple[str, ...] = ()  # folders that all sides then take from the first, so that a difference shows once


def needed(names: list[str]) -> list[str]:
    """These cases and those that they build on, in the order of CASES."""
    found = set(names)
    for name in reversed(CASES):
        if name in found:
            found.update(CASES[name].needs)
    return [name for name in CASES if name in found]


def compared(name: str, sides: list[Side]) -> Iterator[dict[str, Any]]:
    """A row for each thing that a case compares between the first side and the last."""
    with ThreadPoolExecutor(len(sides)) as pool:
        answers = list(pool.map(lambda side: found_or_failed(name, side), sides))
    share(CASES[name].shared, sides)
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        yield {
            "case": name,
            "compared": "-",
            "values": 0,
            "equal": False,
            "largest": None,
            "where": failed,
            "worded": [],
        }
        return
    found = [answer for answer in answers if isinstance(answer, dict)]
    for what in dict.fromkeys(what for one in found for what in one):
        first, *again, last = [one.get(what) for one in found]
        yield {"case": name, "compared": what, **row(first, again[0] if again else None, last)}


def share(names: tuple[str, ...], sides: list[Side]) -> None:
    """Give these folders of the first side to all others, in place of their own."""
    for side in sides[1:]:
        for name in names:
            if (sides[0].folder / name).exists():
                shutil.rmtree(side.folder / name, ignore_errors=True)
                shutil.copytree(sides[0].folder / name, side.folder / name)


def found_or_failed(name: str, side: Side) -> dict[str, Any] | str:
    """What a case finds on a side, or in a line why it could not be run there."""
    try:
        return CASES[name].found(side)
    except (Failed, OSError, ValueError, KeyError) as error:
        print(f"{name}, {side.name}: {error}", file=sys.stderr, flush=True)
        return f"{side.name}: {type(error).__name__}: {str(error).splitlines()[0]}"


def row(first: Any, again: Any, last: Any) -> dict[str, Any]:
    """How far the last value is from the first; `again` is a second value of the first side, where there is one."""
    least = first.least if isinstance(first, Rounded) else 0.0
    more_may_come = isinstance(first, Kept)
    first, again, last = (one.values if isinstance(one, Rounded | Kept) else one for one in (first, again, last))
    largest, where, worded = difference(first, last, more_may_come=more_may_come)
    found = {
        "values": sum(1 for _ in leaves(first)),
        "largest": finite(largest),
        "where": where[:3],
        "worded": worded[:3],
    }
    if again is None:
        return {**found, "equal": not where}
    own, own_where, _ = difference(first, again)
    allowed = max(least, 10 * own) if own_where or least else 0.0
    within = not where or largest <= allowed or (not least and bool(own_where))  # not reproducible at all
    return {**found, "own": finite(own), "allowed": finite(allowed), "equal": within}


def finite(value: float) -> float | None:
    """None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def difference(first: Any, last: Any, *, more_may_come: bool = False) -> tuple[float, list[str], list[str]]:
    """The largest relative difference of two values, where they differ, and where only their wording does.

    What is neither a number nor worded differs by ∞.
    """
    one, other = dict(leaves(first)), dict(leaves(last))
    apart: dict[str, float] = {}
    worded = []
    for name in one if more_may_come else one | other:
        x, y = one.get(name, ABSENT), other.get(name, ABSENT)
        if repr(x) == repr(y):  # tells 1 from 1.0, and takes NaN for itself
            continue
        if isinstance(x, str) and isinstance(y, str) and " " in x and " " in y and numbers(x) == numbers(y):
            worded.append(name)
            continue
        numeric = all(isinstance(v, int | float) and math.isfinite(v) and not isinstance(v, bool) for v in (x, y))
        apart[name] = abs(x - y) / max(abs(x), abs(y), 1e-12) if numeric else math.inf
    return max(apart.values(), default=0.0), list(apart), worded


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", text)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and texts in a value, each with its place."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from leaves(value[key], f"{name} {key}".strip())
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from leaves(one, f"{name} {number}".strip())
    else:
        yield name, value


def said(row: dict[str, Any]) -> str:
    if not row["where"]:
        return f"equal but for wording{places(row['worded'])}" if row["worded"] else "equal"
    largest = row["largest"]
    told = "differs" if largest is None else f"relative difference {largest:.2g}"
    if row.get("own") is not None:
        told += f", {row['own']:.2g} between two runs of the first"
    if row["equal"]:
        return f"{told}: rounding" if largest is not None else f"{told}, as two runs of the first do"
    return f"CHANGED: {told}{places(row['where'])}"


def places(names: list[str]) -> str:
    told = "; ".join(filter(None, names))
    return f" at {told}" if told else ""


# What is read --------------------------------------------------------------------------------------------------------


def without(value: Any, names: set[str]) -> Any:
    """The value without these keys, wherever they stand."""
    if isinstance(value, dict):
        return {key: without(one, names) for key, one in value.items() if key not in names}
    if isinstance(value, list):
        return [without(one, names) for one in value]
    return value


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def journal(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()]


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder: Path, *left_out: str) -> dict[str, Any]:
    """Every file of a folder with its SHA-256, or with what it says: JSON without what changes from run to run."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] in left_out:
            continue
        if path.suffix == ".json":
            found[name] = without(read_json(path), CHANGING.get(path.name, set()))
        elif path.suffix == ".safetensors":
            found[name] = tensors(path)
        elif path.name == "README.md":  # a card, with a row of seconds
            found[name] = [line for line in path.read_text(encoding="utf-8").splitlines() if "| time |" not in line]
        else:
            found[name] = checksum(path)
    return found


def tensors(path: Path) -> list[Any]:
    """The header of a safetensors file, whose metadata stand in any order, and the SHA-256 of what follows."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return [json.loads(content[8:start]), hashlib.sha256(content[start:]).hexdigest()]


def run_folder(run: Path) -> dict[str, Any]:
    """What a run is compared by."""
    record = read_json(run / "record.json")
    return {
        f"{run.name} journal": journal(run),
        f"{run.name} metrics": {"train": record["train"], **record["metrics"]},
        f"{run.name} weights": checksum(run / "bundle" / "model.safetensors"),
        f"{run.name} files": files(run),
    }


def both_stages(folder: Path) -> dict[str, Any]:
    return {**run_folder(folder / "stage1"), **run_folder(folder / "stage2")}


def write_curve(path: Path) -> None:
    """A flat CSV of runs on three valleys."""
    rows = [
        {
            "axis": "allocation",
            "cell_id": f"{budget:g}-{size}",
            "flops_budget": budget,
            "learning_rate": 0.01,
            "seed": seed,
            "params": round(size * scale),
            "slots_seen": round(budget / (6 * size * scale)),
            "train/loss": round(loss, 6),
            "batch/loss": round(loss + 0.1, 6),
            "catalogue/recall@10": round(0.6 - 0.08 * loss, 6),
        }
        for budget, scale in ((1e12, 1.0), (1e13, 3.0), (1e14, 9.5))
        for size in (2e3, 4e3, 8e3, 16e3, 32e3)
        for seed in (0, 1)
        for loss in [1.7 + 40 / (size * scale) ** 0.35 + 60 * (6 * size * scale / budget) ** 0.25 + 0.003 * seed]
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


# The cases on a CPU --------------------------------------------------------------------------------------------------

TRAIN = "--data dataset --device cpu --threads 1"


def command_line(side: Side) -> dict[str, Any]:
    """Commands, their options and defaults; what is refused, and how."""
    commands = re.findall(r"^│ (\w+)  ", side.run("--help"), flags=re.MULTILINE)
    helps = {name: side.run(f"{name} --help") for name in commands}
    refused = (
        "size --flops 1e17",
        "describe nowhere",
        "train stage1.toml --data nowhere --out run",
        "train stage2.toml --data nowhere",
        "plan --flops 1e18 --metric batch/los --published",
        "plan --flops 1e18 --published --laws nowhere",
        "fit nowhere",
        "sweep width --data nowhere --store store",
        "recommend nowhere --history [1]",
    )
    return {
        "commands and options": Kept(
            {
                name: dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*|\[default: [^\]]*\]", text), True)
                for name, text in helps.items()
            }
        ),
        "refusals": {command: side.run(command, fails=True) for command in refused},
        "sizes": side.json("size --flops 1e17 --share 0.06 --data-ratio 15 --batch-sequences 256"),
        "presets": {name: tomllib.loads(side.run(f"sweep share --preset {name} --print-preset")) for name in PRESETS},
    }


PRESETS = ("tiny", "quick", "standard", "paper")


def data(side: Side) -> dict[str, Any]:
    """A world and the datasets that are made of it."""
    side.run(
        "world shop --users 300 --items 150 --events-per-user 24 --seed 3 weights.popular=0.1 weights.kind_taste=0.35"
    )
    side.run("world ready --users 300 --items 150 --seed 3 --prepared --seq-len 32 --split time")
    tables = "prepare shop/events.parquet shop/items.parquet"
    guessed = side.run(f"{tables} --guess --schema guessed.toml")
    options = "--schema shop/schema.toml --seq-len 32 --text-len 4 --threads 1"
    manifest = side.json(f"{tables} {options} --out dataset")
    side.run(f"{tables} {options} --out last --split last --vocabulary-size 300")
    side.run("world shop2 --users 1500 --items 150 --events-per-user 24")
    side.run(f"prepare shop2/events.parquet shop2/items.parquet {options} --out dataset2".replace("shop/", "shop2/"))
    return {
        "world files": files(side.folder / "shop"),
        "dataset manifest": manifest,
        "dataset files": files(side.folder / "dataset"),
        "files of other splits": {name: files(side.folder / name) for name in ("last", "ready", "dataset2")},
        "guessed schema": guessed,
        "description": side.json("describe dataset"),
        "sizes of a recipe": side.json("size stage1.toml --dataset dataset"),
        "dry run": side.run("train stage1.toml --data dataset --dry-run --json train.steps=7"),
    }


def train(side: Side) -> dict[str, Any]:
    """Both stages, eager, with checkpoints."""
    side.run(f"train stage1.toml stage2.toml {TRAIN} --out run --save-every 8 --keep-checkpoints")
    return both_stages(side.folder / "run")


def copying(side: Side) -> dict[str, Any]:
    """Both stages with copying, dropout and log_q."""
    side.run(f"train copying1.toml copying2.toml {TRAIN} --out copying --best batch/loss --save-every 4")
    return both_stages(side.folder / "copying")


def adamw(side: Side) -> dict[str, Any]:
    """AdamW, a constant rate, μP; and the same stopped half-way and resumed."""
    side.run(f"train adamw.toml {TRAIN} --out adamw --save-every 8 --keep-checkpoints")
    resumed = side.folder / "resumed"
    shutil.copytree(side.folder / "adamw", resumed)
    (resumed / "record.json").unlink()
    shutil.rmtree(resumed / "bundle")
    shutil.rmtree(max((resumed / "checkpoints").iterdir()))
    side.run(f"train adamw.toml {TRAIN} --out resumed --resume --save-every 8 --keep-checkpoints")
    return {**run_folder(side.folder / "adamw"), **run_folder(resumed)}


def accumulated(side: Side) -> dict[str, Any]:
    side.run(f"train copying1.toml copying2.toml {TRAIN} --out accumulated --accumulate 2")
    return both_stages(side.folder / "accumulated")


def processes(side: Side) -> dict[str, Any]:
    side.run(f"train copying1.toml copying2.toml {TRAIN} --out processes", processes=2)
    side.run("evaluate processes/stage2 --data dataset --queries 150 --device cpu --out found.json", processes=2)
    return {
        **both_stages(side.folder / "processes"),
        "evaluated by two": without(read_json(side.folder / "found.json"), MEASURED),
    }


def evaluate(side: Side) -> dict[str, Any]:
    """Runs, checkpoints and baselines in both regimes; vectors."""
    common = "--data dataset --batch-sequences 8 --device cpu"
    runs = "run/stage1 run/stage2 copying/stage1 copying/stage2"
    everything = side.json(
        f"evaluate {runs} {common} --queries 200 --baselines --checkpoints --per-query queries.parquet"
    )
    some = side.json(
        f"evaluate run/stage2 {common} --queries 80 --per-user 2 --catalogue-items 120 --cutoffs 3,7 --seed 4"
    )
    first = side.json(f"evaluate copying/stage2 {common} --exclude-history --metrics ranking,coverage --out found.csv")
    cache = side.json("embed copying/stage1 --data dataset --dtype fp32 --out vectors32 --device cpu")
    side.run("embed run/stage1 --items shop/items.parquet --out items.parquet --device cpu")
    return {
        "runs and baselines": without(everything, MEASURED),
        "rows per query": checksum(side.folder / "queries.parquet"),
        "a smaller catalogue": without(some, MEASURED),
        "without the history": [without(first, MEASURED), checksum(side.folder / "found.csv")],
        "embedded catalogue": [without(cache, {"shards"}), files(side.folder / "vectors32")],
        "embedded items": checksum(side.folder / "items.parquet"),
    }


def recommend(side: Side) -> dict[str, Any]:
    """Histories on the command line and from a log; vectors of items and users."""
    history = shlex.quote('[{"item_id": 17, "event_type": "view"}, {"item_id": 4}, {"item_id": 99}]')
    asked = "--data dataset --device cpu"
    answers = {
        "plain": side.json(f"recommend run/stage2 {asked} --history '[17, 4]' --k 5"),
        "events": side.json(f"recommend copying/stage2 {asked} --history {history} --k 20"),
        "not seen": side.json(f"recommend copying/stage2 --device cpu --history {history} --exclude-seen"),
        "as a table": side.run(f"recommend run/stage1 {asked} --history {history} --k 3"),
        "ivf": side.json(f"recommend run/stage2 --device cpu --history {history} --index ivf"),
    }
    log = "--histories shop/events.parquet --device cpu"
    for suffix in ("parquet", "csv", "jsonl"):
        side.run(f"recommend copying/stage2 {log} --k 5 --out recommended.{suffix}")
    side.run("export run/stage2 --vectors items --out vectors-items.parquet --device cpu")
    side.run("export copying/stage2 --vectors users --data dataset --out vectors-users.parquet --device cpu")
    written = [f"recommended.{suffix}" for suffix in ("parquet", "csv", "jsonl")]
    written += ["vectors-items.parquet", "vectors-users.parquet"]
    return {
        "answers": answers,
        "recommendations of a log": {name: checksum(side.folder / name) for name in written[:3]},
        "exported vectors": {name: checksum(side.folder / name) for name in written[3:]},
        "files beside the run": files(side.folder / "copying/stage2/serve"),
    }


def serve(side: Side) -> dict[str, Any]:
    """A server on a free port: recommendations, vectors, an item that comes and goes."""
    shutil.copytree(side.folder / "copying" / "stage2", side.folder / "served")
    command = "serve served --data dataset --port 0 --device cpu --threads 1"
    process = subprocess.Popen(
        [sys.executable, "-m", "habitus", *shlex.split(command)],
        cwd=side.folder,
        env=side.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            raise Failed(f"{command}: {process.communicate(timeout=60)[1]}")
        history = [{"item_id": 17, "event_type": "view"}, {"item_id": 4, "event_type": "purchase"}]
        recommend = {"history": history, "k": 8, "exclude_seen": True, "with_fields": True}
        fields = {"fields": {"title": "red wool shoe", "price": 9.5}}
        asked: list[tuple[str, str, Any]] = [
            ("POST", "recommend", recommend),
            ("POST", "recommend", {"history": history, "k": 3, "probability": 1}),
            ("POST", "embed", {"histories": [history, history[:1]]}),
            ("PUT", "items/90210", fields),
            ("GET", "items/90210", None),
            ("POST", "recommend", {**recommend, "k": 151}),
            ("DELETE", "items/90210", None),
            ("GET", "schema", None),
        ]
        answers = {
            f"{n} {how} {what}": asked_of(address[0], how, what, body) for n, (how, what, body) in enumerate(asked)
        }
        process.send_signal(signal.SIGTERM)
        ended = process.wait(timeout=60)
    finally:
        process.kill()
        process.communicate()
    return {"answers over HTTP": answers, "exit code": ended}


def asked_of(address: str, how: str, what: str, body: Any) -> Any:
    """Status and answer of a request."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/{what}", content, headers, method=how)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [answer.status, without(json.loads(answer.read()), {"at", "updated_at"})]
    except urllib.error.HTTPError as refused:
        return [refused.code, refused.read().decode()]


def onnx(side: Side) -> dict[str, Any]:
    """The exported graphs: operators and weights. Names in them hold the names of modules."""
    import onnx

    side.run("export copying/stage2 --onnx onnx")
    manifest = read_json(side.folder / "onnx" / "manifest.json")
    del manifest["files"]
    graphs = {}
    for name in ("embedder", "contextualizer"):
        graph = onnx.load(side.folder / "onnx" / f"{name}.onnx").graph
        arrays = [onnx.numpy_helper.to_array(one) for one in graph.initializer]
        graphs[name] = {
            "operators": [node.op_type for node in graph.node],
            "weights": sorted(hashlib.sha256(weights.tobytes()).hexdigest() for weights in arrays),
        }
    return {"graphs": graphs, "manifest": manifest}


def sweep(side: Side) -> dict[str, Any]:
    """The axes of the brief preset into a store; every cell with its Record."""
    common = "--data dataset2 --preset brief.toml --workers 1 --device cpu"
    planned = {axis: side.json(f"sweep {axis} {common} --store planned --dry-run") for axis in EVERY_AXIS}
    for axis in SWEPT:
        side.run(f"sweep {axis} {common} --store store ")
    store = side.folder / "store"
    cells = {path.name: path for path in sorted((store / "cells").iterdir())}
    return {
        "cells of a dry run": planned,
        "recipe hashes": list(cells),
        "journals": {name: journal(path) for name, path in cells.items()},
        "metrics": {name: read_json(path / "record.json")["metrics"] for name, path in cells.items()},
        "files of the store": files(store, "workers", "laws.json"),
        "runs": without(side.json("runs store"), {"seconds", "seconds_spent", "seconds_left"}),
    }


def fit(side: Side) -> dict[str, Any]:
    """Laws of the store, of a published study and of a CSV."""
    side.run("fit store --out store-laws.json --bootstrap 5")
    printed = {name: side.run(f"fit {name}.csv {options}") for name, options in FITTED.items()}
    return {
        "laws of the store": read_json(side.folder / "store-laws.json"),
        "laws of a study on a GPU": read_json(side.folder / "runs.laws.json"),
        "laws of a CSV, bootstrapped": read_json(side.folder / "curve.laws.json"),
        "tables": printed,
    }


FITTED = {"runs": "", "curve": "--verbose --bootstrap 20 --seed 3"}


def plan(side: Side) -> dict[str, Any]:
    """Plans from the published laws, from a study's and from the store's, with the run of the last one."""
    published = "plan --published --flops 1e18 --metric catalogue/recall@10 --gpu h200"
    own = "plan --laws store --flops 1e10 --data dataset2"
    side.run("fit store")
    plans = {
        "published": side.json(published),
        "published, hours": side.json("plan --published --gpu h200 --gpus 8 --hours 24 --metric batch/loss"),
        "study": side.json("plan --laws runs.laws.json --flops 1e16 --metric batch/loss"),
        "CSV": side.json("plan --laws curve.laws.json --flops 1e15 --metric catalogue/recall@10 --stage2-share 0"),
        "store": without(side.json(own), {"hours"}),
    }
    side.run(f"{own} --recipe planned-recipe --register plan.json")
    trained = TRAIN.replace("dataset", "dataset2")
    side.run(f"train planned-recipe/stage1.toml planned-recipe/stage2.toml {trained} --out planned")
    check = side.json("plan --check planned --against plan.json")
    check["comparisons"] = [one for one in check["comparisons"] if one["name"] != "hours"]
    registered = without(read_json(side.folder / "plan.json"), {"hours", "registered_at", "registered_hash"})
    return {
        "plans": plans,
        "as a table": side.run(published),
        "recipes": files(side.folder / "planned-recipe"),
        "registered plan": registered,
        "check of its run": without(check, {"registered_at", "hash"}),
    }


def study(side: Side) -> dict[str, Any]:
    """A study of one axis, from the dataset to the recipe."""
    options = "--preset brief.toml --axis allocation --plan-flops 4e10 --workers 1 --device cpu"
    side.run(f"study --data dataset2 --out study {options}")
    folder = side.folder / "study"
    state = without(read_json(folder / "study.json"), {"seconds", "probe_seconds"})
    planned = without(read_json(folder / "plan.json"), {"hours", "registered_at", "registered_hash"})
    return {
        "files of its stores": {name: files(folder / name, "workers", "laws.json") for name in ("probes", "store")},
        "state": state,
        "laws": read_json(folder / "store" / "laws.json"),
        "plan": planned,
        "recipes": files(folder / "recipe"),
    }


def report(side: Side) -> dict[str, Any]:
    """Pages of a CSV, with figures as PNG, and of the published study."""
    side.run("report curve.csv --out curve.html --png figures")
    side.run("report runs.csv --out runs.html")
    return {
        "page of a CSV": (side.folder / "curve.html").read_text(encoding="utf-8"),
        "figures as PNG": files(side.folder / "figures"),
        "page of a study on a GPU": (side.folder / "runs.html").read_text(encoding="utf-8"),
    }


def old_files(side: Side) -> dict[str, Any]:
    """What the first checkout wrote, read by both: nothing here is left out of the comparison."""
    for name in ("dataset", "dataset2", "run", "copying", "store", "plan.json", "planned", "adamw"):
        source, target = side.theirs / name, side.folder / "old" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)  # with their times: laws may not look older than Records
        else:
            shutil.copy2(source, target)
    (side.folder / "old/adamw/record.json").unlink()
    shutil.rmtree(side.folder / "old/adamw/bundle")
    shutil.rmtree(max((side.folder / "old/adamw/checkpoints").iterdir()))
    side.run("train adamw.toml --data old/dataset --device cpu --threads 1 --out old/adamw --resume")
    side.run("fit old/store --out old/laws.json")
    side.run("report old/store --out old/report.html --plan old/plan.json")
    runs = "old/run/stage2 old/copying/stage2"
    again = side.run("train stage1.toml stage2.toml --data old/dataset --device cpu --out old/run --resume")
    swept = "sweep allocation --data old/dataset2 --store old/store --preset brief.toml --workers 1 --device cpu"
    return {
        "evaluation": without(side.json(f"evaluate {runs} --data old/dataset --queries 150 --device cpu"), MEASURED),
        "recommendation": side.json("recommend old/copying/stage2 --history '[3, 1, 4]' --device cpu"),
        "run that is resumed": run_folder(side.folder / "old/adamw"),
        "runs that are done": again,
        "store that is complete": without(side.json(swept), {"seconds"}),
        "runs of the store": side.json("runs old/store"),
        "laws": read_json(side.folder / "old/laws.json"),
        "plan": side.json("plan --laws old/store --flops 1e10 --data old/dataset2"),
        "check of a registered plan": side.json("plan --check old/planned --against old/plan.json"),
        "report": (side.folder / "old/report.html").read_text(encoding="utf-8"),
    }


# The cases on a GPU --------------------------------------------------------------------------------------------------


def gpu_data(side: Side) -> dict[str, Any]:
    side.run("world gpu --users 3000 --items 2000 --events-per-user 48 --seed 3 --prepared --seq-len 64")
    return {"dataset files": files(side.folder / "gpu")}


def on_gpu(side: Side, out: str, precision: str, options: str = "") -> dict[str, Any]:
    """Both stages on a GPU: losses to rounding, and which engine computed them."""
    side.run(f"train gpu1.toml gpu2.toml --data gpu --device cuda --out {out} {options} train.precision={precision}")
    side.run(f"evaluate {out}/stage1 {out}/stage2 --data gpu --queries 1000 --device cuda --out {out}.json")
    found: dict[str, Any] = {}
    least = ROUNDING[precision]
    for stage in ("stage1", "stage2"):
        run = side.folder / out / stage
        record = read_json(run / "record.json")
        losses = [line["loss"] for line in journal(run) if "loss" in line]
        measured = {name: record["metrics"][name]["value"] for name in ("batch/loss", "catalogue/loss")}
        counts = ("recipe_hash", "params", "flops_nominal", "steps", "events_seen", "queries_seen", "hardware")
        found[f"{stage} losses"] = Rounded(losses, least)
        found[f"{stage} validation losses"] = Rounded(measured, least)
        found[f"{stage} engine and counts"] = {name: record[name] for name in counts}
    evaluated = read_json(side.folder / f"{out}.json")
    values = [{name: m["value"] for name, m in one["metrics"].items() if name.endswith("/loss")} for one in evaluated]
    found["evaluation losses"] = Rounded(values, least)
    return found


def deterministic(side: Side) -> dict[str, Any]:
    side.run("train gpu1.toml --data gpu --device cuda --deterministic --out exact train.precision=fp32")
    return {
        "losses": [line["loss"] for line in journal(side.folder / "exact") if "loss" in line],
        "weights": checksum(side.folder / "exact/bundle/model.safetensors"),
    }


CASES = {
    "commands": Case(command_line),
    "data": Case(data, shared=("shop", "dataset", "dataset2")),
    "train": Case(train, ("data",)),
    "copying": Case(copying, ("data",)),
    "adamw": Case(adamw, ("data",)),
    "accumulated": Case(accumulated, ("data",)),
    "processes": Case(processes, ("data",)),
    "evaluate": Case(evaluate, ("train", "copying")),
    "recommend": Case(recommend, ("train", "copying")),
    "serve": Case(serve, ("copying",)),
    "onnx": Case(onnx, ("copying",)),
    "sweep": Case(sweep, ("data",)),
    "fit": Case(fit, ("sweep",)),
    "plan": Case(plan, ("fit",)),
    "study": Case(study, ("data",)),
    "report": Case(report),
    "old files": Case(old_files, ("train", "copying", "adamw", "plan")),
    "gpu data": Case(gpu_data, on_gpu=True, shared=("gpu",)),
    "gpu fp32": Case(lambda side: on_gpu(side, "fp32", "fp32"), ("gpu data",), on_gpu=True),
    "gpu bf16": Case(lambda side: on_gpu(side, "bf16", "bf16"), ("gpu data",), on_gpu=True),
    "gpu eager": Case(lambda side: on_gpu(side, "eager", "fp32", "--no-capture"), ("gpu data",), on_gpu=True),
    "gpu exact": Case(deterministic, ("gpu data",), on_gpu=True),
    "gpu compile": Case(lambda side: on_gpu(side, "compiled", "bf16", "--compile"), ("gpu data",), on_gpu=True),
}


# What is said of the machine -----------------------------------------------------------------------------------------


def hardware(device: str) -> str:
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        if shutil.which("nvidia-smi"):
            return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        return "cuda"
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} threads, {platform.system()}"


def version(root: Path) -> str | None:
    """The commit of a checkout, where git knows it; with a plus where files differ from it."""
    if not shutil.which("git"):
        return None
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


if __name__ == "__main__":
    main()
