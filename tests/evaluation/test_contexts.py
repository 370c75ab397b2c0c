"""The same queries with more and more of their history."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from habitus.data import Dataset, events_after, histories_before, history_reach
from habitus.errors import ConfigError
from habitus.evaluation import EvaluateOptions, ModelScorer, evaluate_contexts
from habitus.evaluation.queries import QuerySet
from habitus.model import EmbeddingCache, build_cache, load_bundle

OPTIONS = EvaluateOptions(regimes=("catalogue",), queries=120, batch_sequences=4)


def test_a_window_holds_the_events_before_its_target_and_no_more(dataset: Dataset) -> None:
    events = events_after(dataset, "validation", history=12, count=40)
    assert len(np.unique(events)) == 40
    for length in (1, 3, 12, dataset.manifest.seq_len - 1):
        chosen = events if length <= 12 else events_after(dataset, "validation", length, 40)
        view = histories_before(dataset, "validation", chosen, length)
        assert view.counts("validation").windows == view.counts("validation").queries == len(chosen)
        for number, batch in enumerate(QuerySet(view, len(chosen), 7, seed=0)):
            for query in range(len(batch.targets)):
                row = batch.events[query] + 1  # of the target
                assert row in chosen and batch.targets[query] == dataset.items[row]
                np.testing.assert_array_equal(batch.visible(query), dataset.items[row - length : row])
                user = batch.users[query]
                assert dataset.user_offsets[user] <= row - length and row < dataset.user_offsets[user + 1]
            assert number < 6


def test_reach_is_the_longest_history_of_the_twentieth_user(dataset: Dataset) -> None:
    begins, ends = dataset.user_parts.part("validation")
    longest = sorted((ends - 1)[ends > begins], reverse=True)
    assert history_reach(dataset) == longest[19]
    assert history_reach(dataset, users=1) == longest[0]
    assert history_reach(dataset, users=10**6) == 0
    assert len(events_after(dataset, "validation", int(longest[0]) + 1, 10)) == 0


def test_metrics_by_context_are_of_the_same_queries(
    dataset: Dataset, make_run: Callable[[int], Path], tmp_path: Path
) -> None:
    bundle = load_bundle(make_run(60))
    build_cache(bundle, dataset, tmp_path / "cache")
    cache = EmbeddingCache.open(tmp_path / "cache", bundle, dataset)
    reach = history_reach(dataset)
    assert reach > dataset.seq_len  # so that windows end before histories do
    contexts = (1, 4, dataset.seq_len, reach)
    evaluation = evaluate_contexts(dataset, ModelScorer(bundle, dataset, cache), contexts, OPTIONS)
    metrics = evaluation.metrics
    counts = {metric.n for metric in metrics.values()}
    assert len(counts) == 1 and counts.pop() <= 120
    for name in ("loss", "recall@10"):
        values = {context: metrics[f"catalogue/{name}/context={context}"].value for context in contexts}
        assert values[dataset.seq_len] == values[reach]  # what does not fit the window is not read
        for context in contexts[:-1]:
            beyond = metrics[f"catalogue/{name}/beyond={context}"]
            assert beyond.value == pytest.approx(values[reach] - values[context])
    assert metrics[f"catalogue/loss/beyond={dataset.seq_len}"].se == 0
    spread = metrics["catalogue/loss/beyond=4"].se
    assert spread is not None and 0 < spread < (metrics["catalogue/loss/context=4"].se or 0)  # paired
    assert f"catalogue/loss/beyond={reach}" not in metrics
    assert all(evaluation.seconds[f"query_seconds/context={context}"] > 0 for context in contexts[:-1])


def test_contexts_that_hardly_any_history_has_are_refused(dataset: Dataset, make_run: Callable[[int], Path]) -> None:
    scorer = ModelScorer(load_bundle(make_run(60)), dataset)
    with pytest.raises(ConfigError, match=r"a history of 5,000 events[\s\S]*which 20 validation users"):
        evaluate_contexts(dataset, scorer, (3, 5000), OPTIONS)
