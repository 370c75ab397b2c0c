"""Axes to cells: what each axis holds fixed, what it leaves out and why, and which recipe is which."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from habitus.errors import ConfigError
from habitus.recipe import Recipe
from habitus.sizing import TYPICAL_INPUTS, breakdown, stage1_step_flops, stage2_step_flops
from habitus.store import AXES, LOG_AXIS, Law, LawEntry, Laws, LawStatus, Residuals, RunRow
from habitus.sweeps.cells import DatasetFacts, _cell_hash
from habitus.sweeps.design import centred_shapes, design_axis
from habitus.sweeps.preset import Preset, load_preset, preset_names, preset_text
from habitus.sweeps.prior_results import PriorResults
from habitus.sweeps.refinement import likely_to_go_on, next_rate, next_shape
from habitus.sweeps.request import SweepRequest, parse_budgets, rate_grid

# What a log of ten million items and 5·10¹⁰ events would say.
LARGE = DatasetFacts("0" * 64, TYPICAL_INPUTS, 256, 24, 10_000_000, 200_000_000, longest_history=9_000, reach=1_000)


def own_world(preset: Preset) -> DatasetFacts:
    """The facts of the world that a preset names, without the validation users."""
    world = preset.world
    windows = round(0.95 * world.num_users * world.events_per_user / world.seq_len)
    return DatasetFacts("0" * 64, TYPICAL_INPUTS, world.seq_len, world.text_len, world.num_items, windows)


@pytest.fixture(scope="module")
def paper() -> Preset:
    return load_preset("paper")


def test_every_preset_can_be_read_and_designs_every_axis(facts: DatasetFacts) -> None:
    assert preset_names() == ["paper", "quick", "standard", "tiny"]
    for name in ("paper", "standard"):
        for axis in AXES:
            assert design_axis(axis, LARGE, load_preset(name)).cells, (name, axis)
    for axis in AXES:
        assert design_axis(axis, facts, load_preset("tiny")).cells, axis


def test_cells_cost_their_budget_by_equation_1(paper: Preset) -> None:
    for axis in ("share", "depth", "allocation"):
        for planned in design_axis(axis, LARGE, paper, request=SweepRequest((1e15, 1e17))).cells:
            model, train = planned.recipe.model, planned.recipe.train
            parts = breakdown(model, LARGE.inputs)
            step = stage1_step_flops(
                parts.embedder_params,
                parts.contextualizer_params,
                B=train.batch_sequences,
                L=256,
                t=24,
                h=model.joint_dim,
            )
            assert abs(step * train.steps - planned.row.flops_budget) <= step / 2
            assert planned.row.realised["params"] == parts.params


def test_copying_dropout_and_log_q_of_a_preset_reach_every_cell_and_are_counted(paper: Preset) -> None:
    changed = {"copying": True, "dropout": 0.1, "log_q": True}
    preset = paper.model_copy(update={"common": paper.common.model_copy(update=changed)})
    for axis in (axis for axis in AXES if axis != LOG_AXIS):  # that one has settings of its own
        plain, cells = (design_axis(axis, LARGE, one, request=SweepRequest((1e16,))).cells for one in (paper, preset))
        assert cells
        assert {(p.recipe.model.copying, p.recipe.train.dropout, p.recipe.train.log_q) for p in cells} == {
            (True, 0.1, True)
        }
        assert not {planned.hash for planned in plain} & {planned.hash for planned in cells}
        for planned in cells:
            p, w = breakdown(planned.recipe.model, LARGE.inputs).contextualizer, planned.recipe.model.width
            assert p["contextualizer.copying"] == (2 * min(32, w // 4) + 1) * w + 14


def test_the_share_axis_holds_the_data_ratio_and_spans_the_shares(paper: Preset) -> None:
    cells = design_axis("share", LARGE, paper, request=SweepRequest((1e17,), 1)).cells
    shares = [planned.row.realised["embedder_share"] for planned in cells]
    assert shares == sorted(shares) and shares[0] < 0.01 and shares[-1] > 0.4
    assert all(abs(planned.row.realised["data_ratio"] / 15 - 1) <= 0.05 for planned in cells)
    assert {planned.recipe.train.batch_sequences for planned in cells} == {256}


def test_the_depth_axis_keeps_the_sum_and_marks_what_is_off_the_diagonal(paper: Preset) -> None:
    cells = design_axis("depth", LARGE, paper, request=SweepRequest((1e18,))).cells
    on = {c.recipe.model.depth: c.recipe.model.text_depth for c in cells if c.row.wanted["on_diagonal"]}
    off = {c.recipe.model.depth: c.recipe.model.text_depth for c in cells if not c.row.wanted["on_diagonal"]}
    assert on == {6: 28, 8: 26, 12: 22, 16: 18, 24: 10, 28: 6, 32: 2}
    assert off == {40: 2, 56: 2}


def test_the_batch_axis_trains_one_model_at_a_constant_rate_with_a_trajectory(paper: Preset) -> None:
    every = design_axis("batch", LARGE, paper).cells
    cells = [c for c in every if c.recipe.train.pool_sequences is None]
    assert [c.recipe.train.batch_sequences for c in cells] == [64, 128, 256, 512, 1024, 2048]
    # The second arm has the same steps; a batch of 64 windows has 64 windows of candidates in both.
    pooled = [c for c in every if c.recipe.train.pool_sequences == 64]
    assert [(c.recipe.train.batch_sequences, c.recipe.train.steps) for c in pooled] == [
        (c.recipe.train.batch_sequences, c.recipe.train.steps) for c in cells[1:]
    ]
    assert len({c.recipe.model.to_json() for c in every}) == 1
    assert {c.recipe.train.schedule for c in cells} == {"constant"}
    assert all(0 < c.recipe.evaluate.every <= 50 for c in cells)
    assert [c.row.learning_rate for c in cells] == [
        pytest.approx(2e-3 * (b / 512) ** 0.5) for b in (64, 128, 256, 512, 1024, 2048)
    ]
    # What a study states for the axis counts them: batches above the middle one, 512 of six, in both arms.
    assert sorted(c.recipe.train.batch_sequences for c in likely_to_go_on(every)) == [1024, 1024, 2048, 2048]


def test_batch_sizes_share_model_compute_and_schedule(paper: Preset) -> None:
    cells = design_axis("batch_size", LARGE, paper, request=SweepRequest((1e16, 1e17))).cells
    for budget, batches in ((1e16, [64, 128, 256, 512, 1024]), (1e17, [128, 256, 512, 1024, 2048])):
        at = [c for c in cells if c.row.flops_budget == budget]
        assert [c.recipe.train.batch_sequences for c in at] == batches
        assert len({c.recipe.model.to_json() for c in at}) == 1
        assert all(abs(c.cell.flops / budget - 1) < 0.5 / c.cell.steps + 1e-9 for c in at)
        assert {c.recipe.train.schedule for c in at} == {"cosine"}
        assert {c.recipe.evaluate.regimes for c in at} == {("batch", "catalogue")}
        assert [c.row.learning_rate for c in at] == [pytest.approx(2e-3 * (b / 512) ** 0.5) for b in batches]
    starved = design_axis("batch_size", LARGE, paper, request=SweepRequest((1e10,)))
    assert len(starved.cells) < 5 and all(c.cell.steps >= 10 for c in starved.cells) and starved.left_out


def test_the_allocation_axis_has_three_rates_per_shape_and_one_share(paper: Preset) -> None:
    cells = design_axis("allocation", LARGE, paper, request=SweepRequest((1e15,))).cells
    assert Counter(c.row.cell_id for c in cells).most_common()[-1][1] == 3
    rule = 2e-3 * (64 / 512) ** 0.5
    assert sorted({c.row.learning_rate for c in cells}) == [pytest.approx(rule * m) for m in (0.5, 1, 2)]
    assert all(abs(c.row.realised["embedder_share"] / 0.02 - 1) < 0.5 for c in cells)


def test_the_allocation_grid_is_centred_on_what_the_store_knows(paper: Preset) -> None:
    before, _ = centred_shapes(paper, PriorResults(), 1e17, 0.02)
    after, why = centred_shapes(paper, PriorResults(size_law=(5e7 / 1e17**0.6, 0.6)), 1e17, 0.02)
    assert after[0][0] > before[0][0] and "size law" in why
    scaled, _ = centred_shapes(paper, PriorResults(sizes={1e15: 5e6}), 1e17, 0.02)
    assert scaled == after  # 5e6 · 100^0.5


def test_sizes_of_a_preset_go_as_the_root_of_what_an_event_costs_at_the_share_found(paper: Preset) -> None:
    _, own = centred_shapes(paper, PriorResults(), 1e17, 0.02)
    shapes, why = centred_shapes(paper, PriorResults(), 1e17, 0.5)
    # With 24 tokens an embedder's parameter costs 24 times: (1 + 23·0.5) / (1 + 23·0.02) = 8.56, whose root is 2.93.
    assert own.startswith("8e+06 parameters") and why.startswith("2.73e+06 parameters")
    assert max(shapes) < max(centred_shapes(paper, PriorResults(), 1e17, 0.02)[0])
    prior = PriorResults(sizes={1e17: 8e6})
    assert centred_shapes(paper, prior, 1e17, 0.5)[1].startswith("8e+06 parameters")  # found at this share already


def test_the_share_of_earlier_sweeps_is_used(facts: DatasetFacts, tiny: Preset) -> None:
    plain = design_axis("allocation", facts, tiny)
    design = design_axis("allocation", facts, tiny, prior=PriorResults(shares={1e8: 0.2, 2e8: 0.45}))
    assert "share 0.1: the preset's" in plain.decided[0]
    assert "share 0.3: the store's" in design.decided[0]  # sqrt(0.2 · 0.45)
    assert {c.row.wanted["embedder_share"] for c in design.cells} == {0.3}


def test_negatives_continue_the_winner_or_a_parent_to_be_trained(facts: DatasetFacts, tiny: Preset) -> None:
    alone = design_axis("negatives", facts, tiny)
    assert [p.row.flops_budget for p in alone.parents] == [1e8, 2e8, 4e8]
    assert {c.parent for c in alone.cells} == {p.hash for p in alone.parents}
    winner = design_axis("allocation", facts, tiny, request=SweepRequest((1e8,))).cells[4]
    design = design_axis("negatives", facts, tiny, request=SweepRequest((1e8,)), winners={1e8: winner})
    assert design.parents == () and {c.parent for c in design.cells} == {winner.hash}
    cell = design.cells[-1]
    assert cell.recipe.model == winner.recipe.model and cell.recipe.train.num_negatives == 128
    step = stage2_step_flops(winner.cell.contextualizer_params, B=4, L=32, h=winner.recipe.model.joint_dim, K=128)
    assert cell.recipe.train.steps == round(1e8 / step)


def test_too_many_negatives_and_too_few_steps_are_listed(paper: Preset) -> None:
    design = design_axis("negatives", LARGE, paper, request=SweepRequest((1e15,)))
    ran = {c.recipe.train.num_negatives for c in design.cells}
    listed = {out.wanted["num_negatives"]: out.reason for out in design.left_out}
    assert ran | set(listed) == set(paper.negatives.num_negatives) and not ran & set(listed)
    assert all("not affordable" in reason and "fewer than 200" in reason for reason in listed.values())
    small = replace(LARGE, num_items=20_000)
    reasons = [out.reason for out in design_axis("negatives", small, paper, request=SweepRequest((1e18,))).left_out]
    assert any("more than the catalogue's 20,000 items" in reason for reason in reasons)


def test_cells_beyond_one_epoch_are_listed_unless_asked_for(paper: Preset) -> None:
    few = replace(LARGE, train_windows=1_000)
    design = design_axis("allocation", few, paper, request=SweepRequest((1e16,)))
    assert not design.cells and all("beyond one epoch" in out.reason for out in design.left_out)
    assert design_axis("allocation", few, paper, request=SweepRequest((1e16,), allow_repeats=True)).cells


def test_a_share_that_cannot_be_built_is_listed_with_the_cell_it_became(facts: DatasetFacts, tiny: Preset) -> None:
    design = design_axis("share", facts, tiny)
    assert any("the same cell as floor-" in out.reason for out in design.left_out)
    assert len({c.hash for c in design.cells}) == len(design.cells)


def test_init_crosses_initialisations_sizes_and_rates(facts: DatasetFacts, tiny: Preset) -> None:
    cells = design_axis("init", facts, tiny).cells
    assert len(cells) == 3 * 2 * 2
    assert {c.recipe.model.init for c in cells} == {"default", "mup_lr", "mup"}
    with pytest.raises(ConfigError, match="no size for 3e\\+08"):
        design_axis("init", facts, tiny, request=SweepRequest((3e8,)))


def test_seeds_repeat_a_cell_under_one_id(facts: DatasetFacts, tiny: Preset) -> None:
    cells = design_axis("share", facts, tiny, request=SweepRequest((4e8,), seeds=3)).cells
    assert {c.row.seed for c in cells} == {0, 1, 2}
    assert set(Counter(c.row.cell_id for c in cells).values()) == {3}


def test_the_same_recipe_from_two_axes_has_one_hash(facts: DatasetFacts, tiny: Preset) -> None:
    share = {c.hash for c in design_axis("share", facts, tiny).cells}
    allocation = {c.hash for c in design_axis("allocation", facts, tiny).cells}
    assert share & allocation


def test_every_knob_changes_the_hash_and_the_order_of_keys_does_not(facts: DatasetFacts, tiny: Preset) -> None:
    planned = design_axis("negatives", facts, tiny).cells[0]
    values = planned.recipe.to_values()
    turned = {section: dict(reversed(list(fields.items()))) for section, fields in reversed(list(values.items()))}
    assert Recipe.parse(json.loads(json.dumps(turned)), "turned").hash(facts.checksum) == planned.hash
    other = {
        "seq_len": 64, "joint_dim": 64, "text_len": 12, "text_depth": 3, "width": 128, "depth": 7, "head_dim": 2,
        "init": "mup", "parent": "f" * 64, "num_negatives": 3, "extra_pool": "extras", "log_q": True,
        "batch_sequences": 999, "steps": 7, "optimizer": "muon", "learning_rate": 0.5, "schedule": "constant",
        "warmup": 0.5, "weight_decay": 0.7, "clip": 9.0, "precision": "bf16", "seed": 77, "queries": 5,
        "catalogue_items": 9, "every": 3, "regimes": ["batch"], "copying": True, "dropout": 0.3,
    }  # fmt: skip
    hashes = {planned.hash, planned.recipe.hash("1" * 64)}
    count = 2
    assert "copying" not in values["model"] and "dropout" not in values["train"]  # came later: left out unless used
    values["model"]["copying"], values["train"]["dropout"] = False, 0.0
    assert Recipe.parse(values, "all keys").hash(facts.checksum) == planned.hash
    for section, fields in values.items():
        for key in fields:
            if key == "stage":
                continue
            changed = json.loads(json.dumps(values))
            changed[section][key] = other[key]
            hashes.add(Recipe.parse(changed, key).hash(facts.checksum))
            count += 1
    assert len(hashes) == count


def test_recipes_cells_and_presets_of_before_keep_their_hashes() -> None:
    """Values taken before `copying`, `dropout` and `replicates` came: stores of that time must be recognised."""
    recipe = Recipe.parse(
        {
            "model": {"joint_dim": 16, "width": 64, "depth": 2},
            "train": {"batch_sequences": 8, "steps": 100, "learning_rate": 0.003},
        },
        "as it was",
    )
    assert recipe.hash("0" * 64) == "34866d13c6eb1e7926968882dc036d5e1f202696ebb6cea91da2654227b8ec79"
    assert _cell_hash(recipe) == "2cf1e717"
    paper = load_preset("paper")
    seedless = {"replicates": 1, "replicates_until": None}
    before = {name: paper.axis(name).model_copy(update=seedless) for name in ("allocation", "negatives")}
    assert (
        paper.model_copy(update=before).hash("share")
        == "877714f76f9e2530d9a73a386a5dddefac4baab8f1cdd6c5999b3ff5a30d3eaa"
    )


def test_another_learning_rate_changes_rate_and_hash_only(facts: DatasetFacts, tiny: Preset) -> None:
    planned = design_axis("allocation", facts, tiny).cells[0]
    other = planned.with_learning_rate(0.123, facts)
    assert other.row.cell_id == planned.row.cell_id and other.hash != planned.hash
    assert other.recipe.train.learning_rate == other.row.learning_rate == 0.123


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (None, [0.05, 0.1]), (1, [0.1]), (3, [0.05, 0.1, 0.2]), (2, [0.05, 0.1]), ("3", [0.05, 0.1, 0.2]),
        ("0.02,0.01", [0.01, 0.02]), ("0.5x,2x", [0.05, 0.2]), ((0.3,), [0.3]),
    ],
)  # fmt: skip
def test_rates_as_they_may_be_requested(requested: object, expected: list[float]) -> None:
    assert rate_grid(requested, (0.5, 1), 0.1) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("requested", ["", "a,b", "-1", "0x", 0, (0.0,), ()])
def test_rates_that_make_no_sense_are_refused(requested: object) -> None:
    with pytest.raises(ConfigError, match="learning rate"):
        rate_grid(requested, (1,), 0.1)  # type: ignore[arg-type]


def test_the_next_rate_lies_beyond_an_edge_only() -> None:
    assert next_rate({1.0: 3.0, 2.0: 2.0, 4.0: 1.0}) == 8.0
    assert next_rate({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}) == 0.5
    assert next_rate({1.0: 3.0, 2.0: 1.0, 4.0: 3.0}) is None
    assert next_rate({1.0: 3.0, 2.0: 1.0, 4.0: float("inf")}) is None  # diverged: bracketed
    assert next_rate({1.0: 3.0}) is None
    assert next_rate({1.0: float("inf"), 2.0: float("inf")}) is None


def test_the_next_shape_comes_from_the_ladder() -> None:
    ladder = [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert next_shape(ladder, [(2, 1), (3, 1)], 1) == (4, 1)
    assert next_shape(ladder, [(2, 1), (3, 1)], -1) == (1, 1)
    assert next_shape(ladder, [(4, 1)], 1) is None


def test_prior_results_are_what_the_laws_of_a_store_say() -> None:
    def run(
        axis: str, cell_id: str, loss: float, *, budget: float = 1e8, chosen: bool = True, share: float = 0.1
    ) -> RunRow:
        knobs, metrics = {"embedder_share": share}, {"batch/loss": loss}
        return RunRow(
            axis=axis, budget=budget, cell_id=cell_id, learning_rate=0.1, seed=0, init="default", chosen=chosen,
            knobs=knobs, metrics=metrics,
        )  # fmt: skip

    def entry(name: str, budget: float | None, status: LawStatus = "ok", **values: float) -> LawEntry:
        law = Law(law=name, form="", status=status, values=values, residuals=Residuals(n=4, dof=1))
        return LawEntry(name=name, axis="", metric="batch/loss", budget=budget, law=law)

    runs = (
        run("allocation", "a", 2.0), run("allocation", "b", 1.9), run("allocation", "c", 1.8, chosen=False),
        run("share", "s", 2.0, share=0.2), run("share", "t", 2.1, share=0.4),
        run("share", "u", 2.0, budget=2e8, share=0.3),
    )  # fmt: skip
    entries = (
        entry("share_optimum", 2e8, x_opt=0.25), entry("share_optimum", 1e8, "boundary", x_opt=0.9),
        entry("size_optimum", 1e8, x_opt=1e3), entry("size_law", None, coefficient=2.0, exponent=0.5),
    )  # fmt: skip
    laws = Laws(source="store", seed=0, metrics=("batch/loss",), entries=entries, runs=runs)
    prior = PriorResults.of(laws)
    assert {budget: winner.cell_id for budget, winner in prior.winners.items()} == {1e8: "b"}
    assert prior.shares == {1e8: 0.2, 2e8: 0.25}  # the best cell, and the optimum where it is interior
    assert prior.sizes == {1e8: 1e3} and prior.size_law is None  # one size makes no law
    more = (*entries, entry("size_optimum", 2e8, x_opt=2e3), entry("size_optimum", 4e8, x_opt=4e3))
    assert PriorResults.of(laws.model_copy(update={"entries": more})).size_law == (2.0, 0.5)
    assert PriorResults().size(1e8) is None


def test_unknown_axes_presets_and_budgets_are_refused(facts: DatasetFacts, tiny: Preset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'share'"):
        design_axis("shares", facts, tiny)
    with pytest.raises(ConfigError, match="did you mean 'quick'"):
        load_preset("quik")
    for text in ("", "x", "1e13,-5", "nan", "inf"):
        with pytest.raises(ConfigError, match="budgets"):
            parse_budgets(text)
    assert parse_budgets("1e14, 1e13,1e13") == (1e13, 1e14)
    with pytest.raises(ConfigError, match="budget -1"):
        design_axis("share", facts, tiny, request=SweepRequest((-1.0,)))
    own = tmp_path / "own.toml"
    own.write_text(preset_text("tiny").replace("depth_sum", "dept_sum"), encoding="utf-8")
    with pytest.raises(ConfigError, match="dept_sum"):
        load_preset(own)


def test_three_sizes_are_repeated_and_at_the_top_run_at_more_rates(facts: DatasetFacts, tiny: Preset) -> None:
    """Seeds show what a misfit is, rates what N* would absorb; a user who names rates or seeds gets those only."""
    one_rate = tiny.allocation.model_copy(update={"learning_rates": (1.0,)})
    plain = design_axis("allocation", facts, tiny.model_copy(update={"allocation": one_rate}))
    allocation = one_rate.model_copy(update={"replicates": 3, "top_rates": (0.5, 2.0)})
    more = design_axis("allocation", facts, tiny.model_copy(update={"allocation": allocation}))
    assert {p.hash for p in more.cells} > {p.hash for p in plain.cells}
    for budget in more.budgets:
        cells = [p for p in more.cells if p.row.flops_budget == budget]
        sizes = sorted({p.cell.params for p in cells})
        repeated = {p.cell.params for p in cells if p.row.seed == 2}
        assert repeated == {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
        rates = {p.row.learning_rate for p in cells if p.cell.params == sizes[0] and p.row.seed == 0}
        rule = tiny.rule_rate(cells[0].cell.batch_sequences, budget)
        multiples = (0.5, 1, 2) if budget == max(more.budgets) else (1,)
        assert sorted(rates) == pytest.approx([multiple * rule for multiple in multiples])
    asked = SweepRequest(seeds=1)
    changed = tiny.model_copy(update={"allocation": allocation})
    assert len(design_axis("allocation", facts, changed, request=asked).cells) == len(plain.cells)


def test_of_six_sizes_the_inner_ones_are_repeated_and_no_embedder_is_below_the_least() -> None:
    """The outermost sizes cost most and say least of the optimum; joint_dim 4 is a cliff beside the valley."""
    quick = load_preset("quick")
    design = design_axis("allocation", own_world(quick), quick)
    for budget in design.budgets:
        cells = [p for p in design.cells if p.row.flops_budget == budget]
        sizes = sorted({p.cell.params for p in cells})
        assert {p.cell.params for p in cells if p.row.seed == 1} == {sizes[1], sizes[3], sizes[4]}
    swept = [*design.cells, *design_axis("share", own_world(quick), quick).cells]
    assert min(p.recipe.model.joint_dim for p in swept) == 8
    shares = Counter(p.row.flops_budget for p in design_axis("share", own_world(quick), quick).cells)
    assert len(shares) == 3 and min(shares.values()) >= 6  # what a valley of five numbers needs
    common = quick.common.model_copy(update={"min_joint_dim": 4})
    lower = design_axis("allocation", own_world(quick), quick.model_copy(update={"common": common}))
    assert min(p.recipe.model.joint_dim for p in lower.cells) == 4


def test_three_counts_of_negatives_are_repeated() -> None:
    quick = load_preset("quick")
    cells = design_axis("negatives", own_world(quick), quick).cells
    for budget in quick.negatives.budgets:
        at = [p for p in cells if p.row.flops_budget == budget]
        counts = sorted({p.recipe.train.num_negatives for p in at} - {0})
        repeated = {p.recipe.train.num_negatives for p in at if p.row.seed == 1}
        assert repeated == {counts[0], counts[len(counts) // 2], counts[-1]}
    asked = design_axis("negatives", own_world(quick), quick, request=SweepRequest(seeds=1)).cells
    assert {p.row.seed for p in asked} == {0}


def test_every_preset_affords_six_negative_counts_at_three_budgets_as_a_law_of_k_needs() -> None:
    for name in ("quick", "standard", "paper"):
        preset = load_preset(name)
        counts: dict[float, set[int]] = {}
        for planned in design_axis("negatives", own_world(preset), preset).cells:
            if planned.recipe.train.num_negatives:
                counts.setdefault(planned.row.flops_budget, set()).add(planned.recipe.train.num_negatives)
        assert sum(len(positive) >= 6 for positive in counts.values()) >= 3, (name, counts)


def test_standard_affords_the_whole_catalogue_as_negatives_at_1e15() -> None:
    preset = load_preset("standard")
    cells = design_axis("negatives", own_world(preset), preset, request=SweepRequest((1e15,), 1)).cells
    assert max(planned.recipe.train.num_negatives for planned in cells) == preset.world.num_items == 1_000_000


def test_the_papers_world_is_long_enough_for_every_shape_at_1e19(paper: Preset) -> None:
    design = design_axis("allocation", own_world(paper), paper)
    assert not [out for out in design.left_out if "epoch" in out.reason]
    shapes = {p.row.cell_id for p in design.cells if p.row.flops_budget == 1e19}
    assert len(shapes) == paper.allocation.num_shapes


def test_depth_rows_have_the_printed_shares_and_depth_and_negatives_three_rates_per_cell(paper: Preset) -> None:
    shares = {
        (planned.row.flops_budget, planned.recipe.model.depth): planned.row.realised["embedder_share"]
        for planned in design_axis("depth", LARGE, paper, request=SweepRequest(learning_rates=1)).cells
    }
    for budget, depth, printed in ((1e15, 12, 0.005), (1e16, 6, 0.037), (1e17, 4, 0.061), (1e18, 32, 0.009)):
        assert 1 / 1.15 < shares[budget, depth] / printed < 1.15, (budget, depth)
    for preset in (paper, load_preset("standard")):
        for axis in ("depth", "negatives"):
            cells = design_axis(axis, own_world(preset), preset).cells
            rates = Counter(cell_id for cell_id, _ in {(p.row.cell_id, p.row.learning_rate) for p in cells})
            assert set(rates.values()) == {3}, (preset.name, axis)


def test_no_size_of_quick_is_starved_and_six_are_left_at_every_budget() -> None:
    """The same model on the same data loses 0.08 nats with 68 steps instead of 137 (docs/measurements/laws.md)."""
    preset = load_preset("quick")
    cells = design_axis("allocation", own_world(preset), preset).cells
    assert min(planned.recipe.train.steps for planned in cells) >= 100
    sizes = {(planned.row.flops_budget, planned.row.cell_id) for planned in cells}
    assert min(Counter(budget for budget, _ in sizes).values()) >= 6
