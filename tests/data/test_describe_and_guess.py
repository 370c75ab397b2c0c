import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, prepare
from habitus.data.describe import describe, top_share, zipf_slope
from habitus.data.guess import guess_schema
from habitus.errors import ConfigError, DataError
from habitus.events.schema import Schema

from .tables import SHARED_DATA, SMALL, make_events, make_items, prepared, write_tables


def test_a_description_counts_what_the_tables_hold(tmp_path: Path) -> None:
    events, items = make_events(50), make_items(9)
    found = describe(prepared(tmp_path, events, items))
    lengths = list({user: events["user_id"].count(user) for user in events["user_id"]}.values())
    pairs = set(zip(events["user_id"], events["item_id"], strict=True))
    assert (found.users, found.events, found.items) == (50, len(events["user_id"]), 9)
    assert found.history.largest == max(lengths)
    assert found.history.mean == pytest.approx(np.mean(lengths))
    assert found.history.median == np.median(lengths)
    assert found.popularity.items_with_events == len(set(events["item_id"]))
    assert found.popularity.repeat_share == pytest.approx(1 - len(pairs) / found.events)
    assert found.duplicates == found.events - len(
        set(zip(events["user_id"], events["item_id"], events["timestamp"], strict=True))
    )
    assert found.popularity.cold_items >= 3  # items 6, 7 and 8 have no event
    filled = sum(value is not None for value in events["paid"]) / found.events
    assert found.event_fields_filled["paid"] == pytest.approx(filled)
    assert found.item_fields_filled["brand"] == pytest.approx(8 / 9)
    assert found.train.users + found.validation.users == 50
    in_windows = found.train.events + found.validation.events
    assert in_windows + found.train.events_left_out + found.validation.events_left_out == found.events
    assert found.first_time == str(min(events["timestamp"]))
    whole = next(row for row in found.repetition if row.window_epochs == pytest.approx(1, rel=0.2))
    assert whole.times_item_of_an_event_is_seen > 1


def test_items_that_no_field_tells_apart_are_counted(tmp_path: Path) -> None:
    items = make_items(9)
    assert describe(prepared(tmp_path / "a", make_events(), items)).items_alike == 0
    for column in ("title", "brand", "price", "image"):
        items[column][4] = items[column][7] = items[column][2]  # three are one
        items[column][8] = items[column][3]  # and two, whose vector is missing
    assert describe(prepared(tmp_path / "b", make_events(), items)).items_alike == 5
    items["price"][8] = 99.0
    assert describe(prepared(tmp_path / "c", make_events(), items)).items_alike == 3


def test_events_that_stand_there_twice_are_counted_and_told(tmp_path: Path) -> None:
    day = "2025-03-0{}"
    rows = [("a", "i0", 1), ("a", "i1", 1), ("a", "i0", 2), ("b", "i0", 2), ("b", "i0", 3)]
    twice = [*rows, ("a", "i0", 1), ("a", "i0", 1), ("b", "i0", 3)]  # the first with another event between
    told = {0: "", 1: "\n1 event (16.7%) with user, item and time", 3: "\n3 events (37.5%) with user, item and time"}
    for name, log, duplicates in (("none", rows, 0), ("one", twice[:6], 1), ("three", twice, 3)):
        users, items, days = zip(*log, strict=True)
        events = {"user_id": [*users], "item_id": [*items], "timestamp": [day.format(n) for n in days]}
        events |= {"event_type": ["view"] * len(log), "paid": [1.0 + n for n in range(len(log))]}
        data = prepared(tmp_path / name, events, make_items())
        assert (describe(data).duplicates, describe(data).events) == (duplicates, len(log))
        printed = CliRunner().invoke(app, ["describe", str(data.path)]).output
        assert told[duplicates] in printed and ("rows that were loaded twice" in printed) == bool(duplicates)


def test_popularity_is_worked_out_by_hand() -> None:
    counts = np.array([50, 30, 10, 5, 5, 0, 0, 0, 0, 0])
    assert top_share(counts, 0.2) == 0.5  # one of the five items that have events
    assert top_share(counts, 0.4) == 0.8
    ranks = np.arange(1, 1001)
    assert zipf_slope(np.round(1e7 / ranks)) == pytest.approx(1.0, abs=0.01)
    assert zipf_slope(np.round(1e7 / ranks**0.7)) == pytest.approx(0.7, abs=0.01)
    assert zipf_slope(counts) is None


