"""TabPFN reads long tables: its attention to many training rows goes through a compressed context.

    from nystrom.integrations.tabpfn import register

    register()
    TabPFNClassifier(fit_mode="fit_with_cache").fit(x, y).predict_proba(x_test)

`register` adds a backend to the public registry of tabpfn (`tabpfn.architectures.shared.attention_backends`, from
version 8.3; tried with 9.2.0). It takes calls with at least `from_rows` keys; all others, calls with gradients and
compiled ones stay TabPFN's own. Keys and values that tabpfn caches, quantized or not, are compressed once, and their
context is kept until tabpfn lets them go.
"""

import warnings
from typing import Any

from torch import Tensor

from nystrom.integrations.row_contexts import RowContexts

_NAME = "nystrom"


class _Backend:
    """A backend of tabpfn's registry, whose `AttentionBackend` says what the names below are."""

    name = _NAME
    consumes_quantized_kv = True

    def __init__(self, contexts: RowContexts):
        self.contexts, self._warned = contexts, False

    def is_preferred(self, spec: Any) -> bool:
        kept = spec.quantized_kv_dtype is not None
        queries = spec.seq_len_q * spec.num_heads // spec.num_kv_heads
        return self.contexts.serve(queries, spec.seq_len_kv, spec.dtype, spec.device, kept=kept)

    def run(
        self, q_BSHD: Tensor, k_BSJD: Tensor | None, v_BSJD: Tensor | None, *, quantized_kv: Any = None, **_: Any
    ) -> Tensor:
        stored: tuple[Any, Any] = (k_BSJD, v_BSJD)
        if quantized_kv is not None:
            stored = quantized_kv.key, quantized_kv.value

        def dense() -> tuple[Tensor, Tensor]:
            k, v = stored
            if quantized_kv is not None:
                entry = quantized_kv.dequantize(q_BSHD.dtype)
                k, v = entry.key, entry.value
            return k.transpose(1, 2), v.transpose(1, 2)

        try:
            return self.contexts.attend(q_BSHD.transpose(1, 2), stored, dense).transpose(1, 2)
        except (ValueError, RuntimeError) as error:
            from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention

            if not self._warned:
                self._warned = True
                warnings.warn(f"TabPFN's own attention takes calls that nystrom cannot: {error}", stacklevel=2)
            return scaled_dot_product_attention(q_BSHD, k_BSJD, v_BSJD, quantized_kv=quantized_kv, backend=None)


def register(
    *, from_rows: int = 8192, from_queries: int = 2048, num_entries: int = 768, tolerance: float | None = None
) -> None:
    """Let TabPFN attend to many rows through a context of a few entries, in this process, until `unregister`.

    Args:
        from_rows: Training rows from which attention goes through a context.
        from_queries: Queries of each head of keys from which it does, unless tabpfn's cache is quantized, as it is by
            default. With `kv_cache_precision="auto"` name fewer, such as 512: many calls share the same keys.
        num_entries: Entries of a context: a sixth are rows, the others means of clusters of rows.
        tolerance: Estimated relative error from which a head attends exactly in a call; None for never.

    Raises:
        ModuleNotFoundError: tabpfn from 8.3 is not installed.
        ValueError: A number below its least.
    """
    try:
        from tabpfn.architectures.shared.attention_backends import register_attention_backend
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "nystrom.integrations.tabpfn needs tabpfn from version 8.3: pip install 'tabpfn>=8.3'", name=error.name
        ) from error
    backend = _Backend(
        RowContexts(from_rows=from_rows, from_queries=from_queries, num_entries=num_entries, tolerance=tolerance)
    )
    unregister()
    register_attention_backend(backend)


def unregister() -> None:
    """Give TabPFN its own attention back, and forget all contexts; nothing happens if `register` was not called."""
    from tabpfn.architectures.shared.attention_backends import unregister_attention_backend

    unregister_attention_backend(_NAME)
