"""What a plan forecasts is of the evaluation that the laws' runs had, and the planned run is to have it too."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from habitus.cli import app
from habitus.data.dataset import Dataset
from habitus.planning import PlanOptions, plan
from habitus.planning.facts import DatasetProfile, StoreFacts, planned_evaluation
from habitus.recipe import Recipe
from habitus.record import EvaluationSpec, Metric, Params, TrainLosses
from habitus.store import EvaluationFiles, Laws, ManifestRow, StoreInfo, SweepManifest
from tests.sealing import seal_records

from .planted import example_recipe, record_of, rows

CHECKSUM = "d" * 64


def write_store(folder: Path, query_sets: tuple[str, ...] = ("q",), **evaluate: Any) -> Path:
    """A store of the planted allocation runs, evaluated as given; the query sets take turns."""
    settings = {"queries": 500, "batch_sequences": 16, "catalogue_items": 90, "seed": 4, **evaluate}
    cells = []
    for i, row in enumerate(row for row in rows() if row["axis"] == "allocation"):
        values = example_recipe().to_values()
        values["train"] |= {"learning_rate": row["learning_rate"], "steps": 300 + i}
        recipe = Recipe.parse({**values, "evaluate": {**settings, "regimes": ["batch", "catalogue"]}}, "planted")
        record = record_of(
            recipe,
            CHECKSUM,
            flops_budget=row["flops_budget"],
            params=Params(embedder=int(0.05 * row["params"]), contextualizer=int(0.95 * row["params"]), vocabulary=5),
            slots_seen=int(row["slots_seen"]),
            train=TrainLosses(in_batch_loss=row["train/loss"], loss=row["train/loss"]),
            metrics={name: Metric(value=row[name], n=500) for name in ("batch/loss", "catalogue/recall@10")},
            evaluation=EvaluationSpec(
                queries=500, batch_sequences=16, candidates=90, query_set_checksum=query_sets[i % len(query_sets)]
            ),
        )
        (folder / "cells" / record.recipe_hash).mkdir(parents=True)
        record.write(folder / "cells" / record.recipe_hash / "record.json")
        cells.append(
            ManifestRow(
                cell_id=f"{row['cell_id']}",
                flops_budget=row["flops_budget"],
                learning_rate=row["learning_rate"],
                seed=0,
                recipe_hash=record.recipe_hash,
                wanted={},
                realised={},
            )
        )
    (folder / "sweeps").mkdir()
    SweepManifest(axis="allocation", preset="tiny", cells=tuple(cells)).write(folder / "sweeps" / "allocation-1.json")
    files = EvaluationFiles(**settings, query_set_checksum="q", queries_sha256="s")
    StoreInfo(dataset_checksum=CHECKSUM, evaluation=files).write(folder / "store.json")
    seal_records(folder)
    return folder


def fitted(store: Path, target: Path) -> Path:
    result = CliRunner().invoke(app, ["fit", str(store), "--out", str(target), "--metric", "batch/loss"])
    assert result.exit_code == 0, result.output
    return target


def test_laws_apart_from_their_store_carry_its_evaluation_into_the_recipes(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    beside = plan(3e13, "batch/loss", PlanOptions(laws=fitted(store, store / "laws.json")))
    apart = plan(3e13, "batch/loss", PlanOptions(laws=fitted(store, tmp_path / "elsewhere.json")))
    assert apart.predictions
    assert apart.stage1.evaluate == beside.stage1.evaluate
    evaluate = apart.stage1.evaluate
    assert (evaluate.queries, evaluate.batch_sequences, evaluate.catalogue_items, evaluate.seed) == (500, 16, 90, 4)
    assert not any("forecasts are of the evaluation" in w for w in (*beside.warnings, *apart.warnings))


def test_laws_that_do_not_say_their_evaluation_are_read_and_warned_of(tmp_path: Path) -> None:
    laws = Laws.read(fitted(write_store(tmp_path / "store"), tmp_path / "elsewhere.json"))
    laws.model_copy(update={"evaluation": None}).write(tmp_path / "old.json")
    assert '"evaluation"' not in (tmp_path / "old.json").read_text()  # as earlier versions wrote it
    made = plan(3e13, "batch/loss", PlanOptions(laws=tmp_path / "old.json"))
    (warning,) = [w for w in made.warnings if "forecasts are of the evaluation" in w]
    assert "old.json does not say which: the recipes score 20,000 queries against the whole catalogue" in warning
    assert "Plan with the laws.json that `habitus fit STORE` writes" in warning
    assert made.stage1.evaluate.queries == 20_000


def test_runs_of_several_query_sets_share_no_evaluation(tmp_path: Path) -> None:
    laws = Laws.read(fitted(write_store(tmp_path / "store", ("q", "r")), tmp_path / "elsewhere.json"))
    assert laws.evaluation is None
    assert any("2 different query sets" in note for note in laws.notes)


def test_a_smaller_catalogue_is_scored_whole_and_told(tmp_path: Path, small: Dataset) -> None:
    path = fitted(write_store(tmp_path / "store", catalogue_items=5000), tmp_path / "elsewhere.json")
    evaluate, warning = planned_evaluation(DatasetProfile.of(small), StoreFacts(), Laws.read(path), path)
    assert warning is not None
    assert "over 5,000 candidates: --data holds 120, and the recipes take all of them" in warning
    assert plan(3e11, "batch/loss", PlanOptions(laws=path, dataset=small)).stage1.evaluate == evaluate.model_copy(
        update={"regimes": ("batch", "catalogue")}
    )


def test_published_laws_leave_the_default_and_warn_of_nothing() -> None:
    evaluate, warning = planned_evaluation(DatasetProfile(), StoreFacts(), None, None)
    assert (evaluate.queries, evaluate.catalogue_items, warning) == (20_000, "all", None)
