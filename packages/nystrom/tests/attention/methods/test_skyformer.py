from functools import partial

import pytest
import torch

from nystrom import kernelized_attention, skyformer_attention
from nystrom.attention.methods.skyformer import SkyformerOptions, ridged_inverse
from nystrom.kernels import KERNELS, gaussian_kernel
from nystrom.landmarks import draw as draw_numbers
from nystrom.landmarks import uniform


def draw(seed, n, s=None, *, size=1.0, d=6):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    return [size * torch.randn(2, 3, t, d, generator=g, dtype=torch.float64) for t in (n, s, s)]


@pytest.mark.parametrize(("n", "s", "m"), [(24, 24, 8), (30, 17, 7)])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_it_is_the_formula_of_the_paper(n, s, m, kernel):
    q, k, v = draw(0, n, s)
    draws = draw_numbers(m, torch.Generator().manual_seed(5), q.device)
    marks = torch.cat([uniform(q, m // 2, draws=draws[: m // 2]), uniform(k, m - m // 2, draws=draws[m // 2 :])], dim=2)
    dense = partial(KERNELS[kernel], scale=6**-0.5)
    middle = torch.linalg.inv(dense(marks, marks) + 0.1 * torch.eye(m, dtype=torch.float64))
    expected = dense(q, marks) @ middle @ dense(marks, k) @ v
    attend = partial(skyformer_attention, q, k, v, num_landmarks=m, kernel=kernel)
    out = attend(pinv="exact", generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    iterated = attend(pinv_steps=20, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(iterated, expected, rtol=1e-8, atol=1e-9)


def test_the_scaling_of_lemma_3_bounds_the_spectrum():
    q, _, _ = draw(1, 12)
    kernel = gaussian_kernel(q, q, scale=0.2)
    ridged = kernel + 0.1 * torch.eye(12, dtype=torch.float64)
    root = ridged.sum(-1).rsqrt()
    values = torch.linalg.svdvals(root[..., :, None] * ridged * root[..., None, :])
    assert values.min() > 0
    # The lemma says below 1; the vector D^(1/2) 1 has the eigenvalue 1.
    torch.testing.assert_close(values.amax(-1), torch.ones(2, 3, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_scaling_does_not_change_the_inverse():
    q, _, _ = draw(2, 9)
    kernel = gaussian_kernel(q, q, scale=0.4)
    expected = torch.linalg.inv(kernel + 0.1 * torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(ridged_inverse(kernel, SkyformerOptions(pinv="exact")), expected, rtol=1e-8, atol=1e-9)


def test_more_landmarks_come_nearer_to_kernelized():
    q, k, v = (torch.cumsum(x, dim=2) / 16 for x in draw(3, 256, size=0.5))
    exact = kernelized_attention(q, k, v)
    options = {"gamma": 1e-3, "pinv": "exact"}
    errors = [
        (skyformer_attention(q, k, v, num_landmarks=m, **options) - exact).norm() / exact.norm() for m in (4, 16, 64)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


@pytest.mark.parametrize("offset", [10.0, 1000.0])
def test_what_all_tokens_have_in_common_costs_no_digits(offset):
    # A power of two less, so that float32 holds the tokens of both as exactly.
    tokens = [(x * 2**8).round() / 2**8 for x in draw(4, 40, d=32)]
    q, k, v = (x + offset * (number < 2) for number, x in enumerate(tokens))
    attend = partial(skyformer_attention, num_landmarks=8, pinv_steps=12)
    expected = attend(*tokens, generator=torch.Generator().manual_seed(0))
    out = attend(*(x.float() for x in (q, k, v)), generator=torch.Generator().manual_seed(0))
    assert (out - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": 1}, "num_landmarks is 1"),
        ({"gamma": 0.0}, r"gamma is 0\.0"),
        ({"pinv": "lu"}, "pinv is 'lu'"),
        (
            {"kernel": "laplace", "backend": "triton"},
            "has no Triton code for kernel='laplace': pass kernel='gaussian', or backend='torch'",
        ),
        ({"kernel": "cosine"}, "kernel is 'cosine'"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        skyformer_attention(*draw(0, 8), **options)
