"""`habitus plan`: the next recipe for a budget and a metric."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from habitus.cli.app import app

if TYPE_CHECKING:
    from rich.console import Console

    from habitus.data import Dataset
    from habitus.store import Comparison, Plan, PlanCheck, Prediction, Quantity

_EXAMPLE = (
    "Example: `habitus plan --flops 1e17 --metric catalogue/recall@10 --gpu h200 --recipe recipe/`; later "
    "`habitus train recipe/stage1.toml recipe/stage2.toml --data DATASET --out RUN`"
)


@app.command(epilog=_EXAMPLE)
def plan(
    flops: Annotated[float | None, typer.Option(help="Total budget in nominal FLOPs, both stages.")] = None,
    metric: Annotated[str, typer.Option(help="The metric you serve.")] = "catalogue/recall@10",
    laws: Annotated[
        Path | None, typer.Option(help="Your laws.json, or its store; default: the published laws.")
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="The paper's laws only.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Prepared dataset, whose fields, catalogue and window length count.")
    ] = None,
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
        Path | None, typer.Option(help="The registered plan for --check; default: plan.json in or above the run.")
    ] = None,
    extrapolate: Annotated[
        bool,
        typer.Option(
            "--extrapolate",
            help="Plan beyond 1,000 times the largest measured budget, or below a thousandth of the smallest.",
        ),
    ] = False,
    fastest_batch: Annotated[
        bool,
        typer.Option("--fastest-batch", help="The batch that trained fastest of those within 0.5% of the best loss."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the planned runs.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Answer for a budget and a metric: how large, on how much data, which batch, how many negatives, how long.

    Every number stands with its interval and its source: this study, published, or default.
    """
    from rich.console import Console

    from habitus.errors import ConfigError
    from habitus.planning import PlanOptions, check_plan, register_plan
    from habitus.planning import plan as make_plan

    console = Console(highlight=False, soft_wrap=True, markup=False)  # [evaluate] is a section
    if check is not None:
        _print_check(check_plan(check, against), json_output, console)
        return
    options = PlanOptions(
        laws=_find_laws(laws, published),
        dataset=_open_dataset(data),
        gpu=gpu,
        gpus=gpus,
        stage2_share=stage2_share,
        extrapolate=extrapolate,
        fastest_batch=fastest_batch,
        seed=seed,
    )
    try:
        budget = _find_budget(flops, hours, gpu, gpus)
        next_plan = make_plan(budget, metric, options)
        if flops is None and hours is not None and gpus > 1:
            # What several GPUs exchange depends on the planned sizes, and those on the budget.
            for _ in range(_REFINEMENTS):
                if next_plan.flops < budget:  # the log ends before the hours do
                    break
                budget *= hours / next_plan["hours"].value
                next_plan = make_plan(budget, metric, options)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(
            f"no plan can be computed: {' '.join(str(error).split())}",
            expected="laws and a budget whose numbers stay finite",
            next_step="fit the laws again, or plan with --published",
        ) from error
    if register is not None:
        register_plan(next_plan, register)
    recipes = [] if recipe is None else next_plan.write_recipes(recipe)
    if json_output:
        typer.echo(next_plan.to_json(), nl=False)
        return
    _print_plan(next_plan, console)
    if hours is not None and flops is not None:
        _print_hours(next_plan, hours, console)
    if gpu is None:
        print_busy(next_plan)
    _print_next_step(recipes, register, data, console)


def print_busy(plan: "Plan") -> None:
    """Say it where other processes would slow a run on this CPU down."""
    from habitus.machine import slowdown_now
    from habitus.planning import busy_note

    hours = plan.quantities.get("hours")
    note = None if hours is None else busy_note(hours, slowdown_now())
    if note is not None:
        typer.echo(note)


def _find_laws(laws: Path | None, published: bool) -> Path | None:
    """The laws.json to plan by; None for the published laws."""
    from habitus.errors import ConfigError
    from habitus.store import find_laws

    if laws is not None and published:
        raise ConfigError(
            "--laws and --published are both given",
            expected="one of the two; --laws shows the published values next to yours anyway",
        )
    return None if laws is None else find_laws(laws)


def _open_dataset(path: Path | None) -> "Dataset | None":
    if path is None:
        return None
    from habitus.data import Dataset

    return Dataset.open(path, verify=False)


def _find_budget(flops: float | None, hours: float | None, gpu: str | None, gpus: int) -> float:
    """The budget in FLOPs: as given, or what the hours on the GPUs afford."""
    from habitus.errors import ConfigError
    from habitus.planning import affordable_flops
    from habitus.store import gpu_named

    if flops is not None:
        return flops
    if hours is not None and gpu is not None:
        return affordable_flops(gpu_named(gpu), gpus, hours)
    raise ConfigError(
        "--hours without --gpu" if hours is not None else "neither --flops nor --hours is given",
        expected="a budget: --flops 1e19, or --gpu h200 --gpus 8 --hours 24",
        next_step="habitus plan --flops 1e17 --metric catalogue/recall@10",
    )


_REFINEMENTS = 3  # of a budget that hours on several GPUs pay
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
    ("L  seq_len", "seq_len", "{:,.0f}"),
    ("   serve --read-history", "serve_history", "{:,.0f}"),
    ("D  slots_seen", "slots_seen", "count"),
    ("   D/N", "data_ratio", "{:.3g}"),
    ("R  passes", "passes", "{:.3g}"),
    ("   dropout", "dropout", "{:.3g}"),
    ("K  num_negatives", "num_negatives", "{:,.0f}"),
    ("   stage 2 batch", "stage2_batch_sequences", "{:,.0f}"),
    ("   stage 2 learning_rate", "stage2_learning_rate", "{:.3g}"),
    ("   stage 2 steps", "stage2_steps", "{:,.0f}"),
    ("   memory", "memory_gib", "gib"),
    ("   time", "hours", "hours"),
)


