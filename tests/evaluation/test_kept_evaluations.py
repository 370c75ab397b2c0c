"""evaluate STORE --keep, then fit, then report: what was measured after the sweep reaches laws and page."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.store import Laws, StoreEvaluation
from habitus.sweeps import load_preset, preset_dataset, sweep
from tests.reporting.reading import Page, read_page

MICRO = Path(__file__).parents[1] / "studies" / "micro.toml"
RANKING, OWN_QUERIES = "recall@10", ("--queries", "200", "--batch-sequences", "8")  # as micro.toml has them


@dataclass(frozen=True)
class Kept:
    store: Path
    laws: Laws
    page: Page

    def evaluation(self, name: str) -> StoreEvaluation:
        return StoreEvaluation.read(self.store / "evaluations" / f"{name}.json")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Four sizes at one budget that measured the batch regime alone; then the catalogue, and other pools."""
    folder = tmp_path_factory.mktemp("kept")
    preset = load_preset(MICRO)
    batch_only = preset.allocation.model_copy(update={"regimes": ("batch",)})
    preset = preset.model_copy(update={"allocation": batch_only})
    dataset, store = preset_dataset(preset, folder / "dataset", seed=0, threads=1), folder / "store"
    swept = sweep("allocation", dataset, store, budgets=[4e8], preset=preset, workers=1, device="cpu")
    assert swept.complete and swept.number("failed") == 0
    run("fit", store)
    assert not [metric for metric in Laws.read(store / "laws.json").metrics if metric.startswith("catalogue/")]
    run("evaluate", store, "--data", dataset.path, *OWN_QUERIES, "--regime", "catalogue", "--keep", "late")
    run("evaluate", store, "--data", dataset.path, *OWN_QUERIES, "--catalogue-items", "120", "--keep", "few",
        "--regime", "catalogue")  # fmt: skip
    run("evaluate", store, "--data", dataset.path, "--queries", "200", "--batch-sequences", "16", "--keep", "wide",
        "--regime", "batch")  # fmt: skip
    run("fit", store)
    run("report", store, "--out", folder / "report.html")
    return Kept(store, Laws.read(store / "laws.json"), read_page(folder / "report.html"))


def run(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "measured", "called"),
    [
        ("late", f"catalogue/{RANKING}", f"catalogue/{RANKING}"),  # the store's own queries and candidates
        ("few", f"catalogue/{RANKING}", f"catalogue/{RANKING}/eval=few"),
        ("wide", f"batch/{RANKING}", f"batch/{RANKING}/eval=wide"),
    ],
    ids=["another regime", "a subset of the catalogue", "a larger evaluation batch"],
)
def test_a_kept_evaluation_reaches_laws_and_page(kept: Kept, name: str, measured: str, called: str) -> None:
    values = {digest: metrics[measured].value for digest, metrics in kept.evaluation(name).runs.items()}
    assert len(values) == 4
    assert sorted(row.metrics[called] for row in kept.laws.runs) == sorted(values.values())
    assert kept.laws.find("size_optimum", called, 4e8).residuals.n == 4
    assert called in kept.page.articles["isoflop"].metrics
    shown = [float(row[called]) for row in kept.page.sheet("isoflop")]
    assert sorted(shown) == pytest.approx(sorted(values.values()), rel=1e-4)


def test_both_regimes_are_compared_once_the_second_was_measured(kept: Kept) -> None:
    assert kept.laws.regimes
    assert any(metric.startswith(f"batch/{RANKING} ") for metric in kept.page.articles["regimes"].metrics)


def test_a_smaller_pool_is_easier_so_that_its_name_must_differ(kept: Kept) -> None:
    for row in kept.laws.runs:
        assert row.metrics[f"catalogue/{RANKING}/eval=few"] >= row.metrics[f"catalogue/{RANKING}"]


def test_values_per_query_pair_the_users_of_the_size_test(kept: Kept) -> None:
    assert kept.laws.find("size_test", f"catalogue/{RANKING}").details["paired"]
