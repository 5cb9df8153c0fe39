r"""The skip of Nyströmformer: a depthwise convolution of the values along the tokens, added to the attention.

$$\mathrm{skip}_i = \sum_{t=0}^{K-1} w_t\, v_{i + t - (K-1)/2}$$
with one kernel w of odd size K per head, shared by its channels, and zeros outside the sequence and at padding tokens.
Positions are relative, so padding at either end changes nothing; masked tokens inside a sequence count as positions.

On an accelerator and in export this is `conv2d`. On a CPU, `conv2d` with one channel per head is slower than the
attention itself, its backward pass slower still, and its kernel gradient wrong at some lengths (torch 2.13 with oneDNN
on AVX-512, for example: 76 tokens, K = 33). There, one of two forms is used:

- float32 values are convolved channels-last: the channels of all heads together if they are stored side by side,
  otherwise one head at a time;
- in other dtypes, without oneDNN, in a compiler, and for fewer than 4,096 tokens stored head by head, the kernel
  becomes a small banded matrix (T x (T + K - 1), one per head) that multiplies overlapping windows of the values.

The gradient of the values is the same convolution with the kernel reversed; that of the kernel is a product of windows
in every dtype.

Source: Xiong et al. (2021), arXiv:2102.03902, Fig. 4.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.parts.stretches import Piece, for_one_gradient, known_signature, pieces
from nystrom.checks import check_at_least
from nystrom.precision import accumulator, at_least_float32, cast_for_autocast, without_autocast
from nystrom.shapes import check_keep, check_tensor, zero_masked

# The message of `nystrom.shapes.check_same_tokens` if a skip is requested.
NEEDS_SAME_TOKENS = (
    "the skip convolution adds values to queries of the same positions, in self-attention: pass skip=None, or "
    "keep alone as the mask of both"
)
# Number of tokens from which a convolution per head is faster than the band.
_LONG = 4096
# T, the outputs per window: the band computes T + K - 1 products per output, of which K are needed.
_WINDOW = 16


def depthwise_skip(
    v: Float[Tensor, "b h n e"],
    weight: Float[Tensor, "h 1 k 1"],
    *,
    keep: Bool[Tensor, "b n"] | None = None,
    to: Float[Tensor, "b h n e"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Convolve each channel of the values along the tokens with the kernel of its head.

    Args:
        v: Values.
        weight: One kernel per head, of odd size, in the layout of `nn.Conv2d(h, h, (k, 1), groups=h)`.
        keep: Real tokens; None if all are. Padding counts as zeros and gives zeros.
        to: The attention output to which the result is added; None for the convolution alone.

    Raises:
        ValueError: An even kernel, the wrong number of heads, or a mask or `to` that does not match.
    """
    check_kernel(v, weight)
    check_keep("keep", keep, v, "v")
    if to is not None and to.shape != v.shape:
        raise ValueError(f"to has shape {tuple(to.shape)} but v has {tuple(v.shape)}: the convolution keeps its shape.")
    v, weight = cast_for_autocast(v, weight)
    with without_autocast(v):
        v, weight = zero_masked(v, keep), weight.to(v.dtype)
        if v.device.type != "cpu" or torch.compiler.is_exporting():
            out = F.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
        elif torch.compiler.is_compiling():
            # The compiler differentiates plain products itself, and plans their copies.
            out = _by_band(v, weight[:, 0, :, 0])
        elif to is not None and keep is None and to.dtype == v.dtype:
            return with_skip(v, weight, to)[1]
        else:
            out = with_skip(v, weight)[1]
        out = zero_masked(out, keep)
        return out if to is None else out + to


