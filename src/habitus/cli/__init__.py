"""The commands: parse, call one verb, print. Heavy imports happen inside the commands."""

import sys

import typer

from habitus import __version__
from habitus.errors import HabitusError

app = typer.Typer(
    name="habitus",
    help="Train behavioral foundation models on event logs, and know beforehand how to train the next one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"habitus {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print it."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; a failure that the user can mend is one message and exit code 1."""
    try:
        app()
    except HabitusError as error:
        typer.echo(f"habitus: {error}", err=True)
        sys.exit(1)
