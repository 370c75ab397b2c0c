"""Six knobs at once: the joint optimum beside the centre, where they were chosen one at a time; and dropout's share."""

from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import describe_status, format_number, percent, power_of_ten, sentence, significant
from habitus.reporting.study import Study
from habitus.store import Law

_KINDS = {"rate_at_512": "rate"}
_NAMES = {"rate_at_512": "learning rate at 512 windows"}


def shape_table(study: Study) -> Exhibit | None:
    """Per metric and budget every knob: the centre, the best alone, the best of all together with its interval."""
    views, raw = [], []
    for metric in study.metrics:
        optima = study.laws_by_budget("shape_optimum", metric)
        for budget, best in optima.items():
            centre = study.laws_by_budget("shape_centre", metric).get(budget)
            surface = study.laws_by_budget("shape_surface", metric)[budget]
            rows = []
            for name in (n for n in best.values if n != "metric"):
                low, high = best.interval(name)
                kind = _KINDS.get(name, "count")
                at = None if centre is None else centre.details["centre"][name]
                alone = None if centre is None else centre.details["one_at_a_time"][name]
                inside = "–" if centre is None else "yes" if centre.details["inside_interval"][name] else "no"
                ends = f"[{format_number(low, kind)}, {format_number(high, kind)}]"
                rows.append(
                    (
                        _NAMES.get(name, name),
                        format_number(at, kind),
                        format_number(alone, kind),
                        f"{format_number(best[name], kind)} {ends}",
                        inside,
                    )
                )
                raw.append((metric, budget, name, at, alone, best[name], low, high, inside))
            header = ("knob", "centre", "best alone", "best together [95%]", "alone inside")
            table = Table(header, tuple(rows), tuple(best.warnings))
            views.append(View(_describe(metric, budget, best, surface, centre), metric, table=table))
    sheet = Sheet(
        ("metric", "flops_budget", "knob", "centre", "best_alone", "best_together", "low95", "high95", "inside"),
        tuple(raw),
    )
    return Exhibit("shape-knobs", "Six knobs at once", tuple(views), sheet) if views else None


def _describe(metric: str, budget: float, best: Law, surface: Law, centre: Law | None) -> str:
    parts = [f"At {power_of_ten(budget)} the surface has {metric} {significant(best['metric'])} at its best point"]
    if centre is not None:
        low, high = centre.interval("lost")
        where = "inside" if centre.details["inside_region"] else "outside"
        parts.append(
            f"the centre loses {significant(centre['lost'], 2)} [{significant(low, 2)}, {significant(high, 2)}] "
            f"to it and lies {where} the region of the optimum (p = {centre['p_value']:.2g})"
        )
        if "lost_one_at_a_time" in centre.values:
            low, high = centre.interval("lost_one_at_a_time")
            parts.append(
                f"the best values alone, put together, lose {significant(centre['lost_one_at_a_time'], 2)} "
                f"[{significant(low, 2)}, {significant(high, 2)}]"
            )
    if "held_out_rmse" in surface.values:
        parts.append(
            f"{surface.details['held_out']} cells held out are missed by {significant(surface['held_out_rmse'], 2)}, "
            f"where they differ by {significant(surface['held_out_spread'], 2)}"
        )
    if not best.ok:
        parts.append(describe_status(best))
    return sentence(*parts)


def regularised_shares(study: Study) -> Exhibit | None:
    """The best share with and without dropout in the embedder, and whether it moves up."""
    rows, raw, moved, total = [], [], 0, 0
    for metric in study.metrics:
        for budget, law in study.laws_by_budget("regularised_share", metric).items():
            total += 1
            ends: tuple[float | None, float | None] = (None, None)
            if law.ok:
                low, high = ends = law.interval("ratio")
                moved += low > 1
                cells = (percent(law["share_plain"]), percent(law["share_regularised"]))
                ratio = f"{law['ratio']:.2g} [{low:.2g}, {high:.2g}]"
            else:
                cells, ratio = ("–", "–"), describe_status(law)
            rows.append((metric, power_of_ten(budget), *cells, ratio))
            raw.append((metric, budget, law.values.get("share_plain"), law.values.get("share_regularised"),
                        law.values.get("ratio"), *ends, law.status))  # fmt: skip
    if not rows:
        return None
    reading = sentence(f"Dropout in the embedder moves the best share up in {moved} of {total} cases")
    table = Table(("metric", "budget", "s* without", "s* with dropout", "ratio [95%]"), tuple(rows))
    header = ("metric", "flops_budget", "share_plain", "share_regularised", "ratio", "low95", "high95", "status")
    title = "Share with dropout in the embedder"
    return Exhibit("regularised-share", title, (View(reading, table=table),), Sheet(header, tuple(raw)))
