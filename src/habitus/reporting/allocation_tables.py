"""Tables of the allocation axis: winners, exponents with their nearest cells, accounting, the training surrogate."""

from collections.abc import Sequence
from typing import Any

from habitus.laws import NO_TREND, power_law, trend
from habitus.reporting.curves import law_points
from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import (
    count,
    describe_optimum,
    describe_status,
    format_exponent,
    join_words,
    law_value,
    percent,
    plural,
    power_of_ten,
    sentence,
    significant,
    superscript,
    typeset_minus,
)
from habitus.reporting.runs import best_row
from habitus.reporting.study import Study
from habitus.store import Law, RunRow


def allocation_table(study: Study) -> Exhibit | None:
    """Winners on the grid and the optimum, budget by budget, by the loss."""
    metric = "batch/loss" if study.laws_by_budget("size_optimum", "batch/loss") else study.metric
    laws = study.laws_by_budget("size_optimum", metric)
    extra = [m for m in ("batch/recall@10", "batch/ndcg@10") if m in study.metrics and m != metric]
    rows, raw = [], []
    for budget, law in laws.items():
        runs = study.best_rate_runs("allocation", budget, ["params", metric])
        if not runs:
            continue
        best = best_row(runs, metric)
        size, slots = best.knobs["params"], best.knobs.get("slots_seen")
        parabola = study.law("size_parabola", metric, budget)
        optimum = law_value(law, "x_opt")
        data_6nd = None if optimum is None else budget / (6 * optimum)
        rows.append(
            (
                power_of_ten(budget), count(size), count(slots),
                *(significant(best.metrics.get(m)) for m in (metric, *extra)),
                significant(slots / size, 3) if slots else "–",
                describe_optimum(law, "count"),
                "–" if parabola is None else describe_optimum(parabola, "count"),
                count(data_6nd),
                significant(None if optimum is None or data_6nd is None else data_6nd / optimum, 3),
                _printed_size(study.paper_law("size_parabola", metric, budget)),
            )
        )  # fmt: skip
        raw.append(
            (budget, size, slots, best.metrics[metric], optimum, law.status, law_value(parabola, "x_opt"), data_6nd)
        )
    if not rows:
        return None
    header = (
        "budget", "best cell N", "its D", metric, *extra, "D/N", "N* [95%]", "by parabola [95%]", "D = C/6N*",
        "D/N by 6ND", "paper N*",
    )  # fmt: skip
    identified = [b for b, law in laws.items() if law.ok]
    reading = f"{len(identified)} of {len(laws)} budgets have an interior optimum of {metric}"
    realised = law_points(study.law("data_law", metric))
    off = [float(r[7]) / realised[r[0]] for r in raw if r[7] is not None and r[0] in realised]
    more = ""
    if off:
        factors = f"{min(off):.2f} to {max(off):.2f}"
        more = f"the 6ND convention gives {factors} times the D that these runs really saw at N*"
    sheet = Sheet(
        ("flops_budget", "grid_size", "grid_slots", metric, "optimum_size", "status", "parabola_size", "data_6nd"),
        tuple(raw),
    )
    notes = ("D = C/(6N) is the paper's convention; what a budget really buys is the realised D.", *_refit_winners(raw))
    table = Table(header, tuple(rows), notes)
    return Exhibit(
        "allocation-table", "Compute-optimal allocation", (View(sentence(reading, more), table=table),), sheet
    )


def _printed_size(paper: Law | None) -> str:
    if paper is None:
        return "–"
    return f"{count(float(paper['x_opt']))}, grid {count(paper.details.get('best_on_grid'))}"


def exponents(study: Study) -> Exhibit | None:
    """a_N and a_D per metric, by both readings, with the buildable cell nearest to each N*."""
    rows, raw = [], []
    for metric in study.metrics:
        law = study.law("size_law", metric)
        if law is None:
            continue
        parabola, data, six = (study.law(n, metric) for n in ("size_law_parabola", "data_law", "data_law_6nd"))
        paper = study.paper_law("size_law", metric)
        printed = "–"
        if paper is not None:
            values = paper.details.get("printed", paper.values)
            printed = f"{values['exponent']:.3f} ± {values['exponent_se']:.3f}"
        rows.append(
            (
                metric,
                _exponent(law),
                _exponent(parabola),
                _exponent(data),
                f"{six['exponent']:.3f}" if six is not None and "exponent" in six.values else "–",
                " ".join(_nearest_cells(study, metric)) or "–",
                printed,
            )
        )
        raw.append(
            (metric, law.values.get("exponent"), law.values.get("exponent_se"), law.status, law.residuals.n,
             parabola.values.get("exponent") if parabola else None, data.values.get("exponent") if data else None)
        )  # fmt: skip
    if not rows:
        return None
    reading = _describe_exponents(study)
    header = (
        "metric",
        "a_N ± SE [95%]",
        "by parabolas",
        "a_D realised",
        "a_D by 6ND",
        "nearest cells width/depth",
        "paper a_N",
    )
    sheet = Sheet(("metric", "exponent", "se", "status", "n", "exponent_parabola", "data_exponent"), tuple(raw))
    notes = ("± is one standard error, which covers 61% with five budgets; brackets are 95% by Student's t.",)
    view = View(sentence(reading), table=Table(header, tuple(rows), notes))
    return Exhibit("exponents", "Exponents and nearest cells", (view,), sheet)


