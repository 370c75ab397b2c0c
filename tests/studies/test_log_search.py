"""A study of a log that ends before the compute: regime, search, finalists, table; stopped, continued, refused."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import habitus as hb
from habitus.cli import app
from habitus.data import Dataset
from habitus.errors import ConfigError, HabitusError, Interrupted, RunError
from habitus.planning import (
    SHAPES,
    PlanOptions,
    Shape,
    log_regime,
    neighbours,
    passes_of,
    plan,
    plan_best_run,
    stage1_recipe,
)
from habitus.planning.neighbours import combine
from habitus.recipe import Recipe
from habitus.store import LOG_AXIS, Laws, RegisteredPlan, TestTable, manifest_paths
from habitus.studies import SEARCH_FILE, SearchState, StudyOptions, StudyResult, study
from habitus.studies.conclusion import plan_larger_budget
from habitus.studies.envelope import round_up
from habitus.studies.state import TOOK_FILE, Took

TINY = (
    Shape("small", joint_dim=8, width=16, depth=1, batch_sequences=8, rate=4e-2, head_dim=8),
    Shape("shallow", joint_dim=8, width=8, depth=1, batch_sequences=8, rate=8e-2, head_dim=8, pass_factor=2.0),
)
FLOPS = 4e10  # FLOPs, not hours: the search is then the same however busy the machine is


@pytest.fixture(autouse=True, scope="module")
def tiny_shapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "cpu", TINY)
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    prepared = hb.world(
        tmp_path_factory.mktemp("log") / "world", seq_len=32, num_users=300, num_items=60, events_per_user=16
    )
    assert isinstance(prepared, Dataset)
    return prepared


@pytest.fixture(scope="module")
def options(dataset: Dataset) -> StudyOptions:
    return StudyOptions(data=dataset.path, flops=FLOPS, device="cpu", workers=1)


@pytest.fixture(scope="module")
def studied(options: StudyOptions, tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, list[str]]:
    notes: list[str] = []
    return study(tmp_path_factory.mktemp("studied") / "out", options, note=notes.append), notes


@pytest.mark.slow
def test_a_study_says_its_regime_first_and_ends_in_the_best_recipe(
    studied: tuple[StudyResult, list[str]], dataset: Dataset
) -> None:
    result, notes = studied
    assert notes[0].startswith("log: ") and notes[1].startswith("data-limited: ")
    assert any(note.startswith("best baseline: ") for note in notes)
    search = result.search
    assert search is not None and search.winner is not None and search.value is not None
    values = [t.value for one in search.rounds if one.kind != "users" for t in one.trials if t.value is not None]
    starts = [t.value for one in search.rounds if one.kind == "start" for t in one.trials]
    assert len(starts) == 5  # two shapes, as `train --data` would try them
    assert search.value >= max(v for v in starts if v is not None) and search.value in values
    first = Recipe.read(result.recipes[0])
    assert first.hash(dataset.checksum) == search.winner
    assert (len(result.recipes) == 2) == (search.stage2 is not None)
    spent = sum(hb.Run(cell).record.flops_nominal or 0.0 for cell in (result.out / "store" / "cells").iterdir())
    assert spent <= 1.3 * FLOPS  # stage 2 of the winner is tried even where nothing is left


@pytest.mark.slow
def test_the_plan_speaks_of_passes_and_dropout_and_the_page_and_the_table_are_there(
    studied: tuple[StudyResult, list[str]],
) -> None:
    result, _ = studied
    assert result.plan is not None and result.report is not None and result.search is not None
    made = RegisteredPlan.read(result.plan)
    assert made.unchanged()
    assert made["passes"].source == made["dropout"].source == "this study"
    assert made["passes"].value == pytest.approx(
        next(t.passes for one in result.search.rounds for t in one.trials if t.recipe_hash == result.search.winner)
    )
    assert result.search.ended in made.warnings
    assert result.report.read_text(encoding="utf-8").startswith("<!")
    assert TestTable.read(result.out / "store" / "test_table.json") == result.table
    assert {path.stem.rpartition("-")[0] for path in manifest_paths(result.out / "store")} == {LOG_AXIS}


@pytest.mark.slow
def test_the_same_study_again_prints_the_table_and_what_to_type_next_and_runs_nothing(
    studied: tuple[StudyResult, list[str]], options: StudyOptions
) -> None:
    result, _ = studied
    records = {path: path.stat().st_mtime_ns for path in result.out.glob("store/cells/*/record.json")}
    arguments = ["--data", str(options.data), "--out", str(result.out), "--flops", str(FLOPS), "--device", "cpu"]
    printed = CliRunner().invoke(app, ["study", *arguments, "--workers", "1"])
    assert printed.exit_code == 0, printed.output
    for words in ("test users", "item to item", "report: ", "took ", f"next:   {result.next_command}", "serve:  "):
        assert words in printed.output, words
    refit = Recipe.read(result.refit[0])
    assert refit.data.include_validation and refit.train.steps > Recipe.read(result.recipes[0]).train.steps
    assert SearchState.read(result.out / SEARCH_FILE) == result.search
    assert {path: path.stat().st_mtime_ns for path in result.out.glob("store/cells/*/record.json")} == records
    assert Took.read(result.out / TOOK_FILE).seconds > result.seconds  # all pieces count
    with pytest.raises(ConfigError, match="holds a search for catalogue/ndcg@10"):
        study(result.out, replace(options, metric="catalogue/recall@10"))


@pytest.mark.slow
def test_a_study_that_is_stopped_and_continued_finds_the_same(
    studied: tuple[StudyResult, list[str]], options: StudyOptions, tmp_path: Path
) -> None:
    result, _ = studied
    with pytest.raises(Interrupted, match="same command again"):
        study(tmp_path / "out", replace(options, max_minutes=0.02))
    with contextlib.suppress(Interrupted):
        study(tmp_path / "out", replace(options, max_minutes=0.1))
    continued = study(tmp_path / "out", options)
    assert without_times(continued.search) == without_times(result.search)
    assert [p.read_text() for p in continued.recipes] == [p.read_text() for p in result.recipes]


def without_times(search: SearchState | None) -> list[tuple[str, list[tuple[str, float | None]]]]:
    assert search is not None
    return [(one.kind, [(t.recipe_hash, t.value) for t in one.trials]) for one in search.rounds]


@pytest.mark.slow
def test_a_plan_that_is_refused_leaves_the_best_run(
    studied: tuple[StudyResult, list[str]], options: StudyOptions, dataset: Dataset
) -> None:
    result, _ = studied
    store = result.out / "store"
    laws = Laws.read(store / "laws.json")
    small = laws.model_copy(update={"runs": tuple(run.model_copy(update={"budget": 1e4}) for run in laws.runs)})
    notes: list[str] = []
    asked = options.for_device("cpu")
    made = plan_larger_budget(store, asked, small, dataset, notes.append)
    assert made.stage1 == plan_best_run(store, "catalogue/ndcg@10", dataset).stage1
    assert "the recipe is that of the best run" in notes[0] and made.warnings == (notes[0],)


@pytest.mark.slow
def test_a_plan_for_ten_times_what_the_log_supports_is_the_best_run_and_says_so(
    studied: tuple[StudyResult, list[str]], dataset: Dataset
) -> None:
    result, _ = studied
    assert result.search is not None
    options = PlanOptions(laws=result.out / "store" / "laws.json", dataset=dataset)
    rich, richer = (plan(flops, "catalogue/ndcg@10", options) for flops in (1e11, 1e12))
    assert rich.stage1 == richer.stage1 and rich.flops == richer.flops < 1e11
    assert max(p.value for p in rich.predictions) >= (result.search.value or 1.0)
    assert rich.warnings[0].startswith("the log ends at ") and "the rest of 1e+11 FLOPs" in rich.warnings[0]
    with pytest.raises(RunError, match="within 10 FLOPs"):
        plan(10.0, "catalogue/ndcg@10", options)


@pytest.mark.slow
def test_an_envelope_without_a_pass_is_refused_and_the_least_that_it_names_is_enough(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="do not pay one pass") as refused:
        study(tmp_path / "out", StudyOptions(data=dataset.path, flops=1e9, device="cpu", workers=1))
    match = re.search(r"at least ([\d.e+]+) FLOPs", str(refused.value))
    assert match
    assert "--stage2-share" not in str(refused.value)
    least = float(match[1])
    enough = study(
        tmp_path / "enough", StudyOptions(data=dataset.path, flops=least, device="cpu", workers=1, metric="batch/loss")
    )
    assert enough.search is not None and enough.search.winner is not None


def test_rounding_up_never_names_less() -> None:
    assert [round_up(x) for x in (2.85e11, 1.0, 0.101, 3e11)] == ["2.9e+11", "1", "0.11", "3e+11"]


def test_the_regime_follows_the_budget_whose_best_data_is_the_log(dataset: Dataset) -> None:
    limit = log_regime(dataset, 1.0).log_flops
    kinds = [log_regime(dataset, factor * limit).kind for factor in (0.5, 1.0, 2.0, 99.0, 100.0, 1e6)]
    assert kinds == ["compute-limited"] * 2 + ["between"] * 2 + ["data-limited"] * 2
    assert f"{dataset.counts('train').events:,} training events" in log_regime(dataset, 1.0).describe()


def test_neighbours_move_one_knob_and_combine(dataset: Dataset) -> None:
    recipe = stage1_recipe(SHAPES["gpu"][0], dataset, 4.0, "gpu")
    by_words = {change.words: change.apply(recipe) for change in neighbours(recipe)}
    assert passes_of(by_words["twice the passes"], dataset) == pytest.approx(8.0, rel=0.05)
    assert by_words["dropout 0.2"].train.dropout == 0.2
    assert by_words["half as wide again"].model.width == 384
    for changed in by_words.values():
        Recipe.parse(changed.to_values(), "a neighbour")  # can be built
        assert changed.train.precision == "bf16" and changed.model.head_dim >= 16
    changes = [
        change for change in neighbours(recipe) if change.words in ("dropout 0.2", "dropout 0.4", "one layer more")
    ]
    combined = combine(recipe, changes)
    assert (combined.train.dropout, combined.model.depth) == (0.2, 4)  # one dropout: the first


def test_a_dry_run_says_the_regime_and_trains_nothing(options: StudyOptions, tmp_path: Path) -> None:
    notes: list[str] = []
    result = study(tmp_path / "out", replace(options, dry_run=True), note=notes.append)
    assert result.state.search and result.state.regime is not None
    assert any(note.startswith("data-limited") for note in notes)
    begins = next(number for number, note in enumerate(notes) if note.startswith("the search of 4e+10 FLOPs begins"))
    small, shallow, rest = notes[begins + 1 : begins + 4]
    assert small.startswith("  small: joint_dim 8, 16 × 1, ") and small.endswith(" FLOPs")
    assert shallow.startswith("  shallow: joint_dim 8, 8 × 1, ") and "until 75% are used" in rest
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["one user", "two items", "90% repeats", "without repeats", "two events each", "cold"])
def test_odd_logs_end_in_a_recipe_or_in_words(kind: str, tmp_path: Path) -> None:
    from tests.studies.odd_logs import odd_dataset

    try:
        dataset = odd_dataset(kind, tmp_path / "dataset")
        result = study(tmp_path / "out", StudyOptions(data=dataset.path, flops=1.5e9, device="cpu", workers=1))
    except HabitusError as error:
        assert len(str(error)) > 20
        return
    assert result.recipes and result.report is not None and result.report.exists()
