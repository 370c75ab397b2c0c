"""benchmarks/rivals.py: what rivals learn from, how their vectors are ranked, when they stop, how they are compared."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.evaluation import evaluate
from habitus.events.schema import Schema

ITEMS, USERS, LENGTH = 12, 120, 20


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("rivals")


@pytest.fixture
def scoring(rivals: ModuleType) -> ModuleType:
    return importlib.import_module("rivals_scoring")


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Every user goes round a circle of items from a place of their own; a 13th item is never seen."""
    folder = tmp_path_factory.mktemp("circle")
    user = np.repeat(np.arange(USERS), LENGTH)
    place = np.tile(np.arange(LENGTH), USERS)
    item = (user * 5 + place) % ITEMS
    pq.write_table(pa.table({"user": user, "item": item, "time": place * 60}), folder / "events.parquet")
    ids = pa.array(np.arange(ITEMS + 1))
    pq.write_table(pa.table({"item": ids, "name": ids.cast(pa.string())}), folder / "items.parquet")
    columns = {"user": "user", "item": "item", "timestamp": "time", "time_unit": "s"}
    schema = Schema.parse({"events": columns, "items": {"item": "item", "fields": {"name": "category"}}}, "circle")
    options = PrepareOptions(seq_len=LENGTH, validation_share=0.2, test_share=0.2)
    prepare(str(folder / "events.parquet"), str(folder / "items.parquet"), schema, folder / "dataset", options)
    return Dataset.open(folder / "dataset")


class LastItem:
    """A rival by hand: a history's vector is that of its last item, and items lie on a line."""

    module = torch.nn.Linear(1, 1)

    def __init__(self, ids: np.ndarray, vectors: list[float]) -> None:
        self.ids = ids
        self.vectors = torch.tensor(vectors)[:, None]
        self.seen: list[tuple[Tensor, Tensor]] = []

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        self.seen.append((items, times))
        return self.vectors[items[:, -1] - 1].abs()

    def item_vectors(self) -> Tensor:
        return self.vectors


def test_sequences_share_one_event_so_that_every_training_pair_is_there_once(
    scoring: ModuleType, circle: Dataset
) -> None:
    log = scoring.TrainingLog.of(circle.with_seq_len(8))
    assert log.length == 8
    assert max(len(sequence) for sequence in log.sequences) == 9
    pairs = sum(len(sequence) - 1 for sequence in log.sequences)
    assert pairs == circle.counts("train").users * (LENGTH - 1)
    whole = scoring.TrainingLog.of(circle.with_validation())
    held_out = circle.counts("validation").users
    assert len(whole.sequences) == circle.counts("train").users + held_out


def test_an_event_carries_the_time_of_the_one_before(scoring: ModuleType, circle: Dataset) -> None:
    log = scoring.TrainingLog.of(circle)
    assert log.times is not None
    assert log.times[0].tolist() == [0, *range(0, 60 * (LENGTH - 1), 60)]


def test_ranks_count_ties_against_a_rival_and_unknown_items_last(scoring: ModuleType, circle: Dataset) -> None:
    log = scoring.TrainingLog.of(circle)
    ids = np.zeros(circle.num_items, np.int64)
    ids[log.items] = np.arange(1, len(log.items) + 1)
    ids[3] = 0  # as if the item at row 3 had never been trained on
    log = scoring.TrainingLog(log.sequences, log.times, np.delete(log.items, 3), log.num_items, log.length, log.batch)
    ids[ids > 4] -= 1
    # Scores of all items are 5, 4, 4, …: the second and the third tie, the rest follow one by one.
    rival = LastItem(ids, [5.0, 4.0, 4.0, *np.linspace(3.0, 1.0, len(log.items) - 3).tolist()])
    kept: list[Any] = []
    scorer = scoring.RivalScorer("line", rival, circle, log, torch.device("cpu"))
    options = scoring.evaluate_options(circle, "test")
    evaluate(circle, scorer, options, keep=lambda _regime, values: kept.append(values))
    [values] = kept
    # Before row 4 comes row 3: where it is all that the query sees, nothing is known, and all 11 items tie.
    expected = {0: {1}, 1: {3}, 2: {3}, 3: {circle.num_items}, 4: {4, 11}, 11: {11}}
    for row, ranks in expected.items():
        assert set(values.rank[values.target == row].tolist()) == ranks
    assert set(values.rank[(values.target == 4) & (values.history > 1)].tolist()) == {4}
    items, times = rival.seen[0]
    assert items.shape[1] + 1 == times.shape[1] == LENGTH + 1
    empty = (items == 0).all(1)
    assert (items[~empty, -1] > 0).all()
    assert (items[:, :-1] > 0).logical_and(items[:, 1:] == 0).sum() == 0  # empty slots come first
    assert set(times[:, -1].tolist()) <= set(range(0, 60 * LENGTH, 60))


