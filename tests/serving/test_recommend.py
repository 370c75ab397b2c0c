"""Batch jobs: the same answers as one by one, from every format to every format; files whole or absent."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli.app import app
from habitus.errors import ConfigError, DataError
from habitus.exporting import recommend as recommending
from habitus.exporting.recommend import RecommendOptions, recommend_file
from habitus.serving import Limits, RecommendRequest, Retriever

Log = dict[int, list[dict[str, Any]]]
Answers = dict[int, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def retriever(trained_run: Path) -> Retriever:
    return Retriever.open(trained_run, device="cpu", read_only=True, limits=Limits(max_history=10**9))


@pytest.fixture(scope="module")
def expected(retriever: Retriever, log: Log) -> Answers:
    users = range(0, 60)
    answers = retriever.recommend([RecommendRequest(history=log[user], k=5, exclude_seen=True) for user in users])
    return {
        user: [(one.item_id, one.probability) for one in answer.items]
        for user, answer in zip(users, answers, strict=True)
    }


@pytest.fixture
def events(log: Log, tmp_path: Path) -> Path:
    """The log of 60 users, shuffled among each other, as Parquet."""
    rows = [event for user in range(60) for event in log[user]]
    rows.sort(key=lambda event: event["timestamp"])
    path = tmp_path / "log.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return path


def check(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for user, answer in expected.items():
        assert [item for item, _ in found[user]] == [item for item, _ in answer]
        assert [chance for _, chance in found[user]] == pytest.approx([chance for _, chance in answer], rel=1e-4)


def read(path: Path) -> Answers:
    found: Answers = {}
    if path.suffix == ".jsonl":
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["user_id"]] = [(one["item_id"], one["probability"]) for one in row["items"]]
        return found
    if path.suffix == ".csv":
        rows: list[dict[str, Any]] = list(csv.DictReader(path.open()))
    else:
        rows = pq.read_table(path).to_pylist()
    for row in rows:
        found.setdefault(int(row["user_id"]), []).append((int(row["item_id"]), float(row["probability"])))
        assert int(row["rank"]) == len(found[int(row["user_id"])])
    return found


OPTIONS = RecommendOptions(k=5, exclude_seen=True)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_log_is_answered_as_its_users_one_by_one(
    retriever: Retriever,
    events: Path,
    expected: Answers,
    tmp_path: Path,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recommending, "BATCH", 7)
    monkeypatch.setattr(recommending, "READ_ROWS", 50)
    told: list[tuple[str, float]] = []
    out = tmp_path / f"out{suffix}"
    done = recommend_file(retriever, str(events), out, OPTIONS, lambda *step: told.append(step))
    check(read(out), expected)
    assert (done.users, done.answered, done.items) == (60, 60, 300)
    assert told[-1] == ("recommending", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["log.parquet", out.name])


@pytest.mark.parametrize("form", ["csv", "jsonl", "lists.jsonl", "lists.parquet", "two files"])
def test_histories_come_in_every_format(
    retriever: Retriever, events: Path, log: Log, expected: Answers, tmp_path: Path, form: str
) -> None:
    table = pq.read_table(events)
    source = str(tmp_path / f"input.{form}")
    lists = [{"user_id": user, "history": log[user]} for user in range(60)]
    if form == "csv":
        pyarrow.csv.write_csv(table, source)
    elif form == "jsonl":
        Path(source).write_text("".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist()))
    elif form == "lists.jsonl":
        Path(source).write_text("".join(json.dumps(row, default=str) + "\n" for row in lists))
    elif form == "lists.parquet":
        pq.write_table(pa.Table.from_pylist(lists), source)
    else:
        pq.write_table(table.slice(0, 300), tmp_path / "part-1.parquet")
        pq.write_table(table.slice(300), tmp_path / "part-2.parquet")
        source = str(tmp_path / "part-*.parquet")
    recommend_file(retriever, source, tmp_path / "out.parquet", OPTIONS)
    check(read(tmp_path / "out.parquet"), expected)


@pytest.mark.parametrize("form", ["integers.parquet", "texts.jsonl"])
def test_a_history_may_be_a_list_of_plain_ids(retriever: Retriever, tmp_path: Path, form: str) -> None:
    ids = {1: [5, 7, 9], 2: [8], 3: []}
    convert = int if form.startswith("integers") else str
    rows = [{"user_id": user, "history": [convert(item) for item in items]} for user, items in ids.items()]
    source = tmp_path / form
    if form.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = recommend_file(retriever, str(source), tmp_path / "out.parquet", RecommendOptions(k=4))
    assert (done.answered, done.by_popularity, done.unknown_events) == (3, 1, 0)
    requests = [RecommendRequest(history=[{"item_id": item} for item in items], k=4) for items in ids.values()]
    answers = retriever.recommend(requests)
    check(
        read(tmp_path / "out.parquet"),
        {
            user: [(one.item_id, one.probability) for one in answer.items]
            for user, answer in zip(ids, answers, strict=True)
        },
    )
    pq.write_table(pa.table({"user_id": [1], "history": [[0.5]]}), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"'history' is list<.*double>.*\n.*a list of events or item ids per row"):
        recommend_file(retriever, str(tmp_path / "bad.parquet"), tmp_path / "new.csv")


def test_users_without_an_answer_are_counted_and_told(retriever: Retriever, tmp_path: Path) -> None:
    rows = [
        {"user_id": "anna", "item_id": "5", "price_paid": ""},
        {"user_id": "bert", "item_id": "9999", "price_paid": ""},
        {"user_id": "cleo", "item_id": "7", "price_paid": "free"},
    ]
    source = tmp_path / "log.csv"
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), source)
    with pytest.raises(DataError, match=r"user 'cleo': history\[0\].price_paid is 'free'"):
        recommend_file(retriever, str(source), tmp_path / "out.csv", OPTIONS)
    assert not (tmp_path / "out.csv").exists()
    options = RecommendOptions(k=2, on_bad="skip")
    done = recommend_file(retriever, str(source), tmp_path / "out.jsonl", options)
    assert (done.users, done.answered, done.unknown_only, done.skipped) == (3, 1, 1, 1)
    assert [line.split(":")[0] for line in done.examples] == ["user 'bert'", "user 'cleo'"]
    assert [json.loads(line)["user_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["anna"]
    unread = tmp_path / "unread.csv"
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows[2:]), unread)
    with pytest.raises(DataError, match=r"none of 1 users has events that can be read; user 'cleo'"):
        recommend_file(retriever, str(unread), tmp_path / "unread.jsonl", options)
    assert not (tmp_path / "unread.jsonl").exists()
    without = tmp_path / "without.csv"
    pyarrow.csv.write_csv(pa.Table.from_pylist([*rows[:1], rows[0] | {"user_id": None}]), without)
    with pytest.raises(DataError, match=r"1 rows have no 'user_id'(.|\n)*--on-bad skip"):
        recommend_file(retriever, str(without), tmp_path / "without.jsonl", OPTIONS)
    assert recommend_file(retriever, str(without), tmp_path / "without.jsonl", options).users == 1
    nobody = tmp_path / "nobody.csv"
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows[1:2]), nobody)
    assert recommend_file(retriever, str(nobody), tmp_path / "none.parquet", options).answered == 0
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_names_that_cannot_be_written_are_refused_before_the_work(
    retriever: Retriever, events: Path, tmp_path: Path
) -> None:
    (tmp_path / "old.csv").write_text("old")
    for name, message in (
        ("out.txt", "no known suffix"),
        ("old.csv", "exists already"),
        ("nowhere/out.csv", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            recommend_file(retriever, str(events), tmp_path / name)
    recommend_file(retriever, str(events), tmp_path / "old.csv", RecommendOptions(k=1, replace=True))
    assert len((tmp_path / "old.csv").read_text().splitlines()) == 61
    with pytest.raises(DataError, match="column 'item_id' is missing"):
        pq.write_table(pa.table({"user_id": [1], "item": [2]}), tmp_path / "bad.parquet")
        recommend_file(retriever, str(tmp_path / "bad.parquet"), tmp_path / "new.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.parquet", "log.parquet", "old.csv"]


def test_the_command_answers_a_file_and_a_single_history(run: Path, events: Path, expected: Answers) -> None:
    out = run / "out.parquet"
    arguments = ["recommend", str(run), "--histories", str(events), "--k", "5", "--exclude-seen", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert f"{out}: 300 recommendations for 60 of 60 users" in done.output
    assert "since unknown" not in done.output
    check(read(out), expected)
    strangers = run / "strangers.jsonl"
    strangers.write_text('{"user_id": 1, "history": [5, 9999, 9998]}\n{"user_id": 2, "history": []}\n')
    listed = ["recommend", str(run), "--histories", str(strangers), "--out", str(run / "few.csv"), "--device", "cpu"]
    told = CliRunner().invoke(app, listed).output
    assert "popular items, for want of a history: 1 user\n" in told
    assert "left out of histories, since unknown: 2 items\n" in told
    one = ["recommend", str(run), "--history", '[{"item_id": 5}, 7, "99999"]', "--k", "3", "--device", "cpu"]
    shown = CliRunner().invoke(app, one)
    assert "left out, since unknown: 99999" in shown.output
    found = CliRunner().invoke(app, [*one, "--json", "--allow", "category=nothing"])
    answer = json.loads(found.stdout)
    assert answer["items"] == []
    assert answer["unknown_items"] == [99999]
    assert answer["notes"] == ["no item of the trained catalogue has category = 'nothing'"]


def test_recommending_and_exporting_need_no_http_packages() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'starlette', 'uvicorn', 'prometheus_client']))"
    code = f"{blocked}; import habitus.exporting; from habitus.serving import Retriever, RecommendRequest"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither --histories nor --history"),
        (["--histories", "x.csv"], "no --out was given"),
        (["--histories", "x.csv", "--history", "[]"], "both"),
        (["--history", "[1"], "not JSON"),
        (["--history", "5"], "is not a list"),
        (["--history", "[5]", "--range", "price"], "--range 'price'"),
        (["--history", "[5]", "--range", "colour=1..2"], "which is not a field here"),
        (["--history", "[5]", "--only-items", "nowhere.txt"], "--only-items nowhere.txt cannot be read"),
        (["--history", "[5]", "--temperature", "0"], "the temperature is 0"),
        (["--history", "[5]", "--allow", "category"], "has no '='"),
        (["--history", "[5]", "--index", "magic"], "--index"),
        (["--history", "[5]", "--k", "0"], "k = 0"),
    ],
)
def test_the_command_refuses_in_words(run: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["recommend", str(run), "--device", "cpu", *arguments])
    assert done.exit_code == 1
    assert message in str(done.exception)
