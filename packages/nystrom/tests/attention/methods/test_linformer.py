import pytest
import torch

from nystrom import build_attention
from nystrom.attention.methods.linformer import linformer_attention


def draw(seed, n, s=None, *, b=2, h=3, d=6, e=5):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    return [torch.randn(b, h, t, w, generator=g, dtype=torch.float64) for t, w in ((n, d), (s, d), (s, e))]


def draw_projections(seed, groups, m, length):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(groups, m, length, generator=g, dtype=torch.float64) / m**0.5 for _ in range(2)]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("n", "s"), [(12, 12), (7, 20)])
def test_it_is_the_formula_of_the_paper(groups, n, s):
    q, k, v = draw(0, n, s)
    e, f = draw_projections(1, groups, 4, 20)
    expected = torch.softmax(q @ (e[..., :s] @ k).mT / 6**0.5, dim=-1) @ (f[..., :s] @ v)
    # float64 rounding
    torch.testing.assert_close(linformer_attention(q, k, v, e, f), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n", [1, 8, 33])
def test_identity_projections_of_its_length_are_softmax(n):
    q, k, v = draw(2, n)
    eye = torch.eye(n, dtype=torch.float64)[None]
    expected = torch.softmax(q @ k.mT / 6**0.5, dim=-1) @ v
    torch.testing.assert_close(linformer_attention(q, k, v, eye, eye), expected, rtol=1e-11, atol=1e-12)


def test_a_column_belongs_to_a_position_from_the_first_real_token():
    q, k, v = draw(3, 9, b=1)
    e, f = draw_projections(4, 1, 4, 9)
    keep = torch.tensor([[False, False, True, True, False, True, True, True, False]])
    out = linformer_attention(q, k, v, e, f, keep=keep)[:, :, keep[0]]
    # Real tokens are at 0, 1, 3, 4, 5 from the first; the columns between and after them see nothing.
    used = [0, 1, 3, 4, 5]
    q, k, v = (x[:, :, keep[0]] for x in (q, k, v))
    expected = torch.softmax(q @ (e[..., used] @ k).mT / 6**0.5, dim=-1) @ (f[..., used] @ v)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("share_key_value", [False, True])
def test_sharing_decides_the_number_of_weights(per_head, share_key_value):
    attend = build_attention(
        "linformer",
        num_heads=3,
        head_dim=6,
        num_features=4,
        max_length=20,
        per_head=per_head,
        share_key_value=share_key_value,
    )
    assert sum(weight.numel() for weight in attend.parameters()) == (3 if per_head else 1) * (2 - share_key_value) * 80
    e, f = attend.weights()
    assert (e is f) == share_key_value


def test_every_projection_is_trained():
    attend = build_attention("linformer", num_heads=3, head_dim=6, num_features=4, max_length=20)
    attend(*(x.float() for x in draw(5, 12))).square().sum().backward()
    for weight in attend.parameters():
        # The columns of the twelve positions, and no others.
        assert weight.grad[..., :12].abs().amin(dim=1).all()
        assert not weight.grad[..., 12:].any()


def test_start_values_keep_lengths():
    torch.manual_seed(0)
    attend = build_attention("linformer", num_heads=1, head_dim=6, num_features=256, max_length=500)
    x = torch.randn(500)
    mixed = attend.weights.key_projection[0] @ x
    # |E x|^2 / |x|^2 is chi-squared with 256 degrees: one deviation is 0.088
    assert abs(mixed.square().sum() / x.square().sum() - 1) < 4 * 0.088


def test_sums_past_float16_stay_finite():
    q, k, v = (torch.full((1, 1, 64, 8), 3e4, dtype=torch.float16) for _ in range(3))
    e = torch.ones(1, 4, 64)
    assert linformer_attention(q, k, v, e, e).isfinite().all()


@pytest.mark.refuses
def test_inputs_that_do_not_fit_raise_by_name():
    q, k, v = draw(0, 21)
    e, f = draw_projections(1, 1, 4, 20)
    with pytest.raises(ValueError, match=r"k holds 21 tokens but key_projection has columns for 20.*max_length=21"):
        linformer_attention(q, k, v, e, f)
    q, k, v = draw(0, 8)
    with pytest.raises(ValueError, match=r"value_projection has shape \(2, 4, 20\); expected \(1 or 3 heads"):
        linformer_attention(q, k, v, e, f.expand(2, -1, -1))
    with pytest.raises(ValueError, match="max_length is 0; expected a whole number of at least 1"):
        build_attention("linformer", num_heads=3, head_dim=6, max_length=0)


@pytest.mark.parametrize("seed", [21, 48, 68, 77])
def test_gradients_in_float16_are_finite_where_those_of_float32_are_small(seed):
    """All tokens near the largest float16: mixtures of keys that it does not hold, and gradients that it does."""
    torch.manual_seed(seed)
    attend = build_attention("linformer", num_heads=2, head_dim=4, num_features=5, max_length=2048, per_head=True)
    g, grads = torch.Generator().manual_seed(seed), []
    tokens = [(6e4 * torch.randn(1, 2, 40, 4, generator=g).clamp(-1, 1)).half() for _ in range(3)]
    way = torch.randn(1, 2, 40, 4, generator=g)
    for dtype in (torch.float16, torch.float32):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in tokens]
        (attend(*leaves).float() * way / 40).sum().backward()
        grads.append([x.grad for x in leaves])
    for found, wide in zip(*grads, strict=True):
        assert found.isfinite().all() or wide.abs().max() > torch.finfo(torch.float16).max / 2
