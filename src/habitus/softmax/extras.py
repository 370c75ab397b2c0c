"""Cross-entropy of each query's own target against shared extra candidates, and against nothing else.

    M  queries      V  extras: the shared extra candidates      d  width of a vector

With lse_i the log-sum-exp over the extras, o_i their average under its softmax and z_iy the target's score:

    loss_i = log(exp(lse_i) + exp(z_iy)) - z_iy      where the target is not among the extras
    loss_i = lse_i - z_iy                            where it is: it is counted there, and once is enough

A target among the extras stays a negative for all other queries. With a_i = exp(lse_i - total_i), the
probability of everything but a target that is not among the extras (and 1 for one that is), both cases have

    dloss_i/dh_i = a_i (o_i - e_y)      dloss/de_j = sum_i g_i a_i p_ij h_i      dloss_i/de_y = -a_i h_i
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from habitus.errors import ModelError
from habitus.softmax.backend import KERNELS, SoftmaxBackend, choose_backend
from habitus.softmax.inputs import (
    candidate_bias,
    cast_to_autocast,
    check_causes,
    check_num_valid,
    check_shapes,
    common_shift,
    find_causes,
    has_nonfinite,
)
from habitus.softmax.latch import Cause, Latch
from habitus.softmax.loss import SoftmaxResult, backward_where_needed
from habitus.softmax.operators import softmax_forward
from habitus.softmax.sharded import FullCandidates, ShardedCandidates


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
    this rank's shard of a draw that is sharded over the ranks, and queries, targets and losses are this rank's own.
    `num_valid`, `entropy`, `backend` and `latch` are as in `candidate_softmax`.
    """
    queries, extras, target_rows = cast_to_autocast(queries), cast_to_autocast(extras), cast_to_autocast(target_rows)
    if isinstance(num_valid, int) and group is None:
        check_num_valid(num_valid, len(extras))
        log_q = None if log_q is None else log_q[:num_valid]
        extras, num_valid = extras[:num_valid], None
    check_shapes(queries, extras, None, log_q)
    _check_target_inputs(queries, target_rows, target_is_extra, log_q, target_log_q)
    if len(queries) == 0 and group is None:
        wide = torch.promote_types(queries.dtype, torch.float32)
        nothing = (queries.sum(1) + target_rows.sum(1) + extras[:0].sum()).to(wide)  # keeps the graph alive
        return SoftmaxResult(nothing, nothing.detach() if entropy else None, nothing, None)
    shards = FullCandidates(len(extras)) if group is None else ShardedCandidates(group, queries, extras)
    count = None if num_valid is None else torch.as_tensor(num_valid, device=queries.device)
    shift = common_shift(log_q, full=group is None)
    bias = candidate_bias(log_q, shift, count, len(extras))
    target_bias = None if target_log_q is None else shift - target_log_q.detach().float()
    trainable = extras.requires_grad and torch.is_grad_enabled()
    chosen = choose_backend(queries, biased=bias is not None or trainable, backend=backend)
    no_targets = torch.empty(0, dtype=torch.int64, device=queries.device)
    with torch.no_grad():
        # Fused attention shows bad candidates in its result, so a large table is not read once more to find them.
        rows = extras[:0] if chosen in KERNELS else extras
        all_log_q = None if log_q is None or target_log_q is None else torch.cat((log_q, target_log_q))
        cause = find_causes(queries, rows, no_targets, all_log_q, count if group is None else None, len(extras))
    with torch.autocast(queries.device.type, enabled=False):
        loss, entropies, is_finite = _ExtrasSoftmax.apply(
            queries, extras, target_rows, bias, target_bias, target_is_extra, latch, shards, chosen
        )
        score = torch.linalg.vecdot(queries.to(loss.dtype), target_rows.to(loss.dtype))
    cause = torch.where(is_finite.detach() | (cause > 0), cause, int(Cause.CANDIDATES_NOT_FINITE))
    ok = check_causes(shards.agree_on_cause(cause), no_targets, len(extras)) if latch is None else latch.record(cause)
    entropies = torch.where(ok, entropies.detach(), 0) if entropy else None
    target_log_q = None if target_log_q is None else target_log_q.detach().to(loss.dtype)
    return SoftmaxResult(torch.where(ok, loss, 0), entropies, torch.where(ok, score, 0), target_log_q)


