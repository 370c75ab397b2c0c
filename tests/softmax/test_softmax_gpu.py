"""The CUDA backends against the float64 twin: values, bounds, capture, compilation, streaming from the host."""

import pytest
import torch

from habitus.errors import ModelError
from habitus.softmax import (
    Latch,
    candidate_pool,
    candidate_softmax,
    catalogue_scores,
    extras_softmax,
    ranks,
    sample_negatives,
    targets_among,
    top_k,
)
from habitus.softmax.triton_scan import buffer_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = 2.0**-8  # bfloat16 keeps 8 bits: a rounding moves a number by at most half of this, relative


def draw(M, V, d, *, scale=1.0, dtype=torch.bfloat16, seed=0):
    """Queries and candidates whose scores have a standard deviation of `scale`, and targets."""
    generator = torch.Generator("cuda").manual_seed(seed)
    h = torch.randn(M, d, device="cuda", generator=generator) * scale * d**-0.5
    e = torch.randn(V, d, device="cuda", generator=generator)
    y = torch.randint(V, (M,), device="cuda", generator=generator)
    return h.to(dtype).requires_grad_(), e.to(dtype).requires_grad_(), y


def relative(a, b):
    """The norm of the difference over the norm of the truth."""
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("backend", ["cudnn", "flash", "triton", "chunked", None])  # None: few scores are kept
@pytest.mark.parametrize("d", [20, 64, 248])
@pytest.mark.parametrize("biased", [False, True])
def test_every_backend_agrees_with_float64(backend, d, biased, twin):
    h, e, y = draw(1000, 5003, d, scale=2.0)
    log_q = torch.randn(5003, device="cuda") - 7 if biased else None
    weights = torch.rand(1000, device="cuda") / 1000
    loss, entropy, *_ = candidate_softmax(h, e, y, log_q=log_q, entropy=True, backend=backend)
    (loss * weights).sum().backward()
    truth = twin(h, e, y, log_q=log_q, weights=weights)
    assert (loss - truth.loss).abs().max() < 1e-5 * truth.loss.abs().max()
    bound = UNIT * (h.detach().float().norm(dim=1) * e.detach().float().norm(dim=1).max()).double()
    bound = bound + (UNIT * 8 if biased else 0)
    assert ((entropy - truth.entropy).abs() <= bound + 1e-5).all()
    assert relative(h.grad, truth.to_queries) < 2e-3
    assert relative(e.grad, truth.to_candidates) < 2e-3


@pytest.mark.parametrize("d", [256, 260, 512, 1024])
def test_wide_vectors_agree_with_float64(d, twin):
    h, e, y = draw(700, 3001, d, scale=2.0)
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True)
    loss.mean().backward()
    truth = twin(h, e, y, weights=torch.full((700,), 1 / 700, device="cuda"))
    assert (loss - truth.loss).abs().max() < 1e-5 * truth.loss.abs().max()
    assert (entropy - truth.entropy).abs().max() < 1e-5 * truth.entropy.max()
    assert relative(h.grad, truth.to_queries) < 2e-3
    assert relative(e.grad, truth.to_candidates) < 2e-3


@pytest.mark.parametrize("backend, d", [("cudnn", 64), ("flash", 64), ("triton", 64), ("triton", 256), ("chunked", 64)])
@pytest.mark.parametrize("valid", [1, 70, 1400])
def test_whole_tiles_of_rows_that_do_not_count(backend, d, valid, twin):
    # A captured step's bucket has room; few queries split the columns, so that a part may hold nothing that counts.
    h, e, y = draw(200, 4096, d, scale=2.0)
    y = y % valid
    count = torch.tensor(valid, device="cuda")
    loss, entropy, *_ = candidate_softmax(h, e, y, num_valid=count, entropy=True, backend=backend)
    loss.mean().backward()
    truth = twin(h, e[:valid], y, weights=torch.full((200,), 1 / 200, device="cuda"))
    assert (loss - truth.loss).abs().max() < 1e-5 * max(1.0, truth.scores.abs().max().item())
    assert torch.isfinite(entropy).all()
    assert not e.grad[valid:].any()
    assert (e.grad[:valid].double() - truth.to_candidates).norm() <= 5e-3 * max(1.0, truth.to_candidates.norm())


