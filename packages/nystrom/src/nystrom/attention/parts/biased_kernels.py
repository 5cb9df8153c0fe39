"""`biased_blocks` by Triton kernels, for buckets: several heads at a time, and no copies of windows.

Torch makes the far keys, `biased_blocks.far_keys_of_blocks`, and a strip of one number for each distance, so that their
gradients reach values and table. The kernels compute the softmax, and the gradients of what they are given. The
backward pass makes the far keys again.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import MovedTokens
from nystrom.attention.parts.biased_blocks import OfAllHeads, attend_again, far_keys_of_blocks
from nystrom.attention.position_bias import RelativeBuckets
from nystrom.precision import at_least_float32
from nystrom.shapes import score_scale


def attend_by_kernels(tokens: MovedTokens, bias: RelativeBuckets, options: NearFarOptions) -> Float[Tensor, "r t e"]:
    """Self-attention of tokens moved to whole blocks, a head in each row, with a bias of as many heads."""
    settings = OfAllHeads(bias, options, score_scale(tokens.q, options.scale))
    weight = at_least_float32(bias.table).to(at_least_float32(tokens.q[:0]).dtype)
    return attend_again(_attend, settings, tokens.q, tokens.k, tokens.v, weight, *tokens.chosen)


def _attend(
    settings: OfAllHeads,
    q: Float[Tensor, "r t d"],
    k: Float[Tensor, "r t d"],
    v: Float[Tensor, "r t e"],
    weight: Float[Tensor, "h w"],
    heavy: Int[Tensor, "r g"],
    exists: Bool[Tensor, "r g"],
    cluster: Int[Tensor, "r t"],
) -> Float[Tensor, "r t e"]:
    from nystrom.gpu.near_far.near_far_positions import near_far_with_positions

    bias, options, scale = settings
    assert isinstance(bias, RelativeBuckets)
    size, reach, heads = options.block_size, options.reach, len(weight)
    place = torch.arange(q.shape[1], device=q.device)[None, :, None]
    real = torch.ones_like(place[..., 0], dtype=torch.bool)
    wide = at_least_float32(k), at_least_float32(v)
    means, logs, values = far_keys_of_blocks(settings, *wide, weight, exists, cluster, real, place)
    furthest = max(bias.max_distance, size + reach - 1)
    strip = bias.at_distance(weight, torch.arange(-furthest, furthest + 1, device=q.device))
    q, k, v, *chosen = (x.unflatten(0, (-1, heads)) for x in (q, k, v, heavy, exists, cluster))
    given = means, values, logs, *chosen
    return near_far_with_positions(q, k, v, strip, given, block_size=size, reach=reach, scale=scale)
