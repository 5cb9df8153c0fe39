"""Exact attention of padded batches, sequence by sequence where padding would cost more."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.attention import exact_limit
from nystrom.attention.exact_limit import exact_one_by_one
from nystrom.attention.fused import fused_softmax

HOLES = torch.tensor(
    [[0, 0, 1, 0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0], [0] * 9, [0, 1, 1, 1, 0, 0, 0, 0, 0]]
).bool()


@pytest.mark.parametrize("keep", [HOLES, HOLES[2:3].expand(3, -1), torch.ones(4, 9, dtype=torch.bool)])
def test_it_is_that_of_the_masked_batch(keep, monkeypatch):
    calls = []

    def counted(*args, **named):
        calls.append(args[0].shape)
        return fused_softmax(*args, **named)

    monkeypatch.setattr(exact_limit, "fused_softmax", counted)
    torch.manual_seed(0)
    b = len(keep)
    q, k, v = (
        torch.where(keep[:, None, :, None], torch.randn(b, 2, 9, 3, dtype=torch.float64), 0.0).requires_grad_()
        for _ in range(3)
    )
    real = keep[:, None, :, None]
    results = []
    for attend in (exact_one_by_one, lambda q, k, v, keep, scale: fused_softmax(q, k, v, keep=keep, scale=scale)):
        out = torch.where(real, attend(q, k, v, keep, 0.7), 0.0)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for ours, theirs in zip(*results, strict=True):
        assert_close(torch.where(real, ours, 0.0), torch.where(real, theirs, 0.0))
    # Without padding, or without a token, it is one call.
    assert calls == ([(1, 2, n, 3) for n in (4, 1, 3)] if keep is HOLES else [(b, 2, 9, 3)])
