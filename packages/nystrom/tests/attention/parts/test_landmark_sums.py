import pytest
import torch

from nystrom.attention.fused import softmax_rows
from nystrom.attention.parts.landmark_sums import landmark_sums
from nystrom.attention.parts.stretches import pieces
from nystrom.attention.skip import padded_values_and_buffer

pytestmark = pytest.mark.usefixtures("of_a_cpu")


def draw(b=2, h=2, n=40, m=5, d=3, e=4, size=5, laid_out=None, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = ((b, h, n, d), (b, h, m, d), (b, h, m, e), (b, h, n, e), (h, size))
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in (*(laid_out(x) if laid_out else x for x in inputs[:4]), inputs[4])]


def by_token(x):
    """The same numbers, laid out token by token as by a projection."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def by_width(x):
    """The same numbers, of which those of a token are not neighbours."""
    return x.mT.contiguous().mT


def plain(q, landmarks, middle, v, w, keep):
    """The same by plain operations, in float64."""
    weights = softmax_rows(q, landmarks, keep=keep, scale=0.7)
    skip = torch.nn.functional.conv2d(v, w[:, None, :, None], padding=(w.shape[1] // 2, 0), groups=len(w))
    return weights @ middle + skip


def with_room(q, landmarks, middle, v, w, keep):
    v, room = padded_values_and_buffer(v, w)
    return landmark_sums(room, q, landmarks, middle, v, w, keep=keep, scale=0.7)


# n = 9,000 with 64 landmarks of one head is cut into stretches; 40 sequences of 9 make one piece.
@pytest.mark.parametrize(("b", "h", "n", "m"), [(2, 2, 40, 5), (1, 1, 9000, 64), (2, 3, 300, 1000), (40, 2, 9, 5)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("laid_out", [torch.Tensor.contiguous, by_token, by_width])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_attention_to_landmarks_plus_the_convolution_with_its_gradients(b, h, n, m, masked, laid_out, dtype):
    inputs = draw(b, h, n, m, laid_out=laid_out, dtype=dtype)
    keep = None
    if masked:
        g = torch.Generator().manual_seed(1)
        keep = torch.rand(b, m, generator=g) < 0.7
        # A masked landmark has a middle of zero.
        inputs[2].data *= keep[:, None, :, None]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*wide, keep)
    out = with_room(*inputs, keep)
    # Rounding of sums of up to 9,000 terms; a sum near zero is held to the size of its terms.
    share = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=share, atol=10 * share)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, laid_out(grad.to(dtype)))
    for found, wanted in zip(ours, torch.autograd.grad(expected, wide, grad.to(dtype).double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=share, atol=share * (10 + float(wanted.abs().max())))


def test_it_has_second_derivatives():
    inputs = draw(1, 1, 6, 3, 2, 2, 3)
    keep = torch.tensor([[True, False, True]])
    inputs[2].data[:, :, 1] = 0

    def attend(*inputs):
        return with_room(*inputs, keep)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_pieces_cover_everything_once():
    for batch, tokens, numbers in ((3, 100, 10), (2, 1000, 2000), (5, 7, 2**18), (1, 0, 3), (4, 33, 2**20)):
        seen = torch.zeros(batch, 1, tokens, dtype=torch.int64)
        for piece in pieces(batch, tokens, numbers):
            seen[piece] += 1
        assert (seen == 1).all()
