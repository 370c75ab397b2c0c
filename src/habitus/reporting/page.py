"""The page: one HTML file with its style, its script and its data inside."""

import csv
import io
import json
import math
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from habitus.reporting.colours import style_variables
from habitus.reporting.contents import Contents
from habitus.reporting.figure import Block, Sheet, Table, View
from habitus.reporting.format import plural, power_of_ten
from habitus.reporting.glossary import WORDS
from habitus.reporting.study import Study
from habitus.reporting.svg import draw
from habitus.reporting.valleys import run_words


def page(study: Study, found: Contents) -> str:
    """The whole report as HTML. All text that came from files is escaped."""
    numbers = _numbered(found)
    body = [
        _bar(study),
        '<div class="frame">',
        _navigation(found),
        '<main id="main">',
        _head(study),
        _words(),
        *(
            _group(group.key, group.title, [_block(b, numbers[b.key], study) for b in group.blocks])
            for group in found.groups
        ),
        _missing(found),
        _foot(),
        "</main></div>",
        '<div id="tip" role="status" aria-live="polite" hidden></div>',
        f'<script type="application/json" id="sheets">{_sheets(study, found)}</script>',
        f'<script type="application/json" id="runs">{_as_json([run_words(row) for row in study.laws.runs])}</script>',
        f"<script>{_asset('page.js')}</script>",
    ]
    title = f"habitus report: {study.name}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_style(study)}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def csv_text(sheet: Sheet) -> str:
    """A sheet as CSV, numbers with up to seven digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(sheet.header)
    writer.writerows([_cell(value) for value in row] for row in sheet.rows)
    return out.getvalue()


def views_for(block: Block, metric: str) -> str:
    """The metric of the view that a block shows when `metric` is chosen: the same, the other regime's, or the first."""
    known = [view.metric for view in block.views]
    if "" in known:
        return ""
    bare = metric.split("/", 1)[-1]
    for wanted in (metric, f"catalogue/{bare}", f"batch/{bare}"):
        for names in known:
            if wanted in names.split(" "):
                return names
    return known[0] if known else ""


@cache
def _asset(name: str) -> str:
    return files("habitus.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _style(study: Study) -> str:
    num = len(study.budgets)
    names = [f"b{i}" for i in range(num)] + [f"s{i}" for i in range(8)] + ["main", "paper", "muted", "soft"]
    colours = "".join(f".{name}{{--c:var(--{name})}}" for name in names)
    light, dark = style_variables(num), style_variables(num, dark=True)
    return (
        f":root{{{light}color-scheme:light}}"
        # Paper is white whatever the screen is.
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}color-scheme:dark}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}color-scheme:dark}}}}"
        f"{_asset('page.css')}{colours}"
    )


def _bar(study: Study) -> str:
    options = "".join(
        f'<option value="{escape(m)}"{" selected" if m == study.metric else ""}>{escape(m)}</option>'
        for m in study.metrics
    )
    return (
        '<a class="skip" href="#main">Skip to the report</a>'
        '<header class="bar"><a class="brand" href="#top">habitus</a>'
        f'<label class="pick">Metric <select id="metric">{options}</select></label>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">Dark</button>'
        '<button type="button" class="csv" data-key="all-runs">All runs (CSV)</button></header>'
    )


def _head(study: Study) -> str:
    budgets = f"{power_of_ten(study.budgets[0])} to {power_of_ten(study.budgets[-1])} FLOPs"
    data = {record.dataset_checksum for record in study.records}
    about = [plural(len(study.runs), "run"), budgets, *(f"dataset {escape(d[:12])}" for d in sorted(data)[:1])]
    return f'<div id="top" class="head"><h1>{escape(study.name)}</h1><p class="about">{" · ".join(about)}</p></div>'


def _words() -> str:
    """The glossary, closed until it is wanted."""
    told = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in WORDS)
    return f'<details class="words" id="words"><summary>Words on this page</summary><dl>{told}</dl></details>'


def _navigation(found: Contents) -> str:
    links = "".join(f'<li><a href="#{group.key}">{escape(group.title)}</a></li>' for group in found.groups)
    links += '<li><a href="#not-measured">Not measured here</a></li>' if found.missing else ""
    return (
        f'<nav aria-label="Sections"><details id="toc" open><summary>Sections</summary><ol>{links}</ol></details></nav>'
    )


def _group(key: str, title: str, blocks: list[str]) -> str:
    head = f'<h2 id="h-{key}">{escape(title)}</h2>'
    return f'<section id="{key}" aria-labelledby="h-{key}">{head}{"".join(blocks)}</section>'


def _numbered(found: Contents) -> dict[str, str]:
    """'Figure 3' or 'Table 2' for every block, in order."""
    numbers, drawn, listed = {}, 0, 0
    for block in found.blocks:
        if block.drawn:
            drawn += 1
            numbers[block.key] = f"Figure {drawn}"
        else:
            listed += 1
            numbers[block.key] = f"Table {listed}"
    return numbers


