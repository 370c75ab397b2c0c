"""The plan on top of the page: the recipe for a budget, every number with its interval and where it comes from."""

from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import (
    count,
    format_number,
    join_words,
    percent,
    power_of_ten,
    pretty,
    rate,
    sentence,
    significant,
)
from habitus.reporting.study import Study
from habitus.store import Plan, Prediction, PrintedRecipe, Quantity, range_word

# What a quantity is called on the page, and the kind of number it is.
_LABELS = {
    "params": ("model size N", "count"), "embedder_share": ("embedder share s", "percent"),
    "batch_sequences": ("batch B (sequences)", "count"), "learning_rate": ("learning rate", "rate"),
    "slots_seen": ("data D (slots)", "count"), "data_ratio": ("D/N", "plain"), "steps": ("steps", "count"),
    "joint_dim": ("joint_dim", "count"), "width": ("width", "count"), "depth": ("depth", "count"),
    "num_negatives": ("extra negatives K", "count"), "stage2_steps": ("stage 2: steps", "count"),
    "stage2_batch_sequences": ("stage 2: batch", "count"), "stage2_learning_rate": ("stage 2: learning rate", "rate"),
    "seq_len": ("window L (events)", "count"), "serve_history": ("history to serve with", "count"),
    "hours": ("time", "hours"), "memory_gib": ("memory", "gib"),
}  # fmt: skip


def plan_exhibit(study: Study) -> Exhibit | None:
    """The plan's recipe with intervals, sources, and the published laws' values beside it."""
    plan = study.plan
    if plan is None:
        return None
    published = {difference.knob: difference.published for difference in plan.differences}
    rows, raw = [], []
    for name, quantity in plan.quantities.items():
        label, kind = _label(name)
        theirs = published.get(name)
        ours = f"{format_number(quantity.value, kind)} {_interval(quantity, kind)}".strip()
        rows.append((label, ours, format_number(theirs, kind), _source(quantity)))
        ends = quantity.low, quantity.high, quantity.range
        raw.append((name, quantity.value, *ends, theirs, quantity.source, quantity.how))
    for p in plan.predictions:
        label = f"predicted {p.metric} after stage {p.stage}"
        rows.append((label, f"{significant(p.value)} {_interval(p, 'plain')}".strip(), "–", _source(p)))
        raw.append((label, p.value, p.low, p.high, "95%", None, p.source, p.how))
    notes = tuple(_notes(plan, study.next_command))
    table = Table(("knob", "value [95%, tried or assumed]", "by the published laws", "from"), tuple(rows), notes)
    sheet = Sheet(("knob", "value", "low", "high", "range", "published", "source", "how"), tuple(raw))
    title = f"Recipe for {power_of_ten(plan.flops)} FLOPs"
    return Exhibit("plan", title, (View(describe_plan(plan), table=table),), sheet)


def describe_plan(plan: Plan) -> str:
    """The plan in a sentence or three."""
    knobs = [
        f"{label} {format_number(plan[name].value, _label(name)[1])}"
        for name, label in (
            ("params", "N ="), ("slots_seen", "D ="), ("embedder_share", "share"), ("batch_sequences", "batch"),
            ("learning_rate", "rate"), ("num_negatives", "K ="),
        )
        if name in plan.quantities
    ]  # fmt: skip
    recipe = f"For {plan.metric} at {power_of_ten(plan.flops)} FLOPs: train {join_words(knobs)}"
    # A number without an interval says nothing that could be held against it: it stays in the table only.
    predictions = [p for p in plan.predictions if p.metric == plan.metric and _interval(p, "plain")]
    expected = _describe_prediction(predictions[-1]) if predictions else ""
    stretch = ""
    if plan.extrapolation is not None and plan.extrapolation.factor > 1.01:
        factor = f"{plan.extrapolation.factor:.3g}"
        stretch = f"the law behind it is stretched {factor} times beyond the largest budget measured here"
    return sentence(recipe, _describe_sources(plan), expected, stretch)


def _describe_sources(plan: Plan) -> str:
    """Which law or cell the knobs come from: it may be another metric's than the one that is served."""
    clauses: list[str] = []
    for name, label in (("params", "N"), ("embedder_share", "the share"), ("num_negatives", "K")):
        quantity = plan.quantities.get(name)
        if quantity is not None and quantity.source != "default" and quantity.how:
            first = pretty(quantity.how.partition(";")[0].partition(", ")[0]).removeprefix("the ")
            published = " (published)" if quantity.source == "published" else ""
            verb = "on" if clauses else "rests on"
            clauses.append(f"{label} {verb} the {first}{published}")
    return ", ".join(clauses)


def _describe_prediction(prediction: Prediction) -> str:
    interval = _interval(prediction, "plain")
    return f"expect {significant(prediction.value)} {interval} after stage {prediction.stage}"


def _notes(plan: Plan, next_command: str | None) -> list[str]:
    """The next command, memory, the paper's printed recipe with its price, and the warnings."""
    files = "stage1.toml" if plan.stage2 is None else "stage1.toml stage2.toml"
    notes = [f"Next: {next_command or f'habitus train {files} --data DATASET --out RUN'}"]
    notes += [f"Stage {m.stage} does not fit {m.device}: {m.change}" for m in plan.memory if m.fits is False]
    if plan.printed is not None:
        notes.append(_describe_printed_recipe(plan.printed))
    return notes + [pretty(warning) for warning in plan.warnings]


def _describe_printed_recipe(printed: PrintedRecipe) -> str:
    """The paper's recipe at this budget, as printed, and what Equation 1 charges for it."""
    low, high = printed.num_negatives
    knobs = (
        f"N {count(printed.params)}, D/N {significant(printed.data_ratio_6nd, 3)} (6ND convention), "
        f"share {percent(printed.embedder_share)}, batch {printed.batch_sequences:,}, "
        f"rate {rate(printed.learning_rate)}, K {count(low)} to {count(high)}"
    )
    price = f"{power_of_ten(printed.flops)} FLOPs for it, {printed.times_budget:.3g} times the budget"
    return f"The paper's printed recipe at this budget: {knobs}. Equation 1 charges {price}."


def _label(name: str) -> tuple[str, str]:
    return _LABELS.get(name, (name.replace("_", " "), "plain"))


def _source(number: Quantity | Prediction) -> str:
    return f"{number.source}: {pretty(number.how)}"


def _interval(number: Quantity | Prediction, kind: str) -> str:
    """'[2M, 3M]', with 'open' for a missing end; '' where there is none, or where it is as narrow as the value."""
    if number.low is None and number.high is None:
        return ""
    low, high = ("open" if end is None else format_number(end, kind) for end in (number.low, number.high))
    if low == high == format_number(number.value, kind):
        return ""
    return f"[{low}, {high}{range_word(number)}]"
