"""Many values of one quantity in one row: their mean and quartiles."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nystrom_lab.measure.rows import Row, new_row


def spread_row(
    quantity: str,
    method: str,
    values: Float[Tensor, "*any"],
    *,
    n: int | None = None,
    m: int | None = None,
    facts: Mapping[str, object] | None = None,
    dtype: str = "float32",
    seed: int | None = None,
    unit: str = "",
    median: bool = False,
) -> Row:
    """A row with the mean of the values, their quartiles as `low` and `high`, and their number as `repeats`.

    Args:
        quantity: What was measured.
        method: The method or matrix that was measured.
        values: One for each head and text, or for each of whatever the study repeats.
        n: Tokens.
        m: Landmarks, or what a method has in their place.
        facts: What else distinguishes the row.
        dtype: Dtype of the computation.
        seed: Seed of the draws.
        unit: Unit of the quantity.
        median: Take the median instead of the mean, for values over many powers of ten.
    """
    flat = values.double().flatten()
    low, high = flat.quantile(0.25).item(), flat.quantile(0.75).item()
    return new_row(
        quantity=quantity, method=method, value=(flat.quantile(0.5) if median else flat.mean()).item(), unit=unit,
        low=low, high=high, repeats=flat.numel(), n=n, m=m, facts=facts or {}, dtype=dtype, seed=seed,
    )  # fmt: skip


def difference_row(quantity: str, method: str, values: Float[Tensor, "*any"], **shared: Any) -> Row:
    """A row with the mean of paired differences, and as `low` and `high` two of its standard errors to either side."""
    flat = values.double().flatten()
    mean, error = flat.mean().item(), 2 * flat.std().item() / math.sqrt(len(flat))
    return new_row(
        quantity=quantity, method=method, value=mean, low=mean - error, high=mean + error, repeats=len(flat), **shared
    )
