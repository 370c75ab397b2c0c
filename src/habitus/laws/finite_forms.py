"""Forms of the metric on a log that ends: over parameters N, unique events U and passes R over them.

All read  sign·y = floor + Σ c_k φ_k(N, U, R; θ)  with c_k ≥ 0, so that at a given θ the rest is linear.

    penalty     A/N^α + B/(U·R)^β + P·(R−1)^ρ·(N/U)^κ
    repetition  A/N'^α + B/D'^β,   D' = U·(1 + r·(1 − e^{−(R−1)/r})),   N' likewise in N/N_U − 1

`repetition` is the data-constrained law of Muennighoff et al. (2023): the half-lives r say after how many passes an
event, and after how many times the size N_U that its unique events would want, a parameter, is worth little more. It
never says that another pass harms. `penalty` is additive in the spirit of Lovelace et al. (2026), whose exact term we
do not know: ours grows with the passes and with the parameters per unique event. Where all runs have one size, its
terms are part of the floor and of P.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where a form is evaluated; all [n]."""

    N: np.ndarray
    U: np.ndarray
    R: np.ndarray


class Exponent(NamedTuple):
    """One θ: its name, its bounds, and where and how firmly (a factor at one sigma) it is expected."""

    name: str
    low: float
    high: float
    expected: float
    factor: float


@dataclass(frozen=True)
class FiniteForm:
    """θ [G, k] and places [n] to terms [G, n, m]."""

    name: str
    equation: str
    exponents: tuple[Exponent, ...]
    coefs: tuple[str, ...]
    terms: Callable[[np.ndarray, Place, Place], np.ndarray]  # θ, places, and the middle that they are measured from
    scale: Callable[
        [np.ndarray, Place], np.ndarray
    ]  # θ and the middle to what c is multiplied by, in the places' units

    def log_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return np.log([e.low for e in self.exponents]), np.log([e.high for e in self.exponents])


_SIZE = Exponent("size_exponent", 0.02, 2.0, 0.3, 2.5)
_DATA = Exponent("data_exponent", 0.05, 2.0, 0.35, 2.5)
_PASS = Exponent("pass_exponent", 0.4, 3.0, 1.0, 2.0)
_CROWD = Exponent("crowding_exponent", 0.1, 3.0, 1.0, 2.0)
_EVENT_LIFE = Exponent("event_half_life", 0.5, 200.0, 15.0, 4.0)
_PARAM_LIFE = Exponent("param_half_life", 0.5, 200.0, 5.0, 4.0)

_WANTED = Exponent("params_wanted", 0.01, 100.0, 1.0, 5.0)  # times the middle size, by as many events as were seen


def penalty(sizes_differ: bool) -> FiniteForm:
    """Unique and repeated events count alike; a penalty grows with repetition."""

    def terms(theta: np.ndarray, at: Place, middle: Place) -> np.ndarray:
        *alpha, beta, rho, kappa = (column[:, None] for column in theta.T)
        n, u, d = (np.log(x / m) for x, m in ((at.N, middle.N), (at.U, middle.U), (at.U * at.R, middle.U * middle.R)))
        repeats = np.maximum(at.R - 1, 0.0) / max(float(middle.R) - 1, 1.0)
        with np.errstate(divide="ignore"):
            crowding = np.exp(rho * np.log(repeats) + kappa * (n - u))
        return np.stack([*(np.exp(-a * n) for a in alpha), np.exp(-beta * d), crowding], axis=-1)

    def scale(theta: np.ndarray, middle: Place) -> np.ndarray:
        *alpha, beta, rho, kappa = theta.T
        crowding = max(float(middle.R) - 1, 1.0) ** -rho * (middle.U / middle.N) ** kappa
        return np.stack([*(middle.N**a for a in alpha), (middle.U * middle.R) ** beta, crowding], axis=-1)

    size = ((_SIZE,), ("size_coef",), "size_coef/N^size_exponent + ") if sizes_differ else ((), (), "")
    return FiniteForm(
        "penalty",
        f"sign*y = floor + {size[2]}data_coef/(U*R)^data_exponent"
        " + penalty*(R-1)^pass_exponent*(N/U)^crowding_exponent",
        (*size[0], _DATA, _PASS, _CROWD),
        (*size[1], "data_coef", "penalty"),
        terms,
        scale,
    )


def repetition(sizes_differ: bool) -> FiniteForm:
    """Repeated events, and parameters beyond what the unique events want, count less and less."""

    def terms(theta: np.ndarray, at: Place, middle: Place) -> np.ndarray:
        life = theta[:, -1:]
        beta = theta[:, -2:-1]
        repeats = np.maximum(at.R - 1, 0.0)
        worth = np.where(at.R < 1, at.R, 1 + life * -np.expm1(-repeats / life))
        data = np.exp(-beta * np.log(at.U / middle.U * worth / float(middle.R)))
        if not sizes_differ:
            return data[..., None]
        alpha, spare_life, share = (theta[:, i : i + 1] for i in range(3))
        # The size at which A/N^α and B/U^β would fall alike under C = 6ND, N_U ∝ U^{β/α}.
        wanted = np.minimum(at.N, middle.N * share * (at.U / (middle.U * middle.R)) ** (beta / alpha))
        spare = at.N / wanted - 1
        effective = wanted / middle.N * (1 + spare_life * -np.expm1(-spare / spare_life))
        return np.stack([np.exp(-alpha * np.log(effective)), data], axis=-1)

    def scale(theta: np.ndarray, middle: Place) -> np.ndarray:
        data = (middle.U * middle.R) ** theta[:, -2]
        return np.stack([middle.N ** theta[:, 0], data] if sizes_differ else [data], axis=-1)

    size = (
        ((_SIZE, _PARAM_LIFE, _WANTED), ("size_coef",), "size_coef/N'^size_exponent + ")
        if sizes_differ
        else ((), (), "")
    )
    return FiniteForm(
        "repetition",
        f"sign*y = floor + {size[2]}data_coef/D'^data_exponent, D' = U*(1 + h*(1 - exp(-(R-1)/h))),"
        " h = event_half_life",
        (*size[0], _DATA, _EVENT_LIFE),
        (*size[1], "data_coef"),
        terms,
        scale,
    )


def learning_curve() -> FiniteForm:
    """Over unique events alone: for the best passes and size at each."""

    def terms(theta: np.ndarray, at: Place, middle: Place) -> np.ndarray:
        return np.exp(-theta * np.log(at.U / middle.U))[..., None]

    return FiniteForm(
        "learning_curve",
        "sign*y = floor + data_coef/U^data_exponent at the best N and R",
        (_DATA,),
        ("data_coef",),
        terms,
        lambda theta, middle: middle.U**theta,
    )
