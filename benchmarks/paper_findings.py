"""The findings of the paper, each a number and the range that it claims for it, judged by what a study measured.

A finding is confirmed where the whole 95% interval lies in the range, refuted where none of it does, and not decided
otherwise; half the interval's width is the smallest effect that could have been seen. `paper_study.py` writes them out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
from paper_evidence import (
    INFINITE,
    LOSS,
    Evidence,
    Measured,
    NotMeasuredError,
    Z,
    at_share,
    least_critical_batch,
    mean_correlation,
    mean_ratio,
    of_correlation,
    of_law,
    of_refits,
    share_curve,
    spanning,
    without_noise,
)
from scipy.stats import t

from habitus.laws.frontier import shared_shape
from habitus.laws.recipe_optimum import OPTIMUM, Budget, exponents_by_refit, recipe_optima
from habitus.store import SURFACE_AXIS, RunRow, direction_of

BY_RECIPE = "by the recipe's law"
RECALL, NDCG = "batch/recall@10", "batch/ndcg@10"
FULL_LOSS, FULL_RECALL, FULL_NDCG = "catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10"


# The findings -------------------------------------------------------------------------------------------------------


def small_embedder(e: Evidence) -> Measured:
    optima = e.optima("share_optimum", LOSS)
    if optima:
        return spanning(optima.items(), "x_opt", "s*")
    found = spanning(e.recipe_optima(LOSS).items(), "share", "s*")
    return replace(found, n=len(e.surface_runs.runs), figure="surface-table")


def constant_share(e: Evidence) -> Measured:
    try:
        return of_law(e.law("share_law", LOSS), "exponent")
    except NotMeasuredError:
        return replace(of_law(e.law("recipe_exponents", LOSS), "share", BY_RECIPE), figure="surface-exponents")


def share_of_metrics(e: Evidence) -> Measured:
    loss, ranking = e.optima("share_optimum", LOSS), e.optima("share_optimum", RECALL)
    if not loss and e.runs(SURFACE_AXIS):
        return share_of_metrics_by_recipe(e)
    return mean_ratio([(of_law(ranking[c], "x_opt"), of_law(loss[c], "x_opt")) for c in ranking if c in loss],
                      "s* of loss and of recall")  # fmt: skip


def share_of_metrics_by_recipe(e: Evidence) -> Measured:
    """At the largest budget, by refits of both laws to the same draws of cells."""
    top, runs = max(e.recipe_optima(LOSS)), e.surface_runs
    by_metric = [recipe_optima(e.recipe_law(metric), top, runs.cost(), runs.most_slots)[:, OPTIMUM.index("share")]
                 for metric in (RECALL, LOSS)]  # fmt: skip
    shares = ", ".join(f"{rows[0]:.0%}" for rows in by_metric)
    found = of_refits(by_metric[0] / by_metric[1], len(runs.runs), f"at {top:.0e}: {shares}, paired refits")
    # An end of what was tried bounds the interval: what lies beyond is not known.
    tried = np.exp(Budget(e.recipe_law(LOSS), top, runs.cost()).ends[1])
    beyond = np.quantile(by_metric[0][1:], 0.975) > 0.98 * tried[1]
    return replace(found, high=INFINITE if beyond else found.high, figure="surface-table")


def flat_band(e: Evidence) -> Measured:
    if not e.runs("share") and e.runs(SURFACE_AXIS):
        top = max(e.recipe_optima(LOSS))
        rows = e.slices(top, (0.02, 0.03, 0.045, 0.06))
        found = of_refits(np.ptp(rows, axis=1), len(e.surface_runs.runs), f"2% to 6% at {top:.0e}, {BY_RECIPE}")
        return replace(found, figure="surface-slices")
    curves = e.optima("share_optimum", LOSS)
    if curves:
        top = max(curves)
        shares = [float(s) for s in np.geomspace(0.02, 0.06, 9)]
        heights = [share_curve(curves[top], s, 0.02)[0] for s in shares]
        span, se, dof = share_curve(curves[top], shares[int(np.argmax(heights))], shares[int(np.argmin(heights))])
        half = float(t.ppf(0.975, dof)) * se
        return Measured(span, span - half, span + half, curves[top].residuals.n, f"at {top:.1e}, by the fitted curve")
    error, dof = e.seed_error(LOSS, stage=1)
    for c, cells in reversed(e.cells("share", LOSS, "embedder_share").items()):
        inside = {share: loss for share, loss in cells.items() if 0.015 <= share <= 0.07}
        if len(inside) >= 2:
            worst, best = max(inside, key=lambda s: inside[s]), min(inside, key=lambda s: inside[s])
            seeds = [e.num_seeds("share", LOSS, "embedder_share", c, s) for s in (worst, best)]
            half = error * math.sqrt(sum(1 / n for n in seeds))
            spread = inside[worst] - inside[best]
            return Measured(spread, spread - half, spread + half, len(inside), f"at {c:.0e}, seeds with {dof} dof")
    raise NotMeasuredError("no budget has two cells between 2% and 6%")


def large_embedder_costs_less(e: Evidence) -> Measured:
    if not e.runs("share") and e.runs(SURFACE_AXIS):
        e.law("recipe_exponents", LOSS)  # a difference between budgets is as good as how optima move
        budgets = e.recipe_optima(LOSS)
        rows = {c: e.slices(c, (0.06, 0.27)) for c in (min(budgets), max(budgets))}
        first, last = (row[:, 1] - row[:, 0] for row in rows.values())
        note = "; ".join(f"{c:.0e}: {row[0, 1] - row[0, 0]:+.3f}" for c, row in rows.items())
        return replace(
            of_refits(first - last, len(e.surface_runs.runs), f"{note}, {BY_RECIPE}"), figure="surface-slices"
        )
    curves = {c: share_curve(law, 0.27, 0.06) for c, law in e.optima("share_optimum", LOSS).items()}
    if len(curves) > 1:
        (first, a, dof), (last, b, _) = curves[min(curves)], curves[max(curves)]
        half, value = float(t.ppf(0.975, dof)) * math.hypot(a, b), first - last
        note = "; ".join(f"{c:.1e}: {cost:+.3f}" for c, (cost, *_) in curves.items()) + ", by fitted curves"
        return Measured(value, value - half, value + half, len(curves), note)
    error, _ = e.seed_error(LOSS, stage=1)
    costs = {}
    for c, cells in e.cells("share", LOSS, "embedder_share").items():
        try:
            costs[c] = at_share(cells, 0.27) - at_share(cells, 0.06)
        except NotMeasuredError:
            continue
    if len(costs) < 2:
        raise NotMeasuredError("fewer than two budgets have cells around 6% and 27%")
    first, last = costs[min(costs)], costs[max(costs)]
    half, note = 2 * error, "; ".join(f"{c:.0e}: {cost:+.3f}" for c, cost in costs.items())
    return Measured(first - last, first - last - half, first - last + half, len(costs), note)


def depth_is_second_order(e: Evidence) -> Measured:
    error, _ = e.seed_error(LOSS, stage=1)
    depth, share = e.cells("depth", LOSS, "depth"), e.cells("share", LOSS, "embedder_share")
    shared = [c for c in depth if c in share and len(depth[c]) >= 3 and len(share[c]) >= 3]
    if not shared:
        raise NotMeasuredError("no budget has both a depth and a share sweep")
    spans = [max(cells[max(shared)].values()) - min(cells[max(shared)].values()) for cells in (depth, share)]
    ratio = spans[0] / spans[1]
    half = ratio * math.sqrt(2) * error * math.hypot(1 / spans[0], 1 / spans[1])
    note = f"{spans[0]:.3f} over {spans[1]:.3f} nats at {max(shared):.0e}"
    return Measured(ratio, ratio - half, ratio + half, len(depth[max(shared)]), note)


def critical_batches(e: Evidence, metric: str, arm: str = "critical_batch") -> dict[float, Measured]:
    """B_crit by the reference's steps, where it is identified there."""
    rows = [row for entry in e.laws.entries if entry.name == arm and entry.metric == metric
            for row in entry.law.details.get("by_target", ())]  # fmt: skip
    return {row["reference_steps"]: Measured(row["b_crit"], row["low"] or 0.0, row["high"] or INFINITE, 1)
            for row in rows if row["status"] == "ok"}  # fmt: skip


