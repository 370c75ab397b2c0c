"""Cross-entropy over any number of candidates, without ever holding the scores (few of them, on a CPU, are held).

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
from habitus.softmax.cached_scores import Kept, give_back, keeps, kept_forward, kept_pull
from habitus.softmax.checks import causes, check_shapes, checked, clamped, not_finite
from habitus.softmax.inputs import candidate_bias, check_count, common_shift, in_autocast_type
from habitus.softmax.latch import Cause, Latch
from habitus.softmax.operators import softmax_backward, softmax_forward
from habitus.softmax.sharded import Alone, Spread


class SoftmaxResult(NamedTuple):
    """Per query: the loss in nats; the entropy of the predicted distribution if it was asked for (detached); the
    target's plain score, differentiable as the loss is; and its log q where there is one. The log-sum-exp of all
    scores, corrected as they are, is loss + score - log_q."""

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
    replays of a captured step. With `group`, candidates are this rank's piece of a table that is spread over the
    ranks in order, targets are positions in the whole table, and the gradients are those of the sum of all ranks'
    losses. With `latch`, bad values are recorded on the device and nothing waits; without it they raise, except
    inside graph capture.
    """
    queries, candidates = in_autocast_type(queries), in_autocast_type(candidates)
    if isinstance(num_valid, int) and group is None:
        check_count(num_valid, len(candidates))
        log_q = None if log_q is None else log_q[:num_valid]
        candidates, num_valid = candidates[:num_valid], None
    check_shapes(queries, candidates, targets, log_q)
    if len(queries) == 0 and group is None:
        wide = torch.promote_types(queries.dtype, torch.float32)
        nothing = (queries.sum(1) + candidates[:0].sum()).to(wide)  # keeps the graph alive
        return SoftmaxResult(nothing, nothing.detach() if entropy else None, nothing, None)
    ranks = Alone(len(candidates)) if group is None else Spread(group, queries, candidates)
    count = None if num_valid is None else torch.as_tensor(num_valid, device=queries.device)
    shift = common_shift(log_q, whole=group is None)
    bias = candidate_bias(log_q, shift, count, len(candidates))
    trainable = candidates.requires_grad and torch.is_grad_enabled()
    chosen = choose_backend(queries, biased=bias is not None or trainable, backend=backend)
    may_keep = backend is None and trainable
    # Fused attention shows bad candidates in its result, so a large table is not read once more to find them.
    rows = candidates[:0] if chosen in KERNELS else candidates
    with torch.no_grad():
        limit = ranks.num_candidates
        cause = causes(queries, rows, targets, log_q, count if group is None else None, limit)
        safe = clamped(targets, limit)
        own_log_q = None if log_q is None else _of_targets(log_q.detach().float(), safe, ranks)
    with torch.autocast(queries.device.type, enabled=False):
        loss, uncertainty, sound, score = _CandidateSoftmax.apply(
            queries, candidates, safe, bias, latch, ranks, chosen, may_keep
        )
    cause = torch.where(sound.detach() | (cause > 0), cause, int(Cause.CANDIDATES_NOT_FINITE))
    ok = checked(cause, targets, limit) if latch is None else latch.record(cause)
    doubt = torch.where(ok, uncertainty.detach(), 0) if entropy else None
    # What the scores hold beside the dot product is the common shift and the target's own log q.
    plain = score if own_log_q is None else score - shift + own_log_q
    return SoftmaxResult(torch.where(ok, loss, 0), doubt, torch.where(ok, plain, 0), own_log_q)


