"""The root of the command line; each command stands in a module of its own."""

import typer

from habitus import __version__

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
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print it."),
) -> None:
    pass
