"""A form that misses its points by more than seeds differ is refused; optimizers and inits are never pooled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from habitus.errors import FitError
from habitus.laws import depth_optimum, fit, two_term
from habitus.laws.paired_users import PairedUsers
from habitus.laws.pure_error import PureError, judge_fit, pure_error
from habitus.laws.runs import MeasuredRun
from habitus.laws.size_test import size_test, size_tests

SHARES = np.array([0.02, 0.05, 0.1, 0.18, 0.27, 0.38, 0.52, 0.68])


def seeds_of(cell: str, values: list[float], **more: Any) -> list[MeasuredRun]:
    return [
        MeasuredRun("share", cell, 1e13, 0.01, seed, metrics={"batch/loss": value}, **more)
        for seed, value in enumerate(values)
    ]


def test_pure_error_is_the_variance_within_cells() -> None:
    runs = [*seeds_of("a", [4.0, 4.04, 3.96]), *seeds_of("b", [2.0, 2.02]), *seeds_of("c", [5.0])]
    found = pure_error(runs, "batch/loss")
    # a: 0, +1%, −1% about 4; b: ∓0.01/2.01 about 2.01.
    squares = 2 * 0.01**2 + 2 * (0.01 / 2.01) ** 2
    assert found is not None and (found.dof, found.num_cells) == (3, 2)
    assert found.relative_variance == pytest.approx(squares / 3)
    assert pure_error(runs[-1:], "batch/loss") is None


def test_a_valley_of_the_wrong_form_is_refused_where_seeds_show_it() -> None:
    """Measured on a million items at 3e13 FLOPs: RMSE 0.047 nats, an interval without the best cell, and yet ok."""
    x = [0.0199, 0.0647, 0.1171, 0.2025, 0.2867, 0.449, 0.6524, 0.9205]
    y = [8.605414, 8.301683, 8.209173, 8.158054, 8.07959, 8.058342, 8.055373, 8.472278]
    law = two_term(x, y)
    assert law.ok and law.interval("x_opt")[1] < 0.46
    assert judge_fit(law, None) == law
    assert judge_fit(law, PureError((0.06 / 8.2) ** 2, 12, 6)).ok
    refused = judge_fit(law, PureError((0.01 / 8.2) ** 2, 12, 6))
    assert refused.status == "misfit" and "seeds differ by 0.01" in refused.warnings[0]
    # A curve through its points is not wrong by a rounding, however well seeds agree.
    exact = two_term(SHARES, 8 + SHARES**0.5 + 0.15 / SHARES**0.5)
    assert exact.residuals.rmse and exact.residuals.rmse < 1e-9
    assert judge_fit(exact, PureError(1e-40, 12, 6)).ok


def test_the_scatter_within_cells_is_no_lack_of_fit() -> None:
    """Three seeds per share: what they differ by is taken out of the residuals before they are judged."""
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(40):
        x = np.repeat(SHARES, 3)
        y = 8.0 + 0.05 * np.log(x / 0.2) ** 2 + 0.02 * rng.standard_normal(len(x))
        runs = [r for i, s in enumerate(SHARES) for r in seeds_of(f"{i}", list(y[x == s]))]
        refused += judge_fit(two_term(x, y), pure_error(runs, "batch/loss")).status == "misfit"
    assert refused <= 6  # 5% of 40, give or take


def test_the_floor_of_the_embedder_does_not_enter_the_share_law(planted: Any, tmp_path: Path) -> None:
    rows = [{**row, "joint_dim": 32} for row in planted.rows(axes=("share",))]
    floor = [
        {**row, "cell_id": "floor", "embedder_share": 0.0003, "joint_dim": 4, "batch/loss": 3.0}
        for row in rows if row["cell_id"] == "s0"
    ]  # fmt: skip
    with_floor = fit(planted.write(tmp_path / "a.csv", rows + floor), ["batch/loss"])
    without = fit(planted.write(tmp_path / "b.csv", rows), ["batch/loss"])
    assert with_floor.find("share_law", "batch/loss") == without.find("share_law", "batch/loss")


def test_optimizers_and_inits_are_fitted_apart(planted: Any, tmp_path: Path) -> None:
    """Muon's loss is 0.3 lower and its N* twice as large here: pooled, neither would be found."""
    adamw = [{**row, "optimizer": "adamw", "init": "plain"} for row in planted.rows(axes=("allocation",))]
    muon = [
        {**row, "optimizer": "muon", "init": "default", "cell_id": f"m{row['cell_id']}", "params": 2 * row["params"],
         "batch/loss": row["batch/loss"] - 0.3}
        for row in planted.rows(seed=1, axes=("allocation",)) if row["cell_id"] != "a7"
    ]  # fmt: skip
    path = planted.write(tmp_path / "runs.csv", adamw + muon)
    laws = fit(path, ["batch/loss"])
    (other,) = laws.groups
    assert (laws.definitions["optimizer"], laws.definitions["init"]) == ("adamw", "plain")
    assert other.name == "muon/default" and {run.init for run in laws.runs} == {"plain"}
    own = laws.find("size_optimum", "batch/loss", 1e17)
    theirs = next(e.law for e in other.entries if (e.name, e.budget) == ("size_optimum", 1e17))
    assert own["x_opt"] == pytest.approx(planted.size(1e17), rel=0.1)
    assert theirs["x_opt"] == pytest.approx(2 * planted.size(1e17), rel=0.1)
    assert any("muon/default: fitted apart" in note for note in laws.notes)
    assert fit(path, ["batch/loss"], group="muon/default").find("size_optimum", "batch/loss", 1e17) == theirs
    with pytest.raises(FitError, match="group 'muon' has no run"):
        fit(path, ["batch/loss"], group="muon")


