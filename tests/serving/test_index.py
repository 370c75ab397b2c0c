"""Searches: exact against a sort, approximate against exact, both with run-time items and filters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from habitus.errors import ModelError
from habitus.serving import RecommendRequest, Retriever
from habitus.serving.candidates import HIDDEN
from habitus.serving.index import exact_search
from habitus.softmax.cpu_scan import FEW_QUERIES

Log = dict[int, list[dict[str, Any]]]


@pytest.mark.parametrize("count", [1, 3, FEW_QUERIES, FEW_QUERIES + 1, 40, 300])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_exact_search_is_a_stable_sort(count: int, stored: torch.dtype) -> None:
    random = torch.Generator().manual_seed(count)
    # Small whole numbers: products are exact, so ties are ties whatever computed them.
    table = torch.randint(-3, 4, (5000, 8), generator=random).to(stored)
    queries = torch.randint(-3, 4, (count, 8), generator=random).float()
    pieces = [table[:100], table[100:3333], table[3333:]]
    found = exact_search(queries, pieces, 37)
    scores = queries @ table.float().T
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :37]
    assert torch.equal(found.rows, order)
    assert torch.equal(found.scores, scores.gather(1, order))
    torch.testing.assert_close(found.lse, scores.double().logsumexp(1))


@pytest.mark.parametrize("count", [2, 20])
def test_hidden_rows_are_not_found_and_do_not_count(count: int) -> None:
    random = torch.Generator().manual_seed(0)
    table, queries = torch.randn(3000, 8, generator=random), torch.randn(count, 8, generator=random)
    shown = torch.arange(3000) % 3 == 0
    bias = torch.where(shown, 0.0, HIDDEN)
    found = exact_search(queries, [table], 1200, bias)
    scores = (queries @ table.T).masked_fill(~shown, -torch.inf)
    torch.testing.assert_close(found.lse, scores.double().logsumexp(1))
    assert torch.equal(found.rows[:, :1000], scores.argsort(dim=1, descending=True, stable=True)[:, :1000])
    assert (found.rows[:, 1000:] == -1).all()
    bias[:2048] = HIDDEN  # whole tiles
    assert int(exact_search(queries, [table], 5, bias).rows.min()) >= 2048


def test_scores_of_any_size_have_a_finite_sum() -> None:
    table = torch.cat([torch.full((70_000, 4), 100.0), torch.full((10, 4), 120.0)])
    for count in (1, 30):
        found = exact_search(torch.full((count, 4), 5.0), [table], 3)
        torch.testing.assert_close(found.lse, torch.full((count,), 2400.0 + np.log(10), dtype=torch.float64))
        assert found.rows[0].tolist() == [70_000, 70_001, 70_002]


@pytest.fixture(scope="module", params=["ivf", "ivfpq", "hnsw"])
def approximate(request: pytest.FixtureRequest, trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    run = tmp_path_factory.mktemp(request.param) / "run"
    shutil.copytree(trained_run, run)
    Retriever.open(run, device="cpu", index=request.param)
    (run / "kind").write_text(request.param)
    return run


def opened(run: Path, **options: Any) -> Retriever:
    return Retriever.open(run, device="cpu", index=(run / "kind").read_text(), **options)  # type: ignore[arg-type]


def test_the_recall_that_is_kept_is_what_requests_get(approximate: Path, log: Log) -> None:
    exact, fast = Retriever.open(approximate, device="cpu"), opened(approximate)
    requests = [RecommendRequest(history=log[user]) for user in range(200)]
    truth = [{one.item_id: one for one in answer.items} for answer in exact.recommend(requests)]
    found = [{one.item_id: one for one in answer.items} for answer in fast.recommend(requests)]
    recall = np.mean([len(a.keys() & b.keys()) / 10 for a, b in zip(truth, found, strict=True)])
    info = fast.index_info
    assert info.recall_at_10 > 0.97
    assert recall == pytest.approx(info.recall_at_10, abs=0.02)
    for a, b in zip(truth, found, strict=True):
        for item in a.keys() & b.keys():
            assert b[item].score == pytest.approx(a[item].score, abs=1e-5)
            # Of 300 items all are in the sample, so nothing is left to estimate.
            assert b[item].probability == pytest.approx(a[item].probability, rel=1e-4)
    assert info.log_sum_error_95 < 1e-5


def test_filters_stay_exact_with_an_approximate_index(
    approximate: Path, log: Log, items: list[dict[str, Any]], tmp_path: Path
) -> None:
    exact = Retriever.open(approximate, device="cpu", items=tmp_path / "items")
    for number in range(20):
        exact.put_item(1000 + number, {name: value for name, value in items[number].items() if name != "item_id"})
    for item in (3, 1004, 17):
        exact.delete_item(item)
    fast = opened(approximate, items=exact.store)
    rare = items[0]["brand"]
    requests = [
        RecommendRequest(history=log[1], k=8, allow={"brand": [rare]}),
        RecommendRequest(history=log[2], k=8, allow={"brand": [rare]}, exclude_seen=True),
        RecommendRequest(history=log[3], k=200, deny={"brand": [rare]}),
        RecommendRequest(history=log[4], k=317),
    ]
    for one, other in zip(exact.recommend(requests[:2]), fast.recommend(requests[:2]), strict=True):
        assert [item.item_id for item in one.items] == [item.item_id for item in other.items]
        assert len(one.items) > 0
    for answer, request in zip(fast.recommend(requests[2:]), requests[2:], strict=True):
        assert len(answer.items) == request.k
        found = {one.item_id for one in answer.items}
        assert not found & {3, 1004, 17}
    everything = {one.item_id for one in fast.recommend(requests[3:])[0].items}
    assert everything == {*range(300), *range(1000, 1020)} - {3, 1004, 17}


def test_an_index_is_opened_again_and_refused_when_damaged(approximate: Path, log: Log, tmp_path: Path) -> None:
    import shutil

    told: list[str] = []
    first = opened(approximate, note=told.append)
    assert told == []  # it was there
    run = tmp_path / "run"
    shutil.copytree(approximate, run)
    request = RecommendRequest(history=log[9])
    again = opened(run)
    assert again.recommend([request]) == first.recommend([request])
    assert again.index_info == first.index_info
    file = run / "serve" / f"index-{(run / 'kind').read_text()}" / "index.faiss"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="missing or has changed"):
        opened(run)


def test_auto_takes_exact_search_for_a_small_catalogue(run: Path) -> None:
    assert Retriever.open(run, device="cpu", index="auto").index_info.kind == "exact"
