"""`habitus size`: what a budget buys, or what a recipe costs."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from habitus.cli.app import app
from habitus.units import format_bytes

if TYPE_CHECKING:
    from habitus.sizing import Cell, CellRequest, Inputs


@app.command()
def size(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE.toml]", help="Size this recipe; without one, give a budget and a share."),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="Budget in nominal training FLOPs (Equation 1).")] = None,
    share: Annotated[float | None, typer.Option(help="Embedder's share of the parameters, as in 0.02.")] = None,
    joint_dim: Annotated[int | None, typer.Option(help="Embedder width, instead of a share.")] = None,
    data_ratio: Annotated[float | None, typer.Option(help="Slots seen per parameter, D/N.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    width: Annotated[int | None, typer.Option(help="Contextualizer width.")] = None,
    depth: Annotated[int | None, typer.Option(help="Contextualizer layers.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Contextualizer head size; else 32, or less.")] = None,
    batch_sequences: Annotated[
        int | None, typer.Option(help="Windows per step; else 64 at 1e15 FLOPs, twice per decade up to 512.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Events per window; else the dataset's, or 256.")] = None,
    text_len: Annotated[int | None, typer.Option(help="Text tokens per item; else the dataset's, or 24.")] = None,
    text_depth: Annotated[int, typer.Option(help="Layers of the text encoder.")] = 4,
    copying: Annotated[bool, typer.Option("--copying", help="With a copy head over the user's past.")] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="Count attention's own term too, 6·D·seq_len·width·depth.")
    ] = False,
    dataset: Annotated[
        Path | None, typer.Option(help="Prepared dataset whose fields count; else typical ones are assumed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print the model that a budget buys, or that a recipe describes, with its parameters, FLOPs and bytes.

    Give `--share` or `--joint-dim`, and two of `--flops`, `--data-ratio`, `--steps`, `--width` with `--depth`.

    Example: `habitus size --flops 1e17 --share 0.06 --data-ratio 15 --batch-sequences 256`

    With long windows: `habitus size --flops 1e15 --share 0.02 --data-ratio 15 --batch-sequences 16 --seq-len 1024
    --attention`
    """
    from habitus.recipe import Recipe
    from habitus.sizing import CellRequest, cell_of_recipe, ladder_batch_sequences, solve

    facts = _facts_of(dataset)
    request = CellRequest(
        batch_sequences=batch_sequences or (ladder_batch_sequences(flops) if flops and 0 < flops < math.inf else 64),
        flops=flops,
        share=share,
        joint_dim=joint_dim,
        data_ratio=data_ratio,
        steps=steps,
        width=width,
        depth=depth,
        head_dim=head_dim,
        seq_len=seq_len or facts.seq_len,
        text_len=text_len or facts.text_len,
        text_depth=text_depth,
        copying=copying,
        attention=attention,
    )
    if recipe is not None:
        _refuse_both(recipe, request, batch_sequences)
        cell = cell_of_recipe(Recipe.read(recipe), facts.inputs, catalogue_items=facts.num_items)
    else:
        cell = solve(request, facts.inputs, catalogue_items=facts.num_items)
    if as_json:
        typer.echo(cell.to_json(), nl=False)
    else:
        _print_table(cell, assumed=dataset is None)


class _DatasetFacts(NamedTuple):
    """What sizing takes from a dataset, or assumes without one."""

    inputs: "Inputs"
    seq_len: int
    text_len: int
    num_items: int | None


def _facts_of(dataset: Path | None) -> _DatasetFacts:
    from habitus.sizing import TYPICAL_INPUTS, Inputs

    if dataset is None:
        return _DatasetFacts(TYPICAL_INPUTS, 256, 24, None)
    from habitus.data import Dataset

    opened = Dataset.open(dataset, verify=False)
    return _DatasetFacts(Inputs.of(opened.fields), opened.seq_len, opened.fields.text_len or 24, opened.num_items)


def _refuse_both(recipe: Path, request: "CellRequest", batch_sequences: int | None) -> None:
    from habitus.errors import ConfigError

    names = "flops share joint_dim data_ratio steps width depth head_dim".split()
    options = ["--" + name.replace("_", "-") for name in names if getattr(request, name) is not None]
    options += ["--batch-sequences"] if batch_sequences is not None else []
    options += ["--copying"] if request.copying else []
    options += ["--attention"] if request.attention else []
    if options:
        raise ConfigError(
            f"{recipe} and {', '.join(options)} given",
            expected="a recipe, which fixes all sizes, or options",
            next_step="omit one of the two",
        )


def _print_table(cell: "Cell", *, assumed: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=True, box=None, pad_edge=False)
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("", style="dim")
    for name, value, remark in _rows(cell):
        table.add_row(name, value, remark)
    console = Console(highlight=False)
    console.print(table)
    if assumed:
        console.print(
            "Fields are assumed (text, two categories, a price); --dataset counts those of a prepared one.",
            style="dim",
        )


def _rows(cell: "Cell") -> list[tuple[str, str, str]]:
    def requested(name: str, unit: str = "") -> str:
        return f"requested {cell.wanted[name]:g}{unit}" if name in cell.wanted else ""

    rows = [
        ("joint_dim", str(cell.model.joint_dim), ""),
        ("text_depth", str(cell.model.text_depth), f"{cell.model.text_len} text tokens per item"),
        ("width", str(cell.model.width), f"heads of {cell.model.head_dim}"),
        ("depth", str(cell.model.depth), ""),
        ("batch_sequences", str(cell.batch_sequences), f"windows of {cell.seq_len} events"),
        ("steps", f"{cell.steps:,}", requested("steps")),
        ("params", f"{cell.params:,}", f"and {cell.vocabulary_params:,} in vocabulary tables"),
        ("embedder_params", f"{cell.embedder_params:,}", ""),
        ("contextualizer_params", f"{cell.contextualizer_params:,}", ""),
        ("embedder_share", f"{cell.embedder_share:.3%}", requested("embedder_share")),
        ("slots_seen", f"{cell.slots_seen:,}", ""),
        ("data_ratio", f"{cell.data_ratio:.3f}", requested("data_ratio")),
        ("flops", f"{cell.flops:.6e}", requested("flops")),
        ("executed_flops", f"{cell.executed_flops:.6e}", "as run, half of the slots holding unique items"),
        ("bytes", format_bytes(cell.bytes["total"]), ", ".join(f"{k} {format_bytes(v)}" for k, v in _parts(cell))),
    ]
    if cell.flops_item_cache is not None:
        rows.insert(-1, ("flops_item_cache", f"{cell.flops_item_cache:.6e}", "embedding the catalogue once"))
    if cell.stage == 2:
        rows.insert(5, ("num_negatives", f"{cell.num_negatives:,}", "stage 2"))
    if cell.embedder_flop_share is not None:
        rows.insert(-2, ("embedder_flop_share", f"{cell.embedder_flop_share:.3f}", ""))
    return rows


def _parts(cell: "Cell") -> list[tuple[str, int]]:
    return [(name, value) for name, value in cell.bytes.items() if name != "total"]
