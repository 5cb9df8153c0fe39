r"""`nystrom.attention.parts.far_keys.attend_blocks` on a CPU, a stretch of blocks at a time.

Blocks copy several times as many keys as there are tokens. The copies exist only for a stretch of blocks that fits
into the cache. They are not kept: the backward pass copies the keys again. With the weights $P$ of a block and the
gradient $G$ of its output $O$, the gradient of the scores is
$\mathrm{d}S = P \circ (G V^\top - \mathrm{rowsum}(G \circ O))$. The gradient of a cluster's mean value goes to its
tokens outside the window, see `outside_sums`.

Blocks that select keys are computed here only by the loops of `native`; torch computes a stretch of them by the plain
form, and its gradient by autograd.

If a graph of the backward pass is recorded, and inside `torch.vmap`, the plain form is used.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nystrom.attention.fused import bias_of
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import add_windows, some_windows
from nystrom.attention.parts.clusters import Chosen, cluster_sums, in_one_matrix, open_sizes, take_rows
from nystrom.attention.parts.far_keys import attend_blocks, attend_with_bias, far_keys, keys_of_selecting_blocks
from nystrom.attention.parts.outside_sums import OutsideSums
from nystrom.attention.parts.stretches import cut, in_threads, num_parts
from nystrom.autograd_modes import for_one_gradient, known_signature, needs_graph, pull_back
from nystrom.native import room_like, run_blocks, runs_natively
from nystrom.shapes import cut_blocks, score_scale

# Numbers in the copied keys of a stretch of blocks: at least _FEWEST, or half of what the keys themselves hold if that
# is more, but no more than _MOST, which fits into a cache: fresh memory costs more than it saves.
_FEWEST = 2**14
_MOST = 2**19
# Most blocks in a group: larger groups mean more work on the far values of each block, smaller ones more calls.
_GROUP = 16


def attend_in_stretches(
    q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, options: NearFarOptions, selected: Tensor | None = None
) -> Tensor:
    """The result of `attend_blocks`, from the same arguments."""
    return _Blocks.apply(q, k, v, *chosen, selected, options)


class _Stretches:
    """The copied keys of blocks, written anew for each stretch into the same memory."""

    def __init__(self, k: Tensor, v: Tensor, chosen: Chosen, options: NearFarOptions):
        self.size, self.reach, self.m = options.block_size, options.reach, options.num_clusters
        self.k, self.v, self.chosen = k, v, chosen
        self.count = open_sizes(k, chosen, self.m)
        self.means = cluster_sums(k, chosen.cluster, self.m) / self.count.clamp(min=1)[..., None]
        # Index of the first heavy key, and of the first cluster.
        self.heavy = self.size + 2 * self.reach
        self.far = self.heavy + chosen.heavy.shape[1]
        length, width = self.far + self.m, max(k.shape[-1], v.shape[-1])
        numbers = min(max(_FEWEST, k.numel() // 2), _MOST)
        self.total_blocks = k.shape[1] // self.size
        self.blocks = min(self.total_blocks, max(1, numbers // (length * width)))
        self.rows = max(1, min(len(k), numbers // (length * width * self.total_blocks)))
        # The blocks of a group share the work on their far values; a stretch holds whole groups.
        group = self.blocks // -(-self.blocks // _GROUP)
        if self.blocks < self.total_blocks:
            self.blocks -= self.blocks % group
        self.sums = OutsideSums(v, chosen.cluster, self.m, size=self.size, reach=self.reach, blocks=group)
        # If keys and values differ in width, the narrower ones are padded with zeros.
        self.keys, self.values = (
            (x.new_empty if x.shape[-1] == width else x.new_zeros)(self.rows, self.blocks, length, width)
            for x in (k, v)
        )
        self.bias = k.new_empty(self.rows, self.blocks, length)

    def __iter__(self):
        """Rows and blocks of each stretch."""
        for row in range(0, len(self.k), self.rows):
            for start in range(0, self.total_blocks, self.blocks):
                yield slice(row, row + self.rows), start, min(self.total_blocks, start + self.blocks)

    def near(self, x: Tensor, rows: slice, start: int, stop: int) -> Tensor:
        """The windows of blocks, as a view; zeros outside the sequence."""
        return some_windows(x[rows], start * self.size, stop * self.size, self.size, self.reach)

    def inside(self, rows: slice, start: int, stop: int) -> Tensor:
        """The cluster of each key in the windows of blocks, as a view."""
        piece = self.sums.cluster[rows, start * self.size : stop * self.size + 2 * self.reach]
        return piece.unfold(1, self.heavy, self.size)

    def fill(self, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and bias of blocks, and how many far tokens each cluster has."""
        d, e, inside = self.k.shape[-1], self.v.shape[-1], self.inside(rows, start, stop)
        keys, values, bias = (x[: len(inside), : stop - start] for x in (self.keys, self.values, self.bias))
        if start == 0:
            # Written once: the other stretches of these rows reuse them.
            heavy = self.chosen.heavy[rows]
            self.keys[: len(inside), :, self.heavy : self.far, :d] = take_rows(self.k[rows], heavy)[:, None]
            self.keys[: len(inside), :, self.far :, :d] = self.means[rows, None]
            self.values[: len(inside), :, self.heavy : self.far, :e] = take_rows(self.v[rows], heavy)[:, None]
            self.bias[: len(inside), :, self.heavy : self.far] = bias_of(self.chosen.exists[rows], bias.dtype)[:, None]
        keys[:, :, : self.heavy, :d] = self.near(self.k, rows, start, stop)
        values[:, :, : self.heavy, :e] = self.near(self.v, rows, start, stop)
        shape, place = torch.Size([*inside.shape[:2], self.m + 1]), in_one_matrix(inside, self.m + 1)
        left = self.count[rows, None] - torch.bincount(place, minlength=shape.numel()).view(shape)[..., : self.m]
        sums = self.sums.of_stretch(rows, start, stop)
        torch.div(sums, left.clamp(min=1)[..., None], out=values[:, :, self.far :, :e])
        bias[:, :, : self.heavy].zero_().masked_fill_(inside == self.m, -torch.inf)
        torch.log(left, out=bias[:, :, self.far :])
        return keys, values, bias, left


