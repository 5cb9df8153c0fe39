"""The order of tokens by a number each: of about equal ones the first comes first.

Numbers that are equal but for their rounding, as those of equal tokens are, would hang on padding otherwise.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Numbers count in steps of 1 / _STEPS, and then places do. Together they fit into 63 bits: numbers beyond 2^22 and 2^30
# places are more than logarithms, scores and sequences have.
_STEPS, _PLACES, _FURTHEST = 2**10, 2**30, 2**22
NOT_REAL = torch.iinfo(torch.long).min


def in_order(
    numbers: Float[Tensor, "b h s"], place: Int[Tensor, "*b s"], keep: Bool[Tensor, "b #h s"] | None
) -> Int[Tensor, "b h s"]:
    """Whole numbers in the order of the given ones, and of about equal ones in that of their places.

    Args:
        numbers: Numbers whose differences below a thousandth mean nothing.
        place: Places of the tokens in their sequence, padding included.
        keep: Real tokens, None if all are; others come last.
    """
    level = (numbers.clamp(-_FURTHEST, _FURTHEST) * _STEPS).round().long()
    order = level * _PLACES + (_PLACES - 1 - place)
    return order if keep is None else torch.where(keep, order, NOT_REAL)


def first_in_order(order: Int[Tensor, "b h s"], g: int) -> tuple[Int[Tensor, "b h g"], Bool[Tensor, "b h g"]]:
    """Places of the g tokens with the largest numbers of `in_order`, and which of them are real; 0 where not."""
    # A sequence, perhaps of a length that is only a symbol, may have fewer tokens than are asked for.
    top = F.pad(order, (0, g), value=NOT_REAL).topk(g, dim=-1).values
    found = top > NOT_REAL
    return torch.where(found, _PLACES - 1 - (top & (_PLACES - 1)), 0), found
