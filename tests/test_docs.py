"""Every command and every Python block in the README and on the pages of docs/ runs as it is printed there.

A page's commands are run in order in a folder that holds what the page starts from; each must end with exit code 0. Its
Python blocks, joined, are one script. What is changed so that it takes seconds instead of hours stands in SUBSTITUTIONS
and PYTHON_SUBSTITUTIONS, and nowhere else.
"""

import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.laws import fit, read_runs

ROOT = Path(__file__).parents[1]
BRIEF = ROOT / "tests" / "brief.toml"

# In a command of a page → what is run instead. Each is used, in this order.
SUBSTITUTIONS = {
    "--users 20000 --items 2000": "--users 300 --items 200",
    # The windows and texts of the brief preset.
    "schema.toml --out dataset": "schema.toml --out dataset --seq-len 32 --text-len 4",
    # The axes of the paper: pages that follow want all of their laws. tests/studies searches a log that ends first.
    "--gpu-hours 8": "--preset brief.toml --plan-flops 4e9 --workers 1 "
    "--axis share --axis depth --axis batch --axis allocation --axis negatives",
    "study --preset quick": "study --preset brief.toml --axis allocation --plan-flops 4e9 --workers 1",
    "--preset quick": "--preset brief.toml --workers 1",
    "--flops 3e13": "--preset brief.toml --flops 1e10",
    "--budgets 1e13,1e14,1e15": "--preset brief.toml --workers 1 --budgets 7e7,1.4e8,2.8e8",
    # A plan reaches at most 1,000 times beyond the largest budget measured, and that is 2.8e8.
    "--laws out/study/store --flops 1e15": "--laws out/study/store --flops 4e9",
    "--laws out/study/store --flops 1e14": "--laws out/study/store --flops 4e9",
    "STORE --out report.html --plan": "runs.csv --out report.html --plan",  # a dozen PNGs instead of 140
    "train.steps=500": "train.steps=20",
    "train --data dataset --out run": "train --data dataset --out run --hours 0.02 --no-refit --device cpu",
    "torchrun ": "torchrun --standalone ",  # a port of its own
    "--nproc-per-node 8": "--nproc-per-node 2",
    "habitus serve ": "habitus serve --port 0 ",  # any free one
    "--port 8080": "--port 0",
    "--host 0.0.0.0": "--host 127.0.0.1",
    "make_store planted": "make_store tiny",  # a dozen runs instead of 600
    # tests/data/test_ray_prepare.py has a cluster, test_remote.py a bucket.
    "RAY_ADDRESS=head:6379 habitus": "habitus",
    "'/shared/log/*.parquet' /shared/items.parquet": "'log/*.parquet' items.parquet",
    "--backend ray --out /shared/": "--out ray-",
    "'s3://bucket/log/day=*/*.parquet' s3://bucket/items.parquet": "'log/*.parquet' items.parquet",
    "s3://bucket/dataset": "bucket-dataset",
}

