"""What a page says: the paper's numbers again, refusals in words, nothing from outside, no text that runs."""

import html
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.errors import ConfigError, FitError
from habitus.laws import MeasuredRun, fit
from habitus.planning import PlanOptions, plan
from habitus.reporting import report
from habitus.reporting.figure import Line
from habitus.reporting.format import significant
from habitus.reporting.share import flop_share, proxy, why_small
from habitus.reporting.study import Study
from habitus.store import Laws, RegisteredPlan, RunRow

from .make_store import HOSTILE, planted_rows, small_plan, write_store
from .reading import Page, read_page

ORDER = """opening plan test-users answer map passes regularisation value-of-data log-limits
    surface-slices surface-table surface-exponents
    share share-law share-table batch batch-table batch-targets isoflop frontiers allocation-table exponents
    negatives negatives-table correlations loss-recall regimes recipe accounting costs share-zoom flop-share proxy
    why-small depth
    depth-metrics depth-summary depth-grid depth-evaluation trajectories channels negatives-law train-surrogate
    surrogacy init init-table groups training-loss correlations-budget correlations-stage1 correlations-stage2
    loss-metric slices slices-batch slices-catalogue rollout rollout-table both flat calibration rates exclusions
    warnings disclosure""".split()


@pytest.fixture(scope="module")
def paper(paper_page: Path) -> Page:
    return read_page(paper_page)


@pytest.fixture(scope="module")
def tiny(tiny_page: Path) -> Page:
    return read_page(tiny_page)


def test_share_optima_are_the_printed_ones(paper: Page) -> None:
    table = paper.articles["share-table"]
    assert table.tables[0][0] == ["metric", "10¹⁵", "10¹⁶", "10¹⁷", "10¹⁸"]
    for metric, values in {
        "batch/loss": ("1.1%", "3.7%", "2.0%", "2.4%"),
        "batch/recall@10": ("1.1%", "3.0%", "2.1%", "2.3%"),
    }.items():
        cells = table.row(metric)[1:]
        assert [cell.split(" ")[0] for cell in cells] == list(values)
        assert all(cell.endswith(f"paper {value}") for cell, value in zip(cells, values, strict=True))
    assert "beyond the sweep" in table.row("batch/ndcg@10")[1]
    assert "At 10¹⁸ FLOPs the best embedder share for batch/loss is 2.4%" in paper.articles["share"].readings[0]


def test_critical_batch_sizes_are_the_printed_ones(paper: Page) -> None:
    rows = {row[0]: row for row in paper.articles["batch-table"].tables[0][1:]}
    loss = rows["batch/loss"]
    assert loss[3:9] == ["7,700", "3,250", "1,950", "1,450", "1,300", "1,550"]
    assert loss[9].startswith("574 [") and "300 log space" in loss[9] and "968 without largest batch" in loss[9]
    b_crits = {metric: row[9].split(" ")[0] for metric, row in rows.items()}
    assert b_crits == {
        "batch/loss": "574", "batch/recall@10": "544", "batch/ndcg@10": "274", "batch/mrr@10": "201",
        "batch/entropy": "not",
    }  # fmt: skip
    assert {metric: row[10] for metric, row in rows.items()}["batch/entropy"] == "0.92"


def test_the_allocation_is_the_printed_one(paper: Page) -> None:
    table = paper.articles["allocation-table"].tables[0]
    at = {name: i for i, name in enumerate(table[0])}
    assert [row[at["best cell N"]] for row in table[1:]] == ["532k", "1.95M", "10.9M", "19.4M", "251M"]
    assert [row[at["batch/loss"]] for row in table[1:]] == ["3.914", "3.376", "3.108", "2.832", "2.641"]
    assert [row[at["by parabola [95%]"]].split(" ")[0] for row in table[1:]] == [
        "695k",
        "2.51M",
        "8.67M",
        "38.9M",
        "216M",
    ]
    assert [row[at["D = C/6N*"]] for row in table[1:]] == [
        "240M",
        "664M",
        "1.92B",
        "4.28B",
        "7.72B",
    ]
    # The printed D/N column is the 6ND convention; 344 and 345 both stand in the paper.
    assert [row[at["D/N by 6ND"]] for row in table[1:]] == ["345", "265", "222", "110", "35.7"]


