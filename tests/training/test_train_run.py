"""One run from recipe to Record: what it writes, what it counts, how it ends."""

import gc
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.errors import ConfigError, Interrupted, RunError
from habitus.evaluation import ComputeOptions, evaluate_runs
from habitus.evaluation.evaluation import EvaluateOptions
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.record import Record
from habitus.sizing import Inputs, cell_of_recipe
from habitus.training import TrainingProgress, TrainOptions, train
from habitus.training.journal import read_journal

ONE = TrainOptions(device="cpu", threads=1)


def test_a_run_leaves_everything_that_its_users_need(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    reports: list[TrainingProgress] = []
    recipe = recipe_of(evaluate={"every": 10, "regimes": ["batch", "catalogue"]})
    out = tmp_path / "run"
    record = train(recipe, dataset, out, options=ONE, progress=reports.append)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "bundle", "card.json", "catalogue", "journal.jsonl", "recipe.toml", "record.json", "seal.json",
    ]  # fmt: skip
    assert Record.read(out / "record.json") == record
    lines = read_journal(out / "journal.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(24))
    assert record.train is not None
    assert record.train.loss == pytest.approx(np.mean([line["loss"] for line in steps]))
    assert record.train.in_batch_loss == record.train.loss
    assert record.train.extra_loss is None
    assert sorted({point.step for point in record.trajectory}) == [10, 20, 24]
    assert "batch/recall@10" in {point.metric for point in record.trajectory}
    # What `habitus evaluate` finds is what the Record says.
    options = EvaluateOptions(queries=400, batch_sequences=16)
    (evaluation,) = evaluate_runs([out], dataset, options, ComputeOptions("cpu"))
    assert {name: metric.value for name, metric in evaluation.metrics.items()} == {
        name: metric.value for name, metric in record.metrics.items()
    }
    assert reports


def test_the_garbage_collector_rests_from_what_was_made_at_the_start_until_the_end(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    gc.unfreeze()
    states: list[tuple[int, bool]] = []
    before = gc.get_freeze_count()
    train(
        recipe_of(steps=3), dataset, tmp_path / "run", options=ONE,
        progress=lambda _: states.append((gc.get_freeze_count(), gc.isenabled())),
    )  # fmt: skip
    assert states
    assert all(frozen > before and on for frozen, on in states)
    assert gc.get_freeze_count() == before


def test_the_counts_of_a_record_follow_from_recipe_and_dataset(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(steps=3)
    record = train(recipe, dataset, tmp_path / "run", options=TrainOptions(device="cpu", threads=1, flops_budget=1e9))
    batches = [dataset.batch("train", 16, position=step) for step in range(3)]
    cell = cell_of_recipe(recipe, Inputs.of(dataset.fields))
    assert record.slots_seen == 3 * 16 * 32
    assert record.events_seen == sum(int((batch.segments >= 0).sum()) for batch in batches)
    assert record.queries_seen == sum(int((batch.targets >= 0).sum()) for batch in batches)
    assert record.unique_events == record.events_seen
    assert record.epochs == 48 / dataset.counts("train").windows
    assert record.flops_nominal == cell.flops
    assert record.flops_budget == 1e9
    assert record.embedder_share == cell.embedder_share
    assert record.embedder_flop_share == cell.embedder_flop_share
    assert record.params is not None
    assert record.params.total == cell.params
    assert record.seconds is not None
    assert record.hardware["threads"] == 1
    assert record.recipe_hash == recipe.hash(dataset.checksum)
    assert record.evaluation is not None
    assert record.evaluation.queries == 400


def test_training_is_the_same_every_time_and_another_seed_is_another_run(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(recipe_of(steps=5, seed=seed), dataset, tmp_path / name, options=ONE)
    a, b, c = ((tmp_path / name / "bundle" / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_stage_2_moves_the_contextualizer_alone_and_helps_the_catalogue(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path
) -> None:
    first = Record.read(parent / "record.json")
    recipe = recipe_of(
        stage=2, parent=first.recipe_hash, num_negatives=128, steps=40,
        evaluate={"regimes": ["batch", "catalogue"]},
    )  # fmt: skip
    record = train(recipe, dataset, tmp_path / "run", parent=parent, options=ONE)
    before = load_file(parent / "bundle" / "model.safetensors")
    after = load_file(tmp_path / "run" / "bundle" / "model.safetensors")
    for name, tensor in after.items():
        moved = not torch.equal(tensor, before[name])
        assert moved == name.startswith("contextualizer."), name
    assert record.parent_hash == first.recipe_hash
    assert record.flops_item_cache is not None
    assert record.train is not None
    assert record.train.extra_loss is not None
    assert record.train.loss == pytest.approx((record.train.in_batch_loss + record.train.extra_loss) / 2)
    assert record.metrics["catalogue/loss"].value < first.metrics["catalogue/loss"].value
    # One cache for both: the same file under two names.
    shard = "catalogue/embeddings-00000-of-00001.safetensors"
    assert (parent / shard).samefile(tmp_path / "run" / shard)


def test_a_loss_that_is_not_finite_ends_in_a_failed_record(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(learning_rate=1e30, warmup=0.0, clip=1e30)
    record = train(recipe, dataset, tmp_path / "run", options=ONE)
    assert record.status == "failed"
    assert record.reason is not None
    assert "the loss is nan at step 2 (learning rate 9.8" in record.reason
    assert "batch position 2: windows 32 to 47" in record.reason
    assert record.steps == 2  # those that went well
    assert Record.read(tmp_path / "run" / "record.json") == record
    assert not (tmp_path / "run" / "bundle").exists()


def test_a_signal_saves_and_a_resumed_run_ends_as_if_nothing_had_been(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(evaluate={"every": 6})
    straight = train(recipe, dataset, tmp_path / "straight", options=ONE)
    steps: list[int] = []

    def watch(now: TrainingProgress) -> None:
        if now.phase == "training" and not steps:
            steps.append(now.step)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="--resume"):
        train(recipe, dataset, tmp_path / "run", options=ONE, progress=watch)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (tmp_path / "run" / "record.json").exists()
    resumed = train(recipe, dataset, tmp_path / "run", options=TrainOptions(device="cpu", threads=1, resume=True))
    assert resumed.train == straight.train
    assert resumed.metrics == straight.metrics
    assert resumed.trajectory == straight.trajectory
    assert resumed.flops_executed == straight.flops_executed
    one, two = ((tmp_path / run / "bundle" / "model.safetensors").read_bytes() for run in ("straight", "run"))
    assert one == two
    lines = read_journal(tmp_path / "run" / "journal.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(24))
    # Asked again, a finished run is not trained again.
    again = train(recipe, dataset, tmp_path / "run", options=TrainOptions(device="cpu", resume=True))
    assert again == resumed


def test_a_signal_too_late_for_a_run_reaches_whoever_runs_it(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Asked to stop while its last evaluation is done, a run ends, and a sweep must not begin the next."""
    passed_on: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: passed_on.append(number))
    try:
        record = train(
            recipe_of(steps=2), dataset, tmp_path / "run", options=ONE,
            on_save=lambda _step: os.kill(os.getpid(), signal.SIGTERM),  # only before the Record is written
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    assert record.status == "done"
    assert passed_on == [signal.SIGTERM]


def test_checkpoints_that_are_kept(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    options = TrainOptions(
        device="cpu", threads=1, save_every=4, keep=2, best="batch/loss", keep_checkpoints_at_end=True
    )
    saved: list[int] = []
    record = train(recipe_of(evaluate={"every": 6}), dataset, tmp_path / "run", options=options, on_save=saved.append)
    values = {p.step: p.value for p in record.trajectory if p.metric == "batch/loss"}
    assert list(values) == [6, 12, 18, 24]
    best = min(values, key=lambda step: values[step])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    expected = {20, 24, best}
    assert names == [f"step-{step:08d}" for step in sorted(expected)]
    assert saved[-1] == 24
    # A checkpoint scores like a run.
    options_of = EvaluateOptions(regimes=("batch",), queries=400, batch_sequences=16)
    path = tmp_path / "run" / "checkpoints" / f"step-{24:08d}"
    (evaluation,) = evaluate_runs([path], dataset, options_of, ComputeOptions("cpu"))
    assert evaluation.metrics["batch/loss"].value == record.metrics["batch/loss"].value


def test_a_fence_that_has_fallen_abandons_the_run(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    def fence(step: int) -> None:
        raise RunError("the lease is another worker's now")

    with pytest.raises(RunError, match="lease"):
        train(recipe_of(steps=2), dataset, tmp_path / "run", options=ONE, on_save=fence)
    assert not (tmp_path / "run" / "record.json").exists()


def test_the_journal_writes_what_json_cannot_hold_as_text(tmp_path: Path) -> None:
    from habitus.training.journal import Journal

    journal = Journal(tmp_path / "journal.jsonl", 0, writes=True)
    journal.write({"step": 0, "loss": math.nan})
    journal.close()
    assert json.loads((tmp_path / "journal.jsonl").read_text()) == {"step": 0, "loss": "nan"}


def test_a_recipe_chooses_its_own_window_length(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Training and evaluating at another seq_len is what a dataset prepared with it gives, to the bit."""
    shop = World(WorldConfig(num_users=500, num_items=300, events_per_user=24, seed=2))
    schema = WORLD_SCHEMA.model_copy(update={"world": shop.config})
    options = PrepareOptions(seq_len=48, text_len=6, vocabulary_size=400, validation_share=0.2, test_share=0, threads=1)
    prepare_world(shop, schema, tmp_path / "dataset", options, lambda *_: None)
    recipe = recipe_of(steps=6, evaluate={"regimes": ["batch", "catalogue"]})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": 48})})
    own = train(recipe, Dataset.open(tmp_path / "dataset"), tmp_path / "own", options=ONE)
    other = train(recipe, dataset, tmp_path / "other", options=ONE)
    assert own.train == other.train
    assert own.metrics == other.metrics
    assert own.slots_seen == other.slots_seen == 6 * 16 * 48
    assert own.epochs == other.epochs
    scored = EvaluateOptions(queries=400, batch_sequences=16)
    (evaluation,) = evaluate_runs([tmp_path / "other"], dataset, scored, ComputeOptions("cpu"))
    assert evaluation.metrics == other.metrics
    assert other.evaluation is not None
    assert evaluation.specification["batch"].query_set_checksum == other.evaluation.query_set_checksum
    train(recipe_of(steps=2), dataset, tmp_path / "short", options=ONE)
    with pytest.raises(ConfigError, match=r"32 in .*short, 48 in .*other(.|\n)*one data\.seq_len"):
        evaluate_runs([tmp_path / "other", tmp_path / "short"], dataset, scored, ComputeOptions("cpu"))


def test_a_run_is_evaluated_on_the_test_side_of_its_own_dataset(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    shop = World(WorldConfig(num_users=300, num_items=100, events_per_user=20, seed=2))
    options = PrepareOptions(seq_len=32, text_len=6, vocabulary_size=400, threads=1)
    prepare_world(shop, WORLD_SCHEMA, tmp_path / "dataset", options, lambda *_: None)
    data = Dataset.open(tmp_path / "dataset")
    record = train(recipe_of(steps=4), data, tmp_path / "run", options=ONE)
    assert record.evaluation is not None
    assert record.evaluation.side == "validation"
    assert "side" not in json.loads((tmp_path / "run" / "record.json").read_text())["evaluation"]
    scored = EvaluateOptions(queries=100, batch_sequences=16, side="test")
    (evaluation,) = evaluate_runs([tmp_path / "run"], data, scored, ComputeOptions("cpu"))
    assert evaluation.specification["batch"].side == "test"
    assert np.isfinite(evaluation.metrics["catalogue/loss"].value)


def test_a_share_of_the_users_trains_and_all_validation_users_are_asked(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    shares = {"all": {}, "half": {"user_share": 0.5}, "other": {"user_share": 0.5, "user_part": 1}}
    records: dict[str, Record] = {}
    for name, share in shares.items():
        recipe = recipe_of(log_q=True, evaluate={"regimes": ["batch", "catalogue"]})
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=share)})
        records[name] = train(recipe, dataset, tmp_path / name, options=ONE)
        view = dataset.training_view(recipe.data)
        assert records[name].unique_events == view.counts("train").events
        assert records[name].epochs == 24 * 16 / view.counts("train").windows
    assert records["half"].unique_events + records["other"].unique_events == records["all"].unique_events
    assert len({record.recipe_hash for record in records.values()}) == 3
    assert len({record.train for record in records.values()}) == 3
    specs = [record.evaluation for record in records.values()]
    assert specs[0] == specs[1] == specs[2]
    sizes = [{name: metric.n for name, metric in record.metrics.items()} for record in records.values()]
    assert sizes[0] == sizes[1] == sizes[2]  # cold items, too, are those of all training users
    scored = EvaluateOptions(regimes=("batch", "catalogue"), queries=400, batch_sequences=16)
    (evaluation,) = evaluate_runs([tmp_path / "other"], dataset, scored, ComputeOptions("cpu"))
    assert evaluation.metrics == records["other"].metrics
    with pytest.raises(ConfigError, match=r"part 0 of data.user_share = 0.0001 has no training windows"):
        tiny = recipe.model_copy(update={"data": recipe.data.model_copy(update={"user_share": 1e-4, "user_part": 0})})
        train(tiny, dataset, tmp_path / "tiny", options=ONE)
    stage2 = recipe_of(stage=2, parent=records["half"].recipe_hash, num_negatives=16)
    with pytest.raises(ConfigError, match=r"user_share = 1, user_part = 0, and .*half on 0.5 and 0"):
        train(stage2, dataset, tmp_path / "two", parent=tmp_path / "half", options=ONE)


@pytest.mark.parametrize("knob", ["token_dropout", "field_dropout", "item_dropout"])
def test_a_regularised_embedder_trains_in_parts_and_after_a_stop_as_it_does_straight(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, knob: str
) -> None:
    plain = train(recipe_of(steps=8), dataset, tmp_path / "plain", options=ONE)
    recipe = recipe_of(steps=8, **{knob: 0.4})
    assert recipe.train.to_values()[knob] == 0.4
    assert knob not in recipe_of(steps=8).train.to_values()
    straight = train(recipe, dataset, tmp_path / "straight", options=ONE)
    assert straight.train is not None and plain.train is not None
    assert straight.train.loss > plain.train.loss  # noise costs training loss at first
    parts = train(
        recipe, dataset, tmp_path / "parts", options=TrainOptions(device="cpu", threads=1, accumulate=3)
    )  # fmt: skip
    assert parts.train is not None
    assert parts.train.loss == pytest.approx(straight.train.loss, rel=1e-5)

    def fence(step: int) -> None:
        if step > 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        options = TrainOptions(device="cpu", threads=1, save_every=5)
        train(recipe, dataset, tmp_path / "run", options=options, on_save=fence)
    train(recipe, dataset, tmp_path / "run", options=TrainOptions(device="cpu", threads=1, resume=True))
    one, two = ((tmp_path / run / "bundle" / "model.safetensors").read_bytes() for run in ("straight", "run"))
    assert one == two


def test_a_frozen_embedder_drops_nothing(
    dataset: Dataset, recipe_of: Callable[..., Any], parent: Path, tmp_path: Path
) -> None:
    first = Record.read(parent / "record.json")
    stage2: dict[str, Any] = {"stage": 2, "parent": first.recipe_hash, "num_negatives": 16, "steps": 4}
    knobs = {"token_dropout": 0.5, "field_dropout": 0.5, "item_dropout": 0.5}
    plain = train(recipe_of(**stage2), dataset, tmp_path / "plain", parent=parent, options=ONE)
    other = train(recipe_of(**stage2, **knobs), dataset, tmp_path / "other", parent=parent, options=ONE)
    assert other.train == plain.train
    assert other.metrics == plain.metrics
