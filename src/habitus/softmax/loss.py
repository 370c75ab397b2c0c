"""Cross-entropy over any number of candidates, without ever holding all scores (but for few of them).

    M  queries      V  candidates      d  width of a vector

With z_ij = <h_i, e_j> + b_j, p = softmax(z) and o_i = sum_j p_ij e_j:

    loss_i = lse_i - z_iy                  dloss_i/dh_i = o_i - e_y
    entropy_i = lse_i - sum_j p_ij z_ij    dloss/de_j   = sum_i g_i p_ij h_i - sum_{i: y_i = j} g_i h_i
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from habitus.softmax.backend import KERNELS, SoftmaxBackend, choose_backend
from habitus.softmax.cached_scores import (
    CachedScores,
    cached_candidate_gradient,
    cached_forward,
    can_cache_scores,
    release,
)
from habitus.softmax.inputs import (
    candidate_bias,
    cast_to_autocast,
    check_causes,
    check_num_valid,
    check_shapes,
    clamp_targets,
    common_shift,
    find_causes,
    has_nonfinite,
)
from habitus.softmax.latch import Cause, Latch
from habitus.softmax.operators import softmax_backward, softmax_forward
from habitus.softmax.sharded import FullCandidates, ShardedCandidates


class SoftmaxResult(NamedTuple):
    """Per query: the loss in nats; the entropy of the predicted distribution if requested (detached); the target's
    score before correction, differentiable as the loss is; and its log q where there is one. The log-sum-exp of all
    corrected scores is loss + score - log_q."""

    loss: Tensor
    entropy: Tensor | None
    score: Tensor
    log_q: Tensor | None


def candidate_softmax(
    queries: Tensor,
    candidates: Tensor,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    num_valid: int | Tensor | None = None,
    entropy: bool = False,
    backend: SoftmaxBackend | str | None = None,
    group: dist.ProcessGroup | None = None,
    latch: Latch | None = None,
) -> SoftmaxResult:
    """The loss of each query [M] against the candidates, differentiable in queries and candidates.

    `targets` are positions in the candidate table. `log_q` [V] is subtracted from the scores (the log of how likely
    each candidate was to be in the pool). Only the first `num_valid` rows count; a 0-dim tensor may change between
    replays of a captured step. With `group`, candidates are this rank's shard of a table that is sharded over the
    ranks in order, targets are positions in the full table, and the gradients are those of the sum of all ranks'
    losses. With `latch`, bad values are recorded on the device and nothing waits; without it they raise, except
    inside graph capture.
    """
    queries, candidates = cast_to_autocast(queries), cast_to_autocast(candidates)
    if isinstance(num_valid, int) and group is None:
        check_num_valid(num_valid, len(candidates))
        log_q = None if log_q is None else log_q[:num_valid]
        candidates, num_valid = candidates[:num_valid], None
    check_shapes(queries, candidates, targets, log_q)
    if len(queries) == 0 and group is None:
        wide = torch.promote_types(queries.dtype, torch.float32)
        nothing = (queries.sum(1) + candidates[:0].sum()).to(wide)  # keeps the graph alive
        return SoftmaxResult(nothing, nothing.detach() if entropy else None, nothing, None)
    shards = FullCandidates(len(candidates)) if group is None else ShardedCandidates(group, queries, candidates)
    count = None if num_valid is None else torch.as_tensor(num_valid, device=queries.device)
    shift = common_shift(log_q, full=group is None)
    bias = candidate_bias(log_q, shift, count, len(candidates))
    trainable = candidates.requires_grad and torch.is_grad_enabled()
    chosen = choose_backend(queries, biased=bias is not None or trainable, backend=backend)
    eager = latch is None and chosen in KERNELS
    may_cache = backend is None and trainable and (eager or not queries.is_cuda)
    # Fused attention shows bad candidates in its result, so a large table is not read once more to find them.
    rows = candidates[:0] if chosen in KERNELS else candidates
    # Where the host waits anyway, causes are told apart once something is known to be wrong.
    asks_later = eager and group is None and count is None and not _in_a_graph(queries)
    with torch.no_grad():
        limit = shards.num_candidates
        if not asks_later:
            cause = find_causes(queries, rows, targets, log_q, count if group is None else None, limit)
        safe = clamp_targets(targets, limit)
        target_log_q = None if log_q is None else _at_targets(log_q.detach().float(), safe, shards)
    with torch.autocast(queries.device.type, enabled=False):
        loss, entropies, is_finite, score = _CandidateSoftmax.apply(
            queries, candidates, safe, bias, latch, shards, chosen, may_cache
        )
    if asks_later:
        first, last = torch.aminmax(targets)
        bad = has_nonfinite(queries) if log_q is None else has_nonfinite(queries) | has_nonfinite(log_q)
        if is_finite.detach() & ~bad & (first >= 0) & (last < limit):
            score = score if target_log_q is None else score - shift + target_log_q
            return SoftmaxResult(loss, entropies.detach() if entropy else None, score, target_log_q)
        cause = find_causes(queries, rows, targets, log_q, None, limit)
    cause = torch.where(is_finite.detach() | (cause > 0), cause, int(Cause.CANDIDATES_NOT_FINITE))
    ok = check_causes(shards.agree_on_cause(cause), targets, limit) if latch is None else latch.record(cause)
    entropies = torch.where(ok, entropies.detach(), 0) if entropy else None
    # Beyond the dot product a score holds the common shift and the target's own log q.
    score = score if target_log_q is None else score - shift + target_log_q
    return SoftmaxResult(torch.where(ok, loss, 0), entropies, torch.where(ok, score, 0), target_log_q)


def _in_a_graph(queries: Tensor) -> bool:
    """Whether this is being compiled or captured, so that nothing may wait."""
    return torch.compiler.is_compiling() or (queries.is_cuda and torch.cuda.is_current_stream_capturing())


class _CandidateSoftmax(torch.autograd.Function):
    """Loss, entropy and target's score of this rank's queries. The entropy's own gradient is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        latch: Latch | None,
        shards: FullCandidates,
        backend: str,
        may_cache: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, entropy, whether all is finite, and the target's score.

        Saves the average candidate, which is the gradient but for the target.
        """
        all_queries, all_targets = shards.all_gather(queries), shards.all_gather(targets)
        need_mean = ctx.needs_input_grad[0]
        ctx.cached = None
        if may_cache and can_cache_scores(all_queries, candidates):
            (mean, part, entropy), ctx.cached = cached_forward(all_queries, candidates, bias)
        else:
            mean, part, entropy = softmax_forward(all_queries, candidates, bias, backend, need_mean)
        lse = shards.merge_lse(part)
        local, is_local = _local_rows(all_targets, shards.offset, len(candidates))
        hit = _target_scores(all_queries, candidates, local, bias, lse.dtype)
        score = shards.all_sum(torch.where(is_local, hit, 0))
        loss = lse - score
        share = (part - lse).exp()
        # The chain rule of entropy: which rank, then which of its candidates.
        entropy = shards.all_sum(share * (entropy + lse - part))
        is_finite = ~(has_nonfinite(lse) | has_nonfinite(mean))
        ctx.save_for_backward(all_queries, candidates, local, is_local, bias, lse, share, mean)
        ctx.shards, ctx.backend, ctx.latch = shards, backend, latch
        # Nothing may follow that can return its input (.contiguous(), .to()): a compiled step of PyTorch 2.11 then
        # sees two names for one output and hands the gradient to the wrong one. A test compares the gradients.
        return shards.own_rows(loss), shards.own_rows(entropy.clamp_min(0)), is_finite, shards.own_rows(score)

    @staticmethod
    @once_differentiable  # what was saved is constant to autograd: a second derivative would lack most of its terms
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor, _is_finite: Tensor, score_grad: Tensor) -> tuple[Any, ...]:
        """g (o - e_y) for the queries and sum_i g p h - sum_{y_i = j} g h for the candidates.

        A gradient of the target's score itself is subtracted from g in the terms of the target.
        """
        queries, candidates, local, is_local, bias, lse, share, mean = ctx.saved_tensors
        ok = None if ctx.latch is None else ctx.latch.ok
        needs_query_grad, needs_candidate_grad = ctx.needs_input_grad[:2]
        weights = ctx.shards.all_gather(grad.to(lse.dtype))
        target_weights = ctx.shards.all_gather((grad - score_grad).to(lse.dtype))
        cached: CachedScores | None = ctx.cached
        if cached is None:
            query_grad, candidate_grad = backward_where_needed(ctx, queries, candidates, bias, lse, weights, mean)
        else:
            query_grad, candidate_grad = mean, cached_candidate_gradient(cached, queries, weights * share)
            release(cached)
            ctx.cached = None  # should the graph be walked once more, it is computed anew
        grad_queries = grad_candidates = None
        if needs_query_grad:
            if mean.numel():
                # Zero-weight queries get zeros, whatever they hold: they are padding.
                query_grad = torch.where(weights[:, None] == 0, 0, mean * (weights * share)[:, None])
            # A bfloat16 row times a float32 weight is a float32 product: the sum is rounded once, at the end.
            query_grad = query_grad.addcmul_(candidates[local], torch.where(is_local, -target_weights, 0)[:, None])
            grad_queries = ctx.shards.sum_own_rows(query_grad).to(queries.dtype)
            grad_queries = grad_queries if ok is None else torch.where(ok, grad_queries, 0)
        if needs_candidate_grad:
            grad_candidates = _subtract_targets(
                candidate_grad, queries, local, torch.where(is_local, target_weights, 0)
            )
            grad_candidates = grad_candidates.to(candidates.dtype)
            grad_candidates = grad_candidates if ok is None else torch.where(ok, grad_candidates, 0)
        return grad_queries, grad_candidates, None, None, None, None, None, None


def backward_where_needed(
    ctx: Any, queries: Tensor, candidates: Tensor, bias: Tensor | None, lse: Tensor, weights: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The backend's backward pass, unless the saved average is all that is needed."""
    needs_query_grad, needs_candidate_grad = ctx.needs_input_grad[:2]
    if not needs_candidate_grad and (mean.numel() or not needs_query_grad):
        return mean, mean
    return softmax_backward(queries, candidates, bias, lse, weights, ctx.backend, needs_candidate_grad)


