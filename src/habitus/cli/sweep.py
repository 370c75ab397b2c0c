"""`habitus sweep`: one axis of the study, run into a store."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app
from habitus.cli.screen import wide_console
from habitus.progress import Note
from habitus.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from habitus.sweeps import RunOutcome, SweepProgress, SweepResult

_EXAMPLE = """Example: `habitus sweep allocation --data out/dataset --store out/store --preset quick --dry-run`

How long should windows be? `habitus sweep context --data out/dataset --store out/store --preset quick --dry-run`"""


@app.command(epilog=_EXAMPLE)
def sweep(
    axis: Annotated[
        str,
        typer.Argument(
            help="share, depth, batch, batch_size, allocation, negatives, init, context, shape, regularisation or "
            "passes."
        ),
    ],
    data: Annotated[Path | None, typer.Option(help="A prepared dataset.")] = None,
    store: Annotated[Path | None, typer.Option(help="The run store; created where there is none.")] = None,
    budgets: Annotated[str | None, typer.Option(help="FLOPs, as in 1e13,1e14; default: the preset's.")] = None,
    preset: Annotated[str, typer.Option(help="tiny, quick, standard, paper, or a .toml file.")] = "standard",
    learning_rates: Annotated[
        str | None,
        typer.Option(help="How many (3), which (1e-3,2e-3), or multiples of the √B rule (0.5x,1x,2x)."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Repetitions of each cell; default: the preset's.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: one per core, or a few on a GPU.")] = None,
    backend: Annotated[str, typer.Option(help="local or ray.")] = "local",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_hours: Annotated[float | None, typer.Option(help="Stop then; the same command continues later.")] = None,
    allow_repeats: Annotated[
        bool, typer.Option("--allow-repeats", help="Also run cells of more than one epoch.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and their cost, and stop.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    print_preset: Annotated[bool, typer.Option("--print-preset", help="Print the preset's file, and stop.")] = False,
) -> None:
    """Run one axis of a study: sized cells at each budget, one Record each, in a store that loses nothing.

    What the store already has is not run again; an interrupted sweep continues where it stopped.
    """
    from habitus.errors import ConfigError
    from habitus.sweeps import check_axis, parse_budgets, preset_text

    check_axis(axis)
    if print_preset:
        typer.echo(preset_text(preset), nl=False)
        return
    if data is None or store is None:
        raise ConfigError(
            "--data or --store is missing", next_step=f"habitus sweep {axis} --data DATASET --store STORE --dry-run"
        )
    from habitus.data import Dataset
    from habitus.sweeps import sweep as run_sweep

    with _progress_bar(axis, quiet=json_output or dry_run) as (progress, note):
        result = run_sweep(
            axis,
            Dataset.open(data, verify=not dry_run),
            store,
            budgets=parse_budgets(budgets) if budgets is not None else (),
            preset=preset,
            learning_rates=learning_rates,
            seeds=seeds,
            workers=workers,
            backend=backend,
            device=device,
            max_hours=max_hours,
            allow_repeats=allow_repeats,
            dry_run=dry_run,
            progress=progress,
            note=note,
        )
    if json_output:
        import json

        typer.echo(json.dumps(result.to_values(), indent=2))
    else:
        _print(result)
    if dry_run and not result.runs:
        raise typer.Exit(2)  # as the sweep itself is refused
    if not dry_run and not result.complete:
        raise typer.Exit(3)


@contextlib.contextmanager
def _progress_bar(axis: str, *, quiet: bool) -> Iterator[tuple[Callable[["SweepProgress"], None], Note]]:
    """A progress bar and a place for notes, both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)

    def note(text: str) -> None:
        console.print(text, style="dim", markup=False)

    if quiet:
        yield (lambda _progress: None), note
        return
    if not console.is_terminal:
        yield _log_lines(note), note
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}")
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(axis, total=None, status="")

        def progress(sweep: "SweepProgress") -> None:
            bar.update(task, completed=sweep.done, total=sweep.total, status=_status(sweep))

        yield progress, note


def _log_lines(note: Note, every: float = 60.0) -> Callable[["SweepProgress"], None]:
    """A line a minute, for logs."""
    last = time.monotonic()

    def progress(sweep: "SweepProgress") -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            note(f"{sweep.axis}: {sweep.done} of {sweep.total} done, {_status(sweep)}")

    return progress


def _status(sweep: "SweepProgress") -> str:
    text = f"{sweep.running} running" + (f", {sweep.failed} failed" if sweep.failed else "")
    return text if sweep.seconds_left is None else f"{text}, about {format_seconds(sweep.seconds_left)} left"


def _print(result: "SweepResult") -> None:
    console = wide_console()
    console.print(_table(result))
    for out in result.design.left_out:
        wanted = ", ".join(f"{name} {value}" for name, value in out.wanted.items() if name != "flops")
        console.print(f"left out at {out.flops_budget:.3g}: {wanted}: {out.reason}", style="dim", markup=False)
    for text in result.design.decided:
        console.print(text, style="dim", markup=False)
    console.print(_summary(result), markup=False)


def _table(result: "SweepResult") -> "RenderableType":
    """One row per cell: its learning rates and seeds differ in nothing that is shown."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    sizes = ("params", "share", "batch", "steps", "passes", "D/N", "FLOPs")
    for name in ("budget", "cell", *sizes, "rates", "time", "memory"):
        table.add_column(name, justify="left" if name in ("cell", "rates") else "right", overflow="fold")
    table.add_column("state")
    groups: dict[tuple[float, str], list[RunOutcome]] = {}
    for run in result.runs:
        groups.setdefault((run.planned.row.flops_budget, run.planned.row.cell_id), []).append(run)
    for (budget, cell_id), runs in groups.items():
        cell, rates = runs[0].planned.cell, sorted({run.planned.row.learning_rate for run in runs})
        seeds = {run.planned.row.seed for run in runs}
        states = [run.status + (f": {run.reason}" if run.reason else "") for run in runs]
        table.add_row(
            f"{budget:.3g}",
            cell_id.rpartition("-")[0],
            f"{cell.params:,}",
            f"{cell.embedder_share:.1%}",
            str(cell.batch_sequences),
            f"{cell.steps:,}",
            f"{runs[0].planned.row.realised['epochs']:.3g}",
            f"{cell.data_ratio:.3g}",
            f"{cell.flops:.3g}",
            ", ".join(f"{rate:.2g}" for rate in rates) + (f" × {len(seeds)} seeds" if len(seeds) > 1 else ""),
            format_seconds(sum(run.seconds for run in runs)),
            format_bytes(cell.bytes["total"]),
            ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        )
    return table


def _summary(result: "SweepResult") -> str:
    done, failed, missing = (result.number(s) for s in ("done", "failed", "missing"))
    text = f"{result.axis}: {len(result.runs)} runs, {done} done, {failed} failed, {missing} missing"
    text += f"; {result.design.flops:.3g} FLOPs in all"
    if not result.runs:
        text += ": no cell can be run, choose other budgets, another preset or dataset"
    if missing:
        text += (
            f", {result.flops_missing:.3g} of them missing, about {format_seconds(result.estimated_seconds)} with "
            f"{result.workers} worker{'s' * (result.workers != 1)} ({result.estimate_source})"
        )
    if result.stopped:
        text += f"\nstopped: {result.stopped}; the same command continues"
    lost = result.counts.get("duplicates", 0) + result.counts.get("abandoned", 0)
    if lost:
        text += f"\nduplicates discarded: {result.counts['duplicates']}; abandoned: {result.counts['abandoned']}"
    return text
