"""Cross-entropy of each query's own target against shared extra candidates, and against nothing else.

    M  queries      V  extras      d  width of a vector

With lse_i the log-sum-exp over the extras, o_i their average under its softmax and z_iy the target's score:

    loss_i = log(exp(lse_i) + exp(z_iy)) - z_iy      where the target is not among the extras
    loss_i = lse_i - z_iy                            where it is: it is counted there, and once is enough

A target that another query finds among the extras stays a negative there. With a_i = exp(lse_i - total_i), the
probability of everything but a target that stands apart (and 1 for one that does not), both cases have

    dloss_i/dh_i = a_i (o_i - e_y)      dloss/de_j = sum_i g_i a_i p_ij h_i      dloss_i/de_y = -a_i h_i
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from habitus.errors import ModelError
from habitus.softmax.backend import KERNELS, SoftmaxBackend, choose_backend
from habitus.softmax.checks import causes, check_shapes, checked, not_finite
from habitus.softmax.inputs import candidate_bias, check_count, common_shift, in_autocast_type
from habitus.softmax.latch import Cause, Latch
from habitus.softmax.loss import SoftmaxResult, needed_backward
from habitus.softmax.operators import softmax_forward
from habitus.softmax.sharded import Alone, Spread


def extras_softmax(
    queries: Tensor,
    extras: Tensor,
    target_rows: Tensor,
    target_is_extra: Tensor,
    *,
    log_q: Tensor | None = None,
    target_log_q: Tensor | None = None,
    num_valid: int | Tensor | None = None,
    entropy: bool = False,
    backend: SoftmaxBackend | str | None = None,
    group: dist.ProcessGroup | None = None,
    latch: Latch | None = None,
) -> SoftmaxResult:
    """The loss of each query [M] among the extras [V, d] and its own target's row [M, d], differentiable in all three.

    `target_is_extra` [M] says whose target was drawn as an extra too (`targets_among`); it is not counted twice.
    `log_q` [V] and `target_log_q` [M] are subtracted from the scores and come together. With `group`, the extras are
    this rank's piece of a draw that is spread over the ranks, and queries, targets and losses are this rank's own.
    `num_valid`, `entropy`, `backend` and `latch` are as in `candidate_softmax`.
    """
    queries, extras, target_rows = in_autocast_type(queries), in_autocast_type(extras), in_autocast_type(target_rows)
    if isinstance(num_valid, int) and group is None:
        check_count(num_valid, len(extras))
        log_q = None if log_q is None else log_q[:num_valid]
        extras, num_valid = extras[:num_valid], None
    check_shapes(queries, extras, None, log_q)
    _check_own(queries, target_rows, target_is_extra, log_q, target_log_q)
    if len(queries) == 0 and group is None:
        wide = torch.promote_types(queries.dtype, torch.float32)
        nothing = (queries.sum(1) + target_rows.sum(1) + extras[:0].sum()).to(wide)  # keeps the graph alive
        return SoftmaxResult(nothing, nothing.detach() if entropy else None, nothing, None)
    ranks = Alone(len(extras)) if group is None else Spread(group, queries, extras)
    count = None if num_valid is None else torch.as_tensor(num_valid, device=queries.device)
    shift = common_shift(log_q, whole=group is None)
    bias = candidate_bias(log_q, shift, count, len(extras))
    own_bias = None if target_log_q is None else shift - target_log_q.detach().float()
    trainable = extras.requires_grad and torch.is_grad_enabled()
    chosen = choose_backend(queries, biased=bias is not None or trainable, backend=backend)
    no_targets = torch.empty(0, dtype=torch.int64, device=queries.device)
    with torch.no_grad():
        # Fused attention shows bad candidates in its result, so a large table is not read once more to find them.
        rows = extras[:0] if chosen in KERNELS else extras
        every_q = None if log_q is None or target_log_q is None else torch.cat((log_q, target_log_q))
        cause = causes(queries, rows, no_targets, every_q, count if group is None else None, len(extras))
    with torch.autocast(queries.device.type, enabled=False):
        loss, uncertainty, sound = _ExtrasSoftmax.apply(
            queries, extras, target_rows, bias, own_bias, target_is_extra, latch, ranks, chosen
        )
        score = torch.linalg.vecdot(queries.to(loss.dtype), target_rows.to(loss.dtype))
    cause = torch.where(sound.detach() | (cause > 0), cause, int(Cause.CANDIDATES_NOT_FINITE))
    ok = checked(cause, no_targets, len(extras)) if latch is None else latch.record(cause)
    doubt = torch.where(ok, uncertainty.detach(), 0) if entropy else None
    own_log_q = None if target_log_q is None else target_log_q.detach().to(loss.dtype)
    return SoftmaxResult(torch.where(ok, loss, 0), doubt, torch.where(ok, score, 0), own_log_q)


class _ExtrasSoftmax(torch.autograd.Function):
    """Loss and entropy of this rank's queries. The entropy is a read-out: whatever comes back to it is dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        extras: Tensor,
        target_rows: Tensor,
        bias: Tensor | None,
        own_bias: Tensor | None,
        target_is_extra: Tensor,
        latch: Latch | None,
        ranks: Alone,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, entropy, and whether all is finite; saves the average extra."""
        everyone = ranks.gather(queries)
        mean, part, entropy = softmax_forward(everyone, extras, bias, backend, ctx.needs_input_grad[0])
        lse = ranks.merged(part)
        share = (part - lse).exp()
        # The chain rule of entropy, here over ranks and below over 'an extra or the target'.
        entropy = ranks.own(ranks.total(share * (entropy + lse - part)))
        wanted = torch.linalg.vecdot(queries.to(lse.dtype), target_rows.to(lse.dtype))
        wanted = wanted if own_bias is None else wanted + own_bias.to(lse.dtype)
        lead = ranks.own(lse) - wanted  # of the extras over the target
        away = torch.where(target_is_extra, 1, lead.sigmoid())
        apart = torch.logaddexp(lead, torch.zeros_like(lead))  # -log p of a target that stands apart, and
        others = torch.logaddexp(-lead, torch.zeros_like(lead))  # of all extras together
        loss = torch.where(target_is_extra, lead, apart)
        mixed = away * (entropy + others) + (-lead).sigmoid() * apart
        sound = ~(not_finite(loss) | not_finite(mean))
        ctx.save_for_backward(everyone, extras, target_rows, bias, lse, share, away, mean)
        ctx.ranks, ctx.backend, ctx.latch = ranks, backend, latch
        return loss, torch.where(target_is_extra, entropy, mixed).clamp_min(0), sound

    @staticmethod
    @once_differentiable  # what was saved is constant to autograd: a second derivative would lack most of its terms
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        """g a (o - e_y) for the queries, sum_i g a p h for the extras and -g a h for the targets' rows."""
        everyone, extras, target_rows, bias, lse, share, away, mean = ctx.saved_tensors
        for_queries, for_extras, for_targets = ctx.needs_input_grad[:3]
        own_weights = grad.to(lse.dtype) * away
        weights = ctx.ranks.gather(own_weights)
        left_out, pulled = needed_backward(ctx, everyone, extras, bias, lse, weights, mean)
        to_queries = to_extras = to_targets = None
        if for_queries:
            if mean.numel():
                # Zero-weight queries get zeros, whatever they hold: they are padding.
                left_out = torch.where(weights[:, None] == 0, 0, mean * (weights * share)[:, None])
            to_queries = ctx.ranks.own_total(left_out).addcmul(target_rows, -own_weights[:, None])
        if for_extras:
            to_extras = pulled
        if for_targets:
            to_targets = ctx.ranks.own(everyone) * -own_weights[:, None]
        gradients = [
            None if found is None else _gated(found.to(rows.dtype), ctx.latch)
            for found, rows in ((to_queries, everyone), (to_extras, extras), (to_targets, target_rows))
        ]
        return (*gradients, None, None, None, None, None, None)


