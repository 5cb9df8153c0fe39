"""A context is near_far's cross-attention with its first half computed once."""

import copy

import pytest
import torch
import torch.nn.functional as F

from nystrom import MultiheadAttention, NearFarContext, near_far_context, reference
from nystrom.attention.layer import LayerContext
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose

SIZES = {"num_heavy": 3, "num_clusters": 5}
# float64 rounding of sums in another order.
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def draw(n, s, *, b=2, h=3, d=4, e=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, h, n, d), (b, h, s, d), (b, h, s, e))
    return [torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def real(s, *lengths):
    return torch.arange(s) < torch.tensor(lengths)[:, None]


@pytest.mark.long
@pytest.mark.parametrize("selecting", [False, True])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_it_is_the_plain_formula_with_its_gradients(scale, selecting):
    q, k, v = draw(7, 40)
    keep, options = real(40, 40, 17), NearFarOptions(scale=scale, **SIZES)
    queries, factor = q if selecting else None, 1 if scale is None else scale * 4**0.5
    context = near_far_context(k, v, queries=queries, key_keep=keep, scale=scale, **SIZES)
    torch.testing.assert_close(context.sizes.sum(-1), torch.tensor([[40] * 3, [17] * 3]))
    out = context(q)
    found = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for i, count in enumerate((40, 17)):
        one = [q[i : i + 1], k[i : i + 1, :, :count], v[i : i + 1, :, :count]]
        chosen = choose(one[0] if selecting else None, one[1], None, None, options, ordered=False)
        heads = [
            reference.near_far(
                factor * one[0][0, h], one[1][0, h], one[2][0, h], cluster=chosen.cluster[0, h], num_clusters=5
            )
            for h in range(3)
        ]
        torch.testing.assert_close(out[i], torch.stack(heads), **CLOSE)
        wanted = torch.autograd.grad(torch.stack(heads).sin().sum(), (q, k, v))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x[i], y[i], **CLOSE)
    masked = context(q, query_keep=real(7, 5, 7))
    torch.testing.assert_close(masked[0, :, :5], out[0, :, :5], **CLOSE)
    assert not masked[0, :, 5:].any()


def test_rows_of_a_table_have_a_cluster_where_they_lie():
    g = torch.Generator().manual_seed(0)
    places = torch.randint(20, (1, 1, 4000), generator=g)
    k = 10 * torch.randn(20, 4, generator=g, dtype=torch.float64)[places[0, 0]][None, None]
    context = near_far_context(k, k, num_heavy=0, num_clusters=80)
    # All 20 places have an entry of their own: means of neighbours would all lie in the middle.
    assert torch.cdist(k[0, 0], context.keys[0, 0]).amin(dim=-1).max() < 1e-5


def test_entries_are_the_heavy_keys_and_the_means_of_the_others():
    _, k, v = draw(1, 40)
    # Keys far from all others have an entry each, without any query.
    with torch.no_grad():
        k[0, 0, 11] += 50
        k[0, 0, 12] += 60
    context = near_far_context(k, v, **SIZES)
    for far in (11, 12):
        assert ((context.keys[0, 0] - k[0, 0, far]).norm(dim=-1) < 1e-9).sum() == 1
    counts = context.sizes.to(k)
    assert (context.sizes[..., :3] == 1).all()
    for entries, all_of in ((context.keys, k), (context.values, v)):
        torch.testing.assert_close((counts[..., None] * entries).sum(dim=2), all_of.sum(dim=2), **CLOSE)


@pytest.mark.parametrize("sizes", [{"num_heavy": 40, "num_clusters": 1}, {"num_heavy": 0, "num_clusters": 40}])
@pytest.mark.parametrize("lengths", [(40, 40), (12, 31)])
def test_exact_where_each_key_has_an_entry(sizes, lengths):
    q, k, v = draw(5, 40)
    keep = real(40, *lengths)
    out = near_far_context(k, v, key_keep=keep, **sizes)(q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, keep[:, None, None]), **CLOSE)


def test_padding_and_neighbours_change_nothing():
    q, k, v = draw(5, 40)
    keep = real(40, 40, 23)
    padded = near_far_context(k.masked_fill(~keep[:, None, :, None], torch.nan), v, key_keep=keep, **SIZES)(q)
    alone = near_far_context(k[1:, :, :23], v[1:, :, :23], **SIZES)(q[1:])
    torch.testing.assert_close(padded[1:], alone, **CLOSE)
    torch.testing.assert_close(padded[:1], near_far_context(k[:1], v[:1], **SIZES)(q[:1]), **CLOSE)


