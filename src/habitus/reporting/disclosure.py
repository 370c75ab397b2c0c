"""What was run, what was left out, and what a reader must know: study map, exclusions, disclosure, warnings."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from habitus.laws import MeasuredRun
from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import (
    count,
    join_words,
    law_name,
    plural,
    power_of_ten,
    power_range,
    pretty,
    rate,
    sentence,
    significant,
)
from habitus.reporting.study import Study
from habitus.reporting.tally import RECIPE_FACTS
from habitus.store import AXES, SURFACE_AXIS
from habitus.units import format_seconds

_NOT_VARIED = (
    "training context length, and with it attention's own L² term",
    "regularisation of the embedder",
    "the full grid of share × width × depth",
    "intermediate evaluation batches",
)


def study_map(study: Study) -> Exhibit:
    """Axes against budgets: cells done, failed and not run."""
    budgets = study.budgets
    axes = [a for a in (*AXES, SURFACE_AXIS) if any(run.axis == a for run in study.runs)]
    rows, raw = [], []
    for axis in axes:
        cells = []
        for budget in budgets:
            runs = [run for run in study.runs if run.axis == axis and run.budget == budget]
            cells.append(_map_cell(runs))
            if runs:
                counts = Counter(run.status for run in runs)
                raw.append(
                    (
                        axis,
                        budget,
                        len({r.cell_id for r in runs}),
                        len(runs),
                        counts["done"],
                        counts["failed"],
                        counts["missing"],
                    )
                )
        rows.append((axis, *cells))
    done = sum(run.status == "done" for run in study.runs)
    cells_done = len({(r.axis, r.budget, r.cell_id) for r in study.runs if r.status == "done"})
    where = f"{plural(len(axes), 'axis', 'axes')} and {plural(len(budgets), 'budget')}"
    reading = f"{plural(cells_done, 'cell')} in {plural(done, 'finished run')} over {where}"
    lost = len(study.runs) - done
    reading += f"; {plural(lost, 'run')} failed or not run" if lost else "; none failed"
    header = ("axis", *(power_of_ten(b) for b in budgets))
    sheet = Sheet(("axis", "flops_budget", "cells", "runs", "done", "failed", "missing"), tuple(raw))
    return Exhibit("map", "Study map", (View(sentence(reading), table=Table(header, tuple(rows))),), sheet)


def exclusions(study: Study) -> Exhibit:
    groups: dict[tuple[str, str], list[float]] = {}
    for e in study.laws.exclusions:
        groups.setdefault((e.axis, e.reason), []).append(e.budget)
    rows = tuple(
        (axis, str(len(at)), join_words(power_of_ten(b) for b in sorted(set(at))), why)
        for (axis, why), at in sorted(groups.items())
    )
    not_run: dict[tuple[str, str], list[float]] = {}
    for axis, budget, why in study.left_out:
        not_run.setdefault((axis, pretty(why)), []).append(budget)
    rows += tuple(
        (axis, "not run", join_words(power_of_ten(b) for b in sorted(set(at))), why)
        for (axis, why), at in not_run.items()
    )
    excluded = study.laws.exclusions
    raw: list[tuple[Any, ...]] = [(e.axis, e.budget, e.cell_id, e.learning_rate, e.seed, e.reason) for e in excluded]
    raw += [(axis, budget, "", None, None, f"not run: {why}") for axis, budget, why in study.left_out]
    reading = "no run was left out of the laws"
    if excluded:
        reading = f"{plural(len(excluded), 'run')} of {len(study.runs):,} left out of the laws"
    if study.left_out:
        reading += f"; {plural(len(study.left_out), 'cell')} asked for and not run"
    table = Table(("axis", "runs", "budgets", "reason"), rows or (("–", "0", "–", "–"),))
    sheet = Sheet(("axis", "flops_budget", "cell_id", "learning_rate", "seed", "reason"), tuple(raw))
    return Exhibit("exclusions", "Exclusions", (View(sentence(reading), table=table),), sheet)


def disclosure(study: Study) -> Exhibit:
    """Definitions, ranges, optimizer, seeds, versions, checksums, and what was not varied."""
    rows = list(dict.fromkeys((*_definitions(study), *_ranges(study), *_recipes(study), *_machines(study))))
    decided = [pretty(text) for m in study.manifests for text in m.decided]
    rows += [("decided by the sweeps", "; ".join(dict.fromkeys(decided)))] if decided else []
    rows.append(("not varied", "; ".join(_NOT_VARIED)))
    rows += [("about the paper", pretty(note)) for note in study.published.notes]
    table = Table(("what", "as it was here"), tuple(rows))
    reading = f"{plural(study.tally.num_records, 'Record')} read; {study.laws_source}"
    reading += f"; {study.laws.unsealed}" if study.laws.unsealed else ""
    return Exhibit(
        "disclosure", "Disclosure", (View(sentence(reading), table=table),), Sheet(("what", "value"), tuple(rows))
    )


def warnings(study: Study) -> Exhibit:
    """Every warning of the fits, for the metric chosen."""
    all_warnings = _list_warnings(study)

    def view(metric: str) -> View:
        relevant = [w for w in all_warnings if w[1] in (metric, "")]
        groups: dict[tuple[str, str], list[float]] = {}
        for law, _, budget, text in relevant:
            groups.setdefault((law, text), []).extend([] if budget is None else [budget])
        rows = tuple((law, join_words(power_of_ten(b) for b in at) or "–", text) for (law, text), at in groups.items())
        reading = f"{plural(len(relevant), 'warning')} of the fits for {metric}, {len(all_warnings):,} for all metrics"
        return View(
            sentence(reading), metric, table=Table(("law", "budgets", "warning"), rows or (("–", "–", "none"),))
        )

    sheet = Sheet(("law", "metric", "flops_budget", "warning"), tuple(all_warnings))
    return Exhibit("warnings", "Warnings", tuple(view(metric) for metric in study.metrics), sheet)


def _list_warnings(study: Study) -> list[tuple[str, str, float | None, str]]:
    """Law, metric, budget and text of all warnings; notes about the whole store have no metric."""
    laws = study.laws
    notes = dict.fromkeys((*([laws.unsealed] if laws.unsealed else []), *laws.notes))  # older laws do not say it
    warnings: list[tuple[str, str, float | None, str]] = [("all laws", "", None, pretty(note)) for note in notes]
    warnings += [(law_name(e.name), e.metric, e.budget, pretty(w)) for e in laws.entries for w in e.law.warnings]
    warnings += [
        (f"roll-out of {law_name(r.name)}", r.metric, None, pretty(w))
        for r in laws.rollouts
        for w in r.rollout.warnings
    ]
    drifts = laws.learning_rate_drift.items()
    return warnings + [(f"learning rates of {init}", "", None, pretty(w)) for init, d in drifts for w in d.warnings]


def _map_cell(runs: list[MeasuredRun]) -> str:
    """'8 cells' or '7 of 8 cells, 2 runs failed'."""
    if not runs:
        return "–"
    cells = {r.cell_id for r in runs}
    done = {r.cell_id for r in runs if r.status == "done"}
    reading = plural(len(cells), "cell") if done == cells else f"{len(done)} of {plural(len(cells), 'cell')}"
    for status, word in (("failed", "failed"), ("missing", "not run")):
        lost = sum(r.status == status for r in runs)
        reading += f", {lost} {word}" if lost else ""
    return reading


def _definitions(study: Study) -> list[tuple[str, str]]:
    return [(name, text) for name, text in study.laws.definitions.items()]


def _ranges(study: Study) -> list[tuple[str, str]]:
    done = [run for run in study.runs if run.status == "done"]
    rows = [
        ("runs", f"{len(study.runs):,} planned, {len(done):,} finished, {len(study.laws.exclusions):,} left out"),
        ("budgets", f"{power_range(study.budgets)} FLOPs"),
        ("seeds", join_words(str(s) for s in sorted({run.seed for run in study.runs})[:12])),
        ("learning rates", _format_span((run.learning_rate for run in done), rate)),
    ]
    for name, label in (
        ("params", "sizes N"),
        ("slots_seen", "data D"),
        ("embedder_share", "shares s"),
        ("epochs", "epochs"),
    ):
        values = [run.knobs[name] for run in done if name in run.knobs]
        if values:
            rows.append((label, _format_span(values, count if name in ("params", "slots_seen") else significant)))
    return rows


def _recipes(study: Study) -> list[tuple[str, str]]:
    if not study.tally.num_records:
        return [("recipes", "read from a flat table, which holds none")]
    return [(name, study.tally[name]) for name in RECIPE_FACTS]


def _machines(study: Study) -> list[tuple[str, str]]:
    tally = study.tally
    if not tally.num_records:
        return [("source", study.laws.source)]
    rows = [("presets", join_words(sorted({m.preset for m in study.manifests if m.preset})) or "not stated")]
    rows += [(name, tally[name] or "not stated") for name in ("dataset checksum", "query sets", "hardware", "versions")]
    took = f" in {format_seconds(tally.seconds)} of runs" if tally.seconds else ""
    rows.append(("compute spent", f"{power_of_ten(tally.flops)} nominal FLOPs{took}"))
    return rows


def _format_span(values: Iterable[float], form: Callable[[float], str]) -> str:
    numbers = list(values)
    if not numbers:
        return "not stated"
    low, high = form(min(numbers)), form(max(numbers))
    return low if low == high else f"{low} to {high}"
