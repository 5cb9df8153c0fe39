r"""The plain formula of every method: tests compare the fast code with it, and readers should start here.

A formula handles one sequence and one head: queries q (n, d), keys k (s, d) and values v (s, e), all of them real, give
(n, e). Nothing is optimised for speed, memory or rounding; matrices are as large as the equation says. `by_sequence`
applies a formula to tensors (b, h, n, d) with masks, leaving out tokens that are not real.

Whatever a method draws or chooses is an argument: projections, landmarks, hashes, samples, clusters. If a method
depends on positions, `places` holds those of the tokens; gaps due to masks still count.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.checks import Kernel
from nystrom.kernels import KERNELS

Queries, Keys, Values = Float[Tensor, "n d"], Float[Tensor, "s d"], Float[Tensor, "s e"]
Out = Float[Tensor, "n e"]


def by_sequence(
    formula: Callable[..., Tensor],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Apply a formula to each sequence and head, without the padding tokens, which give zeros.

    Args:
        formula: A function of (q, k, v, b, h, places): the real tokens of sequence b and head h, and the places of its
            real keys, counted from the first of them.
    """
    queries, keys = (keep, keep) if keep is not None else (query_keep, key_keep)
    out = []
    for b in range(q.shape[0]):
        real_q, real_k = (
            torch.arange(x.shape[2], device=x.device) if mask is None else mask[b].nonzero()[:, 0]
            for mask, x in ((queries, q), (keys, k))
        )
        for h in range(q.shape[1]):
            zeros = v.new_zeros(q.shape[2], v.shape[3])
            if len(real_k):
                rows = formula(q[b, h, real_q], k[b, h, real_k], v[b, h, real_k], b, h, real_k - real_k[0])
                zeros = zeros.index_copy(0, real_q, rows)
            out.append(zeros)
    return torch.stack(out).unflatten(0, q.shape[:2])


def softmax(q: Queries, k: Keys, v: Values) -> Out:
    r"""$\mathrm{softmax}(c\, Q K^\top)\, V$ with $c = 1 / \sqrt d$ (Vaswani et al. 2017, eq. 1)."""
    return _weights(q, k) @ v


def nystrom(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    num_landmarks: int,
    landmarks: Callable[[Tensor, int], Tensor] | None = None,
    inverse: Callable[[Tensor], Tensor] | None = None,
) -> Out:
    r"""$\mathrm{softmax}(c Q \tilde K^\top)\, A^+ \mathrm{softmax}(c \tilde Q K^\top) V$ (Nyströmformer, eq. 13).

    At most m queries or keys give exact attention. By default landmarks are `segment_means` and the m x m matrix A is
    inverted by `iterative_inverse`; functions may replace both.
    """
    if min(len(q), len(k)) <= num_landmarks:
        return softmax(q, k, v)
    q_marks, k_marks = ((landmarks or segment_means)(x, num_landmarks) for x in (q, k))
    middle = (inverse or iterative_inverse)(_weights(q_marks, k_marks))
    return _weights(q, k_marks) @ middle @ _weights(q_marks, k) @ v


def segment_means(x: Float[Tensor, "n d"], m: int) -> Float[Tensor, "m d"]:
    r"""Means of m segments: token r of n is in segment $\lfloor r m / n \rfloor$ (Nyströmformer, eq. 16)."""
    segment = torch.arange(len(x), device=x.device) * m // len(x)
    return torch.stack([x[segment == j].mean(dim=0) for j in range(m)])


def iterative_inverse(a: Float[Tensor, "m m"], steps: int = 6) -> Float[Tensor, "m m"]:
    r"""$Z \leftarrow \frac14 Z (13 I - A Z (15 I - A Z (7 I - A Z)))$ (Nyströmformer, eq. 14-15)."""
    eye = torch.eye(len(a), dtype=a.dtype, device=a.device)
    z = a.T / (a.abs().sum(dim=0).max() * a.abs().sum(dim=1).max())
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def kernelized(q: Queries, k: Keys, v: Values, *, kernel: Kernel = "gaussian") -> Out:
    r"""$\sum_j \kappa(q_i, k_j)\, v_j$, $\kappa = \exp(-\frac c2 \|q - k\|^2)$ (Skyformer, eq. 3)."""
    return KERNELS[kernel](q, k, scale=_scale(q)) @ v


