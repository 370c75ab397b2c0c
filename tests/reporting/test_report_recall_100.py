"""recall@100 is a headline metric: it has laws and stands in both correlation matrices without being named."""

from pathlib import Path

import numpy as np
import pytest

from habitus.laws import fit
from habitus.reporting import report

from .make_store import BUDGETS, NEGATIVES, Row, planted_loss, planted_size, write_store
from .reading import read_page


def rows() -> list[Row]:
    """Five sizes at three budgets, and K at one; recall@10 and recall@100 fall with the loss at rates of their own."""
    rows: list[Row] = []
    for budget in BUDGETS[:3]:
        best = planted_size(budget)
        for i, size in enumerate(best * np.geomspace(1 / 6, 6, 7)):
            slots = budget / (6 * size)
            loss = planted_loss(size, slots)
            knobs = {"params": size, "slots_seen": slots}
            rows.append({"axis": "allocation", "cell_id": f"a{i}", "budget": budget, "rate": 2e-3, "knobs": knobs,
                         "metrics": metrics("batch", loss)})  # fmt: skip
    for i, count in enumerate(NEGATIVES):
        loss = 3 + 0.02 * abs(i - 4)
        rows.append({"axis": "negatives", "cell_id": f"k{i}", "budget": BUDGETS[0], "rate": 2e-3,
                     "knobs": {"num_negatives": count}, "metrics": metrics("catalogue", loss)})  # fmt: skip
    return rows


def metrics(regime: str, loss: float) -> dict[str, float]:
    ranking = {f"{regime}/recall@10": np.exp(-0.5 * loss), f"{regime}/recall@100": np.exp(-0.3 * loss)}
    return {"train/loss": loss - 0.01, f"{regime}/loss": loss, **ranking}


def test_recall_at_100_has_laws_and_stands_in_both_matrices(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", rows())
    laws = fit(store)
    named = {(entry.name, entry.metric) for entry in laws.entries}
    assert {("size_optimum", "batch/recall@100"), ("size_law", "batch/recall@100"),
            ("negatives_optimum", "catalogue/recall@100")} <= named  # fmt: skip
    stages = {"stage1": "batch", "stage2": "catalogue"}
    for stage, regime in stages.items():
        tables = [table for one in laws.correlations if one.name == stage for table in one.tables]
        assert tables and all({f"{regime}/loss", f"{regime}/recall@100"} <= set(table.names) for table in tables)
        rhos = [table.rho(f"{regime}/loss", f"{regime}/recall@100") for table in tables]
        assert rhos == pytest.approx([-1.0] * len(tables))  # planted: a smaller loss is a larger recall
    laws.write(store / "laws.json")
    page = read_page(report(store, tmp_path / "report.html"))
    assert "batch/recall@100" in page.articles["isoflop"].metrics
    for stage, regime in stages.items():
        table = page.articles[f"correlations-{stage}"]
        assert "ρ(loss, recall@100)" in table.tables[0][0] and table.drawings
        pairs = {(row["first"], row["second"]) for row in page.sheet(f"correlations-{stage}")}
        assert (f"{regime}/recall@10", f"{regime}/recall@100") in pairs
