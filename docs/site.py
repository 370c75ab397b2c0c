"""Hooks of mkdocs.yml, and the index of decisions: `python docs/site.py` writes docs/decisions/README.md.

Pages link to files of the repository (results, tests, notebooks), which lie outside docs/. The site carries the results
and the notebooks with it; other files are named, not linked.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
CARRIED = ("benchmarks/results/*.json", "examples/*.ipynb", "examples/*.py")

# The first number of a group of notes, and what the group is about.
GROUPS = {
    1: "Data",
    10: "The synthetic world",
    20: "Laws",
    30: "Sizes and the model",
    40: "Scores over candidates",
    50: "Evaluation",
    60: "Training",
    70: "Sweeps",
    80: "Plans and studies",
    85: "The report",
    90: "Serving",
    98: "Later, across rooms",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SUPERSEDED = re.compile(r"^\*Superseded (in part )?by \[(\d{4})\]\(([^)]+)\)", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the results and notebooks to the site, under files/."""
    from mkdocs.structure.files import File

    for pattern in CARRIED:
        for path in sorted(ROOT.glob(pattern)):
            name = f"files/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to what the site carries; name the rest."""
    return rewrite_links(markdown, page.file.src_uri)


def rewrite_links(markdown: str, page: str) -> str:
    """The text of a page (its path under docs/) with links to files of the repository turned into ones of the site."""
    folder = PurePosixPath("docs") / PurePosixPath(page).parent

    def replace(match: re.Match[str]) -> str:
        picture, text, target, _ = match.groups()
        path = normpath(str(folder / target))
        if picture or "://" in target or path.startswith("docs/"):
            return match[0]
        if any(PurePosixPath(path).match(pattern) for pattern in CARRIED):
            return f"[{text}]({relpath(f'docs/files/{path}', folder)})"
        return text

    return _LINK.sub(replace, markdown)


def decisions_index() -> str:
    """The page that lists every decision with its title, superseded ones marked."""
    lines = [
        "# Decisions",
        "",
        "Why things are as they are: the question, the choice, what would change our mind. Written by `make docs` from",
        "the notes themselves; a note that no longer holds says so in its third line, and is marked here.",
    ]
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        number = int(path.name[:4])
        if (group := next((name for first, name in GROUPS.items() if first == number), None)) is not None:
            lines += ["", f"## {group}", ""]
        lines.append(_index_line(path))
    return "\n".join(lines) + "\n"


def _index_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    title = re.sub(r"^#\s*\d{4}:?\s*", "", text.partition("\n")[0])
    title = title[:1].upper() + title[1:]
    if match := _SUPERSEDED.search(text):
        part, number, target = match.groups()
        mark = f"in part superseded by [{number}]({target})" if part else f"**superseded by [{number}]({target})**"
        return f"- [{path.name[:4]}]({path.name}) {title if part else f'~~{title}~~'} — {mark}"
    return f"- [{path.name[:4]}]({path.name}) {title}"


if __name__ == "__main__":
    (DECISIONS / "README.md").write_text(decisions_index(), encoding="utf-8")
