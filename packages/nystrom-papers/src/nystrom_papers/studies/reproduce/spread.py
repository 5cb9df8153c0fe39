"""Many values of one quantity in one row: their mean and quartiles."""

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nystrom_lab.measure.rows import Row


def spread_row(
    quantity: str, method: str, values: Float[Tensor, "*any"], *, median: bool = False, **shared: Any
) -> Row:
    """A row with the mean of the values, their quartiles as `low` and `high`, and their number as `repeats`.

    Args:
        quantity: The measured quantity.
        method: The method or matrix that was measured.
        values: One for each head and text, or for each repetition of the study.
        median: Take the median instead of the mean, for values over many powers of ten.
        **shared: Other fields of the row, see `Row`.
    """
    flat = values.double().flatten()
    low, middle, high = (flat.quantile(share).item() for share in (0.25, 0.5, 0.75))
    value = middle if median else flat.mean().item()
    return Row(quantity=quantity, method=method, value=value, low=low, high=high, repeats=flat.numel(), **shared)


def difference_row(quantity: str, method: str, values: Float[Tensor, "*any"], **shared: Any) -> Row:
    """A row with the mean of paired differences, and as `low` and `high` two of its standard errors to either side."""
    flat = values.double().flatten()
    mean, error = flat.mean().item(), 2 * flat.std().item() / math.sqrt(len(flat))
    low, high = mean - error, mean + error
    return Row(quantity=quantity, method=method, value=mean, low=low, high=high, repeats=len(flat), **shared)
