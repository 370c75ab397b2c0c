"""Bad input is named, not propagated; inside a step that may not wait, it is latched."""

import logging

import pytest
import torch

from habitus.errors import ModelError
from habitus.softmax import Latch, SoftmaxBackend, candidate_softmax, choose_backend
from habitus.softmax import backend as backends
from habitus.softmax.latch import Cause


def draw():
    torch.manual_seed(0)
    return torch.randn(5, 4), torch.randn(9, 4), torch.tensor([0, 3, 8, 2, 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda h, e, y: (h, e, y + 5), "4 targets are wrong|3 targets are wrong|a target lies outside"),
        (lambda h, e, y: (h, e, y - 1), "the first is -1 at query 0"),
        (lambda h, e, y: (h, e[:0], y), "no candidates"),
        (lambda h, e, y: (h, e.double(), y), "Queries are torch.float32 and candidates torch.float64"),
        (lambda h, e, y: (h, e.to("meta"), y), "Queries are on cpu and candidates on meta"),
        (lambda h, e, y: (h, e[:, :3], y), "do not fit"),
        (lambda h, e, y: (h, e, y.float()), "type torch.float32"),
        (lambda h, e, y: (h, e, y[:4]), "one int64 position"),
        (lambda h, e, y: (h.long(), e.long(), y), "floating-point"),
        (lambda h, e, y: (h.index_fill(0, torch.tensor([1]), torch.nan), e, y), "queries hold NaN"),
        (lambda h, e, y: (h, e.index_fill(0, torch.tensor([7]), torch.inf), y), "candidates hold NaN or inf"),
        (lambda h, e, y: (h, e.index_fill(0, torch.tensor([7]), torch.nan), y), "candidates hold NaN"),
    ],
)
def test_bad_input_is_one_clear_error(spoil, message):
    with pytest.raises(ModelError, match=message):
        candidate_softmax(*spoil(*draw()))


def test_bad_options_are_clear_errors():
    h, e, y = draw()
    with pytest.raises(ModelError, match="log_q has shape"):
        candidate_softmax(h, e, y, log_q=torch.zeros(3))
    with pytest.raises(ModelError, match="log_q holds NaN"):
        candidate_softmax(h, e, y, log_q=torch.full((9,), torch.nan))
    with pytest.raises(ModelError, match="num_valid is 0"):
        candidate_softmax(h, e, y, num_valid=0)
    with pytest.raises(ModelError, match="num_valid is less than 1 or more"):
        candidate_softmax(h, e, y, num_valid=torch.tensor(10))
    with pytest.raises(ModelError, match="a target lies outside"):
        candidate_softmax(h, e, y, num_valid=torch.tensor(8))
    with pytest.raises(ModelError, match="no softmax backend called 'fast'"):
        candidate_softmax(h, e, y, backend="fast")
    with pytest.raises(ModelError, match="'cudnn' cannot be used here: the tensors are not on a CUDA device"):
        candidate_softmax(h, e, y, backend="cudnn")


def test_no_queries_give_no_losses():
    h, e, y = draw()
    loss, entropy, *_ = candidate_softmax(h[:0], e, y[:0], entropy=True)
    assert loss.shape == entropy.shape == (0,)
    h, e = h[:0].double().requires_grad_(), e.double().requires_grad_()
    loss = candidate_softmax(h, e, y[:0]).loss
    assert loss.dtype == torch.float64
    loss.sum().backward()
    assert (e.grad == 0).all()


def test_the_latch_keeps_the_first_bad_step_and_masks_what_follows():
    h, e, y = draw()
    h.requires_grad_()
    e.requires_grad_()
    latch = Latch("cpu")
    for step, targets in enumerate([y, y + 100, y]):
        loss, _, *_ = candidate_softmax(h, e, targets, latch=latch)
        gradients = torch.autograd.grad(loss.sum(), (h, e))
        assert (loss != 0).any() == (step == 0)
        assert all((gradient != 0).any() == (step == 0) for gradient in gradients)
        latch.advance()
    with pytest.raises(ModelError, match="Step 1 was bad: a target lies outside the candidate table"):
        latch.read()


def test_the_latch_names_every_cause_of_its_step_and_no_later_one():
    h, e, y = draw()
    latch = Latch("cpu")
    candidate_softmax(h, e, y, latch=latch)
    assert latch.read() == 0
    candidate_softmax(h * torch.nan, e, y, latch=latch)
    candidate_softmax(h, e * torch.inf, y, latch=latch)
    latch.advance()
    candidate_softmax(h, e, y - 100, latch=latch)
    assert latch.state[2] == Cause.QUERIES_NOT_FINITE | Cause.CANDIDATES_NOT_FINITE
    with pytest.raises(ModelError, match="the queries hold NaN or infinity; the candidates hold"):
        latch.read()


def test_gating_replaces_even_nan_by_zero():
    latch = Latch("cpu")
    gradient = torch.tensor([1.0, torch.nan])
    latch.gate([gradient, None])
    assert gradient[0] == 1
    latch.record(torch.tensor(int(Cause.QUERIES_NOT_FINITE)))
    latch.gate([gradient, None])
    assert (gradient == 0).all()


def test_a_latched_nan_reaches_no_gradient():
    h, e, y = draw()
    h[2] = torch.nan
    h.requires_grad_()
    e.requires_grad_()
    loss, _, *_ = candidate_softmax(h, e, y, latch=Latch("cpu"))
    for gradient in torch.autograd.grad(loss.sum(), (h, e)):
        assert (gradient == 0).all()


def test_the_backend_is_chosen_once_and_logged(caplog):
    backends._first_that_works.cache_clear()
    h, _, _ = draw()
    with caplog.at_level(logging.INFO, logger="habitus.softmax.backend"):
        assert choose_backend(h, biased=False) == SoftmaxBackend.CPU
        assert choose_backend(h, biased=False) == SoftmaxBackend.CPU
    assert [record.message for record in caplog.records] == [
        "softmax on cpu, torch.float32, width 4: cpu (refused: none)"
    ]
    assert choose_backend(h, biased=False, backend="chunked") == SoftmaxBackend.CHUNKED
