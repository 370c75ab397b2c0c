"""The page: one HTML file with its style, its script and its data inside. docs/report.md says how to read it.

`assets/page.html` is its template, which escapes all text; here is what the template is given.
"""

import csv
import io
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from habitus.reporting.colours import asset, figure_style, style_variables
from habitus.reporting.figure import Contents, Exhibit, Panel, Points, Sheet, Table
from habitus.reporting.format import plural, power_range
from habitus.reporting.runs import describe_run
from habitus.reporting.study import Study
from habitus.reporting.svg import draw

_INLINE = 1_000_000  # characters of CSV that a page may hold; of a larger store's, only the small sheets are inside
_SMALL = 20_000


def render_page(study: Study, contents: Contents, folder: str = "", live: str = "") -> tuple[str, dict[str, str]]:
    """The report as HTML, and the sheets that are too large for it, by the file's name in `folder`.

    `live` is the panel of a study that still runs; with it the page asks its server for news.
    """
    sheets = {exhibit.key: csv_text(exhibit.sheet) for exhibit in contents.exhibits}
    sheets["all-runs"] = csv_text(_all_runs(study))
    too_much = sum(map(len, sheets.values())) > _INLINE
    beside = {key: f"{key}.csv" for key, text in sheets.items() if too_much and len(text) > _SMALL}
    html = _template().render(
        study=study,
        contents=contents,
        about=_about(study),
        numbers=_number_exhibits(contents),
        glossary=GLOSSARY,
        release=_release(),
        folder=folder,
        beside={key: f"{folder}/{name}" for key, name in beside.items()},
        live=Markup(live),
        style=Markup(_style(study) + (asset("live.css") if live else "")),
        script=Markup((asset("live.js") if live else "") + asset("page.js")),
        sheets=_as_json({key: text for key, text in sheets.items() if key not in beside}),
        runs=_as_json(_describe_drawn_runs(study, contents)),
    )
    return html, {name: sheets[key] for key, name in beside.items()}


class Heading(NamedTuple):
    """What the template asks of a page that has no study behind it."""

    name: str
    metrics: tuple[str, ...]
    metric: str
    budgets: tuple[float, ...] = ()


def render_exhibits(
    heading: Heading, about: list[str], contents: Contents, all_runs: Sheet, glossary: tuple[tuple[str, str], ...]
) -> str:
    """A page of exhibits without a study: the same template, all of its sheets inside."""
    sheets = {exhibit.key: csv_text(exhibit.sheet) for exhibit in contents.exhibits}
    return str(
        _template().render(
            study=heading,
            contents=contents,
            about=about,
            numbers=_number_exhibits(contents),
            glossary=glossary,
            release=_release(),
            folder="",
            beside={},
            live="",
            style=Markup(_style(heading)),
            script=Markup(asset("page.js")),
            sheets=_as_json({**sheets, "all-runs": csv_text(all_runs)}),
            runs=_as_json({}),
        )
    )


def csv_text(sheet: Sheet) -> str:
    """A sheet as CSV, numbers with up to seven digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(sheet.header)
    writer.writerows([_cell(value) for value in row] for row in sheet.rows)
    return out.getvalue()


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.globals["draw"] = lambda panel: Markup(draw(panel))
    environment.filters |= {"chosen": _choose_view, "filled": _without_empty, "thinned": _describe_thinning}
    # Long text may wrap; numbers with their interval stay together.
    environment.tests["long"] = lambda text: max(map(len, text.split("\n"))) > 34
    return environment.from_string(asset("page.html"))


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


def _describe_thinning(exhibit: Exhibit) -> str:
    """That not every run is drawn, where that is so."""
    return " Of many runs at a budget some are drawn; the CSV has all." if exhibit.num_hidden else ""


def _style(study: Study | Heading) -> str:
    num = len(study.budgets)
    light, dark = style_variables(num), style_variables(num, dark=True)
    return (
        f":root{{{light}color-scheme:light}}"
        # Paper is white whatever the screen is.
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}color-scheme:dark}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}color-scheme:dark}}}}"
        f"{figure_style(num)}{asset('page.css')}"
    )


def _about(study: Study) -> list[str]:
    if not study.budgets:
        return []  # of a study whose first run has not ended
    budgets = f"{power_range(study.budgets)} FLOPs"
    dataset = study.tally["dataset checksum"]
    ended = sum(run.status != "missing" for run in study.runs)
    runs = plural(len(study.runs), "run")
    runs = runs if ended == len(study.runs) else f"{ended:,} of {runs}"
    return [runs, budgets, *([f"dataset {dataset[:12]}"] if dataset else [])]


def _number_exhibits(contents: Contents) -> dict[str, str]:
    """'Figure 3' or 'Table 2' for every exhibit, in order."""
    counts = {"Figure": 0, "Table": 0}
    numbers = {}
    for exhibit in contents.exhibits:
        kind = "Figure" if exhibit.is_figure else "Table"
        counts[kind] += 1
        numbers[exhibit.key] = f"{kind} {counts[kind]}"
    return numbers


def _without_empty(table: Table) -> Table:
    """The table without columns in which no row has anything."""
    columns = [i for i in range(len(table.header)) if i == 0 or any(row[i] not in ("–", "") for row in table.rows)]
    rows = tuple(tuple(row[i] for i in columns) for row in table.rows)
    return Table(tuple(table.header[i] for i in columns), rows, table.notes)


def _describe_drawn_runs(study: Study, contents: Contents) -> Mapping[int, str]:
    """A line about every run that a dot stands for."""
    panels: list[Panel] = [p for e in contents.exhibits for view in e.views for p in view.panels]
    drawn = {run for panel in panels for mark in panel.marks if isinstance(mark, Points) for run in mark.runs}
    return {run: describe_run(study.laws.runs[run]) for run in sorted(drawn)}


def _release() -> str:
    try:
        return version("habitus")
    except PackageNotFoundError:
        return ""


def _as_json(value: Any) -> Markup:
    """JSON for a script element: only '<' could end it, and as an escape it cannot."""
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))


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
