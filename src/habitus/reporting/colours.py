"""The colours of the page and of the PNGs, and the contrast they must keep."""

from functools import cache
from importlib.resources import files
from itertools import pairwise

# From the smallest budget to the largest: the more compute, the stronger the contrast with the page.
_BUDGETS_LIGHT = ("#c2500c", "#c0255f", "#8f1d94", "#50259c", "#1c1a55")
_BUDGETS_DARK = ("#9184f5", "#cf7ff0", "#f583b5", "#fba35c", "#fde36b")
_SERIES_LIGHT = ("#1f5fbf", "#b3420c", "#0b7265", "#8a2a8f", "#7a5c00", "#b0234f", "#44546a", "#2f7a2f")
_SERIES_DARK = ("#7fb0ff", "#ff9f6e", "#5fd3bf", "#e39be8", "#e5c04b", "#ff8fab", "#a9b8cc", "#8fd58f")

LIGHT = {
    "bg": "#fcfcfa", "card": "#ffffff", "ink": "#1b1d22", "soft": "#585d68", "edge": "#d9dad5", "grid": "#ecece8",
    "link": "#1f4fae", "warn": "#8f4400", "warnbg": "#fff4e2", "main": "#1f5fbf", "plan": "#b0234f", "paper": "#6a6357",
    "muted": "#686c76", "focus": "#1f5fbf", "chip": "#eef0f4",
}  # fmt: skip
DARK = {
    "bg": "#121418", "card": "#191c21", "ink": "#e9e9e4", "soft": "#a9aeb8", "edge": "#343942", "grid": "#262a31",
    "link": "#8fb7ff", "warn": "#ffc27a", "warnbg": "#33260f", "main": "#7fb0ff", "plan": "#ff8fab", "paper": "#b3aa9a",
    "muted": "#959ba6", "focus": "#ffd166", "chip": "#262b33",
}  # fmt: skip


def budget_colours(num: int, dark: bool = False) -> list[str]:
    """A colour per budget, the smallest first."""
    anchors = _BUDGETS_DARK if dark else _BUDGETS_LIGHT
    if num == 1:
        return [anchors[2]]
    return [_interpolate(anchors, i / (num - 1)) for i in range(num)]


def series_colours(dark: bool = False) -> tuple[str, ...]:
    """Colours of series that have no order."""
    return _SERIES_DARK if dark else _SERIES_LIGHT


def colour_values(num_budgets: int, dark: bool = False) -> dict[str, str]:
    """The value of every colour name that a figure may use."""
    page = DARK if dark else LIGHT
    values = {f"b{i}": colour for i, colour in enumerate(budget_colours(max(num_budgets, 1), dark))}
    values |= {f"s{i}": colour for i, colour in enumerate(series_colours(dark))}
    return values | {name: page[name] for name in ("main", "plan", "paper", "muted", "ink", "soft")}


def correlation_colours(value: float, faded: bool = False) -> tuple[str, str]:
    """Cell and text colour of a correlation from -1 to 1; the same in light and dark."""
    value = max(-1.0, min(1.0, value))
    middle, end = "#f4f2ee", "#1f5fa8" if value < 0 else "#b8500f"
    share = abs(value) ** 1.2 * (0.25 if faded else 1.0)
    cell = _mix(middle, end, share)
    return cell, "#ffffff" if contrast("#ffffff", cell) > contrast("#000000", cell) else "#000000"


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    bright, dim = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def figure_style(num_budgets: int) -> str:
    """The style sheet of figures. Colours are variables; a mark's class sets `currentColor` to one."""
    classes = "".join(f".{name}{{color:var(--{name})}}" for name in colour_values(num_budgets))
    return asset("figure.css") + classes


@cache
def asset(name: str) -> str:
    """A style sheet, script or template of the page."""
    return files("habitus.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def style_variables(num_budgets: int, dark: bool = False) -> str:
    """The style sheet's variables for one of the two appearances."""
    page = {**(DARK if dark else LIGHT), **colour_values(num_budgets, dark)}
    return "".join(f"--{name}:{value};" for name, value in page.items())


def _interpolate(anchors: tuple[str, ...], share: float) -> str:
    pairs = list(pairwise(anchors))
    at = min(int(share * len(pairs)), len(pairs) - 1)
    return _mix(*pairs[at], share * len(pairs) - at)


def _mix(first: str, second: str, share: float) -> str:
    parts = [round(a + (b - a) * share) for a, b in zip(_rgb(first), _rgb(second), strict=True)]
    return "#" + "".join(f"{p:02x}" for p in parts)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