def critical_batch_ratio(metric: str) -> Callable[[Evidence], Measured]:
    def measure(e: Evidence) -> Measured:
        notes = []
        for arm in ("critical_batch_fixed_pool", "critical_batch"):
            other, loss = critical_batches(e, metric, arm), critical_batches(e, LOSS, arm)
            pairs = [(other[at], loss[at]) for at in other if at in loss]
            try:
                found = mean_ratio(pairs, f"B_crit of {metric} and of {LOSS} at equal reference steps",
                                   same_runs=True)  # fmt: skip
            except NotMeasuredError:
                continue
            notes.append("candidates of a fixed pool" if "pool" in arm else "candidates of the batch")
            return replace(found, n=len(pairs), note=f"at {len(pairs)} equal reference steps, {notes[0]}")
        raise NotMeasuredError(f"B_crit of {metric} and of {LOSS} is not identified at equal reference steps")

    return measure


def entropy_has_no_plateau(e: Evidence) -> Measured:
    for entry in e.laws.entries:
        if entry.name == "critical_batch" and entry.metric == "batch/entropy":
            law, largest = entry.law, max(entry.law.points.get("batch", (0.0,)))
            if law.ok:
                low, high = law.interval("b_crit")
                return Measured(law["b_crit"] / largest, low / largest, high / largest, law.residuals.n)
            if "b_crit_above" in law.details:
                low = min(least_critical_batch(law.points["batch"], law.points["steps"]) / largest, 100.0)
                note = f"steps fall as 1/B up to {largest:g}"
                return Measured(max(1.0, low), low, INFINITE, law.residuals.n, note)
            raise NotMeasuredError(f"B_crit of the entropy is {law.status.replace('_', ' ')}")
    raise NotMeasuredError("no trajectory of the entropy")


