"""The commands: parse, call one verb, print. Heavy imports happen inside the commands."""

import sys

import typer

# Importing a command's module registers it; the order is the order in `habitus --help`.
from habitus.cli import (  # noqa: F401
    describe,
    embed,
    evaluate,
    export,
    fit,
    plan,
    prepare,
    recommend,
    report,
    runs,
    serve,
    size,
    study,
    sweep,
    train,
    world,
)
from habitus.cli.app import app
from habitus.errors import HabitusError


def main() -> None:
    """Run the command line; a failure that the user can fix is one message and exit code 1."""
    try:
        app()
    except HabitusError as error:
        typer.echo(f"habitus: {error}", err=True)
        sys.exit(1)
