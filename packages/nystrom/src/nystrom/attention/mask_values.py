"""Masks of tokens as other libraries write them, as booleans with True = real token.

Each convention has one rule at every door: models, heads and the attention of transformers' models read
`attention_mask`, layers read `key_padding_mask` and `query_padding_mask`, functions read `keep`.

| a mask holds | transformers' `attention_mask` | torch's `key_padding_mask` | `keep` |
|---|---|---|---|
| booleans | True = real | True = ignore | True = real |
| integers 0 and 1 | 1 = real | raises | raises |
| floats 0 and 1 | 1 = real | raises | raises |
| floats 0 and -inf, or 0 and the lowest float | raises | 0 = real | raises |
| other numbers | raises | raises | raises |

`keep` is checked by its dtype alone, see `nystrom.shapes`. A float `attention_mask` of zeros alone raises, too: it may
be additive, in which 0 means a real token. The numbers of integers are checked on a CPU only: elsewhere a call would
wait for the device, and every number except 0 means a real token.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from nystrom.attention.exact_limit import may_branch
from nystrom.private_torch import assert_in_graph


def real_tokens(name: str, mask: Tensor) -> Bool[Tensor, "*b n"]:
    """Read a mask in transformers' convention.

    Raises:
        ValueError: It holds numbers other than 0 and 1, or floats that are all 0.
    """
    if mask.dtype == torch.bool:
        return mask
    is_float = mask.is_floating_point()
    if is_float or (mask.device.type == "cpu" and may_branch(mask)):
        no, yes = mask == 0, mask == 1
        holds = (no | yes).all()
        check_values(
            holds & (yes.any() | ~no.any()) if is_float else holds,
            f"{name} has dtype {mask.dtype} and holds {'zeros alone, or ' if is_float else ''}numbers other than 0 and "
            "1; expected True or 1 for real tokens, False or 0 for padding. In an additive mask, of 0 and -inf or the "
            f"lowest float, 0 means a real token: pass {name} == 0 for one, and {name}.bool() if 0 means padding.",
        )
    return mask.bool()


def unignored_tokens(name: str, ignore: Tensor) -> Bool[Tensor, "*b n"]:
    """Read a mask in torch's convention.

    Raises:
        ValueError: It holds integers, or floats other than 0, -inf and the lowest of its dtype.
    """
    if ignore.dtype == torch.bool:
        return ~ignore
    if not ignore.is_floating_point():
        raise ValueError(f"{name} has dtype {ignore.dtype}; expected torch.bool (True = ignore) or floats (0 or -inf).")
    keep = ignore == 0
    check_values(
        (keep | (ignore <= torch.finfo(ignore.dtype).min)).all(),
        f"{name} holds floats other than 0 and -inf (or the lowest float): a bias per key cannot be honoured; for one "
        f"of 0 and another low number pass {name} < 0.",
    )
    return keep


def check_values(holds: Bool[Tensor, ""], message: str) -> None:
    """Raise unless a condition on values holds."""
    if torch.compiler.is_compiling():
        # A compiled graph cannot branch on values: it raises this as a RuntimeError when it runs.
        assert_in_graph(holds, message)
    elif not holds:
        raise ValueError(message)
