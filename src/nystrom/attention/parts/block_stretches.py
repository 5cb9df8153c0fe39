r"""`nystrom.attention.parts.far_keys.attend_blocks` on a CPU, a stretch of blocks at a time.

The keys that blocks copy, several times as many as there are tokens, exist for a stretch of blocks that fits into the
cache. The gradient is taken from the inputs: the backward pass copies the keys once more. With $P$ the weights of a
block, $G$ the gradient of its output $O$, $\mathrm{d}S = P \circ (G V^\top - \mathrm{rowsum}(G \circ O))$; the gradient
of a cluster's mean value goes to its tokens outside of the window, which is to all of them, less those inside.

Where a graph of the backward pass is recorded, and inside `torch.vmap`, the plain form is used.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import bias_of
from nystrom.attention.parts.clusters import Chosen, cluster_sizes, cluster_sums
from nystrom.attention.parts.far_keys import attend_blocks, open_blocks, take_rows
from nystrom.attention.parts.stretches import for_one_gradient, known_signature
from nystrom.shapes import cut_blocks, score_scale

# Numbers of the keys of a stretch of blocks: these, or a few times those of the tokens where that is more, but no more
# than fit into a cache.
_FEWEST = 2**14
_TIMES_TOKENS = 4
_MOST = 2**19


def attend_in_stretches(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, options: NearFarOptions) -> Tensor:
    """What `attend_blocks` gives, for the same arguments."""
    return _Blocks.apply(q, k, v, *chosen, options)


class _Stretches:
    """The keys of blocks, made anew for each stretch in the same memory."""

    def __init__(self, k: Tensor, v: Tensor, chosen: Chosen, options: NearFarOptions):
        size, reach, m = options.block_size, options.reach, options.num_clusters
        self.k, self.v, self.chosen, self.options = k, v, chosen, options
        self.count = cluster_sizes(k, chosen.cluster, m)
        self.means = cluster_sums(k, chosen.cluster, m) / self.count.clamp(min=1)[..., None]
        self.total = cluster_sums(v, chosen.cluster, m)
        self.shared = torch.cat([take_rows(k, chosen.heavy), self.means], dim=1)
        self.heavy = take_rows(v, chosen.heavy)
        self.window, self.length = size + 2 * reach, size + 2 * reach + chosen.heavy.shape[1] + m
        width = max(k.shape[-1], v.shape[-1])
        numbers = min(max(_FEWEST, _TIMES_TOKENS * k.numel()), _MOST)
        blocks = k.shape[1] // size
        self.blocks = min(blocks, max(1, numbers // (self.length * width)))
        self.rows = max(1, min(len(k), numbers // (self.length * width * blocks)))
        self.keys, self.values = (x.new_zeros(self.rows, self.blocks, self.length, width) for x in (k, v))

    def __iter__(self):
        """Rows and blocks of each stretch."""
        total = self.k.shape[1] // self.options.block_size
        for row in range(0, len(self.k), self.rows):
            for start in range(0, total, self.blocks):
                yield slice(row, row + self.rows), start, min(total, start + self.blocks)

    def near(self, x: Tensor, rows: slice, start: int, stop: int) -> Tensor:
        """The windows of blocks, as a view; zeros outside of the sequence."""
        size, reach = self.options.block_size, self.options.reach
        first, last = start * size - reach, stop * size + reach
        piece = x[rows, max(0, first) : min(x.shape[1], last)]
        if first < 0 or last > x.shape[1]:
            piece = F.pad(piece, (0, 0, max(0, -first), max(0, last - x.shape[1])))
        return piece.unfold(1, self.window, size).mT

    def fill(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and bias of blocks, the cluster of each key in their windows, and the far tokens of clusters."""
        m, w = self.options.num_clusters, self.window
        g = self.length - m
        inside = self.near((self.chosen.cluster - m)[..., None], rows, start, stop)[..., 0] + m
        near = self.near(self.v, rows, start, stop).contiguous()
        keys, values = (x[: len(near), : stop - start] for x in (self.keys, self.values))
        d, e = self.k.shape[-1], self.v.shape[-1]
        keys[:, :, :w, :d], values[:, :, :w, :e] = self.near(self.k, rows, start, stop), near
        keys[:, :, w:, :d] = self.shared[rows, None]
        values[:, :, w:g, :e] = self.heavy[rows, None]
        left = self.count[rows, None] - cluster_sizes(near, inside, m)
        torch.sub(self.total[rows, None], cluster_sums(near, inside, m), out=values[:, :, g:, :e])
        values[:, :, g:, :e] /= left.clamp(min=1)[..., None]
        bias = left.new_empty(*left.shape[:2], self.length)
        bias[:, :, :w] = bias_of(inside < m, left.dtype)
        bias[:, :, w:g] = bias_of(self.chosen.found[rows], left.dtype)[:, None]
        torch.log(left, out=bias[:, :, g:])
        return keys, values, open_blocks(bias), inside, left


