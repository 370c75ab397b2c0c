"""Plans from planted and published laws: the truth comes back, the budget is kept, the doubts are told."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from habitus.data.dataset import Dataset
from habitus.errors import ConfigError, RunError
from habitus.laws import power_law
from habitus.planning import PlanOptions, affordable_flops, plan
from habitus.planning.facts import DatasetProfile, StoreFacts
from habitus.planning.hardware import PlannedSteps, hours_of_runs, memory_of
from habitus.planning.shape import FixedSettings, stage1_cell
from habitus.recipe import Recipe
from habitus.sizing import (
    H200_RATES,
    CellRequest,
    StepSpeed,
    cell_of_recipe,
    solve,
    stage1_step_flops,
    stage2_step_flops,
)
from habitus.store import Law, LawEntry, Laws, Residuals, gpu_named

from .planted import K_OPT, RATE, SHARE_OPT, planted_loss, planted_size

METRIC = "batch/loss"


def test_planted_optima_come_back_with_their_source(laws_path: Path) -> None:
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    C = 8e12
    size = made["params"]
    assert size.source == "this study"
    assert size.low is not None and size.high is not None
    assert size.low < planted_size(C) < size.high
    assert size.value == pytest.approx(planted_size(C), rel=0.1)
    share = made["embedder_share"]
    assert share.low is not None and share.high is not None
    assert share.low < SHARE_OPT < share.high
    assert made["batch_sequences"].value == 16  # as in the runs, below B_crit
    assert made["learning_rate"].value == pytest.approx(RATE * math.sqrt(16 / 512))
    assert made["learning_rate"].range == "tried" and size.range == "95%"
    assert made["num_negatives"].value == pytest.approx(K_OPT, rel=0.1)
    assert {
        q.source for name, q in made.quantities.items() if name not in ("memory_gib", "stage2_batch_sequences")
    } == {"this study"}
    assert made.optimizer == made.stage1.train.optimizer == "muon"


_KNOBS_OF_SIZE = ("slots_seen", "data_ratio", "steps", "joint_dim", "width", "depth")


def test_only_what_was_measured_at_the_budget_has_a_confidence_interval(laws_path: Path, tmp_path: Path) -> None:
    """What follows from N has N's kind of range; what a rule carried from elsewhere is assumed."""

    def ranges(laws: Path | None) -> dict[str, set[str]]:
        made = plan(1e13, METRIC, PlanOptions(laws=laws, gpu="h200"))
        kinds: dict[str, set[str]] = {"of size": {made[name].range for name in ("params", *_KNOBS_OF_SIZE)}}
        kinds["both ends known"] = {name for name, q in made.quantities.items() if None not in (q.low, q.high)}
        return {name: {q.range} for name, q in made.quantities.items() if name not in _KNOBS_OF_SIZE} | kinds

    planted = ranges(laws_path)
    assert planted["of size"] == planted["num_negatives"] == planted["embedder_share"] == {"95%"}
    assert planted["batch_sequences"] == planted["hours"] == {"assumed"}
    assert planted["learning_rate"] == planted["stage2_learning_rate"] == {"tried"}
    assert not {"batch_sequences"} & planted["both ends known"]  # any smaller batch does: no low end was measured
    no_law = Law(law="power_law", form="", status="too_few", residuals=Residuals(n=1, dof=0))
    laws = Laws.read(laws_path)
    carried = ranges(_with_laws(laws_path, tmp_path, {("size_law", METRIC): no_law}))
    assert carried["of size"] == {"assumed"}
    optima = tuple(e for e in laws.entries if e.name not in ("size_law", "size_optimum"))
    laws.model_copy(update={"entries": optima}).write(tmp_path / "cells.json")
    assert ranges(tmp_path / "cells.json")["of size"] == {"tried"}
    assert "assumed]" in str(plan(1e13, METRIC, PlanOptions(laws=tmp_path / "laws.json")))


