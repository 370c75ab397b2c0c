"""Presets that are adapted to a dataset and scaled to an envelope, without running anything."""

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.studies import StudyOptions, study
from habitus.studies.envelope import (
    adapt_negatives,
    adapt_preset,
    choose_copying,
    design_axes,
    fit_envelope,
    repeat_share,
    scale_preset,
)
from habitus.studies.options import check_metric
from habitus.studies.probes import rate_line
from habitus.studies.state import request_values
from habitus.sweeps import DatasetFacts, Design, Preset, load_preset, preset_dataset

MICRO = Path(__file__).parent / "micro.toml"
AXES = ("share", "depth", "batch", "allocation", "negatives")  # of a study that names none


@pytest.fixture(scope="module")
def micro() -> Preset:
    return load_preset(MICRO)


@pytest.fixture(scope="module")
def data(micro: Preset, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return preset_dataset(micro, tmp_path_factory.mktemp("micro") / "dataset")


def total(designs: Sequence[Design]) -> float:
    return sum(design.flops for design in designs)


def test_scaling_multiplies_budgets_and_widens_shapes(micro: Preset) -> None:
    twice = scale_preset(micro, 32.0)
    assert twice.budgets == (6.4e9, 1.28e10, 2.56e10)
    assert twice.depth.budgets == (1.28e10,)
    # Widths follow C^0.3: 8·32^0.3 = 22.6, to the nearest multiple of the head size 4.
    assert twice.depth.rows[0].width == 24
    assert twice.depth.rows[0].budget == 1.28e10
    assert set(micro.allocation.ladder) < set(twice.allocation.ladder)
    assert scale_preset(micro, 1.0) is micro


def test_a_rate_that_falls_with_the_budget_is_the_same_at_a_budget_of_a_scaled_preset() -> None:
    standard = load_preset("standard")  # 0.056·√(B/512)·(C/1e13)^-0.32
    assert standard.rule_rate(128, 1e13) == pytest.approx(0.028)
    fallen = standard.rule_rate(128, 1.6e14)
    assert fallen == pytest.approx(0.028 * 16**-0.32)
    assert scale_preset(standard, 4.0).rule_rate(128, 1.6e14) == pytest.approx(fallen)
    assert load_preset("paper").rule_rate(512, 1e19) == 2e-3  # no exponent: the budget plays no part


def test_budgets_that_have_several_seeds_have_them_when_scaled() -> None:
    paper = load_preset("paper")
    scaled = scale_preset(paper, 1e-3)
    for axis, before in ((scaled.allocation, paper.allocation), (scaled.negatives, paper.negatives)):
        seeds = [before.replicates_at(budget) for budget in paper.budgets]
        assert [axis.replicates_at(budget) for budget in scaled.budgets] == seeds
        assert len(set(seeds)) == 2


def test_two_probed_budgets_make_a_line_of_rates() -> None:
    # Half the rate at a hundredfold budget: 100^-0.15 = 0.5. Three sizes each; their mean counts.
    best = {1e13: [log(2.0), log(4.0), log(8.0)], 1e15: [log(2.0)] * 3}
    assert rate_line(best, 1e13, rate=0.01, exponent=0.0)[:2] == (0.04, -0.15)
    # The same with a preset that falls already: its own exponent is added.
    assert rate_line({1e13: [0.0], 1e15: [0.0]}, 1e13, rate=0.04, exponent=-0.15)[:2] == (0.04, -0.15)
    # A rise is noise: no slope, and the geometric mean of both.
    assert rate_line({1e13: [log(1.0)], 1e15: [log(4.0)]}, 1e13, rate=0.01, exponent=0.0)[:2] == (0.02, 0.0)
    # A steep fall is bounded, through the middle of both: at 1e14 a tenth of the rate.
    rate, exponent, asked = rate_line({1e13: [0.0], 1e15: [log(0.01)]}, 1e13, rate=0.01, exponent=0.0)
    assert (exponent, asked) == (-0.5, pytest.approx(-1.0))  # and what was asked for is known
    assert rate * 10**exponent == pytest.approx(0.01 * 0.1, rel=0.05)
    # One budget: a level, and the preset's exponent stays.
    assert rate_line({1e13: [log(2.0)]}, 1e13, rate=0.01, exponent=-0.2)[:2] == (0.02, -0.2)


def test_the_cost_of_a_scaled_study_follows_the_factor(micro: Preset, data: Dataset) -> None:
    facts = DatasetFacts.of(data)
    once = total(design_axes(micro, facts, AXES, allow_repeats=True))
    four = total(design_axes(scale_preset(micro, 4.0), facts, AXES, allow_repeats=True))
    assert four / once == pytest.approx(4, rel=0.25)


def test_an_envelope_is_filled_and_never_passed(micro: Preset, data: Dataset) -> None:
    envelope = 3e10
    scaled = fit_envelope(
        micro, DatasetFacts.of(data), AXES, allow_repeats=True, limit=envelope, cost=total, unit="FLOPs"
    )  # fmt: skip
    assert envelope / 2 < scaled.cost <= envelope
    for design in scaled.designs:
        assert design.cells, design.axis


def test_an_envelope_too_small_names_the_least(micro: Preset, data: Dataset) -> None:
    facts = DatasetFacts.of(data)
    with pytest.raises(ConfigError, match="too little for any law") as caught:
        fit_envelope(micro, facts, AXES, allow_repeats=False, limit=1e6, cost=total, unit="FLOPs")
    least = float(caught.value.expected.removeprefix("at least ").split()[0])
    fits = fit_envelope(micro, facts, AXES, allow_repeats=False, limit=1.3 * least, cost=total, unit="FLOPs")
    assert fits.cost <= 1.3 * least
    with pytest.raises(ConfigError, match="too little"):
        fit_envelope(micro, facts, AXES, allow_repeats=False, limit=0.5 * least, cost=total, unit="FLOPs")


def test_one_epoch_limits_the_budgets_unless_repeats_are_allowed(micro: Preset, data: Dataset) -> None:
    facts = DatasetFacts.of(data)
    single = fit_envelope(micro, facts, AXES, allow_repeats=False, limit=1e15, cost=total, unit="FLOPs")
    repeated = fit_envelope(micro, facts, AXES, allow_repeats=True, limit=1e15, cost=total, unit="FLOPs")
    assert repeated.factor > single.factor


def test_another_dataset_gets_its_own_batches_queries_and_negatives(micro: Preset, data: Dataset) -> None:
    wider = micro.model_copy(update={"world": micro.world.model_copy(update={"seq_len": 64, "num_items": 99_999})})
    changed, notes = adapt_preset(wider, data)
    assert changed.batch_sequences(4e8) == 8  # windows half as long, twice as many
    counts = adapt_negatives(changed, DatasetFacts.of(data)).negatives.num_negatives
    assert counts[0] == 0
    assert 64 <= max(counts) <= data.num_items
    assert len(counts) >= 7
    assert any("keep the number of slots" in text for text in notes)
    same, silent = adapt_preset(micro, data)
    assert same == micro
    assert silent == []


def test_the_share_of_repeats_is_what_counting_finds(data: Dataset) -> None:
    batch = data.batch("train", min(64, data.counts("train").windows))
    again = []
    for items, targets, segments in zip(batch.items, batch.targets, batch.segments, strict=True):
        for slot in range(len(items)):
            if targets[slot] >= 0:
                visible = {item for item, segment in zip(items[: slot + 1], segments, strict=False)
                        if segment == segments[slot]}  # fmt: skip
                again.append(targets[slot] in visible)
    assert repeat_share(data) == pytest.approx(sum(again) / len(again))


@pytest.mark.parametrize(
    "own_log, asked, chosen", [(True, None, True), (False, None, False), (True, False, False), (False, True, True)]
)
def test_a_log_whose_users_come_back_is_copied_from_unless_told_otherwise(
    micro: Preset, data: Dataset, own_log: bool, asked: bool | None, chosen: bool
) -> None:
    options = StudyOptions(data=data.path if own_log else None, copying=asked)
    preset, why = choose_copying(micro, data, options)
    assert preset.common.copying == preset.common.log_q == chosen
    assert bool(why) == (own_log and asked is None)  # said where it was decided for the user
    assert request_values(options).get("copying") == asked


def test_a_metric_that_no_run_records_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    for metric in ("recall@10", "catalogue/recall@7", "train/loss", "catalogue/hits@10"):
        with pytest.raises(ConfigError, match="is not recorded"):
            study(tmp_path / "out", StudyOptions(metric=metric))
    check_metric("catalogue/ndcg@100")
    check_metric("batch/loss/history=5")
    assert not (tmp_path / "out").exists()


def test_options_that_contradict_are_refused(tmp_path: Path) -> None:
    for options in (
        StudyOptions(flops=1e12, gpu_hours=1),
        StudyOptions(flops=-1.0),
        StudyOptions(gpu_hours=0.0),
        StudyOptions(axes=("shares",)),
        StudyOptions(items=1),
        StudyOptions(users=0),
        StudyOptions(data=tmp_path, items=100),
        StudyOptions(data=tmp_path, users=100),
    ):
        with pytest.raises(ConfigError):
            study(tmp_path / "out", options)


def test_the_paper_preset_adds_the_init_axis_and_order_is_kept() -> None:
    assert StudyOptions(preset="paper").chosen_axes() == (*AXES, "init")
    assert StudyOptions(preset="quick").chosen_axes() == (*AXES[:3], "batch_size", *AXES[3:])
    assert StudyOptions(axes=("negatives", "share")).chosen_axes() == ("share", "negatives")


def test_a_dry_run_states_cost_and_time_and_trains_nothing(tmp_path: Path) -> None:
    notes: list[str] = []
    result = study(tmp_path / "out", StudyOptions(preset=str(MICRO), dry_run=True), note=notes.append)
    assert [cost.axis for cost in result.state.costs] == list(AXES)
    assert result.state.seconds > 0
    assert any("together" in line for line in notes)
    assert not (tmp_path / "out" / "store").exists()
    assert not (tmp_path / "out" / "study.json").exists()


def test_a_dry_run_of_a_large_world_makes_none_and_counts_with_its_size(tmp_path: Path) -> None:
    notes: list[str] = []
    result = study(tmp_path / "out", StudyOptions(preset="standard", dry_run=True, device="cpu"), note=notes.append)
    assert any("a dry run makes no world of 1,000,000 items" in text for text in notes)
    assert not (tmp_path / "out").exists()
    assert max(result.state.preset.negatives.num_negatives) == 1_000_000  # not those of the small world
    costs = {cost.axis: cost for cost in result.state.costs}
    assert costs["batch_size"].runs == 15
    assert costs["allocation"].budgets == (1e13, 3e13, 1e14, 3e14, 1e15)  # within one pass over 2.6e8 events
    assert costs["negatives"].runs == 87


def test_a_world_may_have_another_size_than_the_preset_s(tmp_path: Path) -> None:
    out = tmp_path / "out"
    notes: list[str] = []
    sized = StudyOptions(preset=str(MICRO), items=350, users=500, dry_run=True)
    result = study(out, sized, note=notes.append)
    assert result.state.request["items"] == 350 and result.state.request["users"] == 500
    assert any("350 items and 500 users" in text for text in notes)
    dataset = Dataset.open(out / "dataset")
    assert dataset.num_items == 350
    assert max(result.state.preset.negatives.num_negatives) <= 350  # K fits the catalogue
    with pytest.raises(ConfigError, match="holds a world of 350 items"):
        study(out, replace(sized, items=360))
    assert "items" not in request_values(StudyOptions())  # studies of before keep their request