def size_exponent(e: Evidence, metric: str = LOSS) -> Measured:
    try:
        return of_law(e.law("size_law", metric), "exponent")
    except NotMeasuredError:
        if not e.runs(SURFACE_AXIS):
            raise
    return replace(of_law(e.law("recipe_exponents", metric), "params", BY_RECIPE), figure="surface-exponents")


def data_ratio_falls(e: Evidence) -> Measured:
    size = size_exponent(e)
    note = size.note
    if note == BY_RECIPE:
        law = e.law("recipe_exponents", LOSS)
        low, high = law.interval("slots_per_param")
        note += f"; as realised {law['slots_per_param']:.2f} [{low:.2f}, {high:.2f}]"
    # D* = C/(6N*), the paper's: the exponent of D/N is 1 − 2·b.
    return Measured(1 - 2 * size.value, 1 - 2 * size.high, 1 - 2 * size.low, size.n, note, size.figure)


def data_heavy(e: Evidence) -> Measured:
    optima, name, note = e.optima("size_optimum", LOSS), "x_opt", "by C = 6ND"
    if not optima:
        optima, name = e.recipe_optima(LOSS), "params"
    c = min(optima, key=lambda budget: abs(math.log(budget / 1e15)))
    size = of_law(optima[c], name)
    if name == "params":
        note += f"; as realised {optima[c]['slots'] / optima[c]['params']:.0f}"
    low, high = (c / 6 / end**2 if end > 0 else INFINITE for end in (size.high, size.low))
    figure = "surface-table" if name == "params" else ""
    return Measured(c / 6 / size.value**2, low, high, size.n, f"at {c:.0e}, {note}", figure)


def exponent_difference(metric: str) -> Callable[[Evidence], Measured]:
    def measure(e: Evidence) -> Measured:
        if not e.runs("allocation") and e.runs(SURFACE_AXIS):
            return exponent_difference_by_recipe(e, metric)
        size_exponent(e), e.law("size_law", metric)  # refused where either is
        return paired_exponents(e, metric)

    return measure


def paired_exponents(e: Evidence, metric: str) -> Measured:
    """How much faster N* grows by the metric than by the loss, on the same runs: a jackknife leaves out a size at every
    budget, then a budget, in both, since what one size or one budget is off by moves both exponents alike."""
    runs = [r for r in e.runs("allocation") if {metric, LOSS} <= set(r.metrics)]

    def difference(left_out: Callable[[RunRow], bool]) -> float:
        slopes = []
        for name in (metric, LOSS):
            kept = [r for r in runs if not left_out(r)]
            columns = ([r.budget for r in kept], [r.knobs["params"] for r in kept], [r.metrics[name] for r in kept])
            law = shared_shape(*columns, direction_of(name)).size
            slopes.append(law["exponent"] if law.ok else math.nan)
        return slopes[0] - slopes[1]

    value, variance = difference(lambda _: False), 0.0
    keys: tuple[Callable[[RunRow], float], ...] = (lambda r: r.knobs["params"], lambda r: r.budget)
    for key in keys:
        groups = sorted({key(r) for r in runs})
        moved = np.array([difference(_is_in(key, group)) for group in groups])
        if not np.isfinite([value, *moved]).all():
            raise NotMeasuredError(f"N*(C) of {metric} or of {LOSS} is not identified without one size or budget")
        variance += float((len(moved) - 1) * moved.var())
    half = float(t.ppf(0.975, len({r.budget for r in runs}) - 2)) * math.sqrt(variance)
    return Measured(value, value - half, value + half, len(runs), "paired jackknife over sizes and budgets")


