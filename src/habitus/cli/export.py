"""habitus export."""

from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.errors import ConfigError

EXAMPLE = """

Example: `habitus export run --vectors items --out items.parquet`

Users: `habitus export run --vectors users --data dataset --out users.parquet`; ONNX: `habitus export run --onnx folder`
"""


@app.command(help="Write the vectors of items or users as Parquet, or the model as ONNX files." + EXAMPLE)
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    vectors: Annotated[str | None, typer.Option(help="items or users.")] = None,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the vectors.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Folder for embedder.onnx and contextualizer.onnx.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset: the users to export, and needed the first time a run is served."),
    ] = None,
    histories: Annotated[
        str | None, typer.Option(help="Instead of the dataset's users, those of an event log or a table of histories.")
    ] = None,
    items: Annotated[
        Path | None, typer.Option(help="Folder of items added at run time; RUN/serve/items unless given.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace --out where it exists.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    from habitus.model import load_bundle

    if (vectors is None) == (onnx is None):
        raise ConfigError(
            "both --vectors and --onnx were given" if onnx else "neither --vectors nor --onnx was given",
            expected="--vectors items or users with --out FILE.parquet, or --onnx FOLDER",
        )
    if onnx is not None:
        from habitus.exporting import export_onnx

        files = export_onnx(load_bundle(run, "cpu"), onnx)
        if as_json:
            typer.echo(files.to_json())
            return
        for name, difference in files.largest_difference.items():
            typer.echo(f"{onnx / name}: within {difference:.1g} of the original")
        return
    assert vectors is not None
    kind = check_choice("vectors", vectors, ("items", "users"))
    if out is None:
        raise ConfigError("no --out was given", expected="the file to write, as in --out items.parquet")
    from habitus.exporting import check_output, export_items, export_users
    from habitus.serving import Limits, Retriever

    check_output(out, (".parquet",), replace=replace)
    with phases() as progress:
        retriever = Retriever.open(
            run,
            data=data,
            device=device,
            items=items,
            read_only=True,
            limits=Limits(max_history=10**9),
            note=lambda text: typer.echo(text, err=True),
            progress=progress,
        )
        if kind == "items":
            exported = export_items(retriever, out, replace=replace, progress=progress)
        else:
            source = None if histories else data
            exported = export_users(
                retriever, out, data=source, histories=histories, replace=replace, progress=progress
            )
    if as_json:
        typer.echo(exported.to_json())
        return
    typer.echo(f"{exported.path}: {exported.rows:,} vectors of width {exported.joint_dim}")
    if exported.left_out:
        typer.echo(f"  {exported.left_out:,} users left out: none of their items is known")
