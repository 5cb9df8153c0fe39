import pytest
import torch

from nystrom.attention.fused import softmax_rows
from nystrom.attention.parts.stretches import add_attention, pieces


def draw(b=2, h=2, n=40, m=5, d=3, e=4):
    g = torch.Generator().manual_seed(0)
    shapes = ((b, h, n, e), (b, h, n, d), (b, h, m, d), (b, h, m, e))
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def plain(out, q, k, v, keep):
    """The same by plain operations."""
    weights = softmax_rows(q, k, keep=keep, scale=0.7)
    return out + weights @ v


# n = 9,000 with 64 landmarks of one head is cut into stretches; 40 sequences of 9 make one piece.
@pytest.mark.parametrize(("b", "h", "n", "m"), [(2, 2, 40, 5), (1, 1, 9000, 64), (2, 3, 300, 1000), (40, 2, 9, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_it_adds_attention_to_landmarks_with_its_gradients(b, h, n, m, masked):
    inputs = draw(b, h, n, m)
    keep = None
    if masked:
        g = torch.Generator().manual_seed(1)
        keep = torch.rand(b, m, generator=g) < 0.7
        # A masked landmark has values of zero.
        inputs[3].data *= keep[:, None, :, None]
    expected = plain(*inputs, keep)
    out = add_attention(inputs[0].clone(), *inputs[1:], keep=keep, scale=0.7)
    # Rounding of float64, in sums of up to 9,000.
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(out, expected, **close)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, inputs, grad), **close)


def test_it_has_second_derivatives():
    inputs = draw(1, 1, 6, 3, 2, 2)
    keep = torch.tensor([[True, False, True]])
    inputs[3].data[:, :, 1] = 0

    def attend(out, q, k, v):
        return add_attention(out.clone(), q, k, v, keep=keep, scale=0.7)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_pieces_cover_everything_once():
    for batch, tokens, numbers in ((3, 100, 10), (2, 1000, 2000), (5, 7, 2**18), (1, 0, 3), (4, 33, 2**20)):
        seen = torch.zeros(batch, 1, tokens, dtype=torch.int64)
        for piece in pieces(batch, tokens, numbers):
            seen[piece] += 1
        assert (seen == 1).all()
