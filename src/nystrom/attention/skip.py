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

from nystrom.precision import at_least_float32, cast_for_autocast, without_autocast
from nystrom.shapes import check_at_least, check_keep, zero_masked

# Outputs per window: the band wastes (K - 1) / T of its products, a long window wastes none but leaves the cache.
_WINDOW = 32


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
        to: What the result is added to, the attention; None for the convolution alone. A sum made here needs no
            tensor of its own.

    Raises:
        ValueError: An even kernel, another number of heads, or a mask or sum that does not fit.
    """
    if weight.ndim != 4 or weight.shape[1] != 1 or weight.shape[3] != 1 or weight.shape[2] % 2 == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (heads, 1, odd kernel size, 1).")
    if v.ndim != 4 or v.shape[1] != weight.shape[0]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected (b, h, n, e) with h = {weight.shape[0]} heads.")
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
        elif keep is None and to is not None and to.dtype == v.dtype:
            return _BandedConvolution.apply(v, weight[:, 0, :, 0], to)
        else:
            out = _BandedConvolution.apply(v, weight[:, 0, :, 0], None)
        out = zero_masked(out, keep)
        return out if to is None else out + to


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
    def forward(ctx, v: Tensor, w: Tensor, to: Tensor | None) -> Tensor:
        ctx.save_for_backward(v, w)
        out = _convolve(v, w)
        return out if to is None else out.add_(to)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (v, w) = grads, ctx.saved_tensors
        needs_v, needs_w, needs_to = ctx.needs_input_grad
        grad_v = _BandedConvolution.apply(grad, w.flip(1), None) if needs_v else None
        grad_w = _kernel_gradient(v, grad, w.shape[1]).to(w.dtype) if needs_w else None
        return grad_v, grad_w, grad if needs_to else None


def _convolve(v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]) -> Float[Tensor, "b h n e"]:
    b, h, n, e = v.shape
    if v.dtype == torch.float32 and v.transpose(1, 2).is_contiguous() and torch.backends.mkldnn.is_available():
        lines = v.transpose(1, 2).flatten(2).mT[:, :, None]
        kernels = w.repeat_interleave(e, dim=0)[:, None, None]
        out = F.conv2d(lines, kernels, padding=(0, w.shape[1] // 2), groups=h * e)
        return out[:, :, 0].mT.unflatten(2, (h, e)).transpose(1, 2)
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
