"""What commands share on the screen: a bar for phases of work, on a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def phases() -> Iterator[Callable[[str, float], None]]:
    """A function (phase, share done) that draws a bar on stderr; an empty phase continues the last one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(phase: str, done: float) -> None:
            if phase:
                bar.update(task, description=phase, completed=done)
            else:
                bar.update(task, completed=done)

        yield report
