"""The skip convolution across ranks; see `nystrom.attention.skip`.

Each rank fetches half a kernel's width of values from either neighbour.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.skip import NEEDS_SAME_TOKENS, check_kernel, depthwise_skip
from nystrom.parallel.agreement import agree, check_group, facts_of
from nystrom.parallel.communication import Ranks
from nystrom.parallel.halo import with_halo
from nystrom.parallel.positions_over_ranks import Tokens, find_tokens
from nystrom.precision import cast_for_autocast, without_autocast
from nystrom.shapes import Group, Masks, check_keep, check_same_tokens, zero_masked


def skip_over_ranks(
    ranks: Ranks,
    keys: Tokens,
    v: Float[Tensor, "b h n e"],
    weight: Float[Tensor, "h 1 taps 1"],
    to: Float[Tensor, "b h n e"],
) -> Float[Tensor, "b h n e"]:
    """`depthwise_skip` of the values of all ranks, added to the attention `to` of this rank's queries.

    The caller must zero padding tokens; values are zeros where they are not real.
    """
    half, n = weight.shape[2] // 2, to.shape[2]
    around = with_halo(ranks, keys, v, half, half)
    wide = torch.nn.functional.pad(to, (0, 0, half, around.shape[2] - half - n))
    return depthwise_skip(around, weight, to=wide)[:, :, half : half + n]


def add_skip_over_ranks(
    group: Group,
    v: Float[Tensor, "b h n e"],
    weight: Float[Tensor, "h 1 taps 1"],
    q: Float[Tensor, "b h n d"],
    masks: Masks,
    to: Float[Tensor, "b h n e"],
) -> Float[Tensor, "b h n e"]:
    """The attention `to` of all ranks, with the convolution of their values added.

    Raises:
        ValueError: Shapes, masks or a kernel that do not match, or that differ between ranks.
    """
    ranks, refusal = check_group(group), None
    try:
        check_kernel(v, weight)
        check_same_tokens(NEEDS_SAME_TOKENS, q, v, masks)
        check_keep("keep", masks.keep, v, "v")
    except ValueError as error:
        refusal = error
    keep = masks.keep
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
        return ranks.end_with(zero_masked(skip_over_ranks(ranks, tokens, v, weight, to), keep))
