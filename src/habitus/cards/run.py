"""The card of a run: what it is, how good, from what, and how to load it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from habitus.cards.dataset import data_limits, describe_data
from habitus.cards.facts import CARD_FILE, FACTS_FILE, CardFacts, find_plan, shareable_plan
from habitus.cards.markup import bullets, escape, front_matter, hide_paths, join, table
from habitus.files import write_atomic
from habitus.recipe import Recipe
from habitus.record import Metric, Record
from habitus.store import REGIMES, TABLE_METRICS, Plan, TableRow, TestTable, direction_of, read_run_record
from habitus.units import format_bytes, format_seconds

_NORMAL_95 = 1.959964
_TASK = {"type": "sequential-recommendation", "name": "Next item of a user's history"}
_VALIDATED = tuple(f"{regime}/{name}" for regime in REGIMES for name in (*TABLE_METRICS, "mrr@10", "coverage@10"))
_EXPORTED = (
    "The folder holds ids, categories and vectors of the items, and up to 2,048 query vectors of histories to measure "
    "approximate search with; no events and no ids of users."
)
_ORACLE = "oracle"  # of a synthetic world: the best possible


def write_run_card(folder: Path, record: Record, facts: CardFacts) -> None:
    """README.md and card.json of a run."""
    facts.write(folder / FACTS_FILE)
    write_atomic(folder / CARD_FILE, run_card(record, facts).encode())


def update_run_card(folder: Path, **changes: Any) -> str:
    """The card of a finished run, written again with more facts (fields of CardFacts)."""
    record = read_run_record(folder)
    facts = CardFacts.of_folder(folder).model_copy(update=changes)
    write_run_card(folder, record, facts)
    return run_card(record, facts)


def add_plan(folder: Path, recipe_file: Path) -> None:
    """Put the plan into the card of a run whose recipe is the plan's; where there is none, nothing happens."""
    if not (folder / FACTS_FILE).exists() or CardFacts.of_folder(folder).plan is not None:
        return
    plan = find_plan(recipe_file)
    if plan is not None and follows(plan, read_run_record(folder).recipe):
        update_run_card(folder, plan=shareable_plan(plan))


def follows(plan: Plan, recipe: Recipe) -> bool:
    """Whether a recipe is one of the plan's, or one of them refitted with the validation events."""
    return _identity(recipe) in [_identity(one) for one in (plan.stage1, plan.stage2) if one is not None]


def _identity(recipe: Recipe) -> tuple[Any, ...]:
    train = recipe.train.model_copy(update={"parent": None, "steps": 1})
    return recipe.model, train, recipe.data.model_copy(update={"include_validation": False})


def run_card(record: Record, facts: CardFacts, *, name: str | None = None, license_id: str | None = None) -> str:
    """The card of a run; with a name, that of an exported folder."""
    title = f"habitus-{record.recipe_hash[:12]}" if name is None else name
    matter = {
        "library_name": "habitus",
        **({} if license_id is None else {"license": license_id}),
        "tags": ["habitus", "recommender-system", "sequential-recommendation", "event-log"],
        **_model_index(title, record, facts),
    }
    head = (front_matter(matter), f"# {escape(title)}")
    if record.status == "failed":
        reason = escape(hide_paths(str(record.reason)), most=500)
        return join(*head, f"This run failed after {record.steps:,} steps: {reason}.", *_recipe_part(record))
    return join(
        *head,
        _opening(record, facts),
        "## How good it is",
        *_results(record, facts),
        "## Data",
        "Not on record." if facts.data is None else describe_data(facts.data, record.recipe.data.seq_len),
        "## Size and cost",
        table(("what", "how much"), _size_rows(record)),
        *_recipe_part(record),
        "## Where the recipe comes from",
        *_origin(facts),
        "## Limits",
        bullets(_limits(record, facts) + ([_EXPORTED] if name is not None else [])),
        "## Load",
        _load_part(exported=name is not None),
    )


def _opening(record: Record, facts: CardFacts) -> str:
    items = "every item" if facts.data is None else f"each of {facts.data.items:,} items"
    return (
        f"A behavioral foundation model: from a user's past events it scores {items} as the next one. "
        "An item is read from its fields, so that new items are scored too. "
        f"Stage {record.recipe.train.stage}, trained by "
        f"habitus {escape(record.versions.get('habitus', '?'))}."
    )


