"""A server that reads fewer events than the model's window, and says how few would do."""

from pathlib import Path
from typing import Any

import pytest

from habitus.errors import ConfigError
from habitus.recipe import EvaluateRecipe, Recipe
from habitus.record import Metric, Params, Record, TrainLosses
from habitus.serving import Limits, RecommendRequest, RequestError, Retriever
from habitus.serving.serve import note_shorter_history
from habitus.serving.values import read_time

Log = dict[int, list[dict[str, Any]]]


def test_only_the_newest_events_are_read(trained_run: Path, log: Log) -> None:
    whole = Retriever.open(trained_run, device="cpu", read_only=True)
    short = Retriever.open(trained_run, device="cpu", read_only=True, limits=Limits(read_history=5))
    history = next(events for events in log.values() if len(events) > 20)

    def answer(retriever: Retriever, events: list[dict[str, Any]]) -> list[tuple[Any, float]]:
        (response,) = retriever.recommend([RecommendRequest(history=events, k=5, exclude_seen=False)])
        return [(item.item_id, item.score) for item in response.items]

    # The clock of the oldest event read is that of its own history: compare retrievers that both see what came before.
    assert answer(short, history) != answer(whole, history)
    assert [item for item, _ in answer(short, history)] == [item for item, _ in answer(short, history[-8:])]
    assert short.window == 5 and whole.window == 64


def test_more_than_the_window_reads_the_window_and_nothing_is_refused(trained_run: Path) -> None:
    assert Retriever.open(trained_run, device="cpu", read_only=True, limits=Limits(read_history=10**6)).window == 64
    with pytest.raises(ConfigError, match="read_history"):
        Limits.parse({"read_history": 0}, "the options")


def test_a_record_that_measured_shorter_histories_gives_a_hint(tmp_path: Path) -> None:
    train = {"batch_sequences": 2, "steps": 5, "learning_rate": 0.1}
    recipe = Recipe.parse(
        {"data": {"seq_len": 512}, "model": {"joint_dim": 8, "width": 32, "depth": 1}, "train": train}, "test"
    ).model_copy(update={"evaluate": EvaluateRecipe(regimes=("catalogue",), contexts=(10, 200, 500))})
    recalls = {10: 0.30, 200: 0.399, 500: 0.40}
    metrics = {f"catalogue/recall@10/context={n}": Metric(value=value, n=9) for n, value in recalls.items()}
    metrics |= {f"catalogue/recall@10/beyond={n}": Metric(value=0.4 - recalls[n], se=0.001, n=9) for n in (10, 200)}
    record = Record(
        recipe=recipe, recipe_hash="0" * 64, dataset_checksum="1" * 64, status="done", metrics=metrics, seed=0,
        params=Params(embedder=1, contextualizer=1, vocabulary=1), train=TrainLosses(in_batch_loss=1.0, loss=1.0),
        throughput={"query_seconds/context=200": 0.004, "query_seconds/context=500": 0.01},
    )  # fmt: skip
    record.write(tmp_path / "record.json")
    notes: list[str] = []
    note_shorter_history(tmp_path, notes.append)
    assert notes == [
        "habitus: train with 512, serve with 200: -0.3% recall@10 at 0.40 of the time of a query, on validation "
        "(--read-history 200)"
    ]
    plain = record.model_copy(update={"metrics": {}})
    (tmp_path / "record.json").unlink()
    plain.write(tmp_path / "record.json")
    note_shorter_history(tmp_path, notes.append)
    note_shorter_history(tmp_path / "nowhere", notes.append)
    assert len(notes) == 1


def test_a_time_is_read_in_the_form_of_the_log_or_in_iso_form() -> None:
    moment = read_time("t", "2025-03-01T10:30:00", "datetime")
    assert read_time("t", "01.03.2025 10:30", "datetime", "%d.%m.%Y %H:%M") == moment
    assert read_time("t", "2025-03-01 10:30", "datetime", "%d.%m.%Y %H:%M") == moment
    with pytest.raises(RequestError, match="a time such as 2024-05-31T12:30:00, or in the form"):
        read_time("t", "31.31.2025 10:30", "datetime", "%d.%m.%Y %H:%M")


def test_a_history_may_have_the_times_of_the_log(trained_run: Path, log: Log) -> None:
    retriever, form = Retriever.open(trained_run, device="cpu", read_only=True), "%d.%m.%Y %H:%M"
    roles = retriever.encoder.roles
    history = next(events for events in log.values() if len(events) > 5)[::-1]  # times decide, not the order given
    history = [event | {roles.timestamp: event[roles.timestamp].replace(second=0, microsecond=0)} for event in history]
    written = [event | {roles.timestamp: f"{event[roles.timestamp]:{form}}"} for event in history]

    def rows(events: list[dict[str, Any]]) -> list[int]:
        return list(retriever.encoder.encode(events, retriever.candidates.rows_of).rows)

    plain = rows(history)
    with pytest.raises(RequestError, match="a time such as"):
        rows(written)
    retriever.encoder.roles = roles.model_copy(update={"time_format": form})
    assert rows(written) == plain != rows([{**e, roles.timestamp: None} for e in history])
