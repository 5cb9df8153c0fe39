"""The causal form by levels: exact where clusters hold one token each, and blind to what comes later."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from nystrom_lab.studies.fidelity.causal_levels import attend_by_levels


def given(n):
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 40, 67])
def test_with_a_cluster_for_each_token_it_is_exact(n):
    q, k, v = given(n)
    out = attend_by_levels(q, k, v, block_size=8, num_clusters=64)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(out, exact)
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, exact)), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("first", [1, 20, 63])
def test_no_position_sees_a_later_one(first):
    q, k, v = (x.detach() for x in given(67))
    before = attend_by_levels(q, k, v, block_size=8, num_clusters=3)
    for x in (q, k, v):
        x[:, :, first:] = 1e3
    assert_close(
        attend_by_levels(q, k, v, block_size=8, num_clusters=3)[:, :, :first], before[:, :, :first], rtol=0, atol=0
    )


def test_equal_tokens_are_one_cluster_without_error():
    q, k, v = (x.detach() for x in given(64))
    k[:], v[:] = k[:, :, :1].clone(), v[:, :, :1].clone()
    assert_close(
        attend_by_levels(q, k, v, block_size=8, num_clusters=2),
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )
