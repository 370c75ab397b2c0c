"""What is drawn over the number of extra negatives: the three training losses, K = 0, and what is cheap to watch."""

import re

import pytest

from habitus.laws import MeasuredRun
from habitus.reporting.figure import Panel, Points, View
from habitus.reporting.negatives import channels
from habitus.reporting.study import Study
from habitus.reporting.surrogates import loss_and_recall_regimes
from habitus.reporting.svg import draw
from habitus.reporting.valleys import NEGATIVES, curves
from habitus.store import Laws, RunRow

BUDGET = 1e15
COUNTS = (0.0, 1e3, 1e4, 1e5)
METRICS = ("batch/loss", "catalogue/loss", "catalogue/ndcg@10")


def k_run(count: float, **more: float) -> RunRow:
    """In-batch loss 3, and 1 to 4 nats more for the channel with extras; with K = 0 there is one channel."""
    rank = COUNTS.index(count)
    channel = {"train/extra_loss": 4.0 + rank, "train/loss": 3.5 + rank / 2} if count else {"train/loss": 3.0}
    return RunRow(
        axis="negatives", budget=BUDGET, cell_id=f"K={count:g}", learning_rate=1e-3, seed=0, init="default",
        chosen=True, knobs={"num_negatives": count, "params": 1e6},
        metrics={"train/in_batch_loss": 3.0, "catalogue/loss": 9 - 0.1 * rank, "catalogue/ndcg@10": 0.1 + 0.01 * rank}
        | channel | more,
    )  # fmt: skip


def study_of(*rows: RunRow) -> Study:
    run = MeasuredRun(axis="negatives", budget=BUDGET, cell_id="K=0", learning_rate=1e-3, seed=0)
    return Study("planted", Laws(source="", seed=0, metrics=METRICS, runs=rows), (run,))


def only_view(exhibit: object, metric: str = "") -> View:
    (view,) = [view for view in exhibit.views if view.metric == metric]  # type: ignore[attr-defined]
    return view


def dots(panel: Panel) -> dict[float, float]:
    (points,) = [mark for mark in panel.marks if isinstance(mark, Points)]
    return dict(zip(points.x, points.y, strict=True))


def test_the_mean_of_both_channels_is_drawn_beside_them() -> None:
    view = only_view(channels(study_of(*map(k_run, COUNTS))))
    in_batch, extra, mean = view.panels
    assert [panel.title.partition(",")[0] for panel in view.panels] == [
        "train/in_batch_loss", "train/extra_loss", "train/loss",
    ]  # fmt: skip
    assert dots(in_batch) == dict.fromkeys(COUNTS, 3.0)
    assert dots(extra) == {1e3: 5.0, 1e4: 6.0, 1e5: 7.0}
    assert dots(mean) == {0: 3.0, 1e3: 4.0, 1e4: 4.5, 1e5: 5.0}  # (3 + extra) / 2, and the one channel alone
    assert "the mean of both, which is minimised goes from 3.000 at K = 0 to 5.000 at K = 100k (+2.000)" in view.reading


def test_a_run_without_extras_stands_at_the_left_end_under_its_zero() -> None:
    """A third of the smallest K that was run, under a tick that says 0, and left of every other mark and tick."""
    view = only_view(curves(study_of(*map(k_run, COUNTS)), NEGATIVES), "catalogue/ndcg@10")
    (panel,) = view.panels
    assert panel.x is not None and panel.x.zero_at == 1e3 / 3
    assert dots(panel)[0] == 0.1
    drawing = draw(panel)
    ticks = {
        text: float(x)
        for x, text in re.findall(r'<text x="([\d.]+)" [^>]*text-anchor="middle">([^<]*)</text>', drawing)
    }
    left = min(x for text, x in ticks.items() if text != "0")
    assert ticks["0"] < left
    (path,) = re.findall(r'<path class="dt [^"]*" d="([^"]+)"', drawing)
    marks = [float(x) for x in re.findall(r"M([\d.]+)", path)]
    assert len(marks) == len(COUNTS) and marks[0] == min(marks)
    plot = float(re.findall(r'<svg x="([\d.]+)" y="30"', drawing)[0])
    assert abs(plot + marks[0] - ticks["0"]) < 0.2


def test_without_a_run_of_no_extras_the_axis_has_no_zero() -> None:
    (panel,) = only_view(curves(study_of(*map(k_run, COUNTS[1:])), NEGATIVES), "catalogue/ndcg@10").panels
    assert panel.x is not None and panel.x.zero_at is None
    assert ">0<" not in draw(panel).partition("translate")[0]


def test_the_batch_loss_is_held_against_the_catalogue_over_k_too() -> None:
    """In-batch loss rises with K while NDCG rises as well: the cheap signal picks the wrong end, rho = +1."""
    rows = [k_run(count, **{"batch/loss": 3 + 0.1 * i}) for i, count in enumerate(COUNTS)]
    view = only_view(loss_and_recall_regimes(study_of(*rows)), "batch/ndcg@10 catalogue/ndcg@10")
    (panel,) = [panel for panel in view.panels if panel.title == "across regimes, over K"]
    assert list(dots(panel)) == pytest.approx([3.0, 3.1, 3.2, 3.3])
    assert list(dots(panel).values()) == pytest.approx([0.1, 0.11, 0.12, 0.13])
    assert view.reading == "Across regimes, over K: ρ of batch/loss and catalogue/ndcg@10 is +1.00 at 10¹⁵."
    without = only_view(loss_and_recall_regimes(study_of(*map(k_run, COUNTS))), "batch/ndcg@10 catalogue/ndcg@10")
    assert not [panel for panel in without.panels if panel.title.startswith("across regimes")]
