"""What a budget should be spent on by the law of a recipe: size, share, batch and rate together, and how they move.

The cost is nominal (Equation 1 charges every slot for its item) or executed (a step embeds each distinct item once).
Every quantity is asked of the fit and of each refit, so that intervals move together and ratios and differences of
two metrics, fitted to the same draws of the same cells, are paired.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import check_positive_number
from habitus.laws.law_builders import make_intervals, widen_to_values
from habitus.laws.recipe_cost import Cost
from habitus.laws.recipe_form import FORM, Surface
from habitus.laws.recipe_surface import centre_of, fitted_surfaces, from_target, misfit, wrong_form
from habitus.store import LEVELS, Law, Residuals

OPTIMUM = ("params", "share", "batch", "rate", "slots", "metric")
EXPONENTS = ("params", "share", "batch", "rate", "slots", "slots_per_param")
_AT_END = 0.01  # of a logarithm
_PLACES, _ZOOMS = 5, 12  # places per knob, each time within half of the range before
_SLICE_ZOOMS = 7  # the least value is found long before its place
_KNOBS = 3  # size, share and batch; the rate is the best one of the size


@dataclass(frozen=True)
class Budget:
    """What a budget may choose from: what was tried of size, share and batch, carried on as it moved with compute."""

    law: Law
    compute: float
    cost: Cost
    most_slots: float = np.inf

    @cached_property
    def centre(self) -> np.ndarray:
        return centre_of(self.law)

    @cached_property
    def ends(self) -> np.ndarray:
        """Logarithms of the least and the most of size, share and batch [3, 2]."""
        points = {name: np.asarray(column) for name, column in self.law.points.items()}
        total = points["embedder_params"] + points["contextualizer_params"]
        log_c = np.log(points["compute"])
        ends = []
        for name, column in (("params", total), ("share", points["embedder_params"] / total),
                             ("batch", points["batch_sequences"])):  # fmt: skip
            moves = name != "share" and np.ptp(log_c) > 0.1
            slope = float(np.polyfit(log_c, np.log(column), 1)[0]) if moves else 0.0
            rest = np.log(column) - slope * (log_c - np.log(self.compute))
            ends.append((float(rest.min()), float(rest.max())))
        return np.array(ends)

    def recipes(self, surfaces: Surface, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rate, slots and the target of each fit at logarithms of size, share and batch [R, n, 3], at the best rate."""
        N, s, B = np.moveaxis(np.exp(x), -1, 0)
        p_e, p = s * N, (1 - s) * N
        D = self.cost.slots(self.compute, p_e, p, B)
        columns = (p_e, p, D, D / (B * self.cost.seq_len), B, np.ones_like(B))
        u = np.log(np.stack(columns, axis=-1)) - self.centre
        rate = surfaces.best_rate(u)
        log_rate = rate - u[..., 5]
        u[..., 5] = rate
        # A second pass is worth less; by how much these runs do not say.
        beyond = np.log(np.maximum(D / self.most_slots, 1.0))
        return np.exp(log_rate), D, surfaces.metric(u) + beyond

    def lowest(
        self, surfaces: Surface, held: Sequence[float | None] = (None,) * _KNOBS, zooms: int = _ZOOMS
    ) -> np.ndarray:
        """Where each fit's target is least, as [R, 1, 3], some knobs held: grids that halve their range each time."""
        num = len(surfaces.floor)
        first, last = np.repeat(self.ends.T[:, None], num, axis=1)  # [R, 3]
        for k, value in enumerate(held):
            if value is not None:
                first[:, k] = last[:, k] = value
        grid = np.meshgrid(*([0.0] if v is not None else np.linspace(0, 1, _PLACES) for v in held), indexing="ij")
        steps = np.stack(grid, axis=-1).reshape(-1, _KNOBS)
        low, high = first, last
        for _ in range(zooms):
            places = low[:, None] + steps * (high - low)[:, None]
            at = np.argmin(self.recipes(surfaces, places)[2], axis=1)
            best = places[np.arange(num), at]
            step = (high - low) / (_PLACES - 1)
            low, high = np.maximum(first, best - step), np.minimum(last, best + step)
        return np.asarray(best[:, None])


def recipe_optima(law: Law, compute: float, cost: Cost, most_slots: float = np.inf) -> np.ndarray:
    """OPTIMUM of a budget by the fit and by each refit, [1 + refits, 6].

    `most_slots` are those of one pass: larger models are taken where a budget pays for more.
    """
    _check(law)
    check_positive_number(compute=compute)
    budget, surfaces = Budget(law, compute, cost, most_slots), fitted_surfaces(law)
    best = budget.lowest(surfaces)
    rate, slots, target = budget.recipes(surfaces, best)
    return np.column_stack([np.exp(best[:, 0]), rate, slots, from_target(law, target)])


