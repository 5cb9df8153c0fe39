r"""Random draws of the columns of a kernel matrix for the Nyström method.

A draw is a matrix S with one column $w_j e_{i_j}$ for each index $i_j$.

- `uniform_draws`: m independent draws with replacement, each index with probability 1/n, and $w = m^{-1/2}$ (Definition
  1 of Skyformer). With probabilities p instead of 1/n, the weight is $(m n p_i)^{-1/2}$.
- `leverage_draws`: the same, with probabilities proportional to scores, such as the exact
  `nystrom_lab.studies.matrices.spectra.leverage_scores`.
- `recursive_leverage_draws`: m columns without replacement, in proportion to ridge leverage scores. These are estimated
  from a sample, that sample is drawn by scores estimated from a smaller one, and so on, from O(n m) entries of the
  matrix. With a weighted sample $S$, the estimates are
  $$\tilde\ell_i = \tfrac1\lambda \bigl(C - C S (S^\top C S + \lambda I)^{-1} S^\top C\bigr)_{ii},$$
  which are the exact scores if S holds every column with weight 1.

Source: Chen et al. (2021), arXiv:2111.00035, Definition 1 and Theorem 2; Musco and Musco (2017), arXiv:1605.07583,
Algorithm 3. Their Algorithm 2, for a given ridge, is omitted: with its constants (16 log(..) times a score, 192 log(1 /
delta) columns at the base) it keeps every column of a matrix with a few thousand columns. Sizes, ridge and the factor
log m are those of their published code.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.checks import check_at_least, check_positive

# Entries of a matrix at the given rows and columns: (r,), (c,) -> (r, c).
Entries = Callable[[Tensor, Tensor], Tensor]


class Draws(NamedTuple):
    """Columns of a sampling matrix S: entry `weights[j]` at row `indices[j]`, on the device of the generator."""

    indices: Int[Tensor, " m"]
    weights: Float[Tensor, " m"]


def uniform_draws(n: int, m: int, generator: torch.Generator) -> Draws:
    """Draw m of n columns independently and with replacement, all with the same probability.

    Args:
        n: Columns to draw from.
        m: Number of draws.
        generator: Source of the draws.

    Raises:
        ValueError: `n` or `m` is below 1.
    """
    check_at_least("n", n, 1)
    check_at_least("m", m, 1)
    device = generator.device
    indices = torch.randint(n, (m,), generator=generator, device=device)
    return Draws(indices, torch.full((m,), m**-0.5, dtype=torch.float64, device=device))


def leverage_draws(scores: Float[Tensor, " n"], m: int, generator: torch.Generator) -> Draws:
    """Draw m columns independently and with replacement, in proportion to their scores.

    Args:
        scores: Scores of the columns, not negative and not all 0, on the device of the generator.
        m: Number of draws.
        generator: Source of the draws.

    Raises:
        ValueError: `m` is below 1, or the scores are negative, not finite or all 0.
    """
    check_at_least("m", m, 1)
    if not (scores.isfinite().all() and (scores >= 0).all() and (scores > 0).any()):
        least, most = scores.min().item(), scores.max().item()
        raise ValueError(f"scores run from {least} to {most}; expected finite numbers, none negative, some positive.")
    shares = scores.double() / scores.double().sum()
    indices = torch.multinomial(shares, m, replacement=True, generator=generator)
    return Draws(indices, (m * len(shares) * shares[indices]).rsqrt())


def approximate_leverage_scores(
    entries: Entries,
    diagonal: Float[Tensor, " n"],
    draws: Draws,
    ridge: float,
    *,
    among: Int[Tensor, " r"] | None = None,
) -> Float[Tensor, " r"]:
    """Estimate ridge leverage scores from a weighted sample of the columns.

    Args:
        entries: Entries of a symmetric positive semidefinite matrix at given rows and columns.
        diagonal: Its diagonal.
        draws: The sample.
        ridge: Ridge of the scores.
        among: Rows whose scores are wanted; None means all.

    Raises:
        ValueError: `ridge` is not positive.
    """
    check_positive("ridge", ridge)
    among = torch.arange(len(diagonal), device=diagonal.device) if among is None else among
    columns = entries(among, draws.indices)
    inner = entries(draws.indices, draws.indices)
    # The ridge is divided by the squared weights instead of weighting the columns: the product is the same.
    inner = inner + torch.diag(ridge / draws.weights.to(inner).square())
    taken = (torch.linalg.solve(inner, columns.mT) * columns.mT).sum(dim=0)
    return (diagonal[among] - taken).clamp(min=0) / ridge


def recursive_leverage_draws(
    entries: Entries, diagonal: Float[Tensor, " n"], m: int, generator: torch.Generator
) -> Draws:
    """Draw m different columns in proportion to estimated ridge leverage scores, from O(n m) entries.

    Args:
        entries: Entries of a symmetric positive semidefinite matrix at given rows and columns.
        diagonal: Its diagonal, on the device of the generator.
        m: Number of columns; all columns are returned if the matrix has no more.
        generator: Source of the draws.

    Returns:
        The columns, with weights of 1: the approximation that they are drawn for uses no weights.

    Raises:
        ValueError: `m` is below 1.
    """
    check_at_least("m", m, 1)
    n, device = len(diagonal), diagonal.device
    order = torch.randperm(n, generator=generator, device=device)
    sizes = [n]
    while sizes[-1] > m:
        sizes.append(-(-sizes[-1] // 2))
    indices = order[: sizes.pop()]
    draws = Draws(indices, torch.ones_like(diagonal[indices]))
    # log m is 0 at m = 1, where a factor of 1 is enough.
    factor = max(1.0, math.log(m))
    while sizes:
        rows = order[: sizes.pop()]
        ridge = _ridge_of(entries, draws, math.ceil(m / (4 * factor)))
        scores = approximate_leverage_scores(entries, diagonal, draws, ridge, among=rows)
        if not sizes:
            return _without_replacement(rows, scores, m, generator)
        chance = (factor * scores).clamp(max=1)
        taken = torch.rand(len(rows), generator=generator, device=device, dtype=chance.dtype) < chance
        if taken.any():
            draws = Draws(rows[taken], chance[taken].rsqrt())
        else:
            draws = Draws(rows[:m], torch.full_like(chance[:m], (len(rows) / m) ** 0.5))
    return draws


def _ridge_of(entries: Entries, draws: Draws, k: int) -> float:
    """The sum of all but the k largest eigenvalues of the weighted sample, divided by k."""
    inner = entries(draws.indices, draws.indices)
    weights = draws.weights.to(inner)
    values = torch.linalg.eigvalsh(weights[:, None] * inner * weights).clamp(min=0)
    # If there are only k eigenvalues, or the rest are rounding errors, the ridge is just above rounding.
    least = len(values) * torch.finfo(values.dtype).eps * values.max().clamp(min=torch.finfo(values.dtype).tiny)
    return max(values[:-k].sum() / k, least).item()


def _without_replacement(
    rows: Int[Tensor, " n"], scores: Float[Tensor, " n"], m: int, generator: torch.Generator
) -> Draws:
    # Columns with a score of 0 come last; they are drawn only if fewer than m have a positive score.
    shares = scores.clamp(min=torch.finfo(scores.dtype).tiny ** 0.5)
    drawn = torch.multinomial(shares, m, generator=generator)
    return Draws(rows[drawn], torch.ones_like(shares[drawn]))