def with_skip(
    v: Float[Tensor, "b h n e"], weight: Float[Tensor, "h 1 k 1"], to: Float[Tensor, "b h n e"] | None = None
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n e"]]:
    """The values, and their `depthwise_skip` on a CPU, a new tensor that may be modified in place.

    Both share one gradient of the values, and the gradient of the convolution is added to it in place. So use the
    returned values only in operations that allocate a new gradient for them, as attention does.

    Args:
        v: Values; zeros at padding tokens.
        weight: See `depthwise_skip`.
        to: Tensor to which the convolution is added; not modified.
    """
    return _Convolution.apply(v, weight.to(v.dtype)[:, 0, :, 0], to)


def check_kernel(v: Tensor, weight: Tensor) -> None:
    """Check that a kernel matches the values.

    Raises:
        ValueError: Wrong axes, an even size, or a different number of heads.
    """
    for name, x in (("v", v), ("weight", weight)):
        check_tensor(name, x)
    if weight.ndim != 4 or weight.shape[1] != 1 or weight.shape[3] != 1 or weight.shape[2] % 2 == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (heads, 1, odd kernel size, 1).")
    if v.ndim != 4 or v.shape[1] != weight.shape[0]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected (b, h, n, e) with h = {weight.shape[0]} heads.")


class DepthwiseSkip(nn.Module):
    """The skip as a layer; `weight` has the layout and the initial values of `nn.Conv2d(h, h, (k, 1), groups=h)`."""

    def __init__(self, num_heads: int, kernel_size: int):
        super().__init__()
        check_at_least("num_heads", num_heads, 1)
        check_at_least("conv_kernel_size", kernel_size, 1)
        if kernel_size % 2 == 0:
            raise ValueError(
                f"conv_kernel_size is {kernel_size}; expected an odd number, so that a token has a middle."
            )
        self.weight = nn.Parameter(torch.empty(num_heads, 1, kernel_size, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly within 1 / sqrt(kernel size)."""
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        v: Float[Tensor, "b h n e"],
        *,
        keep: Bool[Tensor, "b n"] | None = None,
        to: Float[Tensor, "b h n e"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Convolve, and add; see `depthwise_skip`."""
        return depthwise_skip(v, self.weight, keep=keep, to=to)

    def extra_repr(self) -> str:
        """Heads and kernel size, shown by print."""
        return f"num_heads={self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"


class _Convolution(torch.autograd.Function):
    """Returns the values and their convolution.

    The values are passed through so that they have a single gradient, to which that of the convolution is added in
    place.
    """

    @staticmethod
    @known_signature
    def forward(v: Tensor, w: Tensor, to: Tensor | None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(v)
        for piece, part in _convolved(v, w):
            if to is None:
                out[piece].copy_(part)
            else:
                torch.add(to[piece], part, out=out[piece])
            # Freed before the next is made.
            del part
        return v.view_as(v), out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0], inputs[1])

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_v, grad), (v, w) = grads, ctx.saved_tensors
        if grad is None:
            return grad_v, None, None
        needs_v, needs_w, needs_to = ctx.needs_input_grad
        grad_to = grad if needs_to else None
        grad_w = _kernel_gradient(v, grad, w.shape[1]).to(w.dtype) if needs_w else None
        if not needs_v:
            return None, grad_w, grad_to
        if torch.is_grad_enabled():
            more = _by_band(grad, w.flip(1))
            return more if grad_v is None else more + grad_v, grad_w, grad_to
        grad_v = torch.zeros_like(v) if grad_v is None else grad_v
        for piece, part in _convolved(grad, w.flip(1)):
            grad_v[piece].add_(part)
            del part
        return grad_v, grad_w, grad_to

    @staticmethod
    def vmap(info, in_dims, v, w, to):  # pyright: ignore[reportIncompatibleMethodOverride]
        def plain(v: Tensor, w: Tensor, to: Tensor | None) -> tuple[Tensor, Tensor]:
            out = _by_band(v, w)
            return v.view_as(v), out if to is None else out + to

        return torch.vmap(plain, in_dims)(v, w, to), (0, 0)


def _by_band(v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]) -> Float[Tensor, "b h n e"]:
    whole = (slice(None), slice(None), slice(0, v.shape[2]))
    if 0 in (v.shape[0], v.shape[2]):
        return v * w.sum()
    windows = torch.stack([_windows(x[None], whole, w.shape[1]) for x in v])
    return (_band(w)[:, None] @ windows).flatten(2, 3)[:, :, : v.shape[2]]


def _convolved(
    v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]
) -> Iterator[tuple[Piece, Float[Tensor, "g h p e"]]]:
    """The convolution of values, a piece at a time."""
    b, h, n, e = v.shape
    # The channels that are adjacent in memory: those of all heads, token by token, or those of one head.
    together = h if v.stride(1) < v.stride(2) else 1
    by_band = v.dtype != torch.float32 or not torch.backends.mkldnn.is_available()
    if by_band or (together == 1 and n < _LONG):
        band = _band(w)
        for piece in pieces(b, n, h * e):
            yield piece, _by_windows(v, band, piece, w.shape[1])
        return
    for first in range(0, h, together):
        heads = slice(first, first + together)
        kernels = w[heads].repeat_interleave(e, dim=0)[:, None, None]
        for sequences, _, tokens in pieces(b, n, together * e):
            piece = (sequences, heads, tokens)
            yield piece, _by_channels(v, kernels, piece)


