"""The same queries with more and more of their history: what the last events tell, and what those before them add."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from habitus.data import Dataset, events_after, histories_before, history_reach
from habitus.errors import ConfigError
from habitus.evaluation.evaluation import EvaluateOptions, Evaluation, catalogue_subset, evaluate, query_set
from habitus.evaluation.metrics import means
from habitus.evaluation.paired import query_values
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.scores import Scorer
from habitus.progress import Progress
from habitus.record import Metric
from habitus.store import BEYOND_SLICE, CONTEXT_SLICE, QUERY_SECONDS

_METRICS = ("loss", "recall@10", "recall@100", "ndcg@10", "ndcg@100", "mrr@10")
_CUTOFFS = (10, 100)
_TIMED_QUERIES, _UNTIMED = 12, 2  # one at a time; the first ones warm up


def check_contexts(dataset: Dataset, contexts: Sequence[int], options: EvaluateOptions) -> None:
    """Refuse history lengths that too few users of the side have."""
    reach = history_reach(dataset, options.side)
    if max(contexts) > reach:
        raise ConfigError(
            f"evaluate.contexts holds a history of {max(contexts):,} events",
            expected=f"at most {reach:,}, which 20 {options.side} users of {dataset.path} have before an event"
            if reach
            else f"20 {options.side} users or more in {dataset.path}",
            next_step="leave the longer ones out",
        )


def evaluate_contexts(
    dataset: Dataset,
    scorer: Scorer,
    contexts: Sequence[int],
    options: EvaluateOptions,
    progress: Progress | None = None,
) -> Evaluation:
    """Metrics over the catalogue by how many of the newest events a query sees, all on the same queries.

    Queries have at least the longest of the `contexts` before them. A model sees no more than `dataset.seq_len`
    events, its window, as when it serves: beyond that its values stay the same. Named `.../context=n` is the metric
    with n events, `.../beyond=n` what the longest adds to it, paired by query. The time of one query at a time is
    among the seconds.
    """
    check_contexts(dataset, contexts, options)
    events = events_after(dataset, options.side, max(contexts), options.queries, options.seed)
    window, slots = dataset.seq_len, options.batch_sequences * dataset.seq_len
    by_length: dict[int, PerQuery] = {}
    seconds: dict[str, float] = {}
    evaluation: Evaluation | None = None
    for context in sorted(contexts):
        length = min(context, window)
        if length not in by_length:
            view = histories_before(dataset, options.side, events, length)
            chosen = EvaluateOptions(
                regimes=("catalogue",),
                queries=len(events),
                batch_sequences=max(1, slots // (length + 1)),
                catalogue_items=options.catalogue_items,
                cutoffs=_CUTOFFS,
                histories=(),
                metrics=("loss", "ranking"),
                seed=options.seed,
                side=options.side,
            )

            def keep(_regime: str, values: PerQuery, length: int = length) -> None:
                by_length[length] = values

            evaluation = evaluate(view, scorer, chosen, progress=progress, keep=keep)
            seconds[f"{QUERY_SECONDS}/{CONTEXT_SLICE}{context}"] = _seconds_of_one(view, scorer, chosen)
    assert evaluation is not None
    values = {context: by_length[min(context, window)] for context in contexts}
    return evaluation.model_copy(update={"metrics": _metrics(values), "seconds": seconds})


def _metrics(values: dict[int, PerQuery]) -> dict[str, Metric]:
    """Every metric at every length, and how much the longest adds to each shorter one."""
    longest = max(values)
    full = np.stack([query_values(values[longest], name) for name in _METRICS])
    metrics = {}
    for context, queries in values.items():
        matrix = np.stack([query_values(queries, name) for name in _METRICS])
        for slice_name, rows in ((CONTEXT_SLICE, matrix), (BEYOND_SLICE, full - matrix)):
            if slice_name == BEYOND_SLICE and context == longest:
                continue
            for name, (value, se, n) in zip(_METRICS, means(rows, queries.user), strict=True):
                metrics[f"catalogue/{name}/{slice_name}{context}"] = Metric(value=value, se=se, n=n)
    return metrics


def _seconds_of_one(view: Dataset, scorer: Scorer, options: EvaluateOptions) -> float:
    """The median time in which one query is answered by itself: ten items of the catalogue, no loss."""
    queries = query_set(view, replace(options, queries=_TIMED_QUERIES, batch_sequences=1))
    candidates = catalogue_subset(view, query_set(view, options), options)
    took = []
    for batch in queries:
        began = time.perf_counter()
        scorer.score(batch, candidates, 10, losses=False)
        took.append(time.perf_counter() - began)
    return median(took[_UNTIMED:] or took)
