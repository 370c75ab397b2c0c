"""The bundle, the embedding cache, and vectors of new items."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset
from habitus.errors import DataError, ModelError
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.events.world import World
from habitus.files import sha256_of
from habitus.model.bundle import BundleManifest, chosen_run, load_bundle
from habitus.model.cache import EmbeddingCache, build_cache, embed_rows
from habitus.model.embed_table import embed_table


def test_whoever_may_read_a_bundle_may_read_its_weights(make_run) -> None:  # type: ignore[no-untyped-def]
    modes = {file.name: file.stat().st_mode for file in (make_run(1) / "bundle").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_bundles_that_were_tampered_with_are_refused(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    copied = tmp_path / "bundle"
    shutil.copytree(make_run(1) / "bundle", copied)
    weights = copied / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ModelError, match=r"model\.safetensors has changed"):
        load_bundle(tmp_path)
    manifest = BundleManifest.read(copied / "bundle.json")
    weights.write_bytes(pickle.dumps({"a": 1}))
    files = manifest.files | {"model.safetensors": sha256_of(weights)}
    (copied / "bundle.json").unlink()
    manifest.model_copy(update={"files": files}).write(copied / "bundle.json")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load_bundle(copied)


def test_a_cache_is_resumed_and_one_of_another_model_is_refused(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bundle, other = load_bundle(make_run(1)), load_bundle(make_run(60))
    whole = build_cache(bundle, dataset, tmp_path / "cache", shard_rows=100)
    whole.shards = [shard.clone() for shard in whole.shards]  # the files below them are about to be spoiled
    assert [len(shard) for shard in whole.shards] == [100, 100, 100]
    expected = embed_rows(bundle.model, dataset, np.arange(300)).bfloat16()
    assert (torch.cat(whole.shards) == expected).float().mean() > 0.99
    assert torch.equal(whole.rows(np.array([250, 3, 100])), torch.cat(whole.shards)[[250, 3, 100]])
    names = sorted(path.name for path in (tmp_path / "cache").glob("*.safetensors"))
    kept = (tmp_path / "cache" / names[0]).stat().st_mtime_ns
    (tmp_path / "cache" / "manifest.json").unlink()
    (tmp_path / "cache" / names[1]).write_bytes(b"cut short")
    again = build_cache(bundle, dataset, tmp_path / "cache", shard_rows=100)
    assert (tmp_path / "cache" / names[0]).stat().st_mtime_ns == kept
    assert torch.equal(torch.cat(again.shards), torch.cat(whole.shards))
    with pytest.raises(ModelError, match="of another model"):
        EmbeddingCache.open(tmp_path / "cache", other, dataset)
    (tmp_path / "cache" / names[1]).write_bytes(b"cut short")
    with pytest.raises(ModelError, match="missing or has changed"):
        EmbeddingCache.open(tmp_path / "cache", bundle, dataset)
    for dtype in ("fp16", "fp32"):
        stored = build_cache(bundle, dataset, tmp_path / dtype, dtype=dtype)  # type: ignore[arg-type]
        assert stored.shards[0].dtype == {"fp16": torch.float16, "fp32": torch.float32}[dtype]


def test_the_same_vectors_are_the_same_bytes(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bundle = load_bundle(make_run(1))
    caches = [build_cache(bundle, dataset, tmp_path / str(number), shard_rows=100) for number in range(4)]
    assert all(cache.manifest == caches[0].manifest for cache in caches)


def test_a_folder_without_a_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no bundle"):
        load_bundle(tmp_path)
    (tmp_path / "stage2" / "bundle").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"name one of its stages: .*stage2"):
        load_bundle(tmp_path)


def test_the_folder_of_a_search_stands_for_its_best_stage(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(make_run(1) / "bundle", tmp_path / "stage1" / "bundle")
    assert chosen_run(tmp_path) == tmp_path
    (tmp_path / "best").symlink_to("stage1")
    bundle = load_bundle(tmp_path)
    assert (bundle.run_path, bundle.checksum) == (tmp_path / "stage1", load_bundle(make_run(1)).checksum)
    assert chosen_run(tmp_path / "best") == tmp_path / "best"
    options = EvaluateOptions(queries=200, batch_sequences=8, regimes=("batch",))
    other = dataset.with_seq_len(2 * dataset.seq_len)  # the recipe's own length is found behind the link too
    [found], [of_stage] = (evaluate_runs([path], other, options) for path in (tmp_path, tmp_path / "stage1"))
    assert (found.scorer, found.specification) == (of_stage.scorer, of_stage.specification)
    assert found.metrics["batch/loss"] == of_stage.metrics["batch/loss"]
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("stage2")
    with pytest.raises(ModelError, match=r"name one of its stages: .*stage1"):
        load_bundle(tmp_path)


def test_a_whole_cache_is_never_overwritten(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bundle, other = load_bundle(make_run(1)), load_bundle(make_run(60))
    build_cache(bundle, dataset, tmp_path / "cache")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    build_cache(bundle, dataset, tmp_path / "cache")
    with pytest.raises(ModelError, match="of another model"):
        build_cache(other, dataset, tmp_path / "cache")
    with pytest.raises(ModelError, match="as bf16, not as fp32"):
        build_cache(bundle, dataset, tmp_path / "cache", dtype="fp32")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before


def test_pieces_are_the_rows_they_name_across_shards(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cache = build_cache(load_bundle(make_run(1)), dataset, tmp_path / "cache", shard_rows=70)
    whole = torch.cat(cache.shards)
    for start, stop in ((0, 300), (69, 71), (70, 140), (5, 5), (290, 300)):
        pieces = cache.pieces(start, stop)
        joined = torch.cat(pieces) if pieces else whole[:0]
        assert torch.equal(joined, whole[start:stop])


@pytest.fixture
def items(world: World) -> pa.Table:
    return pa.concat_tables(world.item_blocks()).slice(0, 50)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_new_items_get_the_vectors_that_the_catalogue_has(
    dataset: Dataset,
    make_run,
    items: pa.Table,
    tmp_path: Path,
    suffix: str,  # type: ignore[no-untyped-def]
) -> None:
    bundle = load_bundle(make_run(60))
    if suffix == "parquet":
        pq.write_table(items, tmp_path / "new.parquet")
    else:  # a vector in a CSV is a JSON list
        as_text = [None if value is None else str(value) for value in items["image"].to_pylist()]
        place = items.column_names.index("image")
        flat = items.set_column(place, "image", pa.array(as_text))
        flat = flat.cast(pa.schema([(name, pa.string()) for name in flat.column_names]))
        pyarrow.csv.write_csv(flat, tmp_path / "new.csv")
    made = embed_table(bundle, str(tmp_path / f"new.{suffix}"), tmp_path / "vectors.parquet")
    table = pq.read_table(tmp_path / "vectors.parquet")
    assert (made.num_items, made.joint_dim) == (50, 16)
    assert set(made.unknown_values.values()) == {0}
    vectors = np.array(table["vector"].to_pylist())
    expected = embed_rows(bundle.model, dataset, np.arange(50)).numpy()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    item_column = dataset.schema.items.item
    assert [str(value) for value in table[item_column].to_pylist()] == [
        str(value) for value in items[item_column].to_pylist()
    ]


def test_values_that_training_did_not_see_are_unknown_and_counted(make_run, items: pa.Table, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    place = items.column_names.index("brand")
    brands = items["brand"].to_pylist()
    changed = items.set_column(place, "brand", pa.array(["nobody makes this", None, *brands[2:]]))
    pq.write_table(changed, tmp_path / "new.parquet")
    made = embed_table(load_bundle(make_run(1)), str(tmp_path / "new.parquet"), tmp_path / "out.parquet")
    assert made.unknown_values["brand"] == 1  # what is missing is missing, not unknown


def test_new_items_that_cannot_be_read_are_refused(make_run, items: pa.Table, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bundle = load_bundle(make_run(1))

    def attempt(table: pa.Table) -> None:
        pq.write_table(table, tmp_path / "new.parquet")
        embed_table(bundle, str(tmp_path / "new.parquet"), tmp_path / "out.parquet")

    with pytest.raises(DataError, match="'brand' is missing"):
        attempt(items.drop_columns(["brand"]))
    place = items.column_names.index("image")
    short = pa.array([[1.0, 2.0]] * 50, pa.list_(pa.float32()))
    with pytest.raises(DataError, match=r"column 'image': 50 values(.|\n)*row 1(.|\n)*vectors of length"):
        attempt(items.set_column(place, "image", short))
    place = items.column_names.index("price")
    with pytest.raises(DataError, match=r"column 'price': 1 values(.|\n)*row 3: inf"):
        attempt(items.set_column(place, "price", pa.array([1.0, 2.0, float("inf"), *[3.0] * 47])))
    assert [path.name for path in tmp_path.iterdir()] == ["new.parquet"]
