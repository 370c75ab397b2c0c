"""habitus describe."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app
from habitus.units import pluralize

if TYPE_CHECKING:
    from rich.table import Table

    from habitus.data import Description, Structure


@app.command(
    help="Describe what is in a prepared dataset.\n\n"
    "With --structure: what a next-event model can learn there, measured alike on a log and on a synthetic world.",
    epilog="Example: `habitus describe dataset --structure`",
)
def describe(
    dataset: Annotated[Path, typer.Argument(help="Folder that 'habitus prepare' wrote.")],
    as_structure: Annotated[
        bool,
        typer.Option(
            "--structure",
            help="Measure popularity, repeats by lag, what the last item, the history, its rank and fields tell.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    from habitus.data import Dataset, Structure, structure
    from habitus.data import describe as run

    opened = Dataset.open(dataset)
    result = structure(opened) if as_structure else run(opened)
    if as_json:
        typer.echo(result.to_json())
        return
    from rich.console import Console

    console = Console()
    for table in [_structure_table(result)] if isinstance(result, Structure) else _tables(result):
        console.print(table)
    if not isinstance(result, Structure) and result.duplicates:
        typer.echo(
            f"{pluralize(result.duplicates, 'event')} ({result.duplicates / result.events:.1%}) with user, item and "
            "time of one before: rows that were loaded twice, or times too coarse to tell events apart. "
            "Nothing was dropped"
        )
    typer.echo(f"Next: habitus train --data {quote(str(dataset))} --out run")


def _structure_table(data: "Structure") -> "Table":
    rows = [(name, f"{one.value:.3f}", f"{one.se:.3f}") for name, one in data.statistics.items()]
    which = "a sample of whole users" if data.is_sample else "all users"
    title = f"{data.events:,} events of {data.users:,} users ({which}) on {data.items:,} items"
    return _table(title, ["statistic", "value", "standard error"], rows)


def _tables(data: "Description") -> list["Table"]:
    history, popularity = data.history, data.popularity
    slope = "too few items" if popularity.zipf_slope is None else f"{popularity.zipf_slope:.2f}"
    log = [
        ("users", f"{data.users:,}"),
        ("events", f"{data.events:,}"),
        ("items in the catalogue", f"{data.items:,}"),
        ("  with events", f"{popularity.items_with_events:,}"),
        ("  never in training (cold)", f"{popularity.cold_items:,}"),
        ("  with the same fields as another", f"{data.items_alike:,}"),
        ("from", data.first_time),
        ("to", data.last_time),
        ("events per user: mean", f"{history.mean:,.1f}"),
        ("  median / 90% / 99%", f"{history.median:,.0f} / {history.p90:,.0f} / {history.p99:,.0f}"),
        ("  longest", f"{history.largest:,}"),
        ("events on the top 1% of items", f"{popularity.top_1_percent_share:.1%}"),
        ("  on the top 10%", f"{popularity.top_10_percent_share:.1%}"),
        ("Zipf slope", slope),
        ("events that repeat the user's item", f"{popularity.repeat_share:.1%}"),
        *_target_rows(data),
        *(
            ("events left out in all" if what == "event_rows" else f"dropped: {what}", f"{count:,}")
            for what, count in data.dropped.items()
        ),
    ]
    sides = {"train": data.train, "validation": data.validation, **({"test": data.test} if data.test else {})}
    splits = [
        ("users", *(f"{side.users:,}" for side in sides.values())),
        ("events in windows", *(f"{side.events:,}" for side in sides.values())),
        ("queries", *(f"{side.queries:,}" for side in sides.values())),
        (f"windows of {data.seq_len}", *(f"{side.windows:,}" for side in sides.values())),
        (
            "events that stand alone" if data.targets is None else "events in no window",
            *(f"{side.events_left_out:,}" for side in sides.values()),
        ),
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


def _target_rows(data: "Description") -> list[tuple[str, str]]:
    targets = data.targets
    if targets is None:
        return []
    rows = [(f"targets, by {targets.column}", f"{targets.events:,} ({targets.share:.1%} of events)")]
    rows += [("  that say 'not this item'", f"{targets.refused:,}")] if targets.refused else []
    rows += [("  among candidates", f"{targets.candidates:,}")] if targets.candidates < data.items else []
    return rows


def _table(title: str, columns: list[str], rows: Sequence[tuple[str, ...]]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "name" else "right")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