def _print_plan(plan: "Plan", console: "Console") -> None:
    """The plan as tables: the recipe, what it should reach, the paper's recipe next to it, and every warning."""
    second = f" + {plan.stage2_flops:.3g} for stage 2" if plan.stage2_flops else ""
    console.print(f"{plan.flops:.3g} FLOPs for {plan.metric}: {plan.stage1_flops:.3g} for stage 1{second}.")
    kinds = "Intervals are 95%; those marked 'tried' are what runs had, those marked 'assumed' rest on a rule."
    console.print(f"Laws: {plan.laws}; optimizer {plan.optimizer}. {kinds}\n")
    _print_quantities(plan, console)
    _print_memory(plan, console)
    _print_paper_recipe(plan, console)
    _print_differences(plan, console)
    if plan.warnings:
        console.print("\nWarnings:")
        for warning in plan.warnings:
            console.print(f"  - {warning}")


def _print_quantities(plan: "Plan", console: "Console") -> None:
    """Every number of the recipe and every prediction with its interval and source; below them, how each came about."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("", "value", "interval", "source"):
        table.add_column(column, justify="right" if column == "value" else "left", no_wrap=True)
    derivations = {}
    for label, name, form in _ROWS:
        if name in plan.quantities:
            quantity = plan[name]
            table.add_row(label, _format(quantity.value, form), _interval(quantity, form), quantity.source)
            derivations[label[3:]] = quantity.how
    for p in plan.predictions:
        label = f"{p.metric}, stage {p.stage}"
        table.add_row(f"   {label}", f"{p.value:#.4g}", _interval(p, "{:#.4g}") or "open", p.source)
        derivations[label] = p.how
    console.print(table)
    console.print("\nFrom:")
    for label, how in derivations.items():
        console.print(f"  {label}: {how}")


def _print_memory(plan: "Plan", console: "Console") -> None:
    for m in plan.memory:
        if m.fits is not None and m.device_bytes is not None:
            verdict = "fits" if m.fits else f"does not fit: {m.change}"
            usable = m.device_bytes / 1024**3
            console.print(f"Stage {m.stage} on {m.device} ({usable:.0f} GiB usable of one): {verdict}.")


def _print_paper_recipe(plan: "Plan", console: "Console") -> None:
    printed = plan.printed
    if printed is None:
        return
    low, high = printed.num_negatives
    console.print(
        f"\nThe paper's printed recipe at {plan.flops:.3g}: N {_format(printed.params, 'count')}, "
        f"D/N {printed.data_ratio_6nd:.0f} (6ND convention), s {printed.embedder_share:.0%}, "
        f"B {printed.batch_sequences}, learning rate {printed.learning_rate:g}, K {low:,.0f} to {high:,.0f}.\n"
        f"By Equation 1 that costs {printed.flops:.3g} FLOPs, "
        f"{printed.times_budget:.1f} times the budget; the plan above is what the budget pays for."
    )


def _print_differences(plan: "Plan", console: "Console") -> None:
    if not plan.differences:
        return
    forms = {name: form for _, name, form in _ROWS}
    console.print("\nWhere your laws and the published ones differ:")
    for d in plan.differences:
        where = {True: ", inside your interval", False: ", outside your interval", None: ""}[d.inside]
        form = forms.get(d.knob, "{:.4g}")
        ours, theirs = _format(d.ours, form), _format(d.published, form)
        console.print(f"  {d.knob}: {ours}, published {theirs} ({d.ratio:.2g} times){where}")


def _print_hours(plan: "Plan", hours: float, console: "Console") -> None:
    """Whether the plan takes longer than the hours given next to --flops."""
    if "hours" in plan.quantities:
        verdict = "within" if plan["hours"].value <= hours else "more than"
        console.print(f"{_format(plan['hours'].value, 'hours')} is {verdict} the {hours:g} h given.")


def _print_next_step(recipes: list[Path], register: Path | None, data: Path | None, console: "Console") -> None:
    """Which files were written, and the command that trains the recipe."""
    if recipes:
        console.print("wrote " + ", ".join(str(path) for path in recipes))
    if register is not None:
        console.print(f"registered {register}")
    if recipes:
        names = " ".join(str(path) for path in recipes)
        console.print(f"next: habitus train {names} --data {data or 'DATASET'} --out {recipes[0].parent / 'run'}")
    else:
        console.print("next: --recipe FOLDER writes both stages for habitus train")


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
        label = "time" if c.name == "hours" else f"{c.name}, stage {c.stage}" if c.stage else c.name
        verdict = {True: "inside", False: "outside", None: "no interval to judge by"}[c.inside]
        form = "hours" if c.name == "hours" else "{:.4g}"
        measured = "not measured" if c.measured is None else _format(c.measured, form)
        table.add_row(
            label, _format(c.predicted, form), _interval(c, form), measured, "" if c.measured is None else verdict
        )
    console.print(table)
    for note in result.notes:
        console.print(f"  - {note}")


def _interval(number: "Quantity | Prediction | Comparison", form: str) -> str:
    """'2M to 3M', with '…' for an open end; '' where there is none."""
    from habitus.store import range_word

    if number.low is None and number.high is None:
        return ""
    low, high = ("…" if end is None else _format(end, form) for end in (number.low, number.high))
    return f"{low} to {high}{range_word(number)}"


def _format(value: float, form: str) -> str:
    """A number by a format string, or by a kind that the report knows, such as 'count'."""
    from habitus.reporting import format_number

    return form.format(value) if "{" in form else format_number(value, form)
