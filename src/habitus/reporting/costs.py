"""Optima under both costs: nominal FLOPs charge every slot for its item, executed ones each distinct item of a step."""

from typing import Any

import numpy as np

from habitus.laws import two_term
from habitus.reporting.figure import Exhibit, Sheet, Table, View
from habitus.reporting.format import (
    describe_optimum,
    describe_status,
    format_interval,
    format_number,
    power_of_ten,
    sentence,
)
from habitus.reporting.study import Study
from habitus.store import Law, direction_of

_QUANTITIES = (("size", "N*", "count"), ("data", "D*", "count"))
_FLOOR_JOINT_DIM = 4  # cells of the smallest embedder do not say where the best share is
_LEAST_SHARES = 6  # distinct ones of a budget
_NOTES = (
    "N* and D*: the law L(N, D) of these runs at the least loss that ten times the largest budget pays, where a run "
    "of N and D costs what such runs cost by Equation 1, or what they executed.",
    "s*: two-term valleys of the same runs as they are, and with every metric moved along L*(C) to the executed FLOPs "
    "that the budget's runs have in the mean.",
)


def both_costs(study: Study) -> Exhibit | None:
    """N*, D*, the exponent of N* and s* by nominal and by executed FLOPs, side by side."""
    rows: list[tuple[str, ...]] = []
    raw: list[tuple[Any, ...]] = []
    readings: dict[str, list[str]] = {}
    for metric in study.metrics:
        laws = [study.law(name, metric) for name in ("surface_optimum_10x", "surface_optimum_executed_10x")]
        nominal, executed = laws
        if nominal is not None and executed is not None:
            rows += _size_rows(metric, nominal, executed)
            raw += _size_lines(metric, nominal, executed)
        shares = _best_shares(study, metric)
        rows += _share_rows(metric, shares)
        raw += _share_lines(metric, shares)
        if rows and rows[-1][0] == metric:
            readings[metric] = _describe(metric, nominal, executed, shares)
    if not rows:
        return None
    reading = readings.get(study.metric) or next(iter(readings.values()))
    header = ("metric", "quantity", "by nominal FLOPs [95%]", "by executed FLOPs [95%]")
    view = View(sentence(*reading), table=Table(header, tuple(rows), _NOTES))
    names = ("metric", "quantity", "cost", "flops", "value", "low95", "high95", "status")
    return Exhibit("costs", "Optima by nominal and by executed FLOPs", (view,), Sheet(names, tuple(raw)))


def _size_rows(metric: str, nominal: Law, executed: Law) -> list[tuple[str, ...]]:
    rows = []
    for name, letter, kind in _QUANTITIES:
        cells = [
            f"{describe_optimum(law, kind, name)}\nat {power_of_ten(law.details['compute'])}" if law.values
            else describe_status(law)
            for law in (nominal, executed)
        ]  # fmt: skip
        rows.append((metric, f"{letter} at ten times the largest budget", *cells))
    rows.append((metric, "exponent of N* in C", *(_exponent(law) for law in (nominal, executed))))
    return rows


def _exponent(law: Law) -> str:
    if not law.values:
        return describe_status(law)
    status = "" if law.ok else f"({describe_status(law)})"
    return f"{law['exponent']:.3f} {format_interval(law, 'exponent', 'plain')} {status}".strip()


def _size_lines(metric: str, nominal: Law, executed: Law) -> list[tuple[Any, ...]]:
    return [
        (metric, name, cost, law.details["compute"], law[name], *law.interval(name), law.status)
        for cost, law in (("nominal", nominal), ("executed", executed))
        if law.values
        for name in ("size", "data", "exponent")
    ]


def _best_shares(study: Study, metric: str) -> dict[float, tuple[Law, Law, float]]:
    """Of each budget the valley of shares by nominal and by executed FLOPs, and the executed FLOPs of the second."""
    law = study.law("loss_law", metric)
    if law is None or not law.values:
        return {}
    judged = study.laws_by_budget("share_optimum", metric)
    shares = {}
    for budget in study.budgets:
        rows = study.best_rate_runs("share", budget, ["embedder_share", "flops_executed", metric])
        rows = [row for row in rows if row.knobs.get("joint_dim", np.inf) > _FLOOR_JOINT_DIM]
        # Two seeds that agree to the last digit would be refused as one row listed twice.
        rows = list({(row.knobs["embedder_share"], row.metrics[metric]): row for row in rows}.values())
        x = np.array([row.knobs["embedder_share"] for row in rows])
        if len(set(x)) < _LEAST_SHARES:
            continue
        y = np.array([row.metrics[metric] for row in rows])
        executed = np.array([row.knobs["flops_executed"] for row in rows])
        mean = float(np.exp(np.log(executed).mean()))
        moved = y + _reached(law, np.array(budget), metric) - _reached(law, budget * executed / mean, metric)
        nominal, by_executed = (two_term(x, values, direction_of(metric)) for values in (y, moved))
        shares[budget] = _as_judged(nominal, judged.get(budget)), _as_judged(by_executed, judged.get(budget)), mean
    return shares


def _as_judged(valley: Law, judged: Law | None) -> Law:
    """The valley, refused where seeds refuse that of the same runs: here nothing holds it against them."""
    refused = judged is not None and judged.status == "misfit"
    return valley.model_copy(update={"status": "misfit"}) if refused and valley.ok else valley


def _reached(law: Law, compute: np.ndarray, metric: str) -> np.ndarray:
    """L*(C), without its interval."""
    sign = 1 if direction_of(metric) == "min" else -1
    return np.asarray(law["floor"] + sign * law["coefficient"] * compute ** -law["exponent"])


def _share_rows(metric: str, shares: dict[float, tuple[Law, Law, float]]) -> list[tuple[str, ...]]:
    return [
        (metric, f"s* at {power_of_ten(budget)} nominal", describe_optimum(nominal, "percent"),
         f"{describe_optimum(executed, 'percent')}\nat {power_of_ten(mean)} executed")
        for budget, (nominal, executed, mean) in shares.items()
    ]  # fmt: skip


def _share_lines(metric: str, shares: dict[float, tuple[Law, Law, float]]) -> list[tuple[Any, ...]]:
    return [
        (metric, "share", cost, flops, law["x_opt"], *law.interval("x_opt"), law.status)
        for budget, (nominal, executed, mean) in shares.items()
        for cost, law, flops in (("nominal", nominal, budget), ("executed", executed, mean))
        if "x_opt" in law.values
    ]


def _describe(
    metric: str, nominal: Law | None, executed: Law | None, shares: dict[float, tuple[Law, Law, float]]
) -> list[str]:
    """How far the cost moves the exponent of N*, and s* at the largest budget, where both are identified."""
    clauses = []
    if nominal is not None and executed is not None and nominal.ok and executed.ok:
        by_nominal, by_executed = nominal["exponent"], executed["exponent"]
        clauses.append(
            f"for {metric} N* ∝ C^b has b = {by_nominal:.3f} by nominal and {by_executed:.3f} by executed FLOPs"
        )
    both = [budget for budget, laws in shares.items() if laws[0].ok and laws[1].ok]
    if both:
        top = max(both)
        one, other = (format_number(float(law["x_opt"]), "percent") for law in shares[top][:2])
        clauses.append(f"s* for {metric} at {power_of_ten(top)} is {one} by nominal and {other} by executed FLOPs")
    return clauses or [f"neither N* nor s* for {metric} is identified under both costs"]