def skyformer(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    landmarks: Float[Tensor, "m d"],
    inverse: Callable[[Tensor], Tensor] | None = None,
    kernel: Kernel = "gaussian",
) -> Out:
    r"""$\kappa(Q, L)\, (\kappa(L, L) + \gamma I)^{-1} \kappa(L, K)\, V$ (Skyformer, sections 4.2 and 4.4).

    Half of the landmarks L are queries and half keys; no more queries or keys than these give exact sums. The default
    inverse is `ridged_inverse`.
    """
    if min(len(q), len(k)) <= len(landmarks):
        return kernelized(q, k, v, kernel=kernel)
    left, middle, right = _three(kernel, q, landmarks, k)
    return left @ (inverse or ridged_inverse)(middle) @ right @ v


def ridged_inverse(
    a: Float[Tensor, "m m"], gamma: float = 0.1, inverse: Callable[[Tensor], Tensor] = iterative_inverse
) -> Float[Tensor, "m m"]:
    r"""$D^{-1/2} (D^{-1/2} M D^{-1/2})^{-1} D^{-1/2}$ with $M = A + \gamma I$, $D = \mathrm{diag}(M 1)$ (Lemma 3)."""
    a = a + gamma * torch.eye(len(a), dtype=a.dtype, device=a.device)
    root = a.sum(dim=1).rsqrt()
    return root[:, None] * inverse(root[:, None] * a * root) * root


def skyformer_softmax(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    landmarks: Float[Tensor, "m d"],
    inverse: Callable[[Tensor], Tensor] | None = None,
) -> Out:
    r"""$\mathrm{SM}(Q, L)\, \mathrm{SM}(L, L)^+ \mathrm{SM}(L, K)$, its rows normalised, times V (Skyformer, Fig. 1).

    By Lemma 1, computed with Gaussians in place of SM; the factors of the queries cancel. Outputs are clamped to the
    range of the values.
    """
    if min(len(q), len(k)) <= len(landmarks):
        return softmax(q, k, v)
    left, middle, right = _three("gaussian", q, landmarks, k)
    sizes = _scale(q) / 2 * k.square().sum(dim=1)
    rows = left @ (inverse or ridged_inverse)(middle) @ (right * (sizes - sizes.max()).exp())
    total = rows.sum(dim=1, keepdim=True)
    return torch.where(total > 0, (rows @ v / total).clamp(v.amin(dim=0), v.amax(dim=0)), v.mean(dim=0))


def _three(kernel: Kernel, q: Queries, marks: Float[Tensor, "m d"], k: Keys) -> list[Tensor]:
    return [KERNELS[kernel](x, y, scale=_scale(q)) for x, y in ((q, marks), (marks, marks), (marks, k))]


def linear(q: Queries, k: Keys, v: Values) -> Out:
    r"""$\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top \big/ \phi(q_i)^\top \sum_j \phi(k_j)$ (Katharopoulos, eq. 5)."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.T @ v)) / (q @ k.sum(dim=0)[:, None])


def performer(q: Queries, k: Keys, v: Values, *, projection: Float[Tensor, "r d"]) -> Out:
    r"""The same with $\phi(x) = \exp(\sqrt c\, W x - \frac c2 \|x\|^2)$ (Choromanski et al., Lemma 1)."""
    q, k = (_scale(q) ** 0.5 * x for x in (q, k))
    q, k = ((x @ projection.T - x.square().sum(dim=1, keepdim=True) / 2).exp() for x in (q, k))
    return (q @ (k.T @ v)) / (q @ k.sum(dim=0)[:, None])


def linformer(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    of_keys: Float[Tensor, "m length"],
    of_values: Float[Tensor, "m length"],
    places: Int[Tensor, " s"],
) -> Out:
    r"""$\mathrm{softmax}(c\, Q (E K)^\top)\, F V$; a token uses the column of its place (Wang et al., eq. 7)."""
    return _weights(q, of_keys[:, places] @ k) @ (of_values[:, places] @ v)


def longformer(q: Queries, k: Keys, v: Values, *, window: int, num_global: int, places: Int[Tensor, " n"]) -> Out:
    """Softmax over the keys within (window - 1) / 2 places and the global ones, which see all (Beltagy et al., 3.1)."""
    first = torch.arange(len(q), device=q.device) < num_global
    near = 2 * (places[:, None] - places).abs() < window
    return _weights(q, k, near | first | first[:, None]) @ v


def bigbird(
    q: Queries, k: Keys, v: Values, *, block_size: int, draws: Float[Tensor, " r"], places: Int[Tensor, " n"]
) -> Out:
    """Softmax over a query's block and its neighbours, those at the ends, which see all, and r more (Zaheer et al.)."""
    block = places // block_size
    last = int(block[-1])
    sees = torch.zeros(last + 1, last + 1, dtype=torch.bool, device=q.device)
    for i in range(1, last):
        sees[i, [0, i - 1, i, i + 1, last, *random_blocks(i, last + 1, draws.tolist())]] = True
    sees[[0, last]] = True
    return _weights(q, k, sees[block][:, block]) @ v


