"""Cards as text: read by huggingface_hub and a Markdown parser; what users named stays text; no paths, same bytes."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, ModelCard
from markdown_it import MarkdownIt

from habitus.cards import CardFacts, DataFacts, FieldFacts, SearchFacts, SideFacts, Trial, dataset_card, run_card
from habitus.cards import shareable_plan as shareable
from habitus.cards.markup import clean, escape, front_matter, hide_paths
from habitus.recipe import Recipe
from habitus.record import Metric, Params, Record, Seconds, TrainLosses
from habitus.store import BaselineDifference, Plan, Quantity, TableRow, TestTable

NASTY = [
    "<script>alert(1)</script>",
    "[a](javascript:alert(1)) ![b](http://x.org/b.png)",
    "a | b | c",
    "`code` **bold** __init__ ~~s~~ # head",
    "---\nlicense: stolen\n---",
    'quote " and \\ backslash',
    "https://example.org and www.example.org and me@example.org",
    "\u202eright to left\u200b\x00\x1b[31m",
    "- item\n1. one\n> quoted",
    "&lt;b&gt; &#60;i&#62;",
    "名前 ключ 🙂 <b>",
    "x" * 1_000_000,
    "\udcff lone",
]


def recipe() -> Recipe:
    return Recipe.parse(
        {
            "data": {"seq_len": 32},
            "model": {"joint_dim": 16, "text_len": 6, "text_depth": 1, "width": 32, "depth": 2, "head_dim": 16},
            "train": {"batch_sequences": 16, "steps": 24, "learning_rate": 3e-3, "precision": "fp32"},
        },
        "the test's recipe",
    )


def record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "recipe": recipe(),
        "recipe_hash": "a" * 64,
        "dataset_checksum": "d" * 64,
        "status": "done",
        "params": Params(embedder=1_000, contextualizer=3_000, vocabulary=500),
        "flops_nominal": 1.5e9,
        "steps": 24,
        "events_seen": 12_000,
        "epochs": 2.0,
        "train": TrainLosses(in_batch_loss=4.0, loss=4.0),
        "metrics": {"catalogue/recall@10": Metric(value=0.25, se=0.01, n=400)},
        "hardware": {"device": "cpu", "cpu": "a processor"},
        "versions": {"habitus": "0.1.0"},
        "seconds": Seconds(warmup=1.0, train=9.0, evaluate=1.0),
        "seed": 0,
    }
    return Record(**values | changes)


def facts_of_data(*names: str) -> DataFacts:
    return DataFacts(
        checksum="d" * 64,
        events=104_519,
        users=610,
        items=9_742,
        days=("1996-03-29", "2018-09-24"),
        split="user",
        seq_len=256,
        sides={
            "train": SideFacts(users=515, events=85_737, queries=85_000),
            "test": SideFacts(users=36, events=5_000, queries=4_900),
        },
        item_fields=tuple(FieldFacts(name=name, kind="category", filled=0.5) for name in names),
        event_fields=(FieldFacts(name="rating", kind="number", filled=0.96),),
    )


def results() -> TestTable:
    def row(scorer: str, recall: float, **differences: BaselineDifference) -> TableRow:
        metrics = {"recall@10": recall, "ndcg@10": recall / 2, "loss": 8.0}
        measured = {name: Metric(value=value, se=0.01, n=4_000) for name, value in metrics.items()}
        return TableRow(scorer=scorer, metrics=measured, differences=differences)

    less = BaselineDifference(value=0.05, low=0.02, high=0.08)
    rows = (row("model", 0.3), row("popularity", 0.25, **{"recall@10": less, "ndcg@10": less, "loss": less}))
    return TestTable(side="test", queries=4_000, users=36, rows=rows)


def plan() -> Plan:
    return Plan(
        metric="catalogue/recall@10",
        flops=1e10,
        stage1_flops=1e10,
        stage2_flops=0.0,
        optimizer="muon",
        laws="/home/somebody/secret/store/laws.json",
        quantities={
            "params": Quantity(value=4e3, low=2e3, high=9e3, source="this study", how="N*(C) of /home/somebody/laws")
        },
        warnings=("no plan in /home/somebody/secret/store: too little",),
        stage1=recipe(),
    )


def html(card: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(card.split("---\n", 2)[2]))


def test_a_model_card_is_read_by_the_hubs_library(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(run_card(record(), CardFacts(table=results()), name="my model", license_id="mit"))
    card = ModelCard.load(path)
    assert card.data.library_name == "habitus"
    assert card.data.license == "mit"
    assert "sequential-recommendation" in card.data.tags
    assert card.data.model_name == "my model"
    measured = {(one.metric_type, one.dataset_split): one.metric_value for one in card.data.eval_results}
    assert measured == {("recall_at_10", "test"): 0.3, ("ndcg_at_10", "test"): 0.15, ("loss", "test"): 8.0}


def test_without_test_users_the_card_says_so_and_lists_validation(tmp_path: Path) -> None:
    text = run_card(record(), CardFacts())
    (tmp_path / "README.md").write_text(text)
    (one,) = ModelCard.load(tmp_path / "README.md").data.eval_results
    assert (one.metric_type, one.metric_value, one.dataset_split) == ("recall_at_10", 0.25, "validation")
    assert "Not measured on test users" in text
    assert "license" not in text.split("---")[1]
    assert "0.2500 ± 0.0196" in text  # 1.96 · 0.01


def test_a_card_holds_data_sizes_recipe_baselines_plan_limits_and_how_to_load() -> None:
    found = SearchFacts(
        metric="catalogue/ndcg@10", trials=(Trial(name="small-4", value=0.05),), chosen="small-4", seconds=90
    )
    facts = CardFacts(data=facts_of_data("genre"), table=results(), plan=shareable(plan()), search=found)
    text = run_card(record(), facts)
    for part in (
        "104,519 events of 610 users on 9,742 items, 1996-03-29 to 2018-09-24; windows of 32 events",  # the recipe's
        "| genre | item | category | 50% |",
        "4,000: embedder 1,000, contextualizer 3,000; tables of tokens and categories 500",
        "1.5e+09 nominal",
        "learning_rate = 0.003",
        "| **model** | 0.3000 ± 0.0196 | 0.1500 ± 0.0196 | 8.0000 ± 0.0196 |",
        "| popularity | +0.0500 [+0.0200, +0.0800] |",
        "| params | 4000 [2e+03, 9e+03] | this study |",
        "| small-4 | 0.0500 |",
        "Fewer than 100 users on the test side",
        "Passed over its log 2 times",
        "hb.load(",
    ):
        assert part in text, part


def test_a_card_says_which_baselines_beat_the_model_and_which_it_is_not_shown_to_beat() -> None:
    table = results()
    even = {  # better, reaching zero; worse; a loss that is lower for sure
        "recall@10": BaselineDifference(value=0.05, low=-0.01, high=0.11),
        "ndcg@10": BaselineDifference(value=-0.05, low=-0.08, high=-0.02),
        "loss": BaselineDifference(value=-0.5, low=-0.6, high=-0.4),
    }
    rows = (*table.rows, table.rows[1].model_copy(update={"scorer": "item to item", "differences": even}))
    text = run_card(record(), CardFacts(table=table.model_copy(update={"rows": rows})))
    assert "- Not shown to be better than item to item on recall@10." in text
    assert "- Worse than item to item on ndcg@10." in text
    assert "- Worse than popularity on loss." in text  # +0.05 nats


@pytest.mark.parametrize("name", NASTY)
def test_what_users_named_stays_text_on_the_page_and_in_the_yaml(name: str, tmp_path: Path) -> None:
    text = run_card(record(), CardFacts(data=facts_of_data(name)), name=name)
    assert len(text) < 2_000_000
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.license is None
    assert data.model_name == clean(name)
    page = html(text)
    for tag in ("<script", "<img", "<a ", "<em", "<strong>bold", "<del", "<b>", "<i>", "<blockquote", "<code>code"):
        assert tag not in page, tag
    rows = [line for line in text.splitlines() if "| item | category |" in line]
    assert len(rows) == 1 and rows[0].count("|") == 5  # four cells, whatever is in the name
    shown = MarkdownIt("commonmark").parseInline(escape(name))[0].children
    assert shown is not None
    assert "".join(part.content for part in shown).startswith(clean(name)[:79])


def test_front_matter_is_yaml_of_the_same_values() -> None:
    import yaml

    values = {
        "a": "yes",
        "b": 1e-5,
        "c": [True, None, 3, 0.25, "x: y"],
        "d": {"e": [{"f": "no", "g": {"h": 2.0}}, {"f": "'"}]},
        "i": 12345678.0,
    }
    assert yaml.safe_load(front_matter(values).strip("-")) == values


def test_cards_carry_no_path_of_the_machine() -> None:
    failed = record(status="failed", reason="/home/somebody/run/journal.jsonl cannot be written", metrics={})
    texts = [run_card(record(), CardFacts(plan=shareable(plan()))), run_card(failed, CardFacts())]
    for text in texts:
        assert "/home" not in text and "somebody" not in text
    assert "laws.json" in texts[0]
    assert "This run failed after 24 steps: journal" in texts[1]
    assert shareable(plan()).to_json().find("somebody") < 0
    assert hide_paths("see ~/x/y.json, C:\\a\\b and a/b or 3/4") == "see y.json, b and a/b or 3/4"


def test_the_same_facts_give_the_same_bytes() -> None:
    facts = CardFacts(data=facts_of_data("genre"), table=results())
    again = CardFacts.parse(facts.to_values(), "card.json")
    assert run_card(record(), facts) == run_card(Record.parse(record().to_values(), "record"), again)


def test_a_dataset_card_is_read_by_the_hubs_library(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(dataset_card(facts_of_data(*NASTY[:-1]), license_id="cc-by-4.0"))
    data = DatasetCard.load(tmp_path / "README.md").data
    assert (data.license, data.size_categories, data.to_dict()["viewer"]) == ("cc-by-4.0", ["100K<n<1M"], False)
