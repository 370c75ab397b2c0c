"""habitus prepare."""

from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.errors import ConfigError

EXAMPLE = """

Example: `habitus prepare 'log/*.parquet' items.parquet --schema schema.toml --out dataset`

What is known of users: `habitus prepare events.parquet items.parquet --users users.parquet --out dataset`

Beyond one machine: `habitus prepare 's3://logs/day=*/*.parquet' items.parquet --backend ray --out /shared/dataset`

Later events: `habitus prepare today.parquet items.parquet --update dataset --out dataset-today`
"""
# What a dataset has decided already, and an update cannot change.
_OF_THE_DATASET = (
    "schema", "guess", "seq_len", "text_len", "vocabulary_size", "split", "validation_share", "test_share", "seed",
)  # fmt: skip


@app.command(help="Turn an event log and an item table into a dataset that training reads at full speed." + EXAMPLE)
def prepare(
    context: typer.Context,
    events: Annotated[str, typer.Argument(help="Event table: Parquet, CSV or JSON lines; a file, a glob or s3://.")],
    items: Annotated[str, typer.Argument(help="Item table, likewise.")],
    users: Annotated[
        str | None, typer.Option(help="User table, likewise: what the schema's [users] names.", show_default=False)
    ] = None,
    schema: Annotated[Path, typer.Option(help="Roles and kinds of the columns.")] = Path("schema.toml"),
    out: Annotated[str | None, typer.Option(help="Folder to write, or s3:// URL; must not exist.")] = None,
    update: Annotated[
        Path | None, typer.Option(help="Dataset that these events come after; --out is the two together.")
    ] = None,
    guess: Annotated[bool, typer.Option("--guess", help="Only propose a schema, and write it to --schema.")] = False,
    role: Annotated[
        list[str] | None,
        typer.Option(help="With --guess: what a column of the events is, as in user=Kunde; again for item, timestamp."),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Events per window.")] = 256,
    text_len: Annotated[int, typer.Option(help="Text tokens per item.")] = 24,
    vocabulary_size: Annotated[int, typer.Option(help="Text tokens at most.")] = 8192,
    split: Annotated[str, typer.Option(help="What validates and tests: user, time or last.")] = "user",
    validation_share: Annotated[float, typer.Option(help="Of users, or of events by time.")] = 0.1,
    test_share: Annotated[float, typer.Option(help="Likewise, for the final report only; 0: no test side.")] = 0.1,
    on_bad: Annotated[str, typer.Option(help="Bad rows: error, or drop and count them.")] = "error",
    memory: Annotated[str, typer.Option(help="Memory to keep to, on Ray of each task; more spills to disk.")] = "4GiB",
    threads: Annotated[int | None, typer.Option(help="Default: all cores.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses validation and test users.")] = 0,
    backend: Annotated[
        str, typer.Option(help="local, or ray: on a cluster whose nodes all see --out, the same bytes.")
    ] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    import os
    from shlex import quote

    from habitus.data import Dataset, PrepareOptions, guess_schema
    from habitus.data import prepare as run
    from habitus.data import update as run_update
    from habitus.events import Schema
    from habitus.store import SPLIT_KINDS

    if guess:
        left_out: list[str] = []
        proposal = guess_schema(events, items, users, left_out.append, _parse_roles(role or []))
        if schema.exists():
            raise ConfigError(f"{schema} exists already", next_step="remove it or name another file with --schema")
        proposal.write(schema)
        typer.echo(proposal.to_toml())
        for line in left_out:
            typer.echo(f"# {line}")
        typer.echo(f"# written to {schema}; check it, then:")
        tables = [events, items] if users is None else [events, items, "--users", users]
        typer.echo(f"# habitus prepare {' '.join(map(quote, tables))} --schema {quote(str(schema))} --out dataset")
        return
    if role:
        raise ConfigError("--role was given without --guess", expected="--guess, or the roles in --schema")
    if update is not None:
        _refuse_decided(context, update)
    if out is None:
        raise ConfigError("--out is missing", expected="the folder to write, as in --out dataset")
    options = PrepareOptions(
        seq_len=seq_len,
        text_len=text_len,
        vocabulary_size=vocabulary_size,
        split=check_choice("split", split, SPLIT_KINDS),
        validation_share=validation_share,
        test_share=test_share,
        on_bad=check_choice("on-bad", on_bad, ("error", "drop")),
        memory=memory,
        threads=threads if threads is not None else os.cpu_count() or 1,
        seed=seed,
        backend=check_choice("backend", backend, ("local", "ray")),
    )
    with phases() as progress:
        if update is None:
            manifest = run(events, items, Schema.read(schema), out, options, progress, users=users)
        else:
            manifest = run_update(Dataset.open(update), events, items, out, options, progress, users=users)
    if as_json:
        typer.echo(manifest.to_json())
        return
    sides = manifest.sides().items()
    typer.echo(
        f"{out}: {manifest.num_events:,} events of {manifest.num_users:,} users on {manifest.num_items:,} items; "
        f"users: {', '.join(f'{counts.users:,} {side}' for side, counts in sides)}; "
        f"windows: {', '.join(f'{counts.windows:,} {side}' for side, counts in sides)}"
    )
    for warning in manifest.warnings():
        typer.echo(f"  warning: {warning}")
    for what, count in manifest.dropped.items():
        typer.echo(f"  events left out in all: {count:,}" if what == "event_rows" else f"  dropped {count:,} × {what}")
    typer.echo(f"Next: habitus describe {quote(str(out))}")


def _parse_roles(texts: list[str]) -> dict[str, str]:
    roles = {}
    for text in texts:
        name, separator, column = text.partition("=")
        if not separator or not name or not column:
            raise ConfigError(f"--role {text!r}", expected="role=column, as in --role user=Kunde")
        roles[name.strip()] = column
    return roles


def _refuse_decided(context: typer.Context, dataset: Path) -> None:
    """An option that would have no effect is not ignored."""
    for name in _OF_THE_DATASET:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--update and --{name.replace('_', '-')} were given",
                expected=f"an update in the form that {dataset} has already",
                next_step="omit it, or prepare the whole log again",
            )
