"""`habitus show`: a recipe for people."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from habitus.studies import Knob, Subject

_EXAMPLE = "Examples: `habitus show out/study/recipe/stage1.toml --data dataset`; of a run `habitus show out/run`"


@app.command(epilog=_EXAMPLE)
def show(
    path: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe in TOML, a run, or a study's folder.")],
    data: Annotated[Path | None, typer.Option(help="Prepared dataset whose fields count; else a run's own.")] = None,
    device: Annotated[
        str, typer.Option(help="auto, cuda (one H200) or cpu (one thread): assumed where no run was timed.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print every knob of a recipe: what it means, where its value came from, and what doubling it costs.

    Costs are parameters (N), FLOPs of Equation 1 and time: that of the runs around it where there are any.
    """
    from habitus.studies import describe_size, explain_recipe

    subject = open_path(path, data, device)
    knobs = explain_recipe(subject)
    if as_json:
        import json

        values = {"path": str(subject.path), "size": subject.cell.to_values(), "knobs": [k.to_values() for k in knobs]}
        typer.echo(json.dumps(values | {"seconds": subject.seconds(subject.recipe)}, indent=2))
        return

    console = wide_console()
    console.print(f"{subject.path}: stage {subject.recipe.train.stage}", markup=False, soft_wrap=True)
    console.print(describe_size(subject), markup=False, soft_wrap=True)
    console.print(_table(knobs))
    for line in _result(subject):
        console.print(line, markup=False, soft_wrap=True)


def open_path(path: Path, data: Path | None, device: str) -> "Subject":
    """What a user named, with the dataset that counts."""
    from habitus.studies import open_subject
    from habitus.sweeps import device_kind

    check_choice("device", device, ("auto", "cpu", "cuda"))
    dataset = None
    if data is not None:
        from habitus.data import Dataset

        dataset = Dataset.open(data, verify=False)
    return open_subject(path, dataset=dataset, device=device_kind(device))


def format_value(value: object) -> str:
    """A value as a recipe file has it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def _table(knobs: "list[Knob]") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("knob", "value"):
        table.add_column(name, overflow="fold", no_wrap=name == "knob")
    for name, ratio in (("means", 3), ("from", 3), ("twice as much, or switched", 3)):
        table.add_column(name, overflow="fold", ratio=ratio)
    section = ""
    for knob in knobs:
        if knob.name.partition(".")[0] != section:
            section = knob.name.partition(".")[0]
            table.add_row(f"[bold]{escape(f'[{section}]')}[/bold]")
        cells = (f"  {knob.name.partition('.')[2]}", format_value(knob.value), knob.meaning, knob.origin)
        table.add_row(
            *map(escape, cells), escape(str(knob.change or "")), style="dim" if knob.origin == "default" else ""
        )
    return table


def _result(subject: "Subject") -> list[str]:
    """What the run measured, where it is one."""
    record = subject.record
    if record is None:
        return []
    if record.status == "failed":
        return [f"failed: {record.reason}"]
    names = [name for name in record.metrics if name in ("catalogue/recall@10", "catalogue/ndcg@10", "batch/loss")]
    values = ", ".join(
        f"{name} {record.metrics[name].value:.4f}" + (f" ± {se:.4f}" if (se := record.metrics[name].se) else "")
        for name in names
    )
    return (
        [f"measured on {record.evaluation.side}: {values} (± one standard error)"]
        if values and record.evaluation
        else []
    )