def _is_in(key: Callable[[RunRow], float], group: float) -> Callable[[RunRow], bool]:
    return lambda run: key(run) == group


def exponent_difference_by_recipe(e: Evidence, metric: str) -> Measured:
    """By refits of both laws to the same draws of cells."""
    if metric.startswith("train/"):
        raise NotMeasuredError("the training loss of larger batches has more candidates: it needs sizes at one batch")
    for name in (LOSS, metric):
        e.law("recipe_exponents", name)
    runs = e.surface_runs
    shared = set(e.recipe_optima(LOSS)) & set(e.recipe_optima(metric))
    if len(shared) < 2:
        raise NotMeasuredError("fewer than two budgets leave some of the pass")
    ends = min(shared), max(shared)
    rows = [exponents_by_refit(e.recipe_law(name), *ends, runs.cost(), runs.most_slots)[:, 0] for name in
            (metric, LOSS)]  # fmt: skip
    found = of_refits(rows[0] - rows[1], len(runs.runs), "paired refits of the recipe's laws")
    return replace(found, figure="surface-exponents")


def loss_wants_more_negatives(e: Evidence) -> Measured:
    loss, ranking = e.optima("negatives_optimum", FULL_LOSS), e.optima("negatives_optimum", FULL_RECALL)
    return mean_ratio([(of_law(loss[c], "x_opt"), of_law(ranking[c], "x_opt")) for c in loss if c in ranking],
                      "K* of loss and of recall")  # fmt: skip


def negatives_band(e: Evidence) -> Measured:
    optima = [pair for metric in (FULL_RECALL, FULL_NDCG) for pair in e.optima("negatives_optimum", metric).items()]
    return spanning(optima, "x_opt", "K* of a ranking metric") if optima else best_negatives(e)


def best_negatives(e: Evidence) -> Measured:
    """Where no valley turns: the K whose ranking metrics seeds cannot tell from the best, at every budget."""
    bests, lows, highs, notes, count = [], [], [], [], 0
    if not e.cells("negatives", FULL_RECALL, "num_negatives"):
        raise NotMeasuredError("no sweep of negatives")
    for metric in (FULL_RECALL, FULL_NDCG):
        error, dof = e.seed_error(metric, stage=2)
        for c, cells in e.cells("negatives", metric, "num_negatives").items():
            best = max(cells, key=lambda k: cells[k])
            seeds = {k: e.num_seeds("negatives", metric, "num_negatives", c, k) for k in cells}
            alike = [k for k in cells if cells[k] >= cells[best] - error * math.sqrt(1 / seeds[k] + 1 / seeds[best])]
            # The ends lie between the outermost K that are as good as the best and the next ones.
            bests.append(best)
            lows.append(max((k for k in cells if k < min(alike)), default=0.0))
            highs.append(min((k for k in cells if k > max(alike)), default=INFINITE))
            notes.append(f"{metric.split('/')[1]} at {c:.1e}: {best:,.0f}")
            count += len(cells)
    note = f"no valley turns; best K that was run: {'; '.join(notes)}; seeds with {dof} dof"
    return Measured(mean(bests), min(lows), max(highs), count, note)


def more_negatives_still_help(e: Evidence) -> Measured:
    cells = e.cells("negatives", FULL_RECALL, "num_negatives")
    if not cells:
        raise NotMeasuredError("no sweep of negatives")
    top = cells[max(cells)]
    last, before = (sorted(top)[-1], sorted(top)[-2]) if len(top) > 1 else (0.0, 0.0)
    if last == before:
        raise NotMeasuredError("one K at the largest budget")
    errors = [r.metrics[FULL_RECALL].se for r in e.records if FULL_RECALL in r.metrics and r.recipe.train.stage == 2]
    # All runs answer the same queries: users' own differences cancel, and this is too wide rather than too narrow.
    half = Z * math.sqrt(2) * mean([se for se in errors if se is not None] or [INFINITE])
    gain = top[last] - top[before]
    return Measured(gain, gain - half, gain + half, len(top), f"K {before:,.0f} to {last:,.0f} at {max(cells):.0e}")