@pytest.mark.parametrize("backend", ["cudnn", "flash", "triton", "chunked"])
@pytest.mark.parametrize("case", ["huge", "tiny", "equal", "duplicates", "one", "sharp"])
def test_adversarial_inputs(backend, case, twin):
    h, e, y = draw(300, 1 if case == "one" else 2000, 64)
    with torch.no_grad():
        if case == "huge":  # scores to about +-300
            h.mul_(75)
        elif case == "tiny":
            h.mul_(1e-6)
        elif case == "equal":
            e.copy_(e[:1].expand_as(e))
        elif case == "duplicates":
            e.copy_(e[torch.arange(len(e), device="cuda") % 7])
        elif case == "sharp":  # each query is its own target's row: probabilities near one
            h.copy_(e[y] * 2)
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True, backend=backend)
    truth = twin(h, e, y)
    scale = max(1.0, truth.scores.abs().max().item())
    assert (loss - truth.loss).abs().max() < 1e-5 * scale
    bound = UNIT * (h.detach().float().norm(dim=1) * e.detach().float().norm(dim=1).max()).double()
    assert ((entropy - truth.entropy).abs() <= bound + 1e-5 * scale).all()
    loss.sum().backward()
    reach = e.detach().float().norm(dim=1).max()
    error = (h.grad.double() - truth.to_queries).norm(dim=1)
    assert (error <= 2 * UNIT * reach).all()
    assert torch.isfinite(e.grad).all()


def test_float32_on_cuda_is_chunked_and_accurate(twin):
    h, e, y = draw(500, 3000, 64, scale=2.0, dtype=torch.float32)
    loss, entropy, *_ = candidate_softmax(h, e, y, entropy=True)
    loss.sum().backward()
    truth = twin(h, e, y)
    assert relative(loss.detach(), truth.loss) < 1e-6
    assert relative(entropy, truth.entropy) < 1e-5
    assert relative(h.grad, truth.to_queries) < 1e-5
    assert relative(e.grad, truth.to_candidates) < 1e-5


def test_the_running_sum_is_right_at_13_6_million_candidates():
    V, d = 13_600_000, 64
    h, _, _ = draw(256, 1, d, scale=2.0)
    e = torch.randn(V, d, device="cuda", dtype=torch.bfloat16)
    y = torch.randint(V, (256,), device="cuda")
    truth = torch.zeros(32, dtype=torch.float64, device="cuda")
    for part in e.split(1 << 18):
        truth += (h[:32].detach().double() @ part.double().T).exp().sum(1)
    hit = (h[:32].detach().double() * e[y[:32]].double()).sum(1)
    for backend in ("cudnn", "triton"):
        loss = candidate_softmax(h, e, y, backend=backend).loss.detach()
        assert (loss[:32] - (truth.log() - hit)).abs().max() < 1e-4
    streamed = catalogue_scores(h.detach(), e, y, k=10)
    assert (streamed.loss[:32] - (truth.log() - hit)).abs().max() < 1e-4


