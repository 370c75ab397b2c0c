"""Files of format 1, as they were written once, are read by the commands of today.

`fixtures/format1` holds a dataset, the two stages of a run (stage 1 with a checkpoint of step 20, stage 2 with a
served catalogue and items that were changed at run time), and a study: its state, its plan, and a store with the
Records of two axes. Bundles and journals of the store's cells are left out. Never write these files again with newer
code: they stand for what users have on their disks.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.recipe import Recipe
from habitus.store import STUDY_RECIPE

FORMAT1 = Path(__file__).parent / "fixtures" / "format1"
STUDY = "--preset preset.toml --axis allocation --plan-flops 4e10 --allow-repeats --workers 1 --device cpu"
# The first items for a history, and their scores, when the files were written.
RECOMMENDED = [(17, 4.0437584), (35, 1.7660949), (18, 1.6178168)]
CELLS = sorted(path.name for path in (FORMAT1 / "study" / "store" / "cells").iterdir())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, as the current folder."""
    shutil.copytree(FORMAT1, tmp_path / "format1")
    monkeypatch.chdir(tmp_path / "format1")
    os.utime("study/store/laws.json")  # a checkout gives files any times; laws are newer than their Records
    return Path()


def habitus(command: str, *more: str) -> str:
    """What a command prints to stdout; it must end with 0."""
    result = CliRunner().invoke(app, [*command.split(), *more])
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"
    return result.stdout