def _model_index(title: str, record: Record, facts: CardFacts) -> dict[str, Any]:
    """Metrics as the hub lists them: on test users where they were measured, else on validation users."""
    if facts.table is not None:
        split, measured = facts.table.side, facts.table.rows[0].metrics
    else:
        split = "validation" if record.evaluation is None else record.evaluation.side
        measured = {
            metric: record.metrics[f"catalogue/{metric}"]
            for metric in TABLE_METRICS
            if f"catalogue/{metric}" in record.metrics
        }
    if not measured:
        return {}
    dataset = {"type": "event-log", "name": f"event log {record.dataset_checksum[:12]}", "split": split}
    metrics = [
        {"type": metric.replace("@", "_at_"), "name": f"{metric} over the catalogue", "value": measured[metric].value}
        for metric in measured
    ]
    return {"model-index": [{"name": title, "results": [{"task": _TASK, "dataset": dataset, "metrics": metrics}]}]}


def _results(record: Record, facts: CardFacts) -> Iterable[str]:
    if facts.table is not None:
        yield from describe_results(facts.table)
    rows = [(name, _with_interval(record.metrics[name])) for name in _VALIDATED if name in record.metrics]
    if rows:
        side = "validation" if record.evaluation is None else record.evaluation.side
        yield f"At the end of training, on {side} users (± is 95%; they may have chosen the recipe):"
        yield table(("metric", "value"), rows)
    elif facts.table is None:
        yield "Not measured."


def describe_results(results: TestTable) -> Iterable[str]:
    """A run and baselines on the same queries, then the differences."""
    chosen = " Nothing was chosen on them." if results.side == "test" else ""
    yield (
        f"{results.queries:,} queries of {results.users:,} {results.side} users, ranked among the whole catalogue; "
        f"± is 95%.{chosen} Recall and NDCG are better when higher, the loss (nats) when lower."
    )
    yield table(("", *TABLE_METRICS), _score_rows(results))
    yield "The model less each, paired by query, with its 95% interval over users:"
    yield table(("less", *TABLE_METRICS), _difference_rows(results))


def _score_rows(results: TestTable) -> Iterable[tuple[str, ...]]:
    for row in results.rows:
        name = "**model**" if row is results.rows[0] else _scorer(row.scorer)
        yield name, *(_with_interval(row.metrics[metric]) for metric in TABLE_METRICS)


def _difference_rows(results: TestTable) -> Iterable[tuple[str, ...]]:
    for row in results.rows[1:]:
        yield _scorer(row.scorer), *(str(row.differences.get(metric, "")) for metric in TABLE_METRICS)


def _scorer(name: str) -> str:
    return f"{escape(name)} (best possible)" if name == _ORACLE else escape(name)


def _with_interval(metric: Metric) -> str:
    return f"{metric.value:.4f}" + (f" ± {_NORMAL_95 * metric.se:.4f}" if metric.se else "")


def _size_rows(record: Record) -> list[tuple[str, str]]:
    rows = []
    if record.params is not None:
        parts = record.params
        rows.append(("parameters", f"{parts.total:,}: embedder {parts.embedder:,}, contextualizer "
                     f"{parts.contextualizer:,}; tables of tokens and categories {parts.vocabulary:,}"))  # fmt: skip
    passes = f"{record.epochs:.3g} passes" if record.epochs != 1 else "one pass"
    targets = "" if record.unique_targets is None else f"{record.queries_seen:,} of them targets, "
    rows.append(("training", f"{record.steps:,} steps, {record.events_seen:,} events, {targets}{passes}"))
    if record.flops_nominal is not None:
        executed = "" if record.flops_executed is None else f", {record.flops_executed:.3g} as run"
        rows.append(("FLOPs", f"{record.flops_nominal:.3g} nominal{executed}"))
    if record.seconds is not None:
        spent = record.seconds.warmup + record.seconds.train
        device = record.hardware.get("device", "?")
        device = record.hardware.get("cpu", device) if device == "cpu" else device
        rows.append(
            ("time", f"{format_seconds(spent)} on {escape(device)}, {escape(record.hardware.get('precision'))}")
        )
    peak = record.memory.get("device_peak") or record.memory.get("process_peak")
    if peak:
        rows.append(("peak memory", format_bytes(peak)))
    return rows


def _recipe_part(record: Record) -> tuple[str, ...]:
    parent = "" if record.parent_hash is None else f" It continues the run `{record.parent_hash[:12]}`."
    versions = ", ".join(f"{escape(name)} {escape(version)}" for name, version in sorted(record.versions.items()))
    return (
        "## Recipe",
        f"Recipe `{record.recipe_hash[:12]}` on dataset `{record.dataset_checksum[:12]}`; {versions}.{parent}",
        f"```toml\n{record.recipe.to_toml().strip()}\n```",
    )


