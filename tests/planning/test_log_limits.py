"""What a log can still give, from planted laws."""

from collections.abc import Callable

import numpy as np
import pytest

from habitus.laws import finite_log
from habitus.planning import log_limits
from habitus.store import Law, LogLimits

LOG, SIZE = 8e5, 2.7e6
SHARES = (1.0, 0.5, 0.25, 0.125)


def law_of(truth: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], shares: tuple[float, ...]) -> Law:
    rng = np.random.default_rng(0)
    rows = [
        (SIZE, share * LOG, factor * 20 * share**0.75, share, f"{share}/{part}")
        for share in shares
        for part in range(min(4, round(1 / share)))
        for factor in (0.25, 0.5, 1.0, 2.0)
    ]
    N, U, R, share = (np.array([row[k] for row in rows]) for k in range(4))
    y = truth(N, U, R) + 0.002 * rng.standard_normal(len(N))
    return finite_log(N, U, R, y, share=share, part=[row[4] for row in rows])


def overfitting(N: np.ndarray, U: np.ndarray, R: np.ndarray) -> np.ndarray:
    # At U = LOG: 4.5 + (R/20)^-0.5 + (R - 1)/40, lowest where 0.5/20·(R/20)^-1.5 = 1/40, at R = 20.
    return 4.5 + (U * R / 1.6e7) ** -0.5 + (R - 1) / 40 * (LOG / U)


def wearing_off(N: np.ndarray, U: np.ndarray, R: np.ndarray) -> np.ndarray:
    return 4.5 + (U / LOG * (1 + 3 * (1 - np.exp(-(R - 1) / 3)))) ** -0.5


@pytest.fixture(scope="module")
def limits() -> LogLimits:
    return log_limits(law_of(overfitting, SHARES), "catalogue/loss")


def test_the_best_passes_of_the_log_are_found(limits: LogLimits) -> None:
    assert limits.best_passes is not None and limits.best_value is not None
    assert limits.best_passes.value == pytest.approx(20, rel=0.1)
    assert limits.best_passes.low is not None and limits.best_passes.high is not None
    assert limits.best_passes.low < 20 < limits.best_passes.high
    assert limits.best_value.value == pytest.approx(4.5 + 1 + 19 / 40, rel=0.002)


def test_compute_ends_near_the_best_passes(limits: LogLimits) -> None:
    """A tenth of a per cent of the loss is reached a little before the best."""
    assert limits.compute_limit is not None
    assert 0.5 < limits.compute_limit.value / (6 * SIZE * LOG * 20) < 1


def test_one_size_is_no_best_size(limits: LogLimits) -> None:
    assert limits.best_size is None
    assert [step.what for step in limits.steps] == ["one more pass"]
    assert any("one size" in note for note in limits.notes)


def test_a_pass_at_the_optimum_does_not_help(limits: LogLimits) -> None:
    assert limits.steps[0].helps == "no"


def test_more_users_are_forecast_and_marked_as_unchecked(limits: LogLimits) -> None:
    assert [more.factor for more in limits.more_users] == [2, 4, 10]
    for more in limits.more_users:
        truth = float(overfitting(np.array(SIZE), np.array(more.events), np.array(more.passes)))
        assert more.value.low is not None and more.value.high is not None
        assert more.value.low < truth < more.value.high
        assert not more.checked
    assert sum("(unchecked)" in line for line in limits.lines()) == 3
    widths = [more.value.high - more.value.low for more in limits.more_users if more.value.high and more.value.low]
    assert widths == sorted(widths)


def test_answers_survive_their_file(limits: LogLimits) -> None:
    assert LogLimits.model_validate_json(limits.model_dump_json()) == limits


def test_where_repetition_wears_off_the_end_of_compute_is_its_half_life() -> None:
    """1 − e^{−(R−1)/3} leaves a thousandth of the loss some 14 passes in: those beyond buy nothing."""
    limits = log_limits(law_of(wearing_off, SHARES), "catalogue/loss")
    assert limits.compute_limit is not None
    assert 8 < limits.compute_limit.value / (6 * SIZE * LOG) < 20
    assert limits.steps[0].helps == "no"


def test_a_law_without_values_answers_nothing_but_why() -> None:
    limits = log_limits(finite_log([1e6, 1e6], [1e5, 1e5], [1.0, 2.0], [5.0, 4.0]), "catalogue/loss")
    assert limits.status == "too_few"
    assert limits.best_passes is None and not limits.more_users
    assert limits.lines() == list(limits.notes) != []


def test_intervals_end_where_the_metric_does() -> None:
    """Eleven runs of a study on movielens_1m_order say little: its interval reached from -0.05 to 0.21."""
    rows = [(2.68e6, 1.0, 20.1, 0.1638), (2.68e6, 1.0, 10.0, 0.1540), (5.3e5, 1.0, 20.1, 0.1429)]
    rows += [(2.68e6, 0.5, 14.2, y) for y in (0.1431, 0.1430)] + [(2.68e6, 0.25, 10.0, y) for y in (0.1032, 0.1078)]
    rows += [(2.68e6, 0.125, 7.1, y) for y in (0.0736, 0.0750, 0.0726, 0.0756)]
    N, share, R, ndcg = map(np.array, zip(*rows, strict=True))
    law = finite_log(N, share * LOG, R, ndcg, share=share, part=[f"{k}" for k in range(len(rows))], direction="max")
    limits = log_limits(law, "catalogue/ndcg@10")
    estimates = [limits.best_value, *(more.value for more in limits.more_users)]
    ends = [end for one in estimates if one is not None for end in (one.low, one.high)]
    assert ends and all(end is not None and 0 <= end <= 1 for end in ends)
    assert "[-0," not in "\n".join(limits.lines())
    for step in limits.steps:
        assert step.helps != "yes" or (step.change.low is not None and step.change.low > 1e-7)
