"""Ours gives a peer's numbers under the peer's own conditions (a divisible length, no padding, one sequence)."""

import pytest
import torch

from nystrom import nystrom_attention
from nystrom.attention.skip import DepthwiseSkip


@pytest.mark.parametrize("kernel_size", [1, 9])
def test_transformers(kernel_size):
    peer = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.NystromformerConfig(
        hidden_size=12, num_attention_heads=3, num_landmarks=4, segment_means_seq_len=20, conv_kernel_size=kernel_size
    )
    theirs = peer.NystromformerSelfAttention(config).double().eval()
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (theirs.query, theirs.key, theirs.value))
    out = nystrom_attention(q, k, v, num_landmarks=4, z0="authors")
    skip = DepthwiseSkip(3, kernel_size).double()
    skip.load_state_dict(theirs.conv.state_dict())
    out = out + skip(v)
    # float64 rounding through six iterations
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), theirs(x)[0], rtol=1e-9, atol=1e-10)


def test_nystrom_attention():
    peer = pytest.importorskip("nystrom_attention")
    torch.manual_seed(0)
    theirs = peer.NystromAttention(dim=12, dim_head=4, heads=3, num_landmarks=4, residual_conv_kernel=9).double().eval()
    x = torch.randn(1, 20, 12, dtype=torch.float64)
    q, k, v = (p.unflatten(-1, (3, 4)).transpose(1, 2) for p in theirs.to_qkv(x).chunk(3, dim=-1))
    # The peer's start uses both norms, each the largest over batch and heads: as the authors', since rows sum to 1.
    out = nystrom_attention(q, k, v, num_landmarks=4, z0="authors")
    skip = DepthwiseSkip(3, 9).double()
    skip.load_state_dict(theirs.res_conv.state_dict())
    out = theirs.to_out((out + skip(v)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, theirs(x), rtol=1e-9, atol=1e-10)
