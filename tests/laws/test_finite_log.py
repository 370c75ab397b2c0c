"""The law of a log that ends, on runs whose truth is planted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from habitus.errors import FitError
from habitus.laws import MeasuredRun, finite_log, fit, format_tables, open_finite_log
from habitus.laws.finite_fit import FiniteFit, LogRuns, part_variance
from habitus.laws.finite_forms import Place, penalty, repetition
from habitus.laws.log_axis import best_settings, fit_log_axis
from habitus.store import Law

LOG = 8e5  # events
SIZE = 2.7e6
Truth = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def with_penalty(N: np.ndarray, U: np.ndarray, R: np.ndarray) -> np.ndarray:
    """Best passes at N = 2.7e6: 16 over all events, fewer over parts of them."""
    return 4.5 + (U * R / 1.6e7) ** -0.35 + 0.03 * (R - 1) ** 1.2 * (N / SIZE) * (LOG / U) / 20


def with_repetition(N: np.ndarray, U: np.ndarray, R: np.ndarray) -> np.ndarray:
    worth = U * (1 + 8 * (1 - np.exp(-(R - 1) / 8)))
    return 4.5 + 0.3 * (N / SIZE) ** -0.4 + (worth / 8e6) ** -0.4


@dataclass(frozen=True)
class Planted:
    N: np.ndarray
    U: np.ndarray
    R: np.ndarray
    share: np.ndarray
    part: list[str]
    y: np.ndarray

    def law(self, **options: object) -> Law:
        return finite_log(self.N, self.U, self.R, self.y, share=self.share, part=self.part, **options)  # type: ignore[arg-type]


def planted(
    truth: Truth,
    shares: tuple[float, ...] = (0.5, 0.25, 0.125),
    factors: tuple[float, ...] = (0.5, 1.0, 2.0),
    noise: float = 0.002,
    part_noise: float = 0.004,
    sizes: tuple[float, ...] = (SIZE,),
) -> Planted:
    """Runs on all disjoint parts of each share, with a noise of each run and one of each part."""
    rng = np.random.default_rng(0)
    rows = [
        (size, share * LOG, factor * 20 * share**0.75, share, f"{share}/{part}")
        for share in shares
        for part in range(round(1 / share))
        for factor in factors
        for size in sizes
    ]
    N, U, R, share = (np.array([row[k] for row in rows]) for k in range(4))
    parts = [row[4] for row in rows]
    of_part = {name: part_noise * rng.standard_normal() for name in dict.fromkeys(parts)}
    y = truth(N, U, R) + np.array([of_part[name] for name in parts]) + noise * rng.standard_normal(len(N))
    return Planted(N, U, R, share, parts, y)


def test_all_users_are_forecast_from_parts_that_overfit() -> None:
    law = planted(with_penalty).law()
    assert law.status == "ok"
    assert law.details["surface"] == "penalty"
    value, low, high = open_finite_log(law).forecast(SIZE, LOG, 20.0)
    truth = float(with_penalty(np.array(SIZE), np.array(LOG), np.array(20.0)))
    assert low < truth < high
    assert abs(value - truth) < 0.01
    assert high - low < 0.08


def test_half_lives_are_found_where_repetition_only_wears_off() -> None:
    law = planted(with_repetition, factors=(0.25, 0.5, 1.0, 2.0)).law()
    assert law.details["surface"] == "repetition"
    low, high = law.interval("event_half_life")
    assert low < 8 < high
    assert low < law["event_half_life"] < high


def test_sizes_have_a_term_of_their_own() -> None:
    law = planted(with_repetition, factors=(0.5, 2.0), sizes=(SIZE / 8, SIZE)).law()
    assert {"size_coef", "size_exponent"} <= set(law.values)
    value, low, high = open_finite_log(law).predict(SIZE / 3, LOG / 2, 10.0)
    truth = float(with_repetition(np.array(SIZE / 3), np.array(LOG / 2), np.array(10.0)))
    assert low < truth < high
    assert value == pytest.approx(truth, rel=0.01)


def test_a_metric_that_rises_is_the_mirror_of_one_that_falls() -> None:
    runs = planted(with_penalty)
    falling = open_finite_log(runs.law())
    rising = open_finite_log(Planted(runs.N, runs.U, runs.R, runs.share, runs.part, -runs.y).law(direction="max"))
    value, low, high = falling.forecast(SIZE, LOG, 20.0)
    assert rising.forecast(SIZE, LOG, 20.0) == pytest.approx((-value, -high, -low))


def test_a_ranking_metric_may_go_through_the_loss() -> None:
    runs = planted(with_penalty)
    recall = 0.8 - 0.1 * runs.y
    law = Planted(runs.N, runs.U, runs.R, runs.share, runs.part, recall).law(direction="max", loss=runs.y)
    assert "through_loss" in law.details["forecast_held_out"]
    value, low, high = open_finite_log(law).forecast(SIZE, LOG, 20.0)
    truth = 0.8 - 0.1 * float(with_penalty(np.array(SIZE), np.array(LOG), np.array(20.0)))
    assert low < truth < high
    assert value == pytest.approx(truth, rel=0.01)


def test_a_law_read_from_its_file_answers_the_same() -> None:
    law = planted(with_penalty).law()
    read = Law.model_validate_json(law.model_dump_json())
    assert open_finite_log(read).forecast(SIZE, 2 * LOG, 20.0) == open_finite_log(law).forecast(SIZE, 2 * LOG, 20.0)


@pytest.mark.parametrize(
    ("shares", "factors", "status"),
    [((1.0,), (1.0, 2.0), "too_few"), ((1.0, 0.5), (1.0,), "too_few")],
)
def test_too_few_runs_give_no_values(shares: tuple[float, ...], factors: tuple[float, ...], status: str) -> None:
    law = planted(with_penalty, shares=shares, factors=factors).law()
    assert law.status == status
    assert not law.values
    with pytest.raises(FitError):
        open_finite_log(law)


def test_equal_values_are_flat() -> None:
    runs = planted(with_penalty)
    assert Planted(runs.N, runs.U, runs.R, runs.share, runs.part, np.full(len(runs.y), 5.0)).law().status == "flat"


def test_a_largest_share_off_the_curve_of_the_others_is_said() -> None:
    runs = planted(with_penalty)
    y = np.where(runs.share == 0.5, runs.y + 1.5, runs.y)
    law = Planted(runs.N, runs.U, runs.R, runs.share, runs.part, y).law()
    assert law.status == "disagree"
    assert any("does not forecast more users" in warning for warning in law.warnings)


def test_noise_alone_forecasts_nothing() -> None:
    runs = planted(lambda N, U, R: np.full(len(N), 5.0), noise=0.05, part_noise=0.0)
    value, low, high = open_finite_log(runs.law()).forecast(SIZE, LOG, 20.0)
    assert low < 5.0 < high
    assert abs(value - 5.0) < 0.15


def test_one_share_says_nothing_of_more_users() -> None:
    law = planted(with_repetition, shares=(1.0,), factors=(0.1, 0.2, 0.5, 1.0, 1.5, 2.0), sizes=(SIZE / 8, SIZE)).law()
    assert law.values
    assert "forecast_held_out" not in law.details
    assert any("fewer than three shares" in warning for warning in law.warnings)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(FitError, match="passes must be positive"):
        finite_log([1e6, 1e6], [1e5, 1e5], [0.0, 1.0], [5.0, 4.0])


def test_terms_are_those_of_the_equations() -> None:
    at, middle = Place(*(np.array([x]) for x in (2e6, 1e5, 9.0))), Place(*(np.array(x) for x in (1e6, 2e5, 5.0)))
    size, data, crowding = penalty(True).terms(np.array([[0.5, 0.25, 2.0, 1.0]]), at, middle)[0, 0]
    assert size == pytest.approx(2**-0.5)
    assert data == pytest.approx((1e5 * 9 / (2e5 * 5)) ** -0.25)
    assert crowding == pytest.approx((8 / 4) ** 2 * (2 * 2))
    # A half-life of 4: eight repetitions are worth 4·(1 − e^−2) = 3.459 fresh passes.
    (data,) = repetition(False).terms(np.array([[0.5, 4.0]]), at, middle)[0, 0]
    assert data == pytest.approx((1e5 / 2e5 * (1 + 3.459) / 5) ** -0.5, rel=1e-3)


def test_the_variance_of_parts_is_told_from_that_of_runs() -> None:
    # Parts miss by +1, −1, +1, −1 and their two runs by ±0.1 around it: within 0.02, between 8/3 each.
    missed = np.array([1.1, 0.9, -0.9, -1.1, 1.1, 0.9, -0.9, -1.1])
    part = np.repeat(np.arange(4), 2)
    assert part_variance(missed, part) == pytest.approx(30.0)  # (8/3 / 0.02 − 1) / 2 = 66, at most 30
    assert part_variance(np.array([1.0, -1.0] * 4), part) == 0.0


def test_runs_of_one_part_count_less_than_as_many_parts() -> None:
    """Twice the runs of the same users narrow an interval less than other users would."""
    runs = planted(with_penalty, noise=0.001, part_noise=0.02)
    ids = np.unique(runs.part, return_inverse=True)[1]
    place = Place(runs.N, runs.U, runs.R)
    level = np.unique(runs.share, return_inverse=True)[1]
    grouped = FiniteFit(penalty(False), LogRuns(place, runs.y, ids, level))
    alone = FiniteFit(penalty(False), LogRuns(place, runs.y, np.arange(len(runs.y)), level))
    at = Place(np.array([SIZE]), np.array([LOG]), np.array([20.0]))
    assert grouped.part_share > 5
    assert grouped.dof < 0.6 * alone.dof
    assert grouped.predict(at, 0.95)[2] - grouped.predict(at, 0.95)[1] > 0


def test_the_best_settings_of_each_cell_are_fitted() -> None:
    def run(share: float, passes: float, dropout: float, loss: float, seed: int = 0) -> MeasuredRun:
        knobs = {"params": SIZE, "unique_events": share * LOG, "epochs": passes, "user_share": share}
        return MeasuredRun(
            axis="passes", cell_id=f"{share}-{passes}-{dropout}", budget=1e15, learning_rate=0.01, seed=seed,
            knobs=knobs | {"dropout": dropout}, metrics={"catalogue/loss": loss, "train/loss": loss},
        )  # fmt: skip

    runs = [
        run(1.0, 20.0, 0.3, 5.0),
        run(1.0, 20.0, 0.3, 5.2, seed=1),
        run(1.0, 20.0, 0.5, 5.05),
        run(0.5, 10, 0.5, 5.4),
    ]
    chosen = best_settings(runs, "catalogue/loss")
    assert [r.metrics["catalogue/loss"] for r in chosen] == [5.05, 5.4]
    entry = fit_log_axis(runs, "catalogue/loss").entries[0]
    assert (entry.name, entry.axis, entry.law.status) == ("finite_log", "passes", "too_few")


def test_a_csv_of_passes_has_its_law_and_table(tmp_path: Path) -> None:
    runs = planted(with_penalty, factors=(1.0, 2.0))
    header = "axis,cell_id,flops_budget,learning_rate,seed,params,unique_events,epochs,user_share,user_part,train/loss"
    lines = [
        f"passes,{k},1e15,0.01,0,{SIZE},{U:.0f},{R},{share},{part.split('/')[1]},{y},{y}"
        for k, (U, R, share, part, y) in enumerate(zip(runs.U, runs.R, runs.share, runs.part, runs.y, strict=True))
    ]
    (tmp_path / "runs.csv").write_text("\n".join([f"{header},batch/loss", *lines]))
    laws = fit(tmp_path / "runs.csv")
    law = laws.find("finite_log", "batch/loss")
    assert law.residuals.n == len(lines)
    assert not laws.exclusions
    assert law.values == pytest.approx(runs.law().values, rel=1e-3)
    assert "A log that ends" in format_tables(laws)


@pytest.mark.soak
@pytest.mark.parametrize("truth", [with_penalty, with_repetition])
def test_intervals_cover_the_truth(truth: Truth) -> None:
    """Forty simulated logs: 38 ± 1.4 are covered; six misses are four standard errors away."""
    rng = np.random.default_rng(7)
    covered = 0
    target = float(truth(np.array(SIZE), np.array(LOG), np.array(20.0)))
    for _ in range(40):
        runs = planted(truth, noise=0.0, part_noise=0.0)
        names, ids = np.unique(runs.part, return_inverse=True)
        y = runs.y + 0.02 * rng.standard_normal(len(names))[ids] + 0.008 * rng.standard_normal(len(runs.y))
        law = Planted(runs.N, runs.U, runs.R, runs.share, runs.part, y).law()
        _, low, high = open_finite_log(law).forecast(SIZE, LOG, 20.0)
        covered += low <= target <= high
    assert covered >= 34
