"""The work around each method's computation across ranks: agreement, checks, dtypes, masks and empty pieces."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.entry import empty_output
from nystrom.attention.registry import METHODS
from nystrom.parallel.agreement import agree, check_group, facts_of
from nystrom.parallel.methods.longformer_over_ranks import longformer_over_ranks
from nystrom.parallel.methods.near_far_over_ranks import near_far_over_ranks
from nystrom.parallel.methods.nystrom_over_ranks import nystrom_over_ranks
from nystrom.parallel.methods.skyformer_over_ranks import skyformer_over_ranks
from nystrom.parallel.methods.softmax_over_ranks import softmax_over_ranks
from nystrom.parallel.positions_over_ranks import find_tokens
from nystrom.precision import cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import Group, Masks, check_inputs, check_same_tokens, zero_masked

# The computation of each method that works across ranks: (ranks, queries, keys, q, k, v, *rest) -> outputs.
OVER_RANKS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax_over_ranks,
    "nystrom": nystrom_over_ranks,
    "near_far": near_far_over_ranks,
    "skyformer": skyformer_over_ranks,
    "longformer": longformer_over_ranks,
}
_METHODS = {entry.options: name for name, entry in METHODS.items()}


def attend_over_ranks(
    group: Group,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    masks: Masks,
    *rest: Any,
    same_tokens: str | None = None,
) -> Float[Tensor, "b h n e"]:
    """Attend as `nystrom.attention.entry.attend` would to the tokens of all ranks; returns this rank's piece.

    The method is that whose options are among the further arguments.

    Raises:
        ValueError: An invalid group; shapes, dtypes or masks that are invalid or differ between ranks; or a method or
            backend that does not work across ranks.
    """
    ranks, method = check_group(group), next(_METHODS[type(value)] for value in rest if type(value) in _METHODS)
    refusal = None
    try:
        _check_method(method, rest)
        check_inputs(q, k, v, masks)
        if same_tokens is not None:
            check_same_tokens(same_tokens, q, k, masks)
    except ValueError as error:
        refusal = error
    facts: dict[str, object] = {"method": method}
    for number, value in enumerate(rest):
        facts |= facts_of(f"argument {number} of {method}", value)
    held = 0, 0
    if refusal is None:
        held = q.shape[2], k.shape[2]
        facts |= {"(batch, heads)": tuple(q.shape[:2]), "head width": q.shape[-1], "value width": v.shape[-1]}
        kind = q.device.type
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        facts |= {"dtype": q.dtype, "device": kind, "autocast": autocast}
        facts |= {name: "None" if mask is None else "given" for name, mask in masks._asdict().items()}
        wanted = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.requires_grad and torch.is_grad_enabled()]
        facts["what has a gradient"] = " ".join(wanted) or "nothing"
    pieces = agree(ranks, facts, held, refusal)
    n, s = ([piece[i] for piece in pieces] for i in (0, 1))
    keep, query_keep = masks.settled()
    if q.shape[0] == 0 or sum(n) == 0 or sum(s) == 0:
        return empty_output(q, k, v)
    q, k, v = cast_for_autocast(q, k, v)
    with without_autocast(q):
        keys = find_tokens(ranks, s, keep, len(k), k.device)
        # In self-attention, one object serves both. Without a mask, other keys may be split differently.
        queries = keys if masks.is_self and n == s else find_tokens(ranks, n, query_keep, len(q), q.device)
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        # No operation meets an empty axis.
        padded = (x if x.shape[2] else F.pad(x, (0, 0, 0, 1)) for x in (q, k, v))
        out = OVER_RANKS[method](ranks, queries, keys, *padded, *rest)
        return ranks.end_with(narrowed(zero_masked(out[:, :, : q.shape[2]], query_keep), v.dtype))


def _check_method(method: str, rest: tuple[Any, ...]) -> None:
    if not METHODS[method].over_ranks:
        able = ", ".join(name for name, entry in METHODS.items() if entry.over_ranks)
        raise ValueError(f"group is given, but {method} does not work over ranks: leave it out, or use one of {able}.")
    if any(getattr(value, "backend", None) == "triton" for value in rest):
        raise ValueError("backend is 'triton', which has no Triton code for group: pass backend='torch'.")
