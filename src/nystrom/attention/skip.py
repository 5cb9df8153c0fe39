r"""The skip of Nyströmformer: a depthwise convolution of the values along the tokens, added to the attention.

$$\mathrm{skip}_i = \sum_{t=0}^{K-1} w_t\, v_{i + t - (K-1)/2}$$
with one kernel w of odd size K per head, shared by its channels, and zeros outside the sequence and at tokens that
are not real. Positions are relative, so padding at either end changes nothing; holes inside count as positions.

On an accelerator and in export this is `conv2d`. On a CPU, `conv2d` with one channel per head is slower than the
attention itself, its backward slower still, and its kernel gradient wrong at some lengths (torch 2.13 with oneDNN on
AVX-512, for one: 76 tokens, K = 33). There the kernel is laid out as a small banded matrix (T x (T + K - 1), one per
head) that multiplies overlapping windows of the values, forward and backward being plain matrix products; where the
values lie token by token, as a projection leaves them, the forward is a channels-last convolution.

Source: Xiong et al. (2021), arXiv:2102.03902, Fig. 4.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.checks import check_at_least
from nystrom.precision import at_least_float32, cast_for_autocast, without_autocast
from nystrom.shapes import check_keep, zero_masked

# Outputs per window: the band wastes (K - 1) / T of its products, a long window wastes none but leaves the cache.
_WINDOW = 32
# Tokens that a channels-last convolution takes at a time: few enough that what it gives is added from the cache.
_STRETCH = 2048


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
        weight: One kernel per head, of odd size, laid out as `nn.Conv2d(h, h, (k, 1), groups=h)` has it.
        keep: Real tokens; None where all are. Others count as zeros and give zeros.
        to: What the result is added to, the attention; None for the convolution alone. Where no gradient is recorded
            the sum is made in its memory: use what is returned, not `to` itself, from then on.

    Raises:
        ValueError: An even kernel, another number of heads, or a mask or sum that does not fit.
    """
    _check_kernel(v, weight)
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
            kernel = weight[:, 0, :, 0]
            out = (_band(kernel)[:, None] @ _windows(v, kernel.shape[1])).flatten(2, 3)[:, :, : v.shape[2]]
        else:
            to = None if to is None else to.to(v.dtype)
            return _BandedConvolution.apply(v, weight[:, 0, :, 0], keep, to, not torch.is_grad_enabled())
        out = zero_masked(out, keep)
        return out if to is None else out + to


def check_skip(v: Tensor, weight: Tensor, q: Tensor, keep: Tensor | None, query_keep: Tensor | None) -> None:
    """Check that the convolution of the values can be added to the attention of these queries.

    Raises:
        ValueError: A kernel that does not fit the values, or cross-attention.
    """
    _check_kernel(v, weight)
    if q.shape[2] != v.shape[2] or (query_keep is not None and query_keep is not keep):
        raise ValueError(
            f"{q.shape[2]} queries attend to {v.shape[2]} keys as cross-attention, but the skip convolution adds "
            "values to queries of the same positions: pass skip=None, or one mask for both."
        )


def _check_kernel(v: Tensor, weight: Tensor) -> None:
    if weight.ndim != 4 or weight.shape[1] != 1 or weight.shape[3] != 1 or weight.shape[2] % 2 == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (heads, 1, odd kernel size, 1).")
    if v.ndim != 4 or v.shape[1] != weight.shape[0]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected (b, h, n, e) with h = {weight.shape[0]} heads.")


class DepthwiseSkip(nn.Module):
    """The skip as a layer; `weight` has the layout and the start values of `nn.Conv2d(h, h, (k, 1), groups=h)`."""

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
        """Heads and kernel size, for print."""
        return f"num_heads={self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"


