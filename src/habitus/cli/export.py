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

Users at given times: `habitus export run --vectors users --data dataset --at times.parquet --out users.parquet`

A folder to push to a hub of models: `habitus export run --hub folder --data dataset --license apache-2.0`
"""


@app.command(
    help="Write vectors of items or users as Parquet, or the model as ONNX files or a folder for a hub." + EXAMPLE
)
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    vectors: Annotated[str | None, typer.Option(help="items or users.")] = None,
    out: Annotated[Path | None, typer.Option(help="Parquet file for the vectors.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Folder for embedder.onnx and contextualizer.onnx.")] = None,
    hub: Annotated[
        Path | None,
        typer.Option(help="Folder for the model and its card, to be pushed as it is; habitus.load opens it."),
    ] = None,
    license_id: Annotated[
        str | None,
        typer.Option("--license", help="With --hub: licence that the card states, as apache-2.0."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset: the users to export, and needed the first time a run is served."),
    ] = None,
    histories: Annotated[
        str | None, typer.Option(help="Instead of the dataset's users, those of an event log or a table of histories.")
    ] = None,
    at: Annotated[
        Path | None,
        typer.Option(
            help="File with users and times: a vector per row, of the events of --data strictly before its time."
        ),
    ] = None,
    items: Annotated[
        Path | None, typer.Option(help="Folder of items added at run time; RUN/serve/items unless given.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace --out where it exists.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    given = [name for name, value in (("--vectors", vectors), ("--onnx", onnx), ("--hub", hub)) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{'both ' * (len(given) == 2)}{' and '.join(given)} were given"
            if given
            else "neither --vectors nor --onnx nor --hub was given",
            expected="--vectors items or users with --out FILE.parquet, or --onnx FOLDER, or --hub FOLDER",
        )
    if license_id is not None and hub is None:
        raise ConfigError("--license was given without --hub", expected="--hub FOLDER, whose card states a licence")
    of_vectors = {"--out": out, "--histories": histories, "--at": at, "--items": items, "--replace": replace or None}
    ignored = [name for name, value in of_vectors.items() if value is not None]
    if ignored and vectors is None:
        raise ConfigError(
            f"{' and '.join(ignored)} {'was' if len(ignored) == 1 else 'were'} given with {given[0]}",
            expected=f"{given[0]} FOLDER, a new folder; {', '.join(of_vectors)} belong to --vectors",
        )
    if hub is not None:
        _export_hub(run, hub, data, license_id, device, as_json)
        return
    if onnx is not None:
        from habitus.exporting import export_onnx
        from habitus.model import load_bundle

        files = export_onnx(load_bundle(run, "cpu"), onnx)
        if as_json:
            typer.echo(files.to_json())
            return
        for name, difference in files.largest_difference.items():
            typer.echo(f"{onnx / name}: within {difference:.1g} of the original")
        return
    assert vectors is not None
    kind = check_choice("vectors", vectors, ("items", "users"))
    if at is not None and (kind == "items" or histories is not None):
        raise ConfigError(
            f"--at was given with {'--vectors items' if kind == 'items' else '--histories'}",
            expected="--vectors users --data DATASET --at TIMES.parquet",
        )
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
                retriever, out, data=source, histories=histories, at=at, replace=replace, progress=progress
            )
    if as_json:
        typer.echo(exported.to_json())
        return
    typer.echo(f"{exported.path}: {exported.rows:,} vectors of width {exported.joint_dim}")
    if exported.left_out:
        why = "none of their items is known" if at is None else "no event before their time"
        typer.echo(f"  {exported.left_out:,} users left out: {why}")


def _export_hub(run: Path, folder: Path, data: Path | None, license_id: str | None, device: str, as_json: bool) -> None:
    from habitus.exporting import export_hub
    from habitus.units import format_bytes

    with phases() as progress:
        exported = export_hub(
            run,
            folder,
            data=data,
            license_id=license_id,
            device=device,
            note=lambda text: typer.echo(text, err=True),
            progress=progress,
        )
    if as_json:
        typer.echo(exported.to_json())
        return
    typer.echo(f"{folder}: {len(exported.files)} files, {format_bytes(exported.bytes)}")
    if license_id is None:
        typer.echo("  its card states no licence: --license adds one")
    typer.echo(f"  in Python: habitus.load({str(folder)!r})")
