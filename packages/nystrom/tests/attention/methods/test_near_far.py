import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom import MultiheadAttention, near_far_attention, near_far_rows, near_far_sizes, reference
from nystrom.attention.methods import near_far
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose

SMALL = {"block_size": 4, "reach": 2, "num_heavy": 3, "num_clusters": 4, "exact_up_to": 0}
OPTIONS = [
    SMALL,
    {**SMALL, "num_heavy": 0, "reach": 7},
    {**SMALL, "reach": 0, "num_clusters": 1},
    {**SMALL, "block_size": 1, "iterations": 1},
    {**SMALL, "scale": 0.9, "num_heavy": 9},
    {**SMALL, "num_selected": 3},
    {**SMALL, "scale": 0.9, "num_heavy": 0, "reach": 0, "num_selected": 8},
]
# float64 rounding of sums over some dozens of tokens
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def definition(q, k, v, options, **masks):
    """The reference, from the choices of one sequence after the other."""
    sizes, is_self = NearFarOptions(**options), not {"key_keep", "query_keep"} & {*masks}

    def formula(q, k, v, b, h, places):
        cluster = choose(q[None, None], k[None, None], None, None, sizes).cluster[0, 0]
        near = reference.near_keys(places, places, block_size=sizes.block_size, reach=sizes.reach) if is_self else None
        # Another factor on the scores is one on the queries.
        q = q if sizes.scale is None else sizes.scale * q.shape[1] ** 0.5 * q
        if sizes.num_selected:
            how = {"num_clusters": sizes.num_clusters, "block_size": sizes.block_size}
            how |= {"num_selected": sizes.num_selected, "cluster": cluster, "near": near, "places": places}
            near = near | reference.selected_keys(q, k, v, **how)
        return reference.near_far(q, k, v, cluster=cluster, num_clusters=sizes.num_clusters, near=near)

    return reference.by_sequence(formula, q, k, v, **masks)


def draw(n, s=None, *, b=2, h=2, d=5, e=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    shapes = (b, h, n, d), (b, h, s, d), (b, h, s, e)
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def holes(n):
    """A mask with padding at both ends and a hole, and one without."""
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[0, :3] = keep[0, n - 4 :] = keep[0, n // 2] = False
    return keep


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(options, masked):
    inputs, keep = draw(27), holes(27) if masked else None
    out = near_far_attention(*inputs, keep=keep, **options)
    expected = definition(*inputs, options, keep=keep)
    torch.testing.assert_close(out, expected, **CLOSE)
    grad = draw(27, e=3, seed=1)[2]
    for x, y in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_cross_attention_is_the_definition_without_near_tokens(options):
    inputs = draw(9, 23)
    keep = holes(23)
    for mask in (torch.ones_like(keep), keep):
        out = near_far_attention(*inputs, key_keep=mask, **options)
        torch.testing.assert_close(out, definition(*inputs, options, key_keep=mask), **CLOSE)


@pytest.mark.refuses
def test_other_tokens_without_a_word_raise():
    q, k, v = draw(9, 23)
    for call in (lambda: near_far_attention(q, k, v, **SMALL), lambda: near_far_rows(q, k, torch.arange(9), **SMALL)):
        with pytest.raises(ValueError, match=r"q holds 9 tokens and k holds 23, but near_far counts.*pass key_keep"):
            call()


def test_queries_with_a_mask_of_their_own_are_other_tokens():
    inputs, ones = draw(23), torch.ones(2, 23, dtype=torch.bool)
    for masks in ({"key_keep": ones}, {"query_keep": ones}, {"key_keep": ones, "query_keep": ones}):
        out = near_far_attention(*inputs, **masks, **SMALL)
        torch.testing.assert_close(out, definition(*inputs, SMALL, key_keep=ones), **CLOSE)


def test_a_layer_of_cross_attention_has_no_near_tokens():
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, method="near_far", self_attention=False, **SMALL).double().eval()
    x = torch.randn(1, 23, 8, dtype=torch.float64)
    other = layer(x, x, x)[0]
    layer.self_attention = True
    own = layer(x, x, x)[0]
    layer.self_attention = False
    assert not torch.allclose(own, other)
    mask = torch.zeros(1, 23, dtype=torch.bool)
    torch.testing.assert_close(other, layer(x, x.clone(), x.clone(), key_padding_mask=mask)[0], **CLOSE)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    block_size=st.integers(1, 9),
    reach=st.integers(0, 12),
    num_heavy=st.integers(0, 9),
    num_clusters=st.integers(1, 9),
    num_selected=st.integers(0, 9),
    iterations=st.integers(1, 4),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_are_positive_and_sum_to_one_and_give_the_outputs(n, masked, seed, **options):
    q, k, v = draw(n, seed=seed)
    keep = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.7 if masked else None
    options["exact_up_to"] = 0
    rows = near_far_rows(q, k, torch.arange(n), v=v, keep=keep, **options)
    real = torch.ones(2, n, dtype=torch.bool) if keep is None else keep
    pairs = (real[:, None, :, None] & real[:, None, None]).expand_as(rows)
    assert (rows[pairs] > 0).all()
    assert not rows[~pairs].any()
    sums = rows.sum(dim=-1)
    torch.testing.assert_close(sums, (real & real.any(-1, keepdim=True))[:, None].to(sums).expand_as(sums), **CLOSE)
    torch.testing.assert_close(rows @ v, near_far_attention(q, k, v, keep=keep, **options), **CLOSE)


def test_rows_of_some_queries_are_those_of_all():
    q, k, _ = draw(23)
    asked = torch.tensor([22, 0, 7])
    torch.testing.assert_close(
        near_far_rows(q, k, asked, **SMALL), near_far_rows(q, k, torch.arange(23), **SMALL)[:, :, asked], **CLOSE
    )
    with pytest.raises(ValueError, match=r"queries holds positions outside 0 ... 22"):
        near_far_rows(q, k, torch.tensor([23]), **SMALL)
    with pytest.raises(ValueError, match="is on meta, the tokens are on cpu: move it there"):
        near_far_rows(q, k, torch.tensor([2], device="meta"), **SMALL)


def exact(q, k, v, keep):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep[:, None, None], -math.inf)
    return torch.where(keep[:, None, :, None], scores.softmax(dim=-1) @ v, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**SMALL, "num_heavy": 40}, id="all-heavy"),
        pytest.param({**SMALL, "reach": 30}, id="all-near"),
        # 23 real tokens
        pytest.param({**SMALL, "num_heavy": 22}, id="all-but-one-heavy"),
        pytest.param({**SMALL, "num_clusters": 40}, id="one-key-a-cluster"),
        pytest.param({**SMALL, "num_selected": 20}, id="all-selected"),
        pytest.param({**SMALL, "num_clusters": 40, "num_selected": 2}, id="one-key-a-cluster-or-selected"),
    ],
)
def test_exact_limits_are_met_by_a_short_sequence_among_long_ones(options):
    q, k, v = draw(60)
    keep = torch.ones(2, 60, dtype=torch.bool)
    keep[0, :5] = keep[0, 28:] = False
    out = near_far_attention(q, k, v, keep=keep, **options)
    torch.testing.assert_close(out[:1], exact(q, k, v, keep)[:1], **CLOSE)


