"""The running estimate of a training step is the estimate that the inspection gives from the same queries."""

import torch

from nystrom import nystrom_attention, softmax_attention
from nystrom.attention.tracked_error import TrackedError
from nystrom.inspection.sampling import Sample, estimate_ratio
from nystrom.shapes import Masks


def test_a_step_is_the_estimate_of_the_inspection_from_the_same_queries():
    g = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(2, 2, 40, 8, generator=g, dtype=torch.float64) for _ in range(3))
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1, 31:] = keep[1, 5] = False
    out, tracked = nystrom_attention(q, k, v, num_landmarks=4, keep=keep), TrackedError(2)
    exact = softmax_attention(q, k, v, keep=keep)
    places, shares = tracked._sample(q, keep)
    assert shares.tolist() == [[5.0] * 8, [30 / 8] * 8]
    off, size = (out - exact).square().sum(-1), exact.square().sum(-1)
    samples = [Sample(int(keep[t].sum()), off[t][:, places[t]], size[t][:, places[t]]) for t in range(2)]
    tracked(q, k, v, out, masks=Masks(keep), skip=None, scale=None)
    # Sums in float32 of numbers in float64.
    torch.testing.assert_close(
        tracked.value(), estimate_ratio(samples, root=True).value, rtol=1e-5, atol=1e-6, check_dtype=False
    )
