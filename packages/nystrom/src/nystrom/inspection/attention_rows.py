r"""Statistics of a head's exact attention matrix, from sampled rows.

For r rows $p_i$ of the n x s matrix P, drawn evenly:

- entropy $-\sum_j p_{ij} \ln p_{ij}$, in nats: ln s if a query attends to all keys equally, 0 if to one;
- distance $\sum_j p_{ij} |i - j|$, in real tokens;
- nearness, the weight on the keys at most 32 tokens away;
- effective rank $(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4$ in the singular values of P: r if r of them are equal, 1 if
  one dominates. Without the singular values: $\sum_k \sigma_k^2 = \sum_i \|p_i\|^2$ and $\sum_k \sigma_k^4 = \sum_{i,
  j} (p_i \cdot p_j)^2$. Of the first sum n / r times the rows' is an unbiased estimate; of the second n / r times the
  terms of one row, plus n (n - 1) / (r (r - 1)) times those of two.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Tokens on either side that count as near.
REACH = 32


class RowFacts(NamedTuple):
    """Statistics of sampled queries, for each head."""

    entropy: Float[Tensor, "h r"]  # In nats
    distance: Float[Tensor, "h r"]  # In tokens
    near: Float[Tensor, "h r"]  # Weight on near keys
    rank: Float[Tensor, " h"]  # Effective rank of the whole matrix


def row_facts(
    rows: Float[Tensor, "h r s"], queries: Int[Tensor, " r"], places: Int[Tensor, " s"], size: int
) -> RowFacts:
    """Statistics of the attention of each head on one sequence, from sampled rows of its matrix, which has `size`
    rows.

    `queries` and `places` are the positions of queries and keys among the real tokens; those of masked keys do not
    matter.
    """
    apart = (queries[:, None] - places).abs()
    entropy = torch.special.entr(rows).sum(dim=-1)
    distance = (rows * apart).sum(dim=-1)
    near = (rows * (apart <= REACH)).sum(dim=-1)
    return RowFacts(entropy, distance, near, participation_rank(rows, size))


def participation_rank(rows: Float[Tensor, "h r s"], size: int) -> Float[Tensor, " h"]:
    """The effective rank of a matrix of `size` rows, from some of its rows; see the module."""
    count = rows.shape[1]
    gram = (rows @ rows.mT).double()
    squares = gram.diagonal(dim1=-2, dim2=-1)
    trace = size / count * squares.sum(dim=-1)
    of_one = squares.square().sum(dim=-1)
    of_two = gram.square().sum(dim=(-2, -1)) - of_one
    pairs = size * (size - 1) / (count * (count - 1)) if count > 1 else 0.0
    return trace.square() / (size / count * of_one + pairs * of_two)