def test_equal_keys_are_exact():
    q, k, v = draw(50)
    k = k[:, :, :1].expand_as(k)
    keep = torch.ones(2, 50, dtype=torch.bool)
    torch.testing.assert_close(near_far_attention(q, k, v, **SMALL), exact(q, k, v, keep), **CLOSE)


@pytest.mark.parametrize("num_selected", [0, 2])
def test_a_near_heavy_or_selected_key_does_not_count_in_its_cluster(num_selected):
    """One far token of a large value, alone in its cluster, is lost or doubled by any error in the counts."""
    (q, k, v), options = draw(40), SMALL | {"num_selected": num_selected}
    values = torch.zeros_like(v)
    for place in (0, 17, 39):
        values.zero_()[:, :, place] = 1e6
        rows = near_far_rows(q, k, torch.arange(40), v=values, **options)[..., place]
        out = near_far_attention(q, k, values, **options)
        torch.testing.assert_close(out[..., 0], 1e6 * rows, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_selected", [0, 6])
def test_long_sequences_in_many_stretches_are_the_plain_form(num_selected):
    inputs = draw(1003, b=1, h=3, d=16, e=24)
    options = {"block_size": 8, "reach": 3, "num_heavy": 5, "num_clusters": 64, "exact_up_to": 0}
    options["num_selected"] = num_selected
    keep = torch.arange(1003)[None] > 6
    for mask in (None, keep):
        out = near_far_attention(*inputs, keep=mask, **options)
        # rows of a matrix, without blocks and stretches
        rows = near_far_rows(*inputs[:2], torch.arange(1003), v=inputs[2], keep=mask, **options)
        torch.testing.assert_close(out, rows @ inputs[2], **CLOSE)
        found, expected = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, rows @ inputs[2]))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_float32_is_near_float64_at_the_default_sizes():
    inputs = [x.detach().float() for x in draw(700, h=3, d=16, e=16)]
    leaves = [[x.to(dtype).requires_grad_() for x in inputs] for dtype in (torch.float32, torch.float64)]
    out, expected = (near_far_attention(*x, exact_up_to=0) for x in leaves)
    assert (out - expected).norm() <= 2e-6 * expected.norm()
    found, wanted = (torch.autograd.grad(x.square().sum(), y) for x, y in zip((out, expected), leaves, strict=True))
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


