"""Window lengths: the planted L* and L*(C) come back, flat ones are refused, and histories that are enough."""

import math
from itertools import product

import numpy as np
import pytest

from habitus.laws import format_summary
from habitus.laws.context_axis import fit_context, history_gain
from habitus.laws.run_sources import on_same_queries
from habitus.laws.runs import MeasuredRun
from habitus.store import Law, Laws

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
BUDGETS = (1e14, 3e14, 1e15, 3e15)


def best_length(C: float) -> float:
    return 180.0 * (C / 1e14) ** 0.3


def make_runs(depth: float = 0.2, noise: float = 0.0, seeds: int = 2) -> list[MeasuredRun]:
    """A valley around L*(C) per budget: what short windows do not see, and what long ones cost."""
    rng = np.random.default_rng(0)
    runs = []
    for C in BUDGETS:
        for L, seed in product(LENGTHS, range(seeds)):
            u = L / best_length(C)
            loss = 6 + depth * (0.5 * u**0.6 + 0.6 * u**-0.5) + noise * rng.standard_normal()
            metrics = {"catalogue/loss": loss, "train/loss": loss}
            knobs = {"seq_len": float(L)}
            runs.append(MeasuredRun("context", f"L={L}", C, 1e-3, seed, knobs=knobs, metrics=metrics))
    return runs


def laws_of(runs: list[MeasuredRun], name: str, metric: str = "catalogue/loss") -> list[Law]:
    return [entry.law for entry in fit_context(runs, metric).entries if entry.name == name]


def test_planted_lengths_and_their_law_over_compute_come_back() -> None:
    runs = make_runs(noise=0.0003)
    optima = laws_of(runs, "context_optimum")
    assert [law.status for law in optima] == ["ok"] * 4
    for C, law in zip(BUDGETS, optima, strict=True):
        assert law["x_opt"] == pytest.approx(best_length(C), rel=0.1)
    (law,) = laws_of(runs, "context_law")
    low, high = law.interval("exponent")
    assert law.ok and low < 0.3 < high and high - low < 0.2


def test_the_summary_has_a_column_for_windows_only_where_they_were_swept() -> None:
    entries = fit_context(make_runs(noise=0.0003), "catalogue/loss").entries
    told = Laws(source="", seed=0, metrics=("catalogue/loss",), entries=entries)
    header, _, row = format_summary(told).splitlines()[1:4]
    assert header.split()[-1] == "window" and row.split()[-2:] == ["4/4", "ok"]
    assert "window" not in format_summary(told.model_copy(update={"entries": ()}))


def test_one_run_per_length_is_read_by_a_parabola() -> None:
    for C, law in zip(BUDGETS, laws_of(make_runs(noise=0.001, seeds=1), "context_optimum"), strict=True):
        assert law.law == "isoflop_optimum" and law.ok
        assert law["x_opt"] == pytest.approx(best_length(C), rel=0.35)


def test_a_flat_curve_has_no_best_length() -> None:
    runs = make_runs(depth=0.0, noise=0.01)
    assert not any(law.ok for law in laws_of(runs, "context_optimum"))
    assert laws_of(runs, "context_law")[0].status == "too_few"


def test_the_training_loss_of_other_windows_says_nothing() -> None:
    assert fit_context(make_runs(), "train/loss").entries == ()


def gains(recalls: dict[int, float], se: float = 0.0, seq_len: int = 512) -> MeasuredRun:
    longest = max(recalls)
    metrics = {f"catalogue/recall@10/context={n}": value for n, value in recalls.items()}
    metrics |= {f"catalogue/recall@10/beyond={n}": recalls[longest] - v for n, v in recalls.items() if n != longest}
    metrics |= {f"query_seconds/context={n}": 0.001 * n for n in recalls}
    errors = {name: se for name in metrics if "beyond" in name}
    return MeasuredRun("context", "L=512", 1e14, 1e-3, 0, knobs={"seq_len": seq_len}, metrics=metrics, errors=errors)


def test_the_history_that_is_enough_lies_between_two_that_were_measured() -> None:
    # Within 1% of 0.4: 0.004. At 100 events 0.008 are lost, at 200 nothing: halfway on the logarithmic scale.
    law = history_gain([gains({10: 0.30, 100: 0.392, 200: 0.40, 500: 0.40})], "catalogue/recall@10")
    assert law.ok and law["x_opt"] == pytest.approx(math.sqrt(100 * 200))
    assert [row["lost"] for row in law.details["rows"]] == pytest.approx([0.10, 0.008, 0.0, 0.0])
    assert law.details["rows"][1]["seconds"] == 0.1 and law.details["seq_len"] == 512
    wide = history_gain([gains({10: 0.30, 100: 0.392, 200: 0.40, 500: 0.40}, se=0.003)], "catalogue/recall@10")
    low, high = wide.interval("x_opt")
    assert low < law["x_opt"] < high and low < 100 < high  # 0.008 - 1.96·0.003 is less than 0.004


def test_losses_fall_and_windows_end_what_is_read() -> None:
    losses = {3: 6.5, 50: 6.2, 200: 6.0, 1000: 6.0}
    metrics = {f"catalogue/loss/context={n}": value for n, value in losses.items()}
    metrics |= {f"catalogue/loss/beyond={n}": 6.0 - value for n, value in losses.items() if n < 1000}
    run = MeasuredRun("context", "L=128", 1e14, 1e-3, 0, knobs={"seq_len": 128}, metrics=metrics)
    law = history_gain([run], "catalogue/loss")
    assert [row["history"] for row in law.details["rows"]] == [3, 50, 200]  # 200 and 1000 are both cut to 128
    assert law.status == "boundary" and "still gains up to 128 events" in law.warnings[0]


def test_histories_that_hardly_matter_are_named() -> None:
    law = history_gain([gains({3: 0.3999, 50: 0.4, 500: 0.4})], "catalogue/recall@10")
    assert law.status == "boundary" and "already 3 events" in law.warnings[0] and law["x_opt"] == 3


def test_runs_with_other_windows_are_compared_on_the_queries_that_they_share() -> None:
    values = {
        "batch/loss": 3.0, "catalogue/loss": 5.0, "train/loss": 4.0, "catalogue/loss/history=3": 5.5,
        "catalogue/loss/context=3": 6.0, "catalogue/loss/context=30": 5.8, "catalogue/loss/beyond=3": -0.2,
    }  # fmt: skip
    same = on_same_queries(values)
    assert same["catalogue/loss"] == 5.8
    assert set(same) == (set(values) | {"catalogue/loss"}) - {"batch/loss", "catalogue/loss/history=3"}
