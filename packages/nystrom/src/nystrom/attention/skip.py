r"""The skip of Nyströmformer: a depthwise convolution of the values along the tokens, added to the attention.

$$\mathrm{skip}_i = \sum_{t=0}^{K-1} w_t\, v_{i + t - (K-1)/2}$$
with one kernel w of odd size K per head, shared by its channels, and zeros outside the sequence and at padding tokens.
Positions are relative, so padding at either end changes nothing; masked tokens inside a sequence count as positions.

On an accelerator and in export this is `conv2d`. On a CPU, `conv2d` with one channel per head is slower than the
attention itself, its backward pass slower still, and its kernel gradient wrong at some lengths (torch 2.13 with oneDNN
on AVX-512, for example: 76 tokens, K = 33). There, `nystrom.attention.parts.windows` has other forms. The gradient of
the values is the same convolution with the kernel reversed.

Source: Xiong et al. (2021), arXiv:2102.03902, Fig. 4.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.parts.stretches import Piece, groups_of_pieces, in_threads
from nystrom.attention.parts.windows import Convolution, ConvolutionGradients, by_band, kernel_gradient
from nystrom.autograd_modes import for_one_gradient, known_signature, needs_graph
from nystrom.checks import check_at_least
from nystrom.native import as_rows, dense, room_like, run_landmarks, runs_natively
from nystrom.precision import cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import check_keep, check_tensor, check_weight_device, zero_masked

# The message of `nystrom.shapes.check_same_tokens` if a skip is requested.
NEEDS_SAME_TOKENS = (
    "the skip convolution adds values to queries of the same positions, in self-attention: pass skip=None, or "
    "keep alone as the mask of both"
)


def depthwise_skip(
    v: Float[Tensor, "b h n e"],
    weight: Float[Tensor, "h 1 k 1"],
    *,
    keep: Bool[Tensor, "b n"] | None = None,
    to: Float[Tensor, "b h n e"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Convolve each channel of the values along the tokens with the kernel of its head; float16 is clipped.

    Padding counts as zeros and gives zeros. The result is added to the attention output `to`, if that is given.

    Args:
        weight: One kernel per head, of odd size, in the layout of `nn.Conv2d(h, h, (k, 1), groups=h)`.

    Raises:
        ValueError: An even kernel, the wrong number of heads, or a mask or `to` that does not match.
    """
    check_kernel(v, weight)
    check_keep("keep", keep, v, "v")
    if to is not None and to.shape != v.shape:
        raise ValueError(f"to has shape {tuple(to.shape)} but v has {tuple(v.shape)}: the convolution keeps its shape.")
    v, weight = cast_for_autocast(v, weight)
    with without_autocast(v):
        dtype = v.dtype if to is None else torch.promote_types(v.dtype, to.dtype)
        # The convolution may pass the largest float16 where the sum does not.
        v = zero_masked(v.float() if v.dtype == torch.float16 else v, keep)
        weight = weight.to(v.dtype)
        if v.device.type != "cpu" or torch.compiler.is_exporting():
            out = F.conv2d(v, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
        elif torch.compiler.is_compiling():
            # The compiler differentiates plain products itself, and plans their copies.
            out = by_band(v, weight[:, 0, :, 0])
        elif to is not None and keep is None and to.dtype == v.dtype:
            return _Convolution.apply(v, weight[:, 0, :, 0], to, False)[1]
        else:
            out = _Convolution.apply(v, weight[:, 0, :, 0], None, False)[1]
        out = zero_masked(out, keep)
        return narrowed(out if to is None else out + to, dtype)


def padded_values_and_buffer(
    v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n e"]]:
    """The values, zeros at padding, and memory for their convolution, see `nystrom.attention.parts.landmark_sums`.

    Both share one gradient of the values, and the gradient of the convolution is added to it in place. So use the
    returned values only in operations that allocate a new gradient for them, as attention does.
    """
    return _Convolution.apply(v, w, None, True)


def check_kernel(v: Tensor, weight: Tensor) -> None:
    """Raise ValueError for a kernel of wrong axes, an even size, a different number of heads, or another device."""
    for name, x in (("v", v), ("weight", weight)):
        check_tensor(name, x)
    if weight.ndim != 4 or weight.shape[1] != 1 or weight.shape[3] != 1 or weight.shape[2] % 2 == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (heads, 1, odd kernel size, 1).")
    if v.ndim != 4 or v.shape[1] != weight.shape[0]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected (b, h, n, e) with h = {weight.shape[0]} heads.")
    check_weight_device("weight", weight, v)


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
        attend: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Convolve, and add; see `depthwise_skip`.

        Args:
            attend: Attention that adds the convolution itself, in place of `keep` and `to`: a function of the values
                and the kernel. It runs in this call, around which hooks bring, gather or cast the weights.
        """
        return depthwise_skip(v, self.weight, keep=keep, to=to) if attend is None else attend(v, self.weight)

    def extra_repr(self) -> str:
        """Heads and kernel size, shown by print."""
        return f"num_heads={self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"


class _Convolution(torch.autograd.Function):
    """Returns the values, passed through so that they have one gradient, and their convolution, or memory for it.

    The gradient of the convolution is added to that of the values in place.
    """

    @staticmethod
    @known_signature
    def forward(v: Tensor, w: Tensor, to: Tensor | None, later: bool) -> tuple[Tensor, Tensor]:
        out = room_like(v)
        if not later and runs_natively(v, w, *(() if to is None else (to,))):
            run_landmarks("landmarks_forward", v=v, w=as_rows(w, v), to=to, out=out)
        elif not later:
            convolution = Convolution(v, w)

            def write(some: list[Piece]) -> None:
                for piece in some:
                    part = convolution.at(piece)
                    if to is None:
                        out[piece].copy_(part)
                    else:
                        torch.add(to[piece], part, out=out[piece])
                    # Freed before the next is made.
                    del part

            in_threads(write, _groups(v))
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
            return grad_v, None, None, None
        of_to = grad if ctx.needs_input_grad[2] else None
        if needs_graph(grad_v, grad):
            of_v, of_w = by_band(grad, w.flip(1)), kernel_gradient(v, w, grad)
            return of_v if grad_v is None else of_v + grad_v, of_w, of_to, None
        if runs_natively(v, w, grad, *(() if grad_v is None else (grad_v,))):
            # In place, as no other holds that gradient.
            of_v = grad_v if grad_v is not None and dense(grad_v) is grad_v else room_like(v)
            of_w = v.new_empty(*v.shape[:2], 1, w.shape[1]) if ctx.needs_input_grad[1] else None
            run_landmarks("convolution_backward", grad=grad, v=v, w=as_rows(w, v), to=grad_v, of_v=of_v, of_w=of_w)
            return of_v, None if of_w is None else of_w.sum(dim=(0, 2)), of_to, None
        gradients = ConvolutionGradients(v, w, grad, grad_v, ctx.needs_input_grad[1])
        return *gradients.results(in_threads(gradients.of_pieces, _groups(v, grad))), of_to, None

    @staticmethod
    def vmap(info, in_dims, v, w, to, later):  # pyright: ignore[reportIncompatibleMethodOverride]
        def plain(v: Tensor, w: Tensor, to: Tensor | None) -> tuple[Tensor, Tensor]:
            out = by_band(v, w)
            return v.view_as(v), out if to is None else out + to

        return torch.vmap(plain, in_dims[:3])(v, w, to), (0, 0)


def _groups(v: Float[Tensor, "b h n e"], *more: Tensor) -> list[list[Piece]]:
    return groups_of_pieces(v, v.shape[1] * v.shape[3], *more)