def test_a_plain_sasrec_learns_who_follows_whom(rivals: ModuleType, circle: Dataset, tmp_path: Path) -> None:
    plain = importlib.import_module("rivals_plain")
    scoring = importlib.import_module("rivals_scoring")
    setting = scoring.Setting(32, 1, 0.0)
    trained = scoring.train_rival("plain", plain.PlainSASRec, circle, setting, seconds=60.0, batch=8, refit_passes=12)
    assert trained.row["stopped"] == "passes"
    assert trained.row["test"]["ndcg@10"]["value"] > 0.95
    assert trained.row["refit"] and trained.row["validation"] is None


def test_a_course_stops_when_validation_does_and_goes_back_to_its_best(
    scoring: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from habitus.evaluation import Evaluation
    from habitus.record import Metric

    module = torch.nn.Linear(1, 1, bias=False)
    values = iter([0.1, 0.3, 0.2, 0.2, 0.2, 0.2])

    def validate() -> Evaluation:
        metric = Metric(value=next(values), n=1)
        metrics = {"catalogue/ndcg@10": metric, "catalogue/recall@10": metric}
        return Evaluation(scorer="", dataset_checksum="", specification={}, metrics=metrics, seconds={})

    course = scoring.Course(validate, module, seconds=1e6)
    course.steps = scoring.MIN_STEPS
    stops = []
    for number in range(5):
        torch.nn.init.constant_(module.weight, float(number))
        course._validation_seconds = 0.0  # of a validation that takes no time
        stops.append(course.after_pass())
    assert stops == [False, False, False, False, True]
    assert course.stopped == "validation"
    assert course.restore_best()["passes"] == 2
    assert module.weight.item() == 1.0


def test_the_table_compares_the_refit_of_what_validation_chose(
    rivals: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = np.array([0, 0, 1, 1])
    event = np.arange(4)

    def write(name: str, rank: list[int], **row: Any) -> None:
        rivals.save_ranks(tmp_path / f"{name}.npz", event, user, np.array(rank))
        test = {metric: {"value": 0.0} for metric in ("recall@10", "ndcg@10")}
        common = {"log": "log", "test": test, "setting": "s", "stopped": "validation", "train_seconds": 9.0,
                  "device": "cpu", "ranks": f"{name}.npz"}  # fmt: skip
        rivals.write_json(tmp_path / f"{name}.json", common | row)

    curve = [{"seconds": 2.0, "ndcg@10": 0.1}, {"seconds": 4.0, "ndcg@10": 0.3}]
    write("ours", [1, 1, 1, 99], rival="habitus", curve=curve)
    theirs = {"rival": "sasrec", "curve": [], "refit": False}
    write("worse", [1, 1, 1, 1], **theirs, validation={"ndcg@10": 0.1, "seconds": 1.0, "on our queries": 0.15})
    write("better", [1, 1, 1, 1], **theirs, validation={"ndcg@10": 0.2, "seconds": 2.0, "on our queries": 0.25})
    write("refit", [1, 99, 99, 99], **theirs | {"refit": True, "validation": None, "stopped": "passes"})
    rivals.run_table(rivals.argparse.Namespace(out=[tmp_path], ours=[], json=None))
    [row] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert row["refit"] and row["validation"] == 0.25
    assert row["difference recall@10"][0] == pytest.approx(0.5)  # 3/4 less 1/4
    assert row["seconds_to_quality"] == 4.0


def test_ranks_of_other_queries_are_refused(rivals: ModuleType, tmp_path: Path) -> None:
    for name, event in (("ours", [0, 1]), ("theirs", [0, 2])):
        rivals.save_ranks(tmp_path / f"{name}.npz", np.array(event), np.array([0, 1]), np.array([1, 1]))
    test = {metric: {"value": 0.0} for metric in ("recall@10", "ndcg@10")}
    common = {"folder": str(tmp_path), "test": test, "log": "log", "curve": []}
    validation = {"ndcg@10": 0.1, "seconds": 1.0}
    chosen = common | {"rival": "r", "setting": "s", "stopped": "time", "train_seconds": 1.0, "device": "cpu",
                       "validation": validation, "ranks": "theirs.npz", "refit": False}  # fmt: skip
    with pytest.raises(SystemExit, match="different queries"):
        rivals.compare([common | {"ranks": "ours.npz"}], chosen, chosen)


def test_a_second_call_keeps_what_ended_by_itself_or_had_as_much_time(rivals: ModuleType, tmp_path: Path) -> None:
    ended = rivals.Job(Path("logs/a"), "plain", 0)
    cut_short = rivals.Job(Path("logs/a"), "plain", 1)
    new = rivals.Job(Path("logs/a"), "plain", 2)
    row = {"limit": 10.0, "refit_passes": None}
    rivals.write_json(tmp_path / f"{ended.stem}.json", row | {"stopped": "validation"})
    rivals.write_json(tmp_path / f"{cut_short.stem}.json", row | {"stopped": "time"})
    over = 0.0  # the end of the call has passed: nothing new begins

    def outcome(job: Any, seconds: float) -> dict[str, Any]:
        return rivals.train_if_missing(job, tmp_path, seconds, over, "cpu", 0)

    assert outcome(ended, 60.0)["kept"]
    assert outcome(cut_short, 10.0)["kept"]
    assert "missing" in outcome(cut_short, 60.0)
    assert "missing" in outcome(new, 10.0)
    assert "missing" in outcome(ended._replace(passes=3), 10.0)
