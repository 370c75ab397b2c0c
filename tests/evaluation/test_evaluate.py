import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset
from habitus.errors import ConfigError, DataError, ModelError
from habitus.evaluation.baselines import OracleScorer, Popularity, baselines
from habitus.evaluation.candidates import Candidates, candidate_scores
from habitus.evaluation.evaluation import EvaluateOptions, catalogue_subset, evaluate
from habitus.evaluation.metrics import means, ndcg, recall
from habitus.evaluation.model_scorer import ModelScorer
from habitus.evaluation.per_query import PerQuery, PerQueryFile
from habitus.evaluation.queries import QuerySet
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.sparse_scores import SparseScorer
from habitus.events.world import World
from habitus.model.bundle import bundle_in_memory, load_bundle, save_bundle
from habitus.model.cache import build_cache

OPTIONS = EvaluateOptions(queries=1500, batch_sequences=8, histories=(3, 5, 10, 20))


def scorer_of(run: Path, dataset: Dataset, **options: object) -> ModelScorer:
    bundle = load_bundle(run)
    cache = build_cache(bundle, dataset, run / "catalogue", shard_rows=70)
    return ModelScorer(bundle, dataset, cache, **options)  # type: ignore[arg-type]


def values_of(dataset: Dataset, scorer, options: EvaluateOptions = OPTIONS):  # type: ignore[no-untyped-def]
    per_query: dict[str, PerQuery] = {}
    result = evaluate(dataset, scorer, options, keep=per_query.__setitem__)
    return result, per_query


