"""The inputs that all contenders share, and the call that a contender makes with them.

A contender takes the place of attention in a model, between the projections:

- "tokens": queries, keys and values are (b, n, h*d), as projections produce them, and heads are split as views; the
  result is (b, n, h*d), as the output projection expects it. Merging heads is part of the call.
- "heads": all are contiguous (b, h, n, d), in and out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nystrom_papers.bench.options import Layout


@dataclass(frozen=True)
class Sizes:
    """Sizes that all contenders share."""

    batch: int
    heads: int
    width: int
    kernel_size: int
    dtype: torch.dtype
    device: torch.device
    layout: Layout


@dataclass(frozen=True)
class Inputs:
    """Random queries, keys and values of n tokens, and the gradient that a backward pass starts from.

    `leaves` are queries, keys and values; the gradient has the layout of the output.
    """

    n: int
    sizes: Sizes
    leaves: tuple[Tensor, Tensor, Tensor]
    grad: Tensor

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, n, d), as views."""
        if self.sizes.layout == "heads":
            return self.leaves
        q, k, v = (x.unflatten(-1, (self.sizes.heads, self.sizes.width)).transpose(1, 2) for x in self.leaves)
        return q, k, v

    def merged(self, out: Tensor) -> Tensor:
        """The output (b, h, n, d) in the layout of the inputs."""
        return out if self.sizes.layout == "heads" else out.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Call:
    """A contender with its inputs.

    `leaves` are the tensors that require gradients: inputs and weights.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


def make_inputs(n: int, sizes: Sizes, seed: int) -> Inputs:
    """Draw standard normal inputs; the same seed gives every contender the same inputs each time."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.heads, n, sizes.width)
    if sizes.layout == "tokens":
        shape = (sizes.batch, n, sizes.heads * sizes.width)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(sizes.device, sizes.dtype) for _ in range(4))
    return Inputs(n, sizes, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad)


def call_of_heads(inputs: Inputs, layer: nn.Module, convolve: nn.Module | None = None) -> Call:
    """The call of a module over head-split tensors, plus a convolution of the values where there is one."""
    parts = nn.ModuleList([layer] if convolve is None else [layer, convolve])
    parts.to(inputs.sizes.device, inputs.sizes.dtype).eval()

    def forward() -> Tensor:
        skip = {} if convolve is None else {"skip": convolve.weight}
        return inputs.merged(layer(*inputs.heads(), **skip))

    return Call(forward, (*inputs.leaves, *parts.parameters()))


def check_multiple(inputs: Inputs, size: int, *, longer: bool = False) -> None:
    """Raise an error for a length that is no multiple of a size, or not a longer one."""
    if inputs.n % size or (longer and inputs.n == size):
        raise ValueError(f"needs a length that is a multiple of {size}{' and longer' * longer}")
