"""The page: one HTML file with its style, its script and its data inside. docs/report.md says how to read it."""

import csv
import io
import json
import math
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from habitus.reporting.colours import style_variables
from habitus.reporting.figure import Chapter, Contents, Exhibit, Sheet, Table, View
from habitus.reporting.format import plural, power_of_ten
from habitus.reporting.study import Study
from habitus.reporting.svg import draw
from habitus.reporting.valleys import describe_run


def render_page(study: Study, contents: Contents) -> str:
    """The whole report as HTML. All text that came from files is escaped."""
    numbers = _number_exhibits(contents)
    body = [
        _bar(study),
        '<div class="frame">',
        _navigation(contents),
        '<main id="main">',
        _head(study),
        _glossary(),
        *(_chapter(chapter, numbers, study.metric) for chapter in contents.chapters),
        _missing(contents),
        _foot(),
        "</main></div>",
        '<div id="tip" role="status" aria-live="polite" hidden></div>',
        f'<script type="application/json" id="sheets">{_sheets(study, contents)}</script>',
        f'<script type="application/json" id="runs">{_as_json(list(map(describe_run, study.laws.runs)))}</script>',
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


def _choose_view(exhibit: Exhibit, metric: str) -> str:
    """The metric of the view that is shown when `metric` is chosen: the same, the other regime's, or the first."""
    offered = [view.metric for view in exhibit.views]
    if "" in offered:
        return ""
    bare = metric.split("/", 1)[-1]
    for candidate in (metric, f"catalogue/{bare}", f"batch/{bare}"):
        for names in offered:
            if candidate in names.split(" "):
                return names
    return offered[0] if offered else ""


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


def _glossary() -> str:
    """The glossary, closed until a reader opens it."""
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in GLOSSARY)
    return f'<details class="words" id="words"><summary>Words on this page</summary><dl>{entries}</dl></details>'


def _navigation(contents: Contents) -> str:
    links = "".join(f'<li><a href="#{chapter.key}">{escape(chapter.title)}</a></li>' for chapter in contents.chapters)
    links += '<li><a href="#not-measured">Not measured here</a></li>' if contents.missing else ""
    return (
        f'<nav aria-label="Sections"><details id="toc" open><summary>Sections</summary><ol>{links}</ol></details></nav>'
    )


def _number_exhibits(contents: Contents) -> dict[str, str]:
    """'Figure 3' or 'Table 2' for every exhibit, in order."""
    numbers, num_figures, num_tables = {}, 0, 0
    for exhibit in contents.exhibits:
        if exhibit.is_figure:
            num_figures += 1
            numbers[exhibit.key] = f"Figure {num_figures}"
        else:
            num_tables += 1
            numbers[exhibit.key] = f"Table {num_tables}"
    return numbers


def _chapter(chapter: Chapter, numbers: dict[str, str], metric: str) -> str:
    key = chapter.key
    head = f'<h2 id="h-{key}">{escape(chapter.title)}</h2>'
    body = "".join(_exhibit(exhibit, numbers[exhibit.key], metric) for exhibit in chapter.exhibits)
    return f'<section id="{key}" aria-labelledby="h-{key}">{head}{body}</section>'


def _exhibit(exhibit: Exhibit, number: str, metric: str) -> str:
    first = _choose_view(exhibit, metric)
    several = len(exhibit.views) > 1
    views = "".join(_view(view, exhibit, number, hidden=several and view.metric != first) for view in exhibit.views)
    # A law that refuses has a sentence only.
    empty = not any(view.panels or (view.table and view.table.rows) for view in exhibit.views)
    how = f'<p class="how">{escape(exhibit.how)}</p>' if exhibit.how and not empty else ""
    note = '<p class="other" hidden></p>' if several else ""
    switch = ' data-switch="1"' if several else ""
    key = escape(exhibit.key)
    tools = f'<button type="button" class="csv" data-key="{key}">CSV</button>'
    if exhibit.is_figure:
        tools += f'<button type="button" class="data" data-key="{key}" aria-expanded="false">Show data</button>'
    foot = "" if empty else f'<div class="foot">{how}<span class="tools">{tools}</span></div>'
    return (
        f'<article class="block" id="{key}"{switch}>'
        f'<h3><span class="no">{number}</span> {escape(exhibit.title)}</h3>{note}{views}{foot}</article>'
    )