# What lies in the folder before the first command of a page is run; the fixture `prepared` makes all of it.
STARTS = {
    "README.md": "log items.parquet",
    "docs/any-log.md": "log items.parquet schema.toml",
    "docs/cards.md": "dataset run",
    "docs/context.md": "DATASET",
    "docs/evaluate.md": "dataset run store new.csv",
    "docs/event-text.md": "movielens_small examples tags.toml",
    "docs/guides/budget-to-plan.md": "dataset study",
    "docs/guides/cluster.md": "dataset stage1.toml stage2.toml DATASET",
    "docs/guides/log-to-model.md": "events.csv items.csv",
    "docs/guides/serve.md": "dataset run",
    "docs/guides/tomorrow.md": "dataset trained items.parquet today.parquet",
    "docs/faq.md": "log items.parquet stage1.toml stage2.toml log.parquet new.csv",
    "docs/http.md": "dataset run current token",
    "docs/laws.md": "STORE runs.csv",
    "docs/plan.md": "out",
    "docs/prepare.md": "log items.parquet stage1.toml",
    "docs/probe.md": "dataset run labels.parquet times.parquet",
    "docs/report.md": "STORE plan.json runs.csv",
    "docs/serve.md": "dataset run RUN DATASET log.parquet",
    "docs/show.md": "recipe.toml stage1.toml study dataset run run-a run-b",
    "docs/sizing.md": "recipe.toml out",
    "docs/study.md": "dataset study",
    "docs/sweep.md": "DATASET",
    "docs/train.md": "dataset stage1.toml stage2.toml",
    "docs/world.md": "",
}
WITHOUT_COMMANDS = {
    "CONTRIBUTING.md",
    "docs/api.md",
    "docs/architecture.md",
    "docs/cluster.md",  # sbatch and ray up; tests/test_cluster_examples.py runs the script
    "docs/concepts.md",
    "docs/finite-log.md",
    "docs/index.md",
    "docs/model.md",
    "docs/reliability.md",
    "docs/scale.md",
    "docs/softmax.md",
    "docs/store.md",
    "docs/words.md",
}
NOT_READ = ("docs/notebook.md", "docs/measurements/", "docs/decisions/", "docs/studies/")  # what was run once

# What lies in the folder before the Python of a page is run.
PYTHON = {
    "README.md": "log items.parquet schema.toml study",
    "docs/api.md": "",
    "docs/cards.md": "dataset run",
    "docs/evaluate.md": "dataset run-a run-b",
    "docs/finite-log.md": "STORE",
    "docs/laws.md": "laws.json",
    "docs/model.md": "out",
    "docs/plan.md": "",
    "docs/prepare.md": "log items.parquet schema.toml",
    "docs/probe.md": "dataset run labels.parquet",
    "docs/report.md": "out",
    "docs/serve.md": "dataset run",
    "docs/show.md": "recipe.toml run-a run-b",
    "docs/softmax.md": "",
    "docs/study.md": "",
    "docs/train.md": "dataset stage1.toml",
    "docs/world.md": "",
}
# In a Python block of a page → what is run instead. Each is used.
PYTHON_SUBSTITUTIONS = {
    'schema="schema.toml", out="dataset")': 'schema="schema.toml", out="dataset", seq_len=32, text_len=4)',
    'hb.train(dataset, out="run")': 'hb.train(dataset, out="run", hours=0.02, refit=False, device="cpu")',
    '["item-1", "item-2"]': "[1, 2]",
    "hb.plan(1e18": "hb.plan(4e9",
    'hb.fit("STORE")': 'hb.fit("passes.csv")',  # a planted log that ends
    "negative_keys(seed, step, device)": "negative_keys(seed, 0, device)",  # step is a function further up the page
    'StudyOptions(preset="tiny")': 'StudyOptions(preset="brief.toml", axes=("allocation",), plan_flops=4e9, workers=1)',
}
# Names that a page takes for granted.
PRELUDES = {
    "docs/softmax.md": """
import torch
from types import SimpleNamespace
from habitus.softmax import Latch, extras_softmax, negative_keys, targets_among
model = torch.nn.Linear(8, 8)
model(torch.randn(6, 8)).sum().backward()
queries, candidates = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
catalogue = cache = torch.randn(200, 8)
targets = torch.arange(6)
device, count, steps, seed, num_items, K = "cpu", torch.tensor(20), 3, 0, 200, 16
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
graph = SimpleNamespace(replay=lambda: step())  # capturing needs a GPU
""",
}

_VARIABLE = r"[A-Z_]+=(?:\$\([^)]*\)|\S+) "
_COMMAND = re.compile(rf"(?:{_VARIABLE})*(?:habitus|torchrun|python -m) ")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
RECIPE = """\
[data]
seq_len = 32
[model]
joint_dim = 8
text_len = 4
text_depth = 1
width = 16
depth = 1
head_dim = 8
[train]
batch_sequences = 8
steps = 12
learning_rate = 0.003
precision = "fp32"
[evaluate]
queries = 100
"""
STAGE_2 = RECIPE.replace("[train]\n", '[train]\nstage = 2\nparent = "previous"\nnum_negatives = 16\n')


