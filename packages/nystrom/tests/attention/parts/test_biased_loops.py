"""The loops for a bias of buckets are the plain form, with all gradients."""

import os
import shutil
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from nystrom import Alibi, RelativeBuckets, near_far_attention

pytestmark = [
    pytest.mark.usefixtures("of_a_cpu"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here"),
]
SMALL = {"num_clusters": 4, "num_heavy": 3, "block_size": 16, "reach": 8, "exact_up_to": 0}


def draw(n, d, e, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 3, n, d), (2, 3, n, d), (2, 3, n, e), (3, 8), (2, 3, n, e)
    *inputs, grad = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in inputs], grad


def outcome(inputs, grad, native, keep=None, *, max_distance=20, bidirectional=True, **options):
    """Results and gradients, by the loops or by torch's operators."""
    q, k, v, table = inputs
    bias = RelativeBuckets(table, max_distance, bidirectional)
    with mock.patch.dict(os.environ, NYSTROM_NATIVE=native):
        out = near_far_attention(q, k, v, bias=bias, keep=keep, **SMALL | options)
        return out, *torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize(
    ("n", "d", "e", "options"),
    [
        (64, 8, 8, {}),
        # One side, no window beyond the block, no heavy keys, uneven widths
        (250, 5, 7, {"bidirectional": False, "block_size": 8, "reach": 0, "num_heavy": 0}),
        # Heavy keys of which queries of a block are at many distances, and more blocks than a group holds
        (330, 8, 8, {"num_heavy": 20, "block_size": 12, "reach": 3}),
        # A window beyond the largest distance, and a distance beyond the tokens
        (240, 8, 8, {"reach": 40}),
        (200, 8, 8, {"max_distance": 1280}),
    ],
)
@pytest.mark.parametrize("real", [1.0, 0.8, 0.0])
def test_loops_are_the_plain_form_with_its_gradients(n, d, e, options, real):
    inputs, grad = draw(n, d, e)
    place, most = torch.arange(n), int(real * n)
    keep = None if real == 1 else (place >= torch.tensor([[0], [3]])) & (place < torch.tensor([[most], [most + 5]]))
    keep = keep if real else torch.zeros(2, n, dtype=torch.bool)
    # float64 rounding of sums over all pairs
    for ours, theirs in zip(*(outcome(inputs, grad, native, keep, **options) for native in "10"), strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_single_precision_is_near_double_precision():
    # Biases as large as those of trained models, and values with an offset
    results = []
    for dtype in (torch.float32, torch.float64):
        (q, k, v, table), grad = draw(1024, 16, 16, dtype)
        inputs = [q, k, (v.detach() + 30).requires_grad_(), (4 * table.detach()).requires_grad_()]
        results.append(outcome(inputs, grad, "1", max_distance=128))
    for ours, theirs in zip(*results, strict=True):
        # float32 rounding of values of 30, of sums of up to 1,024 terms
        share = 30 * 1e-5 * theirs.abs().max().item()
        assert_close(ours.double(), theirs, rtol=0, atol=share)


def test_what_records_a_graph_takes_the_plain_form():
    inputs, grad = draw(48, 4, 4)
    found = outcome(inputs, grad, "1", num_heavy=2)
    q, k, v, table = inputs
    out = near_far_attention(q, k, v, bias=RelativeBuckets(table, 20), **SMALL | {"num_heavy": 2})
    again = torch.autograd.grad(out, inputs, grad, create_graph=True)
    for ours, theirs in zip((out, *again), found, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert all(x.requires_grad for x in again)


@pytest.mark.parametrize("kind", [RelativeBuckets, Alibi])
def test_second_derivatives_with_a_bias_are_those_of_finite_differences(kind):
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 4, dtype=torch.float64, generator=source, requires_grad=True) for _ in range(3))
    weight = torch.rand((2, 8) if kind is RelativeBuckets else 2, dtype=torch.float64, generator=source)
    sizes = {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}

    def attend(q, k, v, weight):
        bias = RelativeBuckets(weight, 6) if kind is RelativeBuckets else Alibi(weight)
        return near_far_attention(q, k, v, bias=bias, **sizes)

    # Differences of gradients in float64, at steps of 1e-6.
    assert torch.autograd.gradgradcheck(attend, (q, k, v, weight.requires_grad_()), atol=1e-6, fast_mode=True)