@pytest.mark.parametrize("shape", [(2, 0), (2, 5), (0, 5)])
def test_nothing_to_attend_to_gives_zeros(shape):
    q, k, v = draw(4, shape[1], b=shape[0])
    context = near_far_context(k, v, key_keep=torch.zeros(shape, dtype=torch.bool), **SIZES)
    out = context(q)
    assert out.shape == (shape[0], 3, 4, 6)
    assert not out.any()
    out.sum().backward()


def test_it_is_saved_loaded_moved_and_cast(tmp_path):
    q, k, v = draw(5, 90)
    context = near_far_context(k, v, **SIZES)
    torch.save(context.state_dict(), tmp_path / "context.pt")
    loaded = NearFarContext(**torch.load(tmp_path / "context.pt", weights_only=True))
    assert torch.equal(loaded(q), context(q))
    # Numbers of tokens stay whole, so that half precision does not round their logarithms.
    half = copy.deepcopy(loaded).to(torch.bfloat16)
    assert half.sizes.dtype == torch.long
    assert half(q.bfloat16()).dtype == torch.bfloat16
    # bfloat16 rounding of keys and values
    torch.testing.assert_close(half(q.bfloat16()).double(), context(q), rtol=0.05, atol=0.02)
    assert loaded.to("meta").keys.is_meta
    assert "entries=8" in repr(context)


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_finite_and_near_float64(dtype, size):
    inputs = [x.detach() for x in draw(5, 90)]
    leaves = [(size**0.5 * x).to(dtype).requires_grad_() for x in inputs[:2]] + [inputs[2].to(dtype).requires_grad_()]
    out = near_far_context(leaves[1], leaves[2], num_heavy=90, num_clusters=1)(leaves[0])
    assert out.dtype == dtype
    wanted = F.scaled_dot_product_attention(*(x.detach().double() for x in leaves))
    # Rounding of scores of this size, and of the result.
    eps = torch.finfo(torch.float32).eps * 100 * size + 4 * torch.finfo(dtype).eps
    assert (out.double() - wanted).abs().max() <= eps * wanted.abs().max()
    approximate = near_far_context(leaves[1], leaves[2], **SIZES)(leaves[0])
    for x in (approximate, *torch.autograd.grad(approximate.float().square().sum(), leaves)):
        assert x.isfinite().all()


def test_autocast_computes_in_its_dtype():
    q, k, v = (x.detach().float() for x in draw(5, 40))
    with torch.autocast("cpu", torch.bfloat16):
        context = near_far_context(k, v, queries=q, **SIZES)
        out = context(q)
    assert context.keys.dtype == out.dtype == torch.bfloat16


def test_gradients_are_right():
    inputs = draw(3, 20, b=1, h=1)
    assert torch.autograd.gradcheck(lambda q, k, v: near_far_context(k, v, **SIZES)(q), inputs)


def test_it_compiles_to_one_graph():
    q, k, v = (x.detach() for x in draw(5, 40))
    compiled = torch.compile(lambda q, k, v: near_far_context(k, v, **SIZES)(q), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), near_far_context(k, v, **SIZES)(q), **CLOSE)


def test_a_layer_has_a_context():
    torch.manual_seed(0)
    layer = MultiheadAttention(12, 3, kdim=7, vdim=5, method="near_far", self_attention=False, **SIZES).double().eval()
    x, key, value = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((9, 12), (40, 7), (40, 5)))
    ignore = ~real(40, 40, 23)
    context = layer.context(key, value, ignore, queries=x)
    out = context(x)
    weights = zip((x, key, value), layer._projections(), layer.in_proj_bias.chunk(3), strict=True)
    projected = [F.linear(*each) for each in weights]
    q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in projected)
    heads = near_far_context(k, v, queries=q, key_keep=~ignore, **SIZES)(q)
    torch.testing.assert_close(out, layer.out_proj(heads.transpose(1, 2).flatten(2)), **CLOSE)
    layer.batch_first = False
    turned = layer.context(key.transpose(0, 1), value.transpose(0, 1), ignore)(x.transpose(0, 1))
    layer.batch_first = True
    torch.testing.assert_close(turned.transpose(0, 1), layer.context(key, value, ignore)(x), **CLOSE)
    asked = context(x, query_padding_mask=~real(9, 5, 9))
    torch.testing.assert_close(asked[0, :5], out[0, :5], **CLOSE)
    torch.testing.assert_close(asked[0, 5:], layer.out_proj.bias.expand(4, -1), **CLOSE)