def _local_rows(targets: Tensor, offset: int, rows: int) -> tuple[Tensor, Tensor]:
    """The targets as rows of this rank's shard, and which of them are there."""
    local = targets - offset
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def _at_targets(values: Tensor, targets: Tensor, shards: FullCandidates) -> Tensor:
    """The values [V] of this rank's candidates at the targets of this rank's queries, whoever holds them."""
    local, is_local = _local_rows(shards.all_gather(targets), shards.offset, len(values))
    return shards.own_rows(shards.all_sum(torch.where(is_local, values[local], 0)))


def _target_scores(
    queries: Tensor, candidates: Tensor, local: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """<h_i, e_y> + b_y, accumulated in float32 or wider."""
    hit = torch.linalg.vecdot(queries.to(dtype), candidates[local].to(dtype))
    return hit if bias is None else hit + bias[local].to(dtype)


def _subtract_targets(gradient: Tensor, queries: Tensor, local: Tensor, weights: Tensor) -> Tensor:
    """gradient_j - sum_{i: y_i = j} weights_i h_i, the same bits on every run.

    Atomic additions would depend on the order of arrival; the embedding's backward sorts first.
    """
    rows = queries.to(gradient.dtype) * weights[:, None]
    return gradient.sub_(torch.ops.aten.embedding_dense_backward(rows, local, len(gradient), -1, False))