class _Blocks(torch.autograd.Function):
    @staticmethod
    @known_signature
    def forward(
        q: Tensor, k: Tensor, v: Tensor, heavy: Tensor, found: Tensor, cluster: Tensor, options: NearFarOptions
    ) -> Tensor:
        stretches, scale = _Stretches(k, v, Chosen(heavy, found, cluster), options), score_scale(q, options.scale)
        d, e, size = q.shape[-1], v.shape[-1], options.block_size
        out = v.new_empty(*q.shape[:2], e)
        for rows, start, stop in stretches:
            keys, values, bias, _, _ = stretches.fill(rows, start, stop)
            queries = cut_blocks(q[rows, start * size : stop * size], size)
            queries = F.pad(queries, (0, keys.shape[-1] - d)) if keys.shape[-1] > d else queries
            found_here = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias[:, :, None], scale=scale)
            out[rows, start * size : stop * size] = found_here[..., :e].flatten(1, 2)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, v, heavy, found, cluster, out), options = grads, ctx.saved_tensors, ctx.options
        chosen = Chosen(heavy, found, cluster)
        if torch.is_grad_enabled():
            pull = torch.func.vjp(lambda q, k, v: attend_blocks(q, k, v, chosen, options), q, k, v)[1]
            return (*pull(grad), None, None, None, None)
        return (*_gradients(grad, q, k, v, chosen, out, options), None, None, None, None)

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, options = inputs

        def plain(q, k, v, *chosen):
            return attend_blocks(q, k, v, Chosen(*chosen), options)

        return torch.vmap(plain, in_dims[:-1])(*tensors), 0


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, out: Tensor, options: NearFarOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    stretches, scale = _Stretches(k, v, chosen, options), score_scale(q, options.scale)
    size, reach, m, w = options.block_size, options.reach, options.num_clusters, stretches.window
    g, d, e, t = stretches.length - m, q.shape[-1], v.shape[-1], q.shape[1]
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (x.new_zeros(len(x), t + 2 * reach, x.shape[-1]) for x in (k, v))
    # Of heavy keys and means, of heavy values, and of the mean values of far tokens.
    of_shared, of_heavy = torch.zeros_like(stretches.shared), torch.zeros_like(stretches.heavy)
    of_far = v.new_zeros(len(v), m + 1, e)
    for rows, start, stop in stretches:
        place = slice(start * size, stop * size)
        keys, values, bias, inside, left = stretches.fill(rows, start, stop)
        keys, values = keys[..., :d].flatten(0, 1), values[..., :e].flatten(0, 1)
        queries, coming, there = (cut_blocks(x[rows, place], size).flatten(0, 1) for x in (q, grad, out))
        scores = torch.baddbmm(bias.flatten(0, 1)[:, None], queries, keys.mT, alpha=scale)
        weights = torch.softmax(scores, dim=-1, out=scores)
        grad_values = torch.bmm(weights.mT, coming).unflatten(0, inside.shape[:2])
        grad_scores = torch.bmm(coming, values.mT)
        grad_scores.sub_((coming * there).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_q[rows, place] = torch.bmm(grad_scores, keys).unflatten(0, inside.shape[:2]).flatten(1, 2)
        grad_keys = torch.bmm(grad_scores.mT, queries).unflatten(0, inside.shape[:2])
        of_shared[rows] += grad_keys[:, :, w:].sum(dim=1)
        of_heavy[rows] += grad_values[:, :, w:g].sum(dim=1)
        shares = F.pad(grad_values[:, :, g:] / left.clamp(min=1)[..., None], (0, 0, 0, 1))
        of_far[rows] += shares.sum(dim=1)
        near_values = grad_values[:, :, :w] - take_rows(shares, inside)
        for whole, part in ((grad_k, grad_keys[:, :, :w]), (grad_v, near_values)):
            _add_windows(whole[rows, start * size : stop * size + 2 * reach], part, size)
    of_means = of_shared[:, g - w :] / stretches.count.clamp(min=1)[..., None]
    result = []
    for whole, shares, of_rows in (
        (grad_k, F.pad(of_means, (0, 0, 0, 1)), of_shared[:, : g - w]),
        (grad_v, of_far, of_heavy),
    ):
        inner = whole[:, reach : reach + t]
        inner += take_rows(shares, chosen.cluster)
        inner.scatter_add_(1, chosen.heavy[..., None].expand(-1, -1, inner.shape[-1]), of_rows)
        result.append(inner)
    return grad_q, result[0], result[1]


def _add_windows(whole: Tensor, part: Tensor, size: int) -> None:
    """Add windows of blocks (b, l, w, d) to the tokens that they are of, (b, l size + w - size, d), in place."""
    blocks, width = part.shape[1:3]
    for start in range(0, width, size):
        # Pieces of at most a block do not overlap.
        piece = part[:, :, start : start + size]
        end = start + (blocks - 1) * size + piece.shape[2]
        whole[:, start:end].unfold(1, piece.shape[2], size).mT.add_(piece)