def _origin(facts: CardFacts) -> Iterable[str]:
    if facts.plan is not None:
        yield from describe_plan(facts.plan)
    if facts.search is not None:
        search = facts.search
        yield (
            f"Found by a search of {format_seconds(search.seconds)} over shapes and passes; chosen by "
            f"`{search.metric}` on validation users: {escape(search.chosen)}."
        )
        yield table(("tried", search.metric), [(escape(one.name), f"{one.value:.4f}") for one in search.trials])
    if facts.plan is None and facts.search is None:
        yield "Written by hand, or by a plan that is not on record."


def describe_plan(plan: Plan) -> Iterable[str]:
    """The numbers of a plan with their intervals and the laws that gave them; then what it predicted."""
    yield (
        f"A plan for `{plan.metric}` at {plan.flops:.3g} FLOPs, from the laws in {escape(Path(plan.laws).name)}. "
        "In brackets: 95%, or the ends of what was tried."
    )
    yield table(
        ("knob", "value", "from", "by"),
        [
            (escape(name), _range(one.value, one.low, one.high), one.source, escape(hide_paths(one.how), most=200))
            for name, one in plan.quantities.items()
        ],
    )
    if plan.predictions:
        yield "Predicted before it ran:"
        yield table(
            ("metric", "stage", "value", "from"),
            [
                (one.metric, str(one.stage), _range(one.value, one.low, one.high), one.source)
                for one in plan.predictions
            ],
        )


def _range(value: float, low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return f"{value:.4g}"
    return f"{value:.4g} [" + ", ".join("open" if end is None else f"{end:.3g}" for end in (low, high)) + "]"


def _limits(record: Record, facts: CardFacts) -> list[str]:
    lines = []
    if facts.table is None:
        lines.append("Not measured on test users: `habitus card RUN --data DATASET` adds the table with baselines.")
    elif facts.table.side != "test":
        lines.append("The dataset has no test side: the users above may have chosen the model.")
    else:
        for row in facts.table.rows[1:]:
            if row.scorer == _ORACLE:
                continue
            worse = metrics_where_worse(row)
            even = [metric for metric in _not_better(row) if metric not in worse]
            lines += [f"Worse than {_scorer(row.scorer)} on {', '.join(worse)}."] if worse else []
            lines += [f"Not shown to be better than {_scorer(row.scorer)} on {', '.join(even)}."] if even else []
    if record.recipe.data.include_validation:
        lines.append("Trained on the validation events too: only the test side can score it.")
    if record.epochs > 1:
        lines.append(f"Passed over its log {record.epochs:.3g} times: laws for a single pass do not describe it.")
    if facts.data is not None:
        lines += data_limits(facts.data)
    lines.append(
        "Scores say what people like these did next, not what is good for them or what they would do if shown other "
        "items. Popular items are learnt best; nothing was done about that here."
    )
    return lines + [escape(hide_paths(line), most=400) for line in (facts.plan.warnings if facts.plan else ())]


def metrics_where_worse(row: TableRow) -> list[str]:
    """The metrics in which the model is worse than a baseline beyond the noise; none of a world's oracle."""
    if row.scorer == _ORACLE:
        return []
    return [
        metric
        for metric, less in row.differences.items()
        if less.low is not None
        and less.high is not None
        and (less.high < 0 if direction_of(metric) == "max" else less.low > 0)
    ]


def _not_better(row: TableRow) -> list[str]:
    """The metrics in which the model is not better than a baseline beyond the noise."""
    return [
        metric
        for metric, less in row.differences.items()
        if ((less.low or less.value) <= 0 if direction_of(metric) == "max" else (less.high or less.value) >= 0)
    ]


def _load_part(exported: bool) -> str:
    folder = (
        'run = hb.load("FOLDER")  # this folder, or huggingface_hub.snapshot_download("USER/NAME")'
        if exported
        else 'run = hb.load("RUN", dataset="DATASET")  # the folder of this card; the dataset, the first time'
    )
    return (
        f"```python\nimport habitus as hb\n\n{folder}\nrun.recommend([ITEM_ID, ITEM_ID], k=10)  # oldest first\n```\n\n"
        "`habitus serve` serves it over HTTP, `habitus evaluate` measures it, `habitus embed` embeds new items."
    )
