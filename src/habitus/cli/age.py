"""habitus age."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.errors import ConfigError

if TYPE_CHECKING:
    from habitus.data import Dataset
    from habitus.evaluation import Ageing

EXAMPLE = """

Example: `habitus age run --data dataset-today`

With a run that was updated on the way: `habitus age run-monday run-friday --data dataset-sunday`
"""


@app.command(help="Measure how fast runs age: their metric by the days since their last training event." + EXAMPLE)
def age(
    runs: Annotated[list[Path], typer.Argument(help="Runs that were trained until different times.")],
    data: Annotated[Path | None, typer.Option(help="A dataset with later events.")] = None,
    metric: Annotated[str, typer.Option(help="loss, or recall, ndcg, mrr with a cut-off, over the catalogue.")] = (
        "ndcg@10"
    ),
    days: Annotated[
        str | None, typer.Option(help="Ages to tell apart, as in 1,7,28; by default as far as the log reaches.")
    ] = None,
    side: Annotated[str, typer.Option(help="validation or test.")] = "test",
    queries: Annotated[int, typer.Option(help="Queries to score, those before the runs' ends among them.")] = 20_000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    import json

    from habitus.data import Dataset
    from habitus.evaluation import age_runs
    from habitus.store import EVALUATION_SIDES

    if data is None:
        raise ConfigError("no --data was given", expected="a prepared dataset with events after the runs' training")
    chosen = check_choice("side", side, EVALUATION_SIDES)
    dataset = Dataset.open(data)
    with phases() as progress:
        tables = age_runs(
            runs, dataset, metric, _parse_days(days), side=chosen, queries=queries, device=device, progress=progress
        )
    if as_json:
        typer.echo(json.dumps([_to_values(table) for table in tables]))
        return
    _print(tables, dataset, side)


def _parse_days(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--days {text}", expected="numbers with commas, as in 1,7,28") from None


def _print(tables: "list[Ageing]", dataset: "Dataset", side: str) -> None:
    import numpy as np

    for table in tables:
        until = np.datetime64(table.trained_until, "us").astype("datetime64[s]")
        total = sum(row.mean.n for row in table.rows)
        typer.echo(f"{table.run}: trained until {until}; {total:,} later queries of {side} users")
        if not total:
            continue
        typer.echo(f"  {'days':>14} {'queries':>9} {'users':>7}  {table.metric:20} to a run trained until later")
        for row in table.rows:
            spread = f" ± {1.96 * row.mean.se:.4f}" if row.mean.se is not None else ""
            lost = "" if row.lost is None else _difference(row.lost)
            ages = f"{row.days[0]:g} to {row.days[1]:g}"
            typer.echo(
                f"  {ages:>14} {row.mean.n:>9,} {row.users:>7,}  {row.mean.value:.4f}{spread:12} {lost}".rstrip()
            )
        for update in table.updates:
            every = "day" if update.every_days == 1 else f"{update.every_days:g} days"
            typer.echo(f"  replaced every {every}: {update.value:.4f}, {_difference(update.gain)} against never")
    if len(tables) == 1:
        typer.echo(
            "Days differ in more than age: add a run that was trained until later, and differences are paired by query."
        )


def _difference(difference: "tuple[float, float | None, float | None]") -> str:
    value, low, high = difference
    return f"{value:+.4f}" + ("" if low is None else f" [{low:+.4f}, {high:+.4f}]")


def _to_values(table: "Ageing") -> dict[str, object]:
    return {
        "run": table.run,
        "trained_until": table.trained_until,
        "metric": table.metric,
        "rows": [
            {
                "days": row.days,
                "users": row.users,
                "queries": row.mean.n,
                "value": row.mean.value,
                "se": row.mean.se,
                "lost": None if row.lost is None else list(row.lost),
            }
            for row in table.rows
        ],
        "updates": [
            {"every_days": row.every_days, "value": row.value, "gain": list(row.gain)} for row in table.updates
        ],
    }
