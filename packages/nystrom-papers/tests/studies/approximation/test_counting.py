"""Counts, each compared with a count by hand."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from nystrom import kernelized_attention, nystrom_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.skip import depthwise_skip
from nystrom.kernels import laplace_kernel
from nystrom_papers.studies.approximation.counting import count_multiplications, count_stored_numbers

B, H, N, M, D, STEPS = 2, 3, 96, 8, 16, 6


def tokens(n=N, d=D, *, requires_grad=False):
    return torch.randn(B, H, n, d, requires_grad=requires_grad)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", ["fused", "materialised"])
def test_softmax_is_two_products_of_n_by_n(form, masked):
    q, k, v = tokens(), tokens(), tokens()
    keep = torch.arange(N).expand(B, N) < N - 5 if masked else None
    assert count_multiplications(lambda: softmax_attention(q, k, v, keep=keep, form=form)) == B * H * 2 * N * N * D


@pytest.mark.parametrize("form", ["fused", "materialised"])
def test_its_backward_is_two_products_for_each_and_the_scores_again_where_they_are_not_stored(form):
    inputs = [tokens(requires_grad=True) for _ in "qkv"]
    count = count_multiplications(lambda: softmax_attention(*inputs, form=form).sum().backward())
    assert count == B * H * (7 if form == "fused" else 6) * N * N * D


def test_nystrom_is_the_complexity_of_the_paper():
    q, k, v = tokens(), tokens(), tokens()
    count = count_multiplications(lambda: nystrom_attention(q, k, v, num_landmarks=M, pinv_steps=STEPS))
    outer = 2 * N * M * D + 2 * N * M * D  # scores and sums, over the keys and over the landmarks
    inner = M * M * D + 4 * STEPS * M**3 + M * M * D  # landmarks' scores, the inverse, its product with the middle
    assert count == B * H * (outer + inner)


def test_a_skip_adds_its_own_count_alone():
    # With a skip the left factor is added to it in place, by other operations than without.
    q, k, v, skip = tokens(), tokens(), tokens(), torch.randn(H, 1, 5, 1)
    alone = count_multiplications(lambda: nystrom_attention(q, k, v, num_landmarks=M))
    count = count_multiplications(lambda: nystrom_attention(q, k, v, num_landmarks=M, skip=skip))
    assert count - alone == count_multiplications(lambda: depthwise_skip(v, skip)) > 0


def test_kernelized_counts_its_distances_and_one_product():
    inputs = [tokens(requires_grad=True) for _ in "qkv"]
    attend = partial(kernelized_attention, *inputs, kernel="laplace")
    assert count_multiplications(attend) == B * H * 2 * N * N * D
    # The distances again, their gradients of queries and keys, and those of weights and values.
    assert count_multiplications(lambda: attend().sum().backward()) == B * H * (2 + 1 + 2 + 2) * N * N * D


def test_single_operations():
    a, b, x = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(5)
    assert count_multiplications(lambda: a @ b) == 3 * 4 * 5 * 6
    assert count_multiplications(lambda: a[0] @ x) == 4 * 5
    assert count_multiplications(lambda: x @ x) == 5
    assert count_multiplications(lambda: torch.zeros(3, 4, 6).baddbmm_(a, b)) == 3 * 4 * 5 * 6
    assert count_multiplications(lambda: torch.zeros(4, 6).addmm_(a[0], b[0])) == 4 * 5 * 6
    assert count_multiplications(lambda: torch.linalg.solve(torch.eye(6).expand(2, 6, 6), torch.ones(2, 6, 3))) == (
        2 * (6**3 // 3 + 6 * 6 * 3)
    )
    # One matrix with four right-hand sides of a batch is four systems.
    assert count_multiplications(lambda: torch.linalg.solve(torch.eye(6), torch.ones(4, 6, 3))) == (
        4 * (6**3 // 3 + 6 * 6 * 3)
    )
    assert count_multiplications(lambda: torch.linalg.solve(torch.eye(6).expand(2, 6, 6), torch.ones(2, 6))) == (
        2 * (6**3 // 3 + 6 * 6)
    )
    assert count_multiplications(lambda: laplace_kernel(a, b.mT, scale=1.0)) == 3 * 4 * 6 * 5
    x, depthwise = torch.randn(2, 7, 20), torch.randn(7, 1, 3)
    assert count_multiplications(lambda: functional.conv1d(x, depthwise, groups=7)) == 2 * 7 * 18 * 3
    assert count_multiplications(lambda: a.exp() + 1) == 0


@pytest.mark.parametrize("call", [torch.linalg.inv, lambda x: torch.linalg.solve_triangular(x, x, upper=True)])
def test_a_system_without_a_formula_raises(call):
    with pytest.raises(
        ValueError, match=r"whose multiplications have no formula here: solve the system by torch\.linalg"
    ):
        count_multiplications(lambda: call(torch.eye(3)))


def test_an_operator_of_our_own_raises():
    @torch.library.custom_op("counted::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with pytest.raises(ValueError, match=r"operator counted::twice.* are not known"):
        count_multiplications(lambda: twice(torch.ones(3)))


def test_stored_numbers_are_the_peak():
    q = torch.randn(1, 1, 512, 16)
    square = 512 * 512
    # Scores and weights at a time, and little else.
    assert 2 * square <= count_stored_numbers(lambda: softmax_attention(q, q, q, form="materialised")) < 2.2 * square
    x = torch.ones(1000, dtype=torch.float64)
    assert count_stored_numbers(lambda: -x, dtype=torch.float64) == 1000
    assert count_stored_numbers(lambda: -x) == 2000


def test_numbers_that_nystrom_stores_grow_with_n():
    def stored(n):
        q = torch.randn(1, 2, n, 16)
        return count_stored_numbers(lambda: nystrom_attention(q, q, q, num_landmarks=16))

    small, large = stored(2048), stored(4096)
    assert large < 2.1 * small
