"""habitus in Python: the verbs as functions, tables of pandas, polars and Arrow, and what people print."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import habitus as hb
from habitus.errors import ConfigError, DataError, RunError
from habitus.events import WORLD_SCHEMA

matplotlib.use("Agg")
ROOT = Path(__file__).parents[2]
STUDY = ROOT / "docs" / "studies" / "h200-standard" / "runs.csv"
RECIPE: dict[str, Any] = {
    "data": {"seq_len": 32},
    "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 16, "depth": 1, "head_dim": 8},
    "train": {"batch_sequences": 8, "steps": 6, "learning_rate": 3e-3, "precision": "fp32"},
    "evaluate": {"queries": 100, "regimes": ["batch", "catalogue"]},
}
SECOND = {**RECIPE, "train": {**RECIPE["train"], "stage": 2, "num_negatives": 16}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "shop"
    assert hb.world(folder, prepared=False, num_users=300, num_items=80, events_per_user=12) == folder
    return folder


@pytest.fixture(scope="module")
def dataset(shop: Path) -> hb.Dataset:
    out = shop.parent / "dataset"
    return hb.prepare(
        str(shop / "events.parquet"), shop / "items.parquet", shop / "schema.toml", out=out, seq_len=32, text_len=4
    )


@pytest.fixture(scope="module")
def run(dataset: hb.Dataset) -> hb.Run:
    return hb.train([RECIPE, SECOND], dataset, out=dataset.path.parent / "run", device="cpu")


@pytest.fixture(scope="module")
def laws() -> hb.Laws:
    return hb.fit(STUDY)


def pandas_of(table: pa.Table) -> Any:
    return table.to_pandas()


def polars_of(table: pa.Table) -> Any:
    return pl.from_arrow(table)


@pytest.mark.parametrize("convert", [pandas_of, polars_of, lambda table: table])
def test_tables_in_memory_prepare_as_files_do(convert: Any, shop: Path, dataset: hb.Dataset, tmp_path: Path) -> None:
    events, items = (convert(pq.read_table(shop / f"{name}.parquet")) for name in ("events", "items"))
    prepared = hb.prepare(events, items, shop / "schema.toml", out=tmp_path / "dataset", seq_len=32, text_len=4)
    assert prepared.checksum == dataset.checksum


def test_a_schema_is_guessed_and_may_be_an_object_or_a_dictionary(shop: Path, tmp_path: Path) -> None:
    events, items = pq.read_table(shop / "events.parquet"), pq.read_table(shop / "items.parquet")
    guessed = hb.prepare(events, items, out=tmp_path / "guessed", seq_len=32)
    assert guessed.schema.events.user == "user_id"
    given = hb.prepare(events, items, WORLD_SCHEMA.to_values(), out=tmp_path / "given", seq_len=32)
    named = hb.prepare(events, items, out=tmp_path / "named", seq_len=32, roles={"user": "user_id"})
    assert named.checksum == guessed.checksum
    with pytest.raises(ConfigError, match="roles were given beside a schema"):
        hb.prepare(events, items, WORLD_SCHEMA.to_values(), out=tmp_path / "both", roles={"user": "user_id"})
    assert given.schema == WORLD_SCHEMA


def test_what_is_not_a_table_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="events is a list"):
        hb.prepare([1, 2], "items.parquet", out=tmp_path / "dataset")  # type: ignore[arg-type]


def test_a_run_answers_what_people_ask_of_a_model(run: hb.Run, dataset: hb.Dataset) -> None:
    assert run.record.status == "done"
    assert run.recipe.train.stage == 2
    assert run.metrics["catalogue/recall@10"] == run.record.metrics["catalogue/recall@10"].value
    items = dataset.item_ids()["item_id"].to_pylist()
    best = run.recommend(items[:3], k=5)
    with pytest.raises(ConfigError, match=r"the history is 'item-1'(?s:.*)a list of item ids"):
        run.recommend("item-1")
    assert len(best) == 5
    assert best == hb.recommend(run.path, [{"item_id": item} for item in items[:3]], k=5, dataset=dataset.path)
    assert not {item.item_id for item in run.recommend(items[:3], k=5, exclude_seen=True)} & set(items[:3])
    vectors = run.item_vectors()
    assert vectors["item_id"].to_pylist() == items
    evaluation = run.evaluate(queries=100, device="cpu")
    assert evaluation.metrics["catalogue/loss"].value == pytest.approx(run.metrics["catalogue/loss"], abs=1e-5)


def test_a_run_is_opened_from_its_folder_and_says_what_it_lacks(run: hb.Run) -> None:
    opened = hb.Run(run.path.parent)  # holds stage1 and stage2
    assert opened.path == run.path
    with pytest.raises(RunError, match="without its dataset"):
        opened.evaluate()
    with pytest.raises(RunError, match=r"no record\.json"):
        hb.Run(run.path / "bundle")


def test_evaluations_of_runs_and_baselines_share_their_queries(run: hb.Run, dataset: hb.Dataset) -> None:
    first, *others = hb.evaluate(run, dataset, baselines=True, queries=100, regimes=("batch",), device="cpu")
    assert {one.specification["batch"].query_set_checksum for one in others} == {
        first.specification["batch"].query_set_checksum
    }
    assert "popularity" in [one.scorer for one in others]


def test_laws_are_looked_up_framed_and_drawn(laws: hb.Laws) -> None:
    law = laws["size_law", "batch/loss"]
    assert law["exponent"] == laws.find("size_law", "batch/loss")["exponent"]
    assert str(law).startswith("size_law of batch/loss: ok, coefficient = ")
    frame = laws.to_frame()
    assert isinstance(frame, pd.DataFrame)
    row = frame[(frame.law == "size_law") & (frame.metric == "batch/loss") & (frame.value_name == "exponent")]
    assert row.value.item() == law["exponent"]
    assert (row.low.item(), row.high.item()) == law.law.interval("exponent")
    for name in ("size_law", "loss_law", "size_optimum"):
        figure = laws[name, "batch/loss"].plot()
        assert name in figure.get_title()
        assert figure.lines
    with pytest.raises(hb_error(), match="size_law"):
        laws["size_lw", "batch/loss"]


def hb_error() -> type[Exception]:
    from habitus.errors import FitError

    return FitError


def test_a_plan_takes_laws_as_an_object_or_a_path(laws: hb.Laws, tmp_path: Path) -> None:
    laws.write(tmp_path / "laws.json")
    from_object = hb.plan(1e17, "catalogue/recall@10", laws=laws)
    from_path = hb.plan(1e17, "catalogue/recall@10", laws=tmp_path / "laws.json")
    assert from_object.quantities == from_path.quantities
    assert from_object.laws == laws.source  # not where it was written on the way
    assert hb.plan(1e18, "catalogue/recall@10").metric == "catalogue/recall@10"  # the published laws


def test_a_report_takes_a_path(tmp_path: Path) -> None:
    assert hb.report(str(STUDY), str(tmp_path / "report.html")).stat().st_size > 10_000


def test_a_recipe_and_a_budget_are_sized(dataset: hb.Dataset) -> None:
    assert hb.size(RECIPE, dataset=dataset).params == hb.size(hb.Recipe.parse(RECIPE, "test"), dataset=dataset).params
    assert hb.size(flops=1e15, share=0.06, data_ratio=15).steps > 0


def test_an_unknown_option_is_refused_with_the_nearest_name(dataset: hb.Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'save_every'"):
        hb.train(RECIPE, dataset, out=tmp_path / "run", save_evry=5)


def test_what_people_print_is_short_and_renders_in_a_notebook(dataset: hb.Dataset, run: hb.Run, laws: hb.Laws) -> None:
    plan = hb.plan(1e17, "catalogue/recall@10", laws=laws)
    for thing, word in ((dataset, "users"), (run, "parameters"), (laws, "size_law"), (plan, "params")):
        assert 2 < len(repr(thing).splitlines()) < 60, repr(thing)
        assert "<table>" in thing._repr_html_()
        assert word in thing._repr_html_()
    assert "of 300 users on 80 items" in repr(dataset)


def test_html_is_escaped() -> None:
    from habitus.display import html_table

    assert "<script>" not in html_table("<script>", [("<script>", "a & b")])
    assert "a &amp; b" in html_table("t", [("x", "a & b")])


def test_importing_habitus_is_light_and_every_name_resolves() -> None:
    code = "import habitus, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules; print(dir(habitus))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in hb.__all__:
        assert name in result.stdout
        assert getattr(hb, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        hb.tarin  # noqa: B018
