r"""How far $F A^+ B$ is from the softmax matrix S for several choices of landmarks, and what each choice costs.

`nystrom_papers.studies.approximation.landmark_choice` says what the methods are. Errors are in float64, times in
float32.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.checks import Landmarks
from nystrom.clock import seconds
from nystrom.interleaved_timing import in_turns, quartiles
from nystrom.landmarks import kmeans, segment_means, uniform
from nystrom.linalg.pinv import pinv_exact, pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.real_heads.recorded import LayerHeads
from nystrom_papers.studies.matrices.dense_nystrom import SquareInverse, nystrom_columns_and_rows
from nystrom_papers.studies.matrices.spectra import spectral_norm
from nystrom_papers.studies.reproduce.encoders import Encoder
from nystrom_papers.studies.reproduce.spread import spread_row

INVERSES: Mapping[str, SquareInverse] = {"iterative": pinv_iterative, "exact": pinv_exact}
MATRIX, SPECTRAL, OUTPUT = (
    "relative error of the matrix",
    "relative spectral error of the matrix",
    "relative error of the output",
)
NEARER, GOOD = "share of heads nearer than with random tokens", "share of heads with an output within 0.1"
CHOOSING, ATTENTION = "time to choose landmarks", "time of attention"
_METHODS = {
    "segment_means": ("nystrom", segment_means),
    "kmeans": ("nystrom-kmeans", kmeans),
    "uniform": ("nystrom-uniform", uniform),
}
_TURNS, _GOOD = 9, 0.1


def error_rows(heads: LayerHeads, numbers: Sequence[int], inverses: Sequence[str], draws: int) -> Iterable[Row]:
    """Errors of every method at each number of landmarks."""
    s = heads.softmax()
    n, norms = s.shape[-1], _norms(s, s @ heads.v)
    for m in numbers:
        for kind in inverses:
            by_method: dict[str, Tensor] = {}
            for method, maps in approximations(heads, s, m, INVERSES[kind], draws).items():
                errors: list[list[Tensor]] = []
                for approximate in maps:
                    gap = approximate - s
                    sizes = _norms(gap, gap @ heads.v)
                    errors.append([size / norm for size, norm in zip(sizes, norms, strict=True)])
                by_method[method] = torch.stack([torch.stack(each) for each in errors], dim=1)
            facts = {**heads.facts, "inverse": kind}
            for method, (matrix, spectral, output) in by_method.items():
                drawn = 0 if method in ("nystrom-uniform", "nystrom-columns") else None
                good = (output.mean(dim=0) <= _GOOD).double()
                nearer = (matrix.mean(dim=0) < by_method["nystrom-uniform"][0].mean(dim=0)).double()
                for quantity, values in (
                    (MATRIX, matrix), (SPECTRAL, spectral), (OUTPUT, output), (NEARER, nearer), (GOOD, good)
                ):  # fmt: skip
                    yield spread_row(quantity, method, values, n=n, m=m, facts=facts, dtype="float64", seed=drawn)


def _norms(matrix: Float[Tensor, "b h n n"], output: Float[Tensor, "b h n e"]) -> tuple[Tensor, Tensor, Tensor]:
    # Singular values fall so quickly here that eight power iterations give three digits.
    return torch.linalg.matrix_norm(matrix), spectral_norm(matrix, steps=8), torch.linalg.matrix_norm(output)


def approximations(
    heads: LayerHeads, s: Float[Tensor, "b h n n"], m: int, inverse: SquareInverse, draws: int
) -> dict[str, Iterable[Float[Tensor, "b h n n"]]]:
    """Approximate matrices by method: one, or one for each draw of random tokens."""
    q, k = heads.q, heads.k
    indices = [torch.randint(s.shape[-1], (m,), generator=torch.Generator().manual_seed(seed)) for seed in range(draws)]
    return {
        "nystrom-uniform": (_factored(q, k, q[:, :, i], k[:, :, i], inverse) for i in indices),
        "nystrom": [segment_approximation(heads, m, inverse)],
        "nystrom-kmeans": [_factored(q, k, kmeans(q, m), kmeans(k, m), inverse)],
        "nystrom-columns": (nystrom_columns_and_rows(s, i, inverse=inverse) for i in indices),
    }


def segment_approximation(heads: LayerHeads, m: int, inverse: SquareInverse) -> Float[Tensor, "b h n n"]:
    """The matrix that m segment means give."""
    q, k = heads.q, heads.k
    return _factored(q, k, segment_means(q, m), segment_means(k, m), inverse)


def _factored(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    q_landmarks: Float[Tensor, "b h m d"],
    k_landmarks: Float[Tensor, "b h m d"],
    inverse: SquareInverse,
) -> Float[Tensor, "b h n n"]:
    """The product of the three factors."""
    left, right = softmax_rows(q, k_landmarks), softmax_rows(q_landmarks, k)
    return left @ inverse(softmax_rows(q_landmarks, k_landmarks)) @ right


def time_rows(encoder: Encoder, n: int, numbers: Sequence[int]) -> Iterable[Row]:
    """Times of choosing landmarks, and of attention with them, in turns, for the first layer on one text.

    Random tokens are those of `nystrom.landmarks.uniform`, one from each segment.
    """
    q, k, v = encoder.record(n, 1, (0,))[0]
    facts = {"b": 1, "h": q.shape[1], "d": q.shape[3]}
    calls: dict[tuple[str, str, int], Callable[[], object]] = {}
    for landmarks in get_args(Landmarks):
        method, choose = _METHODS[landmarks]
        for m in numbers:
            calls[CHOOSING, method, m] = partial(choose, q, m)
            calls[ATTENTION, method, m] = partial(nystrom_attention, q, k, v, num_landmarks=m, landmarks=landmarks)
    with torch.no_grad():
        times = in_turns({key: partial(seconds, call, q.device) for key, call in calls.items()}, _TURNS)
    for (quantity, method, m), values in times.items():
        low, middle, high = quartiles([1000 * value for value in values])
        yield Row(
            quantity=quantity, method=method, value=middle, low=low, high=high, unit="ms", repeats=_TURNS, n=n, m=m,
            facts=facts,
        )  # fmt: skip