class _ExtrasSoftmax(torch.autograd.Function):
    """Loss and entropy of this rank's queries. The entropy's own gradient is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        extras: Tensor,
        target_rows: Tensor,
        bias: Tensor | None,
        target_bias: Tensor | None,
        target_is_extra: Tensor,
        latch: Latch | None,
        shards: FullCandidates,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, entropy, and whether all is finite; saves the average extra."""
        all_queries = shards.all_gather(queries)
        mean, part, entropy = softmax_forward(all_queries, extras, bias, backend, ctx.needs_input_grad[0])
        lse = shards.merge_lse(part)
        share = (part - lse).exp()
        # The chain rule of entropy, here over ranks and below over 'an extra or the target'.
        entropy = shards.own_rows(shards.all_sum(share * (entropy + lse - part)))
        target_scores = torch.linalg.vecdot(queries.to(lse.dtype), target_rows.to(lse.dtype))
        target_scores = target_scores if target_bias is None else target_scores + target_bias.to(lse.dtype)
        margin = shards.own_rows(lse) - target_scores  # of the extras over the target
        extras_share = torch.where(target_is_extra, 1, margin.sigmoid())
        target_nll = torch.logaddexp(margin, torch.zeros_like(margin))  # -log p of a target that is no extra, and
        extras_nll = torch.logaddexp(-margin, torch.zeros_like(margin))  # of all extras together
        loss = torch.where(target_is_extra, margin, target_nll)
        entropy_with_target = extras_share * (entropy + extras_nll) + (-margin).sigmoid() * target_nll
        is_finite = ~(has_nonfinite(loss) | has_nonfinite(mean))
        ctx.save_for_backward(all_queries, extras, target_rows, bias, lse, share, extras_share, mean)
        ctx.shards, ctx.backend, ctx.latch = shards, backend, latch
        return loss, torch.where(target_is_extra, entropy, entropy_with_target).clamp_min(0), is_finite

    @staticmethod
    @once_differentiable  # what was saved is constant to autograd: a second derivative would lack most of its terms
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        """g a (o - e_y) for the queries, sum_i g a p h for the extras and -g a h for the targets' rows."""
        all_queries, extras, target_rows, bias, lse, share, extras_share, mean = ctx.saved_tensors
        needs_query_grad, needs_extra_grad, needs_target_grad = ctx.needs_input_grad[:3]
        own_weights = grad.to(lse.dtype) * extras_share
        weights = ctx.shards.all_gather(own_weights)
        query_grad, extra_grad = backward_where_needed(ctx, all_queries, extras, bias, lse, weights, mean)
        grad_queries = grad_extras = grad_targets = None
        if needs_query_grad:
            if mean.numel():
                # Zero-weight queries get zeros, whatever they hold: they are padding.
                query_grad = torch.where(weights[:, None] == 0, 0, mean * (weights * share)[:, None])
            grad_queries = ctx.shards.sum_own_rows(query_grad).addcmul(target_rows, -own_weights[:, None])
        if needs_extra_grad:
            grad_extras = extra_grad
        if needs_target_grad:
            grad_targets = ctx.shards.own_rows(all_queries) * -own_weights[:, None]
        gradients = [
            None if gradient is None else _gate(gradient.to(rows.dtype), ctx.latch)
            for gradient, rows in ((grad_queries, all_queries), (grad_extras, extras), (grad_targets, target_rows))
        ]
        return (*gradients, None, None, None, None, None, None)


def _gate(gradient: Tensor, latch: Latch | None) -> Tensor:
    """The gradient, or zeros after a bad step."""
    return gradient if latch is None else torch.where(latch.ok, gradient, 0)


def _check_target_inputs(
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
