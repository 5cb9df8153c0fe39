"""What every method does around its own computation: checks, dtypes, tokens that are not real, and empty inputs."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.forward_mode import refusing_by_name
from nystrom.precision import cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import Group, check_inputs, check_self_attention, zero_masked


def attend(
    core: Callable[..., Tensor],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    *rest: Any,
    self_attention: str | None = None,
    clean: bool = True,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Run `core(q, k, v, keep, query_keep, *rest)` on checked inputs.

    It sees tokens that are not real as zeros, the dtype that autocast asks for and no autocast inside; what it returns
    is zeroed at queries that are not real, and cast to the dtype of the values.

    Args:
        core: The computation.
        q: Queries.
        k: Keys.
        v: Values.
        keep: Real keys.
        query_keep: Real queries.
        *rest: What else it takes.
        self_attention: Name of a method that works for queries and keys of the same tokens alone.
        clean: Put zeros where tokens are not real; a core that looks at masks wherever it reads does without.
        group: Process group whose ranks hold pieces of the tokens; `nystrom.parallel` then takes over.

    Raises:
        ValueError: Shapes, dtypes or masks that do not fit.
        NotImplementedError: A derivative in forward mode is asked of a fused call.
    """
    if group is not None:
        # Imported when it is asked for: the room above, which stands on the methods.
        over_ranks = import_module("nystrom.parallel.door").attend_over_ranks
        return over_ranks(group, core, q, k, v, keep, query_keep, *rest, self_attention=self_attention)
    if self_attention is None:
        keep, query_keep = check_inputs(q, k, v, keep, query_keep)
    else:
        check_self_attention(self_attention, q, k, v, keep, query_keep)
        query_keep = keep
    q, k, v = cast_for_autocast(q, k, v)
    if any(isinstance(size, int) and size == 0 for size in (q.shape[0], q.shape[2], k.shape[2])):
        return nothing(q, k, v, *(x for x in rest if isinstance(x, Tensor)))
    with without_autocast(q), refusing_by_name():
        if not clean:
            return core(q, k, v, keep, query_keep, *rest)
        dtype = v.dtype
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        return narrowed(zero_masked(core(q, k, v, keep, query_keep, *rest), query_keep), dtype)


def nothing(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"], v: Float[Tensor, "b h s e"], *weights: Tensor
) -> Float[Tensor, "b h n e"]:
    """Zeros, or an empty result: for an empty batch, no query, or no key to attend to."""
    zeros = v.new_zeros(*q.shape[:3], v.shape[-1])
    # Part of the graph, so that a backward pass through an empty batch works as through any other.
    return zeros + sum(x.flatten()[:0].sum() for x in (q, k, v, *weights))
