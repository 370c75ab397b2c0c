"""habitus describe."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app

if TYPE_CHECKING:
    from rich.table import Table

    from habitus.data import Description


@app.command(help="Describe what is in a prepared dataset.\n\nExample: `habitus describe dataset`")
def describe(
    dataset: Annotated[Path, typer.Argument(help="Folder that 'habitus prepare' wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    from habitus.data import Dataset
    from habitus.data import describe as run

    description = run(Dataset.open(dataset))
    if as_json:
        typer.echo(description.to_json())
        return
    from rich.console import Console

    console = Console()
    for table in _tables(description):
        console.print(table)
    typer.echo(f"Next: habitus train --data {quote(str(dataset))} --out run")


def _tables(data: "Description") -> list["Table"]:
    history, popularity = data.history, data.popularity
    slope = "too few items" if popularity.zipf_slope is None else f"{popularity.zipf_slope:.2f}"
    log = [
        ("users", f"{data.users:,}"),
        ("events", f"{data.events:,}"),
        ("items in the catalogue", f"{data.items:,}"),
        ("  with events", f"{popularity.items_with_events:,}"),
        ("  never in training (cold)", f"{popularity.cold_items:,}"),
        ("from", data.first_time),
        ("to", data.last_time),
        ("events per user: mean", f"{history.mean:,.1f}"),
        ("  median / 90% / 99%", f"{history.median:,.0f} / {history.p90:,.0f} / {history.p99:,.0f}"),
        ("  longest", f"{history.largest:,}"),
        ("events on the top 1% of items", f"{popularity.top_1_percent_share:.1%}"),
        ("  on the top 10%", f"{popularity.top_10_percent_share:.1%}"),
        ("Zipf slope", slope),
        ("events that repeat the user's item", f"{popularity.repeat_share:.1%}"),
        *((f"dropped: {what}", f"{count:,}") for what, count in data.dropped.items()),
    ]
    sides = {"train": data.train, "validation": data.validation, **({"test": data.test} if data.test else {})}
    splits = [
        ("users", *(f"{side.users:,}" for side in sides.values())),
        ("events in windows", *(f"{side.events:,}" for side in sides.values())),
        ("queries", *(f"{side.queries:,}" for side in sides.values())),
        (f"windows of {data.seq_len}", *(f"{side.windows:,}" for side in sides.values())),
        ("events that stand alone", *(f"{side.events_left_out:,}" for side in sides.values())),
        ("slots filled", *(f"{side.slots_filled:.1%}" for side in sides.values())),
    ]
    repetition = [
        (f"{row.events:,}", f"{row.window_epochs:,.2f}", f"{row.times_item_of_an_event_is_seen:,.1f}")
        for row in data.repetition
    ]
    fields = [("item", name, f"{share:.1%}") for name, share in data.item_fields_filled.items()]
    fields += [("event", name, f"{share:.1%}") for name, share in data.event_fields_filled.items()]
    return [
        _table("The log", ["", ""], log),
        _table("The split", ["", *sides], splits),
        _table("Training on D events", ["D", "epochs over windows", "times an event's item is seen"], repetition),
        _table("Fields", ["of", "name", "filled"], fields),
    ]


def _table(title: str, columns: list[str], rows: Sequence[tuple[str, ...]]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "name" else "right")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
