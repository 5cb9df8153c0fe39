import pytest
import torch

from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.skip import DepthwiseSkip
from nystrom_lab.studies.speed.contenders.authors import AuthorsAttention


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 48, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_the_formula_is_nystrom_attention_with_the_authors_start_value(qkv):
    out = AuthorsAttention(3, num_landmarks=8)(*qkv)
    # float64 rounding, amplified by the iterations of the inverse
    torch.testing.assert_close(out, nystrom_attention(*qkv, num_landmarks=8, z0="authors"), rtol=0, atol=1e-11)


def test_the_start_value_is_taken_over_batch_and_heads(qkv):
    out = AuthorsAttention(3, num_landmarks=8)(*qkv)
    alone = AuthorsAttention(3, num_landmarks=8)(*(x[:1] for x in qkv))
    assert (out[:1] - alone).abs().max() > 1e-6


def test_its_convolution_is_the_skip(qkv):
    layer = AuthorsAttention(3, num_landmarks=8, kernel_size=5).double()
    skip = DepthwiseSkip(3, 5).double()
    skip.load_state_dict(layer.conv.state_dict())
    expected = nystrom_attention(*qkv, num_landmarks=8, z0="authors") + skip(qkv[2])
    # float64 rounding, amplified by the iterations of the inverse
    torch.testing.assert_close(layer(*qkv), expected, rtol=0, atol=1e-11)