def test_both_recipes_cost_what_the_budget_has(laws_path: Path) -> None:
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    assert made.stage2 is not None
    assert (made.stage1_flops, made.stage2_flops) == (8e12, 2e12)
    for recipe, budget in ((made.stage1, 8e12), (made.stage2, 2e12)):
        cell = cell_of_recipe(recipe)
        assert cell.flops == pytest.approx(budget, abs=cell.flops_per_step / 2 + 1)
    first, second = cell_of_recipe(made.stage1), cell_of_recipe(made.stage2)
    B, L, h, t = first.batch_sequences, 256, made.stage1.model.joint_dim, 24
    p_e, p = first.embedder_params, first.contextualizer_params
    assert first.flops_per_step == stage1_step_flops(p_e, p, B=B, L=L, t=t, h=h)
    K = made.stage2.train.num_negatives
    assert second.flops_per_step == stage2_step_flops(p, B=made.stage2.train.batch_sequences, L=L, h=h, K=K)
    assert made["slots_seen"].value == first.steps * B * L


def test_no_second_stage_leaves_everything_to_the_first(laws_path: Path, tmp_path: Path) -> None:
    (tmp_path / "stage2.toml").write_text("old")
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path, stage2_share=0.0))
    assert made.stage2 is None
    assert "num_negatives" not in made.quantities
    assert made.stage1_flops == 1e13
    assert [path.name for path in made.write_recipes(tmp_path)] == ["stage1.toml"]
    assert not (tmp_path / "stage2.toml").exists()


def test_the_written_recipes_are_recipes(laws_path: Path, tmp_path: Path) -> None:
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    assert [p.name for p in made.write_recipes(tmp_path / "out")] == ["stage1.toml", "stage2.toml"]
    assert Recipe.read(tmp_path / "out" / "stage1.toml") == made.stage1
    second = Recipe.read(tmp_path / "out" / "stage2.toml")
    assert second == made.stage2
    assert second.train.parent == "previous"
    assert second.model == made.stage1.model
    assert [p.name for p in made.write_recipes(tmp_path / "one.toml")] == ["one.toml", "one-stage2.toml"]


def test_the_prediction_is_the_planted_loss_at_the_planned_size_and_data(laws_path: Path) -> None:
    """The runs paid 6ND, the plan pays Equation 1 and so gets less data than L*(C) stands for: 2.65, not 2.52."""
    made = plan(1e14, METRIC, PlanOptions(laws=laws_path))
    predicted = next(p for p in made.predictions if (p.metric, p.stage) == (METRIC, 1))
    truth = planted_loss(made["params"].value, made["slots_seen"].value)
    assert truth > planted_loss(planted_size(8e13), 8e13 / (6 * planted_size(8e13))) + 0.1
    assert predicted.value == pytest.approx(truth, rel=0.01)
    assert predicted.low is not None and predicted.high is not None
    assert predicted.low < truth < predicted.high


def test_extrapolation_is_told_and_beyond_a_thousand_refused(laws_path: Path) -> None:
    near = plan(1e12, METRIC, PlanOptions(laws=laws_path))
    assert not any("extrapolates" in w for w in near.warnings)
    far = plan(1e15, METRIC, PlanOptions(laws=laws_path))
    assert far.extrapolation is not None and far.extrapolation.factor == pytest.approx(80)
    assert any("80.0 times the largest measured budget, 1e+13" in w for w in far.warnings)
    how = next(p.how for p in far.predictions if p.metric == METRIC)
    assert how.endswith("of the one promised now, times 1.9 since it lies 80 times beyond the largest budget")
    below = plan(1e11, METRIC, PlanOptions(laws=laws_path))
    assert any("extrapolates downwards" in w for w in below.warnings)
    with pytest.raises(ConfigError, match=r"(?s)8,000 times the largest measured budget.*--extrapolate"):
        plan(1e17, METRIC, PlanOptions(laws=laws_path))
    insisted = plan(1e17, METRIC, PlanOptions(laws=laws_path, extrapolate=True))
    assert any("farther than any law should be trusted" in w for w in insisted.warnings)


def test_where_study_and_paper_differ_is_said(laws_path: Path) -> None:
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    found = {d.knob: d for d in made.differences}
    assert found["embedder_share"].published == 0.02
    assert found["embedder_share"].ratio == pytest.approx(SHARE_OPT / 0.02, rel=0.1)
    assert found["batch_sequences"].ratio == 16 / 512
    assert found["params"].published == pytest.approx(3.334e-4 * 8e12**0.6175, rel=0.01)
    assert found["params"].inside is False
    assert plan(1e17, METRIC).differences == ()


