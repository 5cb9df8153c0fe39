"""The kernels of near_far with T5's relative positions agree with torch's operators; without a GPU, interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from nystrom import Alibi, RelativeBuckets, near_far_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"block_size": 8, "reach": 3, "num_heavy": 3, "num_clusters": 4, "exact_up_to": 0}


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE).requires_grad_()


def holes(n):
    """A mask with padding at both ends and holes, and one that begins late."""
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[0, :3] = keep[0, n - 4 :] = keep[0, n // 2 : n // 2 + 2] = keep[1, : n // 3] = False
    return keep.to(DEVICE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "masked", "bias", "change"),
    [
        pytest.param(27, True, (8, 20, True), {}, id="masked"),
        # the window is wider than the largest distance, and a heavy key is at many distances from a block
        pytest.param(21, False, (4, 3, True), {"block_size": 5, "reach": 7, "num_heavy": 12}, id="wide-window"),
        # more than a tile of queries, of clusters and of tokens of a window, later keys alike, and no heavy keys
        pytest.param(
            75, False, (8, 20, False), {"block_size": 70, "num_heavy": 0, "num_clusters": 66}, id="several-tiles"
        ),
    ],
)
def test_outputs_and_gradients_are_those_of_torch(n, masked, bias, change):
    buckets, furthest, sides = bias
    b = 2 if masked else 1
    inputs, found = [*(draw(b, 2, n, width, seed=width) for width in (5, 5, 3)), draw(2, buckets)], []
    grad, keep = draw(b, 2, n, 3, seed=9), holes(n) if masked else None
    for backend in ("torch", "triton"):
        q, k, v, table = inputs
        given = {"bias": RelativeBuckets(table, furthest, sides), "keep": keep, **SMALL, **change}
        out = near_far_attention(q, k, v, **given, backend=backend)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for theirs, ours in zip(*found, strict=True):
        # float64 rounding of sums over some dozens of tokens
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.refuses
def test_alibi_is_refused_by_name():
    with pytest.raises(ValueError, match="no Triton code for a bias of kind Alibi: pass RelativeBuckets, or backend="):
        near_far_attention(*draw(3, 1, 2, 12, 4), bias=Alibi(torch.ones(2, device=DEVICE)), **SMALL, backend="triton")