def read_json(path: Path | str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_dataset_is_described(folder: Path) -> None:
    found = json.loads(habitus("describe dataset --json"))
    manifest = read_json("dataset/manifest.json")
    assert (found["users"], found["events"], found["items"], found["seq_len"]) == (240, 6058, 120, 16)
    for split in ("train", "validation"):
        assert found[split]["windows"] == manifest[split]["windows"]


def test_a_run_is_evaluated_to_the_metrics_of_its_record(folder: Path) -> None:
    found = json.loads(habitus("evaluate run/stage1 run/stage2 --data dataset --queries 100 --device cpu --json"))
    for one, stage in zip(found, ("stage1", "stage2"), strict=True):
        record = read_json(f"run/{stage}/record.json")
        assert one["dataset_checksum"] == record["dataset_checksum"]
        assert one["specification"]["batch"]["query_set_checksum"] == record["evaluation"]["query_set_checksum"]
        # Coverage by history length was added since; nothing else is new, and nothing is gone.
        added = set(one["metrics"]) - set(record["metrics"])
        assert all(re.fullmatch(r"\w+/coverage(_union)?@\d+/history=\d+", name) for name in added), added
        for name, metric in record["metrics"].items():
            assert one["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-6, abs=1e-6), name
            assert one["metrics"][name]["n"] == metric["n"], name


def test_a_checkpoint_is_evaluated(folder: Path) -> None:
    found = json.loads(
        habitus("evaluate run/stage1/checkpoints/step-00000020 --data dataset --queries 100 --device cpu --json")
    )
    points = {
        point["metric"]: point["value"]
        for point in read_json("run/stage1/record.json")["trajectory"]
        if point["step"] == 20
    }
    assert points
    for name, value in points.items():
        assert found[0]["metrics"][name]["value"] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def test_a_run_recommends_what_it_did_without_its_dataset(folder: Path) -> None:
    answer = json.loads(habitus("recommend run/stage2 --k 120 --device cpu --json --history", "[17, 4, 5, 17]"))
    ids = [item["item_id"] for item in answer["items"]]
    assert len(ids) == 120
    assert answer["events_used"] == 4
    assert 90210 in ids  # was added at run time
    assert 5 not in ids  # was withdrawn
    for item, (item_id, score) in zip(answer["items"], RECOMMENDED, strict=False):
        assert item["item_id"] == item_id
        assert item["score"] == pytest.approx(score, abs=1e-4)


def test_runs_that_are_done_are_left_as_they_are(folder: Path) -> None:
    before = contents(folder / "run")
    printed = habitus("train stage1.toml stage2.toml --data dataset --out run --resume --device cpu --threads 1")
    assert "run/stage2: 30 steps" in printed
    assert contents(folder / "run") == before


def test_a_checkpoint_is_resumed_to_the_same_end(folder: Path) -> None:
    expected = read_json("run/stage1/record.json")
    Path("run/stage1/record.json").unlink()
    shutil.rmtree("run/stage1/bundle")
    habitus("train stage1.toml --data dataset --out run/stage1 --resume --device cpu --threads 1")
    record = read_json("run/stage1/record.json")
    assert record["recipe_hash"] == expected["recipe_hash"]
    assert record["steps"] == expected["steps"]
    assert record["train"]["loss"] == pytest.approx(expected["train"]["loss"], rel=1e-5)
    assert record["metrics"]["catalogue/loss"]["value"] == pytest.approx(
        expected["metrics"]["catalogue/loss"]["value"], rel=1e-5
    )


def test_recipes_hash_to_the_names_of_their_runs(folder: Path) -> None:
    checksum = read_json("study/store/store.json")["dataset_checksum"]
    assert checksum == read_json("run/stage1/record.json")["dataset_checksum"]
    for name in CELLS:
        assert Recipe.read(folder / "study" / "store" / "cells" / name / "recipe.toml").hash(checksum) == name
    for stage in ("stage1", "stage2"):
        recipe_hash = read_json(f"run/{stage}/record.json")["recipe_hash"]
        assert Recipe.read(folder / "run" / stage / "recipe.toml").hash(checksum) == recipe_hash


def test_a_store_is_listed_and_nothing_of_it_runs_again(folder: Path) -> None:
    found = json.loads(habitus("runs study/store --json"))
    assert found["states"] == {"done": 14, "failed": 0, "running": 0, "stalled": 0, "waiting": 0}
    assert sorted(run["digest"] for run in found["runs"]) == CELLS
    options = "--data dataset --store study/store --preset preset.toml --workers 1 --device cpu --allow-repeats"
    swept = json.loads(habitus(f"sweep negatives {options} --dry-run --json"))
    assert (swept["done"], swept["missing"]) == (2, 0)
    assert {cell["recipe_hash"] for cell in swept["cells"]} <= set(CELLS)


def test_a_deleted_cell_can_be_run_again_from_a_manifest_without_recipes(folder: Path) -> None:
    manifest = read_json("study/store/sweeps/negatives-1.json")
    assert "recipes" not in manifest
    deleted = manifest["cells"][0]["recipe_hash"]
    shutil.rmtree(folder / "study" / "store" / "cells" / deleted)
    options = "--data dataset --store study/store --preset preset.toml --workers 1 --device cpu --allow-repeats"
    swept = json.loads(habitus(f"sweep negatives {options} --dry-run --json"))
    assert [cell["recipe_hash"] for cell in swept["cells"] if cell["status"] == "missing"] == [deleted]
    assert json.loads(habitus("runs study/store --json"))["states"]["waiting"] == 1


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in ("name", "axis", "metric", "budget"))


def test_the_laws_of_a_store_are_those_of_its_file(folder: Path) -> None:
    metrics = "--metric catalogue/recall@10 --metric batch/loss"
    fitted = json.loads(habitus(f"fit study/store --out again.json {metrics} --json"))
    kept = read_json("study/store/laws.json")
    by_place = {_place(entry): entry for entry in fitted["entries"]}
    # Laws that were added since are the only ones that the file lacks.
    assert {name for name, *_ in set(by_place) - {_place(entry) for entry in kept["entries"]}} <= {
        "size_test",
        STUDY_RECIPE,
    }
    for old in kept["entries"]:
        new = by_place[_place(old)]
        assert new["law"]["status"] == old["law"]["status"], new["name"]
        assert new["law"].get("values") == pytest.approx(old["law"].get("values"), rel=1e-3), new["name"]


def test_a_plan_and_a_page_are_made_of_a_store(folder: Path) -> None:
    plan = json.loads(habitus("plan --laws study/store --flops 4e10 --data dataset --json"))
    registered = read_json("study/plan.json")
    assert set(plan["quantities"]) >= {"params", "embedder_share", "batch_sequences"}
    # Plans say more than they did: how often the log is passed, and against how much dropout.
    assert set(plan["quantities"]) == {*registered["quantities"], "passes", "dropout"}
    check = json.loads(habitus("plan --check run --against study/plan.json --json"))
    assert check["hash"] == registered["registered_hash"]  # else the file was changed
    assert not any(check["same_recipe"].values())
    habitus("report study/store --out page.html --plan study/plan.json")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "</html>" in page
    assert "1.4·10⁸" in page


def test_a_study_goes_on_from_its_state(folder: Path) -> None:
    state = json.loads(habitus(f"study --data dataset --out study {STUDY} --resume --dry-run --json"))
    kept = read_json("study/study.json")
    assert {key: state["preset"][key] for key in kept["preset"]} == kept["preset"]  # presets have more keys by now
    assert {**state, "preset": None} == {**kept, "preset": None}
