"""`habitus fit`: from a store of records to laws.json."""

from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import app
from habitus.cli.screen import elapsed

_EXAMPLE = "Example: `habitus fit out/store --out out/store/laws.json --metric batch/loss --metric catalogue/recall@10`"


@app.command(epilog=_EXAMPLE)
def fit(
    store: Annotated[Path, typer.Argument(help="A run store, its archive (.store.xz), or a flat CSV of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the laws; default: STORE/laws.json, or beside the CSV.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; may be repeated.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the laws as JSON instead of tables.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every table and warning instead of one screen.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the permutations and the bootstrap.")] = 0,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Resamplings of cells and seeds through the whole pipeline.")
    ] = 0,
    allow_repeats: Annotated[
        bool, typer.Option("--allow-repeats", help="Include runs of more than one epoch.")
    ] = False,
    group: Annotated[
        str, typer.Option(help="Optimizer and init whose laws are asked for, as in muon/default; default: most runs.")
    ] = "",
) -> None:
    """Fit every scaling law that the records support, with intervals, and say where there is none."""
    from habitus.errors import ConfigError
    from habitus.laws import fit as fit_laws
    from habitus.laws import format_summary, format_tables

    target = out or (store / "laws.json" if store.is_dir() else store.with_suffix(".laws.json"))
    if out is not None and (target.suffix != ".json" or not target.parent.is_dir()):
        raise ConfigError(
            f"--out {target} cannot be used", expected="a name that ends in .json, in a folder that exists"
        )
    with elapsed(f"fitting laws of {store.name}"):
        laws = fit_laws(store, metric or (), seed=seed, bootstrap=bootstrap, allow_repeats=allow_repeats, group=group)
    laws.write(target)
    if json_output:
        typer.echo(laws.to_json(), nl=False)
    else:
        typer.echo(format_tables(laws) if verbose else format_summary(laws))
        more = "" if verbose else f"; {len(laws.warnings()):,} warnings in it, or with --verbose"
        typer.echo(f"wrote {target}: {len(laws.entries):,} laws and refusals, with values and intervals{more}")