def pages() -> list[str]:
    return [name for name in all_pages() if not name.startswith(NOT_READ)]


def all_pages() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def python(page: str) -> str:
    """The Python blocks of a page as one script."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL))


def commands(page: str) -> list[str]:
    """The commands of a page: lines of indented or fenced blocks, continued ones joined, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and _COMMAND.match(line.strip()):
            found.append(" ".join(re.sub(r"\s#\s.*", "", line).split()))
    return found


def substituted(command: str) -> str:
    for old, new in SUBSTITUTIONS.items():
        command = command.replace(old, new)
    return command


def walk(page: str, folder: Path) -> None:
    """Run the commands of a page in this folder, in order."""
    for command in commands(page):
        run(substituted(command), folder, f"{page}: {command}")


def run(command: str, folder: Path, told: str) -> None:
    """Run one command; fail with what it said unless it ends with 0."""
    if " serve " in command:
        serve(command, folder, told)
    elif command.startswith("habitus "):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{told}\n{result.output}\n{result.exception!r}"
    else:
        done = subprocess.run(
            in_shell(command), shell=True, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{told}\n{done.stdout}\n{done.stderr}"


def serve(command: str, folder: Path, told: str) -> None:
    """Start the server, ask for its health, end it with SIGTERM: exit code 0."""
    process = subprocess.Popen(
        in_shell(command),
        shell=True,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address, f"{told}\n{process.communicate(timeout=60)[1]}"
        with urllib.request.urlopen(f"{address[0]}/v1/health", timeout=60) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, told
    finally:
        process.kill()
        process.communicate()


def in_shell(command: str) -> str:
    """The command for a shell, with this Python's programs, in place of the shell itself."""
    python = shlex.quote(sys.executable)
    for name, module in (("habitus", f"{python} -m habitus"), ("torchrun", f"{python} -m torch.distributed.run")):
        command = re.sub(rf"^((?:{_VARIABLE})*){name} ", rf"\1exec {module} ", command)
    return re.sub(r"^python ", f"exec {python} ", command)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an event log and items, after all commands of the README."""
    folder = tmp_path_factory.mktemp("readme")
    world = ["world", "shop", "--users", "1500", "--items", "150", "--events-per-user", "24"]
    run(shlex.join(["habitus", *world]), folder, "the log of the tests")
    (folder / "log").mkdir()
    shutil.move(folder / "shop" / "events.parquet", folder / "log" / "2025.parquet")
    shutil.move(folder / "shop" / "items.parquet", folder / "items.parquet")
    shutil.rmtree(folder / "shop")
    shutil.copy(BRIEF, folder)
    walk("README.md", folder)
    return folder


@pytest.fixture(scope="module")
def prepared(readme: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the pages start from, by the names that they use, from what the README's commands left."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in ("log", "items.parquet", "schema.toml", "dataset", "study"):
        copy(readme / name, folder / name)
    copy(readme / "dataset", folder / "DATASET")
    copy(readme / "run", folder / "trained")
    for name in ("run", "RUN", "current"):
        copy((readme / "run" / "best").resolve(), folder / name)  # the README serves it, so that it holds item ids
    copy(readme / "study" / "store", folder / "STORE")
    copy(readme / "study" / "probes", folder / "store")  # a store of fewer runs
    copy(readme / "study", folder / "out" / "study")
    copy(readme / "dataset", folder / "out" / "study" / "dataset")
    copy(readme / "dataset", folder / "out" / "dataset")
    copy(readme / "study" / "plan.json", folder / "plan.json")
    copy(readme / "study" / "recipe" / "stage1.toml", folder / "recipe.toml")
    (folder / "stage1.toml").write_text(RECIPE)
    (folder / "stage2.toml").write_text(STAGE_2)
    (folder / "token").write_text("the-token-of-the-tests")
    pq.write_table(pq.read_table(readme / "log").slice(0, 500), folder / "log.parquet")
    write_later_events(readme / "log", folder / "today.parquet")
    write_labels(readme / "log", folder)
    write_new_items(pq.read_table(readme / "items.parquet").slice(0, 10), folder / "new.csv")
    write_runs(readme / "study" / "store", folder / "runs.csv")
    for name in ("run-a", "run-b"):
        copy((readme / "run" / "best").resolve(), folder / name)
    copy(readme / "study" / "store", folder / "out" / "store")
    copy(readme / "study" / "plan.json", folder / "out" / "plan.json")
    fit(ROOT / "docs" / "studies" / "h200-standard" / "runs.csv", ["batch/loss"]).write(folder / "laws.json")
    write_passes(folder / "passes.csv")
    write_films(folder)
    few = pq.read_table(readme / "log", filters=[("user_id", "<", 400)])
    pyarrow.csv.write_csv(few, folder / "events.csv")
    write_new_items(pq.read_table(readme / "items.parquet"), folder / "items.csv")
    return folder


def copy(source: Path, target: Path) -> None:
    """A file or a folder, links followed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def write_films(folder: Path) -> None:
    """What the page on texts of events starts from: a public log, schemas, and the page's recipe with fewer steps."""
    log = ROOT.parent / "shared" / "data" / "movielens_small"
    if log.exists():
        copy(log, folder / "movielens_small")
    copy(ROOT / "examples" / "schemas", folder / "examples" / "schemas")
    page = (ROOT / "docs" / "event-text.md").read_text(encoding="utf-8")
    recipe = page.partition("`tags.toml`:\n\n```toml\n")[2].partition("```")[0]
    assert "steps = 1000" in recipe
    (folder / "tags.toml").write_text(recipe.replace("steps = 1000", "steps = 20"))


def write_new_items(items: pa.Table, path: Path) -> None:
    """Items as a CSV, in which a vector is a JSON list."""
    columns = {name: [None if v is None else str(v) for v in items[name].to_pylist()] for name in items.column_names}
    pyarrow.csv.write_csv(pa.table({name: pa.array(column, pa.string()) for name, column in columns.items()}), path)


def write_later_events(log: Path, path: Path) -> None:
    """The log again, as if all of it had come after its end."""
    events = pq.read_table(log)
    times = events["timestamp"].cast(pa.int64())
    span = pc.add(pc.subtract(pc.max(times), pc.min(times)), 1_000_000)
    later = pc.add(times, span).cast(events["timestamp"].type)
    pq.write_table(events.set_column(events.column_names.index("timestamp"), "timestamp", later), path)


def write_labels(log: Path, folder: Path) -> None:
    """What users earn, by classes, and times at which they are looked at."""
    users = pc.unique(pq.read_table(log)["user_id"]).slice(0, 200)
    classes = pa.array([("low", "high")[user % 2] for user in users.to_pylist()])
    pq.write_table(pa.table({"user_id": users, "income": classes}), folder / "labels.parquet")
    last = pc.max(pq.read_table(log)["timestamp"])
    pq.write_table(pa.table({"user_id": users, "time": pa.array([last.as_py()] * 200)}), folder / "times.parquet")


def write_runs(store: Path, path: Path) -> None:
    """The flat CSV of docs/laws.md with the runs of a store."""
    rows = [
        {
            "axis": one.axis,
            "cell_id": one.cell_id,
            "flops_budget": one.budget,
            "learning_rate": one.learning_rate,
            "seed": one.seed,
            "params": one.knobs["params"],
            "slots_seen": one.knobs["slots_seen"],
            **{name: one.metrics[name] for name in ("train/loss", "batch/loss", "catalogue/recall@10")},
        }
        for one in read_runs(store)
        if one.axis == "allocation"
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_passes(path: Path) -> None:
    """The runs of a log that ends, by a planted law: shares of the users, and passes over each."""
    lines = ["axis,cell_id,flops_budget,learning_rate,seed,params,unique_events,epochs,user_share,user_part,"
             "train/loss,catalogue/recall@10"]  # fmt: skip
    for share in (1.0, 0.5, 0.25, 0.125):
        for part in range(min(4, round(1 / share))):
            for factor in (0.25, 0.5, 1.0, 2.0):
                events, passes = 8e5 * share, factor * 20 * share**0.75
                recall = 0.35 - 0.05 * ((events * passes / 1.6e7) ** -0.5 + (passes - 1) / 40 * (8e5 / events))
                cell = f"{share}-{part}-{factor}"
                lines.append(
                    f"passes,{cell},{6e6 * events * passes},0.01,0,1e6,{events},{passes},{share},{part},5,{recall}"
                )
    path.write_text("\n".join(lines))


@pytest.mark.slow
def test_the_commands_of_the_readme_lead_from_a_log_to_a_served_run(readme: Path) -> None:
    for name in ("schema.toml", "dataset/manifest.json", "study/report.html", "run/stage2/record.json"):
        assert (readme / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page: str, prepared: Path, tmp_path: Path) -> None:
    for name in PYTHON[page].split():
        copy(prepared / name, tmp_path / name)
    for name in (BRIEF, prepared / "passes.csv"):
        shutil.copy(name, tmp_path)
    script = python(page)
    for old, new in PYTHON_SUBSTITUTIONS.items():
        script = script.replace(old, new)
    (tmp_path / "page.py").write_text(PRELUDES.get(page, "") + script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"


def test_pages_with_python_are_those_that_this_test_knows() -> None:
    assert {page for page in pages() if python(page)} == set(PYTHON)
    scripts = "".join(python(page) for page in PYTHON)
    assert [old for old in PYTHON_SUBSTITUTIONS if old not in scripts] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in STARTS if page != "README.md"])
def test_the_commands_of_a_page_run_in_order(page: str, prepared: Path, tmp_path: Path) -> None:
    if "movielens_small" in STARTS[page] and not (prepared / "movielens_small").exists():
        pytest.skip("the real datasets are not beside this checkout")
    for name in STARTS[page].split():
        copy(prepared / name, tmp_path / name)
    shutil.copy(BRIEF, tmp_path)
    walk(page, tmp_path)


def test_pages_with_and_without_commands_are_those_that_this_test_knows() -> None:
    assert {page for page in pages() if commands(page)} == set(STARTS)
    assert {page for page in pages() if not commands(page)} == WITHOUT_COMMANDS


def test_every_substitution_is_used() -> None:
    used: Counter[str] = Counter()
    for page in pages():
        for command in commands(page):
            used.update(old for old in SUBSTITUTIONS if old in command)
    assert set(used) == set(SUBSTITUTIONS)


@pytest.mark.parametrize("command", ["habitus size --flop 1e17", "habitus measure run", "habitus describe nowhere"])
def test_a_command_that_does_not_work_is_found(command: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^a page\n"):
        run(command, tmp_path, "a page")


def test_commands_are_read_with_continued_lines_and_without_comments_or_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "habitus trains models\n\n    habitus size --flops 1e17 \\\n        --json   # a comment\n    make study\n"
        "```sh\nT=$(cat t) habitus serve run\npip install x\n```\nhabitus is prose\n    torchrun -m habitus train # x\n"
    )
    assert commands(str(page)) == [
        "habitus size --flops 1e17 --json",
        "T=$(cat t) habitus serve run",
        "torchrun -m habitus train",
    ]


def links() -> Iterator[tuple[str, str]]:
    for page in all_pages():
        for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            if "://" not in target:
                yield page, target


def test_every_relative_link_points_to_a_file_and_a_heading_that_exist() -> None:
    found = list(links())
    assert len(found) > 40
    for page, target in found:
        name, _, heading = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page} links to {target}, which does not exist"
        if heading:
            assert heading in headings(file), f"{page} links to {target}, a heading that does not exist"


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them from its headings; of HTML, its ids."""
    if page.suffix == ".html":
        return set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}
