"""The commands as a person types them: in processes of their own, from a world to its description."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from habitus.cli import app

from .in_process import habitus_here


def habitus(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "habitus", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small world in `shop`."""
    folder = tmp_path_factory.mktemp("commands")
    made = habitus("world", "shop", "--users", 300, "--items", 200, "--events-per-user", 20, "--seed", 3, cwd=folder)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return folder


def test_the_printed_next_commands_work_one_after_the_other(place: Path) -> None:
    tables = ["shop/events.parquet", "shop/items.parquet"]
    prepared = habitus(
        "prepare", *tables, "--schema", "shop/schema.toml", "--out", "dataset", "--seq-len", 32, cwd=place
    )
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stderr == ""
    assert "Next: habitus describe dataset" in prepared.stdout
    described = habitus("describe", "dataset", cwd=place)
    assert described.returncode == 0
    assert described.stderr == ""
    assert "slots filled" in described.stdout
    as_json = json.loads(habitus("describe", "dataset", "--json", cwd=place).stdout)
    assert as_json["users"] == 300
    assert as_json["items"] == 200


def test_a_world_prepared_directly_is_the_same_dataset(place: Path) -> None:
    common = ["--users", 300, "--items", 200, "--events-per-user", 20, "--seed", 3]
    direct = habitus("world", "direct", "--prepared", "--seq-len", 32, *common, cwd=place)
    assert direct.returncode == 0, direct.stderr
    tables = ["shop/events.parquet", "shop/items.parquet"]
    habitus("prepare", *tables, "--schema", "shop/schema.toml", "--out", "via", "--seq-len", 32, cwd=place)
    checksums = [
        json.loads(habitus("describe", name, "--json", cwd=place).stdout)["checksum"] for name in ("direct", "via")
    ]
    assert checksums[0] == checksums[1]


def test_guess_writes_a_schema_that_prepare_takes(place: Path) -> None:
    tables = ["shop/events.parquet", "shop/items.parquet"]
    guessed = habitus("prepare", *tables, "--guess", "--schema", "guessed.toml", cwd=place)
    assert guessed.returncode == 0, guessed.stderr
    assert 'title = "text"' in guessed.stdout
    prepared = habitus("prepare", *tables, "--schema", "guessed.toml", "--out", "from_guess", "--json", cwd=place)
    assert prepared.returncode == 0, prepared.stderr
    assert json.loads(prepared.stdout)["num_users"] == 300
    again = habitus("prepare", *tables, "--guess", "--schema", "guessed.toml", cwd=place)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    named = habitus(
        "prepare", *tables, "--guess", "--schema", "named.toml", "--role", "item=item_id", "--role", "user=user_id",
        cwd=place,
    )  # fmt: skip
    assert named.returncode == 0, named.stderr
    assert (place / "named.toml").read_text() == (place / "guessed.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "a", "b", "--guess", "--role", "user"], "--role 'user'"),
        (["prepare", "a", "b", "--role", "user=u", "--out", "o"], "--role was given without --guess"),
        (
            ["prepare", "nowhere.parquet", "x.parquet", "--schema", "shop/schema.toml", "--out", "o"],
            "nowhere.parquet does not exist",
        ),
        (["prepare", "a", "b", "--schema", "missing.toml", "--out", "o"], "missing.toml does not exist"),
        (["prepare", "a", "b", "--schema", "shop/schema.toml"], "--out is missing"),
        (
            ["prepare", "a", "b", "--schema", "shop/schema.toml", "--out", "o", "--split", "users"],
            "'users' is not a choice",
        ),
        (["prepare", "a", "b", "--schema", "shop/schema.toml", "--out", "shop"], "shop exists already"),
        (["describe", "shop"], "holds no manifest.json"),
    ],
)
def test_failures_are_one_message_and_exit_code_one(place: Path, arguments: list[str], message: str) -> None:
    failed = habitus_here(*arguments, cwd=place)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("habitus: ")
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_every_command_has_help_with_an_example() -> None:
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert names[:3] == ["prepare", "describe", "train"] and len(names) == len(set(names)) == 21
    for name in names:
        shown = habitus_here(name, "--help", cwd=Path.cwd())
        assert shown.returncode == 0
        assert "Example" in shown.stdout, f"habitus {name} --help shows no example"


def test_help_loads_neither_torch_nor_arrow_nor_duckdb() -> None:
    heavy = ("torch", "pyarrow", "duckdb", "numpy", "scipy")
    code = f"import sys, habitus.cli; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
