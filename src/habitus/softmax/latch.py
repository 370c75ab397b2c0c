"""A flag on the device that remembers the first bad step of a captured loop, for the host to read now and then.

Inside a captured step nothing may wait for the host, so a bad target or a NaN cannot raise there. The latch records
the step and the cause once, everything after it is masked to zero, and `read` raises when the host calls it.
"""

from collections.abc import Iterable
from enum import IntFlag

import torch
from torch import Tensor

from habitus.errors import ModelError


class Cause(IntFlag):
    """What can be wrong with the input of a softmax. Several may hold at once."""

    TARGET_OUT_OF_RANGE = 1
    QUERIES_NOT_FINITE = 2
    CANDIDATES_NOT_FINITE = 4
    LOG_Q_NOT_FINITE = 8
    NO_VALID_CANDIDATE = 16


_EXPLANATIONS = {
    Cause.TARGET_OUT_OF_RANGE: "a target lies outside the candidate table",
    Cause.QUERIES_NOT_FINITE: "the queries hold NaN or infinity",
    Cause.CANDIDATES_NOT_FINITE: "the candidates hold NaN or infinity, or a score overflows",
    Cause.LOG_Q_NOT_FINITE: "log_q holds NaN or infinity",
    Cause.NO_VALID_CANDIDATE: "num_valid is less than 1 or more than the table's rows",
}


class Latch:
    """The first bad step and its cause, kept on the device.

    latch = Latch(device)
    loss = candidate_softmax(queries, candidates, targets, latch=latch).loss      # in the captured step
    latch.gate(parameter.grad for parameter in model.parameters())              # before the optimizer
    latch.advance()                                                             # last in the step
    ...
    latch.read()                                                                # on the host, every few steps
    """

    def __init__(self, device: torch.device | str) -> None:
        # step now, first bad step (-1: none), cause of the first bad step
        self.state = torch.tensor([0, -1, 0], dtype=torch.int64, device=device)

    @property
    def ok(self) -> Tensor:
        """Whether no step has been bad so far, as a bool on the device."""
        return self.state[1] < 0

    def record(self, cause: Tensor) -> Tensor:
        """Record causes (int64, a sum of `Cause`, zero: none) unless there is an earlier one; returns `ok`."""
        step, first, recorded = self.state.unbind()
        # A second softmax of the same step may add its cause to the first one's.
        fresh = (cause > 0) & ((first < 0) | (first == step))
        self.state[1].copy_(torch.where(fresh, step, first))
        self.state[2].copy_(torch.where(fresh, recorded | cause, recorded))
        return self.ok

    def gate(self, tensors: Iterable[Tensor | None]) -> None:
        """Set every tensor to zero, in place, if some step was bad. NaN is overwritten too."""
        ok = self.ok
        for tensor in tensors:
            if tensor is not None:
                tensor.masked_fill_(~ok, 0)

    def advance(self) -> None:
        """Count one step."""
        self.state[0] += 1

    def read(self) -> int:
        """The number of steps counted; raises with the first bad step and its causes. Waits for the device."""
        step, first, cause = self.state.tolist()
        if first < 0:
            return int(step)
        raise ModelError(
            f"Step {first} was bad: {explain_cause(cause)}. Updates from that step on were masked.",
            next_step="Look at that step's batch and at the learning rate, and resume from a checkpoint before it.",
        )


def explain_cause(cause: int) -> str:
    """The causes as text."""
    return "; ".join(text for flag, text in _EXPLANATIONS.items() if cause & flag)
