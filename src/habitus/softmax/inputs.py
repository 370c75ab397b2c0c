"""The inputs of a softmax: checked, and brought into the form that backends take.

    M  queries      V  candidates      d  width of a vector

Shapes and types are checked on the host for free. Values are checked on the device in one pass and reported through
one number: the host waits for it, unless a step is being captured or a latch takes it.
"""

import math

import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.softmax.latch import Cause, explain_cause

MASKED = -1.0e30  # the bias of a row that does not count: exp of it is 0, and it survives products with 0
_MAX_SCORE = 1.0e29  # well above the MASKED that scans put where there is no candidate, and far from infinity


def check_shapes(queries: Tensor, candidates: Tensor, targets: Tensor | None, log_q: Tensor | None) -> None:
    """Raise unless the tensors belong together."""
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1]:
        raise ModelError(
            f"Queries of shape {tuple(queries.shape)} do not fit candidates of shape {tuple(candidates.shape)}.",
            expected="[M, d] and [V, d] with the same d",
        )
    if len(candidates) == 0 or queries.shape[1] == 0:
        raise ModelError(
            "There are no candidates to score." if len(candidates) == 0 else "The vectors have no entries.",
            expected="at least one candidate of width 1 or more",
            next_step="Check that the candidate table was filled.",
        )
    if not queries.dtype.is_floating_point or queries.dtype != candidates.dtype:
        raise ModelError(
            f"Queries are {queries.dtype} and candidates {candidates.dtype}.",
            expected="one floating-point type for both",
            next_step="Cast one of them, or call under torch.autocast, which casts both.",
        )
    for name, tensor in (("candidates", candidates), ("targets", targets), ("log_q", log_q)):
        if tensor is not None and tensor.device != queries.device:
            raise ModelError(
                f"Queries are on {queries.device} and {name} on {tensor.device}.", expected="one device for all"
            )
    if targets is not None:
        check_targets(queries, targets)
    if log_q is not None and log_q.shape != (len(candidates),):
        raise ModelError(
            f"log_q has shape {tuple(log_q.shape)}.", expected=f"one number per candidate, ({len(candidates)},)"
        )


def check_targets(queries: Tensor, targets: Tensor) -> None:
    """Raise unless there is one integer target per query."""
    if targets.shape != (len(queries),) or targets.dtype not in (torch.int64, torch.int32):
        raise ModelError(
            f"Targets have shape {tuple(targets.shape)} and type {targets.dtype}.",
            expected=f"one int64 position in the candidate table per query, ({len(queries)},)",
        )


@torch.library.custom_op("habitus::check_causes", mutates_args=())
def check_causes(cause: Tensor, targets: Tensor, limit: int) -> Tensor:
    """True; raises if there is a cause, except inside graph capture. The one place where the host waits.

    `targets` may be empty where a softmax has none.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    causes = 0 if capturing else int(cause)
    if causes:
        raise ModelError(
            f"The softmax cannot be taken: {explain_cause(causes)}.{_example(causes, targets, limit)}",
            expected="finite embeddings" + (f", and targets in 0..{limit - 1}" if len(targets) else ""),
        )
    return torch.ones_like(cause, dtype=torch.bool)


@check_causes.register_fake
def _(cause: Tensor, targets: Tensor, limit: int) -> Tensor:
    return torch.empty_like(cause, dtype=torch.bool)


def find_causes(
    queries: Tensor,
    candidates: Tensor,
    targets: Tensor,
    log_q: Tensor | None,
    num_valid: Tensor | None,
    limit: int,
) -> Tensor:
    """What is wrong with the values, as an int64 sum of `Cause` on the device."""
    valid = limit if num_valid is None else num_valid
    flags = {Cause.TARGET_OUT_OF_RANGE: ((targets < 0) | (targets >= valid)).any()}
    flags[Cause.QUERIES_NOT_FINITE] = has_nonfinite(queries)
    flags[Cause.CANDIDATES_NOT_FINITE] = has_nonfinite(candidates)
    if log_q is not None:
        flags[Cause.LOG_Q_NOT_FINITE] = has_nonfinite(log_q)
    if num_valid is not None:
        flags[Cause.NO_VALID_CANDIDATE] = (num_valid < 1) | (num_valid > limit)
    return torch.stack([flag.to(torch.int64) * int(cause) for cause, flag in flags.items()]).sum()


def has_nonfinite(tensor: Tensor) -> Tensor:
    """Whether a tensor holds NaN or infinity, in one read and without a mask of its size."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(tensor.detach())  # both are NaN if any entry is
    return ~(torch.isfinite(low) & torch.isfinite(high))


def max_abs(tensor: Tensor) -> float:
    """The largest magnitude, NaN if any entry is; the host waits for it."""
    if tensor.numel() == 0:
        return 0.0
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    return math.nan if math.isnan(low) else max(-low, high)


def check_scale(queries: float, candidates: float, width: int, bias: float = 0.0) -> None:
    """Raise where vectors with entries of such magnitudes could have scores that cannot be compared."""
    if width * queries * candidates + bias > _MAX_SCORE:
        raise ModelError(
            f"Scores could overflow: entries of queries reach {queries:.3g} and those of candidates {candidates:.3g}.",
            expected=f"scores below {_MAX_SCORE:.0e}",
            next_step="Check the model: its training may have diverged.",
        )


def clamp_targets(targets: Tensor, limit: int) -> Tensor:
    """Targets that cannot read outside the table, whatever they were."""
    return targets.to(torch.int64).clamp(0, limit - 1)


def _example(cause: int, targets: Tensor, limit: int) -> str:
    if not cause & Cause.TARGET_OUT_OF_RANGE:
        return ""
    wrong = ((targets < 0) | (targets >= limit)).nonzero().flatten()
    if len(wrong) == 0:
        return ""
    first = int(wrong[0])
    return f" {len(wrong)} targets are wrong, the first is {int(targets[first])} at query {first}."


def cast_to_autocast(tensor: Tensor) -> Tensor:
    """The tensor in autocast's type where autocast is on."""
    device = tensor.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensor
    if tensor.dtype.is_floating_point and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def check_num_valid(num_valid: int, rows: int) -> None:
    """Raise unless between one and all rows count."""
    if not 1 <= num_valid <= rows:
        raise ModelError(f"num_valid is {num_valid}.", expected=f"1 to {rows}, the rows of the candidate table")


def common_shift(log_q: Tensor | None, *, full: bool) -> Tensor | float:
    """The mean of log q, where all of it is here: subtracting it from all changes no loss and keeps numbers small."""
    return log_q.detach().float().mean() if log_q is not None and full else 0.0


def candidate_bias(log_q: Tensor | None, shift: Tensor | float, num_valid: Tensor | None, rows: int) -> Tensor | None:
    """shift - log q [V], and MASKED from num_valid on."""
    if log_q is None and num_valid is None:
        return None
    if log_q is not None:
        bias = shift - log_q.detach().float()
    else:
        assert num_valid is not None
        bias = torch.zeros(rows, device=num_valid.device)
    if num_valid is not None:
        bias = bias.masked_fill(torch.arange(rows, device=bias.device) >= num_valid, MASKED)
    return bias
