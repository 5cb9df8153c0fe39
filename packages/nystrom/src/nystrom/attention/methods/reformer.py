r"""Reformer's LSH attention: each token attends to those that hash to the same bucket.

In each of several rounds the real tokens are hashed (`lsh`), sorted by bucket, then by position, and cut into chunks of
m. The query at place $s_i$ of this order may attend to the keys at places $s_j$ of
$$P_i = \{j : h(k_j) = h(q_i),\ \lfloor s_i / m \rfloor - 1 \le \lfloor s_j / m \rfloor \le \lfloor s_i / m \rfloor\},$$
its chunk and the one before. The output is softmax attention over the union of $P_i$ over the rounds: rounds are
summed, each with its own maximum, and a pair that an earlier round has counted is masked in later ones, which has the
effect of the paper's division by the number of rounds that hold a pair.

- `shared_qk`, the paper's form: keys are the queries scaled to length $\sqrt d$, `k` is not used (its gradient is
  zero), and a token attends to itself only if its union holds nothing else.
- Otherwise queries and keys are hashed by the same rotations and sorted separately, so a chunk of queries has no place
  among the keys of its own. It takes the place of its first query within the bucket, and reaches 2 m keys from m
  before it. With k = q this is the rule above. A token whose union is empty gets its own value.

Self-attention only. Time and memory are linear in n except for the sort: scores are held for a few chunks at a time.

**Exact limit.** With one bucket and one chunk that holds all real tokens: softmax attention, and with `shared_qk`
softmax attention over the other tokens.

Source: Kitaev et al. (2020), arXiv:2001.04451, eq. (2)-(5) and appendix A; the chunk after is not reached, as there.
Departs from the authors' code and its ports: buckets and duplicates are masked as in the paper (`across_buckets` lifts
the mask of buckets), the first chunk does not look back at the last, only real tokens are sorted, and `num_buckets` is
a constant: the ports' 2 n / m would depend on the padding, so set it for the length at hand.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import SELF_ATTENTION, attend
from nystrom.attention.options import ReformerOptions, documented
from nystrom.attention.parts.by_heads import by_heads
from nystrom.attention.parts.lsh import HashRounds, even_rotations, plan_rounds
from nystrom.autograd_modes import for_one_gradient, needs_graph, pull_back
from nystrom.precision import at_least_float32
from nystrom.private_torch import is_forward_mode
from nystrom.shapes import Generator, Group, Masks, check_generator, is_number, score_scale

# Scores computed at a time: as many as the caches of a core hold; enough to fill an accelerator.
SCORES_AT_A_TIME = {"cpu": 2**20}
_MANY_SCORES = 2**25


@documented(ReformerOptions)
def reformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    *,
    num_hashes: int = 2,
    chunk_size: int = 64,
    num_buckets: int = 64,
    shared_qk: bool = True,
    across_buckets: bool = False,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend to the tokens of the same hash bucket, in time linear in n except for a sort, and in linear memory.

    Args:
        **usual: Tensors, masks, generator of the rotations, group and `ReformerOptions`.
    """
    check_generator(generator)
    options = ReformerOptions(
        num_hashes=num_hashes,
        chunk_size=chunk_size,
        num_buckets=num_buckets,
        shared_qk=shared_qk,
        across_buckets=across_buckets,
        scale=scale,
    )
    return attend(
        _reformer,
        q,
        k,
        v,
        Masks(keep, cu_seqlens=cu_seqlens),
        options,
        generator,
        same_tokens=f"reformer is {SELF_ATTENTION}",
        group=group,
    )


def _reformer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: ReformerOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    rotations = _rotations(q, options, generator)

    def some(heads: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by_rotations(q, k, v, keep, rotations[:, heads], options)

    return by_heads(some, q, k, v)


def attend_by_rotations(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    rotations: Float[Tensor, "r h d half"],
    options: ReformerOptions,
) -> Float[Tensor, "b h n e"]:
    """Hash by given rotations, and attend; padding tokens are zero."""
    with torch.no_grad():
        plan = plan_rounds(
            q,
            None if options.shared_qk else k,
            rotations,
            keep=keep,
            chunk_size=options.chunk_size,
            across_buckets=options.across_buckets,
        )
    if options.shared_qk:
        # k is not read; its gradient is zero rather than None, so that the layer that projected it trains as usual.
        k = torch.where(torch.zeros((), dtype=torch.bool, device=k.device), k, _directions(q))
    rows = q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)
    scale = score_scale(q, options.scale)
    if torch.compiler.is_compiling() or is_forward_mode():
        # The compiler differentiates the forward pass itself, and decides what to keep; so does forward mode.
        out, _, total = _attend_rounds(*rows, plan, scale, options.shared_qk)
    else:
        out, _, total = _AttendRounds.apply(*rows, scale, options.shared_qk, *plan)
    out = out.to(v.dtype).unflatten(0, v.shape[:3])
    alone = (total == 0).unflatten(0, v.shape[:3])
    return torch.where(alone, v, out)


def _rotations(
    q: Float[Tensor, "b h n d"], options: ReformerOptions, generator: Generator
) -> Float[Tensor, "r h d half"]:
    shape = options.num_hashes, q.shape[1], q.shape[3], options.num_buckets // 2
    if generator is None:
        return even_rotations(shape, q.device)
    if generator == "global":
        return torch.randn(shape, dtype=torch.float32, device=q.device)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device).to(q.device)