def stage1_locked(e: Evidence) -> Measured:
    pairs = e.correlation("stage1", LOSS, RECALL)
    found = mean_correlation([pair for label, pair in pairs.items() if e.is_of_sweep(label)], "stage 1")
    found = without_noise(found, [e.reliability(metric) for metric in (LOSS, RECALL)])
    return of_architectures(e, found)


def stage2_flips(e: Evidence) -> Measured:
    pairs = [of_correlation(p, label) for label, p in e.correlation("stage2", FULL_LOSS, FULL_RECALL).items()]
    by_budget = [m for m in pairs if m.note[:1].isdigit()]
    if len(by_budget) < 2:
        raise NotMeasuredError("fewer than two budgets of stage 2")
    first, last = by_budget[0], by_budget[-1]
    low, high = first.low - last.high, first.high - last.low
    note = f"{first.value:+.2f} at {first.note}, {last.value:+.2f} at {last.note}"
    return Measured(first.value - last.value, low, high, first.n + last.n, note)


def regime_agreement(metric: str) -> Callable[[Evidence], Measured]:
    def measure(e: Evidence) -> Measured:
        by_budget = e.regimes("negatives", metric)
        if not by_budget:
            raise NotMeasuredError(f"no sweep of negatives was scored by {metric} in both regimes")
        return of_correlation(by_budget[max(by_budget)], f"at {max(by_budget):.0e}")

    return measure


def history_slices(e: Evidence) -> Measured:
    tables = [t for named in e.laws.correlations if named.name == f"slices:{RECALL}" and named.runs.startswith("best")
              for t in named.tables]  # fmt: skip
    pairs = [pair for table in tables if e.is_of_sweep(table.label) for pair in [table.worst()] if pair is not None]
    names = [f"{RECALL}/{name}" if name != "all" else RECALL for pair in pairs for name in (pair.first, pair.second)]
    noise = [mean(map(e.reliability, names))] * 2 if names else [1.0]
    return of_architectures(e, without_noise(mean_correlation(pairs, "slices by history"), noise))


def of_architectures(e: Evidence, found: Measured) -> Measured:
    """A correlation over cells, unless their batches and rates vary too: the paper's are of architectures."""
    if e.runs("share") or e.runs("allocation") or not e.runs(SURFACE_AXIS):
        return found
    told = f"{found.value:+.2f} [{found.low:.2f}, {found.high:.2f}] ({found.note})"
    raise NotMeasuredError(f"{told} over cells whose batch and rate vary too; it takes sizes or shares at tuned rates")


def mup_is_no_better(e: Evidence) -> Measured:
    error, _ = e.seed_error(LOSS, stage=1)
    best: dict[tuple[float, str], float] = {}
    for run in (run for run in e.laws.runs if run.axis == "init" and LOSS in run.metrics):
        key = run.budget, run.init
        best[key] = min(best.get(key, INFINITE), run.metrics[LOSS])
    gaps = [best[c, "mup_lr"] - best[c, "default"] for c, init in best if init == "default" and (c, "mup_lr") in best]
    if not gaps:
        raise NotMeasuredError("no sweep of initialisations")
    half = error * math.sqrt(2 / len(gaps))
    return Measured(mean(gaps), mean(gaps) - half, mean(gaps) + half, len(gaps))


@dataclass(frozen=True)
class Finding:
    claim: str
    quantity: str
    low: float  # of the claimed range
    high: float
    figure: str  # of report.html
    measure: Callable[[Evidence], Measured]