def cell_of_size(size: float, loss: float, recall: float, se: float) -> MeasuredRun:
    return MeasuredRun(
        "allocation", f"{size:g}", 1e13, 0.01, 0, knobs={"params": size}, errors={"catalogue/recall@10": se},
        metrics={"batch/loss": loss, "catalogue/recall@10": recall},
    )  # fmt: skip


def test_a_metric_wants_another_size_only_beyond_chance() -> None:
    sizes = [(1e5, 4.0, 0.20), (2e5, 3.9, 0.21), (4e5, 4.1, 0.23)]
    sure = size_test([cell_of_size(*one, se=0.003) for one in sizes], "catalogue/recall@10")
    # 0.02 more with an error of 0.003·√2: z = 4.71, p = 2·1.2e-6 and two cells to pick from.
    assert sure is not None and sure.ok
    assert (sure["size_by_loss"], sure["size_by_metric"]) == (2e5, 4e5)
    assert sure["p_value"] == pytest.approx(2 * 2 * 1.2142e-6, rel=0.01)
    unsure = size_test([cell_of_size(*one, se=0.01) for one in sizes], "catalogue/recall@10")
    assert unsure is not None and unsure.status == "flat"
    assert size_test([cell_of_size(1e5, 4.0, 0.2, 0.01)], "batch/ndcg@10") is None


def test_cells_over_all_knobs_are_asked_at_their_largest_budget_too(tmp_path: Path) -> None:
    runs = [cell_of_size(1e5, 4.0, 0.20, 0.003), cell_of_size(2e5, 3.9, 0.23, 0.003)]  # both want the larger
    surface = [replace(cell_of_size(*one, se=0.003), axis="surface") for one in [(3e5, 3.8, 0.20), (5e5, 3.9, 0.24)]]
    small = replace(cell_of_size(1e4, 3.0, 0.9, 0.003), axis="surface", budget=1e12)
    metrics = ["batch/loss", "catalogue/recall@10"]
    tests = list(size_tests([*runs, *surface, small], metrics, lambda axis, metric: None, PairedUsers(tmp_path)))
    assert [(t.axis, t.metric, t.law.status) for t in tests] == [
        ("allocation", "catalogue/recall@10", "flat"),
        ("surface", "catalogue/recall@10", "ok"),
    ]
    assert (tests[1].law["size_by_loss"], tests[1].law["size_by_metric"]) == (3e5, 5e5)


def test_a_difference_that_few_seeds_explain_decides_nothing() -> None:
    """Seeds differ by 3% of 0.2, by three degrees of freedom: 0.025 more is 2.9 errors, and t(3) says p = .06."""
    runs = [cell_of_size(1e5, 4.0, 0.200, 0.0005), cell_of_size(2e5, 4.1, 0.225, 0.0005)]
    by_seed = 0.03**2 * 0.2**2 * 2
    for dof, status in ((3, "flat"), (100, "ok")):
        law = size_test(runs, "catalogue/recall@10", PureError(0.03**2, dof, 3))
        variance = by_seed + 2 * 0.0005**2
        p_value = 2 * stats.t.sf(0.025 / variance**0.5, dof * (variance / by_seed) ** 2)
        assert law is not None and law.status == status and law["p_value"] == pytest.approx(p_value)


