import sys

import pytest

pytest.importorskip("transformers")

import torch
from torch.testing import assert_close

from nystrom import RelativeBuckets, near_far_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose
from nystrom_lab.measure.rows import read_rows
from tools import measure_position_bias
from tools.relative_position_errors import LANDMARKS, nystrom_with_means, reference_near_far


def test_times_and_memory_are_measured(tmp_path, monkeypatch):
    to, small = tmp_path / "rows.csv", ["--turns", "1", "--slow-turns", "1"]
    sizes = ["--lengths", "150", "--residues", "160", "--tiles", "170"]
    monkeypatch.setattr(sys, "argv", ["measure", *small, *sizes, "--to", str(to)])
    measure_position_bias.main()
    rows = read_rows(to)
    assert {row.n for row in rows} == {150, 160, 170}
    (memory,) = {row.value for row in rows if row.n == 160}
    # Megabytes: at least the output
    assert memory * 1e6 >= 4 * 32 * 160 * 128
    ratios = [row for row in rows if "/" in row.quantity]
    assert len(ratios) == 3
    assert all(row.value > 0 and row.repeats == 1 for row in rows)


def test_the_ways_that_are_compared_are_what_they_are_called():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 8, generator=g) for _ in range(3))
    bias, options = RelativeBuckets(torch.randn(2, 8, generator=g), 20), NearFarOptions(exact_up_to=0, scale=1.0)
    # Far keys without a bias are those of a table of zeros.
    none = RelativeBuckets(torch.zeros(2, 8), 20)
    found = reference_near_far(q, k, v, bias, choose(q, k, None, None, options), options, "none at all")
    # float32 rounding of a softmax
    assert_close(found, near_far_attention(q, k, v, bias=none, exact_up_to=0, scale=1.0), rtol=0, atol=1e-4)
    few = [x[:, :, :LANDMARKS] for x in (q, k, v)]
    exact = softmax_attention(*few, bias=bias, scale=1.0)
    # The error with a token for each landmark, up to the inverse
    error = (nystrom_with_means(*few, bias) - exact).norm() / exact.norm()
    assert error < (nystrom_with_means(*few, None) - exact).norm() / exact.norm()
