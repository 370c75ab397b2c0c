"""The wheel, installed as a user would: into a fresh environment, without extras, used from another folder."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
BRIEF = ROOT / "tests" / "brief.toml"
STUDY = ROOT / "docs" / "studies" / "h200-standard" / "runs.csv"
RECIPE = """\
[data]
seq_len = 32
[model]
joint_dim = 8
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("dist")
    call([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT])
    [built] = folder.glob("habitus-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel and what it depends on, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    install(folder / "bin", str(wheel))
    return folder / "bin"


@pytest.fixture(scope="module")
def run(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a world, a dataset and a run in it, all made by the installed command."""
    folder = tmp_path_factory.mktemp("elsewhere")
    habitus = installed / "habitus"
    call([habitus, "world", "shop", "--users", "300", "--items", "100", "--events-per-user", "20"], folder)
    call([habitus, "prepare", "shop/events.parquet", "shop/items.parquet", "--guess"], folder)
    prepare = ["prepare", "shop/events.parquet", "shop/items.parquet", "--schema", "schema.toml", "--seq-len", "32"]
    call([habitus, *prepare, "--out", "dataset"], folder)
    (folder / "recipe.toml").write_text(RECIPE)
    call([habitus, "train", "recipe.toml", "--data", "dataset", "--out", "run", "--device", "cpu"], folder)
    return folder


def install(programs: Path, what: str) -> None:
    """What pip installs at the versions of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call([*pip, "-c", constraints, what], programs.parent)


def call(command: list[str | Path], folder: Path | None = None) -> str:
    done = attempt(command, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def attempt(command: list[str | Path], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def test_presets_pages_and_published_laws_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assets = [
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "habitus").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    for name in ("sweeps/presets/paper.toml", "laws/published.json", "reporting/assets/page.js", "serving/page.html"):
        assert f"habitus/{name}" in assets
    assert set(assets) <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names} == {"habitus", f"{wheel.name.rpartition('-py3')[0]}.dist-info"}


def test_help_answers_for_every_command(installed: Path, tmp_path: Path) -> None:
    habitus = installed / "habitus"
    listed = call([habitus, "--help"], tmp_path)
    for command in ("study", "prepare", "train", "evaluate", "plan", "serve", "world"):
        assert command in listed
        assert "Usage" in call([habitus, command, "--help"], tmp_path)


def test_a_run_is_evaluated_and_asked_without_extras(installed: Path, run: Path) -> None:
    habitus = installed / "habitus"
    evaluated = json.loads(call([habitus, "evaluate", "run", "--data", "dataset", "--device", "cpu", "--json"], run))
    assert "catalogue/recall@10" in json.dumps(evaluated)
    call([habitus, "plan", "--published", "--flops", "1e18", "--metric", "catalogue/recall@10"], run)
    asked = "import habitus as hb; print(len(hb.Run('run', 'dataset').recommend([1, 2], k=5)))"
    assert call([installed / "python", "-c", asked], run).split() == ["5"]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("serve", "habitus serve run --data dataset --port 0"),
        ("onnx", "habitus export run --onnx onnx"),
        ("png", f"habitus report {STUDY} --out report.html --png figures"),
        ("ray", f"habitus sweep allocation --data dataset --store store --preset {BRIEF} --backend ray"),
        ("track", "python -m habitus.training.track run --to tensorboard"),
    ],
)
def test_a_missing_extra_says_what_to_install(extra: str, command: str, installed: Path, run: Path) -> None:
    program, *arguments = command.split()
    done = attempt([installed / program, *arguments], run)
    assert done.returncode != 0
    assert f"pip install 'habitus[{extra}]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_with_the_extra_serve_it_answers_over_http(wheel: Path, installed: Path, run: Path) -> None:
    install(installed, f"{wheel}[serve]")
    command = [installed / "habitus", "serve", "run", "--data", "dataset", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address, process.communicate(timeout=60)[1]
        body = json.dumps({"history": [{"item_id": 1}], "k": 3}).encode()
        request = urllib.request.Request(
            f"{address[0]}/v1/recommend", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert len(json.load(answer)["items"]) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()