def test_a_budget_too_small_names_the_least(laws_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not pay 200 steps") as caught:
        plan(1e9, "batch/loss", PlanOptions(extrapolate=True))
    assert "at least" in caught.value.expected
    # By the published laws, whose smallest budget is 1e15, such a model would lose to popularity.
    with pytest.raises(ConfigError, match=r"1,250 times less than the smallest measured budget, 1e\+15") as refused:
        plan(1e12, "batch/loss")
    assert refused.value.expected == "at least 1e+12 FLOPs" and "habitus train --data" in refused.value.next_step
    with pytest.raises(ConfigError, match=r"1,250 times less than the smallest measured budget, 1e\+15"):
        plan(1e12, METRIC)  # of which the published laws have no sizes
    assert plan(1.3e12, "batch/loss")["params"].value > 0
    with pytest.raises(ConfigError, match="positive budget"):
        plan(-1.0, "batch/loss")
    with pytest.raises(ConfigError, match="stage2-share"):
        plan(1e17, "batch/loss", PlanOptions(stage2_share=1.0))


def test_an_unrecorded_metric_names_what_is_near(laws_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*catalogue/recall@10.*\?"):
        plan(1e13, "recall", PlanOptions(laws=laws_path))
    with pytest.raises(ConfigError, match=r"did you mean batch/recall@10 or catalogue/recall@10\?"):
        plan(1e13, "recall@10", PlanOptions(laws=laws_path))
    with pytest.raises(ConfigError, match="batch/loss"):
        plan(1e13, "batch/los", PlanOptions(laws=laws_path))
    with pytest.raises(ConfigError, match="ndcg"):
        plan(1e13, "batch/ndcg@10", PlanOptions(laws=laws_path))


@pytest.mark.parametrize(("flops", "ratio", "times"), [(1e17, 222, 12.1), (1e18, 110, 6.3), (1e19, 36, 3.6)])
def test_the_printed_recipe_stands_beside_what_the_budget_pays(flops: float, ratio: float, times: float) -> None:
    made = plan(flops, "catalogue/recall@10", PlanOptions(gpu="h200"))
    printed = made.printed
    assert printed is not None
    assert printed.data_ratio_6nd == pytest.approx(ratio, rel=0.01)
    assert printed.times_budget == pytest.approx(times, rel=0.02)
    assert (printed.batch_sequences, printed.embedder_share, printed.learning_rate) == (2048, 0.02, 4e-3)
    assert printed.num_negatives == (2.5e5, 9e5)
    # What is paid: by hand, Equation 1 over the recipe's own steps.
    cell = cell_of_recipe(made.stage1)
    assert cell.flops == pytest.approx(0.8 * flops, rel=1e-3)
    assert made["data_ratio"].value < ratio
    told = "\n".join(made.warnings)
    assert "misses 1e+19 by +7.6%" in told
    assert "misses 1e+19 by 0.64 times" in told
    assert "0.612 from the optima of the iso-FLOP curves, 0.356 from L(N, D)" in told
    assert "300 log space, 968 without largest batch" in told
    assert "not what a budget buys" in told
    assert "catalogue/recall@10 is not predicted" in told
    assert made["params"].source == "published"


def test_the_published_size_is_the_papers_law() -> None:
    made = plan(1e18 / 0.8, "batch/loss")
    assert made["params"].value == pytest.approx(3.335e-4 * (1e18) ** 0.6175, rel=0.06)
    assert made["embedder_share"].value == pytest.approx(0.02, rel=0.15)
    assert made["batch_sequences"].value == 512


def test_negatives_are_capped_by_steps_and_by_the_catalogue(laws_path: Path, small: Dataset) -> None:
    poor = plan(1e15, "catalogue/recall@10")
    assert poor.stage2 is not None
    assert poor.stage2.train.steps == 200
    assert poor["num_negatives"].value < 249_000  # the smallest printed optimum
    assert "capped so that 200 steps remain" in poor["num_negatives"].how
    held = plan(1e13, METRIC, PlanOptions(laws=laws_path, dataset=small))
    assert held["num_negatives"].value == small.num_items == 120
    assert "120 items of the catalogue" in held["num_negatives"].how


def test_a_dataset_sets_lengths_and_passes_are_counted(laws_path: Path, small: Dataset) -> None:
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path, dataset=small))
    assert (made.stage1.data.seq_len, made.stage1.model.text_len) == (32, small.fields.text_len)
    assert made.dataset_checksum == small.checksum
    assert any("passes" in w and "laws are of one pass" in w for w in made.warnings)
    assert any("does not say which dataset" in w for w in made.warnings)
    assert made.flops_item_cache is not None


