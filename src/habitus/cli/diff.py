"""`habitus diff`: two recipes or runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.screen import phases, wide_console
from habitus.cli.show import format_value, open_path
from habitus.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from habitus.studies import ComparedRuns

_EXAMPLE = (
    "Examples: `habitus diff a.toml b.toml`; `habitus diff run-a run-b --data dataset`; after `prepare --update` "
    "`habitus diff old new --data grown --other-dataset`"
)


@app.command(epilog=_EXAMPLE)
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A recipe in TOML, a run, or a study's folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to compare with it.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset: evaluate both runs on the same queries now, for paired intervals."),
    ] = None,
    other_dataset: Annotated[
        bool, typer.Option("--other-dataset", help="Let runs of another dataset with the same encoders through.")
    ] = False,
    side: Annotated[
        str | None,
        typer.Option(help="With --data: validation or test; default: test where validation events were trained on."),
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="With --data: queries to score.", show_default="20000")
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda: of the evaluation, and of times that are assumed.")
    ] = "auto",
    all_metrics: Annotated[bool, typer.Option("--all", help="All metrics, not the usual ones alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print what differs between two recipes or runs: knobs, sizes, cost, and metrics with 95% intervals.

    Differences are B less A. They are paired where both answered the same queries and the answers are known: with
    `--data`, or after `habitus evaluate STORE --keep NAME` for two cells of that store. Else only means are compared.
    """
    from habitus.store import EVALUATION_SIDES
    from habitus.studies import compare

    given = {"--other-dataset": other_dataset, "--side": side is not None, "--queries": queries is not None}
    if data is None and any(given.values()):
        raise ConfigError(
            f"{' and '.join(name for name in given if given[name])} without --data",
            expected="the dataset to evaluate both runs on, as in --data dataset",
        )
    one, other = (open_path(path, data, device) for path in (first, second))
    with phases() as progress:
        compared = compare(
            one,
            other,
            dataset=one.dataset,
            device=one.device,
            other_dataset=other_dataset,
            side=None if side is None else check_choice("side", side, EVALUATION_SIDES),
            queries=queries or 20_000,
            note=lambda text: typer.echo(text, err=True),
            progress=progress,
        )
    if as_json:
        import json

        typer.echo(json.dumps(compared.to_values(), indent=2, default=str))
        return

    console = wide_console()
    console.print(f"A: {one.path}\nB: {other.path}", markup=False, soft_wrap=True)
    for table in _tables(compared, all_metrics):
        console.print(table)
    for remark in compared.remarks:
        console.print(remark, markup=False, soft_wrap=True)


def _tables(compared: "ComparedRuns", all_metrics: bool) -> "list[Table | str]":
    from habitus.store import METRICS

    usual = {name for kind in METRICS.values() for name in kind.headline}
    if not compared.knobs:
        parts: list[Table | str] = ["The recipes are the same."]
    else:
        parts = [
            _table(
                ("knob", "A", "B", "B/A"), [_row(one.name, one.first, one.second, one.ratio) for one in compared.knobs]
            )
        ]
    if compared.sizes:
        rows = [_row(one.name, one.first, one.second, one.ratio) for one in compared.sizes]
        parts.append(_table(("size and cost", "A", "B", "B/A"), rows))
    if compared.metrics:
        rows = []
        for one in compared.metrics:
            if not all_metrics and one.metric.partition("/")[2] not in usual:
                continue
            ends = "" if one.low is None or one.high is None else f"[{one.low:+.4f}, {one.high:+.4f}]"
            rows.append((one.metric, f"{one.first:.4f}", f"{one.second:.4f}", f"{one.difference:+.4f}", ends, one.how))
        parts.append(_table(("metric", "A", "B", "B less A", "95%", "how"), rows))
    return parts


def _row(name: str, first: object, second: object, ratio: float | None) -> tuple[str, ...]:
    texts = [f"{x:.3g}" if name.startswith("FLOPs") else format_value(x) for x in (first, second)]
    return name, *texts, "" if ratio is None else f"{ratio:.3g}"


def _table(header: "Sequence[str]", rows: "Sequence[Sequence[str]]") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name in (header[0], "how") else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