def accounting(study: Study) -> Exhibit | None:
    """The winning cells with their sizes: what the budget bought, and how far 6ND is off."""
    metric = "batch/loss"
    rows, raw = [], []
    for axis in ("share", "allocation"):
        for budget in study.budgets:
            runs = study.best_rate_runs(axis, budget, ["params", "slots_seen", metric])
            if not runs:
                continue
            best = best_row(runs, metric)
            k = best.knobs
            spent = k.get("flops_nominal")
            six = 6 * k["params"] * k["slots_seen"] / budget
            shape = (_integer(k.get(n)) for n in ("joint_dim", "width", "depth", "batch_sequences", "steps"))
            off = "–" if spent is None else typeset_minus(f"{100 * (spent / budget - 1):+.2f}%")
            rows.append(
                (
                    power_of_ten(budget), axis, *shape, count(k["params"]), count(k["slots_seen"]),
                    "–" if spent is None else significant(spent, 4), off,
                    significant(k["slots_seen"] / k["params"], 3), percent(k.get("embedder_share")), f"{six:.2f}",
                )
            )  # fmt: skip
            raw.append(
                (budget, axis, *(k.get(n) for n in _ACCOUNTED), six)
            )  # fmt: skip
    if not rows:
        return None
    header = (
        "budget",
        "axis",
        "joint_dim",
        "width",
        "depth",
        "B",
        "steps",
        "N",
        "D",
        "FLOPs",
        "off budget",
        "D/N",
        "share",
        "6ND / C",
    )
    ratios = [float(r[-1] or 0.0) for r in raw]
    if max(abs(r - 1) for r in ratios) < 0.05:
        reading = "at the winning cells 6ND is the budget to within 5%"
    else:
        reading = (
            f"at the winning cells 6ND is {min(ratios):.2f} to {max(ratios):.2f} of the budget: C/(6N) misstates D"
        )
    sheet = Sheet(("flops_budget", "axis", *_ACCOUNTED, "six_nd_over_c"), tuple(raw))
    table = Table(header, tuple(rows), ("FLOPs are nominal: Equation 1 over all steps.",))
    return Exhibit("accounting", "Iso-FLOP accounting of the winners", (View(sentence(reading), table=table),), sheet)


def train_surrogate(study: Study) -> Exhibit | None:
    """The allocation as the tail training loss would choose it."""
    laws = study.laws_by_budget("size_optimum", "train/loss")
    rows, raw, apart = [], [], []
    for budget, law in laws.items():
        runs = study.best_rate_runs("allocation", budget, ["params", "train/loss"])
        if not runs:
            continue
        best = best_row(runs, "train/loss")
        size, slots = best.knobs["params"], best.knobs.get("slots_seen")
        with_metric = [r for r in runs if "batch/loss" in r.metrics]
        if with_metric and best_row(with_metric, "batch/loss").cell_id != best.cell_id:
            apart.append(budget)
        rows.append(
            (
                power_of_ten(budget), count(size), count(slots), significant(best.metrics["train/loss"]),
                significant(slots / size, 3) if slots else "–", describe_optimum(law, "count"),
                significant(law_value(law, "y_opt")),
            )
        )  # fmt: skip
        x_opt, y_opt = law.values.get("x_opt"), law.values.get("y_opt")
        raw.append((budget, size, slots, best.metrics["train/loss"], x_opt, y_opt, law.status))
    if not rows:
        return None
    reading = (
        f"training and validation loss pick different cells at {join_words(power_of_ten(b) for b in apart)}"
        if apart
        else "training and validation loss pick the same cells"
    )
    header = ("budget", "best cell N", "its D", "train/loss", "D/N", "N* [95%]", "L*")
    sheet = Sheet(
        ("flops_budget", "grid_size", "grid_slots", "train/loss", "optimum_size", "optimum_loss", "status"), tuple(raw)
    )
    view = View(
        sentence(reading), table=Table(header, tuple(rows), _train_surrogate_notes(study) + _refit_winners(raw))
    )
    how = (
        "Training losses of different batch sizes have different candidate pools and are not comparable across budgets."
    )
    return Exhibit("train-surrogate", "Allocation by training loss", (view,), sheet, how)


