"""The skip convolution over ranks: each asks its neighbours for half of its taps; see `nystrom.attention.skip`."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.skip import check_skip, depthwise_skip
from nystrom.parallel.agreement import agree, check_group, facts_of
from nystrom.parallel.communication import Ranks
from nystrom.parallel.halo import with_halo
from nystrom.parallel.tokens import Tokens, find_tokens
from nystrom.precision import cast_for_autocast, without_autocast
from nystrom.shapes import Group, check_keep, zero_masked


def skip_over_ranks(
    ranks: Ranks, queries: Tokens, keys: Tokens, v: Float[Tensor, "b h n e"], weight: Float[Tensor, "h 1 taps 1"]
) -> Float[Tensor, "b h n e"]:
    """`depthwise_skip` of the values of all ranks; results at tokens that are not real are left to the caller.

    Args:
        ranks: The ranks.
        queries: Where the queries stand.
        keys: Where the values stand; the same object in self-attention.
        v: Values of this rank; zeros where they are not real.
        weight: See `depthwise_skip`.
    """
    if queries is not keys:
        raise ValueError(
            "skip is given for cross-attention, but the skip convolution adds values to queries of the same "
            "positions: pass skip=None, or one mask for both, cut alike."
        )
    half, n = weight.shape[2] // 2, v.shape[2]
    return depthwise_skip(with_halo(ranks, keys, v, half, half), weight)[:, :, half : half + n]


def add_skip_over_ranks(
    group: Group,
    v: Float[Tensor, "b h n e"],
    weight: Float[Tensor, "h 1 taps 1"],
    q: Float[Tensor, "b h n d"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    to: Float[Tensor, "b h n e"],
) -> Float[Tensor, "b h n e"]:
    """The attention `to` of all ranks, with the convolution of their values added.

    Raises:
        ValueError: Shapes, masks or the kernel do not fit, or differ between ranks.
    """
    ranks, refusal = check_group(group), None
    try:
        check_skip(v, weight, q, keep, query_keep)
        check_keep("keep", keep, v, "v")
    except ValueError as error:
        refusal = error
    facts = {"the call": "the skip convolution", "keep": "None" if keep is None else "given"} | facts_of("skip", weight)
    lengths = [n for n, _ in agree(ranks, facts, (v.shape[2], v.shape[2]), refusal)]
    if not v.shape[0] or not sum(lengths):
        return to
    to = ranks.begin_after(to)
    v, weight = cast_for_autocast(v, weight)
    with without_autocast(v):
        tokens = find_tokens(ranks, lengths, keep, len(v), v.device)
        v = zero_masked(v, keep)
        v = v if v.shape[2] else torch.nn.functional.pad(v, (0, 0, 0, 1))
        out = skip_over_ranks(ranks, tokens, tokens, v, weight)[:, :, : to.shape[2]]
        return ranks.end_with(to + zero_masked(out, keep))
