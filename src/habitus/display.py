"""How objects introduce themselves: a short table as text in a terminal, as HTML in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape

Rows = Sequence[tuple[str, str]]


def text_table(title: str, rows: Rows) -> str:
    """A title and a line per row, names in one column and values in the other."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def html_table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """The same as an HTML table; every cell is escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(header, 'th')}</thead>" if header else ""
    body = "".join(row(cells, "td") for cells in rows)
    return (
        f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption>{head}<tbody>{body}</tbody></table>"
    )
