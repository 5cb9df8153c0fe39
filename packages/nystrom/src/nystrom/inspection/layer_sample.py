r"""One layer on one sequence: exact attention of sampled queries, compared with each method.

With exact outputs $o_i$ and a method's $\hat o_i$ at the sampled queries, samples hold $\|\hat o_i - o_i\|^2$ over
$\|o_i\|^2$, whose ratio of sums is the squared relative error; and where a method gives rows of its matrix, the total
variation $\tfrac12 \sum_j |\hat p_{ij} - p_{ij}|$. A method runs over the whole sequence, so its time and memory are
those of the method; exact attention costs r times s numbers, for some heads at a time.

The statistics of a head's exact attention matrix are those of r rows $p_i$ of the n x s matrix P, drawn evenly:

- entropy $-\sum_j p_{ij} \ln p_{ij}$, in nats: ln s if a query attends to all keys equally, 0 if to one;
- distance $\sum_j p_{ij} |i - j|$, in real tokens;
- nearness, the weight on the keys at most 32 tokens away;
- effective rank $(\sum_k \sigma_k^2)^2 / \sum_k \sigma_k^4$ in the singular values of P: r if r of them are equal, 1 if
  one dominates. Without the singular values: $\sum_k \sigma_k^2 = \sum_i \|p_i\|^2$ and $\sum_k \sigma_k^4 = \sum_{i,
  j} (p_i \cdot p_j)^2$. An unbiased estimate of the first sum is n / r times the rows'; of the second, n / r times the
  terms of one row, plus n (n - 1) / (r (r - 1)) times those of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.functions import ROWS
from nystrom.attention.fused import softmax_rows
from nystrom.attention.methods.nystrom import nystrom_factors
from nystrom.attention.registry import METHODS
from nystrom.inspection.candidates import Candidate
from nystrom.inspection.sampling import Sample, draw_queries
from nystrom.integrations.layer_calls import LayerCall, attend_by
from nystrom.linalg.pinv import residual
from nystrom.precision import at_least_float32

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


# Numbers of rows that are held at a time, 128 MB in float32.
_AT_ONCE = 2**25


@dataclass(frozen=True)
class MethodSample:
    """A method on one sequence."""

    error: Sample  # Squared errors of the output over squared norms
    variation: Sample | None  # Total variation of the rows, over ones; None where the method gives no rows
    residual: Float[Tensor, " h"] | None  # Residual of the m x m inverse, for each head; None if the method has none


@dataclass(frozen=True)
class LayerSample:
    """A layer on one sequence."""

    size: int  # Real queries
    facts: RowFacts  # Facts of exact attention
    methods: dict[str, MethodSample]  # Key: the method's name


def sample_layer(
    call: LayerCall, candidates: Sequence[Candidate], num_queries: int, generator: torch.Generator
) -> LayerSample | None:
    """Measure a layer on one sequence, at `num_queries` of its queries; None for a sequence without a real token.

    Raises:
        ValueError: A cross-attention layer, inputs that are not finite, or a method that does not support the layer.
    """
    n, s = call.q.shape[2], call.k.shape[2]
    if n != s or not call.masks.is_self:
        raise ValueError(
            f"layer {call.name} attends to another sequence than its own; expected an encoder such as BERT: of an "
            "encoder-decoder, pass model.get_encoder()."
        )
    real = torch.ones(s, dtype=torch.bool, device=call.k.device) if call.keep is None else call.keep[0]
    queries = draw_queries(real.nonzero()[:, 0], num_queries, generator)
    if not len(queries):
        return None
    if not all(torch.isfinite(x[0, :, real]).all() for x in (call.q, call.k, call.v)):
        raise ValueError(
            f"layer {call.name} gets queries, keys or values that are not finite, in {call.q.dtype}: the layers below "
            "it overflow, by themselves or with the method that they run with; load the model in float32."
        )
    size, places = int(real.sum()), real.cumsum(dim=0) - 1
    heads = max(1, _AT_ONCE // (len(queries) * s))
    parts = [_sample_heads(_heads(call, slice(first, first + heads)), candidates, queries, places, size)
             for first in range(0, call.q.shape[1], heads)]  # fmt: skip
    outputs = {}
    for candidate in candidates:
        try:
            outputs[candidate.name] = attend_by(candidate.method, call, candidate.options)[0, :, queries]
        except ValueError as error:
            raise ValueError(f"method {candidate.name} cannot serve layer {call.name}: {error}") from error
    exact = torch.cat([part.exact for part in parts])
    return LayerSample(
        size,
        RowFacts(*(torch.cat(values) for values in zip(*(part.facts for part in parts), strict=True))),
        {
            name: MethodSample(
                Sample(size, (out.to(exact.dtype) - exact).square().sum(dim=-1), exact.square().sum(dim=-1)),
                _ratio_to_one(size, [part.variation.get(name) for part in parts]),
                _joined([part.residual.get(name) for part in parts]),
            )
            for name, out in outputs.items()
        },
    )


@dataclass(frozen=True)
class _Heads:
    """Some heads: exact outputs at the sampled queries, and what is measured on rows."""

    exact: Float[Tensor, "h r e"]
    facts: RowFacts
    variation: dict[str, Float[Tensor, "h r"]]
    residual: dict[str, Float[Tensor, " h"]]


def _sample_heads(
    call: LayerCall, candidates: Sequence[Candidate], queries: Tensor, places: Tensor, size: int
) -> _Heads:
    q, k, v = (at_least_float32(x) for x in (call.q, call.k, call.v))
    rows = softmax_rows(q[:, :, queries], k, keep=call.keep, scale=call.scale)[0]
    variation, residuals = {}, {}
    masks = {"keep": call.keep, "scale": call.scale}
    for candidate in candidates:
        if METHODS[candidate.method].rows:
            function = ROWS[candidate.method]
            # Blocks select keys by their values.
            values = {"v": v} if candidate.options.get("num_selected") else {}
            theirs = function(q, k, queries, **masks, **values, **candidate.options)[0]
            variation[candidate.name] = 0.5 * (theirs - rows).abs().sum(dim=-1)
        if candidate.method == "nystrom":
            factors = nystrom_factors(q, k, **masks, **candidate.options)
            residuals[candidate.name] = residual(factors.a, factors.inverse)[0]
    if call.keep is not None:
        # Fused attention reads no masked value; neither does this product of zero weights.
        v = torch.where(call.keep[:, None, :, None], v, 0.0)
    return _Heads(rows @ v[0], row_facts(rows, places[queries], places, size), variation, residuals)


def _heads(call: LayerCall, some: slice) -> LayerCall:
    return call._replace(q=call.q[:, some], k=call.k[:, some], v=call.v[:, some])


def _ratio_to_one(size: int, parts: Sequence[Tensor | None]) -> Sample | None:
    joined = _joined(parts)
    return None if joined is None else Sample(size, joined, torch.ones_like(joined))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None
