"""Packed sequences: several in one row, a batch of one, with no padding between them.

`cu_seqlens` holds the start of each and the end of the last, as in flash-attn: 0, 5, 12 for sequences of five and seven
tokens. Sequences of similar length are padded to the longest of them and attend in one call, with at most one padding
token per seven real ones. Padding and neighbours change nothing, so each sequence gets the result it would get alone.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from nystrom.private_torch import is_transformed
from nystrom.shapes import has_numbers

# Largest share of padding tokens in a call.
_PADDED = 1 / 8


def check_segments(cu_seqlens: object, x: Shaped[Tensor, "b h n d"]) -> list[int]:
    """The boundaries of a packed batch as Python integers.

    Raises:
        ValueError: Invalid boundaries, or a call inside a traced graph, which cannot depend on their values.
    """
    traced = torch.compiler.is_compiling() or is_transformed()
    if traced or (isinstance(cu_seqlens, Tensor) and not has_numbers(cu_seqlens)):
        raise ValueError(
            "cu_seqlens is given inside torch.compile, torch.export or torch.func, or without numbers (on the meta "
            "device, in FakeTensorMode), and cannot be read there: pad the sequences, and pass keep; or leave this "
            "call out of the graph (torch.compiler.disable)."
        )
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        is_tensor = isinstance(cu_seqlens, Tensor)
        came = f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}" if is_tensor else f"a {type(cu_seqlens).__name__}"
        raise ValueError(f"cu_seqlens is {came}; expected one axis of integers: 0, then the end of each sequence.")
    if x.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens is given for a batch of {x.shape[0]}; expected 1: packed sequences follow one another "
            "in a single row."
        )
    edges, n = cu_seqlens.tolist(), x.shape[2]
    if not edges or edges[0] != 0 or edges[-1] != n or sorted(edges) != edges:
        shown = edges if len(edges) < 9 else f"{edges[:4]} ... {edges[-4:]}"
        raise ValueError(f"cu_seqlens is {shown}; expected to begin at 0, never to decrease, and to end at {n} tokens.")
    return edges


def in_segments(
    attend: Callable[..., Tensor], tensors: Sequence[Tensor], edges: Sequence[int], *, alone: bool = False
) -> Shaped[Tensor, "one h n e"]:
    """Run a function of tensors and `keep` on each sequence of a packed batch.

    Args:
        attend: A function of the tensors of some sequences (r, h, most, d) and their mask, None if all tokens are real;
            returns (r, h, most, e).
        tensors: Packed tokens (1, h, n, d).
        edges: The start of each sequence, and the end of the last.
        alone: Whether each call gets a single sequence, for functions whose results depend on the rest of the batch.
    """
    results, order = [], []
    for sequences in _together(edges, alone=alone):
        place, keep = _places(sequences, tensors[0].device)
        if len(sequences) == 1:
            ((start, end),) = sequences
            out = attend(*(x[:, :, start:end] for x in tensors), keep=None)
        else:
            out = attend(*(x[0][:, place].transpose(0, 1) for x in tensors), keep=None if keep.all() else keep)
        results.append(out.transpose(1, 2)[keep])
        order.append(place[keep])
    back = torch.cat(order).argsort()
    return torch.cat(results)[back].transpose(0, 1)[None]


def _together(edges: Sequence[int], *, alone: bool) -> Iterator[list[tuple[int, int]]]:
    """The start and end of each sequence in each call; empty sequences are left out."""
    some: list[tuple[int, int]] = []
    tokens = 0
    for start, end in sorted(pairwise(edges), key=lambda each: each[0] - each[1]):
        length = end - start
        if not length:
            continue
        if some:
            whole = (some[0][1] - some[0][0]) * (len(some) + 1)
            if alone or whole - tokens - length > _PADDED * whole:
                yield some
                some, tokens = [], 0
        some.append((start, end))
        tokens += length
    if some:
        yield some


def _places(
    sequences: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Int[Tensor, "r most"], Bool[Tensor, "r most"]]:
    """Positions of the tokens of some sequences in the row, and which of them are real."""
    starts = torch.tensor([start for start, _ in sequences], device=device)[:, None]
    lengths = torch.tensor([end - start for start, end in sequences], device=device)[:, None]
    rank = torch.arange(int(sequences[0][1] - sequences[0][0]), device=device)
    return starts + rank.minimum(lengths - 1), rank < lengths
