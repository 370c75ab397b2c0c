"""habitus card."""

from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import app

EXAMPLE = """

Example: `habitus card run --data dataset`

A dataset: `habitus card dataset`

A study: `habitus card study`
"""


@app.command(help="Write the card of a run, a dataset or a study again: README.md in Hugging Face's form." + EXAMPLE)
def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a dataset, a store or a study.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset: of a run, adds the table with baselines on its test users."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="The plan.json that a run's recipe comes from.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
) -> None:
    from habitus.exporting import write_card

    path = write_card(folder, data=data, plan=plan, device=device, note=lambda text: typer.echo(text, err=True))
    typer.echo(f"{path}: {len(path.read_text(encoding='utf-8').splitlines()):,} lines")