def _directions(x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
    """Tokens scaled to length sqrt(d), in float32 at least, by at most 1000: float16 may not hold the gradient."""
    x = at_least_float32(x)
    return x * x.square().mean(dim=-1, keepdim=True).clamp(min=1e-6).rsqrt()


def _attend_rounds(
    q: Float[Tensor, "t d"],
    k: Float[Tensor, "t d"],
    v: Float[Tensor, "t e"],
    plan: HashRounds,
    scale: float,
    exclude_self: bool,
) -> tuple[Float[Tensor, "t e"], Float[Tensor, "t 1"], Float[Tensor, "t 1"]]:
    """Softmax over the union of the rounds, its largest score, and the sum of weights relative to it; 0 if empty."""
    wide = at_least_float32(q[:0]).dtype
    # Finite even where no round has a key: minus itself it is 0, not NaN.
    top = q.new_full((q.shape[0], 1), torch.finfo(wide).min, dtype=wide)
    total, out = torch.zeros_like(top), v.new_zeros(v.shape, dtype=wide)
    for r in range(plan.queries.shape[0]):
        parts = []
        for part in _parts(plan):
            scores = _scores(q, k, plan, r, part, scale, exclude_self)
            highest = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(wide).min)
            weights = (scores - highest).exp()
            means = weights @ at_least_float32(_take(v, plan.keys[r, part]))
            parts.append((means, weights.sum(dim=-1, keepdim=True), highest))
        means, sums, highest = (_take(torch.cat(x).flatten(0, 1), plan.spots[r]) for x in zip(*parts, strict=True))
        before, top = top, torch.maximum(top, highest)
        old, new = (before - top).exp(), (highest - top).exp()
        total, out = total * old + sums * new, out * old + means * new
    return out / torch.where(total == 0, 1.0, total), top, total


def _scores(
    q: Float[Tensor, "t d"],
    k: Float[Tensor, "t d"],
    plan: HashRounds,
    r: int,
    part: slice,
    scale: float,
    exclude_self: bool,
) -> Float[Tensor, "p m w"]:
    """Scores of the queries of some chunks in round r; -inf where they may not attend."""
    rows, keys, allowed = plan.queries[r, part], plan.keys[r, part], plan.allowed(r, part)
    if exclude_self:
        allowed = allowed & (rows[..., None] != keys[:, None])
    scores = (scale * at_least_float32(_take(q, rows))) @ at_least_float32(_take(k, keys)).mT
    return torch.where(allowed, scores, -torch.inf)


def _take(x: Float[Tensor, "t d"], rows: Int[Tensor, "*p"]) -> Float[Tensor, "*p d"]:
    """Rows of a matrix; faster than indexing on a CPU, but not possible with a symbolic number of rows."""
    if all(is_number(size) for size in rows.shape):
        return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    return x[rows]


def _parts(plan: HashRounds) -> list[slice]:
    """The chunks to process together, as slices."""
    _, g, m = plan.queries.shape
    if torch.compiler.is_compiling() or not is_number(g):
        return [slice(None)]
    size = max(1, SCORES_AT_A_TIME.get(plan.queries.device.type, _MANY_SCORES) // (m * plan.keys.shape[-1]))
    return [slice(i, i + size) for i in range(0, g, size)]


class _AttendRounds(torch.autograd.Function):
    """`_attend_rounds`, whose backward computes the scores again instead of keeping them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, exclude_self: bool, *plan: Tensor):
        return _attend_rounds(q, k, v, HashRounds(*plan), scale, exclude_self)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        (q, k, v, ctx.scale, ctx.exclude_self, *plan), (out, top, total) = inputs, output
        ctx.mark_non_differentiable(top, total)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, top, total, *plan)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, (q, k, v, out, top, total, *tables) = grads[0], ctx.saved_tensors
        plan = HashRounds(*tables)
        if grad is None:
            return None, None, None, None, None, *(None for _ in plan)
        if needs_graph(grad):
            # For a second derivative, or a transform of torch.func: plain operations, which keep the scores.
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return _attend_rounds(q, k, v, plan, ctx.scale, ctx.exclude_self)[0]

            return *pull_back(attend, (q, k, v), grad), None, None, *(None for _ in plan)
        # With p the weights over the union: dv = p^T g, ds = p (g v^T - g.out).
        level = (grad * out).sum(dim=-1, keepdim=True)
        share = torch.where(total == 0, 0.0, 1 / total)
        sums = [grad.new_zeros(x.shape, dtype=out.dtype) for x in (q, k, v)]
        for r in range(plan.queries.shape[0]):
            for part in _parts(plan):
                rows, keys = plan.queries[r, part], plan.keys[r, part]
                scores = _scores(q, k, plan, r, part, ctx.scale, ctx.exclude_self)
                p, g = (scores - _take(top, rows)).exp() * _take(share, rows), _take(grad, rows)
                ds = p * (g @ at_least_float32(_take(v, keys)).mT - _take(level, rows)) * ctx.scale
                terms = ds @ at_least_float32(_take(k, keys)), ds.mT @ at_least_float32(_take(q, rows)), p.mT @ g
                for x, place, term in zip(sums, (rows, keys, keys), terms, strict=True):
                    x.index_add_(0, place.flatten(), term.flatten(0, 1))
        dq, dk, dv = (x.to(like.dtype) for x, like in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv, None, None, *(None for _ in plan)
