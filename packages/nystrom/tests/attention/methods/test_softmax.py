import pytest
import torch

from nystrom import softmax_attention
from nystrom.attention.fused import softmax_rows


def draw(seed, n, s, d=4, e=4):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, t, w, generator=g, dtype=torch.float64) for t, w in ((n, d), (s, d), (s, e))]


@pytest.mark.parametrize(("d", "e"), [(4, 4), (4, 7), (7, 4)])
@pytest.mark.parametrize("form", ["fused", "materialised"])
def test_it_is_softmax_attention_at_any_width(form, d, e):
    q, k, v = draw(0, 5, 9, d, e)
    expected = torch.softmax(q @ k.mT / d**0.5, dim=-1) @ v
    torch.testing.assert_close(softmax_attention(q, k, v, form=form), expected, rtol=1e-12, atol=1e-14)


def test_it_is_multi_head_attention_of_torch_with_padding():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    ignore = torch.zeros(2, 9, dtype=torch.bool)
    ignore[0, 6:] = True
    q, k, v = (p.unflatten(-1, (3, 4)).transpose(1, 2) for p in (x @ layer.in_proj_weight.mT).chunk(3, dim=-1))
    out = layer.out_proj(softmax_attention(q, k, v, keep=~ignore).transpose(1, 2).flatten(2))
    expected = layer(x, x, x, key_padding_mask=ignore, need_weights=False)[0]
    torch.testing.assert_close(out[~ignore], expected[~ignore], rtol=1e-12, atol=1e-13)


def test_rows_sum_to_one_over_real_keys():
    q, k, _ = draw(1, 5, 9)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, ::2] = False
    rows = softmax_rows(q, k, keep=keep)
    assert not rows[0, :, :, ::2].any()
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))


@pytest.mark.refuses
def test_another_form_raises():
    with pytest.raises(ValueError, match="form is 'flash'; expected one of 'fused', 'materialised'"):
        softmax_attention(*draw(0, 3, 3), form="flash")
