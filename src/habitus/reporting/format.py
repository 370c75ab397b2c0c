"""Numbers as people read them: 10¹⁸, 38.9M, 2.4%, [1.9, 3.0]."""

import math
import re
from collections.abc import Iterable, Sequence

from habitus.store import Law
from habitus.units import format_bytes, format_seconds

_E_NUMBER = re.compile(r"(?<!\w-)\b\d+(?:\.\d+)?e[+-]?\d{1,2}\b")  # not the hash of a cell, as in 32x2-294296e1
_RAISED = str.maketrans("0123456789-+.", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺·")
_WORDS = {
    "boundary": "beyond the sweep",
    "flat": "flat",
    "monotone": "improves to the edge",
    "too_few": "too few points",
    "not_identified": "not identified",
    "disagree": "two readings disagree",
}

# What the entries of laws.json are called on the page.
_LAWS = {
    "both_approaches": "two approaches to N*", "critical_batch": "critical batch", "data_law": "D*(C) as realised",
    "data_law_6nd": "D*(C) by C/6N", "data_law_grid": "D*(C) on the grid", "depth_optimum": "depth axis: best share",
    "loss_law": "L*(C) along the frontier", "negatives_law": "K*(C)", "negatives_optimum": "K*",
    "negatives_shared_alpha_law": "K*(C), shared exponent", "negatives_shared_alpha_optimum": "K*, shared exponent",
    "share_law": "s*(C)", "share_optimum": "s*", "size_law": "N*(C)", "size_law_grid": "N*(C) on the grid",
    "size_law_parabola": "N*(C) by parabolas", "size_optimum": "N*", "size_parabola": "N* by parabola",
    "surface": "surface L(N, D)", "surface_optimum_10x": "surface L(N, D) at ten times the budget",
}  # fmt: skip


def law_name(name: str) -> str:
    """What a law of laws.json is called on the page; an unknown one keeps its name."""
    return _LAWS.get(name, name.replace("_", " "))


def power_of_ten(value: float) -> str:
    """10¹⁸ or 3·10¹⁴; 2.5·10¹⁴ where it takes two digits."""
    if value <= 0 or not math.isfinite(value):
        return significant(value)
    exponent = math.floor(math.log10(value) + 1e-9)
    lead = f"{value / 10**exponent:.3g}"
    if lead == "10":
        lead, exponent = "1", exponent + 1
    raised = "10" + str(exponent).translate(_RAISED)
    return raised if lead == "1" else f"{lead}·{raised}"


def raised(value: float, digits: int = 3) -> str:
    """An exponent in raised figures."""
    return f"{value:.{digits}f}".translate(_RAISED)


def significant(value: float | None, digits: int = 4) -> str:
    """So many significant digits, without an exponent where that stays short."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "open"
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-4 <= size < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{value:.{places}f}"
        return minus(text)
    exponent = math.floor(math.log10(size))
    return minus(f"{value / 10**exponent:.{digits - 2}f}") + "·10" + str(exponent).translate(_RAISED)


def minus(text: str) -> str:
    return text.replace("-", "−")


def count(value: float | None) -> str:
    """38.9M, 532k, 2.63B: three significant digits and a letter."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "open"
    for letter, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * unit:
            scaled = value / unit
            if scaled >= 9995:
                return power_of_ten(value)
            return f"{scaled:.3g}{letter}" if scaled < 999.5 else f"{scaled:.0f}{letter}"
    return f"{value:.3g}"


def percent(value: float | None, digits: int = 2) -> str:
    """2.4% of 0.024."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "open"
    size = abs(100 * value)
    if 0 < size < 0.005:
        return "<0.01%"
    places = 0 if size == 0 or size >= 99.5 else max(0, digits - 1 - math.floor(math.log10(size)))
    return minus(f"{100 * value:.{places}f}%")


def rate(value: float) -> str:
    """A learning rate: 2·10⁻³, 0.05."""
    return f"{value:.3g}" if 0.01 <= value < 10 else power_of_ten(value)


def share(value: float | None) -> str:
    """A part of a whole; an interval may end beyond it, by whatever number."""
    return ">100%" if value is not None and 1 < value < math.inf else percent(value)


def hours(value: float) -> str:
    """2.2 min, 3.4 h."""
    return format_seconds(3600 * value) if math.isfinite(value) else significant(value)


def gibibytes(value: float) -> str:
    """44 MiB, 50.2 GiB."""
    return format_bytes(value * 2**30) if math.isfinite(value) else significant(value)


FORMATS = {
    "plain": significant, "count": count, "percent": share, "flops": power_of_ten, "rate": rate, "hours": hours,
    "gib": gibibytes,
}  # fmt: skip


def number(value: float | None, kind: str = "plain") -> str:
    """A number of a kind."""
    if value is None:
        return "–"
    if kind == "count" and 0 <= value < 10_000 and value == round(value):
        return f"{value:,.0f}"
    return FORMATS[kind](value)


def interval(law: Law, name: str, kind: str = "plain", digits: int = 3) -> str:
    """'[1.6%, 2.9%]', the 95% interval of a value; '' where there is none."""
    if name not in law.intervals.get("0.95", {}) or name not in law.values:
        return ""
    low, high = law.interval(name)
    if math.isinf(low) and math.isinf(high):
        return "[open]"
    if kind == "plain":
        return f"[{significant(low, digits)}, {significant(high, digits)}]"
    return f"[{number(low, kind)}, {number(high, kind)}]"


def value_of(law: Law | None, name: str) -> float | None:
    """One value of a law; None where it has none."""
    found = None if law is None else law.values.get(name)
    return found if isinstance(found, float) else None


def state(law: Law) -> str:
    """A status in words; '' for a law that holds."""
    return "" if law.ok else _WORDS.get(law.status, law.status)


def reason(law: Law) -> str:
    """Why a law does not hold, in its own words."""
    return pretty(law.warnings[0]) if law.warnings else state(law)


def pretty(text: str) -> str:
    """Numbers such as 1e+16 and 2.1e+06 as people read them."""
    return _E_NUMBER.sub(lambda found: power_of_ten(float(found[0])), text)


def exponent(law: Law, name: str = "exponent") -> str:
    """'0.617 [0.538, 0.696]', an exponent with its 95% interval."""
    words = minus(f"{law[name]:.3f}")
    found = law.intervals.get("0.95", {}).get(name)
    if found is None:
        return words
    low, high = (minus(f"{end:.3f}") if math.isfinite(end) else "open" for end in found.ends())
    return f"{words} [{low}, {high}]"


def listed(parts: Iterable[str], last: str = "and") -> str:
    """'a, b and c'."""
    known = list(parts)
    if len(known) <= 1:
        return "".join(known)
    return f"{', '.join(known[:-1])} {last} {known[-1]}"


def sentence(*parts: str) -> str:
    """The parts that are not empty, as sentences in one line."""
    told = []
    for part in (p.strip() for p in parts):
        if part:
            word = part.split(" ")[0]
            kept = not word[:1].islower() or any(sign in word for sign in "/*_(")  # names and letters stay as they are
            first = part if kept else part[0].upper() + part[1:]
            told.append(first if first.endswith((".", "!", "?")) else first + ".")
    return " ".join(told)


def span(values: Sequence[float], kind: str = "plain") -> str:
    """'1.1% to 3.7%', or the one value."""
    low, high = min(values), max(values)
    told = number(low, kind), number(high, kind)
    return told[0] if told[0] == told[1] else f"{told[0]} to {told[1]}"


def plural(n: int, word: str, many: str = "") -> str:
    """'1 run', '3 runs'."""
    return f"{n:,} {word if n == 1 else many or word + 's'}"
