"""habitus evaluate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from habitus.cli.app import app, check_choice
from habitus.cli.horizon import parse_horizons
from habitus.cli.screen import phases
from habitus.errors import ConfigError

if TYPE_CHECKING:
    from habitus.evaluation import EvaluateOptions, Evaluation

EXAMPLE = """

Example: `habitus evaluate run --data dataset --regime both --baselines`

Where it errs, as a page: `habitus evaluate run --data dataset --by popularity,repeat --calibrate --page errors.html`

The week after the cut of a split by time: `habitus evaluate run --data dataset --horizon 7d --baselines`

Several processes share the catalogue: `torchrun --nproc-per-node 2 -m habitus evaluate run --data dataset`
"""
# What has no meaning where --by takes nothing apart.
_OF_BY = ("by_file", "by_metric", "by_bins", "by_values", "against")
REGIMES = {"batch": ("batch",), "catalogue": ("catalogue",), "both": ("batch", "catalogue")}


@app.command(help="Score runs against their batch's targets and against the whole catalogue." + EXAMPLE)
def evaluate(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs or checkpoints; a store stands for all of its cells. All get the same queries."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder that 'habitus prepare' wrote.")] = None,
    regime: Annotated[str, typer.Option(help="batch, catalogue or both.")] = "both",
    side: Annotated[
        str, typer.Option(help="Users or events to score: validation, or test, which should choose nothing.")
    ] = "validation",
    queries: Annotated[int, typer.Option(help="Queries to score; fewer where there are fewer.")] = 20_000,
    per_user: Annotated[
        int | None,
        typer.Option(help="Queries of one user in one window at most: more users, smaller errors for as many queries."),
    ] = None,
    batch_sequences: Annotated[int, typer.Option(help="Windows that form one batch-local candidate pool.")] = 64,
    catalogue_items: Annotated[
        str, typer.Option(help="Candidates of the catalogue regime: all, or a number; targets are always among them.")
    ] = "all",
    cutoffs: Annotated[str, typer.Option(help="The k of recall@k and the others.")] = "1,5,10,20,50,100",
    histories: Annotated[
        str,
        typer.Option(help="History lengths reported apart; 'fitting' are 3,5,10,20,50,100 as far as windows reach."),
    ] = "fitting",
    metrics: Annotated[
        str,
        typer.Option(
            help="standard (loss, ranking, coverage), all, or some of loss, ranking (recall, ndcg, mrr), coverage, "
            "classic (hit_rate, precision, map), auc, lists (diversity, novelty, popularity, gini)."
        ),
    ] = "standard",
    exclude_history: Annotated[
        bool, typer.Option("--exclude-history", help="Leave the items out that the query sees; no loss then.")
    ] = False,
    horizon: Annotated[
        str | None,
        typer.Option(help="Instead of next events: each user's items in the time after the cut, as 7d or 7d,28d."),
    ] = None,
    repeats: Annotated[
        str, typer.Option(help="Of --horizon, items that a user had before the cut: count or leave-out.")
    ] = "count",
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Score the baselines as well, and a world's oracle.")
    ] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Score the checkpoints that the runs kept as well.")
    ] = False,
    by: Annotated[
        str | None,
        typer.Option(
            help="Take runs apart by item fields, event fields, popularity, history, weekday, gap, cold, repeat, "
            "or columns of --by-file; several with commas."
        ),
    ] = None,
    by_file: Annotated[
        Path | None, typer.Option(help="Parquet file with a row per user, item or event; the key has the log's names.")
    ] = None,
    by_metric: Annotated[
        str, typer.Option(help="What --by compares: loss, or recall, ndcg, mrr with a cut-off.")
    ] = "recall@10",
    by_bins: Annotated[int, typer.Option(help="Bins of a number, with as many queries each.")] = 5,
    by_values: Annotated[int, typer.Option(help="Values of a column that are shown; the others are one row.")] = 20,
    against: Annotated[
        str, typer.Option(help="What --by compares with: best (of the baselines), a baseline's name, or a run.")
    ] = "best",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Judge the probabilities, and fit a temperature on validation.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page of --by and --calibrate.")] = None,
    other_dataset: Annotated[
        bool, typer.Option("--other-dataset", help="Let runs of another dataset with the same encoders through.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Chooses queries and the candidate subset.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    memory: Annotated[str, typer.Option(help="Working memory of a pass over the candidates.")] = "512MiB",
    out: Annotated[
        Path | None, typer.Option(help="Write the results: .json, or .parquet or .csv with a row per metric.")
    ] = None,
    per_query: Annotated[Path | None, typer.Option(help="Write a Parquet file with a row per query.")] = None,
    keep: Annotated[
        str | None, typer.Option(help="Keep the results of a store's cells in it, under this name: fit reads them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    from contextlib import ExitStack

    from habitus.data import Dataset
    from habitus.evaluation import (
        ComputeOptions,
        ErrorOptions,
        EvaluateOptions,
        GroupOptions,
        PerQueryFile,
        evaluate_runs,
        join_ranks,
    )
    from habitus.store import EVALUATION_SIDES
    from habitus.units import parse_bytes

    if data is None:
        raise ConfigError("no --data was given", expected="the prepared dataset, as in --data dataset")
    if not runs and not baselines:
        raise ConfigError("nothing to score", expected="one run or more, or --baselines")
    horizons = parse_horizons(context, horizon, repeats)
    kept = None if keep is None else _kept_file(runs or [], keep, checkpoints)
    per_query = per_query or (kept.with_suffix(".parquet") if kept else None)
    _check_files(out, per_query, page)
    if page is not None and by is None and not calibrate:
        raise ConfigError("--page without --by or --calibrate has nothing to show", expected="one of them")
    if calibrate and not runs:
        raise ConfigError("--calibrate has no run to judge", expected="habitus evaluate RUN --data DATASET --calibrate")
    errors = None
    if by is None:
        _refuse_without_by(context)
    else:
        names = tuple(name.strip() for name in by.split(",") if name.strip())
        if not names:
            raise ConfigError(f"--by {by!r} names no column", expected="one or more, as in --by popularity,repeat")
        errors = ErrorOptions(names, by_file, by_metric, against, GroupOptions(by_bins, by_values))
    options = EvaluateOptions(
        regimes=() if horizons else REGIMES[check_choice("regime", regime, tuple(REGIMES))],  # type: ignore[arg-type]
        horizons=horizons,
        queries=queries,
        per_user=per_user,
        batch_sequences=batch_sequences,
        catalogue_items="all" if catalogue_items == "all" else _number("catalogue-items", catalogue_items),
        cutoffs=_numbers("cutoffs", cutoffs),
        histories="fitting" if histories == "fitting" else _numbers("histories", histories),
        exclude_history=exclude_history,
        metrics=_metric_groups(metrics),
        seed=seed,
        side=check_choice("side", side, EVALUATION_SIDES),
    )
    with join_ranks(device) as (ranks, resolved_device), ExitStack() as stack:
        progress = stack.enter_context(phases()) if ranks.is_first else None
        file = stack.enter_context(PerQueryFile(per_query)) if per_query and ranks.is_first else None
        evaluations = evaluate_runs(
            runs or [],
            Dataset.open(data),
            options,
            ComputeOptions(resolved_device, other_dataset, parse_bytes(memory)),
            with_baselines=baselines,
            checkpoints=checkpoints,
            with_calibration=calibrate,
            errors=errors,
            progress=progress,
            note=lambda text: typer.echo(text, err=True) if ranks.is_first else None,
            keep=file.add if file else None,
            keep_users=file.add if file else None,
        )
    if not ranks.is_first:
        return
    if page is not None:
        _write_page(evaluations, page)
    if out is not None:
        _write(evaluations, out)
    if kept is not None:
        _keep(evaluations, kept, options)
    if as_json:
        typer.echo(_json(evaluations))
        return
    from habitus.cli.evaluation_tables import print_evaluations

    print_evaluations(evaluations)


def _refuse_without_by(context: typer.Context) -> None:
    """An option that would have no effect is not ignored."""
    for name in _OF_BY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--{name.replace('_', '-')} was given without --by",
                expected="the columns to take runs apart by, as in --by popularity",
                next_step="add --by COLUMNS, or omit it",
            )


def _write_page(evaluations: "list[Evaluation]", page: Path) -> None:
    from habitus.evaluation import error_pages
    from habitus.reporting import error_report

    error_report(error_pages(evaluations), page)
    typer.echo(f"wrote {page}", err=True)


def _metric_groups(text: str) -> Any:
    """The groups of metrics that an option names; unknown ones are refused with the other options."""
    from habitus.store import ALL_METRIC_GROUPS, METRIC_GROUPS

    return {"standard": METRIC_GROUPS, "all": ALL_METRIC_GROUPS}.get(text) or tuple(text.split(","))


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}", expected="whole numbers, as in 1,5,10") from None


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}", expected="all, or one whole number") from None


def _kept_file(runs: list[Path], name: str, checkpoints: bool) -> Path:
    """Where the results of a store are kept."""
    from habitus.store import evaluation_path, read_store_info

    if len(runs) != 1 or checkpoints:
        raise ConfigError("--keep with other runs than the cells of one store", expected="evaluate STORE --keep NAME")
    read_store_info(runs[0])  # refuses what is no store
    path = evaluation_path(runs[0], name)
    if path.exists():
        raise ConfigError(
            f"{path} exists already", expected="a new name", next_step=f"delete {path}, or choose another"
        )
    path.parent.mkdir(exist_ok=True)
    return path


def _keep(evaluations: "list[Evaluation]", path: Path, options: "EvaluateOptions") -> None:
    """The results of the cells, by recipe hash; those of baselines belong to no run."""
    from habitus.store import StoreEvaluation

    cells = [one for one in evaluations if Path(one.scorer).parent.name == "cells"]
    StoreEvaluation(
        name=path.stem,
        dataset_checksum=cells[0].dataset_checksum,
        specification=cells[0].specification,
        runs={Path(one.scorer).name: one.metrics for one in cells},
        catalogue_items=options.catalogue_items if "catalogue" in options.regimes else None,
    ).write(path)
    typer.echo(f"kept {len(cells)} cells as {path.stem}: habitus fit reads them", err=True)


def _check_files(out: Path | None, per_query: Path | None, page: Path | None) -> None:
    """Refuse names that could not be written, before any work is done."""
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--page {page} has an unknown suffix", expected=".html")
    if out is not None and out.suffix not in (".json", ".parquet", ".csv"):
        raise ConfigError(f"--out {out} has an unknown suffix", expected=".json, .parquet or .csv")
    import os

    for path in (out, per_query, page):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"the folder {path.parent} does not exist", next_step=f"mkdir -p {path.parent}")
        if path is not None and not os.access(path.parent, os.W_OK):
            raise ConfigError(f"the folder {path.parent} cannot be written to", next_step="name a file elsewhere")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a folder", expected="the name of a file to write")


def _json(evaluations: "list[Evaluation]") -> str:
    import json

    values: list[dict[str, Any]] = [evaluation.to_values() for evaluation in evaluations]
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)


def _write(evaluations: "list[Evaluation]", out: Path) -> None:
    import io

    import pyarrow.csv
    import pyarrow.parquet

    from habitus.evaluation import metrics_table
    from habitus.files import write_atomic

    if out.suffix == ".json":
        write_atomic(out, (_json(evaluations) + "\n").encode())
        return
    content = io.BytesIO()
    writer: Any = pyarrow.csv.write_csv if out.suffix == ".csv" else pyarrow.parquet.write_table
    writer(metrics_table(evaluations), content)
    write_atomic(out, content.getvalue())
