"""TabICL reads long tables: its attention to many training rows goes through a compressed context.

TabICL has no registry of attentions, so that one function of a module of it is replaced, for all its models and until
the end of a `with` block. The function is private to TabICL, hence the versions that were tried are named, and others
are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from nystrom.integrations.row_contexts import RowContexts

_TRIED = ("2.2.0",)


@contextmanager
def replace_tabicl(
    *, from_rows: int = 8192, from_queries: int = 2048, num_entries: int = 768, tolerance: float | None = None
) -> Iterator[RowContexts]:
    """Within the block, all models of TabICL attend to many rows through a context of a few entries.

    The arguments are those of `nystrom.integrations.tabpfn.register`. Contexts of cached keys are kept as long as the
    block and the keys; TabICL caches them as they are, so that `from_queries` says which predictions use them.

    Raises:
        ModuleNotFoundError: tabicl is not installed.
        ValueError: Another version of tabicl than was tried, or a number below its least.
    """
    try:
        from tabicl._model import attention
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("replace_tabicl needs tabicl: pip install tabicl==2.2.0", name="tabicl") from error
    if (there := version("tabicl")) not in _TRIED:
        raise ValueError(f"tabicl is {there}; expected {' or '.join(_TRIED)}, whose private function was tried.")
    contexts = RowContexts(from_rows=from_rows, from_queries=from_queries, num_entries=num_entries, tolerance=tolerance)
    own = attention.sdpa_with_flattened_batch

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        ssmax_layer: nn.Module | None = None,
    ) -> Tensor:
        plain = attn_mask is None and dropout_p == 0
        if not plain or not contexts.serve(q.shape[-2], k.shape[-2], q.dtype, q.device, kept=False):
            return own(q, k, v, attn_mask, dropout_p, ssmax_layer)
        queries = _flat(q) if ssmax_layer is None else ssmax_layer(_flat(q), k.shape[-2])
        return contexts.attend(queries, (k, v), lambda: (_flat(k), _flat(v))).reshape(q.shape)

    replaced: Any = attend
    attention.sdpa_with_flattened_batch = replaced
    try:
        yield contexts
    finally:
        attention.sdpa_with_flattened_batch = own


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:])
