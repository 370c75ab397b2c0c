"""habitus recommend."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.errors import ConfigError
from habitus.units import pluralize

if TYPE_CHECKING:
    from habitus.serving import Event, RecommendResponse, Retriever

EXAMPLE = """

Example: `habitus recommend run --data dataset --histories log.parquet --k 10 --out recommended.parquet`

Nobody knows this visitor yet: `habitus recommend run --history '[]' --allow category=shoes --range price=..50`

One history: `habitus recommend run --history '[{"item_id": 5, "event_type": "view"}, {"item_id": 7}]'`
"""


@app.command(help="Recommend the next items for a file of histories, or for one." + EXAMPLE)
def recommend(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    histories: Annotated[
        str | None,
        typer.Option(help="Event log, Parquet, CSV or JSON lines; or a table with a list of events per user."),
    ] = None,
    history: Annotated[
        str | None, typer.Option(help="Instead: one history as JSON, a list of events or of plain item ids.")
    ] = None,
    users: Annotated[
        str | None, typer.Option(help="User table of --histories, where the model reads fields of users.")
    ] = None,
    k: Annotated[int, typer.Option("--k", help="Items per history.")] = 10,
    out: Annotated[Path | None, typer.Option(help="File to write: .parquet, .csv or .jsonl.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Prepared dataset of the run; needed the first time it is served.")
    ] = None,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen", help="Leave out what the history already holds.")
    ] = False,
    allow: Annotated[
        list[str] | None, typer.Option(help="field=value of a category; only such items. May be repeated.")
    ] = None,
    deny: Annotated[list[str] | None, typer.Option(help="field=value of a category; no such items.")] = None,
    within: Annotated[
        list[str] | None, typer.Option("--range", help="field=lowest..highest of a number or time, as price=..20.")
    ] = None,
    only_items: Annotated[
        Path | None, typer.Option(help="File with an item id per line, such as what is in stock: only these.")
    ] = None,
    exclude_items: Annotated[Path | None, typer.Option(help="Likewise: none of these.")] = None,
    temperature: Annotated[
        float, typer.Option(help="Divides scores before they become probabilities; evaluate --calibrate fits it.")
    ] = 1.0,
    index: Annotated[str, typer.Option(help="exact, ivf, ivfpq, hnsw or auto.")] = "exact",
    items: Annotated[
        Path | None, typer.Option(help="Folder of items added at run time; RUN/serve/items unless given.")
    ] = None,
    on_bad: Annotated[str, typer.Option(help="Histories with values that cannot be read: error or skip.")] = "error",
    memory: Annotated[str, typer.Option(help="Memory for sorting events by user.")] = "2GiB",
    replace: Annotated[bool, typer.Option("--replace", help="Replace --out where it exists.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done, or the answer, as JSON.")] = False,
) -> None:
    from habitus.exporting import (
        RESULT_SUFFIXES,
        SHARED_CONDITIONS,
        RecommendOptions,
        check_output,
        recommend_file,
    )
    from habitus.serving import INDEX_KINDS, Limits, RecommendRequest, Retriever

    if (histories is None) == (history is None):
        raise ConfigError(
            "both --histories and --history were given" if history else "neither --histories nor --history was given",
            expected="--histories FILE for many users, or --history JSON for one",
        )
    if history is not None and users is not None:
        raise ConfigError(
            "both --history and --users were given",
            expected='the fields in the events: --history \'[{"item_id": 5, "user.plan": "paid"}]\'',
        )
    if history is None:
        if out is None:
            raise ConfigError("no --out was given", expected="the file to write, as in --out recommended.parquet")
        check_output(out, RESULT_SUFFIXES, replace=replace)
    options = RecommendOptions(
        k=k,
        exclude_seen=exclude_seen,
        allow=_parse_conditions("allow", allow or []),
        deny=_parse_conditions("deny", deny or []),
        ranges=_parse_ranges(within or []),
        only_items=None if only_items is None else _read_ids("only-items", only_items),
        exclude_items=[] if exclude_items is None else _read_ids("exclude-items", exclude_items),
        on_bad=check_choice("on-bad", on_bad, ("error", "skip")),
        users=users,
        memory=memory,
        replace=replace,
    )
    kind = check_choice("index", index, INDEX_KINDS)
    with phases() as progress:
        retriever = Retriever.open(
            run,
            data=data,
            device=device,
            index=kind,
            items=items,
            read_only=True,
            # A file may hold more than a client may send.
            limits=Limits(max_history=10**9, max_candidates=10**9),
            temperature=temperature,
            note=lambda text: typer.echo(text, err=True),
            progress=progress,
        )
        if history is None:
            assert histories is not None
            assert out is not None
            if users is None and (known := retriever.bundle.schema.users) is not None:
                names = ", ".join(known.fields)
                typer.echo(f"no --users: fields of users ({names}) count only where the histories hold them", err=True)
            done = recommend_file(retriever, histories, out, options, progress)
    if history is not None:
        request = RecommendRequest(
            history=_parse_history(history, retriever), **{name: getattr(options, name) for name in SHARED_CONDITIONS}
        )
        _print_response(retriever.recommend([request])[0], as_json)
        return
    if as_json:
        typer.echo(done.to_json())
        return
    typer.echo(f"{done.path}: {done.items:,} recommendations for {done.answered:,} of {done.users:,} users")
    if done.by_popularity:
        typer.echo(f"  popular items, for want of a history: {pluralize(done.by_popularity, 'user')}")
    if done.unknown_events:
        typer.echo(f"  left out of histories, since unknown: {pluralize(done.unknown_events, 'item')}")
    for reason in done.examples:
        typer.echo(f"  no answer: {reason}")


def _parse_conditions(option: str, texts: list[str]) -> dict[str, list[str]]:
    conditions: dict[str, list[str]] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"--{option} {text!r} has no '='", expected="field=value, as in --allow category=shoes")
        conditions.setdefault(name, []).append(value)
    return conditions


def _parse_ranges(texts: list[str]) -> dict[str, tuple[str | None, str | None]]:
    ranges: dict[str, tuple[str | None, str | None]] = {}
    for text in texts:
        name, separator, ends = text.partition("=")
        low, dots, high = ends.partition("..")
        if not separator or not name or not dots or not (low or high):
            raise ConfigError(f"--range {text!r}", expected="field=lowest..highest, as in price=5..20 or price=..20")
        ranges[name] = low or None, high or None
    return ranges


def _read_ids(option: str, path: Path) -> list[str]:
    try:
        ids = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{option} {path} cannot be read: {error}", expected="a text file of ids") from None
    if not ids:
        raise ConfigError(f"--{option} {path} holds no item", expected="an id per line")
    return ids


def _parse_history(text: str, retriever: "Retriever") -> list["Event"]:
    """The events of a JSON list; plain values stand for events with that item."""
    import json

    column = retriever.bundle.schema.events.item_column
    expected = f'a list of item ids or of events, as in \'["A17"]\' or \'[{{"{column}": "A17"}}]\''
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--history is not JSON: {error}", expected=expected) from None
    if not isinstance(values, list):
        raise ConfigError(f"--history {text} is not a list", expected=expected)
    return [value if isinstance(value, dict) else {column: value} for value in values]


def _print_response(response: "RecommendResponse", as_json: bool) -> None:
    if as_json:
        import json

        from habitus.exporting import response_values

        typer.echo(json.dumps(response_values(response), indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = list(dict.fromkeys(name for item in response.items for name in item.display or ()))
    table = Table(box=None)
    for name in ("rank", "item", *shown, "score", "probability"):
        is_number = name in ("rank", "score", "probability")
        table.add_column(Text(name), justify="right" if is_number else "left", overflow="ellipsis", no_wrap=is_number)
    for rank, item in enumerate(response.items, 1):
        item_id = ", ".join(map(str, item.item_id.values())) if isinstance(item.item_id, dict) else str(item.item_id)
        names = [Text((item.display or {}).get(name, "")) for name in shown]
        table.add_row(str(rank), Text(item_id), *names, f"{item.score:.3f}", f"{item.probability:.4f}")
    Console().print(table)
    if response.because is not None:
        typer.echo("the history is empty: these are the most frequent items of training", err=True)
    if response.unknown_items:
        typer.echo(f"left out, since unknown: {', '.join(map(str, response.unknown_items))}", err=True)
    for note in response.notes:
        typer.echo(note, err=True)
    if not response.items and not response.notes:
        typer.echo("no item meets all conditions (--allow, --deny, --range, --exclude-seen and the like)", err=True)
