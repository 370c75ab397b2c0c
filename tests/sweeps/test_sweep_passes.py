"""The axis `passes`: sizes × passes × dropout × shares of the users, from one trunk for all passes."""

from dataclasses import replace
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.recipe import DataRecipe, ModelRecipe, Recipe, TrainRecipe
from habitus.sizing import cell_of_recipe
from habitus.sweeps import DatasetFacts, Preset, Store, load_preset, sweep
from habitus.sweeps.attempts import same_measurement
from habitus.sweeps.cells import own_shares, plan_run
from habitus.sweeps.design import design_axis
from habitus.sweeps.manifest import load_manifests
from habitus.training import TrainOptions, train
from habitus.typed import content_hash


@pytest.fixture(scope="module")
def small(tiny: Preset) -> Preset:
    """One size, two lengths, two shares of which the smaller has two parts: six runs, three trunks."""
    update = {"sizes": ((8, 1, 8, 1),), "passes": (0.5, 1.0), "dropouts": (0.2,), "num_parts": 2}
    return tiny.model_copy(update={"passes": tiny.passes.model_copy(update=update)})


@pytest.fixture(scope="module")
def counted(dataset: Dataset, small: Preset) -> DatasetFacts:
    return DatasetFacts.of(dataset, small.passes.user_parts())


def test_cells_pass_so_often_over_their_own_share_of_the_users(
    dataset: Dataset, small: Preset, counted: DatasetFacts
) -> None:
    design = design_axis("passes", counted, small)
    assert not design.left_out
    wanted = [(p.row.wanted["user_share"], p.row.wanted["user_part"], p.row.wanted["passes"]) for p in design.cells]
    assert wanted == [(0.5, 0, 0.5), (0.5, 0, 1.0), (0.5, 1, 0.5), (0.5, 1, 1.0), (1, 0, 0.5), (1, 0, 1.0)]
    for planned in design.cells:
        train_recipe, data = planned.recipe.train, planned.recipe.data
        assert (data.user_share, data.user_part) == (planned.row.wanted["user_share"], planned.row.wanted["user_part"])
        windows = dataset.with_users(data.user_share, data.user_part).counts("train").windows
        assert train_recipe.steps == round(planned.row.wanted["passes"] * windows / 16)
        assert planned.row.realised["epochs"] == train_recipe.steps * 16 / windows
        assert (train_recipe.schedule, train_recipe.dropout) == ("wsd", 0.2)
        assert planned.row.flops_budget == planned.cell.flops
    assert len({planned.trunk for planned in design.cells}) == 3
    half = [planned.recipe.train for planned in design.cells[:2]]
    assert half[0].warmup_steps == half[1].warmup_steps == round(0.25 * half[0].steps)
    assert half[0].learning_rate == half[1].learning_rate == pytest.approx(4e-2 * (16 / 512) ** 0.5)


def test_what_runs_of_one_trunk_share_is_paid_once(counted: DatasetFacts) -> None:
    model = ModelRecipe(joint_dim=8, text_len=4, text_depth=1, width=8, depth=1, head_dim=4)
    runs = []
    for steps, seed, schedule in (
        (100, 0, "wsd"),
        (200, 0, "wsd"),
        (50, 0, "wsd"),
        (200, 1, "wsd"),
        (200, 0, "cosine"),
    ):
        train_recipe = TrainRecipe(
            batch_sequences=4, steps=steps, learning_rate=1, seed=seed, schedule=schedule, warmup_steps=5
        )
        recipe = Recipe(data=DataRecipe(seq_len=32), model=model, train=train_recipe)
        runs.append(plan_run(recipe, cell_of_recipe(recipe, counted.inputs), counted, budget=1.0, label="run"))
    # 50 steps decay from 40 on, where the 100 begin; those decay from 80 on, where the 200 begin.
    assert list(map(own_shares(runs).get, (run.hash for run in runs))) == [0.6, 0.6, 1.0, 1.0, 1.0]


