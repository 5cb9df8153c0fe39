"""Encoders across ranks, apart from attention: positions, pooled tokens and mean losses of all pieces.

`parallelize` sets the process group on the modules of a model. Each rank then calls the model with its piece of the
tokens, mask and token labels; labels of sequences are the same on all ranks. Every rank gets the hidden states and
scores of its own tokens, and the pooled tokens and loss of the whole, equal to those of a single process.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.registry import METHODS
from nystrom.parallel.agreement import agree, check_group
from nystrom.parallel.communication import Ranks
from nystrom.parallel.positions_over_ranks import Tokens, find_tokens, take_first
from nystrom.precision import at_least_float32
from nystrom.shapes import Group

# For models of other packages: make one of their own work over the ranks of a group, and say whether it is theirs.
_others: list[Callable[[nn.Module, Group], bool]] = []


def pass_parallelize(other: Callable[[nn.Module, Group], bool]) -> None:
    """Let `parallelize` take models of another package, as `nystrom.integrations` does for those of transformers."""
    _others.append(other)


def parallelize(model: nn.Module, group: Group) -> None:
    """Let a model of `nystrom.models`, or an encoder of transformers, take one piece of each sequence per rank.

    Every rank returns the whole loss. So the *mean* over ranks of a weight's gradients, which DistributedDataParallel
    takes, is the gradient of a single process. In training, dropout differs between ranks if their generators do.

    Args:
        model: `EncoderModel`, or one with a head for masked words, pretraining, sequences or tokens; or a model of
            transformers that attends by a method of this library, after `import nystrom.integrations`. Changed in
            place.
        group: Process group, or a mesh of one dimension; None returns to a single process.

    Raises:
        ValueError: An invalid group, or a model or method that does not work across ranks.
    """
    if not getattr(model, "over_ranks", False):
        if any(other(model, group) for other in _others):
            return
        raise ValueError(
            f"model is a {type(model).__name__}, which does not work over ranks; expected an encoder of "
            "nystrom.models, or after `import nystrom.integrations` of transformers, without a head, or with one for "
            "masked words, pretraining, sequences or tokens. For your own layers, set the attribute group of their "
            "AttentionHeads."
        )
    if group is not None:
        check_group(group)
    for name, module in model.named_modules():
        if not getattr(module, "over_ranks", True):
            raise ValueError(
                f"model has {name}, a {type(module).__name__}, which does not work over ranks: build it without."
            )
    methods = {module.method for module in model.modules() if isinstance(module, AttentionHeads)}
    if not methods:
        raise ValueError(
            "model has no attention, and its convolution would see only a rank's own tokens: use a single process."
        )
    for method in sorted(methods):
        if not METHODS[method].over_ranks:
            able = ", ".join(name for name, entry in METHODS.items() if entry.over_ranks)
            raise ValueError(f"model attends by {method}, which does not work over ranks: use one of {able}.")
    for module in model.modules():
        if hasattr(module, "group"):
            module.group = group  # pyright: ignore[reportArgumentType] (torch declares tensors and modules alone)


def count_positions_over_ranks(
    group: Group, words: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, limit: int | None
) -> Int[Tensor, "b n"]:
    """The position of each token, from the first real one of its sequence on all ranks; 0 for those before it.

    Raises:
        ValueError: There are more tokens than `limit`, or ranks disagree on batch, mask or dtype.
    """
    _, tokens = _pieces("the embeddings", group, words, keep)
    if limit is not None and tokens.total > limit:
        raise ValueError(
            f"the ranks hold {tokens.total} tokens, padding included, and the model has {limit} positions: cut the "
            f"sequences, or make a model with max_position_embeddings={tokens.total} or more."
        )
    here = tokens.start + torch.arange(words.shape[1], device=words.device)
    return (here - tokens.first[:, None]).clamp(min=0)


def pool_over_ranks(
    group: Group, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, *, how: str
) -> Float[Tensor, "b w"]:
    """One vector per sequence, from the real tokens of all ranks; see `nystrom.models.heads.sequences.pool`."""
    ranks, tokens = _pieces("pooling", group, x, keep)
    # A rank without tokens gets one padding token.
    wide = F.pad(at_least_float32(x), (0, 0, 0, 0 if x.shape[1] else 1))
    if how == "max":
        return ranks.end_with(_largest(ranks, tokens, wide).to(x.dtype))
    wide = torch.where(tokens.keep[..., None], wide, 0.0)
    if how == "first":
        pooled = take_first(ranks, tokens, wide[:, None], 1)[:, 0, 0]
    else:
        pooled = ranks.sum(wide.sum(dim=1)) / tokens.count.clamp(min=1)[:, None]
    return ranks.end_with(pooled.to(x.dtype))


def _largest(ranks: Ranks, tokens: Tokens, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b w"]:
    """The largest real value of each channel; its gradient goes to the ranks that hold it. 0 without real tokens."""
    mine = torch.where(tokens.keep[..., None], x, -torch.inf).amax(dim=1)
    here = mine == ranks.largest(mine)
    is_mine = here & tokens.keep.any(dim=1, keepdim=True)
    shares = ranks.gather(is_mine.to(x.dtype)).sum(dim=0).clamp(min=1)
    return ranks.sum(torch.where(is_mine, mine, 0.0) / shares)


def mean_over_ranks(group: Group, total: Float[Tensor, ""], count: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """The sum of all ranks' totals divided by the sum of their counts; 0 if nothing was counted."""
    ranks = check_group(group)
    # Compared first: a rank that makes another call would leave the others waiting.
    agree(ranks, {"the call": "the mean loss", "dtype": total.dtype}, (0, 0), None)
    counted = ranks.gather(count).sum()
    return ranks.end_with(ranks.sum(total)) / counted.clamp(min=1)


def _pieces(
    call: str, group: Group, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None
) -> tuple[Ranks, Tokens]:
    ranks = check_group(group)
    facts = {"the call": call, "batch": len(x), "dtype": x.dtype, "mask": "None" if keep is None else "given"}
    lengths = [n for n, _ in agree(ranks, facts, (x.shape[1], 0), None)]
    return ranks, find_tokens(ranks, lengths, keep, len(x), x.device)