def random_blocks(i: int, blocks: int, draws: Sequence[float]) -> list[int]:
    """The random blocks of block i of `bigbird`: one from each segment of the free ones, by a hash of draw and i."""
    free = [j for j in range(1, blocks - 1) if abs(j - i) > 1]
    edges = [-(-t * len(free) // max(1, len(draws))) for t in range(len(draws) + 1)]
    return [
        free[start + (_mix(_mix(int(number * 2**24)) ^ i) * (end - start) >> 32)]
        for number, start, end in zip(draws, edges[:-1], edges[1:], strict=True)
        if end > start
    ]


def _mix(x: int) -> int:
    """A 32-bit hash."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


def informer(q: Queries, k: Keys, v: Values, *, num_queries: int, sample: Int[Tensor, " r"]) -> Out:
    r"""Exact for the queries with largest $\max_j s_j - \mathrm{mean}_j s_j$, else the mean of V (Zhou et al., eq. 4).

    The scores s are those of a sample of the keys; among equal queries the earlier comes first.
    """
    scores = _scale(q) * q @ k[sample].T
    measure = scores.amax(dim=1) - scores.mean(dim=1)
    chosen = measure.argsort(descending=True, stable=True)[:num_queries]
    return v.mean(dim=0).expand(len(q), -1).index_copy(0, chosen, softmax(q[chosen], k, v))


def reformer(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    rotations: Float[Tensor, "rounds d half"],
    chunk_size: int,
    shared_qk: bool,
    across_buckets: bool,
) -> Out:
    r"""Softmax over the keys that a query meets in any round (Kitaev et al., eq. 2-5).

    The keys are sorted by bucket and cut into chunks. A query meets the keys of its own bucket that are in its chunk or
    the one before. With `shared_qk`, keys are the queries scaled to length $\sqrt d$, and a token does not meet itself.
    A token that meets no key gets its own value.
    """
    k = F.normalize(q, dim=1) / _scale(q) if shared_qk else k
    meets = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    for rotation in rotations:
        meets |= meets_in_round(q, k, rotation, chunk_size, across_buckets)
    if shared_qk:
        meets &= ~torch.eye(len(q), dtype=torch.bool, device=q.device)
    alone = ~meets.any(dim=1, keepdim=True)
    return torch.where(alone, v, _weights(q, k, meets | alone) @ v)


def meets_in_round(
    q: Queries, k: Keys, rotation: Float[Tensor, "d half"], chunk_size: int, across_buckets: bool
) -> Bool[Tensor, "n s"]:
    """Which keys each query of `reformer` meets in one round."""
    (q_bucket, q_place), (k_bucket, k_place) = hashed(q, rotation), hashed(k, rotation)
    chunk = q_place // chunk_size
    # The bucket of the first query of each chunk, and how many of that bucket come before the chunk.
    lead = q_bucket[q_place.argsort()[chunk * chunk_size]][:, None]
    before = chunk * chunk_size - (q_bucket < lead).sum(dim=1)
    start = (k_bucket < lead).sum(dim=1) + torch.minimum(before, (k_bucket == lead).sum(dim=1)) - chunk_size
    reach = (k_place >= start[:, None]) & (k_place < start[:, None] + 2 * chunk_size)
    return reach & (across_buckets | (k_bucket == q_bucket[:, None]))


def hashed(x: Float[Tensor, "n d"], rotation: Float[Tensor, "d half"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The bucket of each token, and its place when tokens are sorted by bucket."""
    turned = x @ rotation
    bucket = torch.cat([turned, -turned], dim=1).argmax(dim=1)
    return bucket, bucket.argsort(stable=True).argsort()


def near_far(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    cluster: Int[Tensor, " s"],
    num_clusters: int,
    near: Bool[Tensor, "n s"] | None = None,
) -> Out:
    r"""Softmax of $c\, q_i^\top k_j$ for near and heavy keys, and of $c\, q_i^\top \mu(j)$ for the others (ours).

    Here $\mu(j)$ is the mean key of the cluster of j, including keys that are near (see `near_keys`). A heavy key is in
    none: its cluster is m.
    """
    heavy = cluster == num_clusters
    means = _group_means(k, torch.where(heavy, -1, cluster))
    exact = heavy if near is None else heavy | near
    return torch.where(exact, _scale(q) * q @ k.T, _scale(q) * q @ means.T).softmax(dim=1) @ v


def softmax_with_bias(q: Queries, k: Keys, v: Values, *, bias: Float[Tensor, "n s"]) -> Out:
    r"""Softmax of $c\, q_i^\top k_j + b_{ij}$, with a bias of positions."""
    return (_scale(q) * q @ k.T + bias).softmax(dim=1) @ v


def near_far_with_bias(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    cluster: Int[Tensor, " s"],
    num_clusters: int,
    near: Bool[Tensor, "n s"],
    bias: Float[Tensor, "n s"],
    far: Float[Tensor, "n s"],
) -> Out:
    r"""`near_far` with $b_{ij}$ for near and heavy keys, and `far`, that of a whole block, for the others (ours)."""
    heavy = cluster == num_clusters
    means = _group_means(k, torch.where(heavy, -1, cluster))
    scores = torch.where(heavy | near, _scale(q) * q @ k.T + bias, _scale(q) * q @ means.T + far)
    return scores.softmax(dim=1) @ v


def far_bias(
    between: Callable[[Tensor], Tensor],
    places: Int[Tensor, " n"],
    *,
    block_size: int,
    reach: int,
    by_sides: bool,
) -> Float[Tensor, "n n"]:
    r"""The bias of far keys in `near_far_with_bias`, one for each block of queries and piece of a block of keys.

    A block is cut at $\pm$ `reach`, modulo its size. If `by_sides`, it is $\log \mathrm{mean}\, e^{b}$ over all pairs
    of a place in the block and one in the piece; else b of the distance between the means of their real places.

    Args:
        between: The bias of distances, key minus query.
        places: Places of the tokens, counted from the first.
        block_size: Queries of a block.
        reach: Tokens beside its block that a query sees.
        by_sides: Which of the two.
    """
    starts = sorted({0, reach % block_size, -reach % block_size})
    block = places.div(block_size, rounding_mode="floor")
    piece = (places[:, None] % block_size >= torch.tensor(starts, device=places.device)).sum(dim=1) - 1
    far = between(places[None] - places[:, None]).clone()
    for of_queries in block.unique():
        for of_keys in block.unique():
            for number, (start, end) in enumerate(zip(starts, [*starts[1:], block_size], strict=True)):
                queries, keys = block == of_queries, (block == of_keys) & (piece == number)
                if by_sides:
                    i = of_queries * block_size + torch.arange(block_size, device=places.device)
                    j = of_keys * block_size + torch.arange(start, end, device=places.device)
                    value = between(j - i[:, None]).exp().mean().log()
                elif keys.any():
                    value = between(places[keys].to(far.dtype).mean() - places[queries].to(far.dtype).mean())
                else:
                    continue
                far = torch.where(queries[:, None] & keys, value, far)
    return far


def selected_keys(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    cluster: Int[Tensor, " s"],
    num_clusters: int,
    near: Bool[Tensor, "n s"],
    places: Int[Tensor, " n"],
    block_size: int,
    num_selected: int,
) -> Bool[Tensor, "n s"]:
    r"""The keys that the block of each query selects in `near_far`, where they count as near (ours).

    They have the largest $\max_t e^{c\, \bar q_t^\top k_j} / Z_t \cdot \|v_j - \nu(j)\|_1$ among 4 candidates for
    each: $\bar q_t$ are the means of 16 queries, $Z_t$ the sums of their softmax over heavy keys and clusters, $\nu(j)$
    is the mean value of the cluster of j. Candidates are the keys of the clusters with the largest loss, their mean
    keys and mean distances in its place. Logarithms are compared in steps of 1 / 1024; of equal ones, the first wins.
    """
    heavy, selected = cluster == num_clusters, torch.zeros_like(near)
    groups = [torch.nonzero(cluster == a)[:, 0] for a in range(num_clusters)]
    groups = [group for group in groups if len(group)]
    sizes = torch.tensor([float(len(group)) for group in groups], dtype=q.dtype, device=q.device)
    means = torch.stack([k[group].mean(dim=0) for group in groups]) if groups else k[:0]
    distance = (v - _group_means(v, torch.where(heavy, -1, cluster))).abs().sum(dim=1).clamp(min=1e-300)
    for block in places.div(block_size, rounding_mode="floor").unique():
        inside = places.div(block_size, rounding_mode="floor") == block
        stretch = (places % block_size).div(16, rounding_mode="floor")
        asks = torch.stack([_scale(q) * q[inside & (stretch == t)].mean(dim=0) for t in stretch[inside].unique()])
        seen = torch.cat([asks @ k[heavy].T, asks @ means.T + sizes.log()], dim=1).logsumexp(dim=1, keepdim=True)
        spread = torch.stack([distance[group].mean() for group in groups]) if groups else distance[:0]
        order = _first((asks @ means.T - seen).amax(dim=0) + spread.log())
        candidates = torch.cat([groups[a] for a in order] + [cluster[:0]])[: 4 * num_selected].sort().values
        candidates = candidates[~near[inside][0, candidates]]
        loss = (asks @ k[candidates].T - seen).amax(dim=0) + distance[candidates].log()
        selected[:, candidates[_first(loss)[:num_selected]]] |= inside[:, None]
    return selected


def _first(loss: Float[Tensor, " s"]) -> Int[Tensor, " s"]:
    """The order of losses, the largest first."""
    return (1024 * loss).round().argsort(descending=True, stable=True)


def near_far_causal(q: Queries, k: Keys, v: Values, *, groups: Int[Tensor, "n s"]) -> Out:
    r"""Softmax of $c\, q_i^\top \mu_i(j)$ over the keys $j \le i$ (ours).

    Here $\mu_i(j)$ is the mean key of the group of j at the time of query i; a near or heavy key is its own mean, and
    its group -1.
    """
    rows = [
        (_scale(q) * _group_means(k, group)[: i + 1] @ q[i]).softmax(dim=0) @ v[: i + 1]
        for i, group in enumerate(groups)
    ]
    return torch.stack(rows)


def _group_means(k: Keys, group: Int[Tensor, " s"]) -> Keys:
    """For each key, the mean of its group; the key itself if its group is -1."""
    means = k
    for j in group[group >= 0].unique():
        members = (group == j)[:, None]
        means = torch.where(members, (k * members).sum(dim=0) / members.sum(), means)
    return means


def near_keys(
    query_places: Int[Tensor, " n"], key_places: Int[Tensor, " s"], *, block_size: int, reach: int
) -> Bool[Tensor, "n s"]:
    """Which keys are near a query in `near_far`: those in its block and up to `reach` from the block."""
    start = query_places[:, None].div(block_size, rounding_mode="floor") * block_size
    return (key_places >= start - reach) & (key_places < start + block_size + reach)


def _scale(q: Tensor) -> float:
    return q.shape[1] ** -0.5


def _weights(q: Queries, k: Keys, may: Bool[Tensor, "n s"] | None = None) -> Float[Tensor, "n s"]:
    """Softmax of the scores, over the keys that a query may see."""
    scores = _scale(q) * q @ k.T
    return (scores if may is None else scores.masked_fill(~may, -torch.inf)).softmax(dim=1)
