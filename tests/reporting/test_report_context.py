"""The chapters of windows, histories and shapes, from planted runs."""

import csv
import math

import numpy as np
import pytest
from scipy.stats import qmc

from habitus.laws.context_axis import history_gain
from habitus.laws.runs import MeasuredRun
from habitus.reporting import report
from habitus.reporting.context import _cell

from .reading import Page, read_page

KNOBS = ("joint_dim", "width", "depth", "text_depth", "batch_sequences")
HISTORIES = (10, 50, 200, 1000)


def context_rows() -> list[dict[str, object]]:
    rows = []
    for budget, best in ((1e14, 250.0), (3e14, 300.0), (1e15, 400.0)):
        for seq_len in (32, 64, 128, 256, 512, 1024, 2048):
            u = seq_len / best
            recall = 0.45 - 0.02 * (u**0.6 + u**-0.6)
            row = {
                "axis": "context",
                "cell_id": f"L={seq_len}",
                "flops_budget": budget,
                "learning_rate": 1e-3,
                "seed": 0,
            }
            row |= {"seq_len": seq_len, "catalogue/recall@10": recall, "train/loss": 5.0}
            for n, lost in zip(HISTORIES, (0.1, 0.04, 0.001, 0.0), strict=True):
                row |= {f"catalogue/recall@10/context={n}": recall - lost, f"catalogue/recall@10/beyond={n}": lost}
            rows.append(row)
    return rows


def shape_rows() -> list[dict[str, object]]:
    best = np.log([48, 160, 4, 2, 32, 0.1])
    low, rng, rows = best - math.log(2.2), np.random.default_rng(0), []
    logs = low + qmc.Sobol(6, rng=0).random(128)[:71] * math.log(4)
    for number, at in enumerate(logs):
        label = "centre" if number == 70 else f"point-{number}" if number < 60 else f"held-out-{number}"
        values = dict(zip(KNOBS, np.exp(at[:5]), strict=True))
        rate = math.exp(at[5]) * math.sqrt(values["batch_sequences"] / 512)
        recall = 0.4 - 0.03 * float((at - best) @ (at - best)) + 0.0005 * rng.standard_normal()
        rows.append(
            {"axis": "shape", "cell_id": f"{label}-0", "flops_budget": 3e14, "learning_rate": rate, "seed": 0}
            | {"catalogue/recall@10": recall, "train/loss": 5.0, **values}
        )
    return rows


def share_rows() -> list[dict[str, object]]:
    rows = []
    for dropout, optimum in ((0.0, 0.08), (0.2, 0.16)):
        for share in (0.02, 0.04, 0.08, 0.15, 0.27, 0.5):
            u = share / optimum
            rows.append(
                {"axis": "regularisation", "cell_id": f"s={share}-{dropout}", "flops_budget": 3e14, "seed": 0}
                | {"learning_rate": 1e-3, "embedder_share": share, "item_dropout": dropout, "train/loss": 5.0}
                | {"catalogue/recall@10": 0.4 - 0.02 * (u**0.7 + u**-0.6)}
            )
    return rows


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("context-report")
    rows = [*context_rows(), *shape_rows(), *share_rows()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return read_page(report(folder / "runs.csv", folder / "report.html"))


def test_windows_and_histories_have_a_chapter(page: Page) -> None:
    assert {"context", "context-law", "context-table", "history-gain", "history-gain-table"} <= set(page.articles)
    assert "the best window length for catalogue/recall@10 is" in page.articles["context"].readings[0]
    assert "train with 512, serve with 200: -0.2% recall@10" in page.articles["history-gain"].readings[0]
    rows = page.sheet("history-gain")
    assert [row["history"] for row in rows[:4]] == ["10", "50", "200", "1000"]
    (row,) = [row for row in page.articles["history-gain-table"].tables[0] if row[0] == "catalogue/recall@10"]
    assert "windows of 512" in row[-1] and "beyond the sweep" not in row[-1]


def test_a_history_at_an_end_is_told_by_its_warning_alone() -> None:
    law = history_gain([_level_run()], "catalogue/recall@10")
    assert law.status == "boundary"
    assert _cell(law) == "10 [10, 10] events\nwindows of 512\n" + law.warnings[0]


def _level_run() -> MeasuredRun:
    """Ten events tell what fifty do."""
    metrics = {f"catalogue/recall@10/context={n}": 0.4 for n in (10, 50)} | {"catalogue/recall@10/beyond=10": 0.0}
    return MeasuredRun("context", "L=512", 1e14, 1e-3, 0, knobs={"seq_len": 512}, metrics=metrics)


def test_shapes_show_the_joint_optimum_beside_the_centre(page: Page) -> None:
    article = page.articles["shape-knobs"]
    assert "10 cells held out are missed by" in article.readings[0]
    assert "the region of the optimum (p = " in article.readings[0]
    assert len(article.tables[0]) == 7 and article.row("width")[0] == "width"
    shares = page.articles["regularised-share"]
    assert "moves the best share up in 1 of 1 cases" in shares.readings[0]


def test_no_two_parts_share_an_address(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