class _CandidateSoftmax(torch.autograd.Function):
    """Loss, entropy and target's score of this rank's queries. What comes back to the entropy is dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        latch: Latch | None,
        ranks: Alone,
        backend: str,
        may_keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, entropy, whether all is finite, and the target's score.

        Saves the average candidate, which is the gradient but for the target.
        """
        everyone, wanted = ranks.gather(queries), ranks.gather(targets)
        need_mean = ctx.needs_input_grad[0]
        ctx.kept = None
        if may_keep and keeps(everyone, candidates):
            (mean, part, entropy), ctx.kept = kept_forward(everyone, candidates, bias)
        else:
            mean, part, entropy = softmax_forward(everyone, candidates, bias, backend, need_mean)
        lse = ranks.merged(part)
        local, held = _local(wanted, ranks.offset, len(candidates))
        hit = _target_scores(everyone, candidates, local, bias, lse.dtype)
        score = ranks.total(torch.where(held, hit, 0))
        loss = lse - score
        share = (part - lse).exp()
        # The chain rule of entropy: which rank, then which of its candidates.
        entropy = ranks.total(share * (entropy + lse - part))
        sound = ~(not_finite(lse) | not_finite(mean))
        ctx.save_for_backward(everyone, candidates, local, held, bias, lse, share, mean)
        ctx.ranks, ctx.backend, ctx.latch = ranks, backend, latch
        # Nothing may follow that can return its input (.contiguous(), .to()): a compiled step of PyTorch 2.11 then
        # sees two names for one output and hands the gradient to the wrong one. A test compares the gradients.
        return ranks.own(loss), ranks.own(entropy.clamp_min(0)), sound, ranks.own(score)

    @staticmethod
    @once_differentiable  # what was saved is constant to autograd: a second derivative would lack most of its terms
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor, _sound: Tensor, of_score: Tensor) -> tuple[Any, ...]:
        """g (o - e_y) for the queries and sum_i g p h - sum_{y_i = j} g h for the candidates.

        A gradient of the target's score itself takes that much off g where g pulls at the target.
        """
        queries, candidates, local, held, bias, lse, share, mean = ctx.saved_tensors
        ok = None if ctx.latch is None else ctx.latch.ok
        for_queries, for_candidates = ctx.needs_input_grad[:2]
        weights = ctx.ranks.gather(grad.to(lse.dtype))
        pulls = ctx.ranks.gather((grad - of_score).to(lse.dtype))
        kept: Kept | None = ctx.kept
        if kept is None:
            left_out, pulled = needed_backward(ctx, queries, candidates, bias, lse, weights, mean)
        else:
            left_out, pulled = mean, kept_pull(kept, queries, weights * share)
            give_back(kept)
            ctx.kept = None  # should the graph be walked once more, it is computed anew
        to_queries = to_candidates = None
        if for_queries:
            if mean.numel():
                # Zero-weight queries get zeros, whatever they hold: they are padding.
                left_out = torch.where(weights[:, None] == 0, 0, mean * (weights * share)[:, None])
            # A bfloat16 row times a float32 weight is a float32 product: the sum is rounded once, at the end.
            left_out = left_out.addcmul_(candidates[local], torch.where(held, -pulls, 0)[:, None])
            to_queries = ctx.ranks.own_total(left_out).to(queries.dtype)
            to_queries = to_queries if ok is None else torch.where(ok, to_queries, 0)
        if for_candidates:
            to_candidates = _subtract_targets(pulled, queries, local, torch.where(held, pulls, 0))
            to_candidates = to_candidates.to(candidates.dtype)
            to_candidates = to_candidates if ok is None else torch.where(ok, to_candidates, 0)
        return to_queries, to_candidates, None, None, None, None, None, None


def needed_backward(
    ctx: Any, queries: Tensor, candidates: Tensor, bias: Tensor | None, lse: Tensor, weights: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The backend's backward pass, unless the saved average is all that is needed."""
    for_queries, for_candidates = ctx.needs_input_grad[:2]
    if not for_candidates and (mean.numel() or not for_queries):
        return mean, mean
    return softmax_backward(queries, candidates, bias, lse, weights, ctx.backend, for_candidates)


def _local(targets: Tensor, offset: int, rows: int) -> tuple[Tensor, Tensor]:
    """The targets as rows of this rank's piece, and which of them are there."""
    local = targets - offset
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def _of_targets(values: Tensor, targets: Tensor, ranks: Alone) -> Tensor:
    """The values [V] of this rank's candidates at the targets of this rank's queries, whoever holds them."""
    local, held = _local(ranks.gather(targets), ranks.offset, len(values))
    return ranks.own(ranks.total(torch.where(held, values[local], 0)))


def _target_scores(
    queries: Tensor, candidates: Tensor, local: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """<h_i, e_y> + b_y, accumulated in float32 or wider."""
    hit = torch.linalg.vecdot(queries.to(dtype), candidates[local].to(dtype))
    return hit if bias is None else hit + bias[local].to(dtype)


def _subtract_targets(pulled: Tensor, queries: Tensor, local: Tensor, weights: Tensor) -> Tensor:
    """pulled_j - sum_{i: y_i = j} weights_i h_i, the same bits on every run.

    Atomic additions would depend on the order of arrival; the embedding's backward sorts first.
    """
    rows = queries.to(pulled.dtype) * weights[:, None]
    return pulled.sub_(torch.ops.aten.embedding_dense_backward(rows, local, len(pulled), -1, False))
