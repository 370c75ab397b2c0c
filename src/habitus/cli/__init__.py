"""The commands: parse, call one verb, print. Heavy imports happen inside the commands."""

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

import typer

from habitus import __version__

# Importing a command's module registers it.
from habitus.cli import (  # noqa: F401
    age,
    card,
    describe,
    diff,
    embed,
    evaluate,
    export,
    fit,
    plan,
    prepare,
    probe,
    recommend,
    report,
    runs,
    serve,
    show,
    size,
    study,
    sweep,
    train,
    world,
)
from habitus.cli.app import DEBUG_VARIABLE, app
from habitus.errors import HabitusError
from habitus.machine import wait_passively

UNFORESEEN = 70  # exit code, as in sysexits.h: a fault of the software

# How `habitus --help` lists the commands.
PANELS = {
    "From a log to a model": ("prepare", "describe", "train", "evaluate", "recommend", "serve", "export", "embed"),
    "How to train the next one": ("study", "sweep", "runs", "fit", "plan", "report", "size"),
    "A closer look": ("show", "diff", "probe", "age", "card", "world"),
}


def _arrange_commands() -> None:
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    order = {name: place for place, name in enumerate(panels)}
    commands = {command.callback.__name__: command for command in app.registered_commands if command.callback}
    for name, command in commands.items():
        command.rich_help_panel = panels[name]
    app.registered_commands[:] = [commands[name] for name in sorted(commands, key=order.__getitem__)]


_arrange_commands()


def main() -> None:
    """Run the command line. Whatever goes wrong is one message and an exit code (docs/faq.md), never a traceback."""
    wait_passively()
    try:
        app()
    except HabitusError as error:
        _fail(error, f"habitus: {error}", 1)
    except KeyboardInterrupt as error:
        _fail(error, "habitus: interrupted", 130)
    except MemoryError as error:
        _fail(error, f"habitus: out of memory. {error}".rstrip(". "), 1)
    except OSError as error:
        if error.filename is None:
            _fail(error, _describe(error), UNFORESEEN)
        _fail(error, f"habitus: {error.filename}: {error.strerror}", 1)
    except Exception as error:
        _fail(error, _describe(error), UNFORESEEN)


def _fail(error: BaseException, message: str, exit_code: int) -> NoReturn:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    typer.echo(message, err=True)
    sys.exit(exit_code)


def _describe(error: Exception) -> str:
    """One line for an error that no code of ours foresaw, with the place of its traceback."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    what = f"habitus: unforeseen {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {text}"
    try:
        descriptor, path = tempfile.mkstemp(prefix="habitus-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"habitus {__version__}: {' '.join(sys.argv[1:])}\n")
            traceback.print_exception(error, file=file)
    except OSError:
        return f"{what}. 'habitus --debug' prints its traceback."
    return f"{what}. Its traceback is in {path}; 'habitus --debug' prints it."
