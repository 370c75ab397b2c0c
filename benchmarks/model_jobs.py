"""What the benchmark of the model times: each job builds its model, runs, and leaves nothing behind.

Letters: B windows, L slots, R = B·L rows, h joint_dim.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import plain_model
import torch
from model_inputs import ANCHORS, CELLS, FIELDS, L, T, drawn_batch, drawn_items, step_flops
from model_timing import Step, kernels_of, milliseconds_of, processor_milliseconds, tried, warmed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from habitus.data.fields import Fields
from habitus.model import BatchTensors, BehaviorModel, batch_tensors, item_tensors, layers
from habitus.model.attention import Layout, MaskedWindows, PackedRows, apply_rope, attend
from habitus.recipe import ModelRecipe
from habitus.sizing import Inputs, breakdown

FIRST = ("ours", "plain")  # the main comparison: both compiled and captured


class Job(NamedTuple):
    """One figure to measure. `run(True)` only makes sure that everything is compiled."""

    part: str
    cell: str
    variant: str
    run: Callable[[bool], Any]
    compiles: bool = True

    @property
    def key(self) -> str:
        return f"{self.part}:{self.cell}:{self.variant}"


# -- the contextualizer alone ----------------------------------------------------------------------------------------

# Everything is compiled and captured unless it says eager. 'plain' is a decoder with causal attention over whole
# windows, compiled in one piece: what the anchors were. 'rows symbolic' is how a second model in one process was
# compiled before contextualizers were compiled for their own sizes. The others are things to try.
CONTEXTUALIZERS = (
    "ours",
    "plain",
    "ours, kernels",
    "ours, rows symbolic",
    "ours, library's GELU",
    "ours, rope by the compiler",
    "ours, norms weigh rows",
    "ours, whole windows",
    "ours, whole windows, cuDNN",
    "ours, bf16 weights",
    "ours, six users per window",
    "ours, with AdamW",
    "ours, eager",
)
# Those compile nothing that 'ours' does not.
SAME_CODE = ("ours, kernels", "ours, six users per window", "ours, with AdamW", "ours, eager")


def contextualizer_jobs() -> list[Job]:
    return [
        Job("contextualizer", cell, variant, partial(_contextualizer, cell, variant), variant not in SAME_CODE)
        for variant in CONTEXTUALIZERS
        for cell in ANCHORS
    ]


def _contextualizer(cell: str, variant: str, once: bool) -> dict[str, Any] | None:
    """Milliseconds and 6·p·slots per second, without embedder and softmax."""
    torch._dynamo.reset()
    width, depth, B = map(int, cell.split("/"))
    recipe = ModelRecipe(joint_dim=64, width=width, depth=depth, head_dim=64 if width % 64 == 0 else 32)
    fields = Fields(item=FIELDS.item, event=(), text_len=T)
    model = BehaviorModel(fields, recipe).cuda()
    part = model.contextualizer
    upstream, events = torch.randn(B, L, 64, device="cuda"), torch.randn(B, L, 64, device="cuda")
    windows = batch_tensors(drawn_batch(B, 1000, users=6 if "six users" in variant else 1), "cuda")
    queries: Callable[..., Tensor] = model.queries
    after: list[Step] = []
    with ExitStack() as stack:
        if variant == "plain":
            queries = torch.compile(_plain_decoder(model), dynamic=False)
        elif "symbolic" in variant:
            _compile(model, dynamic=True)
        elif "eager" not in variant:
            model.compile_blocks()
        if "whole" in variant:
            stack.enter_context(_replaced(layers, "attend", partial(_attend_whole, B)))
        if "GELU" in variant:
            stack.enter_context(_replaced(layers, "gelu", F.gelu))
        if "norms" in variant:
            stack.enter_context(_replaced(layers.Block, "forward", _norms_weigh_rows))
        if "rope" in variant:
            stack.enter_context(_replaced(layers, "attend", _attend_rope))
        if "cuDNN" in variant:
            stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        before, give_back = _shadow(part) if "bf16" in variant else (_nothing, _nothing)
        after.append(give_back)
        if "AdamW" in variant:
            after.append(torch.optim.AdamW(part.parameters(), lr=1e-4, fused=True, capturable=True).step)

        def step() -> None:
            before()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found = queries(windows, events)
            found.float().backward(upstream)
            for finish in after:
                finish()

        if once:
            return warmed(step, part)
        if "kernels" in variant:
            return kernels_of(step, part)
        milliseconds = milliseconds_of(step, part, capture="eager" not in variant)
    flops = 6 * breakdown(recipe, Inputs.of(fields)).contextualizer_params * B * L
    return {"milliseconds": milliseconds, "tflops": rate(flops, milliseconds), "anchor_tflops": ANCHORS[cell]}


def _plain_decoder(model: BehaviorModel) -> Callable[..., Tensor]:
    def queries(windows: BatchTensors, events: Tensor) -> Tensor:
        return plain_model.plain_queries(model, windows, events, one_user=True)

    return queries


def _attend_whole(B: int, qkv: Tensor, layout: PackedRows | MaskedWindows, scale: float) -> Tensor:
    """Causal attention over windows that one user fills, through PyTorch's fused operator."""
    assert layout.rope is not None
    query, key, value = apply_rope(qkv, layout.rope).unflatten(0, (B, L)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def _norms_weigh_rows(block: layers.Block, x: Tensor, layout: Layout, dropout_mask: None = None) -> Tensor:
    """A layer whose norms multiply the rows, as is usual."""
    qkv = block.qkv(block.attention_norm(x)).unflatten(-1, (3, block.heads, -1))
    x = x + block.attention_out(attend(qkv, layout).flatten(1))
    return x + block.mlp_out(layers.gelu(block.mlp_up(block.mlp_norm(x))))


def _attend_rope(qkv: Tensor, layout: PackedRows | MaskedWindows, scale: float) -> Tensor:
    """Packed attention over queries and keys that PyTorch's operators rotate."""
    assert layout.rope is not None
    return attend(apply_rope(qkv, layout.rope), layout._replace(rope=None), scale)


def _shadow(part: nn.Module) -> tuple[Step, Step]:
    """Give the matrices bfloat16 copies: how to fill them before a step, and how to hand gradients back after it."""
    owners = [module for module in part.modules() if isinstance(module, layers.Linear)]
    masters = [owner.weight.detach() for owner in owners]
    gradients = [torch.empty_like(master) for master in masters]
    for owner in owners:
        owner.weight = nn.Parameter(owner.weight.detach().bfloat16())

    def fill() -> None:
        torch._foreach_copy_([owner.weight.detach() for owner in owners], masters)

    def give_back() -> None:
        torch._foreach_copy_(gradients, [owner.weight.grad for owner in owners])

    return fill, give_back


# -- the whole model -------------------------------------------------------------------------------------------------

MODELS = ("ours", "plain", "ours, text rows fixed", "plain, captured", "ours, eager", "plain, eager")


def model_jobs() -> list[Job]:
    return [
        Job("model", cell, variant, partial(_whole_model, cell, variant), variant in MODELS[:3])
        for variant in MODELS
        for cell in CELLS
    ]


def _whole_model(cell: str, variant: str, once: bool) -> dict[str, Any] | None:
    """Milliseconds of embedding the unique items and contextualizing the batch, there and back."""
    torch._dynamo.reset()
    ours, plain, model, flops = _steps(CELLS[cell], "cuda")
    with ExitStack() as stack:
        if variant == "plain":
            compiled = torch.compile(plain_model.plain_block)
            stack.enter_context(_replaced(plain_model, "plain_block", compiled))
        elif variant == "ours, text rows fixed":
            _compile(model, dynamic=False)
        elif variant == "ours":
            model.compile_blocks()
        step = ours if variant.startswith("ours") else plain
        if once:
            return warmed(step, model)
        milliseconds = milliseconds_of(step, model, capture="eager" not in variant)
    figures = {"milliseconds": milliseconds}
    return figures | ({"executed_tflops": rate(flops, milliseconds)} if variant.startswith("ours") else {})


def whole_model_on_cpu(cell: tuple[int, ...]) -> dict[str, Any]:
    """Ours and plain in turns, in processor time."""
    ours, plain, model, flops = _steps(cell, "cpu")
    found = processor_milliseconds({"ours": ours, "plain": plain}, model)
    shape = dict(zip(("joint_dim", "width", "depth", "text_depth", "batch_sequences"), cell, strict=True))
    return {
        "ours": {"milliseconds": found["ours"], "executed_tflops": rate(flops, found["ours"]), **shape},
        "plain": {"milliseconds": found["plain"]},
    }


def _steps(cell: tuple[int, ...], device: str) -> tuple[Step, Step, BehaviorModel, float]:
    """Our step, the plain one, the model whose weights both use, and the executed FLOPs of ours."""
    h, width, depth, text_depth, B = cell
    recipe = ModelRecipe(joint_dim=h, width=width, depth=depth, text_depth=text_depth, text_len=T)
    features, batch = drawn_items(B * L // 2), drawn_batch(B, B * L // 2)
    model = BehaviorModel(FIELDS, recipe).to(device)
    items, windows = item_tensors(features, recipe, device), batch_tensors(batch, device)
    tokens = torch.from_numpy(features.tokens).to(device)
    upstream = torch.randn(B, L, h, device=device)
    cast = partial(torch.autocast, device, dtype=torch.bfloat16, enabled=device == "cuda")

    def ours() -> None:
        with cast():
            vectors = model.embed_items(items)
            queries = model.queries(windows, F.embedding(windows.items, vectors))
        queries.backward(upstream)

    def plain() -> None:
        with cast():
            vectors = plain_model.plain_embed_items(model, tokens, items.fields)
            queries = plain_model.plain_queries(model, windows, F.embedding(windows.items, vectors))
        queries.float().backward(upstream)

    return ours, plain, model, step_flops(recipe, features, batch, packed=device == "cuda")


# -- attention alone -------------------------------------------------------------------------------------------------


def attention_jobs() -> list[Job]:
    """Short texts and packed histories, forward and backward: ours and the usual forms."""
    jobs = [Job("attention", "", f"text, joint_dim {h}", partial(_text_attention, h), False) for h in (48, 136)]
    return jobs + [
        Job("attention", "", f"windows, width {w}, heads of {d}", partial(_window_attention, w, d), False)
        for w, d in ((128, 32), (448, 32), (320, 64))
    ]


def _text_attention(h: int, once: bool, items: int = 32_768) -> dict[str, Any]:
    from habitus.sizing.structure import text_heads

    features = drawn_items(items)
    recipe = ModelRecipe(joint_dim=h, width=32, depth=1)
    packed = item_tensors(features, recipe, "cuda").text
    assert packed is not None
    heads = text_heads(h)
    qkv = torch.randn(len(packed.tokens), 3, heads, h // heads, device="cuda", dtype=torch.bfloat16)
    padded = torch.randn(3, items, heads, T, h // heads, device="cuda", dtype=torch.bfloat16)
    mask = torch.from_numpy(features.tokens != 0).cuda()[:, None, None, :]
    starts = torch.cat([packed.starts, packed.starts.new_tensor([len(packed.tokens)])]).int()
    forms = {
        "ours": _there_and_back(lambda x: attend(x, packed.layout), qkv),
        "padded, masked": _there_and_back(lambda x: F.scaled_dot_product_attention(*x, attn_mask=mask), padded),
    }
    if (h // heads) % 8 == 0:
        forms["flash, variable length"] = _there_and_back(lambda x: _flash(x, starts, T, causal=False), qkv)
    return forms


def _window_attention(width: int, head_dim: int, once: bool, B: int = 256) -> dict[str, Any]:
    windows = batch_tensors(drawn_batch(B, 1000, users=4), "cuda")
    one_user = batch_tensors(drawn_batch(B, 1000, users=1), "cuda")
    qkv = torch.randn(B * L, 3, width // head_dim, head_dim, device="cuda", dtype=torch.bfloat16)
    packed, whole = (PackedRows.causal(tensors.boundaries, B * L) for tensors in (windows, one_user))

    def fused(x: Tensor) -> Tensor:
        query, key, value = x.unflatten(0, (B, L)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    forms: dict[str, Any] = {
        "ours": _there_and_back(lambda x: attend(x, packed), qkv),
        "flash, variable length": _there_and_back(lambda x: _flash(x, windows.boundaries, L, causal=True), qkv),
        "ours, one user": _there_and_back(lambda x: attend(x, whole), qkv),
        "flash, one user": _there_and_back(fused, qkv),
    }
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forms["cuDNN, one user"] = _there_and_back(fused, qkv)
    flexible = partial(FlexWindows, windows.boundaries, B)
    forms["FlexAttention, largest difference to ours"] = tried(
        lambda: (flexible()(qkv).float() - attend(qkv, packed).float()).abs().max().item()
    )
    forms["FlexAttention"] = tried(lambda: _there_and_back(flexible(), qkv))
    # Every batch has users of its own, so that in training the mask is made at each step.
    forms["FlexAttention, mask included"] = tried(lambda: _there_and_back(lambda x: flexible()(x), qkv))
    for name in ("FlexAttention", "FlexAttention, mask included"):  # ours is kept where this is 1.1 or more
        if isinstance(forms[name], float):
            forms[f"{name}, over ours"] = round(forms[name] / forms["ours"], 2)
    return forms


class FlexWindows:
    """PyTorch's FlexAttention over windows [B·L, 3, H, d] whose users do not see each other, compiled once."""

    _attend = staticmethod(torch.compile(flex_attention, dynamic=False))
    _make_mask = staticmethod(torch.compile(create_block_mask, dynamic=False))

    def __init__(self, boundaries: Tensor, B: int, *, compiled: bool = True) -> None:
        self.boundaries, self.B, self.compiled = boundaries, B, compiled
        self.mask = self._mask()

    def __call__(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.unflatten(0, (self.B, -1)).permute(2, 0, 3, 1, 4)
        out = (self._attend if self.compiled else flex_attention)(query, key, value, block_mask=self.mask)
        return out.transpose(1, 2).flatten(0, 1)  # type: ignore[union-attr]

    def _mask(self) -> BlockMask:
        row = torch.arange(self.B * L, dtype=torch.int32, device=self.boundaries.device)
        segment = torch.searchsorted(self.boundaries, row, right=True, out_int32=True).view(self.B, L)

        def seen(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (segment[b, i] == segment[b, j])

        make = self._make_mask if self.compiled else create_block_mask
        return make(seen, self.B, None, L, L, device=str(row.device))


def tile_jobs() -> list[Job]:
    """Our attention over whole windows with other tiles and more stages of prefetching."""
    shapes = {"192/4/128": (192, 128, 64), "320/6/256": (320, 256, 64), "1e17": (384, 256, 32)}
    return [
        Job(
            "tiles",
            cell,
            f"{M}x{N}, {warps} warps, {stages} stages",
            partial(_tile, *shape, M, N, warps, stages),
            False,
        )
        for cell, shape in shapes.items()
        for M, N, warps in ((64, 32, 4), (64, 64, 4), (128, 64, 8), (128, 32, 4))
        for stages in (2, 3, 4)
    ]


def _tile(width: int, B: int, head_dim: int, M: int, N: int, warps: int, stages: int, once: bool) -> dict[str, Any]:
    from habitus.model import kernels

    usual = kernels._options

    def options(qkv: Tensor) -> dict[str, Any]:
        return usual(qkv) | {"M": M, "N": N, "num_warps": warps, "num_stages": stages}

    layout = PackedRows.causal(batch_tensors(drawn_batch(B, 1000, users=1), "cuda").boundaries, B * L)
    qkv = torch.randn(B * L, 3, width // head_dim, head_dim, device="cuda", dtype=torch.bfloat16)
    with _replaced(kernels, "_options", options):
        return {"milliseconds": _there_and_back(lambda x: attend(x, layout), qkv)}


def _flash(qkv: Tensor, boundaries: Tensor, longest: int, *, causal: bool) -> Tensor:
    query, key, value = qkv.unbind(1)
    return torch.ops.aten._flash_attention_forward(
        query, key, value, boundaries, boundaries, longest, longest, 0.0, causal, False
    )[0]


def _there_and_back(attention: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Milliseconds of one call and its gradient, captured."""
    holder = nn.Module()
    holder.x = nn.Parameter(x)

    def step() -> None:
        out = attention(holder.x)
        out.backward(torch.ones_like(out))

    return milliseconds_of(step, holder, capture=True)


# -- what they share -------------------------------------------------------------------------------------------------


def _compile(model: BehaviorModel, *, dynamic: bool) -> None:
    """`compile_blocks` with one answer for all pieces to whether sizes are symbols."""
    plain = torch.compile
    with _replaced(torch, "compile", lambda *given, **options: plain(*given, **options | {"dynamic": dynamic})):
        model.compile_blocks()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def _nothing() -> None:
    pass


def rate(flops: float, milliseconds: float) -> float:
    """TFLOP/s."""
    return float(f"{flops / milliseconds / 1e9:.4g}")