@pytest.mark.parametrize("d", [64, 200, 256, 512])
@pytest.mark.parametrize("case", ["random", "duplicates", "constant", "ascending"])
def test_ranks_and_top_k_equal_a_full_sort(d, case):
    V, k = 9001, 100
    h, e, y = (tensor.detach() for tensor in draw(300, V, d))
    if case == "duplicates":
        e = e[torch.randint(V // 5, (V,), device="cuda")]
    elif case == "constant":
        e = e[:1].expand(V, d).contiguous()
    elif case == "ascending":
        e = (e[:1].abs() * torch.arange(1, V + 1, device="cuda")[:, None] / V).to(e.dtype)
        h = h.abs()
    whole = top_k(h, e, V)  # every score, from the kernel itself
    z = torch.empty(300, V, device="cuda").scatter_(1, whole.items, whole.scores)
    assert (z - h.double() @ e.double().T).abs().max() < 1e-4
    order = torch.sort(z, dim=1, descending=True, stable=True)
    reached = (z >= z.gather(1, y[:, None])).sum(1)
    for memory in (1 << 20, 1 << 29):
        result = catalogue_scores(h, e, y, k=k, memory_bytes=memory)
        assert torch.equal(result.rank, reached)
        assert torch.equal(result.top_items, order.indices[:, :k])
        assert torch.equal(result.top_scores, order.values[:, :k])
        assert torch.equal(ranks(h, e, y, memory_bytes=memory), reached)
    if case == "constant":
        assert (reached == V).all()


def test_rising_scores_overflow_the_slots_and_are_still_exact():
    V = 40 * buffer_slots(10)
    h = torch.ones(200, 64, device="cuda", dtype=torch.bfloat16)
    e = torch.zeros(V, 64, device="cuda", dtype=torch.bfloat16)
    e[:, 0] = torch.arange(V, device="cuda") // 200
    e[:, 1] = torch.arange(V, device="cuda") % 200 / 256
    result = top_k(h, e, 10)
    z = e[:, 0].float() + e[:, 1].float()
    order = torch.sort(z, descending=True, stable=True)
    assert torch.equal(result.items, order.indices[:10].expand(200, 10))


@pytest.mark.parametrize("place", ["host", "mapped", "pieces"])
def test_candidates_from_the_host_give_the_device_answer(place, tmp_path):
    h, e, y = (tensor.detach() for tensor in draw(300, 20_000, 64))
    there = e.cpu()
    if place == "mapped":
        there.view(torch.int16).numpy().tofile(tmp_path / "rows")
        mapped = torch.from_file(str(tmp_path / "rows"), size=there.numel(), dtype=torch.int16)
        there = mapped.view(torch.bfloat16).view_as(e)
    elif place == "pieces":
        there = [there[:7001], there[7001:7002], there[7002:]]
    whole = catalogue_scores(h, e, y, k=50)
    streamed = catalogue_scores(h, there, y, k=50, memory_bytes=1 << 20)
    assert torch.equal(whole.rank, streamed.rank)
    assert torch.equal(whole.top_items, streamed.top_items)
    assert torch.allclose(whole.loss, streamed.loss, atol=1e-5)


def test_a_captured_step_replays_with_new_numbers(twin):
    h, e, y = draw(512, 4096, 64)
    count = torch.tensor(4096, device="cuda")
    latch = Latch("cuda")

    def step():
        loss, _, *_ = candidate_softmax(h, e, y, num_valid=count, latch=latch)
        h.grad, e.grad = torch.autograd.grad(loss.mean(), (h, e))
        latch.gate((h.grad, e.grad))
        latch.advance()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        h.copy_(torch.randn_like(h) * 0.3)
    y.random_(0, 3000)
    count.fill_(3000)
    graph.replay()
    truth = twin(h, e, y, num_valid=3000, weights=torch.full((512,), 1 / 512, device="cuda"))
    assert relative(loss.detach(), truth.loss) < 1e-5
    assert relative(h.grad, truth.to_queries) < 2e-3
    assert relative(e.grad, truth.to_candidates) < 2e-3
    assert (e.grad[3000:] == 0).all()
    assert latch.read() == 4
    y[7] = 3500  # beyond num_valid: named, latched, masked
    graph.replay()
    y[7] = 0
    graph.replay()
    assert (h.grad == 0).all() and (e.grad == 0).all()
    with pytest.raises(ModelError, match="Step 4 was bad: a target lies outside"):
        latch.read()


@pytest.mark.parametrize("d", [64, 512])
def test_compiled_and_plain_calls_agree(d):
    h, e, y = draw(512, 4096, d)

    def step(h, e, y):
        return candidate_softmax(h, e, y).loss.mean()

    plain = torch.autograd.grad(step(h, e, y), (h, e))
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(h, e, y), (h, e))
    for a, b in zip(plain, compiled, strict=True):
        assert relative(a, b.double()) < 4e-3  # only the plain call keeps its scores, and both round to bfloat16


def test_the_same_step_twice_gives_the_same_bits():
    h, e, y = draw(4096, 8192, 64)
    y = y % 5  # many queries share a target: additions in order of arrival would show
    first = torch.autograd.grad(candidate_softmax(h, e, y).loss.mean(), (h, e))
    second = torch.autograd.grad(candidate_softmax(h, e, y).loss.mean(), (h, e))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_uses_the_fused_kernels():
    h, e, y = draw(256, 1000, 64, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = candidate_softmax(h, e, y, backend="cudnn").loss
    loss.sum().backward()
    assert h.grad.dtype == e.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["cudnn", "flash", "triton", "chunked"])
def test_extras_and_the_own_target_alone_agree_with_float64(backend):
    h, e, y = draw(1000, 5003, 64, scale=2.0)
    drawn = sample_negatives(5003, 2000, torch.Generator("cuda").manual_seed(1))
    among = targets_among(y, drawn)
    assert 0 < among.sum() < len(y)
    loss, entropy, *_ = extras_softmax(h, e[drawn].detach(), e[y].detach(), among, entropy=True, backend=backend)
    loss.mean().backward()
    # A catalogue whose rows that are neither drawn nor the query's own target are masked, one query at a time.
    z = h.detach().double().requires_grad_()
    scores = z @ e.detach().double().T
    counts = torch.zeros(5003, dtype=torch.bool, device="cuda")
    counts[drawn] = True
    own = torch.arange(5003, device="cuda") == y[:, None]
    log_p = scores.masked_fill(~(counts | own), -torch.inf).log_softmax(1)
    truth = -log_p.gather(1, y[:, None])[:, 0]
    truth.mean().backward()
    uncertainty = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0).sum(1).detach()
    bound = UNIT * (h.detach().float().norm(dim=1) * e.detach().float().norm(dim=1).max()).double()
    assert (loss - truth).abs().max() < 1e-5 * truth.max()
    assert ((entropy - uncertainty).abs() <= bound + 1e-5).all()
    assert relative(h.grad, z.grad) < 2e-3


