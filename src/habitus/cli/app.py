"""The root of the command line, and what its commands share; each command has a module of its own."""

import os
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from habitus import __version__
from habitus.errors import ConfigError

DEBUG_VARIABLE = "HABITUS_DEBUG"
Choice = TypeVar("Choice", bound=str)


class _Commands(TyperGroup):
    """The commands, each of which says that Ctrl-C ended it: typer alone ends without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("habitus: interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="habitus",
    cls=_Commands,
    help="Train behavioral foundation models on event logs, and know beforehand how to train the next one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


WatchOption = Annotated[
    int | None,
    typer.Option(
        metavar="[PORT]",
        help="Serve the page on this machine while runs end, at this port or any that is free; prints the address.",
    ),
]


class WatchingCommand(TyperCommand):
    """A command whose `--watch` may stand without a port, which means any that is free."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], ""]
        word = next((after for argument, after in zip(args, following, strict=True) if argument == "--watch"), "")
        args = [
            "--watch=0" if argument == "--watch" and not after.lstrip("+-").isdigit() else argument
            for argument, after in zip(args, following, strict=True)
        ]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the class of usage errors has no public name in all versions of typer
            if word and not word.startswith("-") and "unexpected extra argument" in str(error):
                raise ConfigError(
                    f"--watch is followed by {word!r}", expected="a port number, as in --watch 8000, or none"
                ) from None
            raise


def check_choice(option: str, value: str, choices: tuple[Choice, ...]) -> Choice:
    """The choice that `--option value` names."""
    for choice in choices:
        if value == choice:
            return choice
    raise ConfigError(f"--{option} {value!r} is not a choice", expected=" or ".join(choices))


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"habitus {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help=f"Print tracebacks of errors; or set {DEBUG_VARIABLE}=1."),
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"  # for the processes that a command starts, too