FINDINGS = (
    Finding("The best embedder is small: s* 1.1 to 3.7% at every budget", "s* of the loss", 0.01, 0.06, "share-table",
            small_embedder),
    Finding("s* does not move with compute: C^0.07", "exponent of s*", -0.15, 0.15, "share-law", constant_share),
    Finding("Loss and ranking want the same share", "s* of recall@10 over s* of the loss", 1 / 1.5, 1.5, "share-table",
            share_of_metrics),
    Finding("From 2 to 6% the loss is flat: within 0.06 nats", "range of the loss, nats", -INFINITE, 0.06, "share",
            flat_band),
    Finding("Too large an embedder costs less with more compute: 6 to 27% costs 0.40 nats at 1e15, 0.09 at 1e18",
            "cost at the smallest budget less that at the largest, nats", 0.0, INFINITE, "share",
            large_embedder_costs_less),
    Finding("Depth is a second-order knob", "range of the loss over depth, of that over share", -INFINITE, 1.0,
            "depth-summary", depth_is_second_order),
    Finding("Loss and recall@10 share a critical batch: 574 and 544", "B_crit of recall@10 over that of the loss",
            1 / 1.5, 1.5, "batch-targets", critical_batch_ratio(RECALL)),
    Finding("Position-weighted ranking saturates earlier: NDCG@10 274 against 574",
            "B_crit of NDCG@10 over that of the loss", 0.0, 0.75, "batch-targets", critical_batch_ratio(NDCG)),
    Finding("Entropy has no plateau up to the largest batch", "B_crit of the entropy over the largest batch", 1.0,
            INFINITE, "batch-table", entropy_has_no_plateau),
    Finding("N* grows as C^0.617 ± 0.025", "exponent of N*", 0.567, 0.667, "frontiers", size_exponent),
    Finding("D/N falls with compute, from 344 to 36", "exponent of D/N by C = 6ND", -INFINITE, 0.0, "frontiers",
            data_ratio_falls),
    Finding("Training is data-heavy at low compute: D/N 345 at 1e15, text's rule is 20", "D/N by C = 6ND", 20.0,
            INFINITE, "allocation-table", data_heavy),
    Finding("Exponents hardly depend on the metric: 0.617 by loss, 0.586 by NDCG@10",
            "exponent of N* by NDCG@10 less that by loss", -0.1, 0.1, "exponents", exponent_difference(NDCG)),
    Finding("The training loss gives the same exponent: 0.612", "exponent of N* by training loss less that by loss",
            -0.1, 0.1, "train-surrogate", exponent_difference("train/loss")),
    Finding("Loss wants more negatives than ranking: 400k against 250k at 1e17",
            "K* of the loss over that of recall@10", 1.0, INFINITE, "negatives-table", loss_wants_more_negatives),
    Finding("Ranking metrics want 125k to 870k negatives", "K* of recall@10 and NDCG@10", 125e3, 870e3,
            "negatives-table", negatives_band),
    Finding("At the largest budget the largest K still helps: memory binds, not compute",
            "recall@10 gained by the last step in K", 0.0, INFINITE, "negatives", more_negatives_still_help),
    Finding("In stage 1 loss and recall@10 are locked: ρ −0.98 at every budget", "mean ρ of the budgets",
            -1.0, -0.9, "correlations", stage1_locked),
    Finding("In stage 2 they flip: ρ +0.93 at 1e15, −1.00 at 1e18", "ρ at the smallest budget less that at the largest",
            1.0, 2.0, "correlations", stage2_flips),
    Finding("Batch-local loss is no proxy of the catalogue's over K: ρ −0.95", "ρ of the loss between regimes", -1.0,
            0.5, "regimes", regime_agreement("loss")),
    Finding("Batch-local NDCG@10 is a proxy over K: ρ +0.90", "ρ of NDCG@10 between regimes", 0.5, 1.0, "regimes",
            regime_agreement("ndcg@10")),
    Finding("History lengths rank architectures alike: ρ at least 0.93",
            "lowest ρ between two lengths, mean of the budgets", 0.85, 1.0, "slices", history_slices),
    Finding("MuP is worse than the default: 0.68 to 0.93 nats", "loss of MuP less the default's, nats", 0.0, INFINITE,
            "init-table", mup_is_no_better),
)  # fmt: skip


def judge(evidence: Evidence) -> list[dict[str, object]]:
    """One row per finding."""
    rows: list[dict[str, object]] = []
    for number, finding in enumerate(FINDINGS, start=1):
        row: dict[str, object] = {"number": number, "claim": finding.claim, "quantity": finding.quantity,
                                  "claimed": [_finite(finding.low), _finite(finding.high)],
                                  "figure": finding.figure}  # fmt: skip
        try:
            found = finding.measure(evidence)
        except NotMeasuredError as error:
            rows.append({**row, "verdict": "not decided", "why": str(error)})
            continue
        row["figure"] = found.figure or finding.figure
        verdict = found.verdict(finding.low, finding.high)
        why = f"an interval of half of ±{found.smallest_effect:.3g} or less" if verdict == "not decided" else ""
        if not math.isfinite(found.smallest_effect) and verdict == "not decided":
            why = "an interval with two ends"
        rows.append({**row, "value": found.value, "low": _finite(found.low), "high": _finite(found.high), "n": found.n,
                     "smallest_effect": _finite(found.smallest_effect), "note": found.note, "verdict": verdict,
                     "why": why})  # fmt: skip
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
