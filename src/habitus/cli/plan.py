"""`habitus plan`: the next recipe for a budget and a metric."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app

if TYPE_CHECKING:
    from rich.console import Console

    from habitus.planning import PlanOptions
    from habitus.store import Plan, PlanCheck, Quantity

_EXAMPLE = (
    "Example: `habitus plan --flops 1e17 --metric catalogue/recall@10 --gpu h200 --recipe recipe/`; later "
    "`habitus train recipe/stage1.toml recipe/stage2.toml --data DATASET --out RUN`"
)


@app.command(epilog=_EXAMPLE)
def plan(
    flops: Annotated[float | None, typer.Option(help="Total budget in nominal FLOPs, both stages.")] = None,
    metric: Annotated[str, typer.Option(help="The metric you serve.")] = "catalogue/recall@10",
    laws: Annotated[
        Path | None, typer.Option(help="Your laws.json, or the store it lies in; else the published laws.")
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="The paper's laws only.")] = False,
    data: Annotated[Path | None, typer.Option(help="Prepared dataset: its fields, catalogue and length count.")] = None,
    gpu: Annotated[str | None, typer.Option(help="h200, h100, a100, ...: memory and hours on it.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    hours: Annotated[float | None, typer.Option(help="Budget as hours on --gpu, instead of --flops.")] = None,
    stage2_share: Annotated[float, typer.Option(help="Stage 2's share of the budget; 0 leaves it out.")] = 0.2,
    recipe: Annotated[
        Path | None, typer.Option(help="Write stage1.toml and stage2.toml into this folder (or this .toml).")
    ] = None,
    register: Annotated[
        Path | None, typer.Option(help="Write the prediction with its hash to this .json, before the run.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Compare this finished run with its registered plan.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="The registered plan for --check; else plan.json in or above the run.")
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Plan beyond 1,000 times the largest measured budget.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the planned runs.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Answer for a budget and a metric: how large, on how much data, which batch, how many negatives, how long.

    Every number stands with its interval and its source: this study, published, or default.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if check is not None:
        from habitus.planning import check_plan

        result = check_plan(check, against)
        _print_check(result, json_output, console)
        return
    options = _options(laws, published, data, gpu, gpus, stage2_share, extrapolate, seed)
    budget = _budget(flops, hours, gpu, gpus)
    from habitus.planning import plan as make_plan
    from habitus.planning import register_plan

    made = make_plan(budget, metric, options)
    if register is not None:
        register_plan(made, register)
    written = [] if recipe is None else made.write_recipes(recipe)
    if json_output:
        typer.echo(made.to_json(), nl=False)
        return
    print_plan(made, console)
    if hours is not None and flops is not None and "hours" in made.quantities:
        within = "within" if made["hours"].value <= hours else "more than"
        console.print(f"{_word(made['hours'].value, 'hours')} is {within} the {hours:g} h given.")
    if written:
        console.print("wrote " + ", ".join(str(path) for path in written))
    if register is not None:
        console.print(f"registered {register}")
    if written:
        names = " ".join(str(path) for path in written)
        console.print(f"next: habitus train {names} --data {data or 'DATASET'} --out {written[0].parent / 'run'}")
    else:
        console.print("next: --recipe FOLDER writes both stages for habitus train")


def _options(
    laws: Path | None,
    published: bool,
    data: Path | None,
    gpu: str | None,
    gpus: int,
    stage2_share: float,
    extrapolate: bool,
    seed: int,
) -> "PlanOptions":
    from habitus.errors import ConfigError
    from habitus.planning import PlanOptions

    if laws is not None and published:
        raise ConfigError(
            "--laws and --published given",
            expected="one of the two; with --laws the published laws stand beside anyway",
        )
    if laws is not None and laws.is_dir():
        laws = laws / "laws.json"
    if laws is not None and not laws.exists():
        raise ConfigError(
            f"{laws} does not exist",
            expected="a laws.json, or the store it lies in",
            next_step="`habitus fit STORE` writes it; or leave --laws out, for the published laws",
        )
    dataset = None
    if data is not None:
        from habitus.data import Dataset

        dataset = Dataset.open(data, verify=False)
    return PlanOptions(
        laws=laws,
        dataset=dataset,
        gpu=gpu,
        gpus=gpus,
        stage2_share=stage2_share,
        extrapolate=extrapolate,
        seed=seed,
    )


def _budget(flops: float | None, hours: float | None, gpu: str | None, gpus: int) -> float:
    from habitus.errors import ConfigError
    from habitus.planning import affordable_flops
    from habitus.store import gpu_named

    if flops is not None:
        return flops
    if hours is not None and gpu is not None:
        return affordable_flops(gpu_named(gpu), gpus, hours)
    given = "--hours without --gpu" if hours is not None else "neither --flops nor --hours"
    raise ConfigError(
        f"{given} given",
        expected="a budget: --flops 1e19, or --gpu h200 --gpus 8 --hours 24",
        next_step="habitus plan --flops 1e17 --metric catalogue/recall@10",
    )


# Label, name, format of the value or kind of number; in the order in which people decide.
_ROWS = (
    ("N  params", "params", "count"),
    ("s  embedder_share", "embedder_share", "{:.2%}"),
    ("   joint_dim", "joint_dim", "{:.0f}"),
    ("   width", "width", "{:.0f}"),
    ("   depth", "depth", "{:.0f}"),
    ("B  batch_sequences", "batch_sequences", "{:,.0f}"),
    ("   learning_rate", "learning_rate", "{:.3g}"),
    ("   steps", "steps", "{:,.0f}"),
    ("D  slots_seen", "slots_seen", "count"),
    ("   D/N", "data_ratio", "{:.3g}"),
    ("K  num_negatives", "num_negatives", "{:,.0f}"),
    ("   stage 2 batch", "stage2_batch_sequences", "{:,.0f}"),
    ("   stage 2 learning_rate", "stage2_learning_rate", "{:.3g}"),
    ("   stage 2 steps", "stage2_steps", "{:,.0f}"),
    ("   memory", "memory_gib", "gib"),
    ("   time", "hours", "hours"),
)


def print_plan(made: "Plan", console: "Console") -> None:
    """The plan as tables: the recipe, what it should reach, the printed recipe beside it, and every warning."""
    from rich.table import Table

    second = f" + {made.stage2_flops:.3g} for stage 2" if made.stage2_flops else ""
    console.print(f"{made.flops:.3g} FLOPs for {made.metric}: {made.stage1_flops:.3g} for stage 1{second}.")
    console.print(f"Laws: {made.laws}; optimizer {made.optimizer}. Intervals are 95%.\n")
    table = Table(box=None, pad_edge=False)
    for name in ("", "value", "interval", "source"):
        table.add_column(name, justify="right" if name == "value" else "left", no_wrap=True)
    rows = [(label, name, form) for label, name, form in _ROWS if name in made.quantities]
    for label, name, form in rows:
        q = made[name]
        table.add_row(label, _word(q.value, form), _interval(q, form), q.source)
    for p in made.predictions:
        table.add_row(f"   {p.metric}, stage {p.stage}", f"{p.value:.4g}", _interval(p, "{:.4g}") or "open", p.source)
    console.print(table)
    console.print("\nFrom:")
    told = {label[3:]: made[name].how for label, name, _ in rows}
    told |= {f"{p.metric}, stage {p.stage}": p.how for p in made.predictions}
    for label, how in told.items():
        console.print(f"  {label}: {how}")
    _print_memory(made, console)
    _print_printed(made, console)
    if made.differences:
        console.print("\nWhere your laws and the published ones differ:")
        for d in made.differences:
            where = {True: ", inside your interval", False: ", outside your interval", None: ""}[d.inside]
            form = dict(row[1:] for row in _ROWS).get(d.knob, "{:.4g}")
            ours, theirs = _word(d.ours, form), _word(d.published, form)
            console.print(f"  {d.knob}: {ours}, published {theirs} ({d.ratio:.2g} times){where}")
    if made.warnings:
        console.print("\nWarnings:")
        for warning in made.warnings:
            console.print(f"  - {warning}")


def _interval(q: "Quantity | object", form: str) -> str:
    low, high = getattr(q, "low", None), getattr(q, "high", None)
    if low is None and high is None:
        return ""
    return f"{'…' if low is None else _word(low, form)} to {'…' if high is None else _word(high, form)}"


def _word(value: float, form: str) -> str:
    from habitus.reporting import format_number

    return form.format(value) if "{" in form else format_number(value, form)


def _print_memory(made: "Plan", console: "Console") -> None:
    for m in made.memory:
        if m.fits is not None and m.device_bytes is not None:
            verdict = "fits" if m.fits else f"does not fit: {m.change}"
            room = m.device_bytes / 1024**3
            console.print(f"Stage {m.stage} on {m.device} ({room:.0f} GiB usable of one): {verdict}.")


def _print_printed(made: "Plan", console: "Console") -> None:
    printed = made.printed
    if printed is None:
        return
    low, high = printed.num_negatives
    console.print(
        f"\nThe paper's printed recipe at {made.flops:.3g}: N {_word(printed.params, 'count')}, "
        f"D/N {printed.data_ratio_6nd:.0f} (6ND convention), s {printed.embedder_share:.0%}, "
        f"B {printed.batch_sequences}, learning rate {printed.learning_rate:g}, K {low:,.0f} to {high:,.0f}.\n"
        f"By Equation 1 that costs {printed.flops:.3g} FLOPs, "
        f"{printed.times_budget:.1f} times the budget; the plan above is what the budget pays."
    )


def _print_check(result: "PlanCheck", json_output: bool, console: "Console") -> None:
    if json_output:
        typer.echo(result.to_json(), nl=False)
        return
    from rich.table import Table

    console.print(f"Registered {result.registered_at}, hash {result.hash[:16]}.")
    table = Table(box=None, pad_edge=False)
    for name in ("", "predicted", "interval", "measured", ""):
        table.add_column(name)
    for c in result.comparisons:
        label = f"{c.name}, stage {c.stage}" if c.stage else c.name
        verdict = {True: "inside", False: "outside", None: "no interval to judge by"}[c.inside]
        form = "hours" if c.name == "hours" else "{:.4g}"
        measured = "not measured" if c.measured is None else _word(c.measured, form)
        label = "time" if c.name == "hours" else label
        table.add_row(label, _word(c.predicted, form), _interval(c, form), measured, verdict if c.measured else "")
    console.print(table)
    for note in result.notes:
        console.print(f"  - {note}")