def test_a_sweep_branches_from_trunks_and_its_records_are_those_of_runs_alone(
    dataset: Dataset, small: Preset, tmp_path: Path
) -> None:
    dry = sweep("passes", dataset, tmp_path / "store", preset=small, device="cpu", dry_run=True)
    assert (dry.number("missing"), (tmp_path / "store").exists()) == (6, False)
    full = sum(planned.cell.flops for planned in dry.design.cells)
    assert dry.design.flops == dry.flops_missing == pytest.approx((1 - 0.4 / 1.5) * full, rel=0.01)
    result = sweep("passes", dataset, tmp_path / "store", preset=small, workers=1, device="cpu")
    assert result.complete and result.number("done") == 6
    store = Store.open(tmp_path / "store")
    for run in result.runs:
        record = store.record(run.planned.hash)
        assert record is not None and record.params is not None
        data = record.recipe.data
        view = dataset.with_users(data.user_share, data.user_part).counts("train")
        assert record.epochs == run.planned.row.realised["epochs"]
        assert record.unique_events <= view.events
        assert record.steps == run.planned.recipe.train.steps
    longest = max(result.runs, key=lambda run: run.planned.recipe.train.steps).planned
    trunk = store.trunk(longest.recipe)
    assert trunk is not None
    stable = longest.recipe.train.stable_steps
    assert [path.name for path in (trunk / "checkpoints").iterdir()] == [f"step-{stable:08d}"]
    alone = train(
        longest.recipe, dataset, tmp_path / "alone",
        options=TrainOptions(device="cpu", threads=1, flops_budget=longest.row.flops_budget),
    )  # fmt: skip
    published = store.record(longest.hash)
    assert published is not None
    assert same_measurement(published, alone)
    again = sweep("passes", dataset, tmp_path / "store", preset=small, workers=1, device="cpu")
    assert again.counts["published"] == 0
    assert len(load_manifests(tmp_path / "store")) == 1


def test_budgets_are_refused_and_cells_of_few_steps_are_listed(
    dataset: Dataset, small: Preset, counted: DatasetFacts, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="budgets were given to the passes axis"):
        sweep("passes", dataset, tmp_path / "store", preset=small, budgets=[1e9], dry_run=True)
    few = small.model_copy(update={"passes": small.passes.model_copy(update={"min_steps": 30})})
    design = design_axis("passes", counted, few)
    assert [planned.row.wanted["passes"] for planned in design.cells] == [1.0, 1.0, 0.5, 1.0]
    assert [out.reason for out in design.left_out] == [
        f"too short: {round(counted.part_windows[0.5, part] / 32)} steps over {counted.part_windows[0.5, part]:,} "
        "windows, fewer than 30"
        for part in (0, 1)
    ]
    fewest = few.model_copy(
        update={"passes": few.passes.model_copy(update={"sizes": ((4, 1, 4, 1),), "dropouts": (0,)})}
    )
    result = sweep("passes", dataset, tmp_path / "few", preset=fewest, workers=1, device="cpu")
    assert result.complete and (result.number("done"), len(result.design.left_out)) == (4, 2)
    none = few.model_copy(update={"passes": small.passes.model_copy(update={"min_steps": 10_000})})
    with pytest.raises(ConfigError, match=r"no cell of the passes axis can be run on .*: too short: 21 steps"):
        sweep("passes", dataset, tmp_path / "none", preset=none, workers=1, device="cpu")
    # Windows of a share that nobody counted are estimated.
    quarter = DataRecipe(seq_len=counted.seq_len, user_share=0.25)
    assert replace(counted, part_windows={}).windows_of(quarter) == round(counted.train_windows / 4)


def test_a_preset_for_more_items_than_a_log_has_asks_for_all_of_them() -> None:
    standard, quick = load_preset("standard"), load_preset("quick")
    assert standard.for_catalogue(9_742).evaluate.catalogue_items == "all"
    assert standard.for_catalogue(100_000) == standard
    assert quick.for_catalogue(300) == quick


@pytest.mark.parametrize("name", ["tiny", "quick", "standard", "paper"])
def test_manifests_of_other_axes_know_a_preset_by_what_they_read_of_it(name: str) -> None:
    preset = load_preset(name)
    values = preset.to_values()
    passes = values.pop("passes")
    for younger in ("context", "shape", "regularisation", "batch_size"):
        values.pop(younger)
    values["world"].pop("like", None)  # the dataset's to say
    assert preset.hash("share") == preset.hash("init") == content_hash(values)
    assert preset.hash("passes") == content_hash({**values, "passes": passes}) != preset.hash("share")
    changed = preset.model_copy(update={"passes": preset.passes.model_copy(update={"passes": (3.0,)})})
    assert changed.hash("share") == preset.hash("share")
    assert changed.hash("passes") != preset.hash("passes")
