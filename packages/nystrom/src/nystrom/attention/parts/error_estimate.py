r"""The error of an approximation of softmax attention in one call, estimated from exact rows of a few queries.

For each sequence and head, the exact outputs $o_i$ of at most 32 real queries are computed, in two strata: S, the 16
with the largest expected loss, and T, 16 that are spread evenly over the N - 16 others. With the outputs $\hat o_i$,
$$\hat\varepsilon^2 = \frac{\sum_{i \in S} |\hat o_i - o_i|^2 + \frac{N - 16}{16} \sum_{i \in T} |\hat o_i - o_i|^2}
{\sum_{i \in S} |o_i|^2 + \frac{N - 16}{16} \sum_{i \in T} |o_i|^2}$$
estimates the squared relative error $\|\hat O - O\|_F^2 / \|O\|_F^2$ of the head: each sum is that of all queries if T
is drawn at random. Up to 32 real queries it is the error itself.

**The expected loss** finds queries that need a key which few others need: evenly spread queries would miss them. 8 keys
stand out, those with the largest $\|k_j - \tilde k\|_\infty \|v_j - \tilde v\|_\infty$ about the middle of the tokens
($w_j = 1$); 8 more, spread evenly, stand for the rest ($w_j = s / 8$). With a query's softmax $p_i$ over these,
weighted by $w_j$, and its mean $\bar p$ over the queries, the expected squared loss is
$$\sum_j (p_{ij} - \bar p_j)^2\, \|v_j - \tilde v\|_\infty^2 / w_j:$$
what it costs if the query gets the values that queries get on average. A key that all queries attend to costs nothing.

Both choices depend only on the real tokens and their order, and nothing is drawn at random. The cost is 48 scores a
token, and memory is linear in n and s.

Source: the stratified ratio estimator, Cochran, Sampling Techniques (1977), section 6.11. The expected loss is ours.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.exact_limit import may_branch
from nystrom.attention.fused import bias_of, fused_softmax
from nystrom.attention.parts.order import first_in_order, in_order
from nystrom.landmarks import all_real, drawn_ranks, even_draws, insertion_points, middle_of, uniform_positions
from nystrom.precision import at_least_float32, without_autocast
from nystrom.private_torch import tracing_state
from nystrom.shapes import Group, score_scale, zero_masked

# Queries of each stratum, and keys of each kind that the expected loss looks at.
_DRAWN, _KEYS = 16, 8


def within_tolerance(
    core: Callable[..., Tensor], tolerance: float, scale: float | None, *, group: Group = None
) -> Callable[..., Tensor]:
    """A method's core whose heads attend exactly where their estimated error is not below the tolerance.

    Args:
        core: A function of q, k, v and the masks of keys and queries.

    Raises:
        ValueError: Tokens are split across ranks; or, in the call, values are not known (compilers, transforms).
    """
    if group is not None:
        raise ValueError(f"tolerance is {tolerance}, and group is given: ranks hold some keys alone; leave one out.")

    def attend_within(
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        keep: Bool[Tensor, "b s"] | None,
        query_keep: Bool[Tensor, "b n"] | None,
        *rest: Any,
    ) -> Float[Tensor, "b h n e"]:
        check_eager(f"tolerance is {tolerance}", q)
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        out = core(q, k, v, keep, query_keep, *rest)
        # NaN is not below it, either.
        exact = ~(estimate_errors(q, k, v, out, keep, query_keep, scale=scale) < tolerance)
        if not exact.any():
            return out
        of_sequence = None if keep is None else keep[exact.nonzero()[:, 0]]
        heads = (x[exact][:, None] for x in (q, k, v))
        outputs = fused_softmax(*heads, keep=of_sequence, scale=scale)[:, 0]
        return zero_masked(out.index_put((exact,), outputs.to(out.dtype)), query_keep)

    return attend_within


def check_eager(what: str, q: Tensor) -> None:
    """Raise where the values of a call are not known when it runs, `what` for."""
    if not may_branch(q) or tracing_state() is not None:
        raise ValueError(
            f"{what}, which looks at the values of each call: torch.compile, torch.export, traces, CUDA graphs, "
            "transforms of torch.func and tensors without data cannot. Leave it out there."
        )


@torch.no_grad()
def estimate_errors(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    out: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Tensor, "b h"]:
    """The estimated relative error of outputs, for each sequence and head; 0 for a sequence without real queries.

    Args:
        out: The outputs of a method without its skip convolution. Outputs of masked queries are not read.
    """
    if not q.numel() or not k.numel():
        return q.new_zeros(q.shape[:2])
    with without_autocast(q):
        q, out = at_least_float32(q), at_least_float32(out)
        q, k, v = zero_masked(q, query_keep), *(zero_masked(at_least_float32(x), keep) for x in (k, v))
        real = all_real(q) if query_keep is None else query_keep
        places, counts = _draw_queries(_expected_loss(q, k, v, keep, query_keep, score_scale(q, scale)), real)
        rows, theirs = _take(q, places), _take(out, places)
        return _relative_error(theirs, fused_softmax(rows, k, v, keep=keep, scale=scale), counts)


def _relative_error(
    out: Float[Tensor, "b h r e"], exact: Float[Tensor, "b h r e"], counts: Float[Tensor, "b h r"]
) -> Float[Tensor, "b h"]:
    # A place that counts for no query may hold anything.
    counted = (counts > 0)[..., None]
    exact, missed = (torch.where(counted, x, 0.0) for x in (exact, out - exact))
    # The squares of large outputs would overflow.
    largest = torch.maximum(exact.abs(), missed.abs()).amax(dim=(2, 3), keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    top, bottom = ((counts * (x / largest).square().sum(dim=-1)).sum(dim=-1) for x in (missed, exact))
    return torch.where(top > 0, top / bottom, top).sqrt()


def _draw_queries(
    loss: Float[Tensor, "b h n"], real: Bool[Tensor, "b n"]
) -> tuple[Int[Tensor, "b h r"], Float[Tensor, "b h r"]]:
    """Positions of the drawn queries, and how many queries each counts for; 0 for a place without a query."""
    here = torch.arange(loss.shape[2], device=loss.device)
    top, exists = first_in_order(in_order(loss, here, real[:, None]), _DRAWN)
    taken = torch.zeros_like(loss, dtype=torch.long).scatter_add(2, top, exists.long())
    left = (real[:, None] & (taken == 0)).flatten(0, 1)
    running = left.cumsum(dim=-1)
    count, slot = running[:, -1:], torch.arange(_DRAWN, device=loss.device)
    wanted = torch.where(count > _DRAWN, drawn_ranks(count[:, 0], _DRAWN, even_draws(_DRAWN, loss.device)), slot)
    places = insertion_points(running - 1, wanted).clamp(max=loss.shape[2] - 1)
    counts = torch.where(slot < count, count / count.clamp(min=1, max=_DRAWN), 0.0)
    places, counts = (x.unflatten(0, loss.shape[:2]) for x in (places, counts))
    return torch.cat([top, places], dim=2), torch.cat([exists.to(loss), counts.to(loss)], dim=2)


def _expected_loss(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    scale: float,
) -> Float[Tensor, "b h n"]:
    """The logarithm of the expected squared loss of each query, up to a constant of its head."""
    b, h, s, _ = k.shape
    tiny, here = torch.finfo(k.dtype).tiny, torch.arange(s, device=k.device)
    real_keys = all_real(k) if keep is None else keep
    far = [(x - middle_of(x, keep)).abs_().amax(dim=-1).clamp_(min=tiny) for x in (k, v)]
    order = in_order(far[0].log() + far[1].log(), here, real_keys[:, None])
    apart, exists = first_in_order(order, _KEYS)
    even = uniform_positions(real_keys, _KEYS, even_draws(_KEYS, k.device))[:, None].expand(b, h, -1)
    each = (real_keys.sum(dim=-1).clamp(min=1) / _KEYS).to(k)[:, None, None].expand(b, h, _KEYS)
    places, weights = torch.cat([apart, even], dim=2), torch.cat([torch.ones_like(each), each], dim=2)
    bias = weights.log() + torch.cat([bias_of(exists, k.dtype), torch.zeros_like(each)], dim=2)
    p = (q @ (scale * _take(k, places)).mT).add_(bias[:, :, None]).softmax(dim=-1)
    counted = all_real(q) if query_keep is None else query_keep
    mean = zero_masked(p, query_keep).sum(dim=2) / counted.sum(dim=-1).clamp(min=1)[:, None, None]
    cost = far[1].gather(2, places)
    cost = (cost / cost.amax(dim=-1, keepdim=True)).square() / weights
    return p.sub_(mean[:, :, None]).square_().mul_(cost[:, :, None]).sum(dim=-1).clamp_(min=tiny).log_()


def _take(x: Float[Tensor, "b h s d"], places: Int[Tensor, "b h r"]) -> Float[Tensor, "b h r d"]:
    """The tokens at positions that differ between heads; unlike `take_rows`, without a copy of tokens in any layout."""
    return x.gather(2, places[..., None].expand(-1, -1, -1, x.shape[-1]))
