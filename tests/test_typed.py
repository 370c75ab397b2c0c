import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from habitus.errors import ConfigError
from habitus.files import sha256_of, staged_folder, write_atomic
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.typed import _format_json, apply_overrides, canonical_json, to_toml

RECIPE = {
    "model": {"joint_dim": 44, "width": 128, "depth": 8},
    "train": {"batch_sequences": 64, "steps": 1645, "learning_rate": 7e-4},
}


def recipe(**changes: object) -> Recipe:
    return Recipe.parse(apply_overrides(RECIPE, [f"{key}={value}" for key, value in changes.items()]), "test")


def test_a_recipe_survives_toml_and_json(tmp_path: Path) -> None:
    one = recipe(**{"train.stage": 2, "train.parent": "abc", "train.num_negatives": 1000})
    for name in ("recipe.toml", "recipe.json"):
        one.write(tmp_path / name)
        assert Recipe.read(tmp_path / name) == one
    assert (tmp_path / "recipe.toml").read_text().startswith("[data]\nseq_len = 256\n")


def test_the_hash_depends_on_what_matters_and_on_nothing_else() -> None:
    base = recipe().hash("data")
    assert recipe().hash("data") == base
    assert len(base) == 64
    assert recipe().hash("other data") != base
    for change in (
        "model.width=160",
        "train.seed=1",
        "train.learning_rate=8e-4",
        "evaluate.queries=10",
        "data.seq_len=128",
    ):
        key, _, value = change.partition("=")
        assert recipe(**{key: value}).hash("data") != base, change
    reordered = Recipe.parse({"train": dict(reversed(RECIPE["train"].items())), "model": RECIPE["model"]}, "test")
    assert reordered.hash("data") == base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.widht": 128}, r"unknown key 'model.widht' \(did you mean 'width'\?\)"),
        ({"modle.width": 128}, r"unknown key 'modle' \(did you mean 'model'\?\)"),
        ({"model.width": 130}, r"130 is not a multiple of head_dim 32; the nearest is 128"),
        ({"train.steps": 0}, r"train.steps = 0"),
        ({"train.num_negatives": 5}, r"stage 1 has in-batch candidates only"),
        ({"train.stage": 2}, r"parent must be its hash"),
        ({"train.optimizer": "sgd"}, r"not an optimizer \(known: adamw, muon\)"),
        ({"train.learning_rate": "nan"}, r"learning_rate"),
    ],
)
def test_a_bad_recipe_names_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**changes)


def test_a_missing_key_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'train' is missing"):
        Recipe.parse({"model": RECIPE["model"]}, "test")
    (tmp_path / "a.toml").write_text("[model")
    with pytest.raises(ConfigError, match="cannot be parsed"):
        Recipe.read(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="does not exist"):
        Recipe.read(tmp_path / "b.toml")


def test_overrides_make_a_new_value_and_refuse_nonsense() -> None:
    changed = apply_overrides(RECIPE, ["train.steps=500", "train.optimizer=muon", "model.init = 'mup'"])
    assert changed["train"]["steps"] == 500
    assert changed["train"]["optimizer"] == "muon"
    assert changed["model"]["init"] == "mup"
    assert RECIPE["train"]["steps"] == 1645
    with pytest.raises(ConfigError, match="no '='"):
        apply_overrides(RECIPE, ["train.steps"])
    with pytest.raises(ConfigError, match="is a value, not a section"):
        apply_overrides(RECIPE, ["train.steps.more=1"])


toml_values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.dictionaries(st.text(min_size=1), inner, max_size=4) | st.lists(st.integers(0, 9), max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(min_size=1), toml_values, max_size=5))
def test_toml_text_reads_back_as_it_was(values: dict[str, object]) -> None:
    import tomllib

    assert tomllib.loads(to_toml(values)) == values


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(NESTED)
def test_json_is_indented_as_the_standard_library_does(values: object) -> None:
    assert _format_json(values) == json.dumps(values, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_no_word_for_what_is_no_number(value: float) -> None:
    for place in (value, [1.0, value], {"a": {"b": [value]}}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            _format_json(place)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "ü"]}) == '{"a":[1.5,"ü"],"b":1}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_records_hold_what_the_protocol_names(tmp_path: Path) -> None:
    done = {
        "recipe": recipe().to_values(),
        "recipe_hash": "h",
        "dataset_checksum": "d",
        "status": "done",
        "params": {"embedder": 10, "contextualizer": 90, "vocabulary": 5},
        "train": {"in_batch_loss": 7.0, "loss": 7.0},
        "metrics": {"batch/loss": {"value": 7.1, "se": 0.01, "n": 100}},
        "trajectory": [{"step": 50, "metric": "batch/loss", "value": 8.0}],
        "seed": 0,
    }
    record = Record.parse(done, "test")
    assert record.params is not None
    assert record.params.total == 100
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    assert "flops_executed" not in (tmp_path / "record.json").read_text(), "what is missing is absent"
    for change, message in [
        ({"status": "failed"}, "must have a reason"),
        ({"train": None}, "must have params and train losses"),
        ({"metrics": {"batch/loss": {"value": float("nan"), "n": 1}}}, "batch/loss.value"),
        ({"schema_version": 2}, "schema_version"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Record.parse(done | change, "test")
    failed = Record.parse(done | {"status": "failed", "reason": "loss is not finite at step 7", "train": None}, "test")
    assert failed.train is None


def test_write_atomic_replaces_whole_files_and_leaves_nothing_beside(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"one")
    write_atomic(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert sha256_of(tmp_path / "a") == "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"


def test_a_staged_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "out") as stage:
        (stage / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with staged_folder(tmp_path / "out") as stage:
        (stage / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "x"
    with pytest.raises(OSError, match="exists already"), staged_folder(tmp_path / "out") as stage:
        (stage / "file").write_text("y")
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_leftovers_of_a_dead_process_are_cleared_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    import socket

    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    leftover = tmp_path / f".out.partial-{socket.gethostname()}-{int(dead.stdout)}"
    living = tmp_path / f".out.partial-{socket.gethostname()}-{os.getppid()}"
    elsewhere = tmp_path / ".out.partial-another-host-1"
    for folder in (leftover, living, elsewhere):
        folder.mkdir()
    with staged_folder(tmp_path / "out") as stage:
        (stage / "file").write_text("x")
    assert not leftover.exists()
    assert living.exists()
    assert elsewhere.exists()
