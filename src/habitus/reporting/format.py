"""Numbers and lists as people read them: 10¹⁸, 38.9M, 2.4%, [1.9, 3.0], 'a, b and c'."""

import math
import re
from collections.abc import Iterable, Sequence

from habitus.store import LAW_NAMES, Law
from habitus.units import format_bytes, format_seconds

_E_NUMBER = re.compile(r"(?<!\w-)\b\d+(?:\.\d+)?e[+-]?\d{1,2}\b")  # not the hash of a cell, as in 32x2-294296e1
_SUPERSCRIPTS = str.maketrans("0123456789-+.", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺·")
_STATUSES = {
    "boundary": "beyond the sweep",
    "flat": "flat",
    "monotone": "improves to the edge",
    "too_few": "too few points",
    "not_identified": "not identified",
    "misfit": "misfit",
    "disagree": "two readings disagree",
}


def law_name(name: str) -> str:
    """What a law of laws.json is called on the page; an unknown one keeps its name."""
    return LAW_NAMES[name].title if name in LAW_NAMES else name.replace("_", " ")


def power_of_ten(value: float) -> str:
    """10¹⁸ or 3·10¹⁴; 2.5·10¹⁴ where it takes two digits."""
    if value <= 0 or not math.isfinite(value):
        return significant(value)
    exponent = math.floor(math.log10(value) + 1e-9)
    lead = f"{value / 10**exponent:.3g}"
    if lead == "10":
        lead, exponent = "1", exponent + 1
    power = "10" + str(exponent).translate(_SUPERSCRIPTS)
    return power if lead == "1" else f"{lead}·{power}"


def power_range(values: Sequence[float]) -> str:
    """'10¹¹ to 10¹³', of values in order; one where there is one."""
    ends = dict.fromkeys(power_of_ten(value) for value in (values[0], values[-1]))
    return " to ".join(ends)


def superscript(value: float, digits: int = 3) -> str:
    """An exponent in superscript digits."""
    return f"{value:.{digits}f}".translate(_SUPERSCRIPTS)


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
        return typeset_minus(text)
    exponent = math.floor(math.log10(size))
    return typeset_minus(f"{value / 10**exponent:.{digits - 2}f}") + "·10" + str(exponent).translate(_SUPERSCRIPTS)


def typeset_minus(text: str) -> str:
    """Hyphens as minus signs."""
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
    return typeset_minus(f"{100 * value:.{places}f}%")


def rate(value: float) -> str:
    """A learning rate: 2·10⁻³, 0.05."""
    return f"{value:.3g}" if 0.01 <= value < 10 else power_of_ten(value)


def _share(value: float | None) -> str:
    """A part of a whole; an interval may end beyond it, by whatever number."""
    return ">100%" if value is not None and 1 < value < math.inf else percent(value)


def _hours(value: float) -> str:
    """2.2 min, 3.4 h."""
    return format_seconds(3600 * value) if math.isfinite(value) else significant(value)


def _gibibytes(value: float) -> str:
    """44 MiB, 50.2 GiB."""
    return format_bytes(value * 2**30) if math.isfinite(value) else significant(value)


_FORMATS = {
    "plain": significant, "count": count, "percent": _share, "flops": power_of_ten, "rate": rate, "hours": _hours,
    "gib": _gibibytes,
}  # fmt: skip


def format_number(value: float | None, kind: str = "plain") -> str:
    """A number of a kind: plain, count, percent, flops, rate, hours or gib; '–' where it is missing."""
    if value is None:
        return "–"
    if kind == "count" and 0 <= value < 10_000 and value == round(value):
        return f"{value:,.0f}"
    return _FORMATS[kind](value)


def format_interval(law: Law, name: str, kind: str = "plain", digits: int = 3) -> str:
    """'[1.6%, 2.9%]', the 95% interval of a value; '' where there is none."""
    if name not in law.intervals.get("0.95", {}) or name not in law.values:
        return ""
    low, high = law.interval(name)
    if math.isinf(low) and math.isinf(high):
        return "[open]"
    if kind == "plain":
        digits = max(digits, _digits_apart(low, high))
        return f"[{significant(low, digits)}, {significant(high, digits)}]"
    return f"[{format_number(low, kind)}, {format_number(high, kind)}]"


def _digits_apart(low: float, high: float) -> int:
    """Significant digits that show the first of the difference: a loss of 10.55 has ends 10.53 and 10.57, not 10.5."""
    width, size = high - low, max(abs(low), abs(high))
    if not (0 < width < math.inf and size > 0):
        return 0
    return min(7, math.floor(math.log10(size)) - math.floor(math.log10(width)) + 1)


def describe_optimum(law: Law, kind: str = "plain", name: str = "x_opt") -> str:
    """'2.4% [1.9%, 3.0%]', with its status where it does not hold."""
    value = format_number(float(law[name]), kind) if name in law.values else "–"
    status = "" if law.ok else f"({describe_status(law)})"
    return " ".join(part for part in (value, format_interval(law, name, kind), status) if part)


def law_value(law: Law | None, name: str) -> float | None:
    """One value of a law; None where it has none."""
    value = None if law is None else law.values.get(name)
    return value if isinstance(value, float) else None


def describe_status(law: Law) -> str:
    """A status in words; '' for a law that holds."""
    return "" if law.ok else _STATUSES.get(law.status, law.status)


def reason(law: Law) -> str:
    """Why a law does not hold, in its own words."""
    return pretty(law.warnings[0]) if law.warnings else describe_status(law)


def pretty(text: str) -> str:
    """Numbers such as 1e+16 and 2.1e+06 as people read them."""
    return _E_NUMBER.sub(lambda match: power_of_ten(float(match[0])), text)


def format_exponent(law: Law, name: str = "exponent") -> str:
    """'0.617 [0.538, 0.696]', an exponent with its 95% interval."""
    value = typeset_minus(f"{law[name]:.3f}")
    interval = law.intervals.get("0.95", {}).get(name)
    if interval is None:
        return value
    low, high = (typeset_minus(f"{end:.3f}") if math.isfinite(end) else "open" for end in interval.ends())
    return f"{value} [{low}, {high}]"


def join_words(parts: Iterable[str], last: str = "and") -> str:
    """'a, b and c'."""
    *first, end = [*parts] or [""]
    return f"{', '.join(first)} {last} {end}" if first else end


def sentence(*parts: str) -> str:
    """The parts that are not empty, as sentences in one line."""
    sentences = []
    for part in (p.strip() for p in parts):
        if part:
            word = part.split(" ")[0]
            is_name = not word[:1].islower() or any(sign in word for sign in "/*_(")  # as in batch/loss or s*
            text = part if is_name else part[0].upper() + part[1:]
            sentences.append(text if text.endswith((".", "!", "?")) else text + ".")
    return " ".join(sentences)


def format_range(values: Sequence[float], kind: str = "plain") -> str:
    """'1.1% to 3.7%', or the one value."""
    low, high = format_number(min(values), kind), format_number(max(values), kind)
    return low if low == high else f"{low} to {high}"


def plural(n: int, word: str, many: str = "") -> str:
    """'1 run', '3 runs'."""
    return f"{n:,} {word if n == 1 else many or word + 's'}"
