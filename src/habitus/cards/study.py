"""The card of a study or a store: its runs, laws and plan."""

import math
from collections.abc import Iterable
from pathlib import Path

from habitus.cards.dataset import data_limits, describe_data
from habitus.cards.facts import CARD_FILE, FACTS_FILE, CardFacts, DataFacts, read_plan, shareable_plan
from habitus.cards.markup import bullets, escape, front_matter, hide_paths, join, table
from habitus.cards.run import describe_plan, describe_results
from habitus.files import write_atomic
from habitus.store import (
    INFO_FILE,
    LAW_NAMES,
    LAWS_FILE,
    TEST_TABLE_FILE,
    LawEntry,
    Laws,
    Plan,
    TestTable,
    read_records,
)

_MOST_LAWS = 40


def write_study_card(folder: Path, data: DataFacts | None = None) -> str:
    """README.md and card.json of a study's folder or a store's; returns the card."""
    store = folder if (folder / INFO_FILE).exists() else folder / "store"
    facts = CardFacts.of_folder(folder)
    table_path, plan_path = store / TEST_TABLE_FILE, folder / "plan.json"
    facts = facts.model_copy(
        update={
            "data": data or facts.data,
            "table": TestTable.read(table_path) if table_path.exists() else None,
            "plan": shareable_plan(read_plan(plan_path)) if plan_path.exists() else None,
        }
    )
    card = _study_card(store, facts)
    facts.write(folder / FACTS_FILE)
    write_atomic(folder / CARD_FILE, card.encode())
    return card


def _study_card(store: Path, facts: CardFacts) -> str:
    records = list(read_records(store))
    laws = Laws.read(store / LAWS_FILE) if (store / LAWS_FILE).exists() else None
    checksums = sorted({record.dataset_checksum for record in records})
    name = f"Scaling study on event log {checksums[0][:12]}" if checksums else "Scaling study"
    matter = {"pretty_name": name, "tags": ["habitus", "scaling-laws", "event-log"], "viewer": False}
    done = [record for record in records if record.status == "done"]
    flops = sum(record.flops_nominal or 0.0 for record in records)
    seconds = sum(one.seconds.warmup + one.seconds.train + one.seconds.evaluate for one in records if one.seconds)
    return join(
        front_matter(matter),
        f"# {name}",
        f"{len(done):,} runs ({len(records) - len(done):,} failed), {flops:.3g} FLOPs, {seconds / 3600:.3g} hours of "
        "training and evaluation in all; the laws that they support, and the recipe that follows.",
        "## The recipe",
        *(describe_plan(facts.plan) if facts.plan is not None else ["No plan yet: `habitus plan --laws STORE`."]),
        *(() if facts.table is None else ("## The best run on test users", *describe_results(facts.table))),
        "## Laws",
        *(_laws_part(laws, facts.plan) if laws is not None else ["None fitted yet: `habitus fit STORE`."]),
        "## Data",
        "Not on record." if facts.data is None else describe_data(facts.data),
        "## Limits",
        bullets(_limits(facts)),
        "## Load",
        '```python\nimport habitus as hb\n\nlaws = hb.fit("STORE")  # the folder that holds store.json\n'
        'plan = hb.plan(1e15, "catalogue/recall@10", laws=laws)\n```',
    )


def _laws_part(laws: Laws, plan: Plan | None) -> Iterable[str]:
    wanted = {plan.metric, "batch/loss"} if plan is not None else set(laws.metrics)
    entries = [one for one in laws.entries if one.name in LAW_NAMES and one.metric in wanted]
    entries.sort(key=lambda one: not one.law.values)
    yield "In brackets: 95%. A status other than ok means that the values are not to be relied on."
    yield table(("law", "metric", "status", "values"), [_law_row(entry) for entry in entries[:_MOST_LAWS]])
    if len(entries) > _MOST_LAWS:
        yield f"{len(entries) - _MOST_LAWS:,} more are in {LAWS_FILE}."


def _law_row(entry: LawEntry) -> tuple[str, str, str, str]:
    at = "" if entry.budget is None else f" at {entry.budget:.3g} FLOPs"
    values = [
        f"{escape(name)} = {value:.4g}{_interval(entry, name)}"
        for name, value in entry.law.values.items()
        if isinstance(value, float)
    ]
    return escape(LAW_NAMES[entry.name].title) + at, entry.metric, entry.law.status, "; ".join(values[:6]) or "none"


def _interval(entry: LawEntry, name: str) -> str:
    low, high = entry.law.interval(name)
    if not math.isfinite(low) and not math.isfinite(high):
        return ""
    return " [" + ", ".join(f"{end:.3g}" if math.isfinite(end) else "open" for end in (low, high)) + "]"


def _limits(facts: CardFacts) -> list[str]:
    lines = ["Laws hold for this log, these sizes and budgets; far beyond the largest they are extrapolations."]
    if facts.data is not None:
        lines += data_limits(facts.data)
    return lines + [escape(hide_paths(line), most=400) for line in (facts.plan.warnings if facts.plan else ())]
