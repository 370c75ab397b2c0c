"""What a command writes to: a console for its tables; progress, on a terminal only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from habitus.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def phases() -> Iterator[Progress]:
    """A function (phase, share done) that draws a bar on stderr; an empty phase continues the last one."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description:<24}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(phase: str, done: float) -> None:
            if phase:
                bar.update(task, description=phase, completed=done)
            else:
                bar.update(task, completed=done)

        yield report


@contextmanager
def elapsed(what: str) -> Iterator[None]:
    """What is being done and for how long, on stderr of a terminal, where nobody knows the share that is done."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as line:
        line.add_task(what, total=None)
        yield


def wide_console() -> "Console":
    """A console as wide as the terminal; in a pipe as wide as the tables are."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)
