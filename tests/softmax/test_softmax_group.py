"""Candidates spread over two processes give the one-process answer, loss and gradients."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from habitus.errors import ModelError
from habitus.softmax import candidate_softmax, extras_softmax

PIECES = (301, 200)  # candidates per rank: not equal
M = 23  # queries per rank


def everything():
    """The whole problem, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    h = torch.randn(2 * M, 12, generator=generator)
    e = torch.randn(sum(PIECES), 12, generator=generator)
    y = torch.randint(sum(PIECES), (2 * M,), generator=generator)
    log_q = torch.randn(sum(PIECES), generator=generator) - 5
    weights = torch.rand(2 * M, generator=generator)
    return h, e, y, log_q, weights


def drawn(targets):
    """As if only every second target were among the candidates: the others' rows then count beside them."""
    return targets % 2 == 0


def start(rank, port, folder):
    """Join the group as one of two."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)


def compute_part(rank, port, folder):
    """One rank's losses and gradients, kept in a file."""
    start(rank, port, folder)
    h, e, y, log_q, weights = everything()
    queries, rows = slice(rank * M, (rank + 1) * M), slice(rank * PIECES[0], PIECES[0] + rank * PIECES[1])
    own_h, own_e = h[queries].clone().requires_grad_(), e[rows].clone().requires_grad_()
    for backend in ("cpu", "chunked"):
        loss, entropy, *_ = candidate_softmax(
            own_h, own_e, y[queries], log_q=log_q[rows], entropy=True, backend=backend, group=dist.group.WORLD
        )
        gradients = torch.autograd.grad((loss * weights[queries]).sum(), (own_h, own_e))
        torch.save((loss.detach(), entropy, *gradients), f"{folder}/{backend}-{rank}")
        own_rows = e[y[queries]].clone().requires_grad_()
        loss, entropy, *_ = extras_softmax(
            own_h,
            own_e,
            own_rows,
            drawn(y[queries]),
            log_q=log_q[rows],
            target_log_q=log_q[y[queries]],
            entropy=True,
            backend=backend,
            group=dist.group.WORLD,
        )
        gradients = torch.autograd.grad((loss * weights[queries]).sum(), (own_h, own_e, own_rows))
        torch.save((loss.detach(), entropy, *gradients), f"{folder}/{backend}-extras-{rank}")
    with pytest.raises(ModelError, match="queries of different shapes"):
        candidate_softmax(h[: M + rank], own_e, y[: M + rank], group=dist.group.WORLD)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_give_the_answer_of_one(tmp_path):
    mp.spawn(compute_part, (free_port(), str(tmp_path)), nprocs=2)
    h, e, y, log_q, weights = everything()
    h.requires_grad_()
    e.requires_grad_()
    loss, entropy, *_ = candidate_softmax(h, e, y, log_q=log_q, entropy=True)
    to_h, to_e = torch.autograd.grad((loss * weights).sum(), (h, e))
    for backend in ("cpu", "chunked"):
        parts = [torch.load(tmp_path / f"{backend}-{rank}") for rank in range(2)]
        for whole, pieces in zip((loss, entropy, to_h, to_e), zip(*parts, strict=True), strict=True):
            assert torch.allclose(whole, torch.cat(pieces), rtol=1e-5, atol=1e-5)
    rows = e.detach()[y].requires_grad_()
    loss, entropy, *_ = extras_softmax(h, e, rows, drawn(y), log_q=log_q, target_log_q=log_q[y], entropy=True)
    gradients = torch.autograd.grad((loss * weights).sum(), (h, e, rows))
    for backend in ("cpu", "chunked"):
        parts = [torch.load(tmp_path / f"{backend}-extras-{rank}") for rank in range(2)]
        for whole, pieces in zip((loss, entropy, *gradients), zip(*parts, strict=True), strict=True):
            assert torch.allclose(whole, torch.cat(pieces), rtol=1e-5, atol=1e-5)
