"""The options and tables of `evaluate --horizon`."""

from typing import TYPE_CHECKING

import typer

from habitus.cli.app import check_choice
from habitus.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from habitus.evaluation import Evaluation

_REPEATS = {"count": "", "leave-out": "_new"}
# What has no meaning where each user has one list at the cut, over the whole catalogue.
_WITHOUT_MEANING = (
    *("regime", "queries", "per_user", "batch_sequences", "catalogue_items", "histories", "metrics"),
    *("exclude_history", "by", "calibrate", "page", "seed"),
)


def parse_horizons(context: typer.Context, horizon: str | None, repeats: str) -> tuple[str, ...]:
    """The horizons of --horizon 7d,28d and --repeats, by the names that recipes give them; refuses what they ignore."""
    given = {name for name in context.params if _is_given(context, name)}
    if horizon is None:
        if "repeats" in given:
            raise ConfigError("--repeats was given without --horizon", expected="a horizon, as in --horizon 7d")
        return ()
    ignored = next((name for name in _WITHOUT_MEANING if name in given), None)
    if ignored is not None:
        raise ConfigError(
            f"--{ignored.replace('_', '-')} was given with --horizon",
            expected="one list per user at the cut, over the whole catalogue",
            next_step=f"omit --{ignored.replace('_', '-')}, or evaluate in two commands",
        )
    suffix = _REPEATS[check_choice("repeats", repeats, tuple(_REPEATS))]
    horizons = [text.strip() for text in horizon.split(",")]
    from habitus.recipe import HORIZON

    for text in horizons:
        match = HORIZON.fullmatch(text)
        if match is None or match[3]:
            raise ConfigError(f"--horizon {text!r}", expected="days or hours, as in --horizon 7d or --horizon 7d,28d")
    return tuple(dict.fromkeys(text + suffix for text in horizons))


def print_horizon(console: "Console", evaluations: "list[Evaluation]", regime: str, k: int) -> None:
    """Runs and baselines at one horizon, and by how much the first leads."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from habitus.store import HORIZON_METRICS

    names = [f"{name}@{k}" for name in HORIZON_METRICS]
    table = Table(title=f"{regime} (every k: --out or --json)", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.add_column("run", overflow="fold", min_width=8)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if len(evaluations) > 1:
        table.add_column(f"first less it, ndcg@{k} [95%]", justify="right", no_wrap=True)
    for one in evaluations:
        cells = [f"{one.metrics[f'{regime}/{name}'].value:.4f}" for name in names]
        lead = one.less_than_first.get(f"{regime}/ndcg@{k}")
        extra = [] if len(evaluations) == 1 else ["" if lead is None else str(lead)]
        table.add_row(escape(one.scorer), *cells, *(escape(cell) for cell in extra))
    console.print(table)
    spec = evaluations[0].specification[regime]
    side = "" if spec.side == "validation" else f"{spec.side} "
    console.print(
        f"{spec.queries:,} {side}users, each with one list of {spec.candidates:,} items, made at the cut\n",
        highlight=False,
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