def sizes_of(q: Tensor, options: NearFarOptions) -> tuple[tuple[int, int, int], float]:
    """The sizes and the scale, as `run_blocks` takes them."""
    return (options.num_clusters, options.block_size, options.reach), score_scale(q, options.scale)


class _Blocks(torch.autograd.Function):
    @staticmethod
    @known_signature
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heavy: Tensor,
        exists: Tensor,
        cluster: Tensor,
        selected: Tensor | None,
        options: NearFarOptions,
    ) -> Tensor:
        # In the layout of the queries: a model puts the heads side by side again.
        out = room_like(q) if q.shape[-1] == v.shape[-1] else v.new_empty(*q.shape[:2], v.shape[-1])
        if runs_natively(q, k, v):
            chosen = Chosen(heavy, exists, cluster)
            run_blocks("blocks_forward", chosen, *sizes_of(q, options), selected=selected, q=q, k=k, v=v, out=out)
            return out

        def attend(rows: slice) -> None:
            chosen = Chosen(heavy[rows], exists[rows], cluster[rows])
            if selected is None:
                _attend_rows(out[rows], q[rows], k[rows], v[rows], chosen, options)
                return
            for place, some in _selecting(q[rows], k[rows], v[rows], chosen, selected[rows], options):
                out[rows, place] = some(q[rows, place], k[rows], v[rows])

        in_threads(attend, cut(len(q), num_parts(q, k, v)))
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, v, heavy, exists, cluster, selected, out), options = grads, ctx.saved_tensors, ctx.options
        chosen, nothing = Chosen(heavy, exists, cluster), (None,) * 5
        if needs_graph(grad):
            gradients = pull_back(lambda q, k, v: attend_blocks(q, k, v, chosen, options, selected), (q, k, v), grad)
            return *gradients, *nothing
        of_q, of_k, of_v = (room_like(x) for x in (q, k, v))
        if runs_natively(q, k, v, grad):
            tensors = {"q": q, "k": k, "v": v, "out": out, "grad": grad, "of_q": of_q, "of_k": of_k, "of_v": of_v}
            run_blocks("blocks_backward", chosen, *sizes_of(q, options), selected=selected, **tensors)
            return of_q, of_k, of_v, *nothing

        def differentiate(rows: slice) -> None:
            chosen = Chosen(heavy[rows], exists[rows], cluster[rows])
            if selected is not None:
                of_k[rows], of_v[rows] = 0, 0
                for place, some in _selecting(q[rows], k[rows], v[rows], chosen, selected[rows], options):
                    parts = pull_back(some, (q[rows, place], k[rows], v[rows]), grad[rows, place])
                    of_q[rows, place] = parts[0]
                    of_k[rows] += parts[1]
                    of_v[rows] += parts[2]
                return
            parts = _gradients(grad[rows], q[rows], k[rows], v[rows], chosen, out[rows], options, of_q[rows])
            for whole, part in zip((of_k, of_v), parts, strict=True):
                whole[rows].copy_(part)

        in_threads(differentiate, cut(len(q), num_parts(grad, q, k, v)))
        return of_q, of_k, of_v, *nothing

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, options = inputs

        def plain(q, k, v, heavy, exists, cluster, selected):
            return attend_blocks(q, k, v, Chosen(heavy, exists, cluster), options, selected)

        return torch.vmap(plain, in_dims[:-1])(*tensors), 0


