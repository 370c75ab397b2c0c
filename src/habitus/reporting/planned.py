"""The plan on top of the page: the recipe for a budget, every number with its interval and where it comes from.

Read from the plan's JSON, key by key: what a plan lacks is not shown.
"""

from collections.abc import Mapping
from typing import Any

from habitus.errors import ConfigError
from habitus.reporting.figure import Block, Sheet, Table, View
from habitus.reporting.format import count, listed, number, percent, power_of_ten, pretty, rate, sentence, significant
from habitus.reporting.study import Study

_NAMES = {
    "params": ("model size N", "count"), "embedder_share": ("embedder share s", "percent"),
    "batch_sequences": ("batch B (sequences)", "count"), "learning_rate": ("learning rate", "rate"),
    "slots_seen": ("data D (slots)", "count"), "data_ratio": ("D/N", "plain"), "steps": ("steps", "count"),
    "joint_dim": ("joint_dim", "count"), "width": ("width", "count"), "depth": ("depth", "count"),
    "num_negatives": ("extra negatives K", "count"), "stage2_steps": ("stage 2: steps", "count"),
    "stage2_batch_sequences": ("stage 2: batch", "count"), "stage2_learning_rate": ("stage 2: learning rate", "rate"),
    "hours": ("time", "hours"), "memory_gib": ("memory", "gib"),
}  # fmt: skip


def plan_block(study: Study) -> Block | None:
    """The plan's recipe with intervals, sources, and the published laws' values beside it."""
    plan = study.plan
    if plan is None:
        return None
    try:
        return _block(plan, study.next_command)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the plan cannot be shown: {type(error).__name__} {error}",
            expected="a plan as `habitus plan --register plan.json` or `--json` writes it",
        ) from error


def _block(plan: Mapping[str, Any], next_command: str | None) -> Block:
    published = {str(d.get("knob")): d.get("published") for d in plan.get("differences", ())}
    rows, raw = [], []
    for name, q in _quantities(plan):
        word, kind = _named(name)
        other = published.get(name)
        ours = f"{number(float(q['value']), kind)} {_ends(q, kind)}".strip()
        beside = "–" if other is None else number(float(other), kind)
        rows.append((word, ours, beside, f"{q.get('source', '')}: {pretty(str(q.get('how', '')))}"))
        raw.append((name, q["value"], q.get("low"), q.get("high"), other, q.get("source"), q.get("how")))
    for p in plan.get("predictions", ()):
        name = f"predicted {p['metric']}" + (f" after stage {p['stage']}" if "stage" in p else "")
        ours = f"{significant(p['value'])} {_ends(p, 'plain')}".strip()
        rows.append((name, ours, "–", f"{p.get('source', '')}: {pretty(str(p.get('how', '')))}"))
        raw.append((name, p["value"], p.get("low"), p.get("high"), None, p.get("source"), p.get("how")))
    table = Table(
        ("knob", "value [95%]", "by the published laws", "from"), tuple(rows), tuple(_notes(plan, next_command))
    )
    sheet = Sheet(("knob", "value", "low95", "high95", "published", "source", "how"), tuple(raw))
    title = f"Recipe for {power_of_ten(float(plan.get('flops', 0)))} FLOPs"
    return Block("plan", title, (View(plan_words(plan), table=table),), sheet)


def plan_words(plan: Mapping[str, Any]) -> str:
    """The plan in a sentence or three."""
    known = dict(_quantities(plan))

    def told(name: str, word: str) -> str:
        return f"{word} {number(float(known[name]['value']), _named(name)[1])}" if name in known else ""

    knobs = [
        told("params", "N ="), told("slots_seen", "D ="), told("embedder_share", "share"),
        told("batch_sequences", "batch"), told("learning_rate", "rate"), told("num_negatives", "K ="),
    ]  # fmt: skip
    budget = power_of_ten(float(plan.get("flops", 0)))
    words = f"For {plan.get('metric')} at {budget} FLOPs: train {listed(k for k in knobs if k)}"
    # A number without an interval says nothing that could be held against it: it stays in the table.
    expected = [p for p in plan.get("predictions", ()) if p["metric"] == plan.get("metric") and _ends(p, "plain")]
    more = _expected(expected[-1]) if expected else ""
    reach = plan.get("extrapolation") or {}
    far = ""
    if reach.get("factor", 0) > 1.01:
        far = f"the law behind it is stretched {reach['factor']:.3g} times beyond the largest budget measured here"
    return sentence(words, _stands_on(known), more, far)


def _stands_on(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Which law or cell the knobs come from: a plan may ask another metric than the one that is served."""
    told = []
    for name, word in (("params", "N"), ("embedder_share", "the share"), ("num_negatives", "K")):
        source, how = (str(known.get(name, {}).get(key, "")) for key in ("source", "how"))
        if source in ("this study", "published") and how:
            first = pretty(how.partition(";")[0].partition(", ")[0]).removeprefix("the ")
            told.append(f"{word} on the {first}" + (" (published)" if source == "published" else ""))
    return f"{told[0].replace(' on ', ' rests on ', 1)}{''.join(f', {one}' for one in told[1:])}" if told else ""


def _expected(prediction: Mapping[str, Any]) -> str:
    stage = f" after stage {prediction['stage']}" if "stage" in prediction else ""
    return f"expect {significant(prediction['value'])} {_ends(prediction, 'plain')}{stage}"


def _notes(plan: Mapping[str, Any], next_command: str | None) -> list[str]:
    """The next command, memory, the paper's printed recipe with its price, and the warnings."""
    notes = []
    files = " ".join(f"{stage}.toml" for stage in ("stage1", "stage2") if isinstance(plan.get(stage), dict))
    if files:
        notes.append(f"Next: {next_command or f'habitus train {files} --data DATASET --out RUN'}")
    for memory in plan.get("memory", ()):
        if memory.get("fits") is False:
            notes.append(f"Stage {memory.get('stage')} does not fit {memory.get('device')}: {memory.get('change')}")
    if plan.get("printed"):
        notes.append(_printed_words(plan["printed"]))
    return notes + [pretty(str(w)) for w in plan.get("warnings", ())]


def _printed_words(printed: Mapping[str, Any]) -> str:
    """The paper's recipe at this budget, as printed, and what Equation 1 charges for it."""
    low, high = printed["num_negatives"]
    told = [
        f"N {count(printed['params'])}",
        f"D/N {significant(printed['data_ratio_6nd'], 3)} (6ND convention)",
        f"share {percent(printed['embedder_share'])}",
        f"batch {printed['batch_sequences']:,}",
        f"rate {rate(printed['learning_rate'])}",
        f"K {count(low)} to {count(high)}",
    ]
    price = f"{power_of_ten(printed['flops'])} FLOPs for it, {printed['times_budget']:.3g} times the budget"
    return f"The paper's printed recipe at this budget: {', '.join(told)}. Equation 1 charges {price}."


def _quantities(plan: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = plan.get("quantities", {})
    return [(str(k), v) for k, v in found.items() if isinstance(v, dict) and isinstance(v.get("value"), int | float)]


def _named(name: str) -> tuple[str, str]:
    return _NAMES.get(name, (name.replace("_", " "), "plain"))


def _ends(quantity: Mapping[str, Any], kind: str) -> str:
    low, high = quantity.get("low"), quantity.get("high")
    if low is None and high is None:
        return ""
    told = ["open" if end is None else number(float(end), kind) for end in (low, high)]
    if told[0] == told[1] == number(float(quantity["value"]), kind):
        return ""
    return f"[{told[0]}, {told[1]}]"
