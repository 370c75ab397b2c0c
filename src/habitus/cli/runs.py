"""`habitus runs`: what a store holds, what is at work, what failed, and how long it will take."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app
from habitus.cli.screen import wide_console
from habitus.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from habitus.sweeps import RunList

_EXAMPLE = "Example: `habitus runs out/store --axis allocation --status failed`"


@app.command(epilog=_EXAMPLE)
def runs(
    store: Annotated[Path, typer.Argument(help="A run store.")],
    axis: Annotated[str | None, typer.Option(help="Only runs of this axis.")] = None,
    status: Annotated[str | None, typer.Option(help="Only done, failed, running, stalled or waiting.")] = None,
    budget: Annotated[float | None, typer.Option(help="Only runs at this budget, in FLOPs.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until everything is done.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes.")] = 2.0,
    summary: Annotated[bool, typer.Option("--summary", help="Only the sums.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """List the runs of a store with their state, and sum them: time spent, failures with reasons, time left."""
    import json
    import time

    from habitus.sweeps import check_axis, check_state, list_runs

    if store.is_file():
        raise ConfigError(
            f"{store} is a file",
            expected="the folder of a run store",
            next_step=f"habitus fit and habitus report read an archive of runs, as habitus report {quote(str(store))}",
        )
    if axis is not None:
        check_axis(axis)
    check_state(status)

    def look() -> "RunList":
        return list_runs(store, axis=axis, state=status, budget=budget)

    if not watch:
        run_list = look()
        if json_output:
            typer.echo(json.dumps(run_list.to_values(), indent=2))
        else:
            wide_console().print(_page(run_list, summary))
        return
    from rich.live import Live

    with Live(console=wide_console(), refresh_per_second=4) as live:
        while True:
            run_list = look()
            live.update(_page(run_list, summary=True))
            if all(run.state in ("done", "failed") for run in run_list.runs):
                return
            time.sleep(every)


def _page(run_list: "RunList", summary: bool) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from habitus.units import format_seconds

    parts: list[RenderableType] = []
    sums = Table(box=None, pad_edge=False)
    states = ("done", "failed", "running", "stalled", "waiting")
    for name in ("axis", "budget"):
        sums.add_column(name, justify="left" if name == "axis" else "right")
    for name in (*states, "time spent"):
        sums.add_column(name, justify="right")
    groups = sorted({(axis, run.budget) for run in run_list.runs for axis in run.axes or ("",)})
    for axis, budget in groups:
        here = [run for run in run_list.runs if axis in (run.axes or ("",)) and run.budget == budget]
        counts = [str(sum(run.state == state for run in here)) for state in states]
        sums.add_row(axis, f"{budget:.3g}", *counts, format_seconds(sum(run.seconds or 0.0 for run in here)))
    totals = [str(sum(run.state == state for run in run_list.runs)) for state in states]
    sums.add_row("all", "", *totals, format_seconds(sum(run.seconds or 0.0 for run in run_list.runs)), style="bold")
    parts.append(sums)
    values = run_list.to_values()
    for reason, count in values["failures"].items():
        parts.append(Text(f"failed {count}×: {reason}"))
    events = ", ".join(f"{values[name]} {name}" for name in ("claims", "duplicates", "abandoned", "retries"))
    left = f"; about {format_seconds(run_list.seconds_left)} left" if run_list.seconds_left else ""
    at_work = f"; {run_list.workers} worker{'s' * (run_list.workers != 1)} at work" if run_list.workers or left else ""
    parts.append(Text(events + at_work + left, style="dim"))
    if not summary:
        table = Table(box=None, pad_edge=False)
        for name in ("run", "axis", "cell"):
            table.add_column(name, overflow="fold")
        for name in ("budget", "params", "steps", "rate", "seed", "loss", "time"):
            table.add_column(name, justify="right", overflow="fold")
        table.add_column("state")
        for run in run_list.runs:
            table.add_row(
                run.digest[:8],
                ", ".join(run.axes),
                run.cell_id,
                f"{run.budget:.3g}",
                f"{run.params:,}",
                f"{run.steps:,}",
                f"{run.learning_rate:.3g}",
                str(run.seed),
                "" if run.loss is None else f"{run.loss:.4f}",
                "" if run.seconds is None else format_seconds(run.seconds),
                Text(run.state + (f": {run.reason}" if run.reason else f" on {run.worker}" if run.worker else "")),
            )
        parts += [Text(""), table]
    return Group(*parts)