def test_the_test_is_of_the_largest_budget_that_measured_the_metric() -> None:
    metric = "catalogue/recall@10"
    runs = [cell_of_size(1e5, 4.0, 0.20, 0.003), cell_of_size(2e5, 4.1, 0.23, 0.003)]
    larger = replace(cell_of_size(9e5, 3.0, 0.0, 0.003), budget=1e14, metrics={"batch/loss": 3.0})
    law = size_test([*runs, larger], metric)
    assert law is not None and law.ok and law.details["budget"] == 1e13
    assert law.details["verdict"].startswith(f"{metric} wants another size than the loss's")
    law = size_test([replace(run, axis="surface") for run in runs], metric)
    assert law is not None and law.details["verdict"].startswith(f"{metric} wants another recipe than the loss's")


def test_seeds_of_other_cells_identify_a_valley_of_six_shares() -> None:
    """Five numbers through six points leave one degree of freedom: hardly any valley stands above the noise by itself.
    Seeds of other cells know that noise, and the intervals still cover."""
    rng = np.random.default_rng(0)
    x, sd, best, alpha, beta = np.array([0.03, 0.06, 0.1, 0.18, 0.3, 0.5]), 0.012, 0.12, 0.9, 0.5
    curve = 5.4 + 0.35 * (x**alpha + alpha / beta * best ** (alpha + beta) * x**-beta)
    alone, known = [], []
    for _ in range(30):
        y = curve + sd * rng.standard_normal(len(x))
        error = PureError((sd / 5.6) ** 2 * rng.chisquare(12) / 12, 12, 12)
        alone.append(two_term(x, y))
        known.append(judge_fit(two_term(x, y, error=error), error))
    assert sum(law.ok for law in alone) <= 6
    identified = [law for law in known if law.ok]
    assert len(identified) >= 22
    assert sum(low <= best <= high for low, high in (law.interval("x_opt") for law in identified)) >= 0.85 * len(
        identified
    )


def test_seeds_of_other_cells_count_in_the_parabola_of_the_depth_axis() -> None:
    """Four points, one degree of freedom of their own: the error is the mean of both, by degrees of freedom."""
    x, y = np.exp([-2.0, -1.0, 0.0, 1.0]), np.array([5.3, 5.1, 5.11, 5.32])
    rss = 4 * y.var() - (np.polyfit([-2, -1, 0, 1], y, 2)[0] ** 2) * 4 - (np.polyfit([-2, -1, 0, 1], y, 1)[0] ** 2) * 5
    known = PureError((0.004 / 5.2) ** 2, 9, 9)
    (low, high), level = depth_optimum(x, y, error=known).interval("y_opt"), float(np.abs(y).mean())
    vertex_se = (high - low) / 2 / float(stats.t.ppf(0.975, 10))
    own = depth_optimum(x, y).interval("y_opt")
    own_se = (own[1] - own[0]) / 2 / float(stats.t.ppf(0.975, 1))
    pooled = (rss + 9 * (0.004 / 5.2 * level) ** 2) / 10
    assert vertex_se / own_se == pytest.approx(np.sqrt(pooled / rss), rel=1e-6)


def test_a_fit_says_which_axes_have_no_seeds_to_judge_their_forms_by(planted: Any, tmp_path: Path) -> None:
    """Seeds of the share axis speak for sizes too; a run of stage 2 has a noise of its own."""
    rows = planted.rows(axes=("share", "allocation", "negatives"))
    bare = fit(planted.write(tmp_path / "bare.csv", rows), ["batch/loss"])
    doubt = "no cell was run with several seeds: whether the form misses its points is not tested"
    assert f"share, allocation, negatives: {doubt}" in bare.notes
    assert all(doubt in bare.find(name, "batch/loss").warnings for name in ("share_law", "size_law"))
    twice = [
        {**row, "seed": 1, **{name: row[name] * 1.001 for name in ("train/loss", "batch/loss")}}
        for row in rows if row["axis"] == "share" and row["cell_id"] in ("s2", "s4")
    ]  # fmt: skip
    seeded = fit(planted.write(tmp_path / "seeded.csv", rows + twice), ["batch/loss", "catalogue/loss"])
    assert [note for note in seeded.notes if "several seeds" in note] == [f"negatives: {doubt}"]
    assert not any("several seeds" in w for w in seeded.find("size_law", "batch/loss").warnings)
    assert doubt in seeded.find("negatives_law", "catalogue/loss").warnings
    one = [row for row in twice if row["flops_budget"] == 1e15 and row["cell_id"] == "s2"][:1]
    few = fit(planted.write(tmp_path / "few.csv", rows + one), ["batch/loss"])
    assert any(
        note.startswith("share, allocation: 1 cell with several seeds, 1 degree of freedom") for note in few.notes
    )
