"""The inputs of a softmax as its backends want them: one type, one bias per candidate, a count that is in range.

V  candidates
"""

import torch
from torch import Tensor

from habitus.errors import ModelError

MASKED = -1.0e30  # the bias of a row that does not count: exp of it is 0, and it survives products with 0


def in_autocast_type(tensor: Tensor) -> Tensor:
    """The tensor in autocast's type where autocast is on."""
    device = tensor.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensor
    if tensor.dtype.is_floating_point and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def check_count(num_valid: int, rows: int) -> None:
    """Raise unless between one and all rows count."""
    if not 1 <= num_valid <= rows:
        raise ModelError(f"num_valid is {num_valid}.", expected=f"1 to {rows}, the rows of the candidate table")


def common_shift(log_q: Tensor | None, *, whole: bool) -> Tensor | float:
    """The mean of log q, where all of it is here: taken off all of them it changes no loss and keeps numbers small."""
    return log_q.detach().float().mean() if log_q is not None and whole else 0.0


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