def of_tokens(found, exact, real):
    """The largest error of a token, relative to the token itself."""
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    return error[:, :, real].max().item()


@pytest.mark.parametrize("in_stretches", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1e2, 6e4, 1e30])
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 16, "reach": 3, "num_heavy": 4, "num_clusters": 1, "exact_up_to": 0},
        {"block_size": 7, "reach": 20, "num_heavy": 2, "num_clusters": 1, "exact_up_to": 0},
        {"block_size": 1, "reach": 0, "num_heavy": 4, "num_clusters": 1, "exact_up_to": 0},
        {"block_size": 32, "reach": 3, "num_heavy": 0, "num_clusters": 1, "exact_up_to": 0, "num_selected": 12},
        {"block_size": 32, "reach": 0, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 0, "num_selected": 20},
    ],
    ids=str,
)
def test_a_large_value_or_gradient_leaves_no_trace_where_it_has_no_weight(
    options, size, masked, in_stretches, monkeypatch
):
    """The values and upstream gradients of a few tokens are large; queries next to the former attend elsewhere."""
    monkeypatch.setattr(near_far, "runs_in_stretches", lambda *_: in_stretches)
    inputs = [x.detach().float() for x in draw(96, b=1, d=8, e=8)]
    q, k, v = inputs
    q[..., 0] += 4
    k[:, :, 40, 0] -= 60
    if "num_selected" in options:
        # The first half of each block attends to that key, so that the block selects it, and the other half does not;
        # the weight is a normal number for all.
        k[:, :, 40, 0] += 20
        q[:, :, ((torch.arange(96) - 5 * masked) // 16) % 2 == 0, 0] -= 8
    v[:, :, 40] *= size
    grad = draw(96, b=1, e=8, seed=1)[2].detach().float()
    grad[:, :, 38:43] *= size
    keep = (torch.arange(96) > 4) & (torch.arange(96) != 60) & (torch.arange(96) < 87) if masked else None
    real = torch.ones(96, dtype=torch.bool) if keep is None else keep
    keep = None if keep is None else keep[None]

    def dense(q, k, v):
        return near_far_rows(q, k, torch.arange(96), v=v, keep=keep, **options) @ v

    def results(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [out, torch.autograd.grad(out, leaves[2], grad.to(dtype))[0]]

    exact, plain = results(dense, torch.float64), results(dense, torch.float32)
    found = results(lambda *x: near_far_attention(*x, keep=keep, **options), torch.float32)
    for mine, theirs, wanted in zip(found, plain, exact, strict=True):
        # Another order of the same sums, and scores near -60, whose rounding is that of the weights.
        allowed = 4 * of_tokens(theirs, wanted, real) + 60 * torch.finfo(torch.float32).eps
        assert of_tokens(mine, wanted, real) <= allowed


def selected_rows(q, k, v, options, **masks):
    """Which keys each query sees as in exact attention, by the ratio of their weights to that of the heaviest key."""
    rows = near_far_rows(q, k, torch.arange(q.shape[2]), v=v, **masks, **options)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    own = torch.diagonal(rows.log() - scores, dim1=-2, dim2=-1)[..., None]
    return (rows.log() - scores - own).abs() < 1e-9


def test_a_block_selects_the_keys_with_the_largest_loss():
    """A far key to which one block alone attends, with a value of its own; all other keys are alike."""
    q, k, v = (x.detach() * 0.1 for x in draw(64, b=1, h=1))
    q[:, :, 40:44, 0], k[:, :, 9, 0], v[:, :, 9] = 9, 3, 20
    # Candidates are the first 12 of one cluster.
    seen = selected_rows(q, k, v, {**SMALL, "num_heavy": 0, "num_clusters": 1, "num_selected": 3})[0, 0]
    assert seen[40:44, 9].all()
    near = torch.arange(64)[:, None] // 4 * 4 - torch.arange(64)
    assert (seen & ((near > 2) | (near < -5))).sum(dim=1).tolist() == [3] * 64


def test_padding_queries_of_a_block_ask_for_nothing():
    q, k, v = (x.detach() for x in draw(64, b=1))
    options = {**SMALL, "block_size": 32, "num_selected": 3}
    keep = torch.arange(64)[None] < 33
    out = near_far_attention(q, k, v, keep=keep, **options)
    q[:, :, 33:], k[:, :, 33:], v[:, :, 33:] = math.nan, math.inf, 1e300
    torch.testing.assert_close(near_far_attention(q, k, v, keep=keep, **options), out, rtol=0, atol=0)


def test_rows_of_selected_keys_need_the_values():
    q, k, _ = draw(9)
    with pytest.raises(ValueError, match=r"num_selected is 2, and v is not given: .* Pass v, or num_selected=0"):
        near_far_rows(q, k, torch.arange(9), num_selected=2)


def test_rows_of_a_layer_with_selected_keys_give_its_outputs():
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, method="near_far", **SMALL, num_selected=3).double().eval()
    x = torch.randn(1, 50, 8, dtype=torch.float64)
    y, rows = layer(x, x, x, need_weights=True, weight_queries=torch.arange(50), average_attn_weights=False)
    values = torch.nn.functional.linear(x, layer.in_proj_weight[16:], layer.in_proj_bias[16:])
    heads = (rows @ values.unflatten(2, (2, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.out_proj(heads), y, **CLOSE)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"is_causal": True}, "num_selected is 2, and is_causal is True: leave one of them out"),
        ({"group": object()}, "num_selected is 2, and group is given: leave one of them out"),
        ({"key_keep": None}, "key_keep cannot be honoured: num_selected is self-attention.*Pass keep, or num_sel"),
        ({"backend": "triton"}, "num_selected is 2 and backend is 'triton', .* pass backend='torch' or num_sel"),
    ],
)
def test_what_cannot_select_keys_raises(given, says):
    given = {name: torch.ones(2, 9, dtype=torch.bool) if name == "key_keep" else each for name, each in given.items()}
    with pytest.raises(ValueError, match=says):
        near_far_attention(*draw(9), num_selected=2, **given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "block_size is 0; expected a whole number of at least 1"),
        ({"reach": -1}, "reach is -1; expected a whole number of at least 0"),
        ({"num_heavy": -1}, "num_heavy is -1"),
        ({"num_clusters": 0, "exact_up_to": 0}, "num_clusters is 0"),
        ({"iterations": 0}, "iterations is 0"),
        ({"num_selected": -1}, "num_selected is -1"),
        ({"scale": 0.0}, "scale is 0.0; expected a positive"),
        ({"backend": "cuda"}, "backend is 'cuda'; expected one of 'auto', 'torch', 'triton'"),
    ],
)
def test_bad_options_raise(options, says):
    with pytest.raises(ValueError, match=says):
        near_far_attention(*draw(9), **options)


