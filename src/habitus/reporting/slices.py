"""Do short and long histories rank the runs alike?"""

from typing import Any

from habitus.reporting.correlations import BEST, bare, matrix, pairs_sheet, tables_of
from habitus.reporting.figure import Axis, Block, Line, Mark, Panel, Points, Sheet, View
from habitus.reporting.format import power_of_ten, sentence
from habitus.reporting.powers import compute_axis
from habitus.reporting.study import Study
from habitus.reporting.valleys import views


def worst_agreement(study: Study) -> Block | None:
    """The lowest ρ between any two slices, against compute."""
    panels, words = [], []
    raw: list[tuple[Any, ...]] = []
    for regime in ("batch", "catalogue"):
        marks: list[Mark] = []
        lowest: list[tuple[float, str, float, str]] = []
        for i, metric in enumerate(_metrics(study, regime)):
            known = []
            for table in tables_of(study, f"slices:{metric}"):
                worst = table.worst()
                if worst is not None and worst.rho is not None:
                    known.append((float(table.label), worst.rho, f"{worst.first} and {worst.second}", worst.n))
            if known:
                colour = f"s{i % 8}"
                xs, ys = [k[0] for k in known], [k[1] for k in known]
                tips = [
                    f"{metric} at {power_of_ten(b)}: {pair} agree least, ρ = {r:+.2f}, n = {n}"
                    for b, r, pair, n in known
                ]
                marks += [Line(xs, ys, colour, bare(metric)), Points(xs, ys, colour, tips)]
                raw += [(metric, b, pair, n, r) for b, r, pair, n in known]
                lowest += [(r, metric, b, pair) for b, r, pair, _ in known]
        if marks:
            axis = Axis("worst ρ between slices", high=1.01)
            panels.append(Panel(f"{regime} regime", compute_axis(study), axis, tuple(marks)))
            r, metric, b, pair = min(lowest)
            words.append(f"{regime}: the slices agree least for {metric} at {power_of_ten(b)} ({pair}, ρ = {r:+.2f})")
    if not panels:
        return None
    sheet = Sheet(("metric", "flops_budget", "pair", "n", "rho"), tuple(raw))
    reading = sentence(*words).replace("= -", "= −")
    how = "A value near 1: whichever history length is looked at, the same cells win."
    return Block("slices", "Worst agreement of history slices", (View(reading, panels=tuple(panels)),), sheet, how)


def slice_matrices(study: Study, regime: str) -> Block | None:
    """One matrix per budget for each metric of a regime."""

    def view(metric: str) -> View | None:
        tables = tables_of(study, f"slices:{metric}")
        panels = tuple(
            matrix(table, f"{metric} at {power_of_ten(float(table.label))}, n = {table.num_rows}")
            for table in tables
            if len(table.names) > 1
        )
        worst = [w for w in (t.worst() for t in tables) if w is not None and w.rho is not None]
        if not panels or not worst:
            return None
        low = min(worst, key=lambda w: w.rho or 0.0)
        pair = f"{low.first} and {low.second}"
        words = f"for {metric} the slices {pair} agree least over all budgets: ρ = {low.rho:+.2f}, n = {low.n}"
        return View(sentence(words).replace("= -", "= −"), metric, panels)

    found = views(_metrics(study, regime), view)
    sheet = pairs_sheet(
        [n for n in study.laws.correlations if n.runs == BEST and n.name.startswith(f"slices:{regime}/")]
    )
    how = "Spearman's ρ of the same metric at different history lengths (events visible to the query), within a budget."
    return Block(f"slices-{regime}", f"History slices, {regime} regime", found, sheet, how) if found else None


def _metrics(study: Study, regime: str) -> list[str]:
    return [m for m in study.metrics if m.startswith(regime + "/") and tables_of(study, f"slices:{m}")]
