r"""Softmax attention in which a query sees each far key as the mean of its cluster.

With $c = 1 / \sqrt d$, the near tokens N(i) of query i, the heavy keys G of its head, and $\mu(j)$ the mean key of the
cluster that holds key j,
$$A_{ij} = \frac{e^{s_{ij}}}{\sum_l e^{s_{il}}}, \qquad s_{ij} = \begin{cases}
c\, q_i^\top k_j & j \in N(i) \cup G, \\ c\, q_i^\top \mu(j) & \text{otherwise.} \end{cases}$$
Rows are positive and sum to one, and no token counts twice. The far keys of a cluster share one score, so that one
softmax over $|N(i)| + |G| + m$ keys gives the outputs: a cluster takes part with its mean key, the mean value of
those of its tokens that are not near, and the logarithm of their number added to the score.

- Near: the tokens from the first real one are cut into blocks of `block_size`; all queries of a block see its tokens
  and `reach` more on either side. Padding at either end changes nothing; holes inside count as positions.
- Heavy keys and clusters: see `nystrom.attention.parts.clusters`. The choice has no gradient; means, counts and scores
  have theirs.
- `num_selected`: each block of queries sees r more keys exactly, those whose cluster would cost it most, see
  `nystrom.attention.parts.selected_keys`. N(i) then holds them as well; they leave their cluster for that block.
- Cross-attention, where queries and keys are different tokens, has no near tokens: all queries see the same keys.
- `bias`: a function of positions, such as T5's, is added to the scores, see `nystrom.attention.parts.biased_blocks`.
- `is_causal`: a query sees only tokens up to itself: those of its block and of the block before, and heavy keys and
  clusters of all earlier ones; see `nystrom.attention.parts.causal`. `reach` and `iterations` are not used, and the
  queries of the first `exact_up_to` tokens, in whole blocks, are exact.

**Exact limit.** Exact attention, if all keys are near, heavy or selected, or each cluster holds one key; and
self-attention of at most `exact_up_to` real tokens, where exact attention is faster. Each sequence is decided by
itself.

New here: clusters of all far keys, excluding those near or heavy, in one softmax with the exact keys; and the sampled
k-means.
Related: Transformer-LS (a window and a learned projection in one softmax; Zhu et al. 2021, arXiv:2107.02192),
Scatterbrain (sparse plus low-rank; Chen et al. 2021, arXiv:2110.15343), MRA (the largest coarse blocks refined; Zeng et
al. 2022, arXiv:2207.10284), FMMformer (a band and low rank, their mix learned; Nguyen et al. 2021, arXiv:2108.02347),
clustered attention (clusters of queries, their top keys exact; Vyas et al. 2020, arXiv:2007.04825), Routing Transformer
(attention within clusters; Roy et al. 2021, arXiv:2003.05997), MuSe (clusters of queries and keys, with dipoles;
Mitchell and Kersting 2025, arXiv:2509.10406) and WildCat (a weighted coreset of the keys).
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.backend import check_backend_device
from nystrom.attention.entry import attend, picks_triton
from nystrom.attention.exact_limit import exact_one_by_one, exact_where_short
from nystrom.attention.fused import fused_softmax, unmask_empty_rows
from nystrom.attention.loops_operator import loops_operator
from nystrom.attention.options import NearFarOptions, documented, refuse_tolerance
from nystrom.attention.parts.band import MovedTokens, from_first_real, moved_tokens, pad_to_blocks, without_padding
from nystrom.attention.parts.biased_blocks import attend_with_positions
from nystrom.attention.parts.biased_kernels import attend_by_kernels
from nystrom.attention.parts.biased_loops import attend_by_loops
from nystrom.attention.parts.biased_softmax import biased_softmax, exact_or_not
from nystrom.attention.parts.block_stretches import attend_in_stretches
from nystrom.attention.parts.causal import attend_causally
from nystrom.attention.parts.clusters import QUERY_MEANS, Chosen, choose, cluster_sizes, cluster_sums, take_rows
from nystrom.attention.parts.error_estimate import within_tolerance
from nystrom.attention.parts.far_keys import attend_blocks, attend_everywhere
from nystrom.attention.parts.selected_keys import select_keys
from nystrom.attention.parts.stretches import cut
from nystrom.attention.position_bias import SELF_BIAS, PositionBias, RelativeBuckets, as_bias, real_places
from nystrom.checks import Backend, check_flag
from nystrom.landmarks import all_real, take
from nystrom.native import runs_in_stretches, runs_natively
from nystrom.precision import at_least_float32, cast_for_autocast, without_autocast
from nystrom.shapes import (
    Group,
    Masks,
    check_inputs,
    check_positions,
    check_same_tokens,
    is_number,
    score_scale,
    zero_masked,
)

if TYPE_CHECKING:
    from nystrom.gpu.near_far.choice import ChoiceOptions

# The error of `check_same_tokens` for a call that does not declare cross-attention.
_NEEDS_SAME_TOKENS = (
    "near_far counts positions, and without key_keep or query_keep takes queries and keys for the same tokens: pass "
    "key_keep for cross-attention (all True where all keys are real)"
)
# Numbers of the queries of heads that are moved at a time, with a bias of positions: 64 MB of float32.
_COPIED = 2**24
_CAUSAL = "is_causal is True, which is self-attention, of queries and keys of the same tokens"


@documented(NearFarOptions)
def near_far_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    block_size: int = 64,
    reach: int = 8,
    num_heavy: int = 48,
    num_clusters: int = 64,
    iterations: int = 4,
    exact_up_to: int = 1024,
    num_selected: int = 0,
    scale: float | None = None,
    backend: Backend = "auto",
    tolerance: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    is_causal: bool = False,
    bias: PositionBias | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend to near tokens, heavy keys and clusters of the rest, in time and memory linear in n and s.

    Args:
        **usual: Tensors, masks, group and `NearFarOptions`.
        is_causal: Causal attention: a query sees no later token; self-attention, in one process.
        bias: A function of positions that is added to the scores: `nystrom.RelativeBuckets`, `nystrom.Alibi` or
            `nystrom.Alibi2d`; self-attention, in one process.
    """
    options = NearFarOptions(
        block_size=block_size,
        reach=reach,
        num_heavy=num_heavy,
        num_clusters=num_clusters,
        iterations=iterations,
        exact_up_to=exact_up_to,
        num_selected=num_selected,
        scale=scale,
        backend=backend,
        tolerance=tolerance,
    )
    masks = Masks(keep, key_keep, query_keep, cu_seqlens)
    check_flag("is_causal", is_causal)
    if bias is not None:
        bias = as_bias(bias)
        _check_bias(options, bias, is_causal=is_causal, group=group)
        return attend(_with_bias, q, k, v, masks, options, bias, same_tokens=SELF_BIAS)
    _check_selected(masks, options, is_causal=is_causal, group=group)
    if is_causal:
        _check_causal(q, masks, options, group)
        return attend(_causal, q, k, v, masks, options, same_tokens=_CAUSAL)
    same_tokens = _NEEDS_SAME_TOKENS if masks.is_self else None
    how = {"same_tokens": same_tokens, "onnx": "near_far" if masks.is_self else None, "group": group}
    if tolerance is not None:
        core = within_tolerance(_near_far, tolerance, scale, group=group)
        return attend(core, q, k, v, masks, options, masks.is_self, **how)
    return attend(_near_far, q, k, v, masks, options, masks.is_self, operator=_by_loops, **how)


