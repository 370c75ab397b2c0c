"""All laws on one screen: a line per metric, a column per family of laws, and in each place how the laws ended."""

from habitus.laws.power_law import trend
from habitus.laws.tables import bullets, grid
from habitus.store import Law, Laws

# Column, the optima of each budget, and the law through them or alone.
_FAMILIES = (
    ("s*", "share_optimum", "share_law"),
    ("B_crit", "", "critical_batch"),
    ("N*", "size_optimum", "size_law"),
    ("L*(C)", "", "loss_law"),
    ("K*", "negatives_optimum", "negatives_law"),
)
_WORDS = {
    "boundary": "edge", "monotone": "edge", "flat": "flat", "too_few": "few", "not_identified": "open",
    "disagree": "split",
}  # fmt: skip
_LEGEND = {
    "no trend": "no trend: the exponent's interval holds zero",
    "edge": "edge: the best value lies at the edge of the sweep, or beyond",
    "flat": "flat: no valley above the noise",
    "few": "few: too few points",
    "open": "open: not identified, these runs allow a whole family",
    "split": "split: two ways to the same number disagree",
}


def format_summary(laws: Laws) -> str:
    """How every law ended, and how much more there is to read."""
    rows = [[metric, *(_ended(laws, metric, *names) for _, *names in _FAMILIES)] for metric in laws.metrics]
    legend = [text for word, text in _LEGEND.items() if any(word in cell for row in rows for cell in row[1:])]
    legend.insert(0, "3/4: budgets with an optimum inside the sweep, of all; beside it the law through them")
    parts = [
        grid("Laws by metric", ["metric", *(name for name, *_ in _FAMILIES)], rows),
        bullets("", legend).strip(),
        bullets("Notes", laws.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ended(laws: Laws, metric: str, optimum: str, law: str) -> str:
    """'3/4 ok', '3/3 no trend', '0/3', 'open', or '-' where the axis was not measured."""
    optima = [e.law for e in laws.entries if (e.name, e.metric) == (optimum, metric) and e.budget is not None]
    fitted = [e.law for e in laws.entries if (e.name, e.metric) == (law, metric)]
    held = f"{sum(one.ok for one in optima)}/{len(optima)}" if optima else ""
    # A law through too few optima says no more than the fraction does.
    ends = [_word(one) for one in fitted if not (optima and one.status == "too_few")]
    return " ".join([held, *dict.fromkeys(ends)]).strip() or "-"


def _word(law: Law) -> str:
    if law.ok:
        return "no trend" if trend(law) == "none" else "ok"
    return _WORDS[law.status]
