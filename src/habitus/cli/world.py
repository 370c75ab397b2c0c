"""habitus world."""

from pathlib import Path
from typing import Annotated, Any

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases
from habitus.units import MAX_THREADS

FLOOR_QUERIES = 1_000  # enough for two digits of the floor in well under a second

EXAMPLE = "Example: `habitus world shop --users 20000 --items 2000 weights.popular=0.1 weights.kind_taste=0.35`"


@app.command(epilog=EXAMPLE)
def world(
    out: Annotated[Path | None, typer.Argument(help="Folder to write; must not exist.")] = None,
    knobs: Annotated[list[str] | None, typer.Argument(metavar="[KNOB=VALUE]...", help="Any knob of the world.")] = None,
    users: Annotated[int | None, typer.Option(help="Users.")] = None,
    items: Annotated[int | None, typer.Option(help="Items of the catalogue, up to 10⁸.")] = None,
    events_per_user: Annotated[float | None, typer.Option(help="Mean history length.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed, another world.")] = None,
    like: Annotated[
        str | None,
        typer.Option(help="shop (the default), or logs: knobs that give the structure of real logs, as presets have."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A schema.toml with [world], or a file of knobs, to start from.")
    ] = None,
    list_knobs: Annotated[
        bool, typer.Option("--list-knobs", help="Print every knob, its default and its meaning, and stop.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Default: all cores.")] = None,
    prepared: Annotated[
        bool, typer.Option("--prepared", help="Write the prepared dataset instead of the tables, without DuckDB.")
    ] = False,
    seq_len: Annotated[int, typer.Option(help="With --prepared: events per window.")] = 256,
    split: Annotated[str, typer.Option(help="With --prepared: what validates and tests: user, time or last.")] = "user",
    test_share: Annotated[float, typer.Option(help="With --prepared: as in 'habitus prepare'.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make a synthetic shop whose best possible prediction is known exactly.

    Writes events.parquet, items.parquet and schema.toml, whose table [world] restores the oracle; with --prepared,
    byte for byte the dataset that 'habitus prepare' makes of them.
    """
    import os
    from shlex import quote
    from typing import get_args

    from habitus.data import PrepareOptions, prepare_world
    from habitus.errors import ConfigError
    from habitus.events import Likeness, World, schema_of, write_world
    from habitus.store import SPLIT_KINDS

    if list_knobs:
        _print_knobs()
        return
    if out is None:
        raise ConfigError("the folder to write is missing", expected="habitus world OUT")
    if "=" in out.name:
        raise ConfigError(f"{out} looks like a knob", expected="the folder first: habitus world OUT KNOB=VALUE")
    options = {"num_users": users, "num_items": items, "events_per_user": events_per_user, "seed": seed}
    if like is not None and config is not None:
        raise ConfigError("--like and --config were both given", expected="one of them: both say what to start from")
    likeness = check_choice("like", like or "shop", get_args(Likeness))
    shop = World(_config(likeness, config, options, knobs or []))
    threads = threads or os.cpu_count() or 1
    warnings: list[str] = []
    with phases() as progress:
        if prepared:
            prepare_options = PrepareOptions(
                seq_len=seq_len,
                split=check_choice("split", split, SPLIT_KINDS),
                test_share=test_share,
                threads=threads,
            )
            manifest = prepare_world(shop, schema_of(shop), out, prepare_options, progress)
            num_events, warnings = manifest.num_events, manifest.warnings()
            next_command = f"habitus describe {quote(str(out))}"
        else:
            num_events = write_world(shop, out, threads=threads, progress=progress)
            names = (quote(f"{out}/{name}") for name in ("events.parquet", "items.parquet", "schema.toml"))
            next_command = "habitus prepare {} {} --schema {} --out dataset".format(*names)
    summary = {
        "folder": str(out),
        "num_users": shop.config.num_users,
        "num_items": shop.config.num_items,
        "num_events": num_events,
        **_best_possible(shop, num_events),
        "next": next_command,
    }
    _print_summary(summary, as_json=as_json)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _config(likeness: Any, path: Path | None, options: dict[str, Any], knobs: list[str]) -> Any:
    """The config of a file or of a likeness, then the options that were given, then the knobs."""
    from habitus.events import WorldConfig
    from habitus.typed import apply_overrides

    given = {name: value for name, value in options.items() if value is not None}
    base = WorldConfig.find(path) if path is not None else WorldConfig.like(likeness, **given)
    return WorldConfig.parse(apply_overrides({**base.to_values(), **given}, knobs), "the world's options")


def _best_possible(world: Any, num_events: int) -> dict[str, Any]:
    """The oracle's floor and recall on a small sample; nothing where fewer than two users have a history."""
    num_queries = min(FLOOR_QUERIES, num_events - world.config.num_users)
    if num_queries < 1 or world.config.views_per_purchase:  # views tell more than the sample's purchases
        return {}
    sample = world.sample(num_queries)
    if len(set(sample.starts.tolist())) < 2:
        return {}
    floor, recall = world.entropy_floor(sample), world.best_recall(min(10, world.config.num_items), sample)
    return {
        "entropy_floor": {"value": floor.value, "se": floor.se},
        "best_recall@10": {"value": recall.value, "se": recall.se},
    }


def _print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo(
        f"{summary['folder']}: {summary['num_events']:,} events of {summary['num_users']:,} users "
        f"on {summary['num_items']:,} items"
    )
    if "entropy_floor" in summary:
        floor, recall = summary["entropy_floor"], summary["best_recall@10"]
        typer.echo(
            f"No model can do better than a loss of {floor['value']:.3f} ± {floor['se']:.3f} nats "
            f"and a recall@10 of {recall['value']:.3f} ± {recall['se']:.3f} over the catalogue."
        )
    typer.echo(f"Next: {summary['next']}")


def _print_knobs() -> None:
    from rich.console import Console
    from rich.table import Table

    from habitus.events import MixtureWeights, WorldConfig

    table = Table("knob", "default", "meaning", box=None, pad_edge=False)
    for name, field in WorldConfig.model_fields.items():
        if name != "weights":
            table.add_row(name, f"{field.default:g}", field.description)
    for name, field in MixtureWeights.model_fields.items():
        table.add_row(f"weights.{name}", f"{field.default:g}", field.description)
    Console(highlight=False).print(table)
