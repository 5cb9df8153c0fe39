"""Softmax attention as one fused call, and rows of its weights: building blocks of the methods."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.autograd_modes import for_one_gradient, known_signature, needs_graph, pull_back
from nystrom.native import is_plain, is_worth_loops, room_like, run_landmarks, runs_natively
from nystrom.shapes import score_scale

# On a CPU, loops of our own attend from many tokens to few, or from few to many, faster than the fused call.
_FEW, _LEAST_QUERIES = 256, 8


def fused_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n e"]:
    """One fused call for any widths of keys and values; stores nothing of size n x s except a causal mask with `keep`.

    Masked values must be zero: a sequence without a real key then gives zeros. If causal, the first key must be real.
    """
    d, e = q.shape[-1], v.shape[-1]
    scale = score_scale(q, scale)
    if not is_causal and _is_few_and_many(q, k, v):
        return _FewAndMany.apply(q, k, v, keep, scale)[0]
    if d != e or (d % 8 and q.device.type == "cuda"):
        # Fused kernels need equal widths, on CUDA a multiple of 8; zeros change neither the scores nor the values.
        width = -(-max(d, e) // 8) * 8
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if keep is None else unmask_empty_rows(keep)[:, None, None, :]
    if is_causal and mask is not None:
        mask, is_causal = mask & mask.new_ones(q.shape[2], k.shape[2]).tril(), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=is_causal)[..., :e]


def softmax_rows(
    q: Float[Tensor, "b h r d"],
    k: Float[Tensor, "b h s d"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h r s"]:
    """The attention weights of r queries, r x s numbers; zeros for a sequence without a real key."""
    scale = score_scale(q, scale)
    dtype = q.dtype
    if dtype == torch.float16:
        # Scores may overflow float16; fused attention sums them in float32.
        q, k = q.float(), k.float()
    scores = scale * (q @ k.mT)
    if keep is None:
        return scores.softmax(dim=-1).to(dtype)
    weights = scores.masked_fill(~unmask_empty_rows(keep)[:, None, None, :], -torch.inf).softmax(dim=-1)
    return torch.where(keep[:, None, None, :], weights, 0.0).to(dtype)


def softmax_of_landmarks(
    q: Float[Tensor, "b h m d"], k: Float[Tensor, "b h m d"], *, scale: float | None = None
) -> Float[Tensor, "b h m m"]:
    """The attention weights of landmarks, as `softmax_rows`; in one loop on a CPU, for up to 256."""
    if not runs_natively(q, k) or k.shape[2] > _FEW:
        return softmax_rows(q, k, scale=scale)
    # The attention to the unit vectors
    units = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
    return _FewAndMany.apply(q, k, units, None, score_scale(q, scale))[0]


def unmask_empty_rows(keep: Bool[Tensor, "b s"]) -> Bool[Tensor, "b s"]:
    """Unmask all keys of a sequence without a real one: softmax over no keys is NaN, over zero values it gives zero."""
    return keep | ~keep.any(dim=-1, keepdim=True)


def bias_of(may: Bool[Tensor, "*a"], dtype: torch.dtype) -> Float[Tensor, "*a"]:
    """The term to add to scores: 0 where a query may attend to a key, and -inf elsewhere."""
    return torch.zeros_like(may, dtype=dtype).masked_fill(~may, -torch.inf)


def _is_few_and_many(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # First what a compiler traces: there are no numbers to compare.
    if not is_plain(q, k, v):
        return False
    n, s = q.shape[2], k.shape[2]
    few = (0 < s <= _FEW and is_worth_loops(n)) or (_LEAST_QUERIES <= n <= _FEW and is_worth_loops(s))
    return few and runs_natively(q, k, v)


class _FewAndMany(torch.autograd.Function):
    """The loops `landmarks_*` for few keys, and `tokens_*` for few queries; the second output is for the gradient."""

    @staticmethod
    @known_signature
    def forward(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        (b, h, n, d), e, bias = q.shape, v.shape[-1], bias_of_keys(keep, k)
        # In the layout of the queries: a model puts the heads side by side again.
        out, sums = room_like(q) if d == e else q.new_empty(b, h, n, e), q.new_empty(b, h, 1, n)
        if n >= k.shape[2]:
            run_landmarks("landmarks_forward", scale, q=q, landmarks=k, middle=v, bias=bias, out=out)
        else:
            run_landmarks("tokens_forward", scale, q=k, landmarks=q, v=v, bias=bias, out=out, sums=sums)
        return out, sums

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, (q, k, v, keep, out, sums) = grads[0], ctx.saved_tensors
        if needs_graph(grad):
            plain = pull_back(lambda q, k, v: softmax_rows(q, k, keep=keep, scale=ctx.scale) @ v, (q, k, v), grad)
            return *plain, None, None
        made, bias = tuple(room_like(x) for x in (q, k, v)), bias_of_keys(keep, k)
        if q.shape[2] >= k.shape[2]:
            written = dict(zip(("of_q", "of_landmarks", "of_middle"), made, strict=True))
            run_landmarks("landmarks_backward", ctx.scale, q=q, landmarks=k, middle=v, bias=bias, grad=grad, **written)
        else:
            written = dict(zip(("of_landmarks", "of_q", "of_v"), made, strict=True))
            inputs = {"q": k, "landmarks": q, "v": v, "middle": grad, "out": out, "sums": sums, "bias": bias}
            run_landmarks("tokens_backward", ctx.scale, **inputs, **written)
        return *made, None, None


def bias_of_keys(keep: Bool[Tensor, "b s"] | None, k: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h 1 s"] | None:
    """`bias_of` the keys for each head, of zeros where none is real; None if all may be attended to."""
    if keep is None:
        return None
    return bias_of(unmask_empty_rows(keep), k.dtype)[:, None, None].expand(-1, k.shape[1], -1, -1)
