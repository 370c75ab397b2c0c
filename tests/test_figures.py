"""Every figure that the README quotes stands in a file of results that its paragraph links to."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results/"
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "MiB": 1.0, "GiB": 1.0}  # results in MiB and GiB say so in their keys

# Figures that others printed, with where; and versions.
NOT_OURS = {
    ".329": "HSTU-large on MovieLens-1M, HR@10, as published",
    ".189": "the same, NDCG@10",
    "3.11": "a version of Python",
    "2.0": "of the Apache licence",
}
_CODE = re.compile(r"```.*?```|^(?: {4}[^\n]*\n)+", re.DOTALL | re.MULTILINE)
_TARGET = re.compile(r"\]\(([^)\s]+)\)")
_FIGURE = re.compile(r"(?<![\w.@/])(\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+(?= ?[MG]iB))(?: ?(k|M|MiB|GiB)\b)?")


def paragraphs(text: str) -> list[str]:
    """Paragraphs, list entries and rows of tables, without code."""
    return [part for part in re.split(r"\n\s*\n|\n(?=[|-])", _CODE.sub("\n", text)) if part.strip()]


def figures(paragraph: str) -> list[tuple[str, str]]:
    """Decimals, counts with commas and amounts of memory, each as printed with its unit."""
    prose = re.sub(r"`[^`]*`", "", _TARGET.sub("]", paragraph))
    return [(number, unit) for number, unit in _FIGURE.findall(prose) if number not in NOT_OURS]


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value, those in its texts too, and the sums over the rows of a table."""
    if isinstance(value, str):
        yield from (float(number) for number in re.findall(r"(?<![\w.])\d*\.?\d+", value))
        yield from (float(number) for number in re.findall(r"^(\d+)(?:GiB|MiB)$", value))
    elif isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)
        rows = [row for row in value if isinstance(row, dict)]
        for key in {key for row in rows for key in row}:
            column = [row[key] for row in rows if isinstance(row.get(key), int)]
            yield float(sum(column))


def is_in(number: str, unit: str, known: list[float]) -> bool:
    """Whether one of the numbers, rounded as the figure is, is the figure."""
    digits = len(number.partition(".")[2])
    half = 0.5 * 10**-digits * (1 + 1e-9)
    wanted, scale = float(number.replace(",", "")), UNITS[unit]
    return any(abs(one / scale - wanted) <= half for one in known)


def unsupported(text: str) -> list[str]:
    """The figures of a text that no file behind their paragraph holds."""
    missing = []
    for paragraph in paragraphs(text):
        found = figures(paragraph)
        files = [ROOT / target for target in _TARGET.findall(paragraph) if target.startswith(RESULTS)]
        known = [number for file in files for number in numbers(json.loads(file.read_text(encoding="utf-8")))]
        missing += [f"{number}{unit}: {paragraph[:80]}" for number, unit in found if not is_in(number, unit, known)]
    return missing


def test_every_figure_of_the_readme_has_its_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sum(len(figures(paragraph)) for paragraph in paragraphs(text)) >= 12
    assert unsupported(text) == []


def test_every_figure_that_is_not_ours_is_quoted() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [number for number in NOT_OURS if number not in text] == []


@pytest.mark.parametrize(
    "text",
    [
        "Recall is .999 ([runs](benchmarks/results/any-log-train-h200.json)).",
        "Recall is .338.",
        "13.6M candidates take 57 MiB ([measured](benchmarks/results/softmax-h200.json)).",
        "On 109,000 values ([compared](benchmarks/results/evaluate-metrics.json)).",
    ],
)
def test_a_figure_without_a_file_or_with_another_value_is_found(text: str) -> None:
    assert len(unsupported(text)) == 1


def test_every_file_of_results_says_when_and_on_what_it_was_measured() -> None:
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(result)
        assert re.search(r"20\d\d-\d\d-\d\d", text), f"{path.name} has no date"
        assert re.search(r"hardware|device|machine|gpu|cpu", text, re.IGNORECASE), f"{path.name} names no hardware"