def _block(block: Block, number: str, study: Study) -> str:
    shown = views_for(block, study.metric)
    several = len(block.views) > 1
    views = "".join(_view(view, block, number, hidden=several and view.metric != shown) for view in block.views)
    empty = not any(
        view.panels or (view.table and view.table.rows) for view in block.views
    )  # a law that refuses has a sentence only
    how = f'<p class="how">{escape(block.how)}</p>' if block.how and not empty else ""
    note = '<p class="other" hidden></p>' if several else ""
    switch = ' data-switch="1"' if several else ""
    key = escape(block.key)
    tools = f'<button type="button" class="csv" data-key="{key}">CSV</button>'
    if block.drawn:
        tools += f'<button type="button" class="data" data-key="{key}" aria-expanded="false">Show data</button>'
    foot = "" if empty else f'<div class="foot">{how}<span class="tools">{tools}</span></div>'
    return (
        f'<article class="block" id="{key}"{switch}>'
        f'<h3><span class="no">{number}</span> {escape(block.title)}</h3>{note}{views}{foot}</article>'
    )


def _view(view: View, block: Block, number: str, hidden: bool) -> str:
    attributes = f' data-m="{escape(view.metric)}"' if view.metric else ""
    attributes += " hidden" if hidden else ""
    # '=' stays with what it belongs to when a line breaks.
    words = escape(view.reading).replace(" = ", "\u00a0=\u00a0")
    parts = [f'<p class="reading">{words}</p>']
    if view.panels:
        label = escape(f"{number}, {block.title}. {view.reading} Arrow keys read out single values.")
        drawn = "".join(f'<div class="panel">{draw(panel)}</div>' for panel in view.panels)
        heat = " heats" if any(panel.heat for panel in view.panels) else ""
        parts.append(
            f'<div class="panels n{min(len(view.panels), 3)}{heat}" role="img" tabindex="0" aria-label="{label}">'
            f"{drawn}</div>"
        )
    if view.table is not None and view.table.rows:
        parts.append(_table(view.table, f"{number}. {block.title}"))
    single = " single" if len(view.panels) == 1 and not view.panels[0].heat else ""
    return f'<div class="view{single}"{attributes}>{"".join(parts)}</div>'


def _table(table: Table, caption: str) -> str:
    table = _without_empty(table)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "".join(
        f'<tr data-r="{escape(row[0])}"><th scope="row">{_lines(row[0])}</th>' + "".join(map(_data, row[1:])) + "</tr>"
        for row in table.rows
    )
    label = escape(caption)
    tall = " tall" if len(table.rows) > 45 else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.told)
    return (
        f'<div class="box{tall}" role="region" tabindex="0" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _without_empty(table: Table) -> Table:
    """The table without columns in which no row has anything."""
    kept = [i for i in range(len(table.header)) if i == 0 or any(row[i] not in ("–", "") for row in table.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(tuple(table.header[i] for i in kept), rows, table.told)


def _data(text: str) -> str:
    """A cell; long text may wrap, numbers with their interval stay together."""
    return f'<td class="w">{_lines(text)}</td>' if max(map(len, text.split("\n"))) > 34 else f"<td>{_lines(text)}</td>"


def _lines(text: str) -> str:
    """Text whose further lines are set small."""
    first, *more = text.split("\n")
    return escape(first) + "".join(f"<small>{escape(line)}</small>" for line in more)


def _missing(found: Contents) -> str:
    if not found.missing:
        return ""
    by_command: dict[str, list[str]] = {}
    for item in found.missing:
        by_command.setdefault(item.command, []).append(item.title)
    rows = "".join(
        f'<tr><th scope="row">{escape("; ".join(titles))}</th><td><code>{escape(command)}</code></td></tr>'
        for command, titles in by_command.items()
    )
    return (
        '<section id="not-measured" aria-labelledby="h-not"><h2 id="h-not">Not measured here</h2>'
        '<div class="box" role="region" tabindex="0" aria-label="Not measured here"><table><thead><tr>'
        '<th scope="col">figure or table</th><th scope="col">what would measure it</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _foot() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        told = version("habitus")
    except PackageNotFoundError:
        told = ""
    return f"<footer>Written by habitus {escape(told)}. This page loads nothing from anywhere.</footer>"


def _sheets(study: Study, found: Contents) -> str:
    sheets = {block.key: csv_text(block.sheet) for block in found.blocks}
    sheets["all-runs"] = csv_text(_all_runs(study))
    return _as_json(sheets)


def _as_json(value: Any) -> str:
    """JSON for a script element: only '<' could end it, and as an escape it cannot."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _all_runs(study: Study) -> Sheet:
    knobs = sorted({name for run in study.runs for name in run.knobs})
    metrics = [m for m in study.metrics if any(m in run.metrics for run in study.runs)]
    header = ("axis", "flops_budget", "cell_id", "init", "learning_rate", "seed", "status", "reason", *knobs, *metrics)
    rows = tuple(
        (r.axis, r.budget, r.cell_id, r.init, r.learning_rate, r.seed, r.status, r.reason,
         *(r.knobs.get(k) for k in knobs), *(r.metrics.get(m) for m in metrics))
        for r in study.runs
    )  # fmt: skip
    return Sheet(header, rows)


def _cell(value: str | float | int | None) -> str:
    """Text for CSV; an open end or a missing value is empty. Text that a spreadsheet would run is quoted."""
    if value is None:
        return ""
    if isinstance(value, str):
        return "'" + value if value[:1] in ("=", "+", "-", "@") else value
    return f"{value:.7g}" if math.isfinite(value) else ""