def test_laws_of_another_dataset_are_refused(store: Callable[..., Path], small: Dataset) -> None:
    other = store("f" * 64)
    with pytest.raises(ConfigError, match="holds laws of another dataset"):
        plan(1e13, METRIC, PlanOptions(laws=other / "laws.json", dataset=small))


def test_a_changed_record_beside_the_laws_is_refused(store: Callable[..., Path], small: Dataset) -> None:
    own = store(small.checksum)
    (record,) = own.glob("cells/*/record.json")
    values = json.loads(record.read_text())
    values["seconds"]["train"] /= 2
    record.write_text(json.dumps(values))
    for _ in ("edited", "its seal is gone, too"):
        with pytest.raises(RunError, match=record.parent.name):
            plan(1e13, METRIC, PlanOptions(laws=own / "laws.json", dataset=small))
        record.with_name("seal.json").unlink(missing_ok=True)


def test_a_plan_of_unsealed_runs_says_so(laws_path: Path) -> None:
    assert any(
        w.startswith("unsealed: the runs come from runs.csv")
        for w in plan(1e13, METRIC, PlanOptions(laws=laws_path)).warnings
    )


def test_a_store_lends_its_evaluation_rates_and_settings(store: Callable[..., Path], small: Dataset) -> None:
    own = store(small.checksum)
    made = plan(1e13, METRIC, PlanOptions(laws=own / "laws.json", dataset=small))
    assert not any("which dataset" in w for w in made.warnings)
    assert made.stage1.evaluate.queries == 777
    assert made.stage1.train.precision == "fp32"
    assert made.stage1.model.text_depth == 1
    hours = made["hours"]  # one Record: 1e13 FLOPs in 100 s
    assert (hours.source, hours.value) == ("this study", pytest.approx(made.flops / 1e13 * 100 / 3600))


def test_memory_says_whether_it_fits_and_what_to_change() -> None:
    fits = plan(1e17, METRIC, PlanOptions(gpu="h200"))
    assert [m.fits for m in fits.memory] == [True, True]
    tight = plan(1e19, METRIC, PlanOptions(gpu="l4"))
    first = tight.memory[0]
    assert first.fits is False and first.change is not None
    assert "--accumulate" in first.change
    assert any("does not fit l4" in w for w in tight.warnings)
    # The advice holds: so many micro-batches leave activations that fit.
    micro = int(first.change.split("--accumulate ")[1].split(":")[0])
    assert first.device_bytes is not None
    assert first.bytes["total"] - first.bytes["activations"] * (1 - 1 / micro) <= first.device_bytes
    spread = plan(1e19, METRIC, PlanOptions(gpu="l4", gpus=16))
    assert spread.memory[0].fits is True


def test_a_model_whose_weights_do_not_fit_asks_for_more_devices() -> None:
    cell = solve(CellRequest(flops=1e21, share=0.02, data_ratio=15, batch_sequences=8))
    memory = memory_of(cell, gpu_named("L4"), 1)
    assert memory.fits is False
    assert memory.change is not None and "more devices" in memory.change


