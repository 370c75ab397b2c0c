"""A page read back: tables, readings and sheets, as a reader without a browser sees them."""

import csv
import io
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class Article:
    """One figure or table of the page."""

    key: str
    title: str = ""
    readings: list[str] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    drawings: int = 0

    def row(self, name: str, table: int = 0) -> list[str]:
        """The row of that name."""
        return next(row for row in self.tables[table] if row[0] == name)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.articles: dict[str, Article] = {}
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.article: Article | None = None
        self.into: str = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [attributes[name] for name in ("src", "href", "action") if name in attributes]
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "article":
            self.article = self.articles.setdefault(attributes["id"], Article(attributes["id"]))
        if self.article is None:
            return
        if "data-m" in attributes:
            self.article.metrics.append(attributes["data-m"])
        if attributes.get("class") == "panel":
            self.article.drawings += 1
        if tag == "h3":
            self.into = "title"
        elif attributes.get("class") == "reading":
            self.article.readings.append("")
            self.into = "reading"
        elif tag == "table":
            self.article.tables.append([])
        elif tag == "tr":
            self.article.tables[-1].append([])
        elif tag in ("td", "th"):
            self.article.tables[-1][-1].append("")
            self.into = "cell"
        elif tag == "small":
            self.article.tables[-1][-1][-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self.article = None
        if tag in ("h3", "p", "td", "th", "caption"):
            self.into = ""

    def handle_data(self, data: str) -> None:
        if self.article is None:
            return
        if self.into == "title":
            self.article.title += data
        elif self.into == "reading":
            self.article.readings[-1] += data.replace("\u00a0", " ")
        elif self.into == "cell":
            self.article.tables[-1][-1][-1] += data


@dataclass(frozen=True)
class Page:
    text: str
    articles: dict[str, Article]
    ids: list[str]
    tags: list[str]
    addresses: list[str]

    def sheet(self, key: str) -> list[dict[str, str]]:
        """The data behind an article."""
        match = re.search(r'<script type="application/json" id="sheets">(.*?)</script>', self.text, re.S)
        assert match is not None
        return list(csv.DictReader(io.StringIO(json.loads(match[1])[key])))


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(text)
    return Page(text, reader.articles, reader.ids, reader.tags, reader.addresses)