@documented(NearFarOptions)
def near_far_rows(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    queries: Int[Tensor, " r"],
    *,
    v: Float[Tensor, "b h s e"] | None = None,
    block_size: int = 64,
    reach: int = 8,
    num_heavy: int = 48,
    num_clusters: int = 64,
    iterations: int = 4,
    exact_up_to: int = 1024,
    num_selected: int = 0,
    scale: float | None = None,
    tolerance: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h r s"]:
    """Rows of the attention matrix A, for the queries at r positions: r x s numbers.

    The rows times V are the outputs of `near_far_attention` at these queries. They are positive at real keys, zero
    elsewhere, and sum to one.

    Args:
        **usual: Queries, keys, masks and `NearFarOptions`.
        queries: Positions of the queries, 0 ... n - 1.
        v: Values, by which blocks select keys; for `num_selected` alone.
    """
    options = NearFarOptions(
        block_size=block_size,
        reach=reach,
        num_heavy=num_heavy,
        num_clusters=num_clusters,
        iterations=iterations,
        exact_up_to=exact_up_to,
        num_selected=num_selected,
        scale=scale,
    )
    refuse_tolerance(tolerance, "rows are those of the approximation")
    if num_selected and v is None:
        raise ValueError(
            f"num_selected is {num_selected}, and v is not given: blocks select keys by their values. Pass v, or "
            "num_selected=0."
        )
    masks, v = Masks(keep, key_keep, query_keep), k if v is None else v
    keep, query_keep = check_inputs(q, k, v, masks)
    check_positions("queries", queries, q)
    if masks.is_self:
        check_same_tokens(_NEEDS_SAME_TOKENS, q, k, masks)
    _check_selected(masks, options)
    q, k, v = (at_least_float32(x) for x in cast_for_autocast(q, k, v))
    if not all((q.shape[0], len(queries), k.shape[2])):
        return q.new_zeros(*q.shape[:2], len(queries), k.shape[2])
    with without_autocast(q):
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        chosen = choose(q, k, keep, query_keep, options)
        factor, real = score_scale(q, scale), all_real(k) if keep is None else keep
        scaled_rows = factor * q[:, :, queries]
        exact = (chosen.cluster == num_clusters)[:, :, None]
        if masks.is_self:
            exact = exact | _near(real, queries, options)[:, None]
        if num_selected:
            moved = moved_tokens(q, k, v, keep, chosen, options)
            exact = exact | _selected(moved, queries, k.shape[1], k.shape[2], options)
        # A key of no cluster takes the zeros behind the last one.
        sizes = cluster_sizes(k, chosen.cluster, num_clusters).clamp(min=1)[..., None]
        means = F.pad(cluster_sums(k, chosen.cluster, num_clusters) / sizes, (0, 0, 0, 1))
        far = (scaled_rows @ means.mT).gather(3, chosen.cluster[:, :, None].expand(-1, -1, len(queries), -1))
        scores = torch.where(exact, scaled_rows @ k.mT, far)
        if masks.is_self:
            short = real.sum(dim=1) <= exact_up_to
            scores = torch.where(short[:, None, None, None], scaled_rows @ k.mT, scores)
        rows = scores.masked_fill(~unmask_empty_rows(real)[:, None, None], -torch.inf).softmax(dim=-1)
        rows = torch.where(real[:, None, None], rows, 0.0)
        return rows if query_keep is None else zero_masked(rows, query_keep[:, queries])


def _near_far(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
    is_self: bool,
) -> Float[Tensor, "b h n e"]:
    if options.backend == "triton":
        check_backend_device(options.backend, q.device)
    s, exact_up_to = k.shape[2], options.exact_up_to if is_self else 0
    of_self = (options.block_size, options.num_selected, exact_up_to) if is_self else ()
    most = max(options.num_heavy, options.num_clusters, *of_self)
    if is_number(s) and s <= most:
        exact = exact_one_by_one if is_self else fused_softmax
        return exact(q, k, v, keep=keep, scale=options.scale)

    def approximate(q, k, v, keep, query_keep):
        return _approximate(q, k, v, keep, query_keep, options, is_self)

    if not exact_up_to or (keep is None and is_number(s)):
        return approximate(q, k, v, keep, query_keep)
    return exact_where_short(approximate, q, k, v, all_real(k) if keep is None else keep, exact_up_to, options.scale)


_by_loops = loops_operator("near_far", _near_far, NearFarOptions)


def _with_bias(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
    bias: PositionBias,
) -> Float[Tensor, "b h n e"]:
    """Self-attention with a bias of positions."""
    if options.backend == "triton":
        check_backend_device(options.backend, q.device)
    # Clusters of one key each are exact without a bias, and so are as few keys with one, with padding or without.
    n, most = k.shape[2], max(options.exact_up_to, options.num_clusters)
    places = real_places(bias, q, keep)

    def exact(q: Tensor, k: Tensor, v: Tensor, places: Tensor, keep: Tensor | None) -> Tensor:
        return biased_softmax(q, k, v, bias, places, keep=keep, scale=options.scale)

    def approximate(q: Tensor, k: Tensor, v: Tensor, places: Tensor, keep: Tensor | None) -> Tensor:
        attend_heads, out = None, []
        if options.backend == "triton":
            # Not with "auto": on a GPU the kernels were not measured with a bias.
            chosen, attend_heads = _choose_by_kernels(q, k, keep, keep, options), attend_by_kernels
        else:
            q, k, v = (at_least_float32(x) for x in (q, k, v))
            chosen = choose(q, k, keep, keep, options)
            if isinstance(bias, RelativeBuckets) and runs_natively(q, k, v):
                attend_heads = attend_by_loops
        # Copies exist for a few heads; in a graph for any length, whose number of parts no length may decide, for all.
        parts = -(-q.numel() // _COPIED) if is_number(q.numel()) else 1
        for some in cut(q.shape[1], parts if attend_heads else q.shape[1]):
            choice, of_some = Chosen(*(x[:, some] for x in chosen)), bias.of_heads(some)
            tokens = moved_tokens(q[:, some], k[:, some], v[:, some], keep, choice, options)
            if isinstance(of_some, RelativeBuckets) and attend_heads is not None:
                part = attend_heads(tokens, of_some, options)
            else:
                part = attend_with_positions(tokens, of_some, places, keep, options)
            out.append(_put_back(part, tokens, q[:, some]))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    if is_number(n) and n <= max(options.num_heavy, options.block_size, most):
        return exact(q, k, v, places, keep)
    if keep is None and is_number(n):
        return approximate(q, k, v, places, keep)
    return exact_or_not(exact, approximate, q, k, v, places, all_real(k) if keep is None else keep, most)


def _approximate(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
    is_self: bool,
) -> Float[Tensor, "b h n e"]:
    if picks_triton(options, q, k, v):
        # The kernels take tokens where and in the dtype they are.
        return _by_kernels(q, k, v, keep, query_keep, options, is_self=is_self)
    # Keys and values are read row by row many times.
    q, k, v = at_least_float32(q), *(at_least_float32(x).contiguous() for x in (k, v))
    chosen = choose(q, k, keep, query_keep, options)
    if is_self:
        return _blocks(q, k, v, keep, chosen, options)
    return attend_everywhere(q, k, v, chosen, options)


def _by_kernels(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
    *,
    is_self: bool,
) -> Float[Tensor, "b h n e"]:
    """Attention by kernels."""
    from nystrom.gpu.near_far.choice import can_choose
    from nystrom.gpu.near_far.near_far_attention import can_choose_and_attend, choose_and_attend, near_far

    reach, block = options.reach, options.block_size if is_self else 0
    if can_choose(k.shape[-1], k.dtype) and can_choose_and_attend():
        choice = _choice_options(q, options)
        return choose_and_attend(q, k, v, keep, query_keep, choice, block_size=block, reach=reach, is_self=is_self)
    chosen, starts = _choose_by_kernels(q, k, keep, query_keep, options), keep if is_self else None
    sizes = {"num_clusters": options.num_clusters, "block_size": block, "reach": reach}
    return near_far(q, k, v, *chosen, **sizes, keep=starts, scale=score_scale(q, options.scale))


def _choose_by_kernels(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
) -> Chosen:
    """Heavy keys and clusters, by kernels; torch chooses keys too wide for them."""
    from nystrom.gpu.near_far.choice import can_choose, choose_by_kernels

    if can_choose(k.shape[-1], k.dtype):
        return Chosen(*choose_by_kernels(q, k, keep, query_keep, _choice_options(q, options)))
    # The copies are gone when the kernels of the attention start.
    return choose(at_least_float32(q), at_least_float32(k).contiguous(), keep, query_keep, options)


def _choice_options(q: Float[Tensor, "b h n d"], options: NearFarOptions) -> "ChoiceOptions":
    from nystrom.gpu.near_far.choice import ChoiceOptions

    sizes = options.num_heavy, options.num_clusters, options.iterations
    return ChoiceOptions(QUERY_MEANS, *sizes, score_scale(q, options.scale))


def _blocks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    chosen: Chosen,
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Self-attention, on tokens that are moved so that the first real one begins a block."""
    # A compiler takes one call, and a GPU needs no stretches.
    attend_rows = attend_in_stretches if runs_in_stretches(q, k, v) else attend_blocks
    tokens = moved_tokens(q, k, v, keep, chosen, options)
    return _put_back(
        attend_rows(tokens.q, tokens.k, tokens.v, tokens.chosen, options, _select(tokens, options)), tokens, q
    )


def _put_back(
    out: Float[Tensor, "r t e"], tokens: MovedTokens, q: Float[Tensor, "b h n d"]
) -> Float[Tensor, "b h n e"]:
    """The results of moved tokens, where the tokens were."""
    if tokens.first is None:
        return without_padding(out.unflatten(0, q.shape[:2]), q.shape[2])
    back = (torch.arange(q.shape[2], device=q.device) - tokens.first[:, None]).clamp(min=0)
    return take_rows(out, back).unflatten(0, q.shape[:2])


def _select(tokens: MovedTokens, options: NearFarOptions) -> Int[Tensor, "r l s"] | None:
    """The places of the keys that each block selects, see `select_keys`."""
    if tokens.real is None or not options.num_selected:
        return None
    return select_keys(tokens.q, tokens.k, tokens.v, tokens.real, tokens.chosen, options)


def _check_selected(masks: Masks, options: NearFarOptions, *, is_causal: bool = False, group: Group = None) -> None:
    """Raise for what blocks that select keys do not support."""
    if not options.num_selected:
        return
    if not masks.is_self and masks.keep is None:
        name = "key_keep" if masks.query_keep is None else "query_keep"
        raise ValueError(
            f"{name} cannot be honoured: num_selected is self-attention, where a block selects keys of its own "
            "tokens. Pass keep, or num_selected=0."
        )
    for what, is_so in {"is_causal is True": is_causal, "group is given": group is not None}.items():
        if is_so:
            raise ValueError(f"num_selected is {options.num_selected}, and {what}: leave one of them out.")


def _check_bias(options: NearFarOptions, bias: PositionBias, *, is_causal: bool, group: Group) -> None:
    """Raise for what near_far does not support together with a bias of positions."""
    if options.backend == "triton" and not isinstance(bias, RelativeBuckets):
        raise ValueError(
            f"backend 'triton' has no Triton code for a bias of kind {type(bias).__name__}: pass RelativeBuckets, or "
            "backend='torch'."
        )
    wrong = {
        "is_causal is True": is_causal,
        "group is given": group is not None,
        f"num_selected is {options.num_selected}": bool(options.num_selected),
        f"tolerance is {options.tolerance}": options.tolerance is not None,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(f"bias is given, and {what}: leave one of them out.")


def _check_causal(q: Tensor, masks: Masks, options: NearFarOptions, group: Group) -> None:
    """Raise for arguments that causal attention does not support."""
    if not masks.is_self:
        name = "key_keep" if masks.query_keep is None else "query_keep"
        raise ValueError(
            f"{name} cannot be honoured: is_causal is self-attention, with one mask for queries and keys. Pass keep."
        )
    wrong = {
        "group is given": group is not None,
        f"tolerance is {options.tolerance}": options.tolerance is not None,
        "backend is 'triton'": options.backend == "triton",
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(f"is_causal is True, and {what}: leave one of them out.")
    if not is_number(getattr(q, "shape", (0, 0, 0))[2]):
        raise ValueError(
            "is_causal is True for a symbolic length: blocks are computed in sequence, so a graph is made for "
            "one length; export or compile it with a fixed one."
        )


def _causal(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Causal self-attention, on tokens that are moved so that the first real one begins a block."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    (b, h, n), size, scale = q.shape[:3], options.block_size, score_scale(q, options.scale)
    exact = options.exact_up_to // size * size
    real = back = None
    if keep is not None:
        positions, real, begin, _ = from_first_real(keep, size)
        # A sequence without a real token: softmax over nothing is NaN.
        real = real | (torch.arange(real.shape[1], device=q.device) == 0)
        q, k, v = (zero_masked(take(x, positions), real) for x in (q, k, v))
        back = (torch.arange(n, device=q.device) - begin[:, None]).clamp(min=0)
    elif n > exact:
        q, k, v = (pad_to_blocks(x, size) for x in (q, k, v))
    parts = []
    if exact:
        few, first = [x[:, :, :exact] for x in (q, k, v)], None if real is None else real[:, :exact]
        parts.append(fused_softmax(few[0], few[1], few[2], keep=first, scale=scale, is_causal=True))
    if q.shape[2] > exact:
        rows = None if real is None else real.repeat_interleave(h, dim=0)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        parts.append(attend_causally(q, k, v, rows, options, scale, exact // size).unflatten(0, (b, h)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out[:, :, :n] if back is None else take(out, back)


def _near(real: Bool[Tensor, "b s"], queries: Int[Tensor, " r"], options: NearFarOptions) -> Bool[Tensor, "b r s"]:
    """Which tokens are near a query: those of its block, and `reach` on either side."""
    here = torch.arange(real.shape[1], device=real.device)
    first = torch.where(real, here, real.shape[1]).amin(dim=-1)[:, None]
    start = (queries - first).div(options.block_size, rounding_mode="floor") * options.block_size
    offset = (here - first)[:, None] - start[:, :, None]
    return (offset >= -options.reach) & (offset < options.block_size + options.reach)


def _selected(
    tokens: MovedTokens, queries: Int[Tensor, " r"], heads: int, n: int, options: NearFarOptions
) -> Bool[Tensor, "b h r n"]:
    """Which of the n tokens the block of a query selects."""
    places = _select(tokens, options)
    assert places is not None
    first = torch.zeros_like(places[:, :1, 0]) if tokens.first is None else tokens.first[:, None]
    block = ((queries - first) // options.block_size).clamp(min=0, max=places.shape[1] - 1)
    places = take_rows(places, block)
    places = torch.where(places >= 0, places + first[..., None], n)
    exact = torch.zeros_like(places[..., :1], dtype=torch.bool).expand(-1, -1, n + 1).scatter(2, places, True)
    return exact[..., :n].unflatten(0, (-1, heads))
