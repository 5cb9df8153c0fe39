"""What all methods share around their own computation: checks, dtypes, padding and empty inputs."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.group_runner import group_runner
from nystrom.attention.segments import check_segments, in_segments
from nystrom.autograd_modes import refusing_by_name
from nystrom.precision import cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import Group, Masks, check_inputs, check_same_tokens, is_number, zero_masked

_PACKED = "cu_seqlens is given, and packed sequences attend to themselves: pass queries and keys of the same tokens"
# The message of `check_same_tokens` for a method without cross-attention.
SELF_ATTENTION = (
    "self-attention, of queries and keys of the same tokens: pass keep alone, or use 'nystrom' or 'softmax' for "
    "cross-attention"
)


def attend(
    core: Callable[..., Tensor],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    masks: Masks,
    *rest: Any,
    same_tokens: str | None = None,
    clean: bool = True,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Run `core(q, k, v, keep, query_keep, *rest)` on checked inputs, with the masks of keys and queries.

    The core sees padding tokens as zeros and the dtype that autocast asks for, with autocast switched off. Its result
    is zeroed at padding queries and cast to the dtype of the values.

    Args:
        core: The computation.
        q: Queries.
        k: Keys.
        v: Values.
        masks: Which tokens are real.
        *rest: Further arguments of the core.
        same_tokens: The message for a method that requires queries and keys of the same tokens, see
            `check_same_tokens`; None if they may differ.
        clean: Zero the padding tokens first; a core that applies the masks itself can skip this.
        group: Process group across which the tokens are split; `nystrom.parallel` then runs the method.

    Raises:
        ValueError: Invalid shapes, dtypes or masks.
        NotImplementedError: A forward-mode derivative of a fused call is requested.
    """
    if group is not None:
        return group_runner().attend(group, q, k, v, masks, *rest, same_tokens=same_tokens)
    if masks.cu_seqlens is not None and masks.is_self and masks.keep is None:
        return _attend_in_segments(core, q, k, v, masks.cu_seqlens, *rest, same_tokens=same_tokens, clean=clean)
    keep, query_keep = check_inputs(q, k, v, masks)
    if same_tokens is not None:
        check_same_tokens(same_tokens, q, k, masks)
    q, k, v = cast_for_autocast(q, k, v)
    if any(is_number(size) and size == 0 for size in (q.shape[0], q.shape[2], k.shape[2])):
        return nothing(q, k, v, *(x for x in rest if isinstance(x, Tensor)))
    with without_autocast(q), refusing_by_name():
        if not clean:
            return core(q, k, v, keep, query_keep, *rest)
        dtype = v.dtype
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        return narrowed(zero_masked(core(q, k, v, keep, query_keep, *rest), query_keep), dtype)


def _attend_in_segments(
    core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any, **how: Any
) -> Float[Tensor, "1 h n e"]:
    """Attend within each sequence of a packed batch; all use the same draws, as the sequences of a batch do."""
    check_inputs(q, k, v, Masks())
    check_same_tokens(_PACKED, q, k, Masks())
    edges = check_segments(cu_seqlens, q)
    if not q.shape[2]:
        return nothing(q, k, v)
    # The initial value "authors" depends on the whole batch, so each sequence gets a call of its own.
    alone = any(getattr(each, "z0", None) == "authors" for each in rest)
    drawing = next((each for each in rest if isinstance(each, torch.Generator)), None)
    state = None if drawing is None else drawing.get_state()

    def attend_some(q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None) -> Tensor:
        if drawing is not None and state is not None:
            drawing.set_state(state)
        return attend(core, q, k, v, Masks(keep), *rest, **how)

    return in_segments(attend_some, (q, k, v), edges, alone=alone)


def nothing(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"], v: Float[Tensor, "b h s e"], *weights: Tensor
) -> Float[Tensor, "b h n e"]:
    """Zeros, or an empty result: for an empty batch, no query, or no key to attend to."""
    zeros = v.new_zeros(*q.shape[:3], v.shape[-1])
    # Part of the graph, so that the backward pass also works through an empty batch.
    return zeros + sum(x.flatten()[:0].sum() for x in (q, k, v, *weights))
