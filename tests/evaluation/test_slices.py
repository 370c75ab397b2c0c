"""Where a run errs: groups of queries, paired rows worked by hand, tables that a caller brings, and the command."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from scipy.stats import t
from typer.testing import CliRunner

from habitus.cli.app import app
from habitus.cli.evaluation_tables import _print_slices
from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import ConfigError, DataError
from habitus.evaluation.baselines import Popularity
from habitus.evaluation.evaluation import EvaluateOptions, evaluate
from habitus.evaluation.groups import NO_VALUE, GroupOptions, Groups, bin_numbers, query_groups
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.slices import holm, slice_tables
from habitus.events import Schema
from habitus.record import Metric
from habitus.store import SliceRow, SliceTable

SMALL = ["--queries", "600", "--batch-sequences", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def values(dataset: Dataset) -> PerQuery:
    """What popularity answers to six hundred queries of many users."""
    kept: list[PerQuery] = []
    options = EvaluateOptions(("catalogue",), queries=600, per_user=4, batch_sequences=8)
    evaluate(dataset, Popularity(dataset), options, keep=lambda _, one: kept.append(one))
    return kept[0]


def groups_of(dataset: Dataset, values: PerQuery, name: str, file: Path | None = None) -> dict[str, np.ndarray]:
    """The queries of each label."""
    [groups] = query_groups(dataset, values, [name], file)
    assert len(set(groups.labels)) == len(groups.labels)
    return {label: np.flatnonzero(groups.codes == code) for code, label in enumerate(groups.labels)}


def test_numbers_are_binned_by_quantiles_and_few_values_stand_for_themselves() -> None:
    labels, codes = bin_numbers(np.array([1, 2, np.nan, 2, 1]), 5)
    assert labels == ["1", "2", NO_VALUE] and codes.tolist() == [0, 1, 2, 1, 0]
    labels, codes = bin_numbers(np.arange(100.0), 4)
    assert labels == ["0 to 24", "25 to 49", "50 to 74", "75 to 99"]
    assert np.bincount(codes).tolist() == [25, 25, 25, 25]
    # Half of the values are equal: they share a bin instead of being cut apart.
    labels, codes = bin_numbers(np.concatenate([np.zeros(50), np.arange(1, 51)]), 4)
    assert labels[0] == "0" and np.bincount(codes)[0] == 50


def test_groups_are_those_of_the_log(dataset: Dataset, values: PerQuery) -> None:
    moments = [datetime.fromtimestamp(int(dataset.times[row + 1]) / 1e6, UTC) for row in values.event]
    days = groups_of(dataset, values, "weekday")
    assert sorted(days) == sorted({moment.strftime("%A") for moment in moments})
    assert all(moments[query].strftime("%A") == day for day, rows in days.items() for query in rows)
    assert np.array_equal(groups_of(dataset, values, "repeat")["repeat"], np.flatnonzero(values.repeat))
    category = next(field.name for field in dataset.fields.item if field.kind == "category")
    codes = dataset.item_features(values.target).fields[category]
    vocabulary = dataset.encoders.item_values[category]
    for label, rows in groups_of(dataset, values, category).items():
        assert label.startswith("(") or {vocabulary[code - 1] for code in codes[rows]} == {label}
    sizes = [len(rows) for label, rows in groups_of(dataset, values, category).items() if not label.startswith("(")]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(len(rows) for rows in groups_of(dataset, values, "gap").values()) == len(values.user)


def test_deciles_of_popularity_take_a_tenth_of_the_training_events_each(dataset: Dataset, values: PerQuery) -> None:
    counts = np.asarray(dataset.item_train_counts)
    for label, rows in groups_of(dataset, values, "popularity").items():
        targets = np.unique(values.target[rows])
        above = np.array([counts[counts > counts[item]].sum() for item in targets]) / counts.sum()
        if label.startswith("new"):
            assert not counts[targets].any()
        else:
            assert (above < int(label.split()[0]) / 10).all()


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def per_query(ranks: list[int], users: list[int]) -> PerQuery:
    zeros = np.zeros(len(ranks), np.int64)
    return PerQuery(
        batch=zeros, user=np.array(users), event=zeros, target=np.arange(len(ranks)), history=zeros, cold=zeros > 0,
        repeat=zeros > 0, rank=np.array(ranks), loss=None, entropy=None, top=np.empty((len(ranks), 0), np.int64),
        candidates=zeros + 100,
    )  # fmt: skip


def test_rows_are_paired_over_users_with_students_interval(dataset: Dataset) -> None:
    users = [0, 1, 2, 3, 4, 5, 6]
    run, other = per_query([1, 1, 1, 20, 1, 1, 1], users), per_query([1, 20, 20, 20, 20, 1, 20], users)
    groups = Groups("side", "by hand", ("a", "b"), np.array([0, 0, 0, 0, 0, 1, 1]))
    [table] = slice_tables(dataset, run, [groups], "recall@10", ("other", other))
    first, second = table.rows
    # Differences 0, 1, 1, 0, 1 of five users: mean 3/5, sample deviation sqrt(3/10).
    error = np.sqrt(0.3 / 5)
    assert first.metric.value == pytest.approx(0.8) and first.reference == pytest.approx(0.2)
    assert first.difference == pytest.approx(0.6) and (first.users, first.metric.n) == (5, 5)
    assert first.high == pytest.approx(0.6 + t.ppf(0.975, 4) * error)
    assert first.p_value == pytest.approx(2 * t.sf(0.6 / error, 4)) and table.comparisons == 1
    assert second.difference == pytest.approx(0.5) and second.p_value is None  # two users are not tested
    assert table.worst == "a" and table.examples[0].rank == 20


@pytest.mark.parametrize("pool", [NO_VALUE, "(others: 7 values)"])
def test_the_worst_row_is_of_one_value(dataset: Dataset, pool: str) -> None:
    run = per_query([1, 1, 1, 1, 20, 20, 20, 20, 20, 20], list(range(10)))
    groups = Groups("side", "by hand", ("a", pool), np.repeat([0, 1], 5))
    [table] = slice_tables(dataset, run, [groups], "recall@10")
    assert table.rows[1].metric.value < table.rows[0].metric.value
    assert table.worst == "a"


def test_times_are_binned_by_day(tmp_path: Path) -> None:
    users, items = np.repeat(np.arange(40), 10), np.tile(np.arange(10), 40)
    moments = pa.array(np.arange(400) * 3_600_000_000, pa.timestamp("us"))
    days = [datetime(2024, 2, 28 if item < 5 else 29, item, tzinfo=UTC) for item in range(9)]
    write(tmp_path / "events.parquet", user=users, item=items, timestamp=moments, due=moments)
    write(tmp_path / "items.parquet", item=np.arange(10), released=pa.array([*days, None], pa.timestamp("us")))
    schema = Schema.parse(
        {
            "events": {"user": "user", "item": "item", "timestamp": "timestamp", "fields": {"due": "time"}},
            "items": {"item": "item", "fields": {"released": "time"}},
        },
        "the test's schema",
    )
    options = PrepareOptions(seq_len=16, threads=1)
    prepare(str(tmp_path / "events.parquet"), str(tmp_path / "items.parquet"), schema, tmp_path / "dataset", options)
    dataset = Dataset.open(tmp_path / "dataset")
    kept: list[PerQuery] = []
    evaluate(dataset, Popularity(dataset), EvaluateOptions(("catalogue",)), keep=lambda _, one: kept.append(one))
    ids = dataset.item_ids().column(0).to_pylist()
    for label, rows in groups_of(dataset, kept[0], "released").items():
        of_label = {ids[target] for target in kept[0].target[rows]}
        assert of_label <= {"2024-02-28": set(range(5)), "2024-02-29": set(range(5, 9)), NO_VALUE: {9}}[label]
    assert all(label.startswith("1970-01-") for label in groups_of(dataset, kept[0], "due"))


@pytest.mark.parametrize("by", ["popularity", "weekday"])
def test_the_name_of_a_column_is_one_piece_in_80_characters(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = SliceRow(
        value="10 (12,345 items)", users=12_345, metric=Metric(value=0.5, se=0.01, n=20_000), reference=0.4,
        difference=0.1, low=0.05, high=0.15, p_value=0.0001,
    )  # fmt: skip
    table = SliceTable(
        by=by, source="by hand", metric="recall@10", reference="popularity", comparisons=1, rows=(row,), worst=None,
        examples=(),
    )  # fmt: skip
    _print_slices(Console(width=80), "run", table)
    shown = capsys.readouterr().out
    [head] = [line for line in shown.splitlines() if "p, Holm" in line]
    assert head.startswith(f"{by} ") and "<.001 *" in shown and "difference [95%]" in head


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_a_table_by_user_by_item_and_by_event(dataset: Dataset, values: PerQuery, tmp_path: Path) -> None:
    users, items = dataset.user_ids().to_pylist(), dataset.item_ids().column(0).to_pylist()
    known = users[::2]
    file = write(tmp_path / "users.parquet", user_id=known, income=[f"{user % 3}" for user in known])
    for label, rows in groups_of(dataset, values, "income", file).items():
        for query in rows:
            user = users[values.user[query]]
            assert label == (NO_VALUE if user not in known else str(user % 3))
    file = write(tmp_path / "items.parquet", item_id=[str(item) for item in items], half=[i % 2 == 0 for i in items])
    rows = groups_of(dataset, values, "half", file)["true"]  # ids as texts are the same ids
    assert {items[target] % 2 for target in values.target[rows]} == {0}
    events = values.event + 1
    columns = {
        "user_id": [users[user] for user in values.user],
        "item_id": [items[target] for target in values.target],
        "timestamp": pa.array(dataset.times[events], pa.timestamp("us")),
        "place": np.arange(len(events)) % 7,
    }
    file = write(tmp_path / "events.parquet", **columns)
    for label, rows in groups_of(dataset, values, "place", file).items():
        assert set(rows % 7) == {int(label)}


def test_tables_that_cannot_be_used_are_refused(dataset: Dataset, values: PerQuery, tmp_path: Path) -> None:
    users = dataset.user_ids().to_pylist()
    twice = write(tmp_path / "twice.parquet", user_id=[*users, users[values.user[0]]], age=[*users, -1])
    with pytest.raises(ConfigError, match="several values of 'age' for 1 keys"):
        query_groups(dataset, values, ["age"], twice)
    nobody = write(tmp_path / "nobody.parquet", user_id=[-5, -6], age=[1, 2])
    with pytest.raises(ConfigError, match="no query of 600 has a row"):
        query_groups(dataset, values, ["age"], nobody)
    unkeyed = write(tmp_path / "unkeyed.parquet", customer=[1], age=[2])
    with pytest.raises(ConfigError, match="none of the columns user_id, item_id") as refusal:
        query_groups(dataset, values, ["age"], unkeyed)
    assert "customer, age" in str(refusal.value.next_step)
    lists = write(tmp_path / "lists.parquet", user_id=users, tags=[["a"]] * len(users))
    with pytest.raises(ConfigError, match="'tags' holds list"):
        query_groups(dataset, values, ["tags"], lists)
    (tmp_path / "text.parquet").write_text("user_id,age\n1,2\n")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        query_groups(dataset, values, ["age"], tmp_path / "text.parquet")


def test_a_column_with_a_million_values_is_pooled_or_refused(
    dataset: Dataset, values: PerQuery, tmp_path: Path
) -> None:
    million = np.arange(1_000_000)
    names = pa.array(million).cast(pa.string())
    by_item = write(tmp_path / "items.parquet", item_id=million, label=names)
    [groups] = query_groups(dataset, values, ["label"], by_item, GroupOptions(most=5))
    distinct = len(np.unique(values.target))
    assert len(groups.labels) == 6 and groups.labels[-1] == f"(others: {distinct - 5} values)"
    assert np.bincount(groups.codes).sum() == 600
    by_user = write(tmp_path / "users.parquet", user_id=million, label=names)
    with pytest.raises(ConfigError, match="values for 600 queries, none of them of two users"):
        query_groups(dataset, values, ["label"], by_user)


def habitus(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(part) for part in arguments], env={"COLUMNS": "120"})
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_run_is_taken_apart_against_baselines_and_against_another_run(
    make_run: Callable[[int], Path], dataset: Dataset, tmp_path: Path
) -> None:
    command = ["evaluate", make_run(60), "--data", dataset.path, "--regime", "batch", *SMALL]
    shown = " ".join(habitus(*command, "--by", "repeat,history,", "--page", tmp_path / "errors.html").split())
    assert "by repeat (whether the target is in the visible history), beside repeat recent" in shown
    assert "Holm's adjustment over 7 rows" in shown
    assert "recall@10 by history" in (tmp_path / "errors.html").read_text()
    columns = ["--by", "repeat", "--against", make_run(1), "--by-metric", "loss", "--json"]
    [run, other] = json.loads(habitus(*command, *columns))
    assert "slices" not in other and run["slices"][0]["reference"] == str(make_run(1))
    rows = {row["value"]: row for row in run["slices"][0]["rows"]}
    for value in ("repeat", "first"):
        here, there = (one["metrics"][f"batch/loss/{value}"]["value"] for one in (run, other))
        assert rows[value]["metric"]["value"] == pytest.approx(here)
        assert rows[value]["difference"] == pytest.approx(here - there)
    assert rows["repeat"]["difference"] < 0 and rows["repeat"]["p_value"] < 0.05  # sixty steps beat one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "popularty"], "--by popularty is not a column here .*'popularity'"),
        (["--by", "title"], "--by title is an item field of kind text"),
        (["--by", " ,"], "names no column"),
        (["--by-file", "nowhere.parquet"], "--by-file was given without --by"),
        (["--against", "best"], "--against was given without --by"),
        (["--by", "repeat", "--by-metric", "coverage@10"], "coverage@10 has no value per query"),
        (["--by", "repeat", "--by-metric", "hit_rate@10"], "(?s)no value per query.*use recall@10, which it equals"),
        (["--by", "repeat", "--by-metric", "precision@5"], "(?s)use recall@5: .* divided by 5"),
        (["--by", "repeat", "--by-metric", "map@10"], "(?s)use mrr@10, which it equals"),
        (["--by", "repeat", "--against", "randomness"], "neither a baseline nor a folder"),
        (["--by", "repeat", "--by-bins", "1"], "1 bins"),
        (["--by", "repeat", "--by-file", "nowhere.parquet"], "nowhere.parquet"),
        (["--page", "errors.html"], "--page without --by or --calibrate"),
        (["--by", "repeat", "--by-metric", "loss", "--metrics", "ranking"], "losses are not computed"),
        (["--calibrate", "--exclude-history"], "over all candidates"),
        (["--by", "repeat", "--page", "errors.txt"], "unknown suffix"),
    ],
)
def test_bad_options_are_named_before_anything_is_scored(
    make_run: Callable[[int], Path], dataset: Dataset, arguments: list[str], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        habitus("evaluate", make_run(60), "--data", dataset.path, *SMALL, *arguments)


def test_slices_need_a_run(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="no run to take apart"):
        habitus("evaluate", "--data", dataset.path, "--baselines", "--by", "repeat")
