"""What the top of the page says, worked by hand from laws that were put there."""

from dataclasses import replace
from pathlib import Path

from habitus.laws import MeasuredRun, correlation_by_budget, power_law
from habitus.laws.law_builders import law_without_values
from habitus.reporting.allocation import _describe_frontier
from habitus.reporting.correlations import correlation_tables
from habitus.reporting.page import GLOSSARY
from habitus.reporting.plan import describe_plan
from habitus.reporting.study import Study
from habitus.reporting.summary import answer
from habitus.reporting.valleys import describe_optima
from habitus.store import Law, LawEntry, Laws, LawStatus, NamedTables, Residuals

from .make_store import small_plan


def optimum(name: str, metric: str, budget: float | None, status: LawStatus, **values: float) -> LawEntry:
    law = Law(law="x", form="", status=status, values=values, residuals=Residuals(n=3, dof=1))
    return LawEntry(name=name, metric=metric, axis="x", budget=budget, law=law)


def study_of(*entries: LawEntry) -> Study:
    metrics = ("catalogue/recall@10", "batch/recall@10", "batch/loss")
    run = MeasuredRun(axis="allocation", budget=6e11, cell_id="a", learning_rate=0.01, seed=0)
    return Study("store", Laws(source="store", seed=0, metrics=metrics, entries=entries), (run,))


def test_where_a_metric_has_no_optimum_the_table_names_what_the_recipe_stands_on() -> None:
    study = study_of(
        optimum("size_optimum", "catalogue/recall@10", 6e11, "not_identified", x_opt=31_800.0),
        optimum("size_optimum", "batch/recall@10", 6e11, "flat"),
        optimum("size_optimum", "batch/loss", 6e11, "ok", x_opt=60_000.0),
        optimum("share_optimum", "catalogue/recall@10", 4e11, "boundary", x_opt=0.18),
        # An optimum without a law through several budgets: a plan takes the loss's law before it.
        optimum("share_optimum", "batch/recall@10", 4e11, "ok", x_opt=0.19),
        optimum("share_optimum", "batch/loss", 4e11, "ok", x_opt=0.21),
        optimum("share_law", "batch/loss", None, "ok", exponent=0.04),
    )
    exhibit = answer(study)
    assert exhibit is not None
    view = next(v for v in exhibit.views if v.metric == "catalogue/recall@10")
    assert view.reading == (
        "For catalogue/recall@10 these runs identify no optimum of its own. "
        "batch/loss, which stands in for it in a plan, has model size N* = 60k and embedder share s* = 21%."
    )
    assert view.table is not None
    assert [row[0] for row in view.table.rows] == [
        "model size N*",
        "model size N* (by batch/loss)",
        "embedder share s*",
        "embedder share s* (by batch/loss)",
    ]


def test_an_exponent_that_its_error_swallows_is_no_growth() -> None:
    x, swallowed = [1e11, 1e12, 1e13], power_law([1e11, 1e12, 1e13], [2e4, 6e4, 2.1e4])
    grown = power_law(x, [1e4, 1e5, 1.1e6])  # slope (log 110)/2 / log 10 = 1.021
    entries = [
        LawEntry(name=name, metric="batch/loss", axis="allocation", law=law)
        for name, law in (("size_law", swallowed), ("data_law", grown))
    ]
    reading = _describe_frontier(study_of(*entries), "batch/loss", {})
    assert reading.startswith("N* for batch/loss shows no trend above its error: exponent 0.011 [")
    assert "D* as realised grows as C to the power 1.021 [" in reading


def test_the_opening_says_which_laws_the_recipe_rests_on() -> None:
    plan = small_plan(flops=6e12, quantities={
        "params": {"value": 125e3, "source": "this study", "how": "size law of batch/loss, exponent 0.347"},
        "embedder_share": {"value": 0.02, "source": "published", "how": "the printed recipe; printed optima of x"},
        "num_negatives": {"value": 2000, "source": "default", "how": "no law of negatives: in-batch only"},
    })  # fmt: skip
    assert describe_plan(plan) == (
        "For catalogue/recall@10 at 6·10¹² FLOPs: train N = 125k, share 2.0% and K = 2,000. "
        "N rests on the size law of batch/loss, the share on the printed recipe (published)."
    )


def test_the_page_and_the_docs_explain_the_same_words(tiny_page: Path) -> None:
    docs = Path(__file__).parents[2].joinpath("docs", "words.md").read_text(encoding="utf-8").replace("\\*", "*")
    for term, meaning in GLOSSARY:
        assert f"| {term} | {meaning} |" in docs
    assert "<dt>slot</dt><dd>one place in a training window" in tiny_page.read_text(encoding="utf-8")


def test_every_refused_budget_has_its_own_reason() -> None:
    def law(status: LawStatus, why: str) -> Law:
        return law_without_values("x", "", status, 7, why)

    laws = {
        1e11: law("flat", "p = 0.31"), 2e11: law("flat", "p = 0.48"), 4e11: law("too_few", "2 points"),
        6e11: law("too_few", "2 points"),
    }  # fmt: skip
    assert describe_optima(study_of(), laws, "batch/loss", "share", "percent") == (
        "Not identified for batch/loss: 10¹¹: flat (p = 0.31); 2·10¹¹: flat (p = 0.48); "
        "4·10¹¹ and 6·10¹¹: too few points (2 points)."
    )


def test_all_evaluations_are_a_row_of_their_own_only_where_they_differ() -> None:
    budgets, loss, recall = [1e11] * 4, [3.0, 2.9, 2.8, 2.7], [0.1, 0.2, 0.3, 0.4]
    best = correlation_by_budget(budgets, {"batch/loss": loss, "batch/recall@10": recall}, 0)
    other = correlation_by_budget(budgets, {"batch/loss": loss, "batch/recall@10": recall[::-1]}, 0)
    for everything, rows in ((best, 1), (other, 2)):
        study = study_of()
        named = tuple(
            NamedTables(name="stage1", runs=runs, tables=tables)
            for runs, tables in (("best learning rate only", best), ("all evaluations", everything))
        )
        laws = study.laws.model_copy(update={"correlations": named})
        (exhibit,) = correlation_tables(replace(study, laws=laws))
        assert exhibit.views[0].table is not None
        labels = [row[0] for row in exhibit.views[0].table.rows]
        assert labels.count("10¹¹") == rows, labels


def test_the_legend_names_the_paper_only_where_it_is_drawn(tiny_page: Path) -> None:
    assert "grey diamonds" not in tiny_page.read_text(encoding="utf-8")
