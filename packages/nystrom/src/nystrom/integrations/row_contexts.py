"""Attention to the training rows of a table, through a context that is kept as long as the keys that it stands for.

A model of tables that learns in context (TabPFN, TabICL) has no order of rows, no mask, and asks the same training rows
at each prediction: the case of `nystrom.near_far_context`, whose equation this is.
"""

import weakref
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nystrom.attention.caches.near_far_context import NearFarContext, near_far_context
from nystrom.attention.options import check_tolerance
from nystrom.attention.parts.error_estimate import within_tolerance
from nystrom.checks import check_at_least

_DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


class RowContexts:
    """Contexts by the tensor of the keys that they stand for; each goes with its keys.

    Heavy keys are chosen without queries, so that a prediction does not depend on the rows that are predicted beside it
    or were predicted first.

    Args:
        from_rows: Keys from which a call goes through a context.
        from_queries: Queries of each head of keys from which a call does so, unless its keys are known to be kept: to
            compress keys costs as much as exact attention for many queries. Fewer pay where many calls share the same
            keys.
        num_entries: Entries of a context: a sixth of them heavy keys, the others clusters.
        tolerance: Estimated relative error from which a head attends exactly in a call; None for never.

    Raises:
        ValueError: A number below its least.
    """

    def __init__(self, *, from_rows: int, from_queries: int, num_entries: int, tolerance: float | None):
        check_at_least("from_rows", from_rows, 1)
        check_at_least("from_queries", from_queries, 1)
        check_at_least("num_entries", num_entries, 2)
        check_tolerance(tolerance)
        self.from_rows, self.from_queries = from_rows, from_queries
        self.num_entries, self.tolerance = num_entries, tolerance
        self._kept = WeakTensorKeyDictionary()

    def serve(self, queries: int, rows: int | None, dtype: torch.dtype, device: torch.device, *, kept: bool) -> bool:
        """Whether a call goes through a context, by its queries of each head of keys and its rows.

        Calls that may need a gradient, and those that a compiler traces, do not.

        Args:
            kept: Whether later calls are known to use the keys again.
        """
        return (
            rows is not None
            and rows >= self.from_rows
            and (kept or queries >= self.from_queries)
            and dtype in _DTYPES
            and device.type in ("cpu", "cuda")
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def attend(
        self,
        q: Float[Tensor, "b h n d"],
        stored: tuple[Tensor, Tensor],
        dense: Callable[[], tuple[Float[Tensor, "b j s d"], Float[Tensor, "b j s e"]]],
    ) -> Float[Tensor, "b h n e"]:
        """Attend to the context of some keys and values.

        Args:
            q: Queries; groups of h / j neighbouring heads share the keys of one.
            stored: Keys and values as they are stored, which the context is kept for.
            dense: Gives the keys and values themselves; called where there is no context yet, or with a tolerance.
        """
        context = self._find(stored)
        k, v = dense() if context is None or self.tolerance is not None else (None, None)
        if context is None:
            assert k is not None
            assert v is not None
            heavy = self.num_entries // 6
            context = near_far_context(k, v, num_heavy=heavy, num_clusters=self.num_entries - heavy)
            self._kept[stored[0]] = weakref.ref(stored[1]), context
        j, n = context.keys.shape[1], q.shape[2]
        # The heads that share keys are more queries of them.
        q = q.unflatten(1, (j, -1)).flatten(2, 3)
        if self.tolerance is None:
            out = context(q)
        else:
            out = within_tolerance(lambda q, *_: context(q), self.tolerance, None)(q, k, v, None, None)
        return out.unflatten(2, (-1, n)).flatten(1, 2)

    def bytes_kept(self) -> int:
        """Bytes of all contexts that are kept."""
        return sum(x.nbytes for _, context in self._kept.values() for x in context.buffers())

    def _find(self, stored: tuple[Tensor, Tensor]) -> NearFarContext | None:
        kept = self._kept.get(stored[0])
        return kept[1] if kept is not None and kept[0]() is stored[1] else None
