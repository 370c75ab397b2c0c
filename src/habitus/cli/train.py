"""habitus train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app
from habitus.cli.screen import phases
from habitus.errors import ConfigError, Interrupted
from habitus.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from habitus.data import Dataset
    from habitus.evaluation import Ranks
    from habitus.progress import Progress
    from habitus.recipe import Recipe
    from habitus.record import Record
    from habitus.training import TrainingProgress, TrainOptions

PREVIOUS = "previous"  # as train.parent: the stage-1 run that this one follows
EXAMPLE = """

Example, a good model for this log without a recipe: `habitus train --data dataset --out run`

Going on when the log has grown: `habitus train --from run --data dataset-today --out run-today`

Recipes of your own: `habitus train stage1.toml stage2.toml --data dataset --out run train.steps=500`

Several processes: `torchrun --nproc-per-node 2 -m habitus train stage1.toml --data dataset --out run`
"""


@app.command(
    help="Train a model for a log; or one recipe, or stage 1 and stage 2 in a row, into a run folder." + EXAMPLE
)
def train(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            help="One or two recipes (.toml), then dotted overrides as in train.steps=500; none: chosen for the log."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder that 'habitus prepare' wrote.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; with two recipes stage1 and stage2 stand in it.")
    ] = None,
    parent: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Run to continue: by stage 2, or by stage 1 on a log that may have grown, recipe or not."
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Without a recipe: time to train in; by default minutes, see docs/any-log.md.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Without a recipe: what candidates are chosen by, on validation users.")
    ] = "catalogue/ndcg@10",
    refit: Annotated[
        bool,
        typer.Option("--refit/--no-refit", help="Without a recipe: train the choice again with the validation events."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Without a recipe: of every run; a recipe has its own.")] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest intact checkpoint; finished stages are not trained again."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, steps, FLOPs and memory, then stop.")
    ] = False,
    trunk: Annotated[
        Path | None, typer.Option(help="Folder that runs with schedule wsd share until they decay.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only when stopped.")] = 0,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep.")] = 2,
    best: Annotated[
        str | None, typer.Option(help="Metric, as in batch/loss, whose best checkpoint is kept as well.")
    ] = None,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep checkpoints when the run is done.")
    ] = False,
    accumulate: Annotated[
        int, typer.Option(help="Micro-batches per step, to save memory; candidates stay those of the full batch.")
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default as many as a step feeds and idle cores carry.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits on every run on a GPU, too.")
    ] = False,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile kernels on a GPU; by default where it pays.")
    ] = None,
    captured: Annotated[
        bool | None, typer.Option("--capture/--no-capture", help="Capture steps as graphs; by default on a GPU.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train even where a step seems to take more memory than there is.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Records as JSON.")] = False,
) -> None:
    from habitus.data import Dataset
    from habitus.evaluation import join_ranks
    from habitus.training import TrainOptions, check_best

    files: list[str | Recipe] = [one for one in recipes or [] if "=" not in one]
    overrides = [one for one in recipes or [] if "=" in one]
    if data is None:
        raise ConfigError("no --data was given", expected="the prepared dataset, as in --data dataset")
    if not files and parent is not None:
        parent = _stage_one(parent)
        files = [_continuing_recipe(parent)]
    if not files and not overrides:
        if dry_run:
            raise ConfigError(
                "--dry-run was given and no recipe: what is trained is chosen on the way",
                expected="a recipe, as in habitus train stage1.toml --data dataset --dry-run",
                next_step="leave --dry-run out; the hours that --hours gives are the most that it takes",
            )
        from habitus.cli.train_log import train_without_recipe
        from habitus.studies import LogTrainingOptions

        log_options = LogTrainingOptions(
            hours=hours, metric=metric, device=device, threads=threads, seed=seed, refit=refit
        )
        train_without_recipe(data, out, log_options, as_json)
        return
    if hours is not None:
        raise ConfigError(
            "--hours and a recipe were given", expected="--hours without a recipe: its steps are its time"
        )
    if not 1 <= len(files) <= 2:
        raise ConfigError(f"{len(files)} recipes were given", expected="one, or stage1.toml stage2.toml")
    options = TrainOptions(
        device=device,
        threads=threads,
        deterministic=deterministic,
        save_every=save_every,
        keep=keep,
        best=best,
        trunk=trunk,
        resume=resume,
        accumulate=accumulate,
        compile=compiled,
        capture=captured,
        keep_checkpoints_at_end=keep_checkpoints,
        force=force,
    )
    for number, file in enumerate(files):  # all of them before the first is trained
        unknown = "0" * 64 if number or parent or dry_run else None
        recipe = _read_recipe(file, overrides, unknown, continues=parent is not None)
        _check_order(recipe, file, number, len(files))
        check_best(recipe, best)
    if dry_run:
        dataset = Dataset.open(data)
        for file in files:
            _print_size(_read_recipe(file, overrides, "0" * 64), dataset, as_json)
        return
    if out is None:
        raise ConfigError("no --out was given", expected="the run folder to write, as in --out run")
    folders = [out] if len(files) == 1 else [out / "stage1", out / "stage2"]
    with join_ranks(options.device) as (ranks, _):
        dataset = _open_dataset(data, ranks)
        failed = _train_all(files, overrides, dataset, folders, parent, options, ranks, as_json)
    if failed:
        raise typer.Exit(1)


def _open_dataset(path: Path, ranks: "Ranks") -> "Dataset":
    """The dataset. On every machine one process checks its files, or fetches them, and the others wait for it."""
    from habitus.data import Dataset

    dataset = None
    with ranks.together():
        if ranks.is_first_here:
            dataset = Dataset.open(path)
    with ranks.together():
        return Dataset.open(path, verify=False) if dataset is None else dataset


def _stage_one(folder: Path) -> Path:
    """The stage-1 run of a folder that training without a recipe left: the one that saw most; or the folder itself."""
    from habitus.studies import REFIT

    if (folder / "record.json").exists():
        return folder
    return next((run for name in (f"{REFIT}1", "stage1") if (run := folder / name).exists()), folder)


def _continuing_recipe(parent: Path) -> "Recipe":
    """That of the run, shorter and slower, where no other is given."""
    from habitus.store import read_run_record
    from habitus.training import continuing_recipe

    recipe = continuing_recipe(read_run_record(parent), parent)
    typer.echo(
        f"continuing {parent} for {recipe.train.steps:,} steps at a peak rate of {recipe.train.learning_rate:g}: "
        "three tenths of its steps, a quarter of its rate",
        err=True,
    )
    return recipe


def _train_all(
    files: "list[str | Recipe]",
    overrides: list[str],
    dataset: "Dataset",
    folders: list[Path],
    parent: Path | None,
    options: "TrainOptions",
    ranks: "Ranks",
    as_json: bool,
) -> bool:
    """Train the recipes in order; whether one of them ended in a failed Record."""
    from shlex import quote

    from habitus.cards import add_plan
    from habitus.training import train as train_one

    def note(text: str) -> None:
        if ranks.is_first:
            typer.echo(text, err=True)

    for number, (file, folder) in enumerate(zip(files, folders, strict=True)):
        before = parent if number == 0 else folders[0]
        parent_hash = None if before is None else _read_parent_hash(before)
        recipe = _read_recipe(file, overrides, parent_hash, continues=before is not None)
        if options.resume and not any((folder / name).exists() for name in ("record.json", "checkpoints")):
            holds = "holds no checkpoint" if folder.exists() else "does not exist"
            note(f"{folder} {holds}: nothing to resume, so training starts at step 0")
        with phases() as bar:
            show = _progress_bar(bar, f"stage {recipe.train.stage}") if ranks.is_first else None
            try:
                record = train_one(recipe, dataset, folder, parent=before, options=options, progress=show, note=note)
            except Interrupted as stopped:
                note(f"habitus: {stopped}")
                raise typer.Exit(143) from stopped
        if ranks.is_first:
            if isinstance(file, str):
                add_plan(folder, Path(file))
            _print_record(record, folder, as_json)
        if record.status == "failed":
            return True
    if not as_json and "test" in dataset.manifest.sides():
        note(f"Next: habitus card {quote(str(folders[-1]))} --data {quote(str(dataset.path))}")
    return False


def _read_recipe(
    file: "str | Recipe", overrides: list[str], parent_hash: str | None, *, continues: bool = False
) -> "Recipe":
    """The recipe in a file with the overrides, with the hash of the run before as parent.

    Stage 2 always has one; stage 1 where it `continues` a run.
    """
    import tomllib

    from habitus.recipe import Recipe
    from habitus.typed import apply_overrides

    if isinstance(file, Recipe):
        return Recipe.parse(apply_overrides(file.to_values(), overrides), "the recipe of the run")
    path = Path(file)
    if not path.exists():
        raise ConfigError(f"{path} does not exist", expected="a recipe, as 'habitus plan' writes it")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be parsed: {error}", expected="valid TOML") from None
    values = apply_overrides(values, overrides)
    train_values = values.get("train")
    if isinstance(train_values, dict) and (train_values.get("stage") == 2 or continues):
        if train_values.get("parent") in (None, PREVIOUS) and parent_hash is not None:
            train_values["parent"] = parent_hash
        if train_values.get("parent") == PREVIOUS:
            raise ConfigError(
                f"{path} continues the previous run, and there is none",
                expected="the stage-1 recipe before it, or the run that it continues",
                next_step="habitus train stage1.toml stage2.toml …, or pass --from RUN",
            )
    return Recipe.parse(values, str(path))


def _read_parent_hash(folder: Path) -> str:
    from habitus.store import read_run_record

    if not (folder / "record.json").exists():
        raise ConfigError(f"{folder} holds no record.json", expected="the folder of a run that is done")
    return read_run_record(folder).recipe_hash


def _check_order(recipe: "Recipe", file: "str | Recipe", number: int, count: int) -> None:
    if count == 2 and recipe.train.stage != number + 1:
        raise ConfigError(
            f"{file} is a recipe of stage {recipe.train.stage} in place {number + 1}",
            expected="stage 1 first, then stage 2",
        )


def _progress_bar(bar: "Progress", name: str) -> "Callable[[TrainingProgress], None]":
    def show(now: "TrainingProgress") -> None:
        if now.phase != "training":
            bar(f"{name}: {now.phase}", now.share)
            return
        parts = [f"{name}: step {now.step:,}", f"loss {now.loss:.4f}"]
        if now.events_per_second is not None:
            parts.append(f"{now.events_per_second:,.0f} events/s")
        if now.share_of_peak is not None:
            parts.append(f"{now.share_of_peak:.0%} of peak")
        if now.seconds_left is not None:
            parts.append(f"{format_seconds(now.seconds_left)} left")
        bar(", ".join(parts), now.share)

    return show


def _print_size(recipe: "Recipe", dataset: "Dataset", as_json: bool) -> None:
    from habitus.cli.size import _print_table
    from habitus.sizing import Inputs, cell_of_recipe
    from habitus.training import check_recipe

    check_recipe(recipe, dataset)
    cell = cell_of_recipe(recipe, Inputs.of(dataset.fields), catalogue_items=dataset.num_items)
    if as_json:
        typer.echo(cell.to_json(), nl=False)
        return
    typer.echo(f"stage {recipe.train.stage}")
    _print_table(cell, assumed=False)
    windows = dataset.training_view(recipe.data).counts("train").windows
    typer.echo(f"epochs {recipe.train.steps * recipe.train.batch_sequences / windows:.3g} over {windows:,} windows")


def _print_record(record: "Record", folder: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(record.to_json(), nl=False)
        return
    if record.status == "failed":
        typer.echo(f"{folder}: failed: {record.reason}", err=True)
        return
    from habitus.store import horizon_regime

    assert record.train is not None
    assert record.seconds is not None
    rate = record.throughput.get("events_per_second")
    typer.echo(
        f"{folder}: {record.steps:,} steps, "
        f"training loss {record.train.loss:.4f} over the last {min(100, record.steps)}"
        + (f", {rate:,.0f} events/s" if rate else "")
        + f", {record.seconds.warmup + record.seconds.train:.1f} s training, {record.seconds.evaluate:.1f} s evaluation"
    )
    for name in ("loss", "recall@10", "ndcg@10"):
        for regime in (*record.recipe.evaluate.regimes, *map(horizon_regime, record.recipe.evaluate.horizons)):
            metric = record.metrics.get(f"{regime}/{name}")
            if metric is not None:
                typer.echo(f"  {regime}/{name} {metric.value:.4f}" + (f" ± {metric.se:.4f}" if metric.se else ""))
