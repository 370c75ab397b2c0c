"""Text of cards: YAML in front, Markdown behind it. What users have named cannot become markup in either."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_CHARACTERS = 80  # of a name in a table
# All but letters, digits and what means nothing where it stands: an underline inside a word, a colon in a sentence.
_MARKUP = re.compile(
    r"[^\w ,;%()'/….:=+@-]"
    r"|@(?!\d+(?![\w.]))|:(?=/)|(?<=[wW])\."  # mentions and links that a host makes by itself
    r"|(?<![^\W_])_|_(?![^\W_])|^[-+=]|(?<=^\d)\.(?= )"  # emphasis, lists, headings
)
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:;,'\"]+[/\\])*([^\s/\\:;,'\"]+)")


def front_matter(values: Mapping[str, Any]) -> str:
    """The values as the YAML block that opens a card."""
    return "\n".join(["---", *_yaml_lines(values), "---"])


def escape(text: object, most: int = MOST_CHARACTERS) -> str:
    """A text of the user's for a line of Markdown: shortened, on one line, and nothing in it is markup."""
    name = clean(text)
    name = name if len(name) <= most else name[: most - 1] + "…"
    return re.sub(_MARKUP, lambda match: f"&#{ord(match[0])};", name)


def clean(text: object) -> str:
    """A text on one line, without characters that cannot be seen."""
    line = " ".join(str(text).split())
    return "".join(char for char in line if char == " " or unicodedata.category(char)[0] not in "CZ")


def hide_paths(text: str) -> str:
    """A sentence with the last part of every absolute path in place of the path."""
    return _PATH.sub(r"\1", text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; its cells are Markdown already. Columns of numbers are aligned to the right."""
    body = list(rows)
    numbers = [all(cell[:1] in "+-0123456789" for cell in column) for column in zip(*body, strict=True)]
    lines = [header, ["---:" if number else "---" for number in numbers or [False] * len(header)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def join(*parts: str) -> str:
    """Blocks of Markdown with a line between them; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _yaml_lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{key}:", *(f"  {line}" for line in _yaml_lines(value))]
        elif isinstance(value, list | tuple):
            lines.append(f"{key}:")
            for item in value:
                first, *rest = _yaml_lines(item) if isinstance(item, Mapping) else [_yaml_scalar(item)]
                lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines.append(f"{key}: {_yaml_scalar(value)}")
    return lines


def _yaml_scalar(value: Any) -> str:
    """A string as JSON, which YAML reads as it is; a float with a point, which YAML wants."""
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0") if value % 1 else f"{value:.1f}"
    return json.dumps(clean(value) if isinstance(value, str) else value, ensure_ascii=False)
