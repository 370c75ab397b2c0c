"""`habitus study`: the main job."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import WatchingCommand, WatchOption, app

if TYPE_CHECKING:
    from habitus.store import RegisteredPlan
    from habitus.studies import StudyResult

_EXAMPLE = (
    "Examples: `habitus study --preset quick --out out/study --watch`; "
    "`habitus study --data dataset --out out/study --gpu-hours 8 --metric catalogue/recall@10`"
)


@app.command(epilog=_EXAMPLE, cls=WatchingCommand)
def study(
    out: Annotated[Path, typer.Option(help="Folder of the study; give it again to continue.")],
    data: Annotated[Path | None, typer.Option(help="Prepared dataset; else the preset's own synthetic world.")] = None,
    items: Annotated[int | None, typer.Option(min=2, help="Items of the synthetic world; else the preset's.")] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Users of the synthetic world; else the preset's.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="tiny, quick, standard, paper, or a .toml: budgets and grids; by default as the device."),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="Envelope: nominal FLOPs of all runs together.")] = None,
    gpu_hours: Annotated[float | None, typer.Option(help="Envelope: hours on this machine.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="The metric you serve; by default catalogue/ndcg@10 on a log, recall@10 on a world."),
    ] = None,
    axis: Annotated[
        list[str] | None, typer.Option(help="Only this axis, whatever the regime of the log; may be repeated.")
    ] = None,
    plan_flops: Annotated[
        float | None, typer.Option(help="Budget of the recipe; else ten times the largest of the study.")
    ] = None,
    copying: Annotated[
        bool | None,
        typer.Option(
            "--copying/--no-copying", help="Whether models may copy from a user's past; else as the log suggests."
        ),
    ] = None,
    allow_repeats: Annotated[
        bool, typer.Option("--allow-repeats", help="Also run cells of more than one epoch (small logs).")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at once; else one per core.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each run; else one.")] = None,
    backend: Annotated[str, typer.Option(help="local or ray.")] = "local",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpu: Annotated[str | None, typer.Option(help="Hardware of the planned run, as in `habitus plan`.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic world.")] = 0,
    max_minutes: Annotated[float | None, typer.Option(help="Stop after so long; the same command continues.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue; refused where there is nothing to continue.")
    ] = False,
    watch: WatchOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print cells, cost and time, then stop.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the best recipe for a log and its scaling laws: event log in; a page with figures, laws and a recipe out.

    It says first whether the compute or the log ends before the other, and does what that asks for (docs/study.md).
    Interrupt it at any time; the same command continues where it stopped and repeats nothing.
    """
    from contextlib import nullcontext

    from habitus.cli.study_screen import StudyScreen
    from habitus.errors import ConfigError, Interrupted
    from habitus.studies import STATE_FILE, StudyOptions, watch_study
    from habitus.studies import study as run_study

    if resume and not (out / STATE_FILE).exists() and not (out / "probes").exists():
        raise ConfigError(
            f"{out} holds no study",
            expected="the folder of a study that was begun",
            next_step="omit --resume to begin one",
        )
    if watch is not None and dry_run:
        raise ConfigError("both --watch and --dry-run were given", expected="one of them: a dry run runs nothing")
    options = StudyOptions(
        data=data,
        items=items,
        users=users,
        preset=preset,
        axes=tuple(axis or ()),
        flops=flops,
        gpu_hours=gpu_hours,
        metric=metric,
        plan_flops=plan_flops,
        copying=copying,
        allow_repeats=allow_repeats,
        workers=workers,
        threads=threads,
        backend=backend,
        device=device,
        gpu=gpu,
        seed=seed,
        max_minutes=max_minutes,
        dry_run=dry_run,
    )
    screen = StudyScreen(quiet=json_output)
    # The address is printed whatever else is not: without it nobody finds the page.
    page = nullcontext() if watch is None else watch_study(out, watch, lambda text: typer.echo(text, err=True))
    try:
        with page, screen:
            result = run_study(out, options, progress=screen.progress, note=screen.note)
    except Interrupted as stopped:
        typer.echo(f"habitus: {stopped}", err=True)
        raise typer.Exit(143) from stopped
    except KeyboardInterrupt:
        typer.echo(f"habitus: interrupted; what is finished stays in {out}. The same command continues.", err=True)
        raise typer.Exit(130) from None
    _print(result, json_output)


def _print(result: "StudyResult", json_output: bool) -> None:
    import json

    if result.dry_run:
        if json_output:
            typer.echo(result.state.to_json(), nl=False)
        return
    if json_output:
        values = {
            "out": str(result.out),
            "laws": str(result.laws),
            "plan": str(result.plan),
            "recipes": [str(path) for path in result.recipes],
            "report": str(result.report),
            "seconds": round(result.seconds, 1),
            "sweep_seconds": round(result.swept, 1),
            "stated_seconds": round(result.state.seconds, 1),
            "laws_status": result.identified,
            **({} if result.state.regime is None else {"regime": result.state.regime.to_values()}),
            **({} if result.search is None else {"value": result.search.value, "ended": result.search.ended}),
            **({} if result.table is None else {"test": result.table.to_values()}),
            "next": result.next_command,
            **({} if result.refit_command is None else {"serve": result.refit_command}),
        }
        typer.echo(json.dumps(values, indent=2))
        return
    from habitus.cli.plan import print_busy
    from habitus.store import RegisteredPlan
    from habitus.units import format_seconds

    if result.identified:
        ok = sum(status == "ok" for status in result.identified.values())
        typer.echo(f"{ok} of {len(result.identified)} laws behind the recipe are identified; the report says which.")
    if result.table is not None:
        typer.echo("\n".join(result.table.lines()))
    typer.echo(f"report: {result.report}")
    typer.echo(f"laws:   {result.laws}")
    typer.echo(f"plan:   {result.plan}")
    if result.plan is not None and result.plan.exists():
        plan = RegisteredPlan.read(result.plan)
        typer.echo("".join(f"        {line}\n" for line in _forecasts(plan)), nl=False)
        print_busy(plan)
    timing = f"took {format_seconds(result.seconds)}"
    if not result.continued and result.state.seconds:
        off = result.swept / max(result.state.seconds, 1e-9) - 1
        timing += f"; the sweeps {format_seconds(result.swept)}, "
        timing += f"stated {format_seconds(result.state.seconds)} ({off:+.0%})"
    typer.echo(timing)
    typer.echo(f"next:   {result.next_command}")
    if result.plan is not None and result.plan.exists() and (plan.predictions or "hours" in plan.quantities):
        typer.echo(f"then:   {result.check_command}  # what was registered beside what came out")
    if result.refit_command is not None:
        typer.echo(f"serve:  {result.refit_command}  # the same with the validation events")


def _forecasts(plan: "RegisteredPlan") -> list[str]:
    """What is registered, with its intervals; and why nothing is of the metric that is served."""
    from habitus.units import format_seconds

    lines = []
    for told in plan.predictions:
        low, high = ("open" if end is None else f"{end:.4g}" for end in (told.low, told.high))
        lines.append(f"{told.metric} after stage {told.stage}: {told.value:.4g} [{low}, {high}], registered")
    lines += [why for why in plan.warnings if why.startswith(f"{plan.metric} ") and "not predicted: " in why]
    hours = plan.quantities.get("hours")
    if hours is not None:
        at_most = "" if hours.high is None else f" [at most {format_seconds(3600 * hours.high)}]"
        lines.append(f"time: {format_seconds(3600 * hours.value)}{at_most}, registered")
    return lines