def test_a_guessed_schema_prepares(tmp_path: Path) -> None:
    events, items = make_events(200, 100), make_items(100)
    for kind in ("parquet", "csv", "jsonl"):
        folder = tmp_path / kind
        write_tables(folder, events, items, kind)
        schema = guess_schema(f"{folder}/events.{kind}", f"{folder}/items.{kind}")
        assert (schema.events.user, schema.events.item, schema.events.timestamp) == ("user_id", "item_id", "timestamp")
        assert schema.events.fields == {"event_type": "category", "paid": "number"}
        assert schema.items.fields["title"] == "text"
        assert schema.items.fields["brand"] == "category"
        assert schema.items.fields["price"] == "number"
        prepared(folder, events, items, schema, kind=kind)


def test_what_only_one_user_ever_has_is_left_out_and_said(tmp_path: Path) -> None:
    events = make_events(30)
    users = events["user_id"]
    events |= {"basket": [f"{user}-{row // 2}" for row, user in enumerate(users)], "shop": ["north"] * len(users)}
    events |= {"region": [user[-1] for user in users]}  # fewer values than users: no number of anything
    write_tables(tmp_path, events, make_items())
    notes: list[str] = []
    schema = guess_schema(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", note=notes.append)
    assert set(schema.events.fields) == {"event_type", "paid", "region"}
    assert notes == [
        "left out of the events: basket (each of its values belongs to one user)",
        "left out of the events: shop (one value only, too many, or a type of no field)",
    ]


def test_words_that_differ_from_event_to_event_are_a_text(tmp_path: Path) -> None:
    events = make_events(60)
    rows = range(len(events["user_id"]))
    events |= {
        "query": [f"red shoes {'abc'[n % 3]}{n // 6}" if n % 2 else None for n in rows],
        "shop": [f"north side {n % 60}" for n in rows],  # words, and the same ones again and again
        "seen_at": [f"2026-11-{n % 28 + 1:02d} 10:{n // 60 % 60:02d}:{n % 60:02d}" for n in rows],
    }
    write_tables(tmp_path, events, make_items())
    schema = guess_schema(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet")
    kinds = {"event_type": "category", "paid": "number", "query": "text", "shop": "category"}  # no text of times
    assert schema.events.fields == kinds
    dataset = prepared(tmp_path, events, schema=schema)
    assert dataset.event_texts["query"][0].as_py() == events["query"][1]


def test_events_without_an_item_are_said(tmp_path: Path) -> None:
    events = make_events(30)
    num_events = len(events["item_id"])
    events["item_id"][:7] = [None] * 7
    write_tables(tmp_path, events, make_items())
    notes: list[str] = []
    schema = guess_schema(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", note=notes.append)
    assert notes[0].startswith(f"7 of the first {num_events} events have no item_id: name them with no_item")
    with pytest.raises(DataError, match=r"7 rows with no item id .* or no_item in \[events\]"):
        prepared(tmp_path, events, schema=schema)


def test_names_of_roles_are_known_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,Movie ID,rating,timestamp\n1,10,5.0,964980499\n1,11,4.0,964980500\n")
    (tmp_path / "movies.csv").write_text("MovieID,title\n10,Toy Story\n11,Jumanji\n")
    schema = guess_schema(str(tmp_path / "ratings.csv"), str(tmp_path / "movies.csv"))
    assert (schema.events.user, schema.events.item, schema.events.time_unit) == ("userId", "Movie ID", "s")
    assert schema.items.item == "MovieID"


def test_numeric_times_are_guessed_by_their_size(tmp_path: Path) -> None:
    for value, unit in ((3, "order"), (1_700_000_000, "s"), (1_700_000_000_000, "ms"), (1_700_000_000_000_000, "us")):
        events = make_events() | {"timestamp": [value + n for n in range(len(make_events()["user_id"]))]}
        folder = tmp_path / unit
        write_tables(folder, events, make_items())
        assert guess_schema(f"{folder}/events.parquet", f"{folder}/items.parquet").events.time_unit == unit


def test_columns_that_say_nothing_are_an_error(tmp_path: Path) -> None:
    events = {("who" if name == "user_id" else name): column for name, column in make_events().items()}
    write_tables(tmp_path, events, make_items())
    with pytest.raises(DataError, match=r"none of the columns who, .* looks like the user"):
        guess_schema(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet")


def test_roles_that_are_not_found_are_named_and_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "sales.csv").write_text("Kunde;Datum;Artikel;Preis\nk1;01.03.2025;a1;9,50\nk2;02.03.2025;a2;8,00\n")
    (tmp_path / "items.csv").write_text("Artikel;Text;Listenpreis\na1;trail shoe;79,00\na2;wool socks;1.007,90\n")
    tables = (str(tmp_path / "sales.csv"), str(tmp_path / "items.csv"))
    # The item has one name in both tables, and one column holds dates.
    with pytest.raises(DataError, match=r"looks like the user\n") as caught:
        guess_schema(*tables)
    assert 'user = "COLUMN", item = "Artikel", timestamp = "Datum" under [events]' in str(caught.value)
    assert "name it: --guess --role user=COLUMN; or rename the column" in str(caught.value)
    notes: list[str] = []
    schema = guess_schema(*tables, note=notes.append, roles={"user": "Kunde"})
    assert (schema.events.user, schema.events.item, schema.events.timestamp) == ("Kunde", "Artikel", "Datum")
    assert schema.items.item == "Artikel"
    assert schema.events.time_format == "%d.%m.%Y"
    assert (schema.events.decimal, schema.events.fields["Preis"]) == (",", "number")
    assert (schema.items.decimal, schema.items.fields["Listenpreis"]) == (",", "number")
    assert not any("numbers in" in note for note in notes)
    with pytest.raises(DataError, match=r"'Kunden', which is no column \(did you mean 'Kunde'\?\)"):
        guess_schema(*tables, roles={"user": "Kunden"})
    with pytest.raises(ConfigError, match=r"users is no role \(did you mean 'user'\?\)"):
        guess_schema(*tables, roles={"users": "Kunde"})


@pytest.mark.parametrize(
    ("times", "form"),
    [
        (["01.03.2025", "2.3.2025"], "%d.%m.%Y"),
        (["01.03.2025 10:00", "02.03.2025 9:30"], "%d.%m.%Y %H:%M"),
        (["01/03/2025 10:00:00", "13/03/2025 10:00:00"], "%d/%m/%Y %H:%M:%S"),
        (["03/01/2025", "03/13/2025"], "%m/%d/%Y"),
        (["13-03-2025", "01-03-2025"], "%d-%m-%Y"),
        (["03/01/2025", "03/04/2025"], None),  # in March or on the third and fourth of a month
        (["01.03.2025", "2025-03-02"], None),
        (["01.03.2025", "02.03.2025 10:00"], None),
        (["13/13/2025", "01/01/2025"], None),
        (["2025-03-01", "2025-03-02"], None),
    ],
)
def test_the_form_of_times_is_guessed_where_it_is_told(times: list[str], form: str | None, tmp_path: Path) -> None:
    rows = [f"u{n};i{n};{time}" for n, time in enumerate(times)]
    (tmp_path / "events.csv").write_text("\n".join(["user;item;time", *rows]) + "\n")
    (tmp_path / "items.csv").write_text("item;title\ni0;trail shoe\ni1;wool socks\n")
    notes: list[str] = []
    schema = guess_schema(f"{tmp_path}/events.csv", f"{tmp_path}/items.csv", note=notes.append)
    assert schema.events.time_format == form
    told = [note for note in notes if "are not all in ISO form" in note]
    assert bool(told) == (form is None and times[0] != "2025-03-01")


def test_users_in_german_are_known_by_what_they_share(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("Kunde;Datum;Artikel;Preis\nk1;01.03.2025;a1;9,50\nk2;02.03.2025;a1;8,00\n")
    (tmp_path / "items.csv").write_text("Artikel;Text;Neu\na1;trail shoe;2024-05-01\na2;wool socks;2024-06-01\n")
    (tmp_path / "users.csv").write_text("Kunde;Region;Seit\nk1;north;01.02.2020\nk2;south;13.02.2020\n")
    notes: list[str] = []
    tables = f"{tmp_path}/events.csv", f"{tmp_path}/items.csv", f"{tmp_path}/users.csv"
    schema = guess_schema(*tables, note=notes.append)
    assert schema.events.user == "Kunde" and schema.users is not None and schema.users.user == "Kunde"
    assert schema.items.fields["Neu"] == "time"
    # Dates that would have to be written otherwise are no categories.
    assert "Seit" not in schema.users.fields
    assert "dates in Seit of the users, as 01.02.2020? Fields are read in ISO form only, as 2025-03-01" in notes
    several = "".join(f"k1;{day}.02.2020;t{day % 2}\n" for day in (11, 12, 13, 14))
    (tmp_path / "users.csv").write_text("Kunde;date;Tarif\n" + several)
    users = guess_schema(*tables, roles={"user": "Kunde"}).users
    assert users is not None and (users.timestamp, users.time_format) == ("date", "%d.%m.%Y")


def test_iso_times_of_json_lines_are_times(tmp_path: Path) -> None:
    times = {"plain": "2025-03-0{} 10:00:00", "zone": "2025-03-0{}T10:00:00Z", "far": "2025-03-0{}T10:00:00.5+02:00"}
    rows = [{"user": f"u{n}", "item": "a", "ts": times["zone"].format(n)} for n in (1, 2, 3)]
    rows = [row | {name: form.format(n) for name, form in times.items()} for n, row in enumerate(rows, 1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "items.jsonl").write_text('{"item": "a", "day": "2025-03-01"}\n{"item": "b", "day": "2025-03-02"}\n')
    schema = guess_schema(f"{tmp_path}/events.jsonl", f"{tmp_path}/items.jsonl")
    assert (schema.events.timestamp, schema.events.time_unit, schema.events.time_format) == ("ts", "datetime", None)
    assert schema.events.fields == dict.fromkeys(times, "time") and schema.items.fields == {"day": "time"}
    prepare(f"{tmp_path}/events.jsonl", f"{tmp_path}/items.jsonl", schema, tmp_path / "d", SMALL)
    dataset = Dataset.open(tmp_path / "d")
    assert dataset.manifest.time_span == tuple(
        int(np.datetime64(f"2025-03-0{n}T10:00", "us").astype(np.int64)) for n in (1, 3)
    )


def test_a_given_role_is_not_guessed_again(tmp_path: Path) -> None:
    events = make_events()
    events["visitor_id"] = [f"v{n}" for n in events.pop("user_id")]
    events["customer"] = list(events["visitor_id"])
    write_tables(tmp_path, events, make_items())
    tables = (f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet")
    assert guess_schema(*tables).events.user == "customer"
    given = guess_schema(*tables, roles={"user": "visitor_id"})
    assert given.events.user == "visitor_id"
    two_dates = events | {"arrived": list(events["timestamp"])}
    two_dates["when"] = two_dates.pop("timestamp")
    write_tables(tmp_path / "dates", two_dates, make_items())
    tables = (f"{tmp_path}/dates/events.parquet", f"{tmp_path}/dates/items.parquet")
    with pytest.raises(DataError, match="looks like the timestamp"):  # which of two dates, nobody can know
        guess_schema(*tables)
    assert guess_schema(*tables, roles={"timestamp": "arrived"}).events.timestamp == "arrived"


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real datasets are not beside this checkout")
@pytest.mark.parametrize("name", ["movielens_small", "movielens_1m_order", "online_retail", "birmingham_cards"])
def test_guesses_on_real_sets_find_the_roles_and_existing_columns(name: str) -> None:
    folder = SHARED_DATA / name
    guessed = guess_schema(f"{folder}/events.parquet", f"{folder}/items.parquet")
    shipped = Schema.read(Path(__file__).parents[2] / "examples" / "schemas" / f"{name}.toml")
    assert guessed.events.user == shipped.events.user
    assert guessed.events.time_unit == shipped.events.time_unit
    assert set(guessed.events.fields) <= set(pq.read_schema(folder / "events.parquet").names)
    assert set(guessed.items.fields) >= set(shipped.items.fields)