def _gated(gradient: Tensor, latch: Latch | None) -> Tensor:
    """The gradient, or zeros once something bad was seen."""
    return gradient if latch is None else torch.where(latch.ok, gradient, 0)


def _check_own(
    queries: Tensor, rows: Tensor, target_is_extra: Tensor, log_q: Tensor | None, target_log_q: Tensor | None
) -> None:
    """Raise unless what belongs to each query's target fits the queries."""
    if rows.shape != queries.shape or rows.dtype != queries.dtype or rows.device != queries.device:
        raise ModelError(
            f"Target rows are {tuple(rows.shape)}, {rows.dtype} on {rows.device}.",
            expected=f"one row per query: {tuple(queries.shape)}, {queries.dtype} on {queries.device}",
        )
    if target_is_extra.shape != (len(queries),) or target_is_extra.dtype != torch.bool:
        raise ModelError(
            f"target_is_extra has shape {tuple(target_is_extra.shape)} and type {target_is_extra.dtype}.",
            expected=f"one bool per query, ({len(queries)},)",
            next_step="targets_among(targets, extras) makes it from item ids.",
        )
    if (log_q is None) != (target_log_q is None):
        raise ModelError("Only one of log_q and target_log_q was given.", expected="both, or neither")
    if target_log_q is not None and target_log_q.shape != (len(queries),):
        raise ModelError(
            f"target_log_q has shape {tuple(target_log_q.shape)}.", expected=f"one per query, ({len(queries)},)"
        )
