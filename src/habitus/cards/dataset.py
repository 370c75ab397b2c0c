"""The card of a prepared dataset, and the lines about data that the cards of runs and studies share."""

from habitus.cards.facts import DataFacts, FieldFacts
from habitus.cards.markup import bullets, escape, front_matter, join, table
from habitus.store import SPLIT_NAMES

_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
          (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"))  # fmt: skip
_SPLITS = {
    "user": "by user: all events of a user are on one side",
    "time": "by time: later events are validation, the latest test",
    "last": "last events: of each user the last is test, the one before it validation",
}


def dataset_card(data: DataFacts, license_id: str | None = None) -> str:
    """README.md of a dataset's folder."""
    size = next((name for most, name in _SIZES if data.events < most), "n>1T")
    matter = {
        "pretty_name": f"Event log {data.checksum[:12]}",
        **({} if license_id is None else {"license": license_id}),
        "tags": ["habitus", "event-log", "sequential-recommendation", *(["synthetic"] if data.synthetic else [])],
        "size_categories": [size],
        "viewer": False,
    }
    return join(
        front_matter(matter),
        f"# Event log {data.checksum[:12]}",
        "A log of events, prepared by `habitus prepare` for training and evaluation: arrays that are mapped, not read.",
        "## What is in it",
        describe_data(data),
        "## Load",
        '```python\nimport habitus as hb\n\ndataset = hb.Dataset.open("FOLDER")  # the folder of this card\n'
        'run = hb.train(dataset, out="run")\n```',
        "## Limits",
        bullets([*data_limits(data), "The folder holds ids of users and items as they are in the log."]),
        f"Checksum of all files: `{data.checksum}`. This card is not among them: edit it as you like.",
    )


def describe_data(data: DataFacts, seq_len: int | None = None) -> str:
    """Counts, sides, fields and what was left out; `seq_len` where a run's windows are not the dataset's."""
    when = "" if data.days is None else f", {data.days[0]} to {data.days[1]}"
    sides = [
        (name, f"{side.users:,}", f"{side.events:,}", f"{side.queries:,}")
        for name, side in sorted(data.sides.items(), key=lambda one: SPLIT_NAMES.index(one[0]))
    ]
    fields = [_field_row("item", one) for one in data.item_fields]
    fields += [_field_row("event", one) for one in data.event_fields]
    dropped = ", ".join(f"{count:,} {escape(reason.replace('_', ' '))}" for reason, count in data.dropped.items())
    return join(
        f"{data.events:,} events of {data.users:,} users on {data.items:,} items{when}; windows of "
        f"{seq_len or data.seq_len} events. Split {_SPLITS.get(data.split, escape(data.split))}.",
        table(("side", "users", "events", "queries"), sides),
        table(("field", "of", "kind", "filled"), fields),
        f"Rows left out: {dropped}." if dropped else "",
    ).rstrip()


def data_limits(data: DataFacts) -> list[str]:
    """What a reader should know before drawing conclusions."""
    lines = []
    if data.synthetic:
        lines.append("The log is synthetic: nothing here is about people.")
    else:
        lines.append(
            "A log holds what people did where it was recorded: who is not in it, and what was not shown, is not "
            "learnt. Whether it may be passed on, or what was learnt from it, is for whoever recorded it to say."
        )
    if "test" not in data.sides:
        lines.append("There is no test side: whatever is chosen on validation users cannot be checked on others.")
    small = [name for name, side in data.sides.items() if name != "train" and side.users < 100]
    if small:
        lines.append(f"Fewer than 100 users on the {' and '.join(sorted(small))} side: intervals are wide.")
    return lines


def _field_row(of: str, field: FieldFacts) -> tuple[str, str, str, str]:
    return escape(field.name), of, escape(field.kind), "" if field.filled is None else f"{field.filled:.0%}"
