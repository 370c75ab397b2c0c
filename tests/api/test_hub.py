"""Cards beside real runs, and a run as a folder for a hub: written, read by the hub's library, loaded in one call."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, ModelCard
from typer.testing import CliRunner, Result

import habitus as hb
from habitus.cards import CardFacts, add_plan, read_plan
from habitus.cli import app
from habitus.errors import ConfigError, ModelError, RunError
from habitus.store import Plan, Quantity

RECIPE: dict[str, Any] = {
    "data": {"seq_len": 32},
    "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 16, "depth": 1, "head_dim": 8},
    "train": {"batch_sequences": 8, "steps": 4, "learning_rate": 3e-3, "precision": "fp32"},
    "evaluate": {"queries": 100, "regimes": ["batch", "catalogue"]},
}
ROOT = Path(__file__).parents[2]
HISTORY = [3, 1, 4, 1, 5]


def habitus(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(part) for part in arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset that has test users, a plan, and a run by the plan's recipe; not to be written to."""
    folder = tmp_path_factory.mktemp("hub")
    hb.world(folder / "dataset", num_users=200, num_items=60, events_per_user=10, seq_len=32)
    plan = Plan(
        metric="catalogue/recall@10",
        flops=1e8,
        stage1_flops=1e8,
        stage2_flops=0.0,
        optimizer="muon",
        laws=str(folder / "store" / "laws.json"),
        quantities={"params": Quantity(value=4e3, low=2e3, high=9e3, source="this study", how="N*(C)")},
        stage1=hb.Recipe.parse(RECIPE, "the recipe"),
    )
    plan.write(folder / "plan.json")
    (recipe,) = plan.write_recipes(folder / "recipe")
    result = habitus("train", recipe, "--data", folder / "dataset", "--out", folder / "run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def exported(place: Path) -> Path:
    """The run for a hub, moved away from where it was made, as a download is."""
    folder = place / "model"
    result = habitus("export", place / "run", "--hub", folder, "--data", place / "dataset", "--license", "apache-2.0")
    assert result.exit_code == 0, result.output
    assert "habitus.load(" in result.output
    (place / "downloaded").mkdir()
    return Path(shutil.move(folder, place / "downloaded" / "main"))


def test_a_run_introduces_itself(place: Path) -> None:
    card = ModelCard.load(place / "run" / "README.md")
    assert card.data.library_name == "habitus"
    assert {one.metric_type for one in card.data.eval_results} == {"recall_at_10", "ndcg_at_10", "loss"}
    value = hb.Run(place / "run").metrics["catalogue/recall@10"]
    assert card.data.eval_results[0].metric_value == pytest.approx(value, abs=1e-6)
    manifest = hb.Dataset.open(place / "dataset").manifest
    assert f"{manifest.num_events:,} events of 200 users on 60 items" in card.text
    assert "| params | 4000 [2e+03, 9e+03] | this study | N" in card.text  # the plan beside the recipe
    assert "Not measured on test users" in card.text


def test_a_dataset_introduces_itself_and_stays_the_same_dataset(place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place / "dataset", tmp_path / "dataset")
    before = hb.Dataset.open(copy)
    assert DatasetCard.load(copy / "README.md").data.size_categories == ["1K<n<10K"]
    assert "README.md" not in before.manifest.files
    (copy / "README.md").write_text("my own words")
    assert hb.Dataset.open(copy).checksum == before.checksum
    assert hb.card(copy).read_text().count(before.checksum) == 1


def test_the_card_of_a_run_gets_its_table_on_test_users(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    record = (run / "record.json").read_bytes()
    result = habitus("card", run, "--data", place / "dataset", "--device", "cpu")
    assert result.exit_code == 0, result.output
    card = ModelCard.load(run / "README.md")
    table = CardFacts.of_folder(run).table
    assert table is not None and table.side == "test"
    assert card.data.eval_results[0].dataset_split == "test"
    assert f"| popularity | {table.rows[1].metrics['recall@10'].value:.4f}" in card.text
    assert "| params | 4000" in card.text  # what was known stays
    assert (run / "record.json").read_bytes() == record
    again = (run / "README.md").read_bytes()
    habitus("card", run)
    assert (run / "README.md").read_bytes() == again


def test_a_hub_folder_is_loaded_in_one_call_and_scores_the_same(place: Path, exported: Path) -> None:
    card = ModelCard.load(exported / "README.md")
    assert (card.data.license, card.data.model_name) == ("apache-2.0", "model")
    run, loaded = hb.load(place / "run", place / "dataset"), hb.load(exported)
    assert loaded.recommend(HISTORY, k=60) == run.recommend(HISTORY, k=60)
    assert loaded.metrics == run.metrics
    assert loaded.item_vectors().equals(run.item_vectors())
    there, here = (one.evaluate(place / "dataset", side="test", queries=50, device="cpu") for one in (run, loaded))
    assert here.metrics == there.metrics


def test_a_hub_folder_holds_what_a_hub_needs_and_nothing_of_the_machine(place: Path, exported: Path) -> None:
    names = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert {
        "README.md", "config.json", "model.safetensors", "recipe.toml", "schema.toml", "encoders.json", "record.json",
        "seal.json", ".gitattributes", "catalogue/manifest.json", "serve/catalogue/ids.parquet",
    } <= names  # fmt: skip
    assert not [name for name in names if name.endswith((".pkl", ".pt", ".bin")) or name.startswith("serve/items")]
    for name in names:
        content = (exported / name).read_bytes()
        assert str(place).encode() not in content, name
        assert not re.search(rb"/(home|tmp|root|work)/\w", content), name


def test_a_hub_folder_that_was_damaged_on_the_way_is_refused(exported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ModelError, match=r"model\.safetensors has changed"):
        hb.load(copy).recommend(HISTORY)


def test_a_plan_of_another_recipe_or_tool_is_left_alone(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    before = (run / "README.md").read_bytes()
    (run / "card.json").write_text("{}")  # as if nothing were known
    for content in ("not JSON", "[]", '{"steps": ["a plan of another tool"]}'):
        (tmp_path / "plan.json").write_text(content)
        add_plan(run, tmp_path / "recipe" / "stage1.toml")
        assert (run / "README.md").read_bytes() == before
        with pytest.raises(ConfigError, match=r"plan\.json"):
            hb.card(run, plan=tmp_path / "plan.json")
    wider = {**RECIPE, "model": {**RECIPE["model"], "width": 32}}
    plan = read_plan(place / "plan.json").model_copy(update={"stage1": hb.Recipe.parse(wider, "the recipe")})
    plan.write(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="does not plan the recipe"):
        hb.card(run, plan=tmp_path / "plan.json")
    assert "| params | 4000" in hb.card(run, plan=place / "plan.json").read_text()


def test_a_study_introduces_itself_by_its_laws_and_plan(place: Path, tmp_path: Path) -> None:
    study = shutil.copytree(ROOT / "tests" / "fixtures" / "format1" / "study", tmp_path / "study")
    store = {path: path.read_bytes() for path in (study / "store").rglob("*") if path.is_file()}
    card = DatasetCard.load(hb.card(study))
    assert "scaling-laws" in card.data.tags
    assert "14 runs (0 failed)" in card.text
    assert "| params | 1.065e+05 [8.14e+04, 1.81e+05] | this study |" in card.text
    assert re.search(r"\| N&#42;( at .*)? \| batch/loss \|", card.text)
    assert {path: path.read_bytes() for path in store} == store
    copy = shutil.copytree(study / "store", tmp_path / "store")
    assert "No plan yet" in hb.card(copy, dataset=place / "dataset").read_text()


def test_what_cannot_be_exported_is_refused(place: Path, exported: Path, tmp_path: Path) -> None:
    run = place / "run"
    cases: list[tuple[tuple[object, ...], type[Exception], str]] = [
        ((run, "--hub", exported), ConfigError, "exists already"),
        ((run, "--hub", tmp_path / "bundle"), ConfigError, "read as a part of a run"),
        ((run, "--hub", tmp_path / "x", "--license", "My Licence!"), ConfigError, "apache-2.0, mit or other"),
        ((run, "--hub", tmp_path / "x", "--onnx", tmp_path / "y"), ConfigError, "--onnx and --hub were given"),
        ((run, "--onnx", tmp_path / "y", "--license", "mit"), ConfigError, "--license was given without --hub"),
        ((run, "--hub", tmp_path / "x", "--replace"), ConfigError, "--replace was given with --hub"),
        (
            (run, "--hub", tmp_path / "x", "--out", tmp_path / "y", "--items", tmp_path, "--histories", "z"),
            ConfigError,
            "--out and --histories and --items were given with --hub",
        ),
        ((run, "--onnx", tmp_path / "x", "--replace"), ConfigError, "--replace was given with --onnx"),
        ((place, "--hub", tmp_path / "x"), RunError, r"holds no record\.json"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            raise habitus("export", *arguments).exception or AssertionError(arguments)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="neither a run nor a dataset nor a study"):
        hb.card(tmp_path)
    (tmp_path / "both" / "stage1").mkdir(parents=True)
    shutil.copy(run / "record.json", tmp_path / "both" / "stage1")
    with pytest.raises(ConfigError, match=r"name .*both/stage1"):
        hb.card(tmp_path / "both")
    other = tmp_path / "other"
    hb.world(other, num_users=120, num_items=60, events_per_user=10, seq_len=32, seed=5)
    with pytest.raises(RunError, match="is not the dataset that"):
        hb.card(run, dataset=other)
