"""Bad input, reported all at once: where, what, how many rows, the first examples, what to do."""

from dataclasses import dataclass

from habitus.errors import DataError

EXAMPLES_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """One kind of bad input in one column."""

    table: str  # "events" or "items"
    column: str
    what: str
    rows: int
    examples: tuple[str, ...]  # each 'FILE row 12: value'
    expected: str
    remedy: str  # what --on-bad drop does about it

    def __str__(self) -> str:
        return (
            f"{self.table}, column {self.column!r}: {self.rows:,} {'row' if self.rows == 1 else 'rows'} with "
            f"{self.what} (first: {'; '.join(self.examples)}). Expected {self.expected}."
        )


def refuse(problems: list[Problem]) -> None:
    """Raise one error that lists all problems, if there are any."""
    if not problems:
        return
    remedies = sorted({problem.remedy for problem in problems})
    raise DataError(
        "the input has rows that cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems),
        next_step="correct the files, or pass --on-bad drop, which " + "; ".join(remedies),
    )


def quote_value(value: object) -> str:
    """A value as an error may print it: short, and with control and direction characters escaped."""
    text = value if isinstance(value, str) else str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    escaped = "".join(c if c.isprintable() and not 0x202A <= ord(c) <= 0x2069 else f"\\u{ord(c):04x}" for c in text)
    return f'"{escaped}"' if isinstance(value, str) else escaped