@pytest.mark.parametrize("lengths", [(12, 30, 5, 40), (12, 3), (30, 40)])
def test_sequences_of_few_tokens_are_exact_whatever_stands_beside_them(lengths):
    inputs = draw(40, b=len(lengths))
    keep = torch.arange(2, 42) <= torch.tensor(lengths)[:, None] + 1
    # Padding in front, and a hole.
    keep[0] = keep[0].roll(9)
    keep[0, 15] = False
    options = SMALL | {"exact_up_to": 12}
    out = near_far_attention(*inputs, keep=keep, **options)
    grads = torch.autograd.grad(out.sin().sum(), inputs)
    for i, length in enumerate(lengths):
        one = [x[i : i + 1] for x in inputs]
        if length <= 12:
            wanted = F.scaled_dot_product_attention(*one, keep[i][None, None, None]) * keep[i][:, None]
        else:
            wanted = near_far_attention(*one, keep=keep[i : i + 1], **SMALL)
        torch.testing.assert_close(out[i : i + 1], wanted, **CLOSE)
        for ours, theirs in zip(grads, torch.autograd.grad(wanted.sin().sum(), inputs), strict=True):
            torch.testing.assert_close(ours[i], theirs[i], **CLOSE)
    rows = near_far_rows(inputs[0], inputs[1], torch.arange(40), keep=keep, **options)
    torch.testing.assert_close(rows @ inputs[2].masked_fill(~keep[:, None, :, None], 0.0), out, **CLOSE)


@pytest.mark.refuses
def test_sizes_grow_as_the_square_root_of_the_length():
    sizes = {"block_size": 64, "reach": 8, "num_heavy": 32, "num_clusters": 88, "num_selected": 120}
    assert near_far_sizes(2048) == sizes
    without = {"block_size": 128, "reach": 16, "num_heavy": 64, "num_clusters": 160}
    assert near_far_sizes(2048, selects=False) == without
    assert [near_far_sizes(8192, selects=yes)["num_clusters"] for yes in (True, False)] == [176, 320]
    assert near_far_sizes(1) == near_far_sizes(512)
    with pytest.raises(ValueError, match="selects is 1; expected True or False"):
        near_far_sizes(9, selects=1)
    with pytest.raises(ValueError, match="n is 0; expected a whole number of at least 1"):
        near_far_sizes(0)
