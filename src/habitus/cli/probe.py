"""habitus probe."""

from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.errors import ConfigError

EXAMPLE = """

Example: `habitus probe run --data dataset --labels users.parquet --label income`

From the log itself: `habitus probe run --data dataset --label churn:28d --cuts 4 --out churn.json`
"""


@app.command(
    help="Measure what a run's user vectors are worth for labels of your own, against aggregates made by hand."
    + EXAMPLE
)
def probe(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data: Annotated[Path | None, typer.Option(help="The prepared dataset of the run.")] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="Parquet or CSV with a column of users, perhaps one of times, and labels."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="A column of --labels (all unless given), or churn:28d: no event in the next 28 days."),
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="Time of all labels, where --labels has none: only earlier events count.")
    ] = None,
    cuts: Annotated[int, typer.Option(help="Times at which churn is asked, as far apart as it is long.")] = 4,
    task: Annotated[
        str | None, typer.Option(help="classification or regression; by default as the column's type says.")
    ] = None,
    kind: Annotated[str, typer.Option("--probe", help="linear (logistic or ridge) or boosted (trees).")] = "linear",
    folds: Annotated[int, typer.Option(help="Parts of the users, each asked by a probe fitted to the others.")] = 5,
    draws: Annotated[int, typer.Option(help="Draws of the users, for the intervals.")] = 1000,
    seed: Annotated[int, typer.Option(help="Chooses folds and draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    import json
    from typing import get_args

    from habitus.files import write_atomic
    from habitus.probing import PROBE_KINDS, ProbeOptions, Task
    from habitus.probing import probe as run_probe

    if data is None:
        raise ConfigError("no --data was given", expected="the prepared dataset of the run")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"the folder {out.parent} does not exist", next_step=f"mkdir -p {out.parent}")
    options = ProbeOptions(
        labels=labels,
        names=tuple(label or ()),
        at=at,
        cuts=cuts,
        task=None if task is None else check_choice("task", task, get_args(Task)),
        probe=check_choice("probe", kind, PROBE_KINDS),
        folds=folds,
        draws=draws,
        seed=seed,
        device=device,
    )
    with phases() as progress:
        results = run_probe(run, data, options, progress)
    text = json.dumps([result.to_values() for result in results], indent=2, ensure_ascii=False)
    if out is not None:
        write_atomic(out, text.encode())
    typer.echo(text if as_json else "\n".join(line for result in results for line in result.lines()))
