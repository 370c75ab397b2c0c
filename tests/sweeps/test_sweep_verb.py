"""The verb and its commands: rounds, dependencies between axes, dry runs, limits and refusals."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.laws import fit
from habitus.sweeps import Preset, Store, list_runs, sweep
from habitus.sweeps.attempts import same_measurement
from habitus.sweeps.manifest import load_manifests

COMMAND = [sys.executable, "-m", "habitus"]


@pytest.fixture(scope="module")
def small(tiny: Preset) -> Preset:
    """The tiny preset with fewer cells, at budgets that a blink pays for."""
    allocation = tiny.allocation.model_copy(
        update={"num_shapes": 3, "extend": 1, "widen": 1, "centres": ((4e7, 1e3),), "regimes": ("batch",)}
    )
    negatives = tiny.negatives.model_copy(update={"num_negatives": (0, 16, 100_000)})
    return tiny.model_copy(
        update={"name": "small", "budgets": (4e7,), "allocation": allocation, "negatives": negatives}
    )


@pytest.fixture(scope="module")
def swept(
    small: Preset, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], dict[str, object]]:
    """A store with an allocation sweep and the negatives that continue it."""
    store = tmp_path_factory.mktemp("swept") / "store"
    notes: list[str] = []
    results = {
        axis: sweep(axis, dataset, store, preset=small, workers=1, device="cpu", note=notes.append)
        for axis in ("allocation", "negatives")
    }
    return store, notes, results


def test_a_sweep_runs_every_cell_and_extends_grids_at_the_edge(swept: tuple, small: Preset) -> None:
    store, notes, results = swept
    result = results["allocation"]
    assert result.complete and result.number("done") == len(result.runs) > 9
    assert any("at the edge of its grid" in text for text in notes)
    (file,) = load_manifests(store, "allocation")
    assert {row.recipe_hash for row in file.manifest.cells} == {run.planned.hash for run in result.runs}
    by_cell: dict[str, set[float]] = {}
    for row in file.manifest.cells:
        by_cell.setdefault(row.cell_id, set()).add(row.learning_rate)
    assert all(len(rates) in (3, 4) for rates in by_cell.values())
    assert max(len(rates) for rates in by_cell.values()) == 4


def test_negatives_continue_the_allocation_winner_and_fit_is_run_and_said(swept: tuple) -> None:
    store, notes, results = swept
    assert any("running `habitus fit" in text for text in notes) and (store / "laws.json").exists()
    opened = Store.open(store)
    losses = {}
    laws = json.loads((store / "laws.json").read_text())
    for run in laws["runs"]:
        if run["axis"] == "allocation" and run["chosen"]:
            losses[run["cell_id"], run["learning_rate"]] = run["metrics"]["batch/loss"]
    best = min(losses, key=lambda key: losses[key])
    (file,) = load_manifests(store, "allocation")
    (winner,) = [r.recipe_hash for r in file.manifest.cells if (r.cell_id, r.learning_rate) == best]
    for run in results["negatives"].runs:
        record = opened.record(run.planned.hash)
        assert record is not None and record.parent_hash == winner and "catalogue/loss" in record.metrics
    assert [out.reason for out in results["negatives"].design.left_out] == ["K is more than the catalogue's 300 items"]


def test_the_same_sweep_again_runs_nothing_though_the_store_has_learnt(
    swept: tuple, small: Preset, dataset: Dataset
) -> None:
    store, _, results = swept
    for axis, first in results.items():
        again = sweep(axis, dataset, store, preset=small, workers=1, device="cpu")
        assert again.counts["published"] == 0 and again.manifests == first.manifests
        assert {run.planned.hash for run in again.runs} == {run.planned.hash for run in first.runs}


def test_a_dry_run_costs_cells_and_writes_nothing(
    swept: tuple, small: Preset, dataset: Dataset, tmp_path: Path
) -> None:
    result = sweep("allocation", dataset, tmp_path / "new", preset=small, dry_run=True, device="cpu", workers=2)
    assert result.dry_run and not (tmp_path / "new").exists()
    assert result.number("missing") == len(result.runs) == 9
    assert result.estimated_seconds > 0 and "assumed" in result.estimate_source
    assert result.flops_missing == sum(run.planned.cell.flops for run in result.runs) == pytest.approx(9 * 4e7, rel=0.2)
    existing = sweep("allocation", dataset, swept[0], preset=small, dry_run=True, device="cpu")
    assert existing.complete and "measured on" in existing.estimate_source


def test_time_that_is_up_leaves_a_sweep_that_goes_on(small: Preset, dataset: Dataset, tmp_path: Path) -> None:
    result = sweep("allocation", dataset, tmp_path / "store", preset=small, workers=1, max_hours=0.5 / 3600)
    assert result.stopped == "time is up" and result.number("missing") > 0
    more = sweep("allocation", dataset, tmp_path / "store", preset=small, workers=1, max_hours=1)
    assert more.complete and not more.stopped
    assert more.counts["published"] + result.counts["published"] == len(more.runs)


def test_batch_sizes_that_miss_the_middle_ones_loss_go_on_in_both_arms_up_to_a_limit(
    tiny: Preset, dataset: Dataset, tmp_path: Path
) -> None:
    settings = tiny.batch.model_copy(update={"pool_sequences": 2, "max_multiple": 2.0, "evaluations": 4})
    preset = tiny.model_copy(update={"batch": settings})
    notes: list[str] = []
    options = {"preset": preset, "budgets": [4e7], "workers": 1, "device": "cpu", "allow_repeats": True}
    result = sweep("batch", dataset, tmp_path / "store", note=notes.append, **options)  # type: ignore[arg-type]
    steps: dict[tuple[int, int], list[int]] = {}
    for run in result.runs:
        train = run.planned.recipe.train
        steps.setdefault((train.batch_sequences, train.pool_sequences or 0), []).append(train.steps)
        assert (train.warmup_steps is not None) == (
            train.steps != min(steps[train.batch_sequences, train.pool_sequences or 0])
        )
    assert set(steps) == {(2, 0), (4, 0), (8, 0), (4, 2), (8, 2)}
    assert len(steps[4, 0]) == len(steps[4, 2]) == 1  # the middle one sets the target
    # Few steps of eight windows never reach what twice as many of four did with the same compute.
    assert steps[8, 0] == [steps[8, 0][0] * times for times in (1, 2)]
    assert any("have not reached the loss of the middle batch size" in text for text in notes)
    again = sweep("batch", dataset, tmp_path / "store", **options)  # type: ignore[arg-type]
    assert again.complete and again.counts["published"] == 0
    laws = fit(tmp_path / "store", ["batch/loss"], allow_repeats=True)
    assert {e.name for e in laws.entries} == {"critical_batch", "critical_batch_fixed_pool"}


def test_requests_that_cannot_be_met_are_refused(swept: tuple, small: Preset, dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no cell of the allocation axis can be run at 1000 FLOPs: cannot be built: one step"
    ):
        sweep("allocation", dataset, tmp_path / "store", preset=small, budgets=[1e3])
    assert not (tmp_path / "store").exists()
    for wrong in ({"workers": 0}, {"seeds": 0}, {"max_hours": 0.0}, {"backend": "slurm"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            sweep("share", dataset, tmp_path / "store", preset=small, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'depth'"):
        sweep("dept", dataset, tmp_path / "store", preset=small)


def test_a_store_of_another_dataset_is_refused(swept: tuple, small: Preset, dataset: Dataset, tmp_path: Path) -> None:
    shutil.copytree(swept[0], tmp_path / "store")
    info = json.loads((tmp_path / "store" / "store.json").read_text())
    del info["sha256"]  # as an earlier version wrote it
    (tmp_path / "store" / "store.json").write_text(json.dumps(info | {"dataset_checksum": "0" * 64}))
    with pytest.raises(RunError, match="belongs to another dataset"):
        sweep("share", dataset, tmp_path / "store", preset=small)


def test_a_hand_edited_record_stops_the_sweep(swept: tuple, small: Preset, dataset: Dataset, tmp_path: Path) -> None:
    shutil.copytree(swept[0], tmp_path / "store")
    path = next((tmp_path / "store").glob("cells/*/record.json"))
    path.write_text(path.read_text().replace('"status": "done"', '"status": "well done"'))
    with pytest.raises(RunError, match=r"record\.json has been changed since it was published"):
        sweep("allocation", dataset, tmp_path / "store", preset=small, workers=1)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_the_command_lists_cells_and_the_store_lists_runs(swept: tuple, dataset: Dataset, tmp_path: Path) -> None:
    data = str(dataset.path)
    dry = run_command(
        "sweep", "share", "--data", data, "--store", str(tmp_path / "new"), "--preset", "tiny", "--dry-run", "--json"
    )
    assert dry.returncode == 0, dry.stderr
    values = json.loads(dry.stdout)
    assert values["missing"] == len(values["cells"]) == 5 and values["left_out"] and not (tmp_path / "new").exists()
    assert {"cell_id", "flops_budget", "wanted", "realised", "learning_rate", "seed", "recipe_hash", "bytes"} <= set(
        values["cells"][0]
    )
    none = run_command(
        "sweep", "share", "--data", data, "--store", str(tmp_path / "new"), "--budgets", "1e20", "--dry-run"
    )
    assert none.returncode == 2 and "no cell can be run" in none.stdout
    listed = run_command("runs", str(swept[0]), "--axis", "negatives", "--json")
    values = json.loads(listed.stdout)
    assert values["states"]["done"] == 2 and values["duplicates"] == 0 and values["seconds_left"] == 0.0
    table = run_command("runs", str(swept[0]), "--status", "done", "--budget", "4e7")
    assert "allocation" in table.stdout and "K=16" in table.stdout and "0 duplicates" in table.stdout
    assert table.stdout.index("0 duplicates") < table.stdout.index("K=16")  # the sums come first
    assert "all" in run_command("runs", str(swept[0]), "--watch").stdout  # ends by itself: everything is done
    wrong = run_command("runs", str(tmp_path))
    assert wrong.returncode == 1 and "holds no store.json" in wrong.stderr
    (tmp_path / "runs.store.xz").touch()
    archive = run_command("runs", str(tmp_path / "runs.store.xz"))
    assert archive.returncode == 1 and "runs.store.xz is a file" in archive.stderr
    assert "status 'finished' is unknown" in run_command("runs", str(swept[0]), "--status", "finished").stderr
    assert 'name = "quick"' in run_command("sweep", "share", "--preset", "quick", "--print-preset").stdout


@pytest.mark.slow
def test_two_machines_given_the_same_command_share_the_work(dataset: Dataset, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [*COMMAND, "sweep", "depth", "--preset", "tiny", "--budgets", "1e8,2e8", "--workers", "1"]
    command += ["--data", str(dataset.path), "--store", str(store), "--device", "cpu", "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    values = [json.loads(process.communicate(timeout=300)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [value["done"] for value in values] == [10, 10]
    assert sum(value["counts"]["published"] for value in values) == 10
    assert [file.path.name for file in load_manifests(store)] == ["depth-1.json"]


@pytest.mark.parametrize("manifest", ["with recipes", "of an earlier version"])
def test_deleted_cells_are_listed_and_run_again(
    swept: tuple, small: Preset, dataset: Dataset, tmp_path: Path, manifest: str
) -> None:
    store, _, results = swept
    shutil.copytree(store, tmp_path / "store")
    opened = Store.open(tmp_path / "store")
    if manifest != "with recipes":
        for file in load_manifests(opened.path):
            file.manifest.model_copy(update={"recipes": {}}).write(file.path)
    first, last = results["allocation"].runs[0].planned, results["negatives"].runs[-1].planned
    assert last.parent is not None
    deleted = {first.hash, last.hash, last.parent}
    before = {digest: opened.record(digest) for digest in deleted}
    for digest in deleted:
        shutil.rmtree(opened.cell(digest))
    listed = {run.digest: run for run in list_runs(opened.path).runs}
    assert {digest for digest, run in listed.items() if run.state == "waiting"} == deleted
    assert listed[first.hash].steps == first.recipe.train.steps and listed[first.hash].params == first.cell.params
    dry = sweep("negatives", dataset, opened.path, preset=small, workers=1, device="cpu", dry_run=True)
    assert {run.planned.hash for run in dry.runs if run.status == "missing"} == {last.hash, last.parent}
    assert not any(opened.cell(digest).exists() for digest in deleted)
    for axis in ("negatives", "allocation"):  # the parent is an allocation run, and is trained first
        assert sweep(axis, dataset, opened.path, preset=small, workers=1, device="cpu").complete
    for digest, record in before.items():
        again = Store.open(opened.path).record(digest)
        assert again is not None and record is not None and same_measurement(again, record)


def test_a_cell_that_no_manifest_describes_is_refused_with_a_repair_that_works(
    swept: tuple, small: Preset, dataset: Dataset, tmp_path: Path
) -> None:
    shutil.copytree(swept[0], tmp_path / "store")
    (file,) = load_manifests(tmp_path / "store", "allocation")
    file.manifest.model_copy(update={"recipes": {}}).write(file.path)
    for row in file.manifest.cells:
        shutil.rmtree(tmp_path / "store" / "cells" / row.recipe_hash)
    with pytest.raises(RunError, match=r"allocation-1\.json and run the sweep again"):
        sweep("allocation", dataset, tmp_path / "store", preset=small, workers=1, device="cpu", dry_run=True)
    file.path.unlink()
    assert sweep("allocation", dataset, tmp_path / "store", preset=small, dry_run=True, device="cpu").number("missing")
