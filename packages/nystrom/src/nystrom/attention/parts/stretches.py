"""Work on a CPU in stretches of tokens that fit into its cache."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor

# Numbers in a stretch, over all heads: 2 MB of float32, about the L2 cache of a core.
_NUMBERS = 2**19
_SHORTEST = 32

Piece = tuple[slice, slice, slice]
F = TypeVar("F", bound=Callable[..., object])


def runs_in_stretches(*inputs: Tensor) -> bool:
    """Whether to work in stretches: on a CPU, in float32 or float64, with known sizes, and outside a compiler."""
    return not torch.compiler.is_compiling() and all(
        x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and isinstance(x.shape[2], int)
        for x in inputs
    )


def pieces(batch: int, tokens: int, numbers: int, least: int = 1) -> Iterator[Piece]:
    """Cut (batch, heads, tokens, ...) into indices of pieces that fit into the cache.

    Several short sequences form a piece; a long one is cut into stretches of a multiple of 32 tokens. A piece needs
    `numbers` numbers per token, over all heads. There are about `least` pieces or more, of at least 32 tokens.
    """
    length = max(1, min(_NUMBERS // max(1, numbers), -(-batch * tokens // least)) // _SHORTEST) * _SHORTEST
    group = max(1, length // max(1, tokens))
    for first in range(0, batch, group):
        for start in range(0, tokens, length):
            yield slice(first, first + group), slice(None), slice(start, min(tokens, start + length))


def for_one_gradient(backward: F) -> F:
    """Let the `backward` of an autograd.Function raise a helpful error if it is given a batch of gradients.

    For `is_grads_batched`, torch uses an older vmap, which lacks batching rules for operations on views that a backward
    pass writes to. `torch.vmap` over `torch.func.vjp` has all of them.
    """

    @functools.wraps(backward)
    def named(*inputs: object) -> object:
        try:
            return backward(*inputs)
        except RuntimeError as error:
            if "Batching rule not implemented" not in str(error):
                raise
            raise RuntimeError(
                "is_grads_batched is True, which this backward pass does not support: use torch.vmap over the "
                "function that torch.func.vjp returns, or one gradient at a time."
            ) from error

    return cast("F", named)


def known_signature(forward: F) -> F:
    """Keep the signature of the `forward` of an autograd.Function.

    torch binds the arguments of each call to it; computing it each time takes longer than a short stretch.
    """
    forward.__signature__ = inspect.signature(forward)  # pyright: ignore[reportFunctionMemberAccess]
    return forward