class _BandedConvolution(torch.autograd.Function):
    """out = band(w) @ windows(v) + to; the gradient of v is the same with the kernel reversed."""

    @staticmethod
    def forward(ctx, v: Tensor, w: Tensor, keep: Tensor | None, to: Tensor | None, reuse: bool) -> Tensor:
        ctx.save_for_backward(v, w, keep)
        if (
            v.dtype != torch.float32
            or not v.transpose(1, 2).is_contiguous()
            or not torch.backends.mkldnn.is_available()
        ):
            out = zero_masked(_by_windows(v, w), keep)
            return out if to is None else out.add_(to)
        return _by_channels(v, w, keep, to, to if reuse else None)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (v, w, keep) = grads, ctx.saved_tensors
        needs_v, needs_w, _, needs_to, _ = ctx.needs_input_grad
        real = zero_masked(grad, keep)
        grad_v = _BandedConvolution.apply(real, w.flip(1), None, None, False) if needs_v else None
        grad_w = _kernel_gradient(v, real, w.shape[1]).to(w.dtype) if needs_w else None
        return grad_v, grad_w, None, grad if needs_to else None, None


def _by_channels(
    v: Float[Tensor, "b h n e"],
    w: Float[Tensor, "h k"],
    keep: Bool[Tensor, "b n"] | None,
    to: Float[Tensor, "b h n e"] | None,
    out: Float[Tensor, "b h n e"] | None,
) -> Float[Tensor, "b h n e"]:
    """A channels-last convolution of values that lie token by token, a stretch of tokens at a time."""
    (_, h, n, e), half = v.shape, w.shape[1] // 2
    lines = v.transpose(1, 2).flatten(2).mT[:, :, None]
    kernels = w.repeat_interleave(e, dim=0)[:, None, None]
    out = v.new_empty(v.shape[0], n, h, e).transpose(1, 2) if out is None else out
    for start in range(0, n, _STRETCH):
        stop, first, last = min(n, start + _STRETCH), max(0, start - half), min(n, start + _STRETCH + half)
        part = F.conv2d(lines[..., first:last], kernels, padding=(0, half), groups=h * e)
        part = part[:, :, 0, start - first : stop - first].mT.unflatten(2, (h, e)).transpose(1, 2)
        part = zero_masked(part, None if keep is None else keep[:, start:stop])
        place = out[:, :, start:stop]
        if to is None:
            place.copy_(part)
        else:
            torch.add(to[:, :, start:stop], part, out=place)
    return out


def _by_windows(v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]) -> Float[Tensor, "b h n e"]:
    b, h, n, e = v.shape
    windows, band = _windows(v, w.shape[1]), _band(w)
    out = v.new_empty(b, h, windows.shape[2], _WINDOW, e)
    for i in range(b):
        for j in range(h):
            # One head at a time: over heads, matmul would copy the overlapping windows.
            torch.bmm(band[j].expand(windows.shape[2], -1, -1), windows[i, j], out=out[i, j])
    return out.flatten(2, 3)[:, :, :n]


def _kernel_gradient(v: Float[Tensor, "b h n e"], grad: Float[Tensor, "b h n e"], size: int) -> Float[Tensor, "h k"]:
    """Sum of each diagonal of grad @ window^T over the windows, in float32 at least."""
    windows = _windows(v, size)
    blocks = F.pad(grad, (0, 0, 0, windows.shape[2] * _WINDOW - v.shape[2])).unflatten(2, (-1, _WINDOW))
    pairs = zip(blocks.flatten(0, 1), windows.flatten(0, 1), strict=True)
    outer = torch.stack([(at_least_float32(x) @ at_least_float32(y).mT).sum(0) for x, y in pairs])
    outer = outer.unflatten(0, v.shape[:2]).sum(0)
    row = torch.arange(_WINDOW, device=v.device)
    column = row + torch.arange(size, device=v.device)[:, None]
    return outer[:, row.expand_as(column), column].sum(-1)


def _windows(v: Float[Tensor, "b h n e"], size: int) -> Float[Tensor, "b h w l e"]:
    """Overlapping windows of T + K - 1 tokens, T apart, as a view of the padded values."""
    count = -(-v.shape[2] // _WINDOW)
    half = size // 2
    padded = F.pad(v, (0, 0, half, count * _WINDOW - v.shape[2] + half))
    return padded.unfold(2, _WINDOW + size - 1, _WINDOW).mT


def _band(w: Float[Tensor, "h k"]) -> Float[Tensor, "h t l"]:
    """Row i holds the kernel, shifted right by i."""
    size = w.shape[1]
    offset = torch.arange(_WINDOW + size - 1)[None] - torch.arange(_WINDOW)[:, None]
    return torch.where((offset >= 0) & (offset < size), w[:, offset.clamp(0, size - 1)], 0.0)
