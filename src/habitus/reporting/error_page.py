"""`habitus evaluate --page`: where a run errs and how far its probabilities can be believed, as one HTML page."""

from collections.abc import Sequence
from pathlib import Path

from habitus.errors import ConfigError
from habitus.files import write_atomic
from habitus.reporting.figure import Chapter, Contents, Exhibit, Line, Panel, PlotAxis, Points, Rule, Sheet, Table, View
from habitus.reporting.format import plural
from habitus.reporting.page import Heading, render_exhibits
from habitus.store import METRICS, Calibration, ErrorPage, Reliability, SliceRow, SliceTable

_LONGEST_NAME = 26  # characters of a value beside a figure; its table has all of it
_DRAWN_ROWS = 14  # of a figure; its table has all of them
_SHOWN_METRICS = (
    "recall@10",
    "ndcg@10",
    "mrr@10",
    "loss",
    "auc",
    "coverage@10",
    "diversity@10",
    "novelty@10",
    "gini@10",
)


def error_report(pages: Sequence[ErrorPage], out: str | Path) -> Path:
    """Write the page of evaluated runs to `out`."""
    out = Path(out)
    contents = Contents(
        (
            Chapter("summary", "Summary", (_summary(pages),)),
            *(chapter for number, page in enumerate(pages) for chapter in _chapters(page, number, len(pages))),
        ),
        (),
    )
    first = pages[0]
    metric = first.slices[0].metric if first.slices else "loss"
    about = [plural(len(pages), "run"), f"{first.queries:,} {first.side} queries", f"{first.candidates:,} candidates"]
    heading = Heading("Where it errs", (metric,), metric)
    html = render_exhibits(heading, about, contents, _all_metrics(pages), _GLOSSARY)
    try:
        write_atomic(out, html.encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", expected="a file name in a folder") from error
    return out


def _chapters(page: ErrorPage, number: int, count: int) -> list[Chapter]:
    """A run's own chapters; with several runs each is named."""
    suffix = "" if count == 1 else f": {page.run}"
    slices = [exhibit for place, table in enumerate(page.slices) for exhibit in _slices(table, f"{number}-{place}")]
    chapters = [Chapter(f"errors-{number}", f"Where it errs{suffix}", tuple(slices))] if slices else []
    if page.calibration is not None:
        exhibits = (_diagram(page.calibration, number), _calibration_table(page.calibration, number, page))
        chapters.append(Chapter(f"calibration-{number}", f"Can its probabilities be believed?{suffix}", exhibits))
    return chapters


def _summary(pages: Sequence[ErrorPage]) -> Exhibit:
    page = pages[0]
    names = [name for name in _SHOWN_METRICS if any(name in metrics for metrics in page.metrics.values())]
    header = ("scorer", *names)
    rows = tuple(
        (scorer, *(f"{metrics[name].value:.4f}" if name in metrics else "–" for name in names))
        for scorer, metrics in page.metrics.items()
    )
    findings = [sentence for one in pages for sentence in _findings(one, len(pages))]
    reading = " ".join(findings) or f"{page.regime} regime, {page.side} queries."
    return Exhibit(
        "scorers", "The scorers on the same queries", (View(reading, table=Table(header, rows)),), Sheet(header, rows)
    )


def _findings(page: ErrorPage, count: int) -> list[str]:
    who = page.run if count > 1 else "The run"
    sentences = []
    for table in page.slices:
        behind = [row.value for row in table.rows if row.is_significant and _gain(row, table) < 0]
        if behind:
            sentences.append(f"{who} is behind {table.reference} for {table.by} = {', '.join(behind[:4])}.")
    rows = [row for table in page.slices for row in table.rows]
    significant = sum(row.is_significant for row in rows)
    if rows and page.slices[0].reference:
        sentences.append(
            f"{significant} of {page.slices[0].comparisons} rows differ from {page.slices[0].reference} "
            f"in {page.slices[0].metric} after Holm's adjustment."
        )
    return sentences


def _gain(row: SliceRow, table: SliceTable) -> float:
    """The difference, positive where the run is better."""
    sign = 1 if METRICS[table.metric.partition("@")[0]].direction == "max" else -1
    return sign * (row.difference or 0.0)


def _slices(table: SliceTable, key: str) -> list[Exhibit]:
    exhibits = [_slice_exhibit(table, key)]
    return [*exhibits, _examples(table, key)] if table.examples else exhibits


def _slice_exhibit(table: SliceTable, key: str) -> Exhibit:
    header = (
        "value",
        "queries",
        "users",
        f"{table.metric} ± se",
        table.reference or "",
        "difference",
        "95% over users",
        "p, Holm",
    )
    rows = tuple(
        (
            row.value,
            f"{row.metric.n:,}",
            f"{row.users:,}",
            _with_error(row),
            _number_or_dash(row.reference),
            *_difference(row),
        )
        for row in table.rows
    )
    worst = "" if table.worst is None else f"{table.metric} is worst for {table.worst}."
    drawn = table.model_copy(update={"rows": table.rows[:_DRAWN_ROWS]})
    panels = (_values_panel(drawn), _difference_panel(drawn)) if table.reference else (_values_panel(drawn),)
    view = View(f"By {table.by}, {table.source}. {worst}", panels=panels, table=Table(header, rows))
    sheet_header = ("value", "queries", "users", "metric", "se", "reference", "difference", "low", "high", "p_holm")
    sheet_rows = tuple(
        (
            row.value,
            row.metric.n,
            row.users,
            row.metric.value,
            row.metric.se,
            row.reference,
            row.difference,
            row.low,
            row.high,
            row.p_value,
        )
        for row in table.rows
    )
    how = (
        f"A row per value; bars are 95% intervals over users, of that row alone. Filled differences stay significant "
        f"after Holm's adjustment over {table.comparisons} rows."
    )
    return Exhibit(f"by-{key}", f"{table.metric} by {table.by}", (view,), Sheet(sheet_header, sheet_rows), how)


def _values_panel(table: SliceTable) -> Panel:
    places = _places(table)
    values = [row.metric.value for row in table.rows]
    errors = [1.96 * (row.metric.se or 0.0) for row in table.rows]
    tips = [f"{row.value}: {_with_error(row)}, {row.metric.n:,} queries of {row.users:,} users" for row in table.rows]
    low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
    marks: list[Points] = []
    if table.reference:
        others = [row.reference or 0.0 for row in table.rows]
        other_tips = [f"{row.value}: {table.reference} {row.reference:.4f}" for row in table.rows]
        marks.append(Points(others, places, "muted", other_tips, ring=True, large=True))
    marks.append(Points(values, places, "main", tips, low, high, "x"))
    title = f"{table.metric}" + (f"; rings: {table.reference}" if table.reference else "")
    x = PlotAxis(table.metric, low=min([0.0, *low]), high=None)
    return Panel(title, x, _value_axis(table), tuple(marks))


def _difference_panel(table: SliceTable) -> Panel:
    places = dict(zip(map(id, table.rows), _places(table), strict=True))
    marks: list[Points | Rule] = [Rule(0.0, "x", "muted")]
    for certain in (True, False):
        rows = [row for row in table.rows if row.is_significant is certain]
        if not rows:
            continue
        values = [row.difference or 0.0 for row in rows]
        low = [value if row.low is None else row.low for row, value in zip(rows, values, strict=True)]
        high = [value if row.high is None else row.high for row, value in zip(rows, values, strict=True)]
        tips = [f"{row.value}: {' '.join(_difference(row))}" for row in rows]
        marks.append(
            Points(values, [places[id(row)] for row in rows], "main", tips, low, high, "x", hollow=not certain)
        )
    ends = [end for row in table.rows for end in (row.low, row.high, row.difference) if end is not None]
    x = PlotAxis(f"difference in {table.metric}", low=min([0.0, *ends]), high=max([0.0, *ends]))
    return Panel(f"less {table.reference}", x, _value_axis(table), tuple(marks))


def _places(table: SliceTable) -> list[float]:
    """From top to bottom in the table's order."""
    return [float(len(table.rows) - place) for place in range(len(table.rows))]


def _value_axis(table: SliceTable) -> PlotAxis:
    names = tuple(
        row.value if len(row.value) <= _LONGEST_NAME else row.value[: _LONGEST_NAME - 1] + "…" for row in table.rows
    )
    places = _places(table)
    return PlotAxis("", low=0.3, high=len(places) + 0.7, ticks=tuple(places), tick_names=names)


def _examples(table: SliceTable, key: str) -> Exhibit:
    header = ("user", "last seen", "came", "its rank", "the run said")
    rows = tuple(
        (one.user, " → ".join(one.history), one.target, f"{one.rank:,}", "; ".join(one.first) or "–")
        for one in table.examples
    )
    reading = f"The furthest off of {table.by} = {table.worst}."
    view = View(reading, table=Table(header, rows))
    return Exhibit(f"worst-{key}", f"Worst queries of {table.by} = {table.worst}", (view,), Sheet(header, rows))


def _diagram(calibration: Calibration, number: int) -> Exhibit:
    panels = tuple(_reliability_panel(one) for one in (calibration.plain, calibration.scaled))
    reading = (
        f"Items that were listed with probability p, and how often they came. The temperature "
        f"{calibration.temperature:.3f} was fitted on {calibration.fitted_queries:,} {calibration.fitted_side} queries."
    )
    header = ("temperature", "predicted", "observed", "se", "listed")
    rows = tuple(
        (one.temperature, part.predicted, part.observed, part.se, part.listed)
        for one in (calibration.plain, calibration.scaled)
        for part in one.bins
    )
    how = "On the diagonal a probability means what it says; below it the model is overconfident."
    return Exhibit(
        f"reliability-{number}",
        "Reliability of the first ten items",
        (View(reading, panels=panels),),
        Sheet(header, rows),
        how,
    )


def _reliability_panel(one: Reliability) -> Panel:
    drawn = [part for part in one.bins if part.observed > 0 and part.predicted > 0]
    errors = [1.96 * (part.se or 0.0) for part in drawn]
    xs, ys = [part.predicted for part in drawn], [part.observed for part in drawn]
    low = [max(y - e, y / 3) for y, e in zip(ys, errors, strict=True)]
    high = [y + e for y, e in zip(ys, errors, strict=True)]
    tips = [f"predicted {part.predicted:.4f}, came {part.observed:.4f} of {part.listed:,} listed" for part in drawn]
    ends = [min([*xs, *ys], default=0.001), max([*xs, *ys], default=1.0)]
    marks = (Line(ends, ends, "muted", dashed=True), Points(xs, ys, "main", tips, low, high))
    error = one.expected_error[max(one.expected_error, key=int)]
    title = f"temperature {one.temperature:.3g}: error {error:.4f}"
    return Panel(title, PlotAxis("predicted probability", log=True), PlotAxis("share that came", log=True), marks)


def _calibration_table(calibration: Calibration, number: int, page: ErrorPage) -> Exhibit:
    both = (calibration.plain, calibration.scaled)
    ks = sorted(calibration.plain.expected_error, key=int)
    header = ("temperature", "loss", "entropy", *(f"expected error, first {k}" for k in ks))
    rows = tuple(
        (
            f"{one.temperature:.4f}",
            f"{one.loss:.4f}",
            f"{one.entropy:.4f}",
            *(f"{one.expected_error[k]:.4f}" for k in ks),
        )
        for one in both
    )
    gap = calibration.plain.loss - calibration.plain.entropy
    confident = "overconfident" if gap > 0 else "too modest"
    reading = (
        f"Loss less entropy is {gap:+.3f} nats: the run is {confident}. "
        f"To serve it so: habitus serve {page.run} --temperature {calibration.temperature:.3f}"
    )
    view = View(reading, table=Table(header, rows))
    return Exhibit(f"calibration-table-{number}", "Before and after the temperature", (view,), Sheet(header, rows))


def _all_metrics(pages: Sequence[ErrorPage]) -> Sheet:
    rows = tuple(
        (scorer, name, metric.value, metric.se, metric.n)
        for scorer, metrics in pages[0].metrics.items()
        for name, metric in metrics.items()
    )
    return Sheet(("scorer", "metric", "value", "se", "n"), rows)


def _with_error(row: SliceRow) -> str:
    return f"{row.metric.value:.4f}" + ("" if row.metric.se is None else f" ± {row.metric.se:.4f}")


def _number_or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _difference(row: SliceRow) -> tuple[str, str, str]:
    if row.difference is None:
        return "–", "–", "–"
    interval = "–" if row.low is None or row.high is None else f"{row.low:+.4f} to {row.high:+.4f}"
    p_value = "–" if row.p_value is None else "< 0.001" if row.p_value < 0.001 else f"{row.p_value:.3f}"
    return f"{row.difference:+.4f}", interval, p_value + (" *" if row.is_significant else "")


_GLOSSARY = (
    ("query", "one question: given what a user did, which item comes next?"),
    ("difference", "the run less the scorer it is compared with, query by query; a user's queries are one draw."),
    ("Holm", "p values grow with the number of rows, so that 5% is the chance of any false one among all of them."),
    (
        "expected calibration error",
        "how far a listed item's probability is from how often such items came, on average.",
    ),
    ("temperature", "what scores are divided by before the softmax; the order of items stays."),
)
