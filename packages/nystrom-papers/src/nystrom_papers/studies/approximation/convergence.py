r"""How the iteration for the pseudoinverse converges on the matrices of real heads, step by step.

A is the softmax matrix of the landmarks (segment means) of one head, and $A^+$ is `numpy.linalg.pinv` in float64. The
iteration runs in float64 and in float32; what is measured after k steps from $Z_0$ is always evaluated in float64:

- the residual $\|I - A Z_k\|_2$ and the distance $\|Z_k - A^+\|_F / \|A^+\|_F$;
- for the iteration in float64, the error of Lemma 1, $e_k = \|A A^+ - A Z_k\|_2$: whether $e_{k+1} \le e_k^3$ where
  $e_k < 1$, and the observed order $\ln e_{k+1} / \ln e_k$ where $e_k < 1/2$ and $e_{k+1}$ is above 100 times the
  rounding error;
- the relative error of the attention matrix that $Z_k$ gives, and of the one that $A^+$ gives.

The rounding error is taken to be $10\, m\, \epsilon\, \kappa(A)$, the accuracy to which $A A^+$ and the products are
known. A matrix for which it is 0.01 or more is too nearly singular to say anything about the lemma. The iterations run
on the heads of the first text. The start values are those of all texts, since the authors' code takes its norm over
the whole batch.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import matrix_norm

from nystrom.attention.fused import softmax_rows
from nystrom.checks import StartValue
from nystrom.landmarks import segment_means
from nystrom.linalg.pinv import iterate, pinv_ridge, residual, start_value
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.real_heads.recorded import LayerHeads
from nystrom_papers.studies.matrices.spectra import condition_number
from nystrom_papers.studies.reproduce.spread import spread_row

RESIDUAL, DISTANCE = "norm of I - A Z", "distance to the pseudoinverse"
NEAR, MATRIX = "share of heads within 0.1 of the pseudoinverse", "relative error of the attention matrix"
CONDITION = "condition number of A"
STARTS_BELOW, LEMMA_HOLDS_AT_START = "share of heads with |I - A Z_0| < 1", "share of heads with |A A+ - A Z_0| < 1"
REGULAR = "share of heads whose start is below 1 but for rounding"
CUBED, ORDER = "share of steps within the bound of Lemma 1", "observed order of convergence"
STARTS: tuple[StartValue, ...] = ("paper", "authors", "sequence")
NEAR_ENOUGH = 0.1
# Stands for every value beyond the range of the figures, and for every value that is not finite.
_LOST = 1e30
_TOO_COARSE = 0.01


def landmark_matrix(heads: LayerHeads, m: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "b h m m"]:
    """The softmax matrix A of the segment means, computed in a dtype."""
    q, k = heads.q.to(dtype), heads.k.to(dtype)
    return softmax_rows(segment_means(q, m), segment_means(k, m))


def true_inverse(a: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b m m"]:
    """The pseudoinverse, computed by numpy as in the paper."""
    return torch.from_numpy(np.linalg.pinv(a.double().numpy()))


def convergence_rows(layers: Sequence[LayerHeads], m: int, steps: int) -> Iterable[Row]:
    """Rows of all that is measured on A for the heads of some layers, with m landmarks."""
    n, facts = layers[0].q.shape[2], {"weights": layers[0].weights}
    exact = _flat([landmark_matrix(each, m) for each in layers])
    inverse = true_inverse(exact)
    yield spread_row(CONDITION, "softmax", _condition(exact), n=n, m=m, facts=facts, dtype="float64", median=True)
    regular = (_condition(exact) * m * torch.finfo(torch.float64).eps < 1).double()
    yield spread_row(REGULAR, "paper", regular, n=n, m=m, facts={**facts, "k": 0}, dtype="float64")
    for dtype in (torch.float64, torch.float32):
        a, name = [landmark_matrix(each, m, dtype) for each in layers], str(dtype).removeprefix("torch.")
        for z0 in STARTS:
            # The authors' start value takes its norm over all heads of a layer.
            z = _flat([start_value(each, z0=z0) for each in a])
            begun = matrix_norm(exact @ (inverse - z.double()), ord=2)
            for quantity, below in ((STARTS_BELOW, residual(_flat(a), z) < 1), (LEMMA_HOLDS_AT_START, begun < 1)):
                yield spread_row(quantity, z0, below.double(), n=n, m=m, facts={**facts, "k": 0}, dtype=name)
        for quantity, values in _gaps(exact, inverse, pinv_ridge(_flat(a)).double()).items():
            yield spread_row(quantity, "ridge", values, n=n, m=m, facts=facts, dtype=name, median=True)
        for quantity, k, values in _steps(
            [each[:1] for each in a], [landmark_matrix(each, m)[:1] for each in layers], steps
        ):
            yield spread_row(
                quantity, "paper", values, n=n, m=m, facts={**facts, "k": k}, dtype=name,
                median=quantity not in (NEAR, CUBED),
            )  # fmt: skip


def _steps(
    layers: Sequence[Float[Tensor, "b h m m"]], exactly: Sequence[Float[Tensor, "b h m m"]], steps: int
) -> Iterable[tuple[str, int | None, Tensor]]:
    """The measurements after each number of iterations, as quantity, step and values; Lemma 1 only in float64."""
    a, exact = _flat(layers), _flat(exactly)
    inverse, z, errors = true_inverse(exact), start_value(a), []
    for k in range(steps + 1):
        z = iterate(a, z, 1) if k else z
        gaps = _gaps(exact, inverse, z.double())
        for quantity, values in (*gaps.items(), (NEAR, (gaps[DISTANCE] <= NEAR_ENOUGH).double())):
            yield quantity, k, values
        if a.dtype == torch.float64:
            errors.append(matrix_norm(exact @ (inverse - z), ord=2))
    if errors:
        rounding = 10 * a.shape[-1] * torch.finfo(torch.float64).eps * _condition(exact)
        for quantity, values in zip((CUBED, ORDER), lemma(torch.stack(errors), rounding), strict=True):
            if values.numel():
                yield quantity, None, values


def _condition(a: Float[Tensor, "t m m"]) -> Float[Tensor, " t"]:
    return _finite(condition_number(torch.linalg.svdvals(a)))


def attention_rows(layers: Sequence[LayerHeads], m: int, steps: int) -> Iterable[Row]:
    """Errors of the attention matrices that Z_k and the true pseudoinverse give."""
    parts: dict[tuple[str, int | None], list[Tensor]] = {}
    for heads in layers:
        s, a = heads.softmax(), landmark_matrix(heads, m)
        left, right = softmax_rows(heads.q, segment_means(heads.k, m)), softmax_rows(segment_means(heads.q, m), heads.k)
        z = start_value(a)
        inverses: dict[tuple[str, int | None], Tensor] = {("exact", None): true_inverse(a)}
        for k in range(steps + 1):
            inverses["paper", k] = z
            z = iterate(a, z, 1)
        for key, each in inverses.items():
            error = matrix_norm(left @ each @ right - s) / matrix_norm(s)
            parts.setdefault(key, []).append(_finite(error).flatten())
    n = layers[0].q.shape[2]
    for (method, k), errors in parts.items():
        values = torch.cat(errors)
        facts = {"weights": layers[0].weights, "k": k}
        yield spread_row(MATRIX, method, values, n=n, m=m, facts=facts, dtype="float64", median=True)


def lemma(errors: Float[Tensor, "k t"], rounding: Float[Tensor, " t"]) -> tuple[Tensor, Tensor]:
    """Whether each step from an error below 1 ends within the cube of that error, and the observed orders.

    The errors are those after each number of steps; a matrix with a rounding error of 0.01 or more is left out.

    Returns:
        1 or 0 for each step that starts below 1, and the orders of the steps that start below 1/2 and end above 100
        times the rounding error.
    """
    before, after = errors[:-1], errors[1:]
    known = rounding < _TOO_COARSE
    within = (after <= before**3 + rounding).double()[(before < 1) & known]
    clear = (before < 0.5) & (after > 100 * rounding) & known
    return within, after[clear].log() / before[clear].log()


def _gaps(
    exact: Float[Tensor, "t m m"], inverse: Float[Tensor, "t m m"], z: Float[Tensor, "t m m"]
) -> dict[str, Float[Tensor, " t"]]:
    z = _finite(z)
    return {RESIDUAL: _finite(residual(exact, z)), DISTANCE: matrix_norm(z - inverse) / matrix_norm(inverse)}


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=_LOST, posinf=_LOST, neginf=-_LOST).clamp(-_LOST, _LOST)


def _flat(layers: Sequence[Float[Tensor, "b h m m"]]) -> Float[Tensor, "t m m"]:
    return torch.cat([each.flatten(0, 1) for each in layers])