def test_exponents_and_their_errors_are_the_printed_ones(paper: Page) -> None:
    table = paper.articles["exponents"]
    for metric, exponent, error in (
        ("batch/recall@10", "0.616", "± 0.029"),
        ("batch/ndcg@10", "0.586", "± 0.033"),
        ("batch/coverage@10", "0.574", "± 0.079"),
    ):
        cell = table.row(metric)[2]
        assert cell.startswith(exponent) and cell.endswith(error)
        assert table.row(metric)[-1] == f"{exponent} {error}"
    assert table.row("batch/loss")[2].endswith("± 0.025")


def test_numbers_of_negatives_are_the_printed_ones(paper: Page) -> None:
    table = paper.articles["negatives-table"]
    optima = {row[0]: [cell.split(" ")[0] for cell in row[1:]] for row in table.tables[0][1:]}
    assert optima["catalogue/loss"][0] == "360k" and optima["catalogue/loss"][2] == "403k"
    assert optima["catalogue/recall@10"][1:4] == ["437k", "249k", "632k"]
    assert optima["catalogue/ndcg@10"][:3] == ["125k", "412k", "245k"]
    assert optima["catalogue/mrr@10"][:4] == ["212k", "420k", "237k", "489k"]
    assert "beyond the sweep" in table.row("catalogue/loss")[2]


def test_depth_and_training_losses_are_the_printed_ones(paper: Page) -> None:
    summary = paper.articles["depth-summary"].tables[0]
    assert [row[1] for row in summary[1:]] == ["12", "6", "4", "32"]
    assert [row[3] for row in summary[1:]] == ["3.950", "3.439", "3.164", "2.782"]
    assert paper.articles["depth-grid"].row("8")[1:] == ["4.062", "3.462", "3.165", "2.912"]
    assert paper.articles["depth-evaluation"].row("24")[:3] == ["24", "2.823", "0.6390"]
    train = paper.articles["train-surrogate"].tables[0]
    assert [row[1] for row in train[1:]] == ["920k", "1.95M", "10.9M", "31.9M", "251M"]
    assert [row[3] for row in train[1:]] == ["3.571", "3.087", "2.911", "2.809", "2.585"]
    init = paper.articles["init-table"].tables[0]
    assert [row[2] for row in init[1:9]] == ["4.626", "4.210", "3.594", "2.904", "5.547", "5.103", "4.516", "3.584"]
    assert {row[5] for row in init[1:9]} == {"0.70", "0.30"}
    # 'raises the loss at every scale by 0.68 to 0.92 nats'
    assert [row[:1] + row[2:3] for row in init[9:]] == [
        ["default − mup_lr", difference] for difference in ("−0.921", "−0.893", "−0.922", "−0.680")
    ]


def test_what_the_paper_says_in_passing_is_on_the_page(paper: Page, paper_page: Path) -> None:
    # one matrix per budget: 10¹⁵ to 10¹⁹ in stage 1
    assert paper.articles["correlations-stage1"].drawings == 5
    # 'the discrete-winner refit gives b_N = 0.609 ± 0.052', on the printed winners
    assert "Refit on the best cells themselves: a_N 0.609 ± 0.052" in paper_page.read_text(encoding="utf-8")


def test_the_cross_checks_of_the_share_are_fitted() -> None:
    """Planted: loss = 3 + f + 0.16/f, best at f = 0.4 with 3.8; N/D is f, so its line is that of loss on log f."""
    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    laws = Laws(source="", seed=0, metrics=("batch/loss",), runs=tuple(map(share_run, shares)))
    run = MeasuredRun(axis="share", budget=1e15, cell_id="s=0.1", learning_rate=1e-3, seed=0)
    study = Study("planted", laws, (run,))
    (view,) = flop_share(study).views
    assert "two-term form fitted in f (dashed) has its optimum at 40% at 10¹⁵" in view.reading
    curve = next(mark for mark in view.panels[0].marks if isinstance(mark, Line) and mark.dashed)
    assert min(curve.y) == pytest.approx(3.8, abs=0.01)

    (view,) = proxy(study).views
    line = next(mark for mark in view.panels[1].marks if isinstance(mark, Line))
    losses = [share_run(share).metrics["batch/loss"] for share in shares]
    slope, level = np.polyfit(np.log(shares), losses, 1)
    assert list(line.y) == pytest.approx([level + slope * np.log(0.1), level + slope * np.log(0.8)])


