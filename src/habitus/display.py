"""How objects introduce themselves: a short table as text in a terminal, as HTML in a notebook; curves as text."""

from collections.abc import Iterable, Sequence
from html import escape

Rows = Sequence[tuple[str, str]]
_SPARKS = "▁▂▃▄▅▆▇█"


def text_table(title: str, rows: Rows) -> str:
    """A title and a line per row, names in one column and values in the other."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of bars, the lowest and the highest of them filling its height; of many only some are drawn."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round((value - low) / span * (len(_SPARKS) - 1))] for value in values)


def html_table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """The same as an HTML table; every cell is escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(header, 'th')}</thead>" if header else ""
    body = "".join(row(cells, "td") for cells in rows)
    return (
        f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption>{head}<tbody>{body}</tbody></table>"
    )