def test_a_context_of_a_layer_is_restored_without_its_weights():
    layer = MultiheadAttention(12, 3, method="near_far", self_attention=False, **SIZES)
    x, memory = torch.randn(2, 9, 12), torch.randn(2, 40, 12)
    context = layer.context(memory)
    state = context.state_dict()
    assert set(state) == {"keys", "values", "sizes"}
    assert torch.equal(LayerContext(layer, **state)(x), context(x))
    assert not list(context.parameters())


@pytest.mark.long
def test_a_context_of_a_layer_compiles_to_one_graph():
    layer = MultiheadAttention(12, 3, method="near_far", self_attention=False, **SIZES)
    x, memory = torch.randn(2, 9, 12), torch.randn(2, 40, 12)
    compiled = torch.compile(lambda x, y: layer.context(y)(x), fullgraph=True, backend="aot_eager")
    # float32 rounding of sums in another order.
    torch.testing.assert_close(compiled(x, memory), layer.context(memory)(x), rtol=1e-5, atol=1e-6)


def test_gradients_reach_a_layer_through_its_context():
    torch.manual_seed(0)
    layer = MultiheadAttention(12, 3, method="near_far", self_attention=False, **SIZES)
    x, memory = torch.randn(2, 9, 12), torch.randn(2, 40, 12, requires_grad=True)
    context = layer.context(memory)
    sum(context(part).square().sum() for part in x.split(3, dim=1)).backward()
    assert all(weight.grad.abs().sum() > 0 for weight in (layer.in_proj_weight, memory))


@pytest.mark.refuses
def test_what_does_not_fit_raises_by_name():
    q, k, v = (x.detach() for x in draw(5, 9))
    context = near_far_context(k, v, **SIZES)
    layer = MultiheadAttention(12, 3, method="near_far", self_attention=False)
    cut = copy.deepcopy(layer)
    cut.heads.group = "a group"
    selecting, triton = (
        MultiheadAttention(12, 3, method="near_far", self_attention=False, **options)
        for options in ({"num_selected": 8}, {"backend": "triton"})
    )
    own, memory = MultiheadAttention(12, 3, method="near_far", self_attention=True), torch.randn(2, 9, 12)
    kept = layer.context(memory)
    for call, says in (
        (lambda: context(q[..., :3]), "k has head width 4 but q has 3"),
        (lambda: context(q.float()), "k has dtype torch.float64 but q has torch.float32"),
        (lambda: context(q, query_keep=torch.ones(2, 4)), "query_keep"),
        (lambda: near_far_context(k, v[:, :, :5]), "v holds 5 tokens but k holds 9"),
        (lambda: near_far_context(k, v, num_clusters=0), "num_clusters is 0"),
        (lambda: NearFarContext(k, v, torch.ones(2, 3, 9)), "sizes has shape .* and torch.float32; expected whole"),
        (lambda: kept(memory[0]), r"query has shape \(9, 12\); expected \(batch, tokens, width\)"),
        (lambda: kept(memory[..., :8]), "query has width 8; expected 12"),
        (lambda: kept(memory, torch.ones(2, 4)), "query_padding_mask has shape"),
        (lambda: layer.context(memory[0]), r"key has shape \(9, 12\); expected \(batch, tokens, width\)"),
        (lambda: layer.context(memory, torch.ones(2, 9, 11)), "value has width 11; expected 12"),
        (lambda: MultiheadAttention(12, 3, method="nystrom").context(memory), "method='nystrom'.*build it with"),
        (lambda: own.context(memory), "self_attention=True.*build it with"),
        (lambda: LayerContext(own, **kept.state_dict()), "self_attention=True.*build it with"),
        (lambda: selecting.context(memory), "no blocks that select .* num_selected=8 and backend='auto'"),
        (lambda: triton.context(memory), "num_selected=0 and backend='triton'.*build it with 0 and 'torch'"),
        (lambda: cut.context(memory), "the tokens are split across ranks"),
        (lambda: LayerContext(cut, **kept.state_dict()), "the tokens are split across ranks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            call()
