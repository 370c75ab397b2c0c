"""Numbers with a decimal comma: guessed, declared in the schema, and read as the same numbers with a point."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, guess_schema, prepare
from habitus.errors import ConfigError, DataError
from habitus.events import Schema

from .tables import SMALL

PRICES = ["12,50", "9,90", "1.007,90", "0,75"]
INCOMES = ["2.500,00", "31.000,5", "900,25"]
READ_PRICES, READ_INCOMES = [12.5, 9.9, 1007.9, 0.75], [2500.0, 31000.5, 900.25]


def german_tables(folder: Path, prices: list[str] = PRICES) -> tuple[str, str, str]:
    """Sales as a German spreadsheet writes them: semicolons, days first, decimal commas."""
    folder.mkdir(exist_ok=True)
    sales = [f"k{n % 3};a{n % 4};{n + 1:02d}.03.2025 10:00;{prices[n % 4]};{n}" for n in range(24)]
    items = [f"a{n};trail shoe {n};{price}" for n, price in enumerate(prices)]
    users = [f"k{n};{income}" for n, income in enumerate(INCOMES)]
    for name, header, rows in (
        ("sales", "Kunde;Artikel;Zeit;Preis;Menge", sales),
        ("items", "Artikel;Text;Listenpreis", items),
        ("users", "Kunde;Einkommen", users),
    ):
        (folder / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return str(folder / "sales.csv"), str(folder / "items.csv"), str(folder / "users.csv")


def german_schema(**events: Any) -> Schema:
    roles = {"user": "Kunde", "item": "Artikel", "timestamp": "Zeit", "time_format": "%d.%m.%Y %H:%M"}
    return Schema.parse(
        {
            "events": {**roles, "decimal": ",", "fields": {"Preis": "number"}, **events},
            "items": {"item": "Artikel", "decimal": ",", "fields": {"Text": "text", "Listenpreis": "number"}},
        },
        "test",
    )


def test_a_german_log_is_guessed_and_prepared_as_it_is(tmp_path: Path) -> None:
    sales, items, users = german_tables(tmp_path)
    command = ["prepare", sales, items, "--users", users, "--schema", str(tmp_path / "schema.toml")]
    guessed = CliRunner().invoke(app, [*command, "--guess", "--role", "user=Kunde"])
    assert guessed.exit_code == 0, guessed.output
    schema = Schema.read(tmp_path / "schema.toml")
    assert (schema.events.time_format, schema.events.decimal) == ("%d.%m.%Y %H:%M", ",")
    assert (schema.events.fields["Preis"], schema.items.fields["Listenpreis"]) == ("number", "number")
    assert schema.users is not None and schema.users.decimal == schema.items.decimal == ","
    options = ["--out", str(tmp_path / "dataset"), "--seq-len", "8", "--text-len", "4", "--vocabulary-size", "300"]
    done = CliRunner().invoke(app, [*command, *options, "--test-share", "0"])
    assert done.exit_code == 0, done.output

    dataset = Dataset.open(tmp_path / "dataset")
    item_ids = dataset.item_ids()["Artikel"].to_pylist()
    features = dataset.item_features(np.arange(len(item_ids)))
    price_of = dict(zip(item_ids, features.fields["Listenpreis"].tolist(), strict=True))
    assert price_of == {f"a{n}": np.float32(price) for n, price in enumerate(READ_PRICES)}
    for user, start, stop in zip(
        dataset.user_ids().to_pylist(), dataset.user_offsets[:-1], dataset.user_offsets[1:], strict=True
    ):
        paid = [np.float32(price_of[item_ids[row]]) for row in dataset.items[start:stop]]
        assert dataset.event_fields["Preis"][start:stop].tolist() == paid
        assert set(dataset.event_fields["user.Einkommen"][start:stop].tolist()) == {READ_INCOMES[int(user[1:])]}


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_the_dataset_is_that_of_the_same_numbers_with_a_point(kind: str, tmp_path: Path) -> None:
    files = {}
    for name, prices in (("comma", PRICES), ("point", [str(price) for price in READ_PRICES])):
        folder = tmp_path / name
        sales, items, _ = german_tables(folder, prices)
        for path in (Path(sales), Path(items)):
            texts = pacsv.read_csv(
                path,
                parse_options=pacsv.ParseOptions(delimiter=";"),
                convert_options=pacsv.ConvertOptions(column_types={"Preis": pa.string(), "Listenpreis": pa.string()}),
            )
            if kind == "parquet":
                pq.write_table(texts, path.with_suffix(".parquet"))
            elif kind == "jsonl":
                path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts.to_pylist()))
        values = german_schema().to_values()
        if name == "point":
            del values["events"]["decimal"], values["items"]["decimal"]
        tables = [str(Path(path).with_suffix(f".{kind}")) for path in (sales, items)]
        prepare(tables[0], tables[1], Schema.parse(values, "test"), folder / "dataset", SMALL)
        files[name] = Dataset.open(folder / "dataset").manifest.files
    assert {file for file, facts in files["comma"].items() if files["point"][file] != facts} == {"schema.toml"}


@pytest.mark.parametrize("odd", ["12.50", "1.250", "12,5,0", "abc"])
def test_numbers_that_may_be_meant_otherwise_are_refused_with_what_is_read(odd: str, tmp_path: Path) -> None:
    """12.50 is no number with a decimal comma, and 1.250 may be one with a point."""
    sales, items, _ = german_tables(tmp_path, [odd, *PRICES[1:]])
    with pytest.raises(DataError) as caught:
        prepare(sales, items, german_schema(), tmp_path / "dataset", SMALL)
    message = str(caught.value)
    assert "column 'Preis': 6 rows with NaN, infinite or unreadable numbers" in message
    shown = f"{odd} (without a decimal comma)" if "." in odd else odd
    assert f'"{shown}"' in message
    assert 'as 12,50 by decimal = "," in the schema' in message


@pytest.mark.parametrize(("odd", "is_refused"), [("12,50", False), ("1.250", True)])
def test_texts_and_numbers_in_one_column_of_json_are_each_read_as_they_are(
    odd: str, is_refused: bool, tmp_path: Path
) -> None:
    prices = [odd, 9.9, "1.007,90", None]
    sales = [
        {"Kunde": f"k{n % 3}", "Artikel": f"a{n % 4}", "Zeit": f"{n + 1:02d}.03.2025 10:00", "Preis": prices[n % 4]}
        for n in range(24)
    ]
    (tmp_path / "sales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sales))
    tables = str(tmp_path / "sales.jsonl"), german_tables(tmp_path)[1]
    if is_refused:
        with pytest.raises(DataError, match=r'6 rows with .*"1\.250 \(without a decimal comma\)"'):
            prepare(*tables, german_schema(), tmp_path / "dataset", SMALL)
        return
    prepare(*tables, german_schema(), tmp_path / "dataset", SMALL)
    paid = Dataset.open(tmp_path / "dataset").event_fields["Preis"]
    expected = np.repeat(np.array([12.5, 9.9, 1007.9, np.nan], np.float32), 6)
    np.testing.assert_array_equal(np.sort(paid), np.sort(expected))


@pytest.mark.parametrize("mark", [";", "", ",."])
def test_another_mark_than_point_and_comma_is_refused(mark: str) -> None:
    with pytest.raises(ConfigError) as caught:
        german_schema(decimal=mark)
    assert f'events.decimal = {mark!r}: expected "." for numbers as 12.50, or "," for numbers as 12,50' in str(
        caught.value
    )


def test_schemas_with_points_stay_as_they_were() -> None:
    schema = german_schema(decimal=".")
    assert "decimal" not in schema.events.to_values()
    assert 'decimal = ","' in german_schema().to_toml()


@pytest.mark.parametrize(
    ("prices", "weights", "decimal"),
    [
        (PRICES, ["1,5", "2,25"], ","),
        (PRICES, ["9", "2,25"], ","),  # a spreadsheet leaves zeros out
        (["12,50", "7", "1.234,50", "9"], ["0,5", "2"], ","),  # also where nothing else tells
        (PRICES, ["0.5", "2.25"], "."),  # one table, two forms: only a person can say
        (["1,234", "5,678"], ["1", "2"], "."),  # perhaps thousands
    ],
)
def test_a_comma_is_proposed_where_nothing_else_can_be_meant(
    prices: list[str], weights: list[str], decimal: str, tmp_path: Path
) -> None:
    rows = [f"k{n % 3};a{n % 4};0{n + 1}.03.2025;{prices[n % len(prices)]};{weights[n % 2]}" for n in range(8)]
    (tmp_path / "sales.csv").write_text("\n".join(["user;item;time;paid;weight", *rows]) + "\n")
    (tmp_path / "items.csv").write_text("item;title\n" + "".join(f"a{n};shoe {n}\n" for n in range(4)))
    notes: list[str] = []
    schema = guess_schema(f"{tmp_path}/sales.csv", f"{tmp_path}/items.csv", note=notes.append)
    assert schema.events.decimal == decimal
    told = [note for note in notes if note.startswith("numbers in paid of the events")]
    if decimal == ",":
        assert schema.events.fields == {"paid": "number", "weight": "number"} and not told
    else:
        assert "paid" not in schema.events.fields
        assert told == [
            f"numbers in paid of the events, as {prices[0]}? They are read with a decimal point, or all of the table "
            'with a comma: decimal = "," under [events]'
        ]
