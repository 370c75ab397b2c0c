"""Runs and stores under identical queries, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.errors import ConfigError, ModelError, RunError
from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs, metrics_table
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.model.bundle import load_bundle, save_bundle
from habitus.recipe import Recipe
from habitus.store import HISTORIES
from habitus.training.checkpoints import CheckpointState, save_checkpoint

OPTIONS = EvaluateOptions(queries=600, batch_sequences=8)


@pytest.fixture(scope="module")
def store(dataset: Dataset, make_run, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """A store with a stage-1 cell, a stage-2 cell of the same embedder, and a cell that failed."""
    store = tmp_path_factory.mktemp("store")
    cells = store / "cells"
    shutil.copytree(make_run(60) / "bundle", cells / "aaaa" / "bundle")
    parent = load_bundle(cells / "aaaa")
    values = parent.recipe.to_values()
    second = Recipe.parse({**values, "train": {**values["train"], "stage": 2, "parent": "aaaa"}}, "test")
    save_bundle(parent.model, second, dataset, cells / "bbbb" / "bundle")
    (cells / "cccc").mkdir()
    return store


def test_a_store_is_scored_cell_by_cell_on_the_same_queries(store: Path, dataset: Dataset) -> None:
    notes: list[str] = []
    users = {}
    evaluations = evaluate_runs(
        [store],
        dataset,
        OPTIONS,
        with_baselines=True,
        note=notes.append,
        keep=lambda scorer, regime, values: users.__setitem__((scorer, regime), values.event.tolist()),
    )
    names = [one.scorer for one in evaluations]
    assert [Path(name).name for name in names[:2]] == ["aaaa", "bbbb"]
    assert names[2:] == ["popularity", "recent popularity", "repeat recent", "item to item", "oracle"]
    assert len({one.specification["batch"].query_set_checksum for one in evaluations}) == 1
    assert len({tuple(events) for events in users.values()}) == 1
    assert len(users) == 2 * len(evaluations)
    assert any("has no embedding cache" in note and "300 items" in note for note in notes)
    assert any("1 of 3 cells have no bundle" in note for note in notes)
    # Stage 2 freezes the embedder: its cache is the parent's, and with the same weights so is every number.
    assert any("whose cache is used" in note for note in notes)
    assert not (store / "cells" / "bbbb" / "catalogue").exists()
    assert evaluations[0].metrics == evaluations[1].metrics


def test_checkpoints_are_scored_with_their_runs_on_the_same_queries(
    store: Path,
    dataset: Dataset,
    make_run,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    """Stage 1 with two checkpoints of other weights, stage 2 with one of the frozen embedder, one that only began."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for step in (1, 20):
        shutil.copytree(make_run(step) / "bundle", copy / "cells" / "aaaa" / "checkpoints" / f"step-{step:08d}")
    begun = load_bundle(make_run(20))
    state = CheckpointState(step=20, recipe_hash="", dataset_checksum=dataset.checksum, work={})
    save_checkpoint(copy / "cells" / "cccc", state, begun.model.state_dict(), {}, begun.recipe, dataset)
    shutil.copytree(copy / "cells" / "bbbb" / "bundle", copy / "cells" / "bbbb" / "checkpoints" / "step-00000005")
    (copy / "cells" / "aaaa" / "checkpoints" / ".step-00000030.partial").mkdir()
    notes: list[str] = []
    evaluations = evaluate_runs([copy], dataset, OPTIONS, checkpoints=True, note=notes.append)
    names = ["/".join(Path(one.scorer).relative_to(copy / "cells").parts) for one in evaluations]
    assert names == [
        "aaaa/checkpoints/step-00000001",
        "aaaa/checkpoints/step-00000020",
        "aaaa",
        "bbbb/checkpoints/step-00000005",
        "bbbb",
        "cccc/checkpoints/step-00000020",
    ]
    assert len({one.specification["batch"].query_set_checksum for one in evaluations}) == 1
    losses = dict(zip(names, (one.metrics["catalogue/loss"].value for one in evaluations), strict=True))
    assert losses["aaaa/checkpoints/step-00000001"] > losses["aaaa/checkpoints/step-00000020"] > losses["aaaa"]
    assert losses["aaaa/checkpoints/step-00000020"] == losses["cccc/checkpoints/step-00000020"]
    # The embedder of stage 2 is frozen: checkpoint and run share the parent's vectors. Stage 1 has its own each time.
    assert losses["bbbb/checkpoints/step-00000005"] == losses["bbbb"]
    assert not list((copy / "cells" / "bbbb").rglob("catalogue"))
    assert len([note for note in notes if "whose cache is used" in note]) == 2
    assert (copy / "cells" / "aaaa" / "checkpoints" / "step-00000001" / "catalogue" / "manifest.json").exists()
    [alone] = evaluate_runs([copy / "cells" / "cccc" / "checkpoints" / "step-00000020"], dataset, OPTIONS)
    assert alone.metrics == evaluations[-1].metrics
    [run, _] = evaluate_runs([copy / "cells" / "bbbb"], dataset, OPTIONS, checkpoints=True)
    assert run.scorer.endswith("step-00000005")
    (tmp_path / "empty" / "cells" / "dddd").mkdir(parents=True)
    with pytest.raises(RunError, match="1 cells and neither bundle nor checkpoint"):
        evaluate_runs([tmp_path / "empty"], dataset, OPTIONS, checkpoints=True)