def test_a_captured_step_over_extras_replays_with_new_numbers():
    h, e, y = draw(512, 4096, 64)
    e = e.detach()
    drawn = sample_negatives(4096, 1000, torch.Generator("cuda").manual_seed(1))
    latch = Latch("cuda")

    def step():
        loss = extras_softmax(h, e[drawn], e[y], targets_among(y, drawn), latch=latch).loss
        (h.grad,) = torch.autograd.grad(loss.mean(), h)
        latch.advance()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    y.random_(0, 4096)
    drawn.copy_(sample_negatives(4096, 1000, torch.Generator("cuda").manual_seed(2)))
    graph.replay()
    gradient = h.grad.clone()
    again = step()
    assert torch.equal(loss, again) and torch.equal(gradient, h.grad)
    assert latch.read() == 3


def test_negatives_and_pool_on_the_device():
    generator = torch.Generator("cuda").manual_seed(3)
    negatives = sample_negatives(1_000_000_000, 100_000, generator)
    assert negatives.is_cuda and negatives.unique().numel() == 100_000
    y = torch.randint(50, (1000,), device="cuda")
    pool = candidate_pool(y, sample_negatives(1000, 500, generator))
    ids = pool.items[: int(pool.num_valid)]
    assert ids.unique().numel() == len(ids)
    assert torch.equal(pool.items[pool.targets], y)
