"""All laws on one screen: a line per metric, a column per family of laws, and in each place how the laws ended."""

from collections.abc import Sequence

from habitus.laws.power_law import trend
from habitus.laws.tables import bullets, grid
from habitus.store import LAW_NAMES, Law, LawEntry, Laws
from habitus.units import pluralize

_WORDS = {
    "boundary": "edge", "monotone": "edge", "flat": "flat", "too_few": "few", "not_identified": "open",
    "misfit": "misfit", "disagree": "split",
}  # fmt: skip
_ON_REQUEST = ("window", "shape", "dropout", "recipe")  # columns of axes that a study runs only where they are named
_LEGEND = {
    "no trend": "no trend: the exponent's interval holds zero",
    "edge": "edge: the best value lies at the edge of the sweep, or beyond",
    "flat": "flat: no valley above the noise",
    "few": "few: too few points",
    "open": "open: not identified, these runs allow a whole family",
    "misfit": "misfit: the form misses its points by more than seeds differ",
    "split": "split: two ways to the same number disagree",
}


def format_summary(laws: Laws) -> str:
    """How every law ended, and how much more there is to read."""
    groups = {"Laws by metric": laws.entries} | {
        f"Laws of {group.name}, {pluralize(len(group.runs), 'run')}, fitted apart": group.entries
        for group in laws.groups
    }
    fitted = {entry.name for entries in groups.values() for entry in entries}
    columns = list(
        dict.fromkeys(
            law.column
            for law in LAW_NAMES.values()
            if law.column and (law.column not in _ON_REQUEST or law.name in fitted)
        )
    )
    tables = {
        title: [[metric, *(_ended(entries, metric, column) for column in columns)] for metric in laws.metrics]
        for title, entries in groups.items()
    }
    ends = [cell for rows in tables.values() for row in rows for cell in row[1:]]
    legend = [text for word, text in _LEGEND.items() if any(word in cell for cell in ends)]
    legend.insert(0, "3/4: budgets with an optimum inside the sweep, of all; beside it the law through them")
    parts = [
        *(grid(title, ["metric", *columns], rows) for title, rows in tables.items()),
        bullets("", legend).strip(),
        bullets("Notes", laws.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ended(all_entries: Sequence[LawEntry], metric: str, column: str) -> str:
    """'3/4 ok', '3/3 no trend', '0/3', 'open', or '-' where the axis was not measured."""
    per_budget = {law.name: law.per_budget for law in LAW_NAMES.values() if law.column == column}
    entries = [entry for entry in all_entries if entry.metric == metric and entry.name in per_budget]
    optima = [entry.law for entry in entries if per_budget[entry.name] and entry.budget is not None]
    fitted = [entry.law for entry in entries if not per_budget[entry.name]]
    held = f"{sum(one.ok for one in optima)}/{len(optima)}" if optima else ""
    # A law through too few optima says no more than the fraction does.
    ends = [_word(one) for one in fitted if not (optima and one.status == "too_few")]
    return " ".join([held, *dict.fromkeys(ends)]).strip() or "-"


def _word(law: Law) -> str:
    if law.ok:
        return "no trend" if trend(law) == "none" else "ok"
    return _WORDS[law.status]
