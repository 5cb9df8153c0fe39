"""Near tokens by positions in a common text, against sums over one token after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom import near_far_attention, near_far_rows, reference
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts import at_positions
from nystrom.attention.parts.clusters import choose

SMALL = {"block_size": 4, "reach": 2, "num_heavy": 3, "num_clusters": 4, "exact_up_to": 0}
OPTIONS = [SMALL, {**SMALL, "num_heavy": 0, "reach": 7}, {**SMALL, "reach": 0, "num_clusters": 1, "block_size": 1}]
# float64 rounding of sums over some dozens of tokens
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def definition(q, k, v, queries, keys, options, keep, query_keep):
    """The reference, from the choices of one sequence after the other."""
    sizes = NearFarOptions(**options)

    def formula(q, k, v, b, h, places):
        cluster = choose(q[None, None], k[None, None], None, None, sizes).cluster[0, 0]
        first, held = keys[b][keep[b]][0], (queries[b][query_keep[b]], keys[b][keep[b]])
        near = reference.near_keys(*(x - first for x in held), block_size=sizes.block_size, reach=sizes.reach)
        return reference.near_far(q, k, v, cluster=cluster, num_clusters=sizes.num_clusters, near=near)

    return reference.by_sequence(formula, q, k, v, key_keep=keep, query_keep=query_keep)


def draw(n, s, *, b=2, h=2, d=5, e=3, seed=0):
    """Queries, keys and values, and positions with gaps; queries in no order."""
    g = torch.Generator().manual_seed(seed)
    shapes = (b, h, n, d), (b, h, s, d), (b, h, s, e)
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
    keys = torch.randint(1, 4, (b, s), generator=g).cumsum(dim=1) - 9
    queries = torch.randint(-12, 2 * s, (b, n), generator=g)
    return tensors, queries, keys


def masks(n, s):
    keep, query_keep = torch.ones(2, s, dtype=torch.bool), torch.ones(2, n, dtype=torch.bool)
    keep[0, :3] = keep[0, s - 4 :] = keep[0, s // 2] = query_keep[1, 1] = False
    return keep, query_keep


@pytest.mark.parametrize("size", [1e2, 6e4, 1e30])
def test_a_large_value_that_nobody_attends_to_costs_no_digits(size):
    inputs, queries, keys = draw(64, 256, d=8, e=8)
    q, k, v = (x.detach().clone() for x in inputs)
    q[..., 0] += 4
    k[:, :, 100, 0], v[:, :, 100] = -80.0, size
    where = {"query_positions": queries, "key_positions": keys, **SMALL, "num_clusters": 1}
    exact = near_far_attention(q, k, v, **where)
    found = near_far_attention(*(x.float() for x in (q, k, v)), **where)
    # Rounding of float32; where the value is far, it is what the row is.
    assert ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 2e-5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(options, masked, monkeypatch):
    inputs, queries, keys = draw(13, 27)
    keep, query_keep = masks(13, 27) if masked else (None, None)
    ones = [torch.ones_like(x, dtype=torch.bool) for x in (keys, queries)]
    expected = definition(*inputs, queries, keys, options, *(masks(13, 27) if masked else ones))
    where = {"query_positions": queries, "key_positions": keys, "key_keep": keep, "query_keep": query_keep}
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for numbers in (at_positions._NUMBERS, 1):
        # The second time in many stretches.
        monkeypatch.setattr(at_positions, "_NUMBERS", numbers)
        out = near_far_attention(*inputs, **where, **options)
        torch.testing.assert_close(out, expected, **CLOSE)
        for x, y in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
            torch.testing.assert_close(x, y, **CLOSE)
    rows = near_far_rows(*inputs[:2], torch.arange(13), **where, **options)
    torch.testing.assert_close(rows @ inputs[2], expected, **CLOSE)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 20),
    s=st.integers(1, 40),
    block_size=st.integers(1, 9),
    reach=st.integers(0, 12),
    num_heavy=st.integers(0, 9),
    num_clusters=st.integers(1, 9),
    masked=st.booleans(),
    shift=st.integers(-(10**12), 10**12),
    seed=st.integers(0, 2**31),
)
def test_a_shift_changes_nothing_and_rows_give_the_outputs(n, s, masked, shift, seed, **options):
    (q, k, v), queries, keys = draw(n, s, seed=seed)
    keep = torch.rand(2, s, generator=torch.Generator().manual_seed(seed)) < 0.7 if masked else None
    masks = {"key_keep": keep, "query_keep": torch.ones(2, n, dtype=torch.bool)}
    out, moved = (
        near_far_attention(q, k, v, **masks, query_positions=queries + c, key_positions=keys + c, **options)
        for c in (0, shift)
    )
    assert torch.equal(out, moved)
    where = {"query_positions": queries, "key_positions": keys, **masks}
    torch.testing.assert_close(near_far_rows(q, k, torch.arange(n), **where, **options) @ v, out, **CLOSE)


@pytest.mark.parametrize("n", [3, 4, 29])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_of_one_text_are_self_attention(n, masked):
    inputs, *_ = draw(n, n)
    keep = masks(n, n)[0] if masked and n > 9 else None
    here = torch.arange(n).expand(2, n)
    for options in ({}, {"num_samples": 5}):
        expected = near_far_attention(*inputs, keep=keep, **SMALL, **options)
        out = near_far_attention(*inputs, keep=keep, query_positions=here, key_positions=here.int(), **SMALL, **options)
        torch.testing.assert_close(out, expected, **CLOSE)


def test_what_a_masked_token_and_its_position_hold_changes_nothing():
    (q, k, v), queries, keys = draw(13, 27)
    keep, query_keep = masks(13, 27)
    out = near_far_attention(
        q, k, v, key_keep=keep, query_keep=query_keep, query_positions=queries, key_positions=keys, **SMALL
    )
    real = keep[:, None, :, None]
    noise = torch.randint(-(10**6), 10**6, keys.shape, generator=torch.Generator().manual_seed(2))
    again = near_far_attention(
        torch.where(query_keep[:, None, :, None], q, torch.nan),
        torch.where(real, k, torch.nan),
        torch.where(real, v, torch.inf),
        key_keep=keep,
        query_keep=query_keep,
        query_positions=torch.where(query_keep, queries, 10**15),
        key_positions=torch.where(keep, keys, noise),
        **SMALL,
    )
    assert torch.equal(again, out)
    nothing = torch.zeros_like(keep)
    empty = near_far_attention(
        q, k, v, key_keep=nothing, query_keep=query_keep, query_positions=queries, key_positions=keys, **SMALL
    )
    assert not empty.any()


def test_near_tokens_bring_cross_attention_nearer():
    """A key that one query alone looks for, next to it in the text."""
    (q, k, v), *_ = draw(64, 64, b=1, d=8)
    k = 3 * q.detach()
    here = torch.arange(64)[None]
    ones = torch.ones(1, 64, dtype=torch.bool)
    exact = (q @ k.mT / 8**0.5).softmax(dim=-1) @ v
    with_places = near_far_attention(q, k, v, query_keep=ones, query_positions=here, key_positions=here, **SMALL)
    without = near_far_attention(q, k, v, key_keep=ones, **SMALL)
    assert (with_places - exact).norm() < 0.5 * (without - exact).norm()


def test_it_compiles_to_one_graph():
    inputs, queries, keys = draw(13, 27)
    keep, query_keep = masks(13, 27)
    where = {"query_positions": queries, "key_positions": keys, "key_keep": keep, "query_keep": query_keep}
    compiled = torch.compile(near_far_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*inputs, **where, **SMALL), near_far_attention(*inputs, **where, **SMALL), **CLOSE
    )


def test_it_exports_with_dynamic_lengths():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, query_positions, key_positions):
            places = {"query_positions": query_positions, "key_positions": key_positions}
            return near_far_attention(q, k, v, **SMALL, **places)

    def inputs(n, s):
        tensors, queries, keys = draw(n, s)
        return (*(x.detach() for x in tensors), queries, keys)

    # Whether keys increase is asked of pairs, and torch exports no axis of one: three keys are the least.
    n, s = torch.export.Dim("n"), torch.export.Dim("s", min=3)
    shapes = ({2: n}, {2: s}, {2: s}, {1: n}, {1: s})
    exported = torch.export.export(Attention(), inputs(11, 23), dynamic_shapes=shapes).module()
    for lengths in ((11, 23), (40, 9), (5, 64), (2, 3)):
        torch.testing.assert_close(exported(*inputs(*lengths)), Attention()(*inputs(*lengths)), **CLOSE)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key_positions": None}, "key_positions is a NoneType; expected a tensor: pass positions of queries and of"),
        ({"query_positions": None}, "query_positions is a NoneType"),
        ({"query_positions": torch.zeros(2, 9)}, r"query_positions is \(2, 9\) of torch.float32; expected int64"),
        ({"key_positions": torch.arange(12)}, r"key_positions is \(12,\) of torch.int64; expected .* \(2, 12\)"),
        ({"key_positions": torch.zeros(2, 12, dtype=torch.long)}, "key_positions do not increase"),
        ({"key_positions": torch.arange(12).flip(0).expand(2, 12)}, "sort the keys, each with a position of its own"),
    ],
)
def test_positions_that_do_not_fit_raise(changes, says):
    (q, k, v), *_ = draw(9, 12)
    where = {"query_positions": torch.arange(9).expand(2, 9), "key_positions": torch.arange(12).expand(2, 12)}
    for call in (
        lambda **where: near_far_attention(q, k, v, **where, **SMALL),
        lambda **where: near_far_rows(q, k, torch.tensor([0]), **where, **SMALL),
    ):
        with pytest.raises(ValueError, match=says):
            call(**(where | changes))


@pytest.mark.refuses
def test_what_cannot_serve_positions_raises():
    inputs, queries, keys = draw(9, 12)
    for changes, says in (
        ({"backend": "triton"}, "backend is 'triton', and so are positions"),
        ({"group": object()}, "group is given, and so are positions"),
    ):
        with pytest.raises(ValueError, match=says):
            near_far_attention(*inputs, query_positions=queries, key_positions=keys, **SMALL, **changes)


def test_every_derivative_is_there():
    (q, k, v), queries, keys = draw(4, 13, b=1, h=1, d=3, e=2)

    def attend(q, k, v):
        return near_far_attention(q, k, v, query_positions=queries, key_positions=keys, **SMALL)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradgradcheck(attend, (q, k, v))
    expected = torch.autograd.grad(attend(q, k, v).sum(), k)[0]
    torch.testing.assert_close(torch.func.grad(lambda k: attend(q, k, v).sum())(k), expected, **CLOSE)
