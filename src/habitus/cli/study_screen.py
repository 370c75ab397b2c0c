"""What `habitus study` shows on the way: bars and a sparkline on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from habitus.display import sparkline
from habitus.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from habitus.studies import StudyProgress

_LINE_SECONDS = 30.0  # between lines where there is no terminal
_SPARKS = 40


class StudyScreen:
    """A bar per axis on a terminal; elsewhere a line when an axis begins and every half minute."""

    def __init__(self, *, quiet: bool = False, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.quiet = quiet
        self.is_live = self.console.is_terminal and not quiet
        self._live = Live(console=self.console, transient=True, refresh_per_second=4) if self.is_live else None
        self._axis, self._last_line = "", 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def progress(self, now: "StudyProgress") -> None:
        if self._live is not None:
            self._live.update(draw_progress(now))
        elif not self.quiet and (now.axis != self._axis or time.monotonic() - self._last_line > _LINE_SECONDS):
            self._axis, self._last_line = now.axis, time.monotonic()
            self.console.print(_line(now), markup=False)


def draw_progress(now: "StudyProgress") -> "RenderableType":
    """Where a study is, for a terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bars = Table.grid(padding=(0, 1))
    for axis in now.per_axis:
        failed = Text(f"{axis.failed} failed", style="red") if axis.failed else Text()
        style = "bold" if axis.axis == now.axis else ""
        bar = ProgressBar(total=max(1, axis.total), completed=axis.done, width=24)
        bars.add_row(Text(axis.axis, style=style), bar, Text(f"{axis.done} of {axis.total}"), failed)
    parts: list[RenderableType] = [bars]
    if now.best:
        parts.append(Text(f"best {now.best} {sparkline(now.curve, _SPARKS)}", no_wrap=True, overflow="ellipsis"))
    if now.seconds_left is not None:
        parts.append(Text(f"{format_seconds(now.seconds_left)} left{_describe_drift(now)}", style="dim"))
    return Group(*parts)


def _describe_drift(now: "StudyProgress") -> str:
    """What was first said of the whole time, and how far that is off by now."""
    drift = now.drift()
    if drift is None or now.first_left is None:
        return ""
    whole = format_seconds(now.first_left * (1 + drift))
    return f"; first said {format_seconds(now.first_left)} for all, by now {whole} ({drift:+.0%})"


def _line(now: "StudyProgress") -> str:
    left = "" if now.seconds_left is None else f", {format_seconds(now.seconds_left)} left"
    failed = f", {now.failed} failed" if now.failed else ""
    title = f"{now.axis} ({now.number} of {now.axes - 1})" if now.number else now.axis
    return f"{title}: {now.done} of {now.total} runs{failed}{f', best {now.best}' if now.best else ''}{left}"
