"""habitus embed."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.errors import ConfigError

EXAMPLE = """

Example: `habitus embed run --data dataset`

New items: `habitus embed run --items new.parquet --out vectors.parquet`
"""


@app.command(help="Turn a catalogue, or a table of new items, into the vectors of a run's embedder." + EXAMPLE)
def embed(
    run: Annotated[Path, typer.Argument(help="Run folder, or its bundle.")],
    data: Annotated[Path | None, typer.Option(help="Prepared dataset whose whole catalogue is embedded.")] = None,
    items: Annotated[
        str | None,
        typer.Option(help="Instead: a table of items, Parquet, CSV or JSON lines, raw fields as trained on."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="For --data a folder, RUN/catalogue unless said; for --items a Parquet file.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Stored type of a catalogue: bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    from habitus.evaluation import resolve_device
    from habitus.model import STORED_TYPES, build_cache, load_bundle

    if (data is None) == (items is None):
        raise ConfigError(
            "both --data and --items were given" if data else "neither --data nor --items was given",
            expected="--data DATASET for a catalogue, or --items FILE for new items",
        )
    stored = check_choice("dtype", dtype, STORED_TYPES)
    bundle = load_bundle(run, resolve_device(device))
    if items is not None:
        from habitus.model import embed_table

        if out is None:
            raise ConfigError("no --out was given", expected="the file to write, as in --out vectors.parquet")
        with phases() as progress:
            embedded = embed_table(bundle, items, out, progress)
        if as_json:
            typer.echo(embedded.to_json())
            return
        typer.echo(f"{embedded.path}: {embedded.num_items:,} vectors of width {embedded.joint_dim}")
        for name, count in embedded.unknown_values.items():
            if count:
                typer.echo(f"  {name}: {count:,} values that training did not see, encoded as unknown")
        return
    from habitus.data import Dataset
    from habitus.evaluation import cache_folder

    assert data is not None
    dataset = Dataset.open(data)
    with phases() as progress:
        cache = build_cache(bundle, dataset, out or cache_folder(bundle, dataset), dtype=stored, progress=progress)
    if as_json:
        typer.echo(cache.manifest.to_json())
        return
    manifest = cache.manifest
    typer.echo(
        f"{cache.path}: {manifest.num_items:,} vectors of width {manifest.joint_dim} as {manifest.dtype}, "
        f"{len(manifest.shards)} shard{'s' if len(manifest.shards) > 1 else ''}"
    )
    side = " --side test" if bundle.recipe.data.include_validation else ""
    typer.echo(f"Next: habitus evaluate {quote(str(bundle.run_path))} --data {quote(str(data))}{side}")
