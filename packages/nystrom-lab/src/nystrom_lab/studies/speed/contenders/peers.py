"""Other packages' Nyström attention as contenders: their own modules, with the projections taken out.

No projection is timed, so that attention is compared with attention. Each module gets its inputs in the form that its
forward method expects:

- `transformers`: `NystromformerSelfAttention`, whose query, key and value projections return the three given tensors.
  It needs n to be divisible by m and known in advance; where n == m it runs exact attention instead, and is not timed.
  Its configuration always has a convolution, which is removed from the module to measure it without the skip.
- `nystrom_attention`: `NystromAttention`, with `to_qkv` and `to_out` replaced by the identity. Its one input has width
  3 h d, which the module splits; so does the gradient of that input.

Both take and return (b, n, h*d): the layout "tokens" only. Neither runs in bfloat16 or float16.
"""

import torch
from torch import Tensor, nn

from nystrom_lab.studies.speed.contenders.inputs import Call, Inputs, check_divides


class Given(nn.Module):
    """A module in the place of a projection, which returns a given tensor."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The given tensor, for any input."""
        return self.x


def transformers_call(inputs: Inputs, num_landmarks: int, skip: bool) -> Call:
    """Nyströmformer's self-attention of Hugging Face transformers.

    Raises:
        ValueError: A layout or length that it cannot take.
    """
    from transformers.models.nystromformer.configuration_nystromformer import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    check_layout(inputs)
    check_divides(inputs.n, num_landmarks)
    sizes = inputs.sizes
    config = NystromformerConfig(
        hidden_size=sizes.heads * sizes.width,
        num_attention_heads=sizes.heads,
        num_landmarks=num_landmarks,
        segment_means_seq_len=inputs.n,
        conv_kernel_size=sizes.kernel_size,
    )
    layer = NystromformerSelfAttention(config).to(sizes.device, sizes.dtype).eval()
    for name, x in zip(("query", "key", "value"), inputs.leaves, strict=True):
        layer.add_module(name, Given(x))
    if not skip:
        del layer.conv
        layer.conv_kernel_size = None
    return Call(lambda: layer(inputs.leaves[0])[0], (*inputs.leaves, *layer.parameters()))


def nystrom_attention_call(inputs: Inputs, num_landmarks: int, skip: bool) -> Call:
    """`NystromAttention` of the package nystrom-attention.

    Raises:
        ValueError: A layout that it cannot take.
    """
    from nystrom_attention import NystromAttention

    check_layout(inputs)
    sizes = inputs.sizes
    layer = NystromAttention(
        sizes.heads * sizes.width,
        dim_head=sizes.width,
        heads=sizes.heads,
        num_landmarks=num_landmarks,
        residual=skip,
        residual_conv_kernel=sizes.kernel_size,
    )
    layer.add_module("to_qkv", nn.Identity())
    layer.add_module("to_out", nn.Identity())
    layer.to(sizes.device, sizes.dtype).eval()
    packed = torch.cat([x.detach() for x in inputs.leaves], dim=-1).requires_grad_()
    return Call(lambda: layer(packed), (packed, *layer.parameters()))


def check_layout(inputs: Inputs) -> None:
    """Raise an error for inputs that are not laid out token by token."""
    if inputs.sizes.layout != "tokens":
        raise ValueError(f"takes the layout 'tokens' only, not {inputs.sizes.layout!r}")