def _refit_winners(rows: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """Exponents of N and D of the best cells themselves, from (budget, N, D, ...): what a grid does to them."""
    complete = [row[:3] for row in rows if None not in row[:3]]
    if len({row[0] for row in complete}) < 3:
        return ()
    budgets, sizes, slots = zip(*complete, strict=True)
    laws = [power_law(budgets, values) for values in (sizes, slots) if len(set(values)) > 1]
    if len(laws) < 2 or not all("exponent_se" in law.values for law in laws):
        return ()
    size, data = (f"{law['exponent']:.3f} ± {law['exponent_se']:.3f}" for law in laws)
    total = laws[0]["exponent"] + laws[1]["exponent"]
    return (f"Refit on the best cells themselves: a_N {size}, a_D {data}, together {total:.3f}; ± is one SE.",)


def _train_surrogate_notes(study: Study) -> tuple[str, ...]:
    """L*(C) and N*(C) by training loss, and the paper's."""
    height, size_law = study.law("loss_law", "train/loss"), study.law("size_law", "train/loss")
    paper = study.paper_law("loss_law", "train/loss")
    notes = []
    if height is not None and height.values:
        curve = f"{significant(float(height['floor']))} + {significant(float(height['coefficient']), 3)}"
        notes.append(f"L*(C) = {curve}·C{superscript(-height['exponent'])} ({height.status.replace('_', ' ')}).")
    if size_law is not None and "exponent" in size_law.values:
        power = f"shows {NO_TREND}" if trend(size_law) == "none" else f"∝ C{superscript(size_law['exponent'])}"
        notes.append(f"N* {power} (exponent {format_exponent(size_law)}) by training loss.")
    if paper is not None:
        p = paper.details["printed"]
        curve = f"{p['floor']:g} + {p['coefficient']:g}·C{superscript(-p['exponent'])}"
        notes.append(f"The paper: L*(C) = {curve}; N* ∝ C{superscript(0.612)} by training loss.")
    return tuple(notes)


_ACCOUNTED = (
    "joint_dim", "width", "depth", "batch_sequences", "steps", "params", "slots_seen", "flops_nominal",
    "embedder_share",
)  # fmt: skip


def _integer(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _describe_exponents(study: Study) -> str:
    """The range of the exponents that show a trend above their own error, and how many do not."""
    laws = {m: law for m in study.metrics if (law := study.law("size_law", m)) is not None and "exponent" in law.values}
    exponents = {m: float(law["exponent"]) for m, law in laws.items() if trend(law) != "none"}
    if not laws:
        return "no metric has a law N*(C)"
    if not exponents:
        return f"N*(C) shows {NO_TREND} for {plural(len(laws), 'metric')}"
    low, high = min(exponents, key=exponents.__getitem__), max(exponents, key=exponents.__getitem__)
    reading = f"the exponent of N* runs from {exponents[low]:.3f} ({low}) to {exponents[high]:.3f} ({high})"
    num_trendless = len(laws) - len(exponents)
    return f"{reading}; for {plural(num_trendless, 'more metric')} N* shows {NO_TREND}" if num_trendless else reading


def _exponent(law: Law | None) -> str:
    if law is None or "exponent" not in law.values:
        return "–" if law is None else f"not identified\n{describe_status(law)}"
    error = f"\n± {law['exponent_se']:.3f}" if "exponent_se" in law.values else ""
    return format_exponent(law) + error + (f"\n{NO_TREND}" if trend(law) == "none" else "")


def _nearest_cells(study: Study, metric: str) -> list[str]:
    """width/depth of the cell nearest to N*, for every budget with an interior optimum."""
    names = []
    for budget, law in study.laws_by_budget("size_optimum", metric).items():
        runs = study.best_rate_runs("allocation", budget, ["params"])
        if law.ok and runs:
            best = min(runs, key=lambda r: abs(r.knobs["params"] / float(law["x_opt"]) - 1))
            names.append(_cell_name(best))
    return names


def _cell_name(row: RunRow) -> str:
    if "width" in row.knobs and "depth" in row.knobs:
        return f"{row.knobs['width']:g}/{row.knobs['depth']:g}"
    return row.cell_id
