r"""Two parts of the models of the preset "modern" alone, by fields of `EncoderConfig`.

**A short depthwise convolution** of tokens, with a kernel per channel, mixes neighbours in linear time.

$$y_{i,c} = \sum_{t=0}^{K-1} w_{c,t}\, x_{i + t - (K-1)/2,\, c}$$
with an odd size K, and zeros outside the sequence and at padding tokens. Positions are relative, so padding at either
end changes nothing; masked tokens inside a sequence count as positions. The kernels start near the identity: 1 in the
middle, plus uniform draws within $\tfrac12 K^{-1/2}$.

On a CPU, torch's `conv2d` is fast for float32, but its gradients are slow. The tokens' gradient is the same convolution
with the kernel reversed; the gradient of kernels longer than 13 is summed along the diagonals of products of windows:
with $g$ the gradient of $y$,
$$\frac{\partial}{\partial w_{c,t}} = \sum_i g_{i,c}\, x_{i + t - (K-1)/2,\, c}.$$

Source: So et al. (2021), arXiv:2109.08668, which convolves queries, keys and values after their projections with K = 3.
Departs from it: the convolution looks to both sides, and starts near the identity.

**The norm of the input of a classification head** takes each channel to mean 0 and variance 1 over the sequences.

$$y_{s,c} = \frac{p_{s,c} - m_c}{\sqrt{v_c + \epsilon}}$$
for the pooled tokens p of sequence s, with m and v the mean and variance of channel c: those of the batch in training,
and fixed ones in evaluation, where a sequence is classified by itself.

The mean of many tokens hardly differs from one sequence to another, most of all in a new encoder: the part that all
share is far larger than the part that distinguishes them, and it dominates the gradient of the head.

Source: Ioffe and Szegedy (2015), arXiv:1502.03167, batch normalization, without a scale and shift of its own, since a
linear layer follows. In a training of this library the fixed values are measured before each evaluation, on training
samples as an evaluation sees them, without dropout or corruption: Wu and Johnson (2021), arXiv:2105.07576, section 3.
Elsewhere they are the running means of training.

The batch is what a process computes at once: with several processes or gradient accumulation, each part has its own
mean and variance.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.autograd_modes import for_one_gradient, known_signature

# Largest kernel whose gradient by torch is fast.
_SHORT = 13
# Outputs per window, and numbers over all channels that are processed at a time, about 1 MB.
_WINDOW = 32
_NUMBERS = 2**18


class ShortConvolution(nn.Module):
    """The convolution with K odd taps; `weight` has the layout of `nn.Conv1d(w, w, K, groups=w)`."""

    # The convolution reads neighbouring tokens, which other ranks may hold: see `nystrom.parallel.models`.
    over_ranks = False

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start near the identity."""
        size = self.weight.shape[2]
        nn.init.uniform_(self.weight, -0.5 * size**-0.5, 0.5 * size**-0.5)
        with torch.no_grad():
            self.weight[:, :, size // 2] += 1

    def forward(self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
        """Convolve; tokens that are not real count as zeros."""
        if isinstance(x.shape[1], int) and x.shape[1] == 0:
            return x
        x = x if keep is None else torch.where(keep[..., None], x, 0.0)
        weight = self.weight.to(x.dtype)
        own = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return _Convolution.apply(x, weight) if own and not torch.compiler.is_compiling() else _convolved(x, weight)

    def extra_repr(self) -> str:
        """Channels and kernel size, shown by print."""
        return f"width={self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @known_signature
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _convolved(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), (along_x, along_weight) = ctx.saved_tensors, tangents
        parts = [] if along_x is None else [_convolved(along_x, weight)]
        parts += [] if along_weight is None else [_convolved(x, along_weight)]
        return sum(parts[1:], parts[0])

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (x, weight) = grads, ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            _convolved(grad, weight.flip(2)) if needs_x else None,
            _kernel_gradient(x, grad, weight) if needs_weight else None,
        )


def _convolved(x: Float[Tensor, "b n w"], weight: Float[Tensor, "w 1 k"]) -> Float[Tensor, "b n w"]:
    # On a CPU, `conv2d` over a row is several times as fast as `conv1d`.
    return F.conv2d(_row(x), weight[:, :, None], padding=(0, weight.shape[2] // 2), groups=len(weight))[:, :, 0].mT


def _row(x: Float[Tensor, "b n w"]) -> Float[Tensor, "b w 1 n"]:
    return x.mT[:, :, None]


def _kernel_gradient(
    x: Float[Tensor, "b n w"], grad: Float[Tensor, "b n w"], weight: Float[Tensor, "w 1 k"]
) -> Float[Tensor, "w 1 k"]:
    (b, n, channels), size = x.shape, weight.shape[2]
    half, fill = size // 2, -n % _WINDOW
    if size <= _SHORT:
        outputs = [False, True, False]
        return torch.ops.aten.convolution_backward(
            _row(grad), _row(x), weight[:, :, None], None, [1, 1], [0, half], [1, 1], False, [0, 0], channels, outputs
        )[1][:, :, 0]
    products, group = x.new_zeros(channels, _WINDOW, _WINDOW + size - 1), max(1, _NUMBERS // (n * channels))
    for first in range(0, b, group):
        lines, blocks = (part[first : first + group].permute(2, 0, 1) for part in (x, grad))
        windows = F.pad(lines, (half, half + fill)).unfold(2, _WINDOW + size - 1, _WINDOW).flatten(1, 2)
        products = products + F.pad(blocks, (0, fill)).unflatten(2, (-1, _WINDOW)).flatten(1, 2).mT @ windows
    row = torch.arange(_WINDOW, device=x.device)
    column = row + torch.arange(size, device=x.device)[:, None]
    return products[:, row.expand_as(column), column].sum(-1)[:, None]


class PooledNorm(nn.BatchNorm1d):
    """The norm. A batch of one sequence, which has no variance, uses the fixed values in training as well."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps=eps, affine=False)

    def forward(self, input: Float[Tensor, "b w"]) -> Float[Tensor, "b w"]:
        """Normalise the channels to mean 0 and variance 1."""
        if self.training and len(input) > 1:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)


def pooled_norms(model: nn.Module) -> list[PooledNorm]:
    """The norms of a model: one, or none."""
    return [module for module in model.modules() if isinstance(module, PooledNorm)]
