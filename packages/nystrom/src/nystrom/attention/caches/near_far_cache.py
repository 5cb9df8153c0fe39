"""Causal `near_far` a few tokens at a time, with a cache whose size does not grow with the tokens read.

The outputs are those of `near_far_attention(..., is_causal=True)` on all tokens at once. The cache holds what the next
query sees, see `nystrom.attention.parts.causal`: the tokens of its block and of the block before, or of the first
`exact_up_to`; heavy tokens and clusters of all earlier ones; and the mean queries of the last blocks, which decide
whether a token that leaves the window becomes heavy or joins a cluster.
"""

from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nystrom.attention.options import NearFarOptions, refuse_tolerance
from nystrom.attention.parts.causal import QUERY_MEANS, advance, attend_to_window, row_width, rows_of
from nystrom.checks import check_at_least
from nystrom.precision import at_least_float32, cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import Masks, check_inputs, check_tensor, score_scale


class NearFarCache(nn.Module):
    """The tokens that a layer has read, as a cache; made by `MultiheadAttention.new_cache`.

    Save and load it by its state dict, move it with `to`, and reorder its sequences with `reorder`. It has no gradient.
    All sequences of a batch have read the same number of tokens, all of them real. The dtype is float32 at least.

    Raises:
        ValueError: Invalid sizes, or options that causal attention does not support.
    """

    length: Int[Tensor, ""]
    past: Float[Tensor, "r a f"]
    window: Float[Tensor, "r w f"]
    means: Float[Tensor, "r i d"]
    queries: Float[Tensor, "r d"]

    def __init__(
        self,
        options: NearFarOptions,
        *,
        batch: int,
        num_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        for name, size in (("batch", batch), ("num_heads", num_heads), ("head_dim", head_dim)):
            check_at_least(name, size, 1)
        if options.num_selected:
            raise ValueError(f"num_selected is {options.num_selected}; expected 0: a causal query selects no keys.")
        if options.backend == "triton":
            raise ValueError("backend is 'triton', which has no kernels for a cache: pass backend='torch'.")
        check_compressed(options)
        refuse_tolerance(options.tolerance, "a cache keeps some keys alone")
        self.options, self.num_heads, self.head_dim = options, num_heads, head_dim
        rows, width, size = batch * num_heads, row_width(head_dim, head_dim), options.block_size
        # The first tokens, whose queries are exact, in whole blocks.
        self.exact = options.exact_up_to // size * size
        shapes = {
            "past": (rows, options.num_heavy + options.num_clusters, width),
            "window": (rows, max(self.exact, 2 * size), width),
            "means": (rows, QUERY_MEANS, head_dim),
            "queries": (rows, head_dim),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))
        self.register_buffer("length", torch.zeros((), device=device, dtype=torch.long))

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.past) // self.num_heads

    def forward(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b h t d"], v: Float[Tensor, "b h t e"]
    ) -> Float[Tensor, "b h t e"]:
        """Read the next tokens, one or many, by their queries, keys and values.

        Raises:
            ValueError: Shapes or dtypes that do not match the cache, or a gradient is required, which a cache does not
                support.
        """
        check_inputs(q, k, v, Masks())
        expected = (self.batch, self.num_heads, q.shape[2], self.head_dim)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; expected {expected}, for which the cache was made."
                )
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("a cache has no gradient: read within torch.no_grad(), or train with is_causal=True.")
        with without_autocast(q):
            return self._read_all(*cast_for_autocast(q, k, v))

    def _read_all(
        self, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b h t d"], v: Float[Tensor, "b h t e"]
    ) -> Float[Tensor, "b h t e"]:
        dtype, size = v.dtype, self.options.block_size
        q, k, v = (at_least_float32(x).flatten(0, 1).to(self.past.dtype) for x in (q, k, v))
        q, x = score_scale(q, self.options.scale) * q, rows_of(k, v, None)
        out, start, length = [], 0, int(self.length)
        while start < q.shape[1]:
            stop = min(q.shape[1], start + size - length % size)
            out.append(self._read(q[:, start:stop], x[:, start:stop], length))
            length, start = length + stop - start, stop
        self.length.fill_(length)
        return narrowed(torch.cat(out, dim=1) if out else v, dtype).unflatten(0, (-1, self.num_heads))

    def _read(self, q: Float[Tensor, "r t d"], x: Float[Tensor, "r t f"], length: int) -> Float[Tensor, "r t d"]:
        """Read tokens of one block, after `length` earlier ones."""
        size = self.options.block_size
        exact, inside = length < self.exact, length % size
        # So far the window holds all tokens, or those of the block before and of this one.
        held = length if exact or length < size else size + inside
        stop = held + q.shape[1]
        self.window[:, held:stop] = x
        past = self.past[:, :0] if exact else self.past
        out = attend_to_window(q, self.window[:, :stop], past, self.head_dim)
        self.queries += q.sum(dim=1)
        if inside + q.shape[1] == size:
            self.means.copy_(torch.cat([self.means[:, 1:], self.queries[:, None] / size], dim=1))
            self.queries.zero_()
            blocks = (length + q.shape[1]) // size
            if blocks >= 2:
                leaving, means = self.window[:, stop - 2 * size : stop - size], self.means[:, -blocks:]
                self.past.copy_(advance(self.past, leaving, means, self.options, self.head_dim))
            if length + q.shape[1] >= self.exact:
                self.window[:, :size] = self.window[:, stop - size : stop].clone()
        return out

    def reorder(self, sequences: Int[Tensor, " b"]) -> None:
        """Reorder the sequences, as beam search does: entry i becomes a copy of sequence `sequences[i]`.

        Raises:
            ValueError: The wrong number of sequences, or an index out of range.
        """
        batch = self.batch
        check_tensor("sequences", sequences)
        if sequences.shape != (batch,) or sequences.is_floating_point():
            raise ValueError(f"sequences has shape {tuple(sequences.shape)}; expected {batch} whole numbers.")
        if ((sequences < 0) | (sequences >= batch)).any():
            raise ValueError(f"sequences is {sequences.tolist()}; expected numbers from 0 to {batch - 1}.")
        for buffer in (self.past, self.window, self.means, self.queries):
            whole = buffer.unflatten(0, (batch, self.num_heads))
            whole.copy_(whole[sequences.to(whole.device)])

    def get_extra_state(self) -> dict[str, Any]:
        """The options that it was made with; loading a state with different options raises."""
        state = {**asdict(self.options), "num_heads": self.num_heads}
        # A cache has no exact heads.
        del state["exact_heads"]
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state that was saved with other options."""
        for name, own in self.get_extra_state().items():
            if state.get(name) != own:
                raise ValueError(f"the state is of a cache with {name} = {state.get(name)!r}; expected {own!r}.")

    def extra_repr(self) -> str:
        """Sizes, for print."""
        return f"batch={self.batch}, num_heads={self.num_heads}, length={int(self.length)}"


def check_compressed(options: NearFarOptions) -> None:
    """Raise ValueError for options of heads that would need all keys, which caches and contexts do not keep."""
    if options.exact_heads:
        raise ValueError(
            f"exact_heads is {options.exact_heads}, and exact heads need all keys, of which a cache or context keeps "
            "some: build the layer without exact_heads."
        )
