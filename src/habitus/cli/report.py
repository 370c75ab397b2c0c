"""`habitus report`: from a store to one page."""

from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import WatchingCommand, WatchOption, app
from habitus.cli.screen import elapsed

_EXAMPLE = (
    "Examples: `habitus report out/store --out out/report.html --png out/figures`; "
    "`habitus report out/study/store --watch` while a study or a sweep runs"
)


@app.command(epilog=_EXAMPLE, cls=WatchingCommand)
def report(
    store: Annotated[Path, typer.Argument(help="A run store, its archive (.store.xz), or a flat CSV of runs.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page.", show_default="report.html")] = None,
    png: Annotated[Path | None, typer.Option(help="A folder for the figures as PNG files (extra 'png').")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan in JSON, for the recipe on top; default: STORE/plan.json where it exists."),
    ] = None,
    watch: WatchOption = None,
) -> None:
    """Write one HTML page with every figure and table that the store supports. It opens offline.

    With `--watch` nothing is written: the page is served on this machine, and follows the runs as they end.
    """
    if watch is not None:
        from habitus.errors import ConfigError
        from habitus.studies import watch_store

        options = {"--out": out, "--png": png, "--plan": plan}
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ConfigError(
                f"--watch was given with {' and '.join(given)}", expected="--watch alone: nothing is written"
            )
        watch_store(store, watch, lambda text: typer.echo(text, err=True))
        return
    from habitus.reporting import report as write_report

    with elapsed(f"fitting and drawing laws of {store.name}"):
        written = write_report(store, out or Path("report.html"), png=png, plan=plan)
    typer.echo(f"wrote {written} ({written.stat().st_size / 1e6:.2f} MB)")
    if png is not None:
        typer.echo(f"wrote {len(list(png.glob('*.png')))} figures to {png}")
