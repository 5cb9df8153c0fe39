"""The values convolved along the tokens, one kernel per head, a stretch of tokens at a time, on a CPU.

float32 values whose heads are stored side by side, token by token, are convolved channels-last. All others are products
of windows: one of T + K - 1 tokens holds what T outputs of a kernel of K taps need, which are the (T x (T + K - 1))
banded matrix of the kernel times the window. A number that is not finite would pass to all of a window, since the
matrix has zeros, so that such a stretch is convolved channels-last, too. The gradient of tap t is the sum of the t-th
diagonal of (gradient x window^T), over all windows. `nystrom.attention.skip` states the equation.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.parts.stretches import Piece
from nystrom.native import is_plain
from nystrom.precision import accumulator, at_least_float32

# T: T + K - 1 products per output are computed, of which K are needed.
_WINDOW = 16


class Convolution:
    """The convolution of values with the kernels `w` of their heads, of odd size, for one piece after another."""

    def __init__(self, v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]):
        self._v, self._size = v, w.shape[1]
        together = v.stride(1) < v.stride(2) and v.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        self._band = None if together else _band(w)
        self._channels = w.repeat_interleave(v.shape[3], dim=0)[:, None, None]

    def at(self, piece: Piece) -> Float[Tensor, "g h p e"]:
        """The convolution at the tokens of a piece of `nystrom.attention.parts.stretches.pieces`, in new memory."""
        if self._band is None:
            return _by_channels(self._v, self._channels, piece)
        windows, length = _windows(self._v, piece, self._size), piece[2].stop - piece[2].start
        (h, count), group, e = windows.shape[:2], len(self._v[piece]), self._v.shape[3]
        # The zeros between several sequences have outputs too; after the last they are left out.
        slots = count if group == 1 else group * _slot(length, self._size) // _WINDOW
        out = self._v.new_empty(h, slots, _WINDOW, e)
        for matrix, x, place in zip(self._band, windows, out, strict=True):
            # One head at a time: over heads, the product would copy the overlapping windows.
            torch.bmm(matrix.expand(count, -1, -1), x, out=place[:count])
        out = out.view(h, group, -1, e)[:, :, :length].transpose(0, 1)
        return _by_channels(self._v, self._channels, piece) if is_plain(out) and not out.sum().isfinite() else out


def by_band(v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"]) -> Float[Tensor, "b h n e"]:
    """The convolution of all tokens by operations that have all derivatives; NaN passes to all of its window."""
    if 0 in (v.shape[0], v.shape[2]):
        return v * w.sum()
    return (_band(w)[:, None] @ _all_windows(v, w.shape[1])).flatten(2, 3)[:, :, : v.shape[2]]


def kernel_gradient(
    v: Float[Tensor, "b h n e"], w: Float[Tensor, "h k"], grad: Float[Tensor, "b h n e"]
) -> Float[Tensor, "h k"]:
    """The gradient of the kernels by operations that have all derivatives."""
    size = w.shape[1]
    if 0 in (v.shape[0], v.shape[2]):
        return torch.zeros_like(w)
    windows, blocks = (at_least_float32(_all_windows(x, size)) for x in (v, grad))
    outer = windows @ blocks[:, :, :, size // 2 : size // 2 + _WINDOW].mT
    return _diagonals(outer.sum(dim=(0, 2))).to(w.dtype)


class ConvolutionGradients:
    """The gradients of the values and, with `of_w`, of the kernels, from that of the convolution, piece after piece.

    The gradient of the values is added in place to `of_v`, another one, unless that is None.
    """

    def __init__(
        self,
        v: Float[Tensor, "b h n e"],
        w: Float[Tensor, "h k"],
        grad: Float[Tensor, "b h n e"],
        of_v: Float[Tensor, "b h n e"] | None,
        of_w: bool,
    ):
        self._v, self._w, self._grad, self._reversed = v, w, grad, Convolution(grad, w.flip(1))
        self._of_v, self._write = (torch.empty_like(v), Tensor.copy_) if of_v is None else (of_v, Tensor.add_)
        self._of_w = of_w

    def of_pieces(self, pieces: Iterable[Piece]) -> Float[Tensor, "h l t"] | None:
        """Write the gradients of the values of some pieces, and sum what these contribute to those of the kernels."""
        size, outer = self._w.shape[1], None
        if self._of_w:
            shape = (len(self._w), _WINDOW + size - 1, _WINDOW)
            outer = torch.zeros(shape, dtype=accumulator(self._v.dtype), device=self._v.device)
        for piece in pieces:
            self._write(self._of_v[piece], self._reversed.at(piece))
            if outer is not None:
                windows, blocks = (at_least_float32(_windows(x, piece, size)) for x in (self._v, self._grad))
                blocks = blocks[:, :, size // 2 : size // 2 + _WINDOW].mT
                for total, x, y in zip(outer, windows, blocks, strict=True):
                    total += torch.bmm(x, y).sum(dim=0)
        return outer

    def results(
        self, outers: Sequence[Float[Tensor, "h l t"] | None]
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "h k"] | None]:
        """The gradients of the values and of the kernels, from what `of_pieces` returned for all pieces."""
        sums = [outer for outer in outers if outer is not None]
        return self._of_v, _diagonals(torch.stack(sums).sum(dim=0)).to(self._w.dtype) if sums else None


def _by_channels(
    v: Float[Tensor, "b h n e"], kernels: Float[Tensor, "c 1 1 k"], piece: Piece
) -> Float[Tensor, "g h p e"]:
    (sequences, heads, tokens), half = piece, kernels.shape[3] // 2
    first, last = max(0, tokens.start - half), min(v.shape[2], tokens.stop + half)
    lines = v[sequences, heads, first:last].transpose(1, 2).flatten(2).mT[:, :, None]
    lines = F.conv2d(lines, kernels, padding=(0, half), groups=len(kernels))
    return lines[:, :, 0, tokens.start - first : tokens.stop - first].mT.unflatten(2, (-1, v.shape[3])).transpose(1, 2)


def _diagonals(outer: Float[Tensor, "h l t"]) -> Float[Tensor, "h k"]:
    """The sums of the diagonals of a window x gradient^T, one per tap."""
    column = torch.arange(_WINDOW, device=outer.device)
    row = column + torch.arange(outer.shape[1] - _WINDOW + 1, device=outer.device)[:, None]
    return outer[:, row, column.expand_as(row)].sum(-1)


def _all_windows(v: Float[Tensor, "b h n e"], size: int) -> Float[Tensor, "b h w l e"]:
    """The windows of all tokens, by operations that take a symbolic length."""
    half = size // 2
    # Never none: what is cut off in the end is then some tokens at any length, for which one graph serves.
    fill = _WINDOW - v.shape[2] % _WINDOW
    return F.pad(v, (0, 0, half, half + fill)).unfold(2, _WINDOW + size - 1, _WINDOW).mT


def _windows(v: Float[Tensor, "b h n e"], piece: Piece, size: int) -> Float[Tensor, "h w l e"]:
    """Overlapping windows of T + K - 1 tokens of a piece, T apart, as a view; the first starts (K - 1) / 2 before it.

    Several sequences follow one another, with zeros between them.
    """
    half, (sequences, _, tokens) = size // 2, piece
    first, last = max(0, tokens.start - half), min(v.shape[2], tokens.stop + half)
    line, slot = v[sequences, :, first:last].transpose(0, 1), _slot(tokens.stop - tokens.start, size)
    if slot != last - first:
        front = half - tokens.start + first
        line = F.pad(line, (0, 0, front, slot - front - last + first))
    return line.flatten(1, 2).unfold(1, _WINDOW + size - 1, _WINDOW).mT


def _slot(length: int, size: int) -> int:
    """Tokens that a sequence takes up in a line of windows, including the zeros around it: a multiple of T."""
    return (-(-length // _WINDOW) - (-(size - 1) // _WINDOW)) * _WINDOW


def _band(w: Float[Tensor, "h k"]) -> Float[Tensor, "h t l"]:
    """Row i holds the kernel, shifted right by i."""
    size = w.shape[1]
    place = torch.arange(_WINDOW + size - 1, device=w.device)
    offset = place[None] - place[:_WINDOW, None]
    return torch.where((offset >= 0) & (offset < size), w[:, offset.clamp(0, size - 1)], 0.0)
