"""A model for a log without a recipe: candidates, choice, stage 2 and the closing table, on small worlds."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import habitus as hb
from habitus.cli import app
from habitus.data import Dataset
from habitus.errors import ConfigError, ModelError, RunError
from habitus.planning import SHAPES, Shape, stage1_recipe, stage2_recipe, usual_passes
from habitus.studies import CHOICE_FILE, LogTraining, LogTrainingOptions, log_training, train_log

TINY = (
    Shape("small", joint_dim=8, width=16, depth=1, batch_sequences=8, rate=4e-2, head_dim=8),
    Shape("shallow", joint_dim=8, width=8, depth=1, batch_sequences=8, rate=8e-2, head_dim=8, pass_factor=0.5),
)


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "cpu", TINY)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    prepared = hb.world(
        tmp_path_factory.mktemp("log") / "world", seq_len=32, num_users=200, num_items=60, events_per_user=16
    )
    assert isinstance(prepared, Dataset)
    return prepared


@pytest.fixture(scope="module")
def trained(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LogTraining, list[str]]:
    out, notes = tmp_path_factory.mktemp("trained") / "run", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "cpu", TINY)
        result = train_log(dataset, out, LogTrainingOptions(hours=0.05, device="cpu"), note=notes.append)
    return out, result, notes


def test_the_best_candidate_on_validation_is_kept(trained: tuple[Path, LogTraining, list[str]]) -> None:
    out, result, notes = trained
    assert result.chosen == max(result.candidates, key=lambda candidate: candidate.value)
    assert {candidate.shape for candidate in result.candidates} == {"small", "shallow"}
    assert hb.Run(out / "stage1").metrics[result.metric] == result.chosen.value
    assert result.value == max(hb.Run(out / f"stage{stage}").metrics[result.metric] for stage in (1, 2))
    # What is served has seen the validation users too, so that nothing but the test side says how good it is.
    assert result.refit
    assert (out / "best").resolve().name == f"refit-stage{result.stage}"
    best = hb.Run(out)
    assert best.recipe.data.include_validation
    assert not best.metrics
    assert best.recipe.train.steps > hb.Run(out / f"stage{result.stage}").recipe.train.steps
    assert not (out / "candidates").exists()
    assert not (out / "probe").exists()
    assert any(note.startswith("chosen: ") for note in notes)
    assert json.loads((out / CHOICE_FILE).read_text())["chosen"]["shape"] == result.chosen.shape


def test_the_table_is_of_test_users_and_pairs_every_baseline(
    trained: tuple[Path, LogTraining, list[str]], dataset: Dataset
) -> None:
    table = trained[1].table
    assert table.side == "test"
    assert table.users <= dataset.counts("test").users
    model, *baselines = table.rows
    assert [row.scorer for row in baselines][:4] == ["popularity", "recent popularity", "repeat recent", "item to item"]
    for row in baselines:
        difference = row.differences["recall@10"]
        assert difference.value == pytest.approx(model.metrics["recall@10"].value - row.metrics["recall@10"].value)
        assert difference.low is not None and difference.high is not None
        assert difference.low < difference.value < difference.high
    assert "test users" in table.lines()[0]


def test_the_card_tells_how_good_the_model_is_and_how_it_was_found(
    trained: tuple[Path, LogTraining, list[str]],
) -> None:
    out, result, _ = trained
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card == (out / "best" / "README.md").read_text(encoding="utf-8")
    recall = result.table.rows[1].metrics["recall@10"].value
    assert f"| popularity | {recall:.4f} ±" in card
    assert f"| {result.chosen.name} | {result.chosen.value:.4f} |" in card
    assert "Trained on the validation events too" in card


def test_a_finished_folder_is_refused(trained: tuple[Path, LogTraining, list[str]], dataset: Dataset) -> None:
    with pytest.raises(RunError, match="finished training"):
        train_log(dataset, trained[0], LogTrainingOptions(hours=0.05, device="cpu"))


@pytest.mark.slow
def test_a_call_that_stopped_after_its_choice_goes_on_with_it(dataset: Dataset, tmp_path: Path) -> None:
    options = LogTrainingOptions(hours=0.05, device="cpu")
    first = train_log(dataset, tmp_path / "run", options)
    (tmp_path / "run" / CHOICE_FILE).unlink()
    again = train_log(dataset, tmp_path / "run", options)
    assert (again.chosen, again.stage, again.value) == (first.chosen, first.stage, first.value)
    assert again.table == first.table


def test_hours_that_do_not_pay_a_pass_are_refused_with_what_would(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not pay one pass.*\n.*at least [0-9.e-]+ hours"):
        train_log(dataset, tmp_path / "run", LogTrainingOptions(hours=1e-6, device="cpu"))
    with pytest.raises(ConfigError, match="positive number of hours"):
        train_log(dataset, tmp_path / "other", LogTrainingOptions(hours=0.0, device="cpu"))


@pytest.mark.parametrize(
    ("metric", "guess"),
    [
        ("ndcg@10", "did you mean 'catalogue/ndcg@10'"),
        ("catalogue/ndgc@10", "did you mean 'catalogue/ndcg@10'"),
        ("batch/recall@10", "did you mean 'catalogue/recall@10'"),
        ("catalogue/recall@7", "did you mean 'catalogue/recall@"),
        ("horizon7d/ndcg", "did you mean 'horizon7d/ndcg@"),
    ],
)
def test_a_metric_that_no_candidate_measures_is_refused_before_training(
    dataset: Dataset, tmp_path: Path, metric: str, guess: str
) -> None:
    with pytest.raises(ConfigError, match="is not measured here") as caught:
        train_log(dataset, tmp_path / "run", LogTrainingOptions(hours=0.05, metric=metric, device="cpu"))
    assert guess in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_passes_that_the_time_does_not_pay_are_named_with_the_hours_that_would(
    trained: tuple[Path, LogTraining, list[str]], dataset: Dataset, tmp_path: Path
) -> None:
    best = trained[1].chosen
    notes: list[str] = []
    search = log_training._Search(dataset, tmp_path, LogTrainingOptions(hours=0.01, device="cpu"), None, notes.append)
    search.seconds_per_pass, search.overhead_seconds = 3600.0, 1.0
    assert search._follow(TINY[0], best, 2.0, "more passes") is best
    (note,) = notes
    hours = float(note.split("--hours ")[1].split()[0])
    assert note.startswith(f"small, {2 * best.passes:.3g} passes: not tried")
    assert hours > 2 * best.passes * 2.6  # with stage 2 and refit


@pytest.mark.slow
def test_the_command_trains_without_a_recipe_and_says_so(dataset: Dataset, tmp_path: Path) -> None:
    arguments = [
        "train",
        "--data",
        str(dataset.path),
        "--out",
        str(tmp_path / "run"),
        "--hours",
        "0.03",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in ("training events of", "the usual passes", "chosen: ", "test users", "Next: habitus serve"):
        assert words in result.output, words
    refused = CliRunner().invoke(app, [*arguments, "recipe.toml"])
    assert refused.exit_code != 0


@pytest.mark.slow
def test_python_trains_a_log_as_the_command_does(dataset: Dataset, tmp_path: Path) -> None:
    run = hb.train(dataset, out=tmp_path / "run", hours=0.03, device="cpu")
    assert run.record.status == "done"
    assert (tmp_path / "run" / CHOICE_FILE).exists()
    # It has seen the validation users, so that it is not scored on them.
    with pytest.raises(ModelError, match=r"validation events too[\s\S]*--side test"):
        hb.evaluate(run, dataset, device="cpu")
    [evaluation] = hb.evaluate(run, dataset, device="cpu", side="test", regimes=("catalogue",))
    assert evaluation.specification["catalogue"].side == "test"
    plain = hb.train(dataset, out=tmp_path / "plain", hours=0.03, device="cpu", refit=False)
    assert not plain.recipe.data.include_validation
    assert plain.metrics["catalogue/ndcg@10"] > 0


def odd_log(kind: str) -> tuple[pa.Table, pa.Table]:
    """Logs at the edge of what can be learnt from."""
    rng = np.random.default_rng(0)
    users, length, items = {
        "two items": (60, 8, 2),
        "few users": (12, 30, 20),
        "no repeats": (60, 10, 600),
        "two events each": (400, 2, 30),
    }[kind]
    rows = [
        (user, int(item), place)
        for user in range(users)
        for place, item in enumerate(
            rng.permutation(items)[:length] if kind == "no repeats" else rng.integers(0, items, length)
        )
    ]
    events = pa.table(dict(zip(("user_id", "item_id", "timestamp"), zip(*rows, strict=True), strict=True)))
    names = [f"thing {number} of kind {number % 7}" for number in range(items)]
    return events, pa.table({"item_id": list(range(items)), "title": names})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two items", "few users", "no repeats", "two events each"])
def test_odd_logs_end_in_a_model_or_in_words(kind: str, tmp_path: Path) -> None:
    events, items = odd_log(kind)
    schema = {
        "events": {"user": "user_id", "item": "item_id", "timestamp": "timestamp", "time_unit": "order"},
        "items": {"item": "item_id", "fields": {"title": "text"}},
    }
    dataset = hb.prepare(events, items, schema, out=tmp_path / "dataset", seq_len=16, text_len=6, validation_share=0.2)
    result = train_log(dataset, tmp_path / "run", LogTrainingOptions(hours=0.02, device="cpu"))
    assert np.isfinite(result.value)


def test_recipes_follow_the_size_of_the_log(dataset: Dataset) -> None:
    passes = usual_passes(dataset)
    assert passes == 2  # a few thousand events want as few as there are
    recipe = stage1_recipe(TINY[0], dataset, passes, "cpu")
    assert recipe.model.copying and recipe.train.log_q
    windows = dataset.counts("train").windows
    assert recipe.train.steps * recipe.train.batch_sequences == pytest.approx(2 * windows, rel=0.1)
    second = stage2_recipe(recipe, dataset)
    assert second.train.num_negatives == dataset.num_items  # never more than there are
    assert second.train.parent == recipe.hash(dataset.checksum)