def test_hours_are_a_range_and_buy_a_budget_back() -> None:
    made = plan(1e17, METRIC, PlanOptions(gpu="h200"))
    hours = made["hours"]
    # 456 TFLOP/s measured at 1e17; a run reaches half to all of it.
    assert hours.low == pytest.approx(1e17 / H200_RATES[1e17] / 3600)
    assert hours.high == pytest.approx(2 * 1e17 / H200_RATES[1e17] / 3600)
    flops = affordable_flops(gpu_named("h200"), 1, hours.value)
    assert flops == pytest.approx(1e17, rel=0.01)
    assert affordable_flops(gpu_named("NVIDIA-H200"), 8, hours.value) > 4e17
    with pytest.raises(ConfigError, match=r"'h20' is not a GPU.*h200"):
        gpu_named("h20")
    with pytest.raises(ConfigError, match="positive number of hours"):
        affordable_flops(gpu_named("h200"), 1, 0.0)
    both = plan(1e17, METRIC, PlanOptions(gpu="h200", gpus=8))["hours"]
    assert hours.low / 8 < both.low < 1.2 * hours.low / 8  # NVLink costs little at best
    assert both.high > hours.high / 8 and both.high / both.low > 1.5 * hours.high / hours.low
    assert "NVLink (450 GB/s one way, datasheet)" in both.how and "not measured" in both.how
    # Twice as many machines are no slower, and the budget that hours buy grows with them.
    budgets = [affordable_flops(gpu_named("h200"), gpus, 1.0) for gpus in (1, 2, 8, 16, 64)]
    assert budgets[:3] == sorted(budgets[:3])
    other = plan(1e17, METRIC, PlanOptions(gpu="a100", gpus=2))
    assert any("hours are estimated" in w and "not measured" in w for w in other.warnings)


def test_plans_are_the_same_every_time_and_survive_json(laws_path: Path, tmp_path: Path) -> None:
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    again = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    assert made.hash() == again.hash()
    made.write(tmp_path / "plan.json")
    assert type(made).read(tmp_path / "plan.json") == made


def _with_laws(laws_path: Path, folder: Path, changed: dict[tuple[str, str], Law]) -> Path:
    """The planted laws with some replaced, by name and metric, or added."""
    laws = Laws.read(laws_path)
    kept = tuple(e for e in laws.entries if (e.name, e.metric) not in changed)
    fresh = tuple(LawEntry(name=n, axis="allocation", metric=m, law=law) for (n, m), law in changed.items())
    laws.model_copy(update={"entries": kept + fresh}).write(folder / "laws.json")
    return folder / "laws.json"


def test_the_size_is_the_losses_unless_a_test_over_users_says_otherwise(laws_path: Path, tmp_path: Path) -> None:
    """A recall law without trend says nothing about N; the loss, which is measured more sharply, does."""
    recall = "catalogue/recall@10"
    flat = power_law((1e11, 1e12, 1e13), [6.2e4, 6.0e4, 6.1e4])
    path = _with_laws(laws_path, tmp_path, {("size_law", recall): flat})
    made = plan(1e14, recall, PlanOptions(laws=path))
    assert made["params"].how.startswith("size law of batch/loss")
    assert made["params"].value == pytest.approx(planted_size(8e13), rel=0.2)
    for status, whose in (("flat", "batch/loss"), ("ok", recall)):
        test = Law(law="size_test", form="", status=status, values={"p_value": 0.5}, residuals=Residuals(n=2, dof=0))
        path = _with_laws(laws_path, tmp_path, {("size_law", recall): flat, ("size_test", recall): test})
        assert plan(1e14, recall, PlanOptions(laws=path))["params"].how.startswith(f"size law of {whose}")


def test_nothing_is_predicted_from_a_law_that_is_not_identified(laws_path: Path, tmp_path: Path) -> None:
    laws = Laws.read(laws_path)
    open_laws = {
        (name, METRIC): laws.find(name, METRIC).model_copy(update={"status": "not_identified"})
        for name in ("loss_law", "surface")
    }
    made = plan(1e14, METRIC, PlanOptions(laws=_with_laws(laws_path, tmp_path, open_laws)))
    assert METRIC not in [p.metric for p in made.predictions]
    assert (
        f"{METRIC} is not predicted: neither L*(C) (not identified) nor a surface of it is identified" in made.warnings
    )


def test_the_rate_follows_the_budget_as_the_studys_rates_did(laws_path: Path, tmp_path: Path) -> None:
    """Rates that fall as C^-0.35 are carried on so: ten times beyond the top that is a factor 0.45, not 1."""
    laws = Laws.read(laws_path)
    runs = tuple(
        r.model_copy(update={"learning_rate": r.learning_rate * (r.budget / 1e13) ** -0.35})
        if r.axis == "allocation"
        else r
        for r in laws.runs
    )
    laws.model_copy(update={"runs": runs}).write(tmp_path / "laws.json")
    made = plan(1e14, METRIC, PlanOptions(laws=tmp_path / "laws.json", stage2_share=0.0))
    assert made["learning_rate"].value == pytest.approx(RATE * math.sqrt(16 / 512) * 10**-0.35, rel=1e-3)
    assert "C^-0.35" in made["learning_rate"].how


