"""Causal near_far leaks nothing, its rows are those of the equation, and the cache gives the same numbers.

The laws of every method are in `test_every_method.py`, for its causal form, too.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from nystrom import MultiheadAttention, NystromAttention, near_far_attention, near_far_sizes, nystrom_attention
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.causal import attend_causally

SMALL = {"block_size": 4, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
VARIANTS = [
    SMALL,
    {"block_size": 3, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 0},
    {"block_size": 2, "num_heavy": 5, "num_clusters": 1, "exact_up_to": 9},
]
every_variant = pytest.mark.parametrize("options", VARIANTS, ids=str)


def causal(q, k, v, options=SMALL, **given):
    return near_far_attention(q, k, v, is_causal=True, **options, **given)


def exact(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def draw(seed, n, *, b=2, h=2, d=4, e=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, n, w, generator=g, dtype=torch.float64).to(dtype) for w in (d, d, e)]


def changed(x, place, value):
    return x.index_fill(2, torch.as_tensor(place), value)


# Which token sees what.


@every_variant
@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_a_row_is_softmax_over_near_keys_heavy_keys_and_means_of_clusters(options, n, seed):
    """The rows of A, which values of ones and zeros show, against the equation: who is in which place is read off A."""
    q, k, _ = draw(seed, n, b=1, h=1)
    rows = causal(q, k, torch.eye(n, dtype=torch.float64)[None, None], options)[0, 0]
    assert_close(rows.sum(dim=-1), torch.ones(n, dtype=torch.float64))
    assert not rows.triu(1).any()
    assert (rows.tril() >= 0).all()
    scores = 0.5 * q[0, 0] @ k[0, 0].mT
    # Unnormalised: a query sees itself.
    seen = rows / rows.diagonal()[:, None] * scores.diagonal()[:, None].exp()
    size = options["block_size"]
    for start in range(0, n, size):
        block, window = slice(start, min(n, start + size)), max(0, start - size)
        first = 0 if start < options["exact_up_to"] // size * size else window
        near = torch.arange(first, n)
        assert_close(seen[block, first:].tril(start - first), scores[block, near].exp().tril(start - first))
        groups: dict[tuple[float, ...], list[int]] = {}
        for token in range(first):
            # Tokens of one cluster have one weight, for all queries of the block.
            groups.setdefault(tuple(seen[block, token].log().mul(1e6).round().tolist()), []).append(token)
        own = [tokens for tokens in groups.values() if len(tokens) == 1]
        assert len(groups) <= options["num_heavy"] + options["num_clusters"]
        assert len(groups) - len(own) <= options["num_clusters"]
        for tokens in groups.values():
            mean = k[0, 0, tokens].mean(dim=0)
            expected = (0.5 * q[0, 0, block] @ mean).exp()
            assert_close(seen[block, tokens[0]], expected, rtol=1e-6, atol=1e-9)


@every_variant
@settings(max_examples=15, deadline=None)
@given(n=st.integers(2, 40), seed=st.integers(0, 2**31), junk=st.sampled_from([1e6, -50.0, 0.0]))
def test_no_output_depends_on_what_follows(options, n, seed, junk):
    q, k, v = draw(seed, n)
    out = causal(q, k, v, options)
    for place in {1, n // 2, n - 1}:
        after = list(range(place, n))
        assert torch.equal(
            causal(*(changed(x, after, junk) for x in (q, k, v)), options)[:, :, :place], out[:, :, :place]
        )
        assert_close(causal(*(x[:, :, :place] for x in (q, k, v)), options), out[:, :, :place])


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 16},
        {"num_heavy": 40},
        {"num_clusters": 40},
        {"exact_up_to": 40},
        {"block_size": 5, "num_heavy": 0, "num_clusters": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 7, 31])
def test_the_exact_limit_is_met(options, n):
    q, k, v = draw(n, n)
    assert_close(causal(q, k, v, SMALL | options), exact(q, k, v))


def test_few_different_keys_are_exact():
    q, k, v = draw(0, 60)
    k = k[:, :, :3].repeat(1, 1, 20, 1)
    assert_close(causal(q, k, v), exact(q, k, v))


def test_it_is_nearer_than_a_window_with_sinks_of_as_many_keys():
    # A slow walk: far keys are alike, as those of texts are.
    q, k, v = draw(0, 512, d=16, e=16)
    k, v = (x.cumsum(dim=2) / torch.arange(1, 513)[:, None] ** 0.5 for x in (k, v))
    options = {"block_size": 16, "num_heavy": 16, "num_clusters": 16, "exact_up_to": 0}
    place = torch.arange(512)
    apart = place[:, None] - place
    # 24 near keys in the mean, 16 heavy ones and 16 clusters.
    window = (apart >= 0) & ((apart < 52) | (place < 4))
    sliding = F.scaled_dot_product_attention(q, k, v, attn_mask=window)
    wanted = exact(q, k, v)
    assert (causal(q, k, v, options) - wanted).norm() < 0.5 * (sliding - wanted).norm()


@pytest.mark.long
def test_the_work_of_a_training_step_is_linear():
    class Numbers(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            self.total += out.numel() if isinstance(out, torch.Tensor) and out._base is None else 0
            return out

    def made(n):
        q, k, v = (x.requires_grad_() for x in draw(0, n, b=1, h=1, dtype=torch.float32))
        with Numbers() as numbers:
            causal(q, k, v).sum().backward()
        return numbers.total

    # A slice of all tokens for each block would have a gradient of all tokens for each.
    assert made(1024) < 2.1 * made(512)


# Inputs that it refuses.


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_selected": 3}, "num_selected is 3"),
        ({"backend": "triton"}, "backend is 'triton'"),
        ({"group": object()}, "group is given"),
        ({"is_causal": 1}, "is_causal"),
    ],
)
def test_what_has_no_causal_form_is_refused_by_name(given, says):
    q, k, v = draw(0, 9)
    with pytest.raises(ValueError, match=says):
        near_far_attention(q, k, v, **{"is_causal": True} | given)


@pytest.mark.refuses
def test_queries_of_other_tokens_are_refused():
    q, k, v = draw(0, 9)
    with pytest.raises(ValueError, match="is_causal is True, which is self-attention"):
        causal(q[:, :, :4], k, v)


@pytest.mark.refuses
def test_other_methods_name_near_far():
    with pytest.raises(ValueError, match=r"is_causal cannot be honoured.*near_far_attention"):
        nystrom_attention(*draw(0, 9), is_causal=True)
    with pytest.raises(ValueError, match=r"is_causal cannot be honoured.*method='near_far'"):
        NystromAttention(8, 2, conv_kernel_size=None)(torch.randn(1, 5, 8), is_causal=True)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("made", "call", "says"),
    [
        ({"conv_kernel_size": 3}, {}, "the skip convolution adds the values of later tokens"),
        ({}, {"attn_mask": torch.zeros(5, 5)}, "is not the causal mask of 5 tokens, which is_causal asks for"),
        ({}, {"attn_mask": torch.ones(5, 5).tril().bool()}, "is not the causal mask of 5 tokens"),
        ({}, {"attn_mask": torch.zeros(5, 4)}, r"attn_mask of shape \(5, 4\) is not the causal mask of 5 tokens"),
        ({}, {"attn_mask": "causal"}, "attn_mask is a str; expected a tensor"),
        ({}, {"need_weights": True, "weight_queries": torch.tensor([0])}, "weight_queries is given"),
        ({}, {"key": torch.zeros(1, 4, 8), "value": torch.zeros(1, 4, 8)}, "different tokens"),
    ],
)
def test_a_layer_says_what_it_cannot_do(made, call, says):
    layer = MultiheadAttention(8, 2, method="near_far", **made)
    with pytest.raises(ValueError, match=says):
        layer(torch.zeros(1, 5, 8), is_causal=True, **call)


def test_sizes_of_a_causal_model_are_half_as_many():
    sizes = near_far_sizes(8192, is_causal=True)
    assert sizes == {"block_size": 128, "reach": 16, "num_heavy": 64, "num_clusters": 160, "exact_up_to": 2048}


# The layer, and the cache.


def build(**options):
    return MultiheadAttention(12, 2, method="near_far", **SMALL | options).double()


def test_the_layer_is_the_function_and_takes_padding():
    layer, x = build(), torch.randn(2, 30, 12, dtype=torch.float64)
    ignored = torch.zeros(2, 30, dtype=torch.bool)
    ignored[0, :7] = True
    out, weights = layer(x, is_causal=True, key_padding_mask=ignored)
    assert weights is None
    assert_close(out[0, 7:], layer(x[0, 7:], is_causal=True)[0])
    assert_close(out[1], layer(x[1:], is_causal=True)[0][0])
    assert not torch.allclose(out[1], layer(x[1:])[0][0])


@settings(max_examples=20, deadline=None)
@given(pieces=st.lists(st.integers(1, 13), min_size=1, max_size=8), up_to=st.sampled_from([0, 6, 20]))
def test_a_cache_gives_the_numbers_of_all_at_once(pieces, up_to):
    torch.manual_seed(0)
    layer, x = build(exact_up_to=up_to), torch.randn(3, sum(pieces), 12, dtype=torch.float64)
    cache = layer.new_cache(3)
    size = sum(buffer.numel() for buffer in cache.buffers())
    with torch.no_grad():
        out = torch.cat([cache(piece) for piece in x.split(pieces, dim=1)], dim=1)
    assert_close(out, layer(x, is_causal=True)[0])
    assert int(cache.length) == sum(pieces)
    assert sum(buffer.numel() for buffer in cache.buffers()) == size


@pytest.mark.parametrize("autocast", [False, True])
def test_a_cache_in_low_precision_gives_the_numbers_of_all_at_once(autocast):
    torch.manual_seed(0)
    layer, x = build().to(torch.float32 if autocast else torch.bfloat16), torch.randn(2, 30, 12)
    x = x if autocast else x.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        cache = layer.new_cache(2)
        out = torch.cat([cache(piece) for piece in x.split(7, dim=1)], dim=1)
        wanted = layer(x, is_causal=True)[0]
    assert out.dtype == wanted.dtype == torch.bfloat16
    # One rounding of bfloat16.
    assert_close(out, wanted, rtol=2**-7, atol=2**-9)


def test_a_cache_is_saved_loaded_and_moved(tmp_path):
    layer, x = build(), torch.randn(2, 41, 12, dtype=torch.float64)
    cache = layer.new_cache(2)
    with torch.no_grad():
        cache(x[:, :26])
        torch.save(cache.state_dict(), tmp_path / "cache.pt")
        wanted = cache(x[:, 26:])
        again = layer.new_cache(2).to("cpu")
        again.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
        assert_close(again(x[:, 26:]), wanted, rtol=0, atol=0)


def test_a_cache_is_reordered_for_beams():
    layer, x = build(), torch.randn(3, 33, 12, dtype=torch.float64)
    cache, beams = layer.new_cache(3), torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache(x[:, :22])
        cache.reorder(beams)
        out = cache(x[:, 22:])
    wanted = layer(torch.cat([x[beams, :22], x[:, 22:]], dim=1), is_causal=True)[0]
    assert_close(out, wanted[:, 22:])


@pytest.mark.slow
def test_a_million_tokens_are_read_in_constant_memory():
    options = {"block_size": 256, "num_heavy": 8, "num_clusters": 8, "exact_up_to": 0}
    layer = MultiheadAttention(8, 1, method="near_far", **options)
    cache, x = layer.new_cache(1), torch.randn(1, 4096, 8)
    size = sum(buffer.numel() for buffer in cache.buffers())
    with torch.no_grad():
        for _ in range(2**20 // 4096):
            out = cache(x)
    assert int(cache.length) == 2**20
    assert out.isfinite().all()
    assert sum(buffer.numel() for buffer in cache.buffers()) == size
    # Every token is in one place: the window, a heavy row or a cluster.
    assert int(cache.past[..., 16].sum()) == 2**20 - 256


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda layer, x: layer.new_cache(2)(x), "has no gradient"),
        (lambda layer, x: layer.new_cache(3)(x), "for which the cache was made"),
        (lambda layer, x: layer.new_cache(2)(x[0]), "expected .batch, tokens, width"),
        (lambda layer, x: layer.new_cache(0), "batch is 0"),
        (lambda layer, x: layer.new_cache(2)(x[..., :8]), "query has width 8; expected 12"),
        (lambda layer, x: layer.new_cache(2)(x.float()), "query has dtype torch.float32, but the weights"),
        (lambda layer, x: layer.new_cache(2).reorder([0, 1]), "sequences is"),
        (lambda layer, x: layer(x, is_causal="yes"), "is_causal is 'yes'"),
        (lambda layer, x: near_far_sizes(9, is_causal="yes"), "is_causal is 'yes'"),
        (lambda layer, x: layer.new_cache(2).reorder(torch.tensor([0])), "expected 2 whole numbers"),
        (lambda layer, x: layer.new_cache(2).reorder(torch.tensor([0, 2])), "expected numbers from 0 to 1"),
        (lambda layer, x: build(num_selected=2).new_cache(2), "num_selected is 2"),
        (lambda layer, x: build(backend="triton").new_cache(2), "backend is 'triton'"),
        (lambda layer, x: build(conv_kernel_size=3).new_cache(2), "the layer has a skip"),
        (lambda layer, x: build(self_attention=False).new_cache(2), "self_attention=False"),
        (lambda layer, x: NystromAttention(8, 2).new_cache(2), "use method='near_far'"),
        (
            lambda layer, x: layer.new_cache(2).load_state_dict(build(block_size=2).new_cache(2).state_dict()),
            "block_size = 2; expected 4",
        ),
    ],
)
def test_what_a_cache_cannot_do_is_said(call, says):
    with pytest.raises((ValueError, RuntimeError), match=says):
        call(build(), torch.randn(2, 5, 12, dtype=torch.float64))


def test_blocks_before_the_first_that_is_asked_for_are_read():
    q, k, v = (x.flatten(0, 1) for x in draw(0, 24))
    options = NearFarOptions(**SMALL)
    whole = attend_causally(q, k, v, None, options, 0.5)
    assert_close(attend_causally(q, k, v, None, options, 0.5, first=3), whole[:, 12:])