def _by_channels(
    v: Float[Tensor, "b h n e"], kernels: Float[Tensor, "c 1 1 k"], piece: Piece
) -> Float[Tensor, "g i p e"]:
    """A channels-last convolution."""
    (sequences, heads, tokens), half = piece, kernels.shape[3] // 2
    first, last = max(0, tokens.start - half), min(v.shape[2], tokens.stop + half)
    part = v[sequences, heads, first:last]
    lines = part.transpose(1, 2).flatten(2).mT[:, :, None]
    lines = F.conv2d(lines, kernels, padding=(0, half), groups=len(kernels))
    return lines[:, :, 0, tokens.start - first : tokens.stop - first].mT.unflatten(2, (-1, v.shape[3])).transpose(1, 2)


def _by_windows(
    v: Float[Tensor, "b h n e"], band: Float[Tensor, "h t l"], piece: Piece, size: int
) -> Float[Tensor, "g h p e"]:
    """Products of overlapping windows with the kernel as a banded matrix."""
    windows, length = _windows(v, piece, size), piece[2].stop - piece[2].start
    (h, count), slot, e = windows.shape[:2], _slot(length, size), v.shape[3]
    out = v.new_empty(h, len(v[piece]) * slot // _WINDOW, _WINDOW, e)
    for i in range(h):
        # One head at a time: over heads, the product would copy the overlapping windows.
        torch.bmm(band[i].expand(count, -1, -1), windows[i], out=out[i, :count])
    return out.view(h, -1, slot, e)[:, :, :length].transpose(0, 1)


def _kernel_gradient(v: Float[Tensor, "b h n e"], grad: Float[Tensor, "b h n e"], size: int) -> Float[Tensor, "h k"]:
    """Sum of each diagonal of grad @ window^T over the windows, in float32 at least."""
    b, h, n, e = v.shape
    nothing = torch.zeros(_WINDOW, _WINDOW + size - 1, dtype=accumulator(v.dtype), device=v.device)
    outer = [nothing] * h
    for piece in pieces(b, n, h * e):
        windows, blocks = _windows(v, piece, size), _windows(grad, piece, size)
        blocks = blocks[:, :, size // 2 : size // 2 + _WINDOW]
        outer = [
            total + torch.bmm(at_least_float32(x), at_least_float32(y).mT).sum(dim=0)
            for total, x, y in zip(outer, blocks, windows, strict=True)
        ]
    row = torch.arange(_WINDOW, device=v.device)
    column = row + torch.arange(size, device=v.device)[:, None]
    return torch.stack(outer)[:, row.expand_as(column), column].sum(-1)


def _windows(v: Float[Tensor, "b h n e"], piece: Piece, size: int) -> Float[Tensor, "h w l e"]:
    """Overlapping windows of T + K - 1 tokens of a piece, T apart, as a view; the first starts (K - 1) / 2 before it.

    Several sequences follow one another, with zeros between them.
    """
    half, (sequences, _, tokens) = size // 2, piece
    first, last = max(0, tokens.start - half), min(v.shape[2], tokens.stop + half)
    line, slot = v[sequences, :, first:last].transpose(0, 1), _slot(tokens.stop - tokens.start, size)
    if slot != last - first:
        front = half - tokens.start + first
        line = F.pad(line, (0, 0, front, slot - front - last + first))
    return line.flatten(1, 2).unfold(1, _WINDOW + size - 1, _WINDOW).mT


def _slot(length: int, size: int) -> int:
    """Tokens that a sequence takes up in a line of windows, including the zeros around it: a multiple of T."""
    return (-(-length // _WINDOW) - (-(size - 1) // _WINDOW)) * _WINDOW


def _band(w: Float[Tensor, "h k"]) -> Float[Tensor, "h t l"]:
    """Row i holds the kernel, shifted right by i."""
    size = w.shape[1]
    place = torch.arange(_WINDOW + size - 1, device=w.device)
    offset = place[None] - place[:_WINDOW, None]
    return torch.where((offset >= 0) & (offset < size), w[:, offset.clamp(0, size - 1)], 0.0)
