"""The communication between the ranks of a group: every exchange of tensors in this package, with its gradient.

The loss is the sum of the losses of all ranks. So the gradient of a replicated tensor, such as a sum over ranks, is
split into one part per rank, and the backward pass of a sum over ranks is again a sum over ranks.

**One order.** Ranks that enter collectives in different orders would deadlock. In the backward pass, autograd chooses
the order. So each collective also takes a dummy tensor from the one before it and passes one to the next, and the
result depends on the last of them. All ranks then run all backward passes in reverse order, whether or not a rank's own
tokens need them.

A second derivative raises.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Span = tuple[int, int]


@dataclass
class Traffic:
    """The bytes that a rank passed to collectives.

    Attributes:
        total: Bytes. A sum or maximum over ranks counts its tensor once, regardless of the library's algorithm; a ring
            sends each byte at most twice. Point-to-point sends are counted once per receiving rank, excluding the rank
            itself.
        calls: Number of collectives.
        by_kind: Bytes of each kind of collective.
    """

    total: int = 0
    calls: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


_counting: list[Traffic] = []


@contextmanager
def count_bytes() -> Iterator[Traffic]:
    """Count what this rank sends to the others in attention over a group, forward and backward.

    Yields:
        The count, updated while the context is open.
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        # Compare by identity: two counts may be equal.
        _counting[:] = [other for other in _counting if other is not traffic]


def _count(kind: str, size: int) -> None:
    for traffic in _counting:
        traffic.total += size
        traffic.calls += 1
        traffic.by_kind[kind] = traffic.by_kind.get(kind, 0) + size


class Ranks:
    """The ranks of a group, during one call.

    Attributes:
        group: The process group.
        size: Number of ranks.
        rank: The number of this rank.
    """

    def __init__(self, group: Any):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._link: Tensor | None = None

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on all of them."""
        return self.in_order(_Sum, x)

    def fetch(self, x: Tensor, lengths: Sequence[int], spans: Sequence[Span]) -> Tensor:
        """Tokens between two positions, from the ranks that hold them.

        Args:
            x: This rank's tokens (n, ...).
            lengths: Tokens of each rank.
            spans: First position that each rank needs, and the one after the last.
        """
        return self.in_order(_Fetch, x, _Route.of(self.rank, lengths, spans))

    @torch.no_grad()
    def largest(self, x: Tensor) -> Tensor:
        """The maximum over all ranks, without a gradient."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        _count("maximum", x.nbytes)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of equal shape, stacked along a new first axis; no gradient."""
        x = x.detach().contiguous()
        _count("gather", x.nbytes * (self.size - 1))
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.stack(parts)

    @torch.no_grad()
    def send_from(self, rank: int, x: Tensor) -> Tensor:
        """Broadcast the tensor of one rank to all, in place; no gradient."""
        if rank == self.rank:
            _count("broadcast", x.nbytes)
        dist.broadcast(x, group=self.group, group_src=rank)
        return x

    @torch.no_grad()
    def sum_at(self, rank: int, x: Tensor) -> Tensor:
        """The sum over all ranks, on one rank, in place; no gradient."""
        if rank != self.rank:
            _count("reduce", x.nbytes)
        dist.reduce(x, group=self.group, group_dst=rank)
        return x

    def in_order(self, function: type[torch.autograd.Function], x: Tensor, *rest: Any) -> Tensor:
        """Apply a Function(link, ranks, x, *rest) that gives a result and the next link."""
        link = torch.zeros((), device=x.device) if self._link is None else self._link
        out, following = function.apply(link, self, x, *rest)
        if torch.is_grad_enabled():
            # Collectives without a gradient have no backward pass to order.
            self._link = following
        return out

    def begin_after(self, x: Tensor) -> Tensor:
        """The same tensor; all later collectives run their backward passes before its gradient is passed on."""
        assert self._link is None
        return self.in_order(_Begin, x)

    def end_with(self, out: Tensor) -> Tensor:
        """The result of the call; its backward pass runs those of all collectives of the call."""
        if self._link is None:
            return out
        out = self.in_order(_End, out)
        # The graph references this object; if this object referenced the graph, neither would ever be freed.
        self._link = None
        return out


def refuse_second_derivative() -> None:
    """Raise in a backward pass that is itself recorded for differentiation."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives of attention over a group are not supported (create_graph=True asks for one): use "
            "a single process, without group."
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, ranks: Ranks, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        return _summed(ranks, x), link.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return grads[1], None, _summed(ctx.ranks, grads[0]) if ctx.needs_input_grad[2] else None


def _summed(ranks: Ranks, x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    _count("sum", x.nbytes)
    dist.all_reduce(x, group=ranks.group)
    return x


@dataclass(frozen=True)
class _Route:
    """The tokens that a rank sends to each rank, and how many it receives from each."""

    outgoing: tuple[Span, ...]  # For each rank, the first of this rank's tokens to send, and the one after the last
    incoming: tuple[int, ...]  # Number of tokens from each rank; in order, they make up the span
    rank: int  # This rank

    @staticmethod
    def of(rank: int, lengths: Sequence[int], spans: Sequence[Span]) -> "_Route":
        starts = [sum(lengths[:other]) for other in range(len(lengths))]

        def common(owner: int, wanting: int) -> Span:
            first = min(max(spans[wanting][0] - starts[owner], 0), lengths[owner])
            return first, max(first, min(spans[wanting][1] - starts[owner], lengths[owner]))

        incoming = [common(owner, rank) for owner in range(len(lengths))]
        return _Route(
            tuple(common(rank, other) for other in range(len(lengths))),
            tuple(stop - start for start, stop in incoming),
            rank,
        )

    @property
    def sizes(self) -> list[int]:
        return [stop - start for start, stop in self.outgoing]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, ranks: Ranks, x: Tensor, route: _Route) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.route, ctx.shape = ranks, route, x.shape
        parts = torch.cat([x[start:stop] for start, stop in route.outgoing])
        return _exchange(ranks, parts, route.sizes, route.incoming), link.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if not ctx.needs_input_grad[2]:
            return grads[1], None, None, None
        route: _Route = ctx.route
        parts = _exchange(ctx.ranks, grads[0], route.incoming, route.sizes).split(route.sizes)
        total = grads[0].new_zeros(ctx.shape)
        for (start, stop), part in zip(route.outgoing, parts, strict=True):
            total[start:stop] += part
        return grads[1], None, total, None


def _exchange(ranks: Ranks, x: Tensor, sizes: Sequence[int], coming: Sequence[int]) -> Tensor:
    """Send the given number of tokens to each rank, and receive the given number from each."""
    shape, dtype = x.shape[1:], x.dtype
    # Some backends cannot send booleans.
    x = (x.to(torch.uint8) if dtype == torch.bool else x).reshape(len(x), shape.numel()).contiguous()
    out = x.new_empty(sum(coming), x.shape[1])
    _count("exchange", (sum(sizes) - sizes[ranks.rank]) * x.shape[1] * x.element_size())
    dist.all_to_all_single(out, x, list(coming), list(sizes), group=ranks.group)
    return out.to(dtype).view(-1, *shape)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, ranks: Ranks, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), link.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return None, None, grads[0]


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, ranks: Ranks, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), link.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return grads[1], None, grads[0]