def test_why_small_counts_effective_parameters_and_repeats() -> None:
    """By hand: p 900, p_e 100 and t 24 make N_eff 3,300, of which the embedder has 73%; 5,000 events of 50 items."""
    row = share_run(0.4)
    knobs = {"embedder_params": 100.0, "contextualizer_params": 900.0, "text_len": 24.0, "params": 1000.0,
             "events_seen": 5000.0, "catalogue_items": 50.0, "epochs": 0.5}  # fmt: skip
    row = row.model_copy(update={"knobs": {**row.knobs, **knobs, "slots_seen": 6600.0}})
    laws = Laws(source="", seed=0, metrics=("batch/loss",), runs=(row,))
    run = MeasuredRun(axis="share", budget=1e15, cell_id="s=0.4", learning_rate=1e-3, seed=0)
    exhibit = why_small(Study("planted", laws, (run,)))
    ((budget, cell, share, params, effective, part, ratio, passes, repeats, above),) = exhibit.sheet.rows
    assert (budget, cell, share, params, effective) == (1e15, "s=0.4", pytest.approx(0.04), 1000, 3300)
    assert part == pytest.approx(2400 / 3300) and ratio == 2.0 and (passes, repeats, above) == (0.5, 100.0, 0.0)
    assert "4.0% of its parameters in the embedder and 73% of N_eff, sees an item 100 times" in exhibit.views[0].reading
    assert why_small(Study("planted", laws.model_copy(update={"runs": (share_run(0.4),)}), (run,))) is None


def share_run(share: float) -> RunRow:
    return RunRow(
        axis="share", budget=1e15, cell_id=f"s={share}", learning_rate=1e-3, seed=0, init="default", chosen=True,
        knobs={"embedder_flop_share": share, "embedder_share": share / 10, "params": 1e6 * share, "slots_seen": 1e6},
        metrics={"batch/loss": 3 + share + 0.16 / share},
    )  # fmt: skip


def test_the_roll_out_shows_what_the_papers_own_losses_would_have_missed(paper: Page) -> None:
    rows = [r for r in paper.articles["rollout-table"].tables[0] if r[1] == "train/loss" and r[0] == "L*"]
    assert [r[7] for r in rows if r[2:4] == ["10¹⁸", "10¹⁹"]] == ["+7.6%"]
    sizes = [r for r in paper.articles["rollout-table"].tables[0] if r[1] == "batch/loss" and r[0] == "N*"]
    # 0.64 times by the printed optima, unweighted; here optima count by their errors, fitted without 10¹⁹.
    assert [r[7] for r in sizes if r[3] == "10¹⁹"] == ["0.50×", "0.70×"]


def test_every_forecast_has_an_interval_to_be_judged_by(paper: Page) -> None:
    rows = paper.articles["rollout-table"].tables[0][1:]
    # A law without an interval is not identified, and forecasts nothing.
    assert rows and not [r for r in rows if r[5] == "[open, open]"]
    assert {r[10] for r in rows} <= {"yes", "no"}
    judged = sum(int(r[3].split(" of ")[1]) for r in paper.articles["calibration"].tables[0][1:] if " of " in r[3])
    assert f"of {judged} values that a law had not seen" in paper.articles["calibration"].readings[0]


