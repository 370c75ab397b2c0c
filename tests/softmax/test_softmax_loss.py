"""Loss, entropy and gradients of the candidate softmax against the float64 twin, on CPU."""

import pytest
import torch
import torch.nn.functional as F

from habitus.errors import ModelError
from habitus.softmax import attention, cached_scores, candidate_softmax, chunked, fast_softmax, plain

BACKENDS = [None, "cpu", "chunked"]  # None: few scores are kept


def draw(M=37, V=501, d=20, *, scale=2.0, dtype=torch.float32, seed=0):
    """Queries and candidates whose scores have a standard deviation of `scale`, and targets."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(M, d, generator=generator) * scale * d**-0.5
    e = torch.randn(V, d, generator=generator)
    y = torch.randint(V, (M,), generator=generator)
    return h.to(dtype).requires_grad_(), e.to(dtype).requires_grad_(), y


def relative(a, b):
    """The norm of the difference over the norm of the truth."""
    return ((a.double() - b).norm() / b.norm()).item()


def close(result, truth, scores):
    """Within 1e-5 relative, or within a few float32 spacings of the scores, which no float32 sum can beat."""
    spacing = 2.0**-21 * scores.abs().max()
    return ((result.double() - truth).abs() <= 1e-5 * truth.abs().clamp_min(1) + spacing).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 501, 20), (300, 1000, 64), (5, 70, 300)])
def test_loss_entropy_and_gradients_agree_with_float64(backend, shape, twin):
    h, e, y = draw(*shape)
    weights = torch.rand(shape[0])
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True, backend=backend)
    (loss * weights).sum().backward()
    truth = twin(h, e, y, weights=weights)
    assert close(loss, truth.loss, truth.scores)
    assert close(entropy, truth.entropy, truth.scores)
    if shape[1] > 1:  # with one candidate the loss is zero whatever the vectors are
        assert relative(h.grad, truth.to_queries) < 1e-5
        assert relative(e.grad, truth.to_candidates) < 1e-5
    else:
        assert h.grad.abs().max() < 1e-6 and e.grad.abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["huge", "tiny", "equal", "duplicates", "sharp", "far below"])
def test_adversarial_inputs(backend, case, twin):
    h, e, y = draw(64, 400, 16)
    with torch.no_grad():
        if case == "huge":  # scores to +-300 and beyond
            h.mul_(50)
        elif case == "tiny":
            h.mul_(1e-20)
            e.mul_(1e-10)
        elif case == "equal":
            e.copy_(e[:1].expand_as(e))
        elif case == "duplicates":
            e.copy_(e[torch.arange(len(e)) % 3])
        elif case == "sharp":
            h.copy_(e[y] * 2)
        elif case == "far below":  # every score near -300
            e[:, 0], h[:, 0] = -30, 10
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True, backend=backend)
    loss.sum().backward()
    truth = twin(h, e, y)
    assert case != "huge" or truth.scores.abs().max() > 300
    assert close(loss, truth.loss, truth.scores)
    assert close(entropy, truth.entropy, truth.scores)
    # A gradient cannot be closer than the probabilities, which carry the scores' own spacing.
    slack = 1e-5 + 2.0**-22 * truth.scores.abs().max().item()
    # Where o and e_y nearly cancel, what is left carries the rounding of both.
    reach = 2 * e.detach().double().norm(dim=1).max()
    assert ((h.grad.double() - truth.to_queries).norm(dim=1) <= slack * reach).all()
    reach = h.detach().double().norm(dim=1).sum()
    assert (e.grad.double() - truth.to_candidates).norm() <= slack * reach


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pieces", [1, 2, 7, 64])
def test_sharding_changes_the_result_by_rounding_only(backend, pieces, monkeypatch, twin):
    h, e, _ = draw(64, 448, 16)
    y = torch.arange(64) * 7  # a target in every shard
    rows = -(-len(e) // pieces)
    monkeypatch.setattr(attention, "shard_rows", lambda *_: rows)
    monkeypatch.setattr(chunked, "_BLOCK_SCORES", max(64, rows) * 64)
    monkeypatch.setattr(chunked, "shard_ranges", lambda size, _: _cut(size, rows if size == 448 else size))
    monkeypatch.setattr(attention, "shard_ranges", _cut)
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True, backend=backend)
    loss.sum().backward()
    truth = twin(h, e, y)
    assert close(loss, truth.loss, truth.scores)
    assert close(entropy, truth.entropy, truth.scores)
    assert relative(h.grad, truth.to_queries) < 1e-5
    assert relative(e.grad, truth.to_candidates) < 1e-5


def _cut(size, rows):
    """Shards of exactly `rows` rows, without the rounding of lengths that would merge small ones."""
    return [(start, min(start + rows, size)) for start in range(0, size, rows)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_valid", [None, 300, torch.tensor(300)])
@pytest.mark.parametrize("with_log_q", [False, True])
def test_bias_and_valid_rows_follow_the_formulas(backend, num_valid, with_log_q, twin):
    h, e, y = draw()
    log_q = torch.randn(501) * 2 - 8 if with_log_q else None
    count = None if num_valid is None else int(num_valid)
    y = y if count is None else y % count
    loss, entropy, *_ = candidate_softmax(h, e, y, log_q=log_q, num_valid=num_valid, entropy=True, backend=backend)
    loss.sum().backward()
    truth = twin(h, e, y, log_q=log_q, num_valid=count)
    scores = truth.scores.nan_to_num(0, neginf=0)
    assert close(loss, truth.loss, scores)
    assert close(entropy, truth.entropy, scores)
    assert relative(h.grad, truth.to_queries) < 1e-5
    assert relative(e.grad, truth.to_candidates) < 1e-5
    if count is not None:
        assert (e.grad[count:] == 0).all()


def test_two_candidates_by_hand():
    # z = (0, ln 3): p = (1/4, 3/4), loss of the second = ln(4/3), entropy = ln 4 - (3/4) ln 3
    h = torch.tensor([[1.0]], requires_grad=True)
    e = torch.tensor([[0.0], [3.0]]).log().nan_to_num(neginf=0).requires_grad_()
    loss, entropy, *_ = candidate_softmax(h, e, torch.tensor([1]), entropy=True)
    loss.sum().backward()
    ln3, ln4 = torch.tensor(3.0).log(), torch.tensor(4.0).log()
    assert torch.allclose(loss, (ln4 - ln3)[None])
    assert torch.allclose(entropy, (ln4 - 0.75 * ln3)[None])
    assert torch.allclose(h.grad, (0.75 * ln3 - ln3)[None, None])
    assert torch.allclose(e.grad, torch.tensor([[0.25], [-0.25]]))


def test_bfloat16_is_rounded_only_at_the_end(twin):
    h, e, y = draw(200, 1000, 64, dtype=torch.bfloat16)
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True)
    loss.sum().backward()
    truth = twin(h, e, y)
    assert loss.dtype == entropy.dtype == torch.float32
    assert close(loss, truth.loss, truth.scores)
    assert close(entropy, truth.entropy, truth.scores)
    assert relative(h.grad, truth.to_queries) < 2e-3
    assert relative(e.grad, truth.to_candidates) < 2e-3


def test_float64_stays_float64(twin):
    h, e, y = draw(dtype=torch.float64)
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True)
    loss.sum().backward()
    truth = twin(h, e, y)
    assert relative(loss.detach(), truth.loss) < 1e-14
    assert relative(entropy, truth.entropy) < 1e-13
    assert relative(e.grad, truth.to_candidates) < 1e-13


def test_zero_weight_queries_change_nothing(twin):
    h, e, y = draw(40)
    weights = (torch.arange(40) < 30).float()
    (candidate_softmax(h, e, y).loss * weights).sum().backward()
    truth = twin(h[:30], e, y[:30])
    assert relative(h.grad[:30], truth.to_queries) < 1e-5
    assert (h.grad[30:] == 0).all()
    assert relative(e.grad, truth.to_candidates) < 1e-5


def test_gradients_accumulate_over_micro_batches(twin):
    h, e, y = draw(40)
    for start in range(0, 40, 10):
        candidate_softmax(h[start : start + 10], e, y[start : start + 10]).loss.sum().backward()
    truth = twin(h, e, y)
    assert relative(h.grad, truth.to_queries) < 1e-5
    assert relative(e.grad, truth.to_candidates) < 1e-5


@pytest.mark.parametrize("with_log_q", [False, True])
def test_few_scores_give_the_same_without_checks(with_log_q, monkeypatch):
    """Loss, target's score and log q, and the gradients of both; bad values show in the loss instead of raising."""
    h, e, y = draw(30, 200, 16)
    log_q = torch.randn(200) if with_log_q else None
    monkeypatch.setattr(plain, "_FEW_SCORES", 30 * 200)
    few, checked = fast_softmax(h, e, y, log_q=log_q), candidate_softmax(h, e, y, log_q=log_q)
    for ours, theirs in zip(few, checked, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, atol=1e-5)
    gradients = [torch.autograd.grad((one.loss + 0.3 * one.score).sum(), (h, e)) for one in (few, checked)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    bad = e.detach().clone()
    bad[3, 0] = float("nan")
    assert fast_softmax(h, bad, y).loss.isnan().all()
    with pytest.raises(ModelError):
        fast_softmax(h, bad, y, num_valid=200)
    monkeypatch.setattr(plain, "_FEW_SCORES", 30 * 200 - 1)
    assert fast_softmax(h, e, y, log_q=log_q).loss.equal(checked.loss)


@pytest.mark.parametrize("scores_per_block", [1, 1000, 1 << 19])
def test_kept_scores_come_block_by_block(scores_per_block, monkeypatch, twin):
    monkeypatch.setattr(cached_scores, "_BLOCK_SCORES", scores_per_block)
    h, e, y = draw()
    candidate_softmax(h, e, y).loss.sum().backward()
    truth = twin(h, e, y)
    assert relative(h.grad, truth.to_queries) < 1e-5
    assert relative(e.grad, truth.to_candidates) < 1e-5


@pytest.mark.parametrize("scale", [2.0, 100.0])
def test_what_a_gpu_keeps_where_scores_are_few(scale, twin):
    h, e, y = draw(scale=scale)
    log_q, weights = torch.linspace(-9, -1, len(e)), torch.rand(len(h))
    (mean, lse, entropy), kept = cached_scores.device_forward(h.detach(), e.detach(), -log_q)
    truth = twin(h, e, y, log_q=log_q, weights=weights)
    assert close(lse, truth.scores.logsumexp(1), truth.scores)
    assert close(entropy, truth.entropy, truth.scores)
    to_candidates = cached_scores.cached_candidate_gradient(kept, h.detach(), weights)
    to_candidates.index_add_(0, y, -weights[:, None] * h.detach())
    slack = 1e-5 + 2.0**-22 * truth.scores.abs().max().item()
    assert relative(weights[:, None] * (mean - e.detach()[y]), truth.to_queries) < slack
    assert relative(to_candidates, truth.to_candidates) < slack


def test_more_scores_than_are_kept_give_the_same(monkeypatch):
    result = []
    for most in (37 * 501, 37 * 501 - 1):
        monkeypatch.setattr(cached_scores, "MAX_CACHED_SCORES", most)
        cached_scores._spare_buffers.clear()
        h, e, y = draw()
        loss = candidate_softmax(h, e, y).loss
        loss.sum().backward()
        result.append((loss, h.grad, e.grad, len(cached_scores._spare_buffers)))
    assert [used for *_, used in result] == [1, 0]
    for one, other in zip(result[0][:3], result[1][:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_kept_memory_is_used_again_and_by_one_at_a_time():
    cached_scores._spare_buffers.clear()
    h, e, y = draw(seed=1)
    expected = torch.autograd.grad(candidate_softmax(h, e, y, backend="cpu").loss.sum(), (h, e))
    first, second = (candidate_softmax(h, e, y).loss.sum() for _ in range(2))  # both are alive
    for _ in range(2):  # the second walk over a graph no longer has what was kept
        result = torch.autograd.grad(first, (h, e), retain_graph=True)
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        other_h, other_e, other_y = draw(seed=2)
        candidate_softmax(other_h, other_e, other_y).loss.sum().backward()  # writes where the first one was
    result = torch.autograd.grad(second, (h, e))
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    place = cached_scores._spare_buffers[0].data_ptr()
    candidate_softmax(h, e, y).loss.sum().backward()
    assert [memory.data_ptr() for memory in cached_scores._spare_buffers] == [place]


def test_a_second_derivative_is_refused_rather_than_wrong():
    h, e, y = draw()
    squared = candidate_softmax(h, e.detach(), y).loss.square().sum()
    (gradient,) = torch.autograd.grad(squared, h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_frozen_candidates_get_no_gradient_and_evaluation_keeps_no_graph():
    h, e, y = draw()
    candidate_softmax(h, e.detach(), y).loss.sum().backward()
    assert h.grad is not None
    with torch.no_grad():
        assert not candidate_softmax(h, e, y).loss.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_scores_in_its_type_and_returns_gradients_in_the_parameters(backend):
    h, e, y = draw(30, 200, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = candidate_softmax(h, e, y, backend=backend).loss
    loss.sum().backward()
    rounded = F.cross_entropy(h.detach().bfloat16().double() @ e.detach().bfloat16().double().T, y, reduction="none")
    assert torch.allclose(loss.double(), rounded, atol=1e-5)
    assert h.grad.dtype == e.grad.dtype == torch.float32


def test_compiled_step_is_one_graph_and_agrees():
    def step(h, e, y):
        return candidate_softmax(h, e, y, entropy=True).loss.mean()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in [(37, 501, 20), (40, 600, 24)]:  # the second call has other sizes everywhere
        h, e, y = draw(*shape)
        plain = torch.autograd.grad(step(h, e, y), (h, e))
        traced = torch.autograd.grad(compiled(h, e, y), (h, e))
        for a, b in zip(plain, traced, strict=True):
            assert torch.allclose(a, b, atol=1e-7)


def test_the_running_sum_is_right_at_13_6_million_candidates():
    generator = torch.Generator().manual_seed(1)
    e = torch.randn(13_600_000, 4, generator=generator)
    h = torch.randn(32, 4, generator=generator)
    y = torch.randint(len(e), (32,), generator=generator)
    loss = candidate_softmax(h, e, y).loss
    sample = h[:4].double()
    total = sum((sample @ part.double().T).exp().sum(1) for part in e.split(1 << 20))
    truth = total.log() - (sample * e[y[:4]].double()).sum(1)
    assert (loss[:4] - truth).abs().max() < 1e-4
