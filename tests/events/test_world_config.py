"""Knobs and the command: what is wrong is said in a sentence, what is right is written whole."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.errors import ConfigError, DataError, HabitusError
from habitus.events.schema import Schema
from habitus.events.world import MixtureWeights, World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA, write_world

WEIGHTS = MixtureWeights().to_values()
SMALL = ["--users", "30", "--items", "50", "--events-per-user", "12"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"copy_windw": 3}, "unknown key 'copy_windw' (did you mean 'copy_window'?)"),
        ({"weights": WEIGHTS | {"populer": 0.1}}, "unknown key 'weights.populer' (did you mean 'popular'?)"),
        ({"weights": WEIGHTS | {"popular": 0.15}}, "weights sum to 1.1, not to 1"),
        ({"weights": WEIGHTS | {"popular": -0.05, "kind_taste": 0.5}}, "weights.popular = -0.05"),
        ({"num_users": 0}, "num_users = 0"),
        ({"num_items": 1}, "num_items = 1"),
        ({"num_items": 10**9}, "num_items = 1000000000"),
        ({"events_per_user": 3.0}, "events_per_user = 3 is not between min_events_per_user = 5"),
        ({"events_per_user": float("nan")}, "events_per_user = nan"),
        ({"taste_prior": 0.0}, "taste_prior = 0.0"),
        ({"num_successors": 1024}, "num_successors = 1024"),
        ({"seed": -1}, "seed = -1"),
        ({"weights": WEIGHTS | {"kind_taste": 0.3, "topic_taste": 0.1}}, "but num_topics = 0"),
        ({"seed": 2**32}, "seed = 4294967296"),
        ({"missing_rate": 1.0}, "missing_rate = 1.0"),
    ],
)
def test_bad_knobs_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorldConfig.parse(values, "knobs.toml")
    assert message in str(caught.value) and "knobs.toml" in str(caught.value)


def test_every_knob_is_described() -> None:
    for model in (WorldConfig, MixtureWeights):
        assert all(field.description or name == "weights" for name, field in model.model_fields.items())


def test_weights_of_zero_never_happen() -> None:
    weights = MixtureWeights(**dict.fromkeys(WEIGHTS, 0.0) | {"copy_recent": 1.0})
    items, starts = World(WorldConfig(num_items=100, weights=weights)).histories(0, 200)
    assert np.array_equal(items, np.repeat(items[starts], np.diff(starts, append=len(items))))


def test_a_written_world_comes_back_with_its_oracle(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=40, num_items=60, events_per_user=9, seed=5))
    phases = []
    count = write_world(world, tmp_path / "w", threads=2, progress=lambda *step: phases.append(step))
    assert {path.name for path in (tmp_path / "w").iterdir()} == {"events.parquet", "items.parquet", "schema.toml"}
    world.config.write(tmp_path / "knobs.toml")
    assert phases[0] == ("items", 0.0) and all(0 <= share <= 1 for _, share in phases)
    for path in (tmp_path / "w", tmp_path / "w" / "schema.toml", tmp_path / "knobs.toml"):
        again = World.read(path)
        assert again.config == world.config
        assert np.array_equal(again.conditional([1, 2, 3]), world.conditional([1, 2, 3]))

    events = pq.read_table(tmp_path / "w" / "events.parquet")
    assert events.num_rows == count and events.equals(world.events(0, 40))
    assert pq.read_table(tmp_path / "w" / "items.parquet").equals(world.items(0, 60))
    schema = Schema.read(tmp_path / "w" / "schema.toml")
    assert set(schema.events.fields) <= set(events.column_names)
    assert set(schema.items.fields) | {schema.items.item} == set(world.items(0, 1).column_names)


def test_a_log_that_is_no_world_has_no_oracle(tmp_path: Path) -> None:
    WORLD_SCHEMA.write(tmp_path / "schema.toml")
    with pytest.raises(ConfigError, match="no synthetic world"):
        World.read(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        World.read(tmp_path / "nowhere")


def test_large_worlds_have_several_row_groups(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=400, num_items=60, events_per_user=9))
    write_world(world, tmp_path / "w", threads=1, progress=lambda *_: None, events_per_block=900)
    file = pq.ParquetFile(tmp_path / "w" / "events.parquet")
    assert file.num_row_groups == 4
    assert file.read().equals(world.events(0, 400))


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def no_file_above_100_kb() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    result = subprocess.run(
        [sys.executable, "-c", "from habitus.cli import main; main()", "world", "w", "--users", "2000"],
        cwd=tmp_path, capture_output=True, text=True, preexec_fn=no_file_above_100_kb,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("habitus: w could not be written: ")
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_no_folder_can_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be written"):
        write_world(World(WorldConfig()), tmp_path / "file" / "w", threads=1, progress=lambda *_: None)


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    with pytest.raises(DataError, match="exists already"):
        write_world(World(WorldConfig()), tmp_path / "w", threads=1, progress=lambda *_: None)
    assert list((tmp_path / "w").iterdir()) == []


def test_the_command_says_what_it_made_and_what_comes_next(tmp_path: Path) -> None:
    out = tmp_path / "shop"
    result = CliRunner().invoke(app, ["world", str(out), *SMALL, "copy_window=3", "num_brands=7"])
    assert result.exit_code == 0, result.output
    assert "of 30 users on 50 items" in result.stdout and "nats" in result.stdout
    assert f"habitus prepare {out}/events.parquet {out}/items.parquet --schema {out}/schema.toml" in result.stdout
    config = World.read(out).config
    assert (config.copy_window, config.num_brands, config.events_per_user) == (3, 7, 12)

    copy = CliRunner().invoke(
        app, ["world", str(tmp_path / "b"), "--config", str(out / "schema.toml"), "--seed", "9", "--json"]
    )
    printed = json.loads(copy.stdout)
    assert World.read(tmp_path / "b").config == config.model_copy(update={"seed": 9})
    assert printed["num_events"] == pq.read_metadata(tmp_path / "b" / "events.parquet").num_rows
    assert 0 < printed["entropy_floor"]["value"] < np.log(50)


def test_the_example_in_the_help_works(tmp_path: Path) -> None:
    from habitus.cli.world import EXAMPLE

    command = EXAMPLE.partition("`")[2].rstrip("`").split()
    result = subprocess.run(
        [sys.executable, "-c", "from habitus.cli import main; main()", *command[1:], "--users", "50"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "shop" / "events.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the folder to write is missing"),
        (["copy_window=3"], "looks like a knob"),
        (["{out}", "copy_windw=3"], "did you mean 'copy_window'?"),
        (["{out}", "copy_window"], "has no '='"),
        (["{out}", "--users", "0"], "num_users = 0"),
        (["{out}", "--config", "nowhere.toml"], "nowhere.toml does not exist"),
        (["{out}", "--like", "log"], "--like 'log' is not a choice"),
        (["{out}", "--like", "logs", "--config", "nowhere.toml"], "--like and --config were both given"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, arguments: list[str], message: str) -> None:
    filled = [argument.format(out=tmp_path / "w") for argument in arguments]
    result = CliRunner().invoke(app, ["world", *filled])
    assert isinstance(result.exception, HabitusError) and message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_every_knob_is_listed() -> None:
    result = CliRunner().invoke(app, ["world", "--list-knobs"])
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert {"copy_window", "weights.popular", "num_users"} <= set(names)


def test_the_python_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "world.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["queries"].count == 100