def test_the_order_is_the_papers(paper: Page, tiny: Page) -> None:
    for page in (paper, tiny):
        places = [ORDER.index(key) for key in page.articles]
        assert places == sorted(places)
    titles = [article.title for article in paper.articles.values()]
    numbers = [int(t.split()[1]) for t in titles if t.startswith("Figure")]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_docs_say_how_to_read_every_figure_and_table(paper: Page, tiny: Page) -> None:
    table = (
        (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8").split("## Figure by figure")[1]
    )
    named = {name for row in re.findall(r"^\| (.+?) \|", table, re.M) for name in row.replace("\\", "").split("; ")}
    titles = [re.sub(r"^(Figure|Table) \d+ ", "", a.title) for page in (paper, tiny) for a in page.articles.values()]
    assert len(set(titles)) > 30
    for title in titles:
        assert title in named, title


def test_every_block_has_a_reading_and_its_data(paper: Page, tiny: Page) -> None:
    for page in (paper, tiny):
        for article in page.articles.values():
            assert article.readings and all(reading.strip().endswith(".") for reading in article.readings), article.key
            if article.drawings or (article.tables and article.key not in ("exclusions", "warnings")):
                assert page.sheet(article.key), article.key
    assert len(paper.sheet("all-runs")) == 236
    assert len(paper.sheet("share")) == 4 * 13


def test_history_slices_are_compared_for_coverage_too(tmp_path: Path) -> None:
    # By short histories the runs rank as 1 2 3 4, by long ones as 2 1 4 3: Spearman's rho is 1 - 6*4/(4*15) = 0.6.
    rows = [
        {
            "axis": "allocation", "cell_id": f"a{place}", "budget": 1e11, "rate": 2e-3, "knobs": {"params": 2e4 * size},
            "metrics": {"train/loss": 5.0, "batch/coverage@10": 0.1 * size, "batch/coverage@10/history=3": 0.1 * size,
                        "batch/coverage@10/history=50": 0.1 * swapped},
        }
        for place, (size, swapped) in enumerate(((1, 2), (2, 1), (3, 4), (4, 3)))
    ]  # fmt: skip
    page = read_page(report(write_store(tmp_path / "store", rows), tmp_path / "report.html"))
    (reading,) = page.articles["slices-batch"].readings
    assert "batch/coverage@10" in reading and "ρ = +0.60, n = 4" in reading


def test_laws_that_refuse_say_so_with_their_reason(tiny: Page) -> None:
    assert "identify no optimum" in tiny.articles["answer"].readings[0]
    assert (
        "Not identified for batch/loss: 10¹¹: too few points (3 distinct positive x"
        in tiny.articles["share"].readings[0]
    )
    assert "0 budgets with an interior optimum" in tiny.articles["share-law"].readings[0]
    recipe = {row[0]: row[1] for row in tiny.articles["recipe"].tables[0]}
    assert recipe["batch (sequences)"] == "not measured"
    assert recipe["embedder share"].startswith("not identified")


def test_what_is_missing_stands_once_with_the_command_that_would_measure_it(tiny: Page) -> None:
    end = tiny.text[tiny.text.index('id="not-measured"') :]
    for axis in ("batch", "negatives", "depth", "init"):
        assert f"habitus sweep {axis} --data DATASET --store STORE" in end
    assert end.count("critical batch size;") == 1
    assert "share-table" in tiny.articles and "batch" not in tiny.articles


def test_text_from_files_stays_text(tiny: Page) -> None:
    assert HOSTILE not in tiny.text
    assert tiny.tags.count("script") == 3  # two of data, one of code
    assert any(HOSTILE in " ".join(row) for row in tiny.articles["exclusions"].tables[0])
    assert any(row["cell_id"] == HOSTILE for row in tiny.sheet("all-runs"))


def test_the_page_needs_nothing_from_outside(paper: Page) -> None:
    assert all(address.startswith(("#", "data:")) for address in paper.addresses)
    assert "http://" not in paper.text and "https://" not in paper.text and "@import" not in paper.text
    assert len(paper.ids) == len(set(paper.ids))


def test_a_formula_in_a_cell_does_not_run_in_a_spreadsheet(tmp_path: Path) -> None:
    from habitus.reporting.figure import Sheet
    from habitus.reporting.page import csv_text

    assert csv_text(Sheet(("a", "b"), (("=1+1", 0.5), (None, float("inf"))))) == "a,b\n'=1+1,0.5\n,\n"
    assert csv_text(Sheet(("a", "b"), (("\t=1+1", "\r=1+1"),))) == "a,b\n'\t=1+1,' =1+1\n"


@pytest.mark.parametrize("change", ["loss", "loss and seal", "version"])
def test_a_changed_store_makes_no_page(tiny_store: Path, tmp_path: Path, change: str) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    fit(store).write(store / "laws.json")  # as it was before the change
    path = next(store.glob("cells/*/record.json")) if change != "version" else store / "store.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | ({"version": 2} if change == "version" else {"epochs": 0.5})))
    if change == "loss and seal":
        path.with_name("seal.json").unlink()
    result = CliRunner().invoke(app, ["report", str(store), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 1 and not (tmp_path / "page.html").exists()
    assert "version 2" in str(result.exception) if change == "version" else path.parent.name in str(result.exception)


def test_the_page_of_a_flat_file_says_that_it_is_unsealed(tmp_path: Path) -> None:
    flat = tmp_path / "runs.csv"
    names = "axis,cell_id,flops_budget,learning_rate,seed,params,slots_seen,train/loss,batch/loss"
    rows = [
        f"allocation,a{i},{1e12 * 4**b:g},0.002,0,{1e5 * 2 ** (i + b)},{1e6 * 2 ** (b - i)},{x},{x}"
        for b in range(3)
        for i, x in enumerate((4.2, 4.0, 3.95, 4.02, 4.25))
    ]
    flat.write_text("\n".join([names, *rows]) + "\n")
    old = fit(flat)
    old.model_copy(update={"notes": ()}).write(tmp_path / "runs.laws.json")  # as older code wrote it
    assert "unsealed: the runs come from runs.csv" in read_page(report(flat, tmp_path / "page.html")).text


def test_laws_are_read_when_fresh_and_fitted_when_old(tiny_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    laws = fit(store)
    laws.model_copy(update={"notes": ("a note of the earlier fit",)}).write(store / "laws.json")
    page = read_page(report(store, tmp_path / "fresh.html"))
    assert "a note of the earlier fit" in page.text and "laws read from laws.json" in page.text.lower()
    record = next(store.glob("cells/*/record.json"))
    os.utime(record, (4e9, 4e9))
    page = read_page(report(store, tmp_path / "old.html"))
    assert "a note of the earlier fit" not in page.text
    assert "older than the newest record" in page.text.lower()
    assert Laws.read(store / "laws.json").notes == ("a note of the earlier fit",)  # the store is left as it is


def test_the_plan_stands_on_top_with_its_sources_and_warnings(tiny_store: Path, tmp_path: Path) -> None:
    plan = small_plan(
        quantities={
            "params": {"value": 2.5e6, "low": 2e6, "high": 3e6, "source": "this study", "how": "size_law"},
            "learning_rate": {
                "value": 0.002,
                "low": 0.001,
                "high": 0.004,
                "source": "default",
                "how": "2e-3·√(B/512)",
                "range": "tried",
            },
        },
        predictions=[
            {"metric": "catalogue/recall@10", "stage": 2, "value": 0.071, "low": 0.06, "source": "default", "how": "x"}
        ],
        differences=[{"knob": "params", "ours": 2.5e6, "published": 1.9e6, "ratio": 1.3, "inside": False}],
        extrapolation={"budget": 1e13, "smallest": 1e11, "largest": 3e11, "factor": 33.3},
        warnings=[f"too far {HOSTILE}"],
    )
    path = tmp_path / "plan.json"
    plan.write(path)
    page = read_page(report(tiny_store, tmp_path / "report.html", plan=path))
    assert report(tiny_store, tmp_path / "object.html", plan=plan).read_text() == page.text
    title, command = f"A shop {HOSTILE}", "habitus train a --out b"
    named = report(tiny_store, tmp_path / "named.html", plan=path, title=title, next_command=command).read_text()
    assert "<h1>A shop &lt;script&gt;" in named and HOSTILE not in named
    assert "<li>Next: habitus train a --out b</li>" in named
    article = page.articles["plan"]
    assert article.readings == [
        "For catalogue/recall@10 at 10¹³ FLOPs: train N = 2.5M and rate 2·10⁻³. N rests on the size_law. "
        "Expect 0.07100 [0.06000, open] after stage 2. The law behind it is "
        "stretched 33.3 times beyond the largest budget measured here."
    ]
    assert article.row("model size N")[1:] == ["2.5M [2M, 3M]", "1.9M", "this study: size_law"]
    assert article.row("predicted catalogue/recall@10 after stage 2")[1] == "0.07100 [0.06000, open]"
    assert article.tables[0][0][1] == "value [95%, tried or assumed]"
    # Only intervals of laws are called 95%.
    assert [line["range"] for line in page.sheet("plan")] == ["95%", "tried", "95%"]
    opening = page.articles["opening"]
    assert list(page.articles)[:2] == ["opening", "plan"]
    assert opening.readings[opening.metrics.index("catalogue/recall@10")] == (
        "The best of these runs has catalogue/recall@10 0.04400, at 10¹¹ FLOPs. "
        "The plan for 10¹³ expects 0.07100 [0.06000, open]."
    )
    assert "plan at 10¹³, stage 2: 0.07100 [0.06000, open]" in page.text
    assert "Next: habitus train stage1.toml --data DATASET --out RUN" in page.text
    assert "too far" in page.text and HOSTILE not in page.text
    assert page.articles["answer"].metrics[0] == "batch/loss"
    assert '<option value="catalogue/recall@10" selected>' in page.text


@pytest.mark.parametrize(("flops", "ratio"), [(1e17, "D/N 221"), (1e18, "D/N 110"), (1e19, "D/N 35.8")])
def test_the_papers_store_has_a_recipe_that_the_budget_pays_beside_the_printed_one(
    paper_store: Path, tmp_path: Path, flops: float, ratio: str
) -> None:
    next_plan = plan(flops, "batch/loss", PlanOptions(laws=paper_store / "laws.json"))
    next_plan.write(tmp_path / "plan.json")
    page = read_page(report(paper_store, tmp_path / "report.html", plan=tmp_path / "plan.json"))
    article = page.articles["plan"]
    # Equation 1 of the planned recipe is the budget; the printed one costs several budgets.
    spent = next_plan.stage1_flops + next_plan.stage2_flops
    assert spent == pytest.approx(flops, rel=0.01)
    text = html.unescape(page.text)
    assert "The paper's printed recipe at this budget: N " in text
    assert f"{ratio} (6ND convention), share 2.0%, batch 2,048" in text
    price = re.search(r"FLOPs for it, ([\d.]+) times the budget", text)
    assert price is not None and 3.5 < float(price[1]) < 40  # at B = 2048
    for warning in (
        "the law misses 10¹⁹ by 0.70 times",
        "the law misses 10¹⁹ by +7.6%",
        "depends on the convention: 300 log space",
    ):
        assert warning in text
    # The printed ratios, 222 and 36, come from optima before rounding; the recipe table quotes them as printed.
    assert "344 265 222 110 36 at 10¹⁵ 10¹⁶ 10¹⁷ 10¹⁸ 10¹⁹ (6ND convention)" in text
    assert article.row("D/N")[1].split(" ")[0] == significant(next_plan["data_ratio"].value)


def test_a_plan_in_the_store_is_shown(tiny_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    path = store / "plan.json"
    for written in (small_plan(), RegisteredPlan.of(small_plan(), "2026-11-16T12:00:00+00:00")):
        written.write(path)
        page = read_page(report(store, tmp_path / "report.html"))
        assert page.articles["plan"].title.endswith("Recipe for 10¹³ FLOPs")
        assert page.articles["plan"].tables == []  # what a plan lacks is not shown
    values = small_plan().to_values()
    for text, match in (
        ("[1]", r"plan\.json holds a list"),
        ("{", r"plan\.json cannot be read"),
        (json.dumps({**values, "quantities": [1]}), r"plan\.json: .*quantities"),
        (json.dumps({**values, "flops": "much"}), r"plan\.json: .*flops"),
        (json.dumps({**values, "predictions": [{}]}), r"plan\.json: .*predictions"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            report(store, tmp_path / "report.html")


def test_the_command_writes_the_page_and_the_figures(tiny_store: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "report.html", tmp_path / "png"
    result = CliRunner().invoke(app, ["report", str(tiny_store), "--out", str(out), "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output and out.stat().st_size > 20_000
    drawn = sorted(path.name for path in png.iterdir())
    assert "figure-01-opening-batch-loss.png" in drawn
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in png.iterdir())
    page = read_page(out)
    figures = [a for a in page.articles.values() if a.drawings]
    assert {name.split("-")[1] for name in drawn} == {f"{int(a.title.split()[1]):02d}" for a in figures}


def test_png_without_its_extra_says_what_to_install(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"--png needs vl-convert") as error:
        report(tiny_store, tmp_path / "report.html", png=tmp_path / "png")
    assert "pip install 'habitus[png]'" in str(error.value) and not (tmp_path / "png").exists()


@pytest.mark.parametrize("axis", ["share", "depth", "batch", "allocation", "negatives", "init"])
def test_one_axis_alone_is_reported(axis: str, tmp_path: Path) -> None:
    names = (
        "batch/loss",
        "catalogue/loss",
        "catalogue/recall@10",
        "train/loss",
        "train/extra_loss",
        "batch/loss/history=5",
    )
    rows = [row for row in planted_rows() if row["axis"] == axis and row["budget"] < 5e17]
    for row in rows:
        row["metrics"] = {m: v for m, v in row.get("metrics", {}).items() if m in names}
        row["trajectory"] = [point for point in row.get("trajectory", ()) if point[1] in names]
    rows = [row for row in rows if row["metrics"]]
    page = read_page(report(write_store(tmp_path / "store", rows), tmp_path / "report.html"))
    first = {"share": "share", "depth": "depth", "batch": "batch", "allocation": "isoflop", "negatives": "negatives"}
    assert first.get(axis, "init") in page.articles
    others = {"share", "depth", "batch", "isoflop", "negatives", "init"} - {first.get(axis, "init")}
    assert not others & set(page.articles)
    assert "nan" not in " ".join(r for a in page.articles.values() for r in a.readings).split()


def test_a_flat_table_is_reported(tmp_path: Path) -> None:
    lines = ["axis,cell_id,flops_budget,learning_rate,seed,params,slots_seen,train/loss,batch/loss,status,reason"]
    for c in (1e15, 1e16, 1e17):
        for i in range(6):
            n, loss = 1e6 * 4**i, 4 - 0.3 * (c > 5e15) - 0.2 * (c > 5e16) + 0.05 * (i - 2.3) ** 2
            lines.append(f"allocation,a{i},{c:g},0.002,0,{n:g},{c / 6 / n:g},{loss:.4f},{loss + 0.01:.4f},done,")
    lines.append("allocation,a9,1e15,0.002,0,,,,,failed,out of memory")
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    page = read_page(report(tmp_path / "runs.csv", tmp_path / "report.html"))
    assert "isoflop" in page.articles and "1 run of 19 left out" in page.articles["exclusions"].readings[0]
    assert "3 of 3 budgets have an interior optimum" in page.articles["allocation-table"].readings[0]


def test_the_same_store_gives_the_same_bytes(tiny_store: Path, tmp_path: Path) -> None:
    first, second = (report(tiny_store, tmp_path / f"{name}.html") for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_errors_name_what_was_given(tiny_store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .*report\.txt"):
        report(tiny_store, tmp_path / "report.txt")
    with pytest.raises(ConfigError, match="--out"):
        report(tiny_store, tmp_path / "nowhere" / "report.html")
    with pytest.raises(ConfigError, match=r"--plan .* does not exist"):
        report(tiny_store, tmp_path / "report.html", plan=tmp_path / "plan.json")
    with pytest.raises(FitError, match="nothing does not exist"):
        report(tmp_path / "nothing", tmp_path / "report.html")
    with pytest.raises(ConfigError, match="--png"):
        report(tiny_store, tmp_path / "report.html", png=tiny_store / "sweeps" / "share-1.json")
    assert not (tmp_path / "nowhere").exists()
