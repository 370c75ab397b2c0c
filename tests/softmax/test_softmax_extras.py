"""The softmax over extras and the query's own target alone, against float64 scores in plain sight."""

import math

import pytest
import torch

from habitus.errors import ModelError
from habitus.softmax import Latch, attention, extras_softmax, sample_negatives, targets_among

BACKENDS = ["cpu", "chunked"]


def draw(M=40, items=60, K=25, d=12, *, dtype=torch.float32, seed=0):
    """Queries, a catalogue, distinct extras of it and targets: some of them extras, some shared, some neither."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(M, d, generator=generator).to(dtype).requires_grad_()
    table = torch.randn(items, d, generator=generator).to(dtype)
    drawn = sample_negatives(items, K, generator)
    targets = torch.randint(items, (M,), generator=generator)
    assert 0 < targets_among(targets, drawn).sum() < M
    return h, table, drawn, targets


def slow(h, table, drawn, targets, *, log_q=None, weights=None):
    """Loss, entropy and gradients per query from a list of its candidates: the extras but its target, then that."""
    h = h.detach().double().requires_grad_()
    table = table.detach().double().requires_grad_()
    losses, entropies = [], []
    for query, target in zip(h, targets.tolist(), strict=True):
        ids = [item for item in drawn.tolist() if item != target] + [target]
        z = table[ids] @ query
        z = z if log_q is None else z - log_q[ids].double()
        log_p = z.log_softmax(0)
        losses.append(-log_p[-1])
        entropies.append(-(log_p.exp() * log_p).sum())
    loss = torch.stack(losses)
    to_h, to_table = torch.autograd.grad((loss * (1 if weights is None else weights.double())).sum(), (h, table))
    return loss.detach(), torch.stack(entropies).detach(), to_h, to_table


def relative(result, truth):
    return ((result.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_log_q", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_entropy_and_all_gradients_agree_with_float64(backend, with_log_q, dtype):
    h, table, drawn, targets = draw(dtype=dtype)
    table.requires_grad_()
    weights = torch.rand(len(h))
    log_q = torch.randn(len(table)) - 6 if with_log_q else None
    loss, entropy, *_ = extras_softmax(
        h,
        table[drawn],
        table[targets],
        targets_among(targets, drawn),
        log_q=None if log_q is None else log_q[drawn],
        target_log_q=None if log_q is None else log_q[targets],
        entropy=True,
        backend=backend,
    )
    (loss * weights).sum().backward()
    truth = slow(h, table, drawn, targets, log_q=log_q, weights=weights)
    bound = 1e-5 if dtype == torch.float32 or with_log_q else 1e-13  # log_q is float32
    for result, wanted in zip((loss.detach(), entropy, h.grad, table.grad), truth, strict=True):
        assert relative(result, wanted) < bound


def test_one_extra_and_one_target_by_hand():
    # The extra scores ln 3 and the target 0: p = (3/4, 1/4). The second query's target is the extra: it is certain.
    extra, row = torch.tensor([[math.log(3)]]), torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    h = torch.ones(2, 1, requires_grad=True)
    loss, entropy, *_ = extras_softmax(h, extra, row, torch.tensor([False, True]), entropy=True)
    assert torch.allclose(loss, torch.tensor([math.log(4), 0.0]))
    assert torch.allclose(entropy, torch.tensor([math.log(4) - 0.75 * math.log(3), 0.0]), atol=1e-6)
    loss.sum().backward()
    assert torch.allclose(h.grad, torch.tensor([[0.75 * math.log(3)], [0.0]]))
    # The extra's own pull at the second query arrives through `extra`, which is frozen here.
    assert torch.allclose(row.grad, torch.tensor([[-0.75], [-1.0]]))


def test_a_drawn_target_is_counted_once_and_stays_a_negative_of_the_others():
    h, table, _, _ = draw()
    drawn, targets = torch.tensor([3, 5]), torch.tensor([3, 9])
    loss = extras_softmax(h[:2], table[drawn], table[targets], targets_among(targets, drawn)).loss
    z = h[:2] @ table.T
    assert torch.allclose(loss[0], z[0, [3, 5]].logsumexp(0) - z[0, 3], atol=1e-6)
    assert torch.allclose(loss[1], z[1, [3, 5, 9]].logsumexp(0) - z[1, 9], atol=1e-6)


@pytest.mark.parametrize("lead", [-200.0, -30.0, 30.0, 200.0])
def test_certain_and_hopeless_targets_keep_their_digits(lead):
    h = torch.ones(1, 1, dtype=torch.float32, requires_grad=True)
    loss, entropy, *_ = extras_softmax(
        h, torch.tensor([[lead]]), torch.zeros(1, 1), torch.tensor([False]), entropy=True, backend="chunked"
    )
    expected = lead + math.log1p(math.exp(-lead)) if lead > 0 else math.log1p(math.exp(lead))
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-38)
    p = math.exp(-expected)
    other = 1 / (1 + math.exp(-lead))
    uncertainty = p * expected + other * math.log1p(math.exp(-lead))
    assert entropy.item() == pytest.approx(uncertainty, rel=1e-4, abs=1e-38)
    loss.backward()
    assert h.grad.item() == pytest.approx(other * lead, rel=1e-5, abs=1e-35)


@pytest.mark.parametrize("num_valid", [17, torch.tensor(17)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_num_valid_do_not_count(num_valid, backend):
    h, table, drawn, targets = draw()
    among = targets_among(targets, drawn[:17])
    loss = extras_softmax(h, table[drawn], table[targets], among, num_valid=num_valid, backend=backend).loss
    loss.sum().backward()
    truth = slow(h, table, drawn[:17], targets)
    assert relative(loss.detach(), truth[0]) < 1e-5
    assert relative(h.grad, truth[2]) < 1e-5


def test_many_shards_change_rounding_only(monkeypatch):
    h, table, drawn, targets = draw(items=400, K=300)
    monkeypatch.setattr(attention, "shard_rows", lambda *_: 64)
    loss, entropy, *_ = extras_softmax(h, table[drawn], table[targets], targets_among(targets, drawn), entropy=True)
    loss.sum().backward()
    truth = slow(h, table, drawn, targets)
    for result, wanted in zip((loss.detach(), entropy, h.grad), truth[:3], strict=True):
        assert relative(result, wanted) < 1e-5


def test_bfloat16_is_rounded_only_at_the_end():
    h, table, drawn, targets = draw(200, 1000, 500, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        h.mul_(0.2)
    loss, entropy, *_ = extras_softmax(h, table[drawn], table[targets], targets_among(targets, drawn), entropy=True)
    loss.sum().backward()
    truth = slow(h, table, drawn, targets)
    assert loss.dtype == entropy.dtype == torch.float32 and h.grad.dtype == torch.bfloat16
    assert relative(loss.detach(), truth[0]) < 1e-5
    assert relative(entropy, truth[1]) < 1e-5
    assert relative(h.grad, truth[2]) < 2e-3


def test_zero_weight_queries_change_nothing_and_no_queries_have_no_losses():
    h, table, drawn, targets = draw()
    among = targets_among(targets, drawn)
    weights = (torch.arange(len(h)) < 30).float()
    (extras_softmax(h, table[drawn], table[targets], among).loss * weights).sum().backward()
    truth = slow(h[:30], table, drawn, targets[:30])
    assert relative(h.grad[:30], truth[2]) < 1e-5
    assert (h.grad[30:] == 0).all()
    loss, entropy, *_ = extras_softmax(h[:0], table[drawn], table[targets][:0], among[:0], entropy=True)
    assert loss.shape == entropy.shape == (0,)


def test_compiled_step_is_one_graph_and_agrees():
    def step(h, extras, rows, among):
        return extras_softmax(h, extras, rows, among, entropy=True).loss.mean()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for size in (40, 50):
        h, table, drawn, targets = draw(size)
        given = (h, table[drawn], table[targets], targets_among(targets, drawn))
        (plain,) = torch.autograd.grad(step(*given), h)
        (traced,) = torch.autograd.grad(compiled(*given), h)
        assert torch.allclose(plain, traced, atol=1e-7)


@pytest.mark.parametrize("bad", ["queries", "extras", "rows"])
def test_bad_values_raise_or_are_latched(bad):
    h, table, drawn, targets = draw()
    given = {"queries": h.detach(), "extras": table[drawn], "rows": table[targets]}
    given[bad][3] = torch.nan
    queries = given["queries"].requires_grad_()
    among = targets_among(targets, drawn)
    with pytest.raises(ModelError, match="hold NaN or infinity"):
        extras_softmax(queries, given["extras"], given["rows"], among)
    latch = Latch("cpu")
    loss = extras_softmax(queries, given["extras"], given["rows"], among, latch=latch).loss
    loss.sum().backward()
    assert (loss == 0).all() and (queries.grad == 0).all()
    with pytest.raises(ModelError, match="Step 0 was bad"):
        latch.read()


def test_arguments_that_do_not_fit_are_clear_errors():
    h, table, drawn, targets = draw()
    extras, rows, among = table[drawn], table[targets], targets_among(targets, drawn)
    with pytest.raises(ModelError, match="Target rows are"):
        extras_softmax(h, extras, rows[:3], among)
    with pytest.raises(ModelError, match="target_is_extra has shape"):
        extras_softmax(h, extras, rows, among.long())
    with pytest.raises(ModelError, match="Only one of log_q and target_log_q"):
        extras_softmax(h, extras, rows, among, log_q=torch.zeros(len(extras)))
    with pytest.raises(ModelError, match="target_log_q has shape"):
        extras_softmax(h, extras, rows, among, log_q=torch.zeros(len(extras)), target_log_q=torch.zeros(3))
    with pytest.raises(ModelError, match="log_q holds NaN"):
        extras_softmax(
            h, extras, rows, among, log_q=torch.zeros(len(extras)), target_log_q=torch.full((len(h),), torch.nan)
        )
    with pytest.raises(ModelError, match="num_valid is 0"):
        extras_softmax(h, extras, rows, among, num_valid=0)


def test_targets_among_the_drawn():
    drawn = torch.tensor([7, 2, 9])
    assert targets_among(torch.tensor([0, 2, 8, 9, 100, 7]), drawn).tolist() == [False, True, False, True, False, True]
    assert targets_among(torch.tensor([1]).int(), drawn[:0]).tolist() == [False]