def recipe_optimum(law: Law, compute: float, cost: Cost, most_slots: float = np.inf) -> Law:
    """The best size, share, batch and rate of a budget and the metric there, with intervals that move together.

    An end of an interval that is an end of what was tried is open.
    """
    rows = recipe_optima(law, compute, cost, most_slots)
    ends = np.exp(Budget(law, compute, cost, most_slots).ends)
    by_level = {level: _intervals(OPTIMUM, rows, level) for level in LEVELS}
    values = dict(zip(OPTIMUM, map(float, rows[0]), strict=True))
    by_level = widen_to_values(by_level, values)
    for named in by_level.values():
        for name, (low, high) in zip(OPTIMUM, ends, strict=False):
            a, b = named[name]
            named[name] = (a if np.log(a / low) > _AT_END else 0.0, b if np.log(high / b) > _AT_END else np.inf)
    at_end = _at_end(rows[0], ends)
    status = "boundary" if {"params", "share"} & set(at_end) else law.status
    return Law(
        law="recipe_optimum",
        form=f"{FORM}, at the least target for the cost",
        status=status,
        values=values,
        intervals=make_intervals(by_level),
        residuals=Residuals(n=law.residuals.n, dof=law.residuals.dof),
        warnings=(*((why,) if (why := wrong_form(law)) else ()), *_ends_words(at_end)),
        details={"compute": compute, "at_end": at_end},
    )


def recipe_exponents(law: Law, first: float, last: float, cost: Cost, most_slots: float = np.inf) -> Law:
    """How the best size, share, batch, rate, slots and slots per parameter move from one budget to another."""
    near, far = (recipe_optima(law, c, cost, most_slots) for c in (first, last))
    rows = _exponents(near, far, last / first)
    at_end = {name for c, best in ((first, near[0]), (last, far[0]))
              for name in _at_end(best, np.exp(Budget(law, c, cost, most_slots).ends))}  # fmt: skip
    why = misfit(law)
    by_level = {level: _intervals(EXPONENTS, rows, level) for level in LEVELS}
    values = dict(zip(EXPONENTS, map(float, rows[0]), strict=True))
    return Law(
        law="recipe_exponents",
        form="x* of the recipe's law as C^b between two budgets",
        status="boundary" if {"params", "share"} & at_end else "misfit" if why else law.status,
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=Residuals(n=law.residuals.n, dof=law.residuals.dof),
        warnings=(*((why,) if why else ()), *(_ends_words(sorted(at_end)))),
        details={"first": first, "last": last},
    )


def exponents_by_refit(law: Law, first: float, last: float, cost: Cost, most_slots: float = np.inf) -> np.ndarray:
    """EXPONENTS by the fit and by each refit, [1 + refits, 6]."""
    near, far = (recipe_optima(law, c, cost, most_slots) for c in (first, last))
    return _exponents(near, far, last / first)


def recipe_slice(
    law: Law, compute: float, cost: Cost, knob: str, values: Sequence[float], most_slots: float = np.inf
) -> np.ndarray:
    """The metric over one knob, all the others at their best for it, by the fit and each refit [1 + refits, n].

    The paper's one-axis figures, as slices of a surface: `knob` is "params", "share" or "batch".
    """
    _check(law)
    if knob not in OPTIMUM[:_KNOBS]:
        raise FitError(f"knob {knob!r} is unknown", expected=f"one of {', '.join(OPTIMUM[:_KNOBS])}")
    budget = Budget(law, compute, cost, most_slots)
    surfaces = fitted_surfaces(law)
    columns = []
    for value in values:
        held = [float(np.log(value)) if name == knob else None for name in OPTIMUM[:_KNOBS]]
        columns.append(budget.recipes(surfaces, budget.lowest(surfaces, held, _SLICE_ZOOMS))[2][:, 0])
    return from_target(law, np.stack(columns, axis=1))


def _exponents(near: np.ndarray, far: np.ndarray, times: float) -> np.ndarray:
    """EXPONENTS of OPTIMUM [R, 6] at two budgets, one so many times the other; refits without them are left out."""
    with np.errstate(invalid="ignore", divide="ignore"):
        rows = np.log(_with_ratio(far) / _with_ratio(near)) / np.log(times)
    return np.asarray(rows[np.isfinite(rows).all(axis=1)])


def _at_end(best: np.ndarray, ends: np.ndarray) -> list[str]:
    """Which of size, share and batch are ends of what was tried."""
    return [name for name, value, (low, high) in zip(OPTIMUM, best, ends, strict=False)
            if min(np.log(value / low), np.log(high / value)) < _AT_END]  # fmt: skip


def _with_ratio(rows: np.ndarray) -> np.ndarray:
    """params, share, batch, rate, slots, and slots over params."""
    return np.column_stack([rows[:, :5], rows[:, 4] / rows[:, 0]])


def _intervals(names: Sequence[str], rows: np.ndarray, level: float) -> dict[str, tuple[float, float]]:
    low, high = np.quantile(rows[1:], [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return {n: (float(a), float(b)) for n, a, b in zip(names, low, high, strict=True)}


def _ends_words(at_end: Sequence[str]) -> tuple[str, ...]:
    return (f"the best {', '.join(at_end)} is an end of what was tried",) if at_end else ()


def _check(law: Law) -> None:
    if law.law != "recipe_surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted recipe surface")