def test_the_largest_measured_budget_is_one_number_whichever_law_is_used(laws_path: Path, tmp_path: Path) -> None:
    laws = Laws.read(laws_path)  # sizes were measured up to 1e13
    narrow = power_law((1e11, 3e11, 1e12), [2e4, 9e4, 6e4])  # a law of fewer budgets, too wide to be of use
    entries = [
        e.model_copy(update={"law": narrow}) if (e.name, e.metric) == ("size_law", "catalogue/recall@10") else e
        for e in laws.entries
        if e.name != "size_law" or e.metric == "catalogue/recall@10"
    ]
    laws.model_copy(update={"entries": tuple(entries)}).write(tmp_path / "laws.json")
    for path in (laws_path, tmp_path / "laws.json"):
        made = plan(1e14, "catalogue/recall@10", PlanOptions(laws=path))
        assert made.extrapolation is not None
        assert (made.extrapolation.largest, made.extrapolation.factor) == (1e13, pytest.approx(8.0))
        with pytest.raises(ConfigError, match=r"times the largest measured budget, 1e\+13"):
            plan(1e17, "catalogue/recall@10", PlanOptions(laws=path))


def test_a_model_of_which_not_one_step_is_paid_is_refused_at_once() -> None:
    # One step of 32 windows of 256 costs more than 6·N·8192 = 4.9e16 FLOPs at N = 1e12: no shape is searched for.
    with pytest.raises(ConfigError, match="do not pay 200 steps"):
        stage1_cell(8e13, 1e12, 0.05, 32, FixedSettings(DatasetProfile()))


def test_hours_are_those_of_the_runs_with_the_nearest_steps() -> None:
    speeds = (StepSpeed(1, 1e9, 1e11), StepSpeed(1, 2e9, 4e11), StepSpeed(1, 1e12, 1e13), StepSpeed(2, 1e6, 1e9))
    planned = [PlannedSteps(1, 1e15, 1.5e9), PlannedSteps(2, 1e12, 1e7)]
    hours = hours_of_runs(planned, StoreFacts(hardware="card", speeds=speeds))
    assert hours is not None
    # Stage 1 lies between the first two: 1e15 FLOPs at 4e11, at their geometric mean 2e11, at 1e11. Stage 2: 1000 s.
    seconds = [3600 * end for end in (hours.low, hours.value, hours.high) if end is not None]
    assert seconds == pytest.approx([2500 + 1000, 5000 + 1000, 10_000 + 1000])
    assert hours.how == (
        "the 3 runs of this study on card whose steps are nearest in FLOPs; the planned steps are up to 10 times theirs"
    )
    shared = hours_of_runs(planned, StoreFacts(hardware="cpu", threads=1, speeds=speeds))
    assert shared is not None and shared.low is None and shared.value == hours.value
    assert shared.how.endswith("they had 1 thread each; a run that has the cores to itself may take less")
    assert hours_of_runs(planned, StoreFacts()) is None
    # Twice the executed FLOPs of the slower run for the same nominal ones: 10,000 s or, by what is executed, 20,000.
    deeper = [PlannedSteps(1, 1e15, 1.5e9, 0.6)]
    executed = (StepSpeed(1, 1e9, 1e11, 0.3), StepSpeed(1, 2e9, 4e11, 0.6))
    wider = hours_of_runs(deeper, StoreFacts(hardware="card", speeds=executed))
    assert wider is not None and wider.low is not None and wider.high is not None
    assert [3600 * end for end in (wider.low, wider.value, wider.high)] == pytest.approx([2500, 5000, 20_000])


def test_the_recipe_starts_as_the_runs_behind_the_laws_did(store: Callable[..., Path]) -> None:
    """A store may hold runs of several optimizers and inits; the laws say whose they are."""
    folder = store("a" * 64)
    laws = Laws.read(folder / "laws.json")
    laws.model_copy(update={"definitions": {**laws.definitions, "init": "plain"}}).write(folder / "laws.json")
    made = plan(1e13, METRIC, PlanOptions(laws=folder / "laws.json"))
    assert made.stage1.model.init == "plain"
