"""Copying: which events a query may copy from, with which scores, and what that does to the loss."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.copying import MASKED_COPY_SCORE as MASKED
from habitus.model.copying import Copying, CopyMass, copy_mass, copying_loss
from habitus.recipe import ModelRecipe
from habitus.softmax import candidate_softmax, extras_softmax

Shake = Callable[[torch.nn.Module], torch.nn.Module]


def contextualize(
    samples: SimpleNamespace, shaken: Shake, items: np.ndarray | None = None
) -> tuple[BehaviorModel, torch.Tensor]:
    """A model with shaken weights and its copy scores of a batch, whose items may be replaced."""
    recipe = ModelRecipe(joint_dim=16, text_len=12, text_depth=1, width=32, depth=2, head_dim=16, copying=True)
    model = BehaviorModel(samples.fields, recipe, seed=1)
    shaken(model)
    batch = samples.batch(samples.fields, 3, 20, 9, seed=5)
    tensors = batch_tensors(batch)
    vectors = model.embed_items(item_tensors(samples.items(samples.fields, 9), recipe))
    output = model.contextualize(tensors, vectors[tensors.items if items is None else torch.from_numpy(items)])
    assert output.copy_scores is not None
    return model, output.copy_scores


def test_a_query_copies_from_its_own_users_past_and_nothing_else(samples: SimpleNamespace, shaken: Shake) -> None:
    _, scores = contextualize(samples, shaken)
    segments = samples.batch(samples.fields, 3, 20, 9, seed=5).segments
    for window in range(3):
        for query in range(20):
            for event in range(20):
                visible = event <= query and segments[window, event] == segments[window, query]
                assert (scores[window, query, event] > MASKED / 2) == visible


def test_later_events_change_no_earlier_copy_score(samples: SimpleNamespace, shaken: Shake) -> None:
    items = samples.batch(samples.fields, 3, 20, 9, seed=5).items
    changed = items.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 9
    _, before = contextualize(samples, shaken)
    _, after = contextualize(samples, shaken, changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=0)
    assert (before[:, 12:] - after[:, 12:]).abs().max() > 1e-3


def test_a_fresh_model_gives_every_event_the_weight_of_a_candidate_that_scores_nothing(
    samples: SimpleNamespace,
) -> None:
    recipe = ModelRecipe(joint_dim=16, text_len=12, text_depth=1, width=32, depth=2, head_dim=16, copying=True)
    _, scores = contextualize(samples, lambda model: model)
    assert set(scores.unique().tolist()) == {0.0, MASKED}
    assert BehaviorModel(samples.fields, recipe).contextualizer.copying is not None
    assert BehaviorModel(samples.fields, recipe.model_copy(update={"copying": False})).contextualizer.copying is None


def test_the_lag_is_read_off_a_line_between_knots() -> None:
    copying = Copying(8)
    with torch.no_grad():
        for parameter in copying.parameters():
            parameter.zero_()
        copying.lags.copy_(torch.arange(len(copying.lags)) ** 2)
    hidden = torch.ones(40, 8)
    scores = copying(copying.project(hidden), torch.zeros(1, 40, dtype=torch.int32))[0]
    for query, event in [(0, 0), (1, 0), (3, 0), (39, 39), (39, 0), (20, 7)]:
        place = 1.5 * math.log2(1 + query - event)
        low = math.floor(place)
        expected = low**2 + (place - low) * ((low + 1) ** 2 - low**2)
        assert scores[query, event].item() == pytest.approx(expected, abs=1e-4)


def test_the_loss_by_hand() -> None:
    """Two candidates score 0 and log 2; the target, the second, is also copied twice from the past, 1 + 4 = 5."""
    copy_scores = torch.tensor(
        [
            [
                [0.0, MASKED, MASKED],
                [math.log(4), 0.0, MASKED],
                [0.0, math.log(3), math.log(4)],
            ]
        ]
    )
    items, targets = torch.tensor([[1, 0, 1]]), torch.tensor([[0, 0, 1]])
    mass = copy_mass(copy_scores, items, targets)
    assert mass.total[0].exp().tolist() == pytest.approx([1, 5, 8])
    assert mass.target[0, 1:].exp().tolist() == pytest.approx([1, 5])
    assert mass.target[0, 0] < -1e3  # never met
    plain = math.log(3 / 2)
    loss = copying_loss(torch.tensor(plain), torch.tensor(math.log(2)), None, CopyMass(*(part[0, 2] for part in mass)))
    assert loss.item() == pytest.approx(math.log((1 + 2 + 8) / (2 + 5)))


@pytest.mark.parametrize("log_q", [False, True])
@pytest.mark.parametrize("form", ["candidates", "extras"])
def test_losses_and_gradients_are_those_of_scores_written_out(log_q: bool, form: str) -> None:
    random = torch.Generator().manual_seed(3)
    M, V, d = 12, 30, 8
    queries, table = (torch.randn(n, d, generator=random, dtype=torch.float64) for n in (M, V))
    items, targets = torch.randint(0, 10, (1, M), generator=random), torch.randint(0, 12, (1, M), generator=random)
    copy_scores = torch.randn(1, M, M, generator=random, dtype=torch.float64) * 2
    copy_scores = torch.where(torch.ones(M, M, dtype=torch.bool).tril(), copy_scores, MASKED)
    q = torch.rand(V, generator=random, dtype=torch.float64).log() if log_q else None
    leaves = [part.clone().requires_grad_() for part in (queries, table, copy_scores)]

    def written_out(h: torch.Tensor, e: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        plain = h @ e.T
        corrected = plain if q is None else plain - q
        added = a[0].exp().tril() @ torch.nn.functional.one_hot(items[0], V).double()
        target = targets[0][:, None]
        pool = corrected.exp().sum(1)
        if form == "extras":  # items 10 and above, and the target; the past counts whether or not it is among them
            own = (targets[0] < 10) * corrected.gather(1, target)[:, 0].exp()
            pool = corrected[:, 10:].exp().sum(1) + own
        wanted = (plain.exp() + added).gather(1, target)[:, 0]
        level = 0 if q is None else q[targets[0]]
        return (pool + added.sum(1)).log() - wanted.log() + level

    expected = written_out(*leaves)
    weights = torch.rand(M, generator=random, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    h, e, a = leaves
    if form == "candidates":
        result = candidate_softmax(h, e, targets[0], log_q=q)
    else:
        among = targets[0] >= 10
        extra_q, own_q = (None, None) if q is None else (q[10:], q[targets[0]])
        result = extras_softmax(h, e[10:], e[targets[0]], among, log_q=extra_q, target_log_q=own_q)
    mass = copy_mass(a, items, targets)
    loss = copying_loss(result.loss, result.score, result.log_q, CopyMass(*(part[0] for part in mass)))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for got, truth in zip(torch.autograd.grad((loss * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)
