"""One law over embedder, contextualizer, data, steps, batch and rate: planted surfaces are found again."""

import math

import numpy as np
import pytest
from scipy.stats import qmc

from habitus.errors import FitError
from habitus.laws.loss_link import loss_link
from habitus.laws.recipe_cost import SlotCost, slot_cost
from habitus.laws.recipe_optimum import recipe_optimum
from habitus.laws.recipe_surface import (
    COLUMNS,
    columns_of,
    predict_recipe,
    recipe_rate,
    recipe_surface,
)

COST = SlotCost(tokens=24, seq_len=256, quadratic=50, linear=85, constant=0)
BUDGETS = {1e14: 5.8e5, 3e14: 8.6e5, 1e15: 1.3e6}


def planted_loss(row: dict[str, float]) -> float:
    """Bottlenecks that combine with q = 3; the best rate falls with both sizes."""
    parts = (
        0.5 * (row["embedder_params"] / 1e5) ** -0.25,
        0.25 * (row["contextualizer_params"] / 1e6) ** -0.35,
        0.5 * (row["slots_seen"] / 1e7) ** -0.25,
        0.3 * (row["steps"] / 1e3) ** -0.3,
        0.3 * (row["batch_sequences"] / 64) ** -0.3,
    )
    best = 0.03 * (row["contextualizer_params"] / 1e6) ** -0.3 * (row["embedder_params"] / 1e5) ** -0.2
    return 8.0 + sum(part**3 for part in parts) ** (1 / 3) + 0.03 * math.log(row["rate_at_512"] / best) ** 2


def cell(compute: float, size: float, share: float, batch: float, rate: float) -> dict[str, float]:
    p_e, p = share * size, (1 - share) * size
    slots = float(COST.slots(compute, np.asarray(p_e), np.asarray(p), np.asarray(batch)))
    return {"embedder_params": p_e, "contextualizer_params": p, "slots_seen": slots, "steps": slots / batch / 256,
            "batch_sequences": batch, "rate_at_512": rate, "compute": compute, "seq_len": 256.0,
            "joint_dim": float(COST.joint_dim(np.asarray(p_e)))}  # fmt: skip


def planted_rows(seed: int) -> list[dict[str, float]]:
    rows = []
    for compute, size in BUDGETS.items():
        points = qmc.LatinHypercube(4, seed=seed).random(26)
        spans = ((0.2, 5.0), (0.01, 0.6), (8.0, 256.0), (0.01, 0.2))
        for n, s, b, r in np.exp(np.log([a for a, _ in spans]) + points * np.log([z / a for a, z in spans])):
            rows.append(cell(compute, n * size, s, 2 ** round(math.log2(b)), r))
    return rows


@pytest.fixture(scope="module")
def planted() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rows = planted_rows(seed=3)
    noise = np.random.default_rng(0).normal(0, 0.003, len(rows))
    return columns_of(rows), np.array([planted_loss(row) for row in rows]) + noise


@pytest.fixture(scope="module")
def law(planted: tuple[dict[str, np.ndarray], np.ndarray]) -> object:
    table, losses = planted
    return recipe_surface(table, losses, np.arange(len(losses)), draws=30)


def test_a_planted_surface_foresees_ten_times_the_compute(law, planted) -> None:  # type: ignore[no-untyped-def]
    table, losses = planted
    best = recipe_optimum(law, 1e16, slot_cost(table))
    # What these knobs really give, and what the best knobs of the truth would: by a search over the planted law.
    built = cell(1e16, best["params"], best["share"], best["batch"], best["rate"])
    truth = min(
        planted_loss(cell(1e16, n, s, b, recipe))
        for n in np.geomspace(5e5, 2e7, 25) for s in np.geomspace(0.05, 0.6, 12) for b in (32, 64, 128, 256)
        for recipe in (0.03 * ((1 - s) * n / 1e6) ** -0.3 * (s * n / 1e5) ** -0.2,)
    )  # fmt: skip
    gain = losses.min() - truth
    assert planted_loss(built) - truth < 0.1 * gain
    value, low, high = (float(v[0]) for v in predict_recipe(law, columns_of([built])))
    assert abs(value - planted_loss(built)) < 0.15 * gain and low < planted_loss(built) < high
    assert low < value < high and high - low < gain


def test_knobs_of_the_law_lie_in_their_intervals(law, planted) -> None:  # type: ignore[no-untyped-def]
    for name, truth in (("floor", 8.0), ("power", 3.0), ("embedder", 0.25), ("data", 0.25)):
        low, high = law.interval(name)
        assert low - 0.02 < truth < high + 0.02, (name, low, high)
    assert recipe_rate(law, 1e5, 1e6) == pytest.approx(0.03, rel=0.25)
    assert recipe_rate(law, 4e5, 4e6) < 0.7 * recipe_rate(law, 1e5, 1e6)


def test_the_unit_of_the_metric_does_not_matter(law, planted) -> None:  # type: ignore[no-untyped-def]
    table, losses = planted
    scaled = recipe_surface(table, 5000 * losses, np.arange(len(losses)), draws=2)
    assert scaled["floor"] == pytest.approx(5000 * law["floor"], rel=1e-3)
    for name in ("power", "data", "batch", "rate_by_embedder"):
        assert scaled[name] == pytest.approx(law[name], rel=0.02)


def test_one_pass_bounds_what_is_chosen(law, planted) -> None:  # type: ignore[no-untyped-def]
    table, _ = planted
    free, bounded = (recipe_optimum(law, 1e16, slot_cost(table), most) for most in (math.inf, 2e7))
    assert free["slots"] > 2e7 >= 0.98 * bounded["slots"] and bounded["params"] > free["params"]


def test_the_cost_is_equation_one(planted) -> None:  # type: ignore[no-untyped-def]
    found = slot_cost(planted[0])
    assert (found.tokens, found.seq_len) == pytest.approx((24, 256))
    assert (found.quadratic, found.linear) == pytest.approx((50, 85), rel=1e-6)


def test_too_few_cells_have_no_law_and_wrong_columns_are_refused(planted) -> None:  # type: ignore[no-untyped-def]
    table, losses = planted
    few = {name: column[:15] for name, column in table.items()}
    refused = recipe_surface(few, losses[:15], np.arange(15))
    assert refused.status == "too_few" and not refused.values and "15 cells" in refused.warnings[0]
    with pytest.raises(FitError, match="recipe surface"):
        recipe_optimum(refused, 1e16, COST)
    with pytest.raises(FitError, match="positive"):
        recipe_surface({**table, "steps": 0 * table["steps"]}, losses, np.arange(len(losses)))
    assert set(COLUMNS) < set(table)


def test_a_ranking_metric_follows_the_loss_and_the_batch() -> None:
    rng = np.random.default_rng(1)
    loss, batch, rate = rng.uniform(8, 9, 60), 2.0 ** rng.integers(3, 8, 60), rng.uniform(0.01, 0.1, 60)
    metric = np.exp(-4 - 2 * (loss - 8) + 0.1 * np.log(batch / 64))
    value, error = loss_link(loss, batch, rate, metric).at(7.8, 128, 0.02)
    assert value == pytest.approx(-4 + 0.4 + 0.1 * math.log(2), abs=1e-6) and error < 1e-6
    with pytest.raises(FitError, match="16 or more"):
        loss_link(loss[:9], batch[:9], rate[:9], metric[:9])
