"""Sort tokens by a number; among nearly equal numbers, the earlier token comes first.

The numbers of equal tokens may differ by rounding, which depends on padding; the order must not.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

# A sort key is the number in steps of 1 / _STEPS, then the place. Both fit into 63 bits: logarithms and scores stay
# below 2^22, and sequences below 2^30 tokens.
_STEPS, _PLACES, _FURTHEST = 2**10, 2**30, 2**22
NOT_REAL = torch.iinfo(torch.long).min


def in_order(
    numbers: Float[Tensor, "b h s"],
    place: Int[Tensor, "*b s"],
    keep: Bool[Tensor, "b #h s"] | None,  # noqa: F821
) -> Int[Tensor, "b h s"]:
    """Integers that sort like the numbers; where these differ by less than a thousandth, in reverse order of places.

    Places are counted with padding; tokens that are not real get the smallest integer.
    """
    level = (numbers.clamp(-_FURTHEST, _FURTHEST) * _STEPS).round().long()
    order = level * _PLACES + (_PLACES - 1 - place)
    return order if keep is None else torch.where(keep, order, NOT_REAL)


def first_in_order(order: Int[Tensor, "b h s"], g: int) -> tuple[Int[Tensor, "b h g"], Bool[Tensor, "b h g"]]:
    """Places of the g tokens with the largest numbers of `in_order`, and which of them are real; 0 where not."""
    # A sequence may have fewer than g tokens, and its length may be symbolic.
    top = F.pad(order, (0, g), value=NOT_REAL).topk(g, dim=-1).values
    exists = top > NOT_REAL
    return torch.where(exists, _PLACES - 1 - (top & (_PLACES - 1)), 0), exists
