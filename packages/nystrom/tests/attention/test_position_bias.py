"""Biases of positions: their values, what they are refused for, and that all pairs are never stored."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from nystrom import Alibi, Alibi2d, MultiheadAttention, RelativeBuckets, build_attention, near_far_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.registry import METHODS

H, N = 2, 60
SMALL = {"block_size": 8, "reach": 2, "num_heavy": 3, "num_clusters": 4, "exact_up_to": 0}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(n=N, b=2):
    return [draw(b, H, n, 4, seed=seed) for seed in range(3)]


def biases(n=N, b=2):
    yield RelativeBuckets(draw(H, 8), max_distance=20)
    yield Alibi(draw(H).abs())
    yield Alibi2d(draw(H).abs(), 3 * draw(b, n, 2))


def dense(bias, q, k, v, keep=None):
    """Torch's attention under a float mask, which is the bias."""
    if isinstance(bias, Alibi2d):
        exactly = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(bias.coordinates, bias.coordinates, compute_mode=exactly)
        mask = -bias.slopes[:, None, None] * distance[:, None]
    else:
        offset = torch.arange(q.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        tables = [bias.table[:, bias.buckets(offset)]] if isinstance(bias, RelativeBuckets) else []
        mask = (tables or [-bias.slopes[:, None, None] * offset.abs()])[0][None]
    mask = mask if keep is None else mask.masked_fill(~keep[:, None, None], -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("masked", [False, True])
def test_exact_attention_is_torchs_under_a_float_mask(kind, masked):
    q, k, v = inputs()
    bias, keep = list(biases())[kind], None
    if masked:
        keep = (torch.arange(N) >= torch.tensor([[9], [0]])) & (torch.arange(N) < torch.tensor([[N], [41]]))
    expected = dense(bias, q, k, v, keep)
    near = {"num_heavy": 3, "num_clusters": 4, "block_size": 8, "exact_up_to": 0}
    found = [
        softmax_attention(q, k, v, bias=bias, keep=keep),
        near_far_attention(q, k, v, bias=bias, keep=keep),
        near_far_attention(q, k, v, bias=bias, keep=keep, **near, reach=N),
    ]
    if masked:
        # All keys are heavy.
        found.append(near_far_attention(q, k, v, bias=bias, keep=keep, **near | {"num_heavy": N - 1}))
    for out in found:
        real = slice(None) if keep is None else keep[:, None].expand(-1, H, -1)
        # float64 rounding of a softmax
        assert_close(out[real], expected[real], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", range(3))
def test_gradients_reach_tables_and_slopes(kind):
    q, k, v = inputs(n=18, b=1)
    bias = list(biases(18, 1))[kind]
    weight = (bias.table if kind == 0 else bias.slopes).requires_grad_()
    near_far = {"block_size": 4, "reach": 1, "num_heavy": 1, "num_clusters": 2, "exact_up_to": 0}

    def attend(weight):
        made = (
            RelativeBuckets(weight, 20)
            if kind == 0
            else Alibi(weight)
            if kind == 1
            else bias.__class__(weight, bias.coordinates)
        )
        return torch.cat([softmax_attention(q, k, v, bias=made), near_far_attention(q, k, v, bias=made, **near_far)])

    assert torch.autograd.gradcheck(attend, weight, fast_mode=True)


@pytest.mark.parametrize("kind", range(3))
def test_padding_changes_nothing_where_clusters_outnumber_the_tokens(kind):
    few, options = 20, {**SMALL, "num_clusters": 30}
    q, k, v = inputs()
    bias, alone = list(biases())[kind], list(biases())[kind]
    if isinstance(alone, Alibi2d):
        alone = Alibi2d(alone.slopes, alone.coordinates[:, :few])
    keep = (torch.arange(N) < few).expand(2, N)
    padded = near_far_attention(q, k, v, keep=keep, bias=bias, **options)[:, :, :few]
    # float64 rounding of sums of 20
    assert_close(
        padded, near_far_attention(*(x[:, :, :few] for x in (q, k, v)), bias=alone, **options), atol=1e-14, rtol=0
    )


@pytest.mark.parametrize("named", [{}, {"cu_seqlens": torch.tensor([0, 0])}])
def test_a_table_that_no_token_reads_has_a_gradient_of_zeros(named):
    table = torch.zeros(H, 8, requires_grad=True)
    near_far_attention(*inputs(n=0, b=1), bias=RelativeBuckets(table, 20), **named).sum().backward()
    assert torch.equal(table.grad, torch.zeros(H, 8))


def test_coordinates_move_with_their_tokens():
    q, k, v = inputs()
    bias = list(biases())[2]
    alone = near_far_attention(q, k, v, bias=bias, **SMALL)
    padded = [F.pad(x, (0, 0, 5, 3), value=float("nan")) for x in (q, k, v)]
    coordinates = F.pad(bias.coordinates, (0, 0, 5, 3), value=float("nan"))
    keep = F.pad(torch.ones(2, N, dtype=torch.bool), (5, 3))
    out = near_far_attention(*padded, bias=Alibi2d(bias.slopes, coordinates), keep=keep, **SMALL)
    assert_close(out[:, :, 5:-3], alone, rtol=1e-10, atol=1e-12)
    one = near_far_attention(*(x[1:] for x in (q, k, v)), bias=bias.at(bias.coordinates[1:]), **SMALL)
    assert_close(one, alone[1:], rtol=1e-10, atol=1e-12)
    row = [x.transpose(1, 2).reshape(1, -1, H, 4).transpose(1, 2) for x in (q, k, v)]
    packed = Alibi2d(bias.slopes, bias.coordinates.flatten(0, 1))
    out = near_far_attention(*row, bias=packed, cu_seqlens=torch.tensor([0, N, 2 * N]), **SMALL)
    assert_close(out[0].unflatten(1, (2, N)).transpose(0, 1), alone, rtol=1e-10, atol=1e-12)


def test_one_line_of_coordinates_is_alibi():
    q, k, v = inputs()
    slopes, line = draw(H).abs(), torch.arange(N)[:, None].double()
    one, other = (near_far_attention(q, k, v, bias=x, **SMALL) for x in (Alibi(slopes), Alibi2d(slopes, line)))
    assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_layer_takes_a_bias_with_exact_heads():
    layer = MultiheadAttention(8, H, method="near_far", exact_heads=(1,), dtype=torch.float64, **SMALL)
    x, bias = draw(2, N, 8), RelativeBuckets(draw(H, 8), 20)
    out, _ = layer(x, bias=bias)
    both, _ = MultiheadAttention.forward(layer, x, x, x, bias=bias)
    assert_close(out, both)
    heads = build_attention("near_far", num_heads=H, head_dim=4, exact_heads=(1,), **SMALL)
    q, k, v = inputs()
    assert_close(heads(q, k, v, bias=bias)[:, 1], dense(bias, q, k, v)[:, 1], rtol=1e-10, atol=1e-12)
    assert_close(heads(q, k, v, bias=bias)[:, 0], near_far_attention(q, k, v, bias=bias, **SMALL)[:, 0])


@pytest.mark.refuses
@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].bias])
def test_methods_without_it_refuse_by_name(method):
    heads = build_attention(
        method, num_heads=H, head_dim=4, **({"max_length": N, "num_features": 4} if method == "linformer" else {})
    )
    with pytest.raises(ValueError, match=f"bias cannot be honoured: {method} attention .*Use 'softmax' or 'near_far'"):
        heads(*inputs(), bias=RelativeBuckets(draw(H, 8)))


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"bias": torch.zeros(2, H, N, N)}, "bias is a tensor .*pass the function of positions"),
        ({"bias": "alibi"}, "bias is of type str; expected None, or nystrom.RelativeBuckets"),
        ({"bias": RelativeBuckets(torch.zeros(H + 1, 8))}, "bias has 3 heads but q has 2"),
        ({"bias": Alibi2d(torch.zeros(H), torch.zeros(N - 1, 2))}, "coordinates of .* tokens but q holds"),
        ({"num_selected": 4}, "bias is given, and num_selected is 4"),
        ({"tolerance": 0.1}, "bias is given, and tolerance is 0.1"),
        ({"is_causal": True}, "bias is given, and is_causal is True"),
        ({"key_keep": torch.ones(2, N, dtype=torch.bool)}, "bias is one of positions, which is self-attention"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(named, says):
    with pytest.raises(ValueError, match=says):
        near_far_attention(*inputs(), **{"bias": RelativeBuckets(torch.zeros(H, 8))} | named)


@pytest.mark.refuses
def test_wrong_tables_and_slopes_are_refused_by_name():
    for make, says in (
        (lambda: RelativeBuckets(torch.zeros(8)), "table has shape"),
        (lambda: RelativeBuckets(torch.zeros(2, 6)), "table has 6 buckets .*a multiple of 4"),
        (lambda: RelativeBuckets(torch.zeros(2, 32), 8), "max_distance is 8"),
        (lambda: Alibi(torch.zeros(2, 2)), "slopes has shape"),
        (lambda: Alibi2d(torch.zeros(2), torch.zeros(4)), "coordinates has shape"),
        (lambda: Alibi2d(torch.zeros(2), torch.zeros(4, 0)), "coordinates has shape"),
        (lambda: Alibi2d(torch.zeros(2), torch.zeros(4, 2, dtype=torch.complex64)), "expected real numbers"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
