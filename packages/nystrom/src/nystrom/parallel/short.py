"""Exact attention for short sequences that are split across ranks; see `nystrom.attention.exact_limit`.

At most m tokens fit into the space of the landmarks, so every rank holds all of them. All ranks know which sequences
are short; if none is, nothing is exchanged.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.landmarks import take as take_places
from nystrom.parallel.communication import Ranks
from nystrom.parallel.positions_over_ranks import Tokens, take_first


@dataclass(frozen=True, eq=False)
class ShortSequences:
    """The short sequences of a batch, and what replaces their landmarks."""

    m: int  # Landmarks
    queries: Tokens  # Positions of the queries
    keys: Tokens  # Positions of the keys
    few_keys: Bool[Tensor, "b 1 1 1"] | None  # Sequences of at most m real keys; None if there are none
    few_queries: Bool[Tensor, "b 1 1 1"] | None  # Other sequences, of at most m real queries; None if there are none

    def queries_as_landmarks(
        self, ranks: Ranks, landmarks: Float[Tensor, "b h m d"], q: Float[Tensor, "b h n d"]
    ) -> Float[Tensor, "b h m d"]:
        """The landmarks that attend to the keys: the queries themselves, if there are few."""
        return self._replace(ranks, self.few_queries, landmarks, self.queries, q)

    def keys_as_landmarks(
        self, ranks: Ranks, landmarks: Float[Tensor, "b h m d"], k: Float[Tensor, "b h s d"]
    ) -> Float[Tensor, "b h m d"]:
        """The landmarks that the queries attend to: the keys themselves, if there are few."""
        return self._replace(ranks, self.few_keys, landmarks, self.keys, k)

    def values_as_middle(
        self, ranks: Ranks, middle: Float[Tensor, "b h m e"], v: Float[Tensor, "b h s e"]
    ) -> Float[Tensor, "b h m e"]:
        """The values that the queries average: the values of the keys, if there are few."""
        return self._replace(ranks, self.few_keys, middle, self.keys, v)

    def identity_where_short(self, a: Float[Tensor, "b h m m"]) -> Float[Tensor, "b h m m"]:
        """The matrix of the landmarks; the identity for short sequences, which do not need its inverse."""
        eye = torch.eye(self.m, dtype=a.dtype, device=a.device)
        for few in (self.few_keys, self.few_queries):
            a = a if few is None else torch.where(few, eye, a)
        return a

    def real_landmarks(self) -> Bool[Tensor, "b m"] | None:
        """The landmarks that the queries attend to: all, or as many as there are keys."""
        if self.few_keys is None:
            return None
        place = torch.arange(self.m, device=self.keys.count.device)
        return (place < self.keys.count[:, None]) | ~self.few_keys[:, 0, :, 0]

    def results(self, out: Float[Tensor, "b h n e"], right: Float[Tensor, "b h m e"]) -> Float[Tensor, "b h n e"]:
        """The outputs: the results of the right factor, if there are few queries."""
        if self.few_queries is None:
            return out
        mine = take_places(right, self.queries.order.clamp(0, self.m - 1))
        return torch.where(self.few_queries, mine.to(out.dtype), out)

    def _replace(self, ranks: Ranks, few: Tensor | None, landmarks: Tensor, tokens: Tokens, x: Tensor) -> Tensor:
        if few is None:
            return landmarks
        return torch.where(few, take_first(ranks, tokens, x.to(landmarks.dtype), self.m), landmarks)


def find_short(queries: Tokens, keys: Tokens, m: int) -> ShortSequences:
    """The short sequences of a batch."""
    few_keys, few_queries = (tokens.count <= m for tokens in (keys, queries))
    few_queries = few_queries & ~few_keys
    few = (few[:, None, None, None] if bool(few.any()) else None for few in (few_keys, few_queries))
    return ShortSequences(m, queries, keys, *few)
