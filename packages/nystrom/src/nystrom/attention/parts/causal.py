r"""Causal near_far, where a query sees no later token: in linear time, with a state of constant size.

Tokens are cut into blocks of B. In one softmax, a query sees the tokens of its block up to itself, those of the block
before, and g heavy tokens and m clusters that stand for all earlier tokens. Cluster a has $n_a$ tokens, whose keys and
values have the means $\mu_a$ and $\nu_a$; its score is $c\, q_i^\top \mu_a + \log n_a$ and its value is $\nu_a$. Every
earlier token counts exactly once, so rows are positive and sum to one.

When a block is full, the one before it leaves the window (`advance`):

- Its tokens and the heavy ones compete by the logarithm of $\sum_i e^{c\, \bar q_i^\top k_j}$, over the mean queries
  $\bar q_i$ of the last eight blocks: the g largest are heavy, the others become clusters of one token.
- The m + B clusters are then reduced to m. When a token becomes a cluster, $f_a$ is set to its squared distance to the
  nearest cluster added before it. The m clusters with the largest $\sqrt{n_a} f_a$ stay, and each of the others is
  merged into the nearest of these.

The choice has no gradient; means, values and scores do. A choice depends on nothing after the block, so no output
depends on later tokens, and feeding tokens one at a time gives the same as all at once.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import take_rows
from nystrom.attention.parts.order import in_order
from nystrom.autograd_modes import for_one_gradient, known_signature, needs_graph, pull_back
from nystrom.landmarks import bounded
from nystrom.shapes import cut_blocks

# Blocks whose mean queries decide which tokens are heavy.
QUERY_MEANS = 8
# Columns after the keys and values of a row: the number of tokens that it sums, and f, its distance when it was added.
_COUNT, _FAR = 0, 1
_TAIL = 2
# Rows whose width is a multiple of this are copied several times as fast.
_ALIGNED = 16
# Squared distances of up to this many rounding units count as zero.
_ROUNDINGS = 64
# Scores that exist at a time, and numbers in the pasts of blocks; the latter are also at most those of the tokens.
_NUMBERS, _PASTS = 2**18, 2**20


def rows_of(
    k: Float[Tensor, "r t d"], v: Float[Tensor, "r t e"], real: Bool[Tensor, "r t"] | None
) -> Float[Tensor, "r t f"]:
    """Tokens as rows: key, value, and 1 for a real token."""
    width = row_width(k.shape[2], v.shape[2])
    count = torch.ones_like(k[..., :1]) if real is None else real[..., None].to(k.dtype)
    rest = k.new_zeros(*k.shape[:2], width - k.shape[2] - v.shape[2] - 1)
    return torch.cat([k, v, count, rest], dim=2)


def row_width(d: int, e: int) -> int:
    """The width of a row of tokens with keys of width d and values of width e."""
    width = d + e + _TAIL
    return _ALIGNED // 2 if width <= _ALIGNED // 2 else -(-width // _ALIGNED) * _ALIGNED


def advance(
    past: Float[Tensor, "r a f"],
    leaving: Float[Tensor, "r t f"],
    queries: Float[Tensor, "r i d"],
    options: NearFarOptions,
    e: int,
) -> Float[Tensor, "r a f"]:
    """The past after more tokens have left the window.

    Args:
        past: Rows of the m clusters, whose keys and values are sums, then of the g heavy tokens.
        leaving: Rows of the tokens, see `rows_of`.
        queries: Mean queries of the last blocks, multiplied by the scale.
        e: Width of a value.
    """
    m, g, d = options.num_clusters, options.num_heavy, queries.shape[2]
    x, tail = torch.cat([past, leaving], dim=1), d + e
    with torch.no_grad():
        pool, clusters = x[:, m:], torch.arange(m, device=x.device).expand(len(x), m)
        weight = torch.bmm(queries, pool[..., :d].mT).logsumexp(dim=1)
        order = m + _descending(weight, pool[..., tail + _COUNT] > 0)
        heavy, rest = order[:, :g], torch.cat([clusters, order[:, g:]], dim=1)
        count, far = take_rows(x[..., tail : tail + _TAIL], rest).unbind(dim=2)
        keys = torch.cat([x[:, :m, :d] / count[:, :m, None].clamp(min=1), take_rows(x[..., :d], order[:, g:])], dim=1)
        # Distances do not see a common offset, which would cost them digits.
        keys = keys - _middle(leaving[..., :d])
        far = torch.cat([far[:, :m], _far_from_earlier(keys, count, m)], dim=1)
        order = _descending((count.sqrt() * far).log(), count > 0)
        rest, keys, there = rest.gather(1, order), take_rows(keys, order), count.gather(1, order[:, :m]) > 0
        joined = _nearest(keys[:, m:], keys[:, :m], there)
        far = far.gather(1, order[:, :m])
    stay, go, heavy = take_rows(x, torch.cat([rest, heavy], dim=1)).split([m, rest.shape[1] - m, g], dim=1)
    place = (joined + m * torch.arange(len(x), device=x.device)[:, None]).flatten()
    stay = stay.flatten(0, 1).index_add(0, place, go.flatten(0, 1)).unflatten(0, (-1, m))
    stay[..., tail + _FAR] = far
    return torch.cat([stay, heavy], dim=1)


def _middle(x: Float[Tensor, "r t d"]) -> Float[Tensor, "r 1 d"]:
    """The median of three tokens in each channel, bounded; see `nystrom.landmarks.middle_of`."""
    first, middle, last = (x[:, place : place + 1] for place in (0, x.shape[1] // 2, x.shape[1] - 1))
    low, high = torch.minimum(first, middle), torch.maximum(first, middle)
    return bounded(torch.maximum(low, torch.minimum(high, last)))


def _descending(numbers: Float[Tensor, "r a"], there: Bool[Tensor, "r a"]) -> Int[Tensor, "r a"]:
    """Places in descending order of their numbers, earlier places first among nearly equal ones; absent ones last."""
    place = torch.arange(numbers.shape[1], device=numbers.device)
    return in_order(numbers[:, None], place, there[:, None])[:, 0].argsort(dim=1, descending=True)


def _nearest(
    x: Float[Tensor, "r t d"], centres: Float[Tensor, "r m d"], there: Bool[Tensor, "r m"]
) -> Int[Tensor, "r t"]:
    """Like `nystrom.attention.parts.clusters.nearest_cluster`, for few tokens."""
    far, near = (0.5 * torch.linalg.vector_norm(y, dim=-1).square() for y in (x, centres))
    scores = torch.bmm(x, centres.mT).add_(torch.where(there, -near, -torch.inf)[:, None])
    best = scores.amax(dim=-1, keepdim=True)
    rounding = _ROUNDINGS * torch.finfo(x.dtype).eps * (2 * far[..., None] - best)
    numbered = torch.arange(centres.shape[1], dtype=x.dtype, device=x.device)
    return torch.where(scores >= best - rounding, numbered, 0.0).amax(dim=-1).long()


def _far_from_earlier(keys: Float[Tensor, "r p d"], count: Float[Tensor, "r p"], m: int) -> Float[Tensor, "r t"]:
    """For each key after the first m, half the squared distance to the nearest key before it."""
    half = 0.5 * torch.linalg.vector_norm(keys, dim=-1).square()
    # |x - y|^2 / 2 = |x|^2 / 2 - (x.y - |y|^2 / 2)
    minus = torch.where(count > 0, -half, -torch.inf)
    here = torch.arange(keys.shape[1], device=keys.device)
    later = keys.new_zeros(keys.shape[1] - m, keys.shape[1]).masked_fill(here >= here[m:, None], -torch.inf)
    far = half[:, m:] - torch.bmm(keys[:, m:], keys.mT).add_(minus[:, None]).add_(later).amax(dim=-1)
    return torch.where(far > _ROUNDINGS * torch.finfo(far.dtype).eps * half[:, m:], far, 0.0)


def attend_causally(
    q: Float[Tensor, "r t d"],
    k: Float[Tensor, "r t d"],
    v: Float[Tensor, "r t e"],
    real: Bool[Tensor, "r t"] | None,
    options: NearFarOptions,
    scale: float,
    first: int = 0,
) -> Float[Tensor, "r u e"]:
    """Causal attention of the queries, a whole number of blocks, in all blocks from `first` on.

    Keys and values are zeros where they are not real; the first token of each sequence is.
    """
    size, e, q = options.block_size, v.shape[2], scale * q
    means, x = mean_queries(q.detach(), real, size), rows_of(k, v, real)
    (r, t, f), a = x.shape, options.num_heavy + options.num_clusters
    # The gradient of a slice has the size of all tokens; the parts of a split share a single one.
    recorded = torch.is_grad_enabled() and (q.requires_grad or x.requires_grad)
    query_blocks, tokens = q.split(size, dim=1), (torch.zeros_like(x[:, :size]), *x.split(size, dim=1))
    past, pasts, out = x.new_zeros(r, a, f), [], []
    attend = _attend if torch.compiler.is_compiling() else _Attend.apply
    stretch = max(1, min(_PASTS, x.numel()) // (r * a * f))
    for block in range(t // size):
        if block >= 2:
            past = advance(past, tokens[block - 1], means[:, max(0, block - QUERY_MEANS) : block], options, e)
        if block < first:
            continue
        pasts.append(past)
        if len(pasts) == stretch or (block + 1) * size == t:
            begin, end = block + 1 - len(pasts), block + 1
            if recorded or begin == 0:
                queries, window = torch.cat(query_blocks[begin:end], dim=1), torch.cat(tokens[begin : end + 1], dim=1)
            else:
                queries, window = q[:, begin * size : end * size], x[:, (begin - 1) * size : end * size]
            out.append(attend(queries, window, torch.stack(pasts, dim=1), size, e))
            pasts = []
    return torch.cat(out, dim=1)


def mean_queries(q: Float[Tensor, "r t d"], real: Bool[Tensor, "r t"] | None, size: int) -> Float[Tensor, "r l d"]:
    """The mean of the real queries of each block; the others must be zero."""
    sums = cut_blocks(q, size).sum(dim=2)
    if real is None:
        return sums / size
    return sums / cut_blocks(real[..., None], size).sum(dim=2).clamp(min=1)


def _attend(
    q: Float[Tensor, "r t d"], x: Float[Tensor, "r w f"], past: Float[Tensor, "r l a f"], size: int, e: int
) -> Float[Tensor, "r t e"]:
    """Attention of blocks of queries, already multiplied by the scale, to their windows and pasts."""
    queries, near, far, count = _parts(q, x, past, size, e)
    weights = _scores(queries, near, far, count, e).softmax(dim=2)
    return _weighted(weights, near, far, e).unflatten(0, (len(q), -1)).flatten(1, 2)


def attend_to_window(
    q: Float[Tensor, "r t d"], x: Float[Tensor, "r w f"], past: Float[Tensor, "r a f"], e: int
) -> Float[Tensor, "r t e"]:
    """Causal attention of the last t tokens of a window to the window and the past; queries include the scale."""
    far, count = _means(past, q.shape[2] + e)
    return _weighted(_scores(q, x, far, count, e).softmax(dim=2), x, far, e)


def _parts(
    q: Tensor, x: Tensor, past: Tensor, size: int, e: int
) -> tuple[Float[Tensor, "b c d"], Float[Tensor, "b w f"], Float[Tensor, "b a k"], Float[Tensor, "b a"]]:
    """Per block: queries, window, means of the past, and how many tokens each mean stands for."""
    tokens = cut_blocks(x, size)
    near = torch.cat([tokens[:, :-1], tokens[:, 1:]], dim=2).flatten(0, 1)
    return cut_blocks(q, size).flatten(0, 1), near, *_means(past.flatten(0, 1), q.shape[2] + e)


def _means(past: Float[Tensor, "b a f"], width: int) -> tuple[Float[Tensor, "b a k"], Float[Tensor, "b a"]]:
    """Mean keys and values of the past, and how many tokens each mean stands for."""
    count = past[..., width + _COUNT].detach()
    return past[..., :width] / count.clamp(min=1)[..., None], count


def _scores(
    q: Float[Tensor, "b c d"],
    near: Float[Tensor, "b w f"],
    far: Float[Tensor, "b a k"],
    count: Float[Tensor, "b a"],
    e: int,
) -> Float[Tensor, "b c s"]:
    """The scores of the near keys, the last c of which are the queries' own tokens, then the scores of the past."""
    (c, d), w = q.shape[1:], near.shape[1]
    later = torch.full((c, w), -torch.inf, dtype=q.dtype, device=q.device).triu(w - c + 1)
    # Adding a bias takes a fraction of the time of a masked fill.
    of_near = torch.bmm(q, near[..., :d].mT).add_(near[..., d + e + _COUNT].detach().log()[:, None]).add_(later)
    return torch.cat([of_near, torch.bmm(q, far[..., :d].mT).add_(count.log()[:, None])], dim=2)


