r"""Errors of the Nyström method with randomly drawn columns, on the kernel matrix of one head: many draws of each size.

$C = \kappa(Q, K)$ is n x n, $\bar C$ its completion of 2n x 2n (Skyformer, eq. 4), and $\tilde C$ the approximation of
$\bar C$ from d columns (eq. 5), all in float64. For each draw these are kept:

- the error of the block, $\|C - \tilde C_{QK}\|$ (eq. 6), which is the error of attention;
- the error of the whole, the largest eigenvalue of $\bar C - \tilde C$;
- the smallest eigenvalue of $\bar C - \tilde C$, which only rounding makes negative.

The number of draws needed for an error is the size at which only a share $\delta$ of the draws exceeds that error. It
is interpolated between two measured sizes, on logarithmic axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom_papers.studies.matrices.dense_nystrom import nystrom_psd
from nystrom_papers.studies.matrices.spectra import spectral_norm

# Entries of the matrices that are computed at a time: 40 MB. A draw needs a few times as much.
_ENTRIES = 5_000_000


class DrawErrors(NamedTuple):
    """Errors of the draws of one size.

    Attributes:
        block: Spectral norm of the error of C.
        whole: Largest eigenvalue of the error of its completion; NaN where eigenvalues were not requested.
        least: Smallest eigenvalue of that error, or NaN as above.
    """

    block: Float[Tensor, " draws"]
    whole: Float[Tensor, " draws"]
    least: Float[Tensor, " draws"]


def measure_draws(
    completion: Float[Tensor, "all all"],
    draw: Callable[[torch.Generator], Int[Tensor, " d"]],
    *,
    draws: int,
    seed: int,
    eigenvalues: bool = True,
) -> DrawErrors:
    """Approximate a completion from many draws of columns.

    Without `eigenvalues` the error of the completion, which takes most of the time, is not measured.
    """
    n = completion.shape[-1] // 2
    generator = torch.Generator().manual_seed(seed)
    parts = []
    most = max(1, _ENTRIES // completion.numel())
    for begin in range(0, draws, most):
        count = min(most, draws - begin)
        indices = torch.stack([draw(generator) for _ in range(count)])
        error = completion - nystrom_psd(completion.expand(count, -1, -1), indices)
        block = spectral_norm(error[:, :n, n:])
        values = torch.linalg.eigvalsh(error) if eigenvalues else torch.full_like(error[:, 0], math.nan)
        parts.append(DrawErrors(block, values[:, -1], values[:, 0]))
    return DrawErrors(*(torch.cat(values) for values in zip(*parts, strict=True)))


def rounding(completion: Float[Tensor, "all all"]) -> float:
    """How far below 0 rounding may move the eigenvalues of a difference of two matrices of this size."""
    norm = torch.linalg.matrix_norm(completion, ord=2).item()
    return 2 * len(completion) * torch.finfo(completion.dtype).eps * norm


def needed_draws(sizes: Sequence[int], errors: Sequence[Tensor], limit: float, delta: float) -> float | None:
    """The size at which a share delta of the draws has an error above a limit; None if no measured size is enough.

    The sizes rise.
    """
    exceeded = [values.quantile(1 - delta).item() for values in errors]
    if exceeded[0] <= limit:
        return float(sizes[0])
    for place in range(1, len(sizes)):
        if exceeded[place] <= limit:
            # An error of 0 has no logarithm.
            low, high = (math.log(max(exceeded[i], 1e-300)) for i in (place, place - 1))
            part = (high - math.log(limit)) / (high - low)
            return sizes[place - 1] * (sizes[place] / sizes[place - 1]) ** part
    return None
