"""habitus train without a recipe: what is printed while a model is found for a log."""

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Literal

import typer

from habitus.cli.screen import phases
from habitus.errors import ConfigError, Interrupted
from habitus.units import format_seconds

if TYPE_CHECKING:
    from habitus.studies import LogTrainingOptions
    from habitus.training import TrainingProgress


def train_without_recipe(data: Path, out: Path | None, options: "LogTrainingOptions", as_json: bool) -> None:
    """Find, train and compare a model; a line per decision, then the table."""
    from habitus.cards import metrics_where_worse
    from habitus.data import Dataset
    from habitus.studies import train_log

    if out is None:
        raise ConfigError("no --out was given", expected="the run folder to write, as in --out run")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several processes were started without a recipe",
            expected="one process, or a recipe",
            next_step="habitus train --data … --out … in one process writes stage1/recipe.toml",
        )
    with phases() as bar:

        def show(name: str, now: "TrainingProgress") -> None:
            bar(f"{name}: step {now.step:,}" if now.phase == "training" else f"{name}: {now.phase}", now.share)

        try:
            dataset = Dataset.open(data)
            result = train_log(dataset, out, options, progress=show, note=lambda text: typer.echo(text, err=as_json))
        except Interrupted as stopped:
            typer.echo(f"habitus: {stopped}; the same command continues", err=True)
            raise typer.Exit(143) from stopped
        except KeyboardInterrupt:
            typer.echo(f"habitus: interrupted; what is finished stays in {out}. The same command continues.", err=True)
            raise typer.Exit(130) from None
    if as_json:
        typer.echo(result.to_json(), nl=False)
        return
    model, train = result.stage1.model, result.stage1.train
    typer.echo(
        f"model: joint_dim {model.joint_dim}, width {model.width}, depth {model.depth}, dropout {train.dropout:g}, "
        f"{train.steps:,} steps of {train.batch_sequences} windows; {format_seconds(result.seconds)} in all"
    )
    typer.echo("")
    for line in result.table.lines():
        typer.echo(line)
    if result.table.side != "test":
        typer.echo("This dataset has no test side: the users above chose the model. Prepare with --test-share.")
    side: Literal["test", "validation"] = "test" if result.table.side == "test" else "validation"
    total = dataset.counts(side).queries
    if result.table.queries < total:
        every = f"habitus evaluate {quote(str(out / 'best'))} --data {quote(str(data))} --side {side} --baselines"
        typer.echo(f"A draw of the {total:,} queries; all of them: {every}")
    for row in result.table.rows[1:]:
        if worse := [name for name in metrics_where_worse(row) if name != "loss"]:
            typer.echo(
                f"{row.scorer} is better on {', '.join(worse)}: more --hours, more users or a look at the schema come "
                "before serving (docs/any-log.md)"
            )
    typer.echo(f"\nNext: habitus serve {quote(str(out / 'best'))} --data {quote(str(data))}")