def _selecting(
    q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, selected: Tensor, options: NearFarOptions
) -> Iterator[tuple[slice, Callable[..., Tensor]]]:
    """The places of some blocks that select keys, and their attention, a function of their queries and all tokens."""
    size, scale = options.block_size, score_scale(q, options.scale)
    length = size + 2 * options.reach + selected.shape[2] + options.num_heavy + options.num_clusters
    step = max(1, min(max(_FEWEST, k.numel() // 2), _MOST) // (len(q) * length * max(q.shape[2], v.shape[2])))
    for first in range(0, selected.shape[1], step):
        some = selected[:, first : first + step]

        def attend(q: Tensor, k: Tensor, v: Tensor, first: int = first, some: Tensor = some) -> Tensor:
            far = far_keys(k, v, chosen, options)
            keys = keys_of_selecting_blocks(k, v, chosen.cluster, far, some, first, options)
            return attend_with_bias(cut_blocks(q, size), keys, scale).flatten(1, 2)

        yield slice(first * size, (first + some.shape[1]) * size), attend


def _attend_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, options: NearFarOptions) -> None:
    """Write the result of some rows."""
    stretches, scale, size = _Stretches(k, v, chosen, options), score_scale(q, options.scale), options.block_size
    d, e = q.shape[-1], v.shape[-1]
    for rows, start, stop in stretches:
        keys, values, bias, _ = stretches.fill(rows, start, stop)
        place = slice(start * size, stop * size)
        queries = cut_blocks(q[rows, place], size)
        queries = F.pad(queries, (0, keys.shape[-1] - d)) if keys.shape[-1] > d else queries
        # Blocks form the batch: the fused call then leaves its result in the order of the tokens.
        queries, keys, values, bias = (x.flatten(0, 1)[:, None] for x in (queries, keys, values, bias))
        here = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias[:, :, None], scale=scale)
        out[rows, place].copy_(here[..., :e].reshape(-1, place.stop - place.start, e))


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Chosen,
    out: Tensor,
    options: NearFarOptions,
    grad_q: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the gradient of the queries of some rows; the gradients of their keys and values."""
    stretches, scale = _Stretches(k, v, chosen, options), score_scale(q, options.scale)
    size, reach, m, t = options.block_size, options.reach, options.num_clusters, q.shape[1]
    heavy, far, d, e = stretches.heavy, stretches.far, q.shape[-1], v.shape[-1]
    grad_k, grad_v = (x.new_zeros(len(x), stretches.sums.cluster.shape[1], x.shape[-1]) for x in (k, v))
    # Gradients of heavy keys and means, and of heavy values; an extra cluster collects tokens without one.
    of_keys, of_heavy = k.new_zeros(len(k), far - heavy + m + 1, d), v.new_zeros(len(v), far - heavy, e)
    for rows, start, stop in stretches:
        place = slice(start * size, stop * size)
        keys, values, bias, left = stretches.fill(rows, start, stop)
        shape = left.shape[:2]
        keys, values, bias = keys[..., :d].flatten(0, 1), values[..., :e].flatten(0, 1), bias.flatten(0, 1)
        queries, coming, there = (cut_blocks(x[rows, place], size).flatten(0, 1) for x in (q, grad, out))
        scores = torch.baddbmm(bias[:, None], queries, keys.mT, alpha=scale)
        weights = torch.softmax(scores, dim=-1, out=scores)
        grad_values = torch.bmm(weights.mT, coming).unflatten(0, shape)
        coming = scale * coming
        grad_scores = torch.bmm(coming, values.mT)
        grad_scores.sub_((coming * there).sum(dim=-1, keepdim=True)).mul_(weights)
        grad_q[rows, place] = torch.bmm(grad_scores, keys).unflatten(0, shape).flatten(1, 2)
        grad_keys = torch.bmm(grad_scores.mT, queries).unflatten(0, shape)
        of_keys[rows, :-1] += grad_keys[:, :, heavy:].sum(dim=1)
        of_heavy[rows] += grad_values[:, :, heavy:far].sum(dim=1)
        span = slice(place.start, place.stop + 2 * reach)
        add_windows(grad_k[rows, span], grad_keys[:, :, :heavy], size)
        add_windows(grad_v[rows, span], grad_values[:, :, :heavy], size)
        stretches.sums.add_gradient(grad_v, grad_values[:, :, far:], left.clamp(min=1), rows, start)
    of_keys[:, far - heavy : -1] /= stretches.count.clamp(min=1)[..., None]
    grad_k, grad_v = (x[:, reach : reach + t] for x in (grad_k, grad_v))
    grad_k += take_rows(of_keys[:, far - heavy :], chosen.cluster)
    for whole, some in ((grad_k, of_keys[:, : far - heavy]), (grad_v, of_heavy)):
        whole.scatter_add_(1, chosen.heavy[..., None].expand_as(some), some)
    return grad_k, grad_v