def _weighted(weights: Tensor, near: Tensor, far: Tensor, e: int) -> Float[Tensor, "b c e"]:
    d, w = far.shape[2] - e, near.shape[1]
    return torch.baddbmm(torch.bmm(weights[..., :w], near[..., d : d + e]), weights[..., w:], far[..., d:])


def _in_cache(queries: Tensor, near: Tensor, far: Tensor) -> Iterator[slice]:
    """Slices of blocks whose scores fit into the cache of a CPU."""
    some = max(1, _NUMBERS // (queries.shape[1] * (near.shape[1] + far.shape[1])))
    for start in range(0, len(queries), some):
        yield slice(start, start + some)


class _Attend(torch.autograd.Function):
    """`_attend` a few blocks at a time; the backward pass recomputes the weights, so that they are not kept."""

    @staticmethod
    @known_signature
    def forward(q: Tensor, x: Tensor, past: Tensor, size: int, e: int) -> Tensor:
        out = x.new_empty(past.shape[0] * past.shape[1], size, e)
        queries, near, far, count = _parts(q, x, past, size, e)
        for some in _in_cache(queries, near, far):
            scores = _scores(queries[some], near[some], far[some], count[some], e)
            out[some] = _weighted(torch.softmax(scores, dim=2, out=scores), near[some], far[some], e)
        return out.unflatten(0, (len(q), -1)).flatten(1, 2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.size, ctx.e = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, x, past, out), size, e = grads, ctx.saved_tensors, ctx.size, ctx.e
        if needs_graph(grad):
            return *pull_back(lambda q, x, past: _attend(q, x, past, size, e), (q, x, past), grad), None, None
        d, blocks, window = q.shape[2], past.shape[:2], 2 * size
        parts = _parts(q, x, past, size, e)
        coming, there = (cut_blocks(y, size).flatten(0, 1) for y in (grad, out))
        grad_q, grad_near, grad_far = (y.new_empty(y.shape) for y in (parts[0], parts[1][..., : d + e], parts[2]))
        for some in _in_cache(*parts[:3]):
            queries, near, far, count, come, went = (y[some] for y in (*parts, coming, there))
            scores = _scores(queries, near, far, count, e)
            weights = torch.softmax(scores, dim=2, out=scores)
            of_scores = torch.cat([torch.bmm(come, near[..., d : d + e].mT), torch.bmm(come, far[..., d:].mT)], dim=2)
            of_scores.sub_((come * went).sum(dim=-1, keepdim=True)).mul_(weights)
            of_near, of_far = of_scores[..., :window], of_scores[..., window:]
            grad_q[some] = torch.bmm(of_near, near[..., :d]).baddbmm_(of_far, far[..., :d])
            for of_keys, of_scores, of_weights in (
                (grad_near, of_near, weights[..., :window]),
                (grad_far, of_far, weights[..., window:]),
            ):
                of_keys[some, :, :d] = torch.bmm(of_scores.mT, queries)
                of_keys[some, :, d:] = torch.bmm(of_weights.mT, come)
        grad_x, grad_past = x.new_zeros(x.shape), past.new_zeros(past.shape)
        of_tokens, of_windows = cut_blocks(grad_x, size)[..., : d + e], grad_near.unflatten(0, blocks)
        of_tokens[:, :-1] += of_windows[:, :, :size]
        of_tokens[:, 1:] += of_windows[:, :, size:]
        grad_past[..., : d + e] = grad_far.div_(parts[3].clamp(min=1)[..., None]).unflatten(0, blocks)
        return grad_q.unflatten(0, blocks).flatten(1, 2), grad_x, grad_past, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, size, e = inputs

        def plain(q, x, past):
            return _attend(q, x, past, size, e)

        return torch.vmap(plain, in_dims[:3])(*tensors), 0