def _view(view: View, exhibit: Exhibit, number: str, hidden: bool) -> str:
    attributes = f' data-m="{escape(view.metric)}"' if view.metric else ""
    attributes += " hidden" if hidden else ""
    # '=' stays with what it belongs to when a line breaks.
    reading = escape(view.reading).replace(" = ", "\u00a0=\u00a0")
    parts = [f'<p class="reading">{reading}</p>']
    if view.panels:
        label = escape(f"{number}, {exhibit.title}. {view.reading} Arrow keys read out single values.")
        drawings = "".join(f'<div class="panel">{draw(panel)}</div>' for panel in view.panels)
        heat = " heats" if any(panel.heat for panel in view.panels) else ""
        parts.append(
            f'<div class="panels n{min(len(view.panels), 3)}{heat}" role="img" tabindex="0" aria-label="{label}">'
            f"{drawings}</div>"
        )
    if view.table is not None and view.table.rows:
        parts.append(_table(view.table, f"{number}. {exhibit.title}"))
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
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<div class="box{tall}" role="region" tabindex="0" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _without_empty(table: Table) -> Table:
    """The table without columns in which no row has anything."""
    columns = [i for i in range(len(table.header)) if i == 0 or any(row[i] not in ("–", "") for row in table.rows)]
    rows = tuple(tuple(row[i] for i in columns) for row in table.rows)
    return Table(tuple(table.header[i] for i in columns), rows, table.notes)


def _data(text: str) -> str:
    """A cell; long text may wrap, numbers with their interval stay together."""
    return f'<td class="w">{_lines(text)}</td>' if max(map(len, text.split("\n"))) > 34 else f"<td>{_lines(text)}</td>"


def _lines(text: str) -> str:
    """Text whose further lines are set small."""
    first, *more = text.split("\n")
    return escape(first) + "".join(f"<small>{escape(line)}</small>" for line in more)


def _missing(contents: Contents) -> str:
    if not contents.missing:
        return ""
    by_command: dict[str, list[str]] = {}
    for item in contents.missing:
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
        release = version("habitus")
    except PackageNotFoundError:
        release = ""
    return f"<footer>Written by habitus {escape(release)}. This page loads nothing from anywhere.</footer>"


def _sheets(study: Study, contents: Contents) -> str:
    sheets = {exhibit.key: csv_text(exhibit.sheet) for exhibit in contents.exhibits}
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
    """Text for CSV; empty for an open end or a missing value. A quote stands before what a spreadsheet would run."""
    if value is None:
        return ""
    if isinstance(value, str):
        is_formula = value[:1] in ("=", "+", "-", "@", "\t", "\r")
        text = value.replace("\r", " ")  # the csv module leaves it unquoted, and readers begin a new row there
        return "'" + text if is_formula else text
    return f"{value:.7g}" if math.isfinite(value) else ""


# docs/words.md says the same; a test compares them.
GLOSSARY: tuple[tuple[str, str], ...] = (
    ("slot", "one place in a training window, whether or not an event fills it. D counts slots seen in training."),
    ("N, D, C", "parameters without vocabulary tables, slots seen, and FLOPs; a star, as in N*, marks the best one."),
    ("budget", "the FLOPs that a run may spend in training, counted by Equation 1; the C of every law."),
    (
        "Equation 1",
        "FLOPs of stage 1 = 6·D·(t·p_e + p + 3·B·L·h): embedder p_e on t text tokens, contextualizer p, and scoring "
        "every slot of a batch of B windows of L slots against all others at width h, joint_dim.",
    ),
    ("6ND", "the usual shorthand C = 6·N·D. Equation 1 charges more, so D = C/(6N) is more than a budget pays."),
    ("cell", "one setting of a sweep: sizes, batch, K and budget. Its runs differ in learning rate and seed only."),
    ("share, s", "the embedder's part of the parameters, p_e/N."),
    ("joint_dim, h", "the width in which items and histories meet: of the embedder, of an event and of scoring."),
    (
        "B, B_crit",
        "windows per step, and the critical batch: where S = S_min·(1 + B_crit/B) steps are twice the least.",
    ),
    ("regime", "whom a target is ranked against: 'batch', the targets of its batch; 'catalogue', all items."),
    ("K", "extra negatives per step of stage 2, drawn from the catalogue. The small k of recall@k is a cut-off."),
    (
        "stage 1, stage 2",
        "training both parts together; then the contextualizer alone, on frozen item vectors, with K negatives.",
    ),
    ("law", "a fitted curve with intervals and a status: it is identified, or says why these runs do not tell."),
)