def test_the_tidy_table_holds_every_metric_of_every_run(store: Path, dataset: Dataset) -> None:
    evaluations = evaluate_runs([store], dataset, OPTIONS)
    table = metrics_table(evaluations)
    assert table.column_names == ["run", "regime", "metric", "value", "se", "n"]
    assert table.num_rows == sum(len(one.metrics) for one in evaluations)
    rows = {(row["run"], row["regime"], row["metric"]): row for row in table.to_pylist()}
    for one in evaluations:
        for name in ("catalogue/ndcg@10/history=5", "batch/loss", "catalogue/coverage_union@10"):
            regime, _, metric = name.partition("/")
            row = rows[one.scorer, regime, metric]
            assert (row["value"], row["se"], row["n"]) == (
                one.metrics[name].value,
                one.metrics[name].se,
                one.metrics[name].n,
            )


def test_only_histories_that_fit_the_window_are_sliced(dataset: Dataset, make_run) -> None:  # type: ignore[no-untyped-def]
    [evaluations] = evaluate_runs([make_run(1)], dataset, OPTIONS)
    fitting = [length for length in HISTORIES if length < dataset.seq_len]
    assert fitting == [3, 5, 10, 20]
    assert {name.split("/")[2] for name in evaluations.metrics if "history" in name} == {
        f"history={n}" for n in fitting
    }


def test_a_batch_evaluation_builds_no_cache(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(make_run(1) / "bundle", tmp_path / "bundle")
    notes: list[str] = []
    evaluate_runs([tmp_path], dataset, replace(OPTIONS, regimes=("batch",)), note=notes.append)
    assert notes == []
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_run_of_another_dataset_is_refused_unless_it_is_meant(
    dataset: Dataset,
    world: World,
    make_run,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    schema = WORLD_SCHEMA.model_copy(update={"world": world.config})
    options = PrepareOptions(seq_len=32, text_len=6, vocabulary_size=400, validation_share=0.5, test_share=0, threads=1)
    prepare_world(world, schema, tmp_path / "split", options, lambda *_: None)
    other = Dataset.open(tmp_path / "split")
    run = tmp_path / "run"
    shutil.copytree(make_run(60) / "bundle", run / "bundle")
    with pytest.raises(ModelError, match=r"trained on another dataset(.|\n)*--other-dataset"):
        evaluate_runs([run], other, OPTIONS)
    [evaluations] = evaluate_runs([run], other, OPTIONS, ComputeOptions(other_dataset=True))
    assert evaluations.dataset_checksum == other.checksum
    assert (run / f"catalogue-{other.checksum[:12]}" / "manifest.json").exists()
    # Another world has other brands and prices: the same option does not let it through.
    strange = World(WorldConfig(num_users=50, num_items=80, events_per_user=24, seed=9))
    prepare_world(strange, WORLD_SCHEMA, tmp_path / "strange", options, lambda *_: None)
    with pytest.raises(ModelError, match="other fields"):
        evaluate_runs([run], Dataset.open(tmp_path / "strange"), OPTIONS, ComputeOptions(other_dataset=True))


def test_what_needs_no_model_is_refused_before_one_is_loaded(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k = 0"):
        evaluate_runs([tmp_path / "nowhere"], dataset, replace(OPTIONS, cutoffs=(0,)))
    with pytest.raises(ConfigError, match="catalogue_items is 2"):
        evaluate_runs([tmp_path / "nowhere"], dataset, replace(OPTIONS, catalogue_items=2))
    with pytest.raises(ModelError, match="nowhere does not exist"):
        evaluate_runs([tmp_path / "nowhere"], dataset, OPTIONS)
    (tmp_path / "store" / "cells" / "dddd").mkdir(parents=True)
    with pytest.raises(RunError, match="1 cells and no bundle"):
        evaluate_runs([tmp_path / "store"], dataset, OPTIONS)
