r"""A trained table of positions with another number of rows.

With P trained rows $p_0 \ldots p_{P-1}$ and P' wanted ones:

- "repeat": $p'_i = p_{i \bmod P}$, the table block after block, as the authors of Nyströmformer lengthened theirs from
  512. The first P tokens get the rows that they had; tokens P apart get the same row.
- "interpolate": $p'_i = (1 - t)\, p_{\lfloor x \rfloor} + t\, p_{\lfloor x \rfloor + 1}$ at
  $x = i\, (P - 1) / (P' - 1)$ with $t = x - \lfloor x \rfloor$: the table stretched, its ends in place. The order is
  kept over the whole length, but neighbours are closer than they were in training.

Either is a start for further training. Fewer positions are the first rows of the table.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nystrom.checks import check_at_least, check_choice
from nystrom.precision import at_least_float32

Lengthening = Literal["repeat", "interpolate"]


def resize_positions(table: Float[Tensor, "p w"], length: int, *, how: Lengthening) -> Float[Tensor, "length w"]:
    """A table of `length` positions from a trained one; ValueError for a length below 1, or an unknown `how`."""
    check_at_least("max_position_embeddings", length, 1)
    check_choice("stretch", how, get_args(Lengthening))
    trained = table.shape[0]
    if how == "repeat" or length <= trained:
        return table[torch.arange(length, device=table.device) % trained]
    stretched = F.interpolate(at_least_float32(table).mT[None], size=length, mode="linear", align_corners=True)
    return stretched[0].mT.contiguous().to(table.dtype)