def test_every_query_is_scored_as_float64_logits_say(dataset: Dataset, make_run) -> None:  # type: ignore[no-untyped-def]
    run = make_run(60)
    scorer = scorer_of(run, dataset)
    result, per_query = values_of(dataset, scorer)
    vectors = torch.cat(scorer.cache.shards).double()  # type: ignore[union-attr]
    place = 0
    for batch in QuerySet(dataset, OPTIONS.queries, OPTIONS.batch_sequences, OPTIONS.seed):
        queries = scorer.query_vectors(batch).double()
        for regime, pool in (("batch", batch.pool), ("catalogue", np.arange(dataset.num_items))):
            logits = queries @ vectors[torch.from_numpy(pool)].T
            wanted = torch.from_numpy(np.searchsorted(pool, batch.targets))
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="none").numpy()
            log_p = logits.log_softmax(1)
            rows = slice(place, place + len(wanted))
            np.testing.assert_allclose(per_query[regime].loss[rows], loss, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(
                per_query[regime].entropy[rows], -(log_p.exp() * log_p).sum(1), rtol=1e-4, atol=1e-4
            )
            ranks = (logits >= logits.gather(1, wanted[:, None])).sum(1).numpy()
            assert (per_query[regime].rank[rows] == ranks).mean() > 0.999
        place += len(batch.targets)
    assert result.metrics["batch/loss"].n == OPTIONS.queries == place
    for name, values in per_query.items():
        assert result.metrics[f"{name}/recall@10"].value == pytest.approx(recall(values.rank, 10).mean())
        assert result.metrics[f"{name}/ndcg@10"].se == pytest.approx(
            means(ndcg(values.rank, 10)[None], values.user)[0].se
        )


def test_slices_are_exactly_the_queries_they_name(dataset: Dataset, tmp_path: Path) -> None:
    result, per_query = values_of(dataset, Popularity(dataset))
    values = per_query["catalogue"]
    with PerQueryFile(tmp_path / "queries.parquet") as file:
        file.add("popularity", "catalogue", values)
    table = pq.read_table(tmp_path / "queries.parquet").to_pydict()
    offsets = dataset.user_offsets
    for history in OPTIONS.histories:
        ranks = [r for r, h in zip(table["rank"], table["history"], strict=True) if h == history]
        metric = result.metrics[f"catalogue/recall@10/history={history}"]
        assert metric.n == len(ranks) > 0
        assert metric.value == pytest.approx(np.mean([r <= 10 for r in ranks]))
    repeats = 0
    for event, user, history, target, repeat, cold in zip(
        *(table[name] for name in ("event", "user", "history", "target", "repeat", "cold")), strict=True
    ):
        assert offsets[user] <= event < offsets[user + 1] - 1
        assert dataset.items[event + 1] == target
        assert repeat == (target in dataset.items[event + 1 - history : event + 1])
        assert cold == (dataset.item_train_counts[target] == 0)
        repeats += repeat
    assert result.metrics["catalogue/loss/repeat"].n == repeats > 0
    assert result.metrics["catalogue/loss/first"].n == len(table["rank"]) - repeats


def test_numbers_do_not_depend_on_how_they_were_computed(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = make_run(60)
    bundle = load_bundle(run)
    _, reference = values_of(dataset, scorer_of(run, dataset))
    one_shard = build_cache(bundle, dataset, tmp_path / "other")
    variants = [
        ModelScorer(bundle, dataset, one_shard),
        ModelScorer(bundle, dataset, one_shard, memory_bytes=1 << 20),
        ModelScorer(bundle, dataset, one_shard, memory_bytes=1 << 14),
    ]
    for scorer in variants:
        _, other = values_of(dataset, scorer)
        for regime, values in reference.items():
            assert np.array_equal(values.rank, other[regime].rank)
            np.testing.assert_allclose(values.loss, other[regime].loss, rtol=1e-6, atol=1e-6)
            assert np.array_equal(values.top, other[regime].top)
    _, without = values_of(dataset, ModelScorer(bundle, dataset), replace(OPTIONS, regimes=("batch",)))
    assert (without["batch"].rank == reference["batch"].rank).mean() > 0.99
    np.testing.assert_allclose(without["batch"].loss, reference["batch"].loss, atol=1e-2)


def test_a_model_in_memory_scores_as_its_bundle_does(dataset: Dataset, recipe_of, train, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recipe = recipe_of(3)
    model = train(dataset, recipe)
    live = bundle_in_memory(model, recipe, dataset, tmp_path / "bundle")
    options = replace(OPTIONS, queries=300, regimes=("batch",))
    before = evaluate(dataset, ModelScorer(live, dataset), options)
    save_bundle(model, recipe, dataset, tmp_path / "bundle")
    saved = load_bundle(tmp_path)
    after = evaluate(dataset, ModelScorer(saved, dataset), options)
    assert (before.scorer, before.metrics) == (after.scorer, after.metrics)
    assert saved.embedder_checksum == live.embedder_checksum


def test_shuffling_the_catalogue_changes_nothing(dataset: Dataset, make_run) -> None:  # type: ignore[no-untyped-def]
    scorer = scorer_of(make_run(60), dataset)
    assert scorer.cache is not None
    table = torch.cat([shard.float() for shard in scorer.cache.shards])
    order = np.random.default_rng(0).permutation(dataset.num_items)
    shuffled = Candidates([table[torch.from_numpy(order)]], 0, dataset.num_items)
    for batch in QuerySet(dataset, 300, 8, 0):
        plain = scorer.score(batch, None, 10)
        rows = table[torch.from_numpy(batch.targets)]
        other = candidate_scores(scorer.query_vectors(batch), shuffled, rows, 10, ranks=Ranks())
        assert np.array_equal(plain.rank, other.rank)
        np.testing.assert_allclose(plain.loss, other.loss, atol=1e-6)
        np.testing.assert_allclose(plain.entropy, other.entropy, atol=1e-6)
        assert np.array_equal(np.sort(plain.top, axis=1), np.sort(order[other.top], axis=1))


def test_an_untrained_model_is_nearly_uniform(dataset: Dataset, make_run) -> None:  # type: ignore[no-untyped-def]
    result, per_query = values_of(dataset, scorer_of(make_run(1), dataset))
    pool = per_query["batch"].candidates
    # A query starts near the event that it follows, which in this world is worth some 0.2 nats.
    assert result.metrics["catalogue/loss"].value == pytest.approx(math.log(dataset.num_items) - 0.2, abs=0.15)
    assert result.metrics["batch/loss"].value == pytest.approx(np.log(pool).mean() - 0.2, abs=0.15)
    recall_at_10 = result.metrics["catalogue/recall@10"]
    assert recall_at_10.se is not None
    # An embedder at its start is not blind, so this is a band and not a test of chance.
    assert 0.2 * 10 / dataset.num_items < recall_at_10.value < 10 * 10 / dataset.num_items
    chance = (10 / pool).mean()
    assert 0.3 * chance < result.metrics["batch/recall@10"].value < 6 * chance


def test_a_blind_scorer_is_exactly_uniform_and_always_last(dataset: Dataset) -> None:
    blind = SparseScorer(np.ones(dataset.num_items))
    blind.name = "blind"
    result, per_query = values_of(dataset, blind)
    assert result.metrics["catalogue/loss"].value == pytest.approx(math.log(dataset.num_items))
    assert result.metrics["catalogue/entropy"].value == pytest.approx(math.log(dataset.num_items))
    assert result.metrics["catalogue/recall@100"].value == 0
    assert np.array_equal(per_query["batch"].rank, per_query["batch"].candidates)
    assert result.metrics["batch/recall@10"].value == 0
    assert result.metrics["batch/loss"].value == pytest.approx(np.log(per_query["batch"].candidates).mean())


def test_no_baseline_and_no_model_beats_the_oracle(dataset: Dataset, world: World, make_run) -> None:  # type: ignore[no-untyped-def]
    oracle, _ = values_of(dataset, OracleScorer(dataset), replace(OPTIONS, queries=4000))
    best = oracle.metrics["catalogue/loss"]
    for scorer in [*baselines(dataset)[:-1], scorer_of(make_run(60), dataset)]:
        result, _ = values_of(dataset, scorer, replace(OPTIONS, queries=4000))
        loss, recalled = result.metrics["catalogue/loss"], result.metrics["catalogue/recall@10"]
        assert loss.value > best.value
        assert recalled.value < oracle.metrics["catalogue/recall@10"].value + 2 * (recalled.se or 0)
    # The oracle's loss is the entropy of its conditional, up to sampling, and that is the world's floor.
    gap = best.value - oracle.metrics["catalogue/entropy"].value
    assert abs(gap) < 3 * (best.se or 0)
    floor = world.entropy_floor(world.sample(2000))
    assert abs(best.value - floor.value) < 4 * math.hypot(best.se or 0, floor.se)


def test_the_oracle_wins_query_by_query_and_its_loss_is_its_entropy(dataset: Dataset, make_run) -> None:  # type: ignore[no-untyped-def]
    options = replace(OPTIONS, queries=4000, regimes=("catalogue",))
    _, per_query = values_of(dataset, OracleScorer(dataset), options)
    oracle = per_query["catalogue"]
    assert oracle.loss is not None
    assert oracle.entropy is not None
    (surprise,) = means(
        (oracle.loss - oracle.entropy)[None], oracle.user
    )  # paired, so the spread of the histories drops out
    assert abs(surprise.value) < 3 * (surprise.se or 0)
    for scorer in [*baselines(dataset)[:-1], scorer_of(make_run(60), dataset)]:
        _, other = values_of(dataset, scorer, options)
        assert np.array_equal(other["catalogue"].event, oracle.event)
        (worse,) = means((other["catalogue"].loss - oracle.loss)[None], oracle.user)  # type: ignore[operator]
        assert worse.value > 2 * (worse.se or 0)


def test_training_helps(dataset: Dataset, make_run) -> None:  # type: ignore[no-untyped-def]
    before, _ = values_of(dataset, scorer_of(make_run(1), dataset))
    after, _ = values_of(dataset, scorer_of(make_run(60), dataset))
    assert after.metrics["batch/loss"].value < before.metrics["batch/loss"].value - 0.1
    assert after.metrics["batch/recall@10"].value > before.metrics["batch/recall@10"].value


def test_the_query_set_is_fixed_and_named(dataset: Dataset) -> None:
    one, two = (QuerySet(dataset, 500, 8, 3) for _ in range(2))
    assert one.checksum() == two.checksum()
    assert QuerySet(dataset, 500, 8, 4).checksum() != one.checksum()
    assert QuerySet(dataset, 501, 8, 3).checksum() != one.checksum()
    events = np.concatenate([batch.events for batch in one])
    assert len(np.unique(events)) == len(events) == 500
    every = QuerySet(dataset, 10**9, 8, 3)
    assert sum(len(batch.targets) for batch in every) == dataset.counts("validation").queries == every.num_queries


def test_few_queries_per_user_are_drawn_from_all_of_theirs_and_give_smaller_errors(dataset: Dataset) -> None:
    def asked(batch_sequences: int, seed: int, per_user: int | None) -> dict[int, int]:
        """First visible event by last visible event: the first names the user's part of the window."""
        batches = list(QuerySet(dataset, 10**9, batch_sequences, seed, per_user))
        last = np.concatenate([batch.events for batch in batches])
        first = last + 1 - np.concatenate([batch.histories for batch in batches])
        return dict(zip(last.tolist(), first.tolist(), strict=True))

    whole, few = asked(8, 3, None), asked(8, 3, 2)
    assert few.items() <= whole.items()
    available = Counter(whole.values())
    assert Counter(few.values()) == {part: min(2, count) for part, count in available.items()}
    assert max(available.values()) > 10
    assert few == asked(5, 3, 2)  # which ones does not depend on the batches
    assert few != asked(8, 4, 2)
    assert len({last - first for last, first in few.items()}) > 10  # not only a user's first or last queries
    limited, plain = QuerySet(dataset, 400, 8, 3, 2), QuerySet(dataset, 400, 8, 3)
    assert limited.num_queries == plain.num_queries == sum(len(batch.targets) for batch in limited) == 400
    assert limited.checksum() != plain.checksum()
    errors = []
    for per_user in (2, None):
        result = evaluate(dataset, Popularity(dataset), replace(OPTIONS, queries=400, per_user=per_user))
        errors.append(result.metrics["catalogue/loss"].se)
    assert errors[0] < 0.8 * errors[1]
    with pytest.raises(ConfigError, match="0 queries per user"):
        evaluate(dataset, Popularity(dataset), replace(OPTIONS, per_user=0))


def test_a_subset_of_the_catalogue_is_fixed_and_holds_every_target(dataset: Dataset) -> None:
    queries = QuerySet(dataset, 200, 8, 0)
    options = replace(OPTIONS, queries=200, catalogue_items=280)
    subset = catalogue_subset(dataset, queries, options)
    assert subset is not None
    assert len(subset) == 280
    assert np.isin(queries.targets(), subset).all()
    assert np.array_equal(subset, catalogue_subset(dataset, queries, options))
    result, per_query = values_of(dataset, Popularity(dataset), options)
    assert result.specification["catalogue"].candidates == 280
    assert np.isin(per_query["catalogue"].top, subset).all()
    with pytest.raises(ConfigError, match="catalogue_items is 3"):
        catalogue_subset(dataset, queries, replace(options, catalogue_items=3))


def test_excluding_the_history_ranks_among_unseen_items_only(dataset: Dataset) -> None:
    scorer = Popularity(dataset)
    result, per_query = values_of(dataset, scorer, replace(OPTIONS, exclude_history=True, regimes=("catalogue",)))
    assert "catalogue/loss" not in result.metrics
    values = per_query["catalogue"]
    place = 0
    for batch in QuerySet(dataset, OPTIONS.queries, OPTIONS.batch_sequences, OPTIONS.seed):
        for query in range(len(batch.targets)):
            seen = set(batch.visible(query).tolist())
            if batch.targets[query] in seen:
                continue
            unseen = [item for item in range(dataset.num_items) if item not in seen]
            wanted = scorer.background[batch.targets[query]]
            rank = sum(scorer.background[item] >= wanted for item in unseen)
            if rank <= 100:
                assert values.rank[place] == rank
            assert not seen & set(values.top[place].tolist())
            place += 1
    assert place == len(values.rank)


def test_bad_input(dataset: Dataset, make_run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="k = 0"):
        evaluate(dataset, Popularity(dataset), replace(OPTIONS, cutoffs=(0, 10)))
    with pytest.raises(ConfigError, match=r"history length of 32(.|\n)*--seq-len"):
        evaluate(dataset, Popularity(dataset), replace(OPTIONS, histories=(32,)))
    with pytest.raises(ConfigError, match="no cut-offs"):
        evaluate(dataset, Popularity(dataset), replace(OPTIONS, cutoffs=()))
    with pytest.raises(ConfigError, match="regimes"):
        evaluate(dataset, Popularity(dataset), replace(OPTIONS, regimes=("train",)))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"without its vectors(.|\n)*habitus embed"):
        evaluate(dataset, ModelScorer(load_bundle(make_run(1)), dataset), OPTIONS)


def test_an_empty_validation_split_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    from habitus.data.from_world import prepare_world
    from habitus.data.prepare import PrepareOptions
    from habitus.events.world import WorldConfig
    from habitus.events.world.writing import WORLD_SCHEMA

    tiny = World(WorldConfig(num_users=3, num_items=20, events_per_user=6, seed=1))
    for seed in range(20):
        prepare_world(
            tiny,
            WORLD_SCHEMA,
            tmp_path / str(seed),
            PrepareOptions(seed=seed, test_share=0, threads=1),
            lambda *_: None,
        )
        small = Dataset.open(tmp_path / str(seed))
        if small.counts("validation").windows == 0:
            with pytest.raises(DataError, match="no validation windows"):
                evaluate(small, Popularity(small), OPTIONS)
            return
    pytest.fail("no seed gave an empty validation split")
