"""The error of a call, estimated from a few exact rows, and heads that attend exactly where it is too large."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from nystrom import (
    MultiheadAttention,
    NystromAttention,
    build_attention,
    near_far_attention,
    near_far_rows,
    nystrom_attention,
    nystrom_factors,
    nystrom_rows,
    softmax_attention,
)
from nystrom.attention.parts.error_estimate import estimate_errors
from nystrom.attention.skip import depthwise_skip

NEAR_FAR = {"block_size": 16, "num_heavy": 8, "num_clusters": 16, "exact_up_to": 0}
METHODS = {"near_far": partial(near_far_attention, **NEAR_FAR), "nystrom": partial(nystrom_attention, num_landmarks=8)}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
WIDTH = 8


def relative(out, exact):
    return ((out - exact).square().sum((2, 3)) / exact.square().sum((2, 3))).sqrt()


def draw(seed, n, *, b=1, h=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, n, WIDTH, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]


def clustered(seed, n, *, h=8):
    """Tokens around twenty centres, about which queries, keys and values of a head agree."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(1, h, 20, WIDTH, generator=g)
    of = torch.randint(20, (1, h, n, 1), generator=g).expand(-1, -1, -1, WIDTH)
    return [size * centres.gather(2, of) + 0.7 * torch.randn(1, h, n, WIDTH, generator=g) for size in (2, 2, 1)]


def with_needle(seed, n, of_query, of_key):
    """One query of the first head gets its output from one key, which no other query needs."""
    q, k, v = draw(seed, n)
    direction = F.normalize(torch.ones(WIDTH), dim=0)
    q[0, 0, 3 * n // 5], k[0, 0, n // 9] = of_query * direction, of_key * direction
    v[0, 0, n // 9] *= 100
    return q, k, v


@every_method
@pytest.mark.parametrize("seed", range(6))
def test_the_estimate_is_near_the_error(method, seed):
    q, k, v = clustered(seed, 600)
    out, exact = method(q, k, v), softmax_attention(q, k, v)
    found, true = estimate_errors(q, k, v, out), relative(out, exact)
    assert 0.8 < found.mean() / true.mean() < 1.25
    assert ((found / true - 1).abs() < 0.5).all()


@every_method
@pytest.mark.parametrize("n", [1, 2, 17, 31, 32])
def test_of_few_queries_it_is_the_error(method, n):
    q, k, v = draw(n, n)
    out = method(q, k, v) + torch.randn(1, 4, n, 1)
    torch.testing.assert_close(estimate_errors(q, k, v, out), relative(out, softmax_attention(q, k, v)))


@pytest.mark.parametrize(("of_query", "of_key"), [(60, 4), (8, 14), (20, 8)], ids=["query", "key", "both"])
@pytest.mark.parametrize("seed", range(3))
def test_a_needle_that_one_query_sees_is_found(of_query, of_key, seed):
    q, k, v = with_needle(seed, 700, of_query, of_key)
    exact = softmax_attention(q, k, v)
    # All that the method misses is the needle: one of 700 queries.
    out = exact.clone()
    out[0, 0, 420] = v[0, 0].mean(dim=0)
    true, found = (each[0, 0] for each in (relative(out, exact), estimate_errors(q, k, v, out)))
    assert true > 0.1
    assert 0.7 < found / true < 1.4
    assert not estimate_errors(q, k, v, out)[0, 1:].gt(1e-5).any()


@every_method
def test_inputs_that_are_hard(method):
    q, k, v = draw(0, 300)
    equal = k[:, :, :1].expand_as(k)
    assert (estimate_errors(q, equal, v, method(q, equal, v)) < 1e-4).all()
    v[:, :, 123] *= 1000
    out = method(q, k, v)
    ratio = estimate_errors(q, k, v, out) / relative(out, softmax_attention(q, k, v))
    assert ((ratio > 0.5) & (ratio < 2)).all()
    for size in (1e-30, 1e30):
        ratio = estimate_errors(q, k, size * v, size * out) / relative(out, softmax_attention(q, k, v))
        assert ((ratio > 0.5) & (ratio < 2)).all()
    assert (estimate_errors(q, k, 0 * v, out) == math.inf).all()
    assert (estimate_errors(q, k, 0 * v, 0 * out) == 0).all()


@every_method
@pytest.mark.parametrize("junk", [math.nan, 1e30])
def test_padding_holes_and_neighbours_change_no_estimate(method, junk):
    q, k, v = draw(0, 90, b=2, dtype=torch.float64)
    out = method(q, k, v)
    alone = estimate_errors(q, k, v, out)
    places = torch.cat([torch.arange(3, 40), torch.arange(45, 98)])
    keep = torch.zeros(3, 100, dtype=torch.bool)
    keep[:2, places] = True
    padded = []
    for x in (q, k, v, out):
        wide = torch.full((3, 4, 100, WIDTH), junk, dtype=torch.float64)
        wide[:2, :, places] = x
        padded.append(wide)
    found = estimate_errors(*padded, keep, keep)
    torch.testing.assert_close(found[:2], alone)
    assert not found[2].any()


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tolerances_that_every_head_and_no_head_keeps(method, dtype):
    q, k, v = draw(1, 130, b=2, dtype=dtype)
    keep = torch.arange(130) < torch.tensor([[130], [97]])
    k = k.masked_fill(~keep[:, None, :, None], math.nan)
    state = torch.get_rng_state()
    exact = softmax_attention(q, k, v, keep=keep)
    torch.testing.assert_close(method(q, k, v, keep=keep, tolerance=0.0), exact)
    assert torch.equal(method(q, k, v, keep=keep, tolerance=1e9), method(q, k, v, keep=keep))
    assert torch.equal(torch.get_rng_state(), state)


@every_method
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_any_length_has_a_tolerance(method, tokens):
    q, k, v = draw(1, tokens)
    torch.testing.assert_close(method(q, k, v, tolerance=0.0), softmax_attention(q, k, v))


def mixed(seed, b=2):
    """Two heads whose keys are alike, which methods approximate well, and two heads of random ones."""
    q, k, v = draw(seed, 200, b=b, dtype=torch.float64)
    k[:, :2] = k[:, :2, :1] + 1e-3 * k[:, :2]
    return [x.requires_grad_() for x in (q, k, v)]


@every_method
def test_heads_above_the_tolerance_attend_exactly_and_have_its_gradient(method):
    results = []
    for attend in (partial(method, tolerance=0.05), method, softmax_attention):
        inputs = mixed(0)
        out = attend(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for some, approximate, exact in zip(*results, strict=True):
        assert torch.equal(some[:, :2], approximate[:, :2])
        torch.testing.assert_close(some[:, 2:], exact[:, 2:])
    assert relative(results[1][0], results[2][0])[:, 2:].min() > 0.05


@every_method
def test_each_sequence_decides_by_itself(method):
    q, k, v = (x.detach() for x in mixed(0))
    k[0] = k[0, :, :1] + 1e-3 * k[0]
    keep = torch.arange(200) < torch.tensor([[150], [200]])
    k, v = (x.masked_fill(~keep[:, None, :, None], math.nan) for x in (k, v))
    out = method(q, k, v, keep=keep, tolerance=0.05)
    alone = method(*(x[:1, :, :150] for x in (q, k, v)), tolerance=0.05)
    torch.testing.assert_close(out[:1, :, :150], alone)
    assert not out[0, :, 150:].any()
    torch.testing.assert_close(out[1:, 2:], softmax_attention(q, k, v, keep=keep)[1:, 2:])


def test_other_queries_than_keys_and_packed_sequences():
    q, k, v = draw(0, 150)
    few, keep, own = q[:, :, :40], torch.arange(150)[None] < 120, torch.arange(40)[None] > 3
    masks = {"key_keep": keep, "query_keep": own}
    exact = softmax_attention(few, k, v, **masks)
    for method in METHODS.values():
        torch.testing.assert_close(method(few, k, v, **masks, tolerance=0.0), exact)
        found = estimate_errors(few, k, v, method(few, k, v, **masks), keep, own)
        true = relative(method(few, k, v, **masks), exact)
        assert ((found / true - 1).abs() < 0.3).all()
        edges = torch.tensor([0, 50, 150])
        packed = method(q, k, v, cu_seqlens=edges, tolerance=0.0)
        torch.testing.assert_close(packed, softmax_attention(q, k, v, cu_seqlens=edges))


def test_a_layer_adds_its_skip_to_exact_heads():
    torch.manual_seed(0)
    layer = NystromAttention(32, 4, num_landmarks=8, conv_kernel_size=5, tolerance=0.0).eval()
    exact = MultiheadAttention(32, 4, method="softmax", conv_kernel_size=5).eval()
    exact.load_state_dict(layer.state_dict())
    x, pad = torch.randn(2, 50, 32), torch.arange(50) >= torch.tensor([[50], [41]])
    torch.testing.assert_close(layer(x, key_padding_mask=pad)[0], exact(x, key_padding_mask=pad)[0])


@pytest.mark.refuses
@every_method
@pytest.mark.parametrize("value", [-1, math.nan, True, "0.1"])
def test_what_is_no_tolerance_raises(method, value):
    with pytest.raises(ValueError, match=r"tolerance is .*expected None, or a number of at least 0"):
        method(*draw(0, 20), tolerance=value)


@pytest.mark.refuses
@every_method
def test_calls_whose_values_are_not_known_raise(method):
    q, k, v = draw(0, 20)
    within = partial(method, tolerance=0.1)
    with pytest.raises(ValueError, match=r"tolerance is 0\.1, which looks at the values of each call"):
        torch.vmap(lambda q: within(q, k, v))(q[None])
    with pytest.raises(ValueError, match=r"looks at the values"):
        torch.func.grad(lambda q: within(q, k, v).sum())(q)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=r"looks at the values"):
        within(*(mode.from_tensor(x) for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"looks at the values"):
        within(*(x.to("meta") for x in (q, k, v)))
    with pytest.raises(Exception, match=r"looks at the values"):
        torch.compile(within, fullgraph=True, backend="eager")(q, k, v)


@pytest.mark.refuses
@pytest.mark.parametrize("name", ["near_far", "nystrom"])
def test_an_export_raises(name):
    attend = build_attention(name, num_heads=4, head_dim=WIDTH, tolerance=0.1)
    with pytest.raises(Exception, match=r"looks at the values"):
        torch.export.export(attend, tuple(draw(0, 20)), strict=False)


@pytest.mark.refuses
def test_what_has_no_exact_form_raises():
    q, k, v = draw(0, 20)
    rows, skip = torch.tensor([3]), torch.zeros(4, 1, 3, 1)
    layer = MultiheadAttention(32, 4, method="near_far", self_attention=False, tolerance=0.1)
    for call in (
        partial(near_far_attention, q, k, v, is_causal=True),
        partial(near_far_attention, q, k, v, group=object()),
        partial(nystrom_attention, q, k, v, group=object()),
        partial(nystrom_attention, q, k, v, skip=skip),
        partial(near_far_rows, q, k, rows),
        partial(nystrom_rows, q, k, rows),
        partial(nystrom_factors, q, k),
        lambda tolerance: layer.context(torch.zeros(1, 9, 32)),
        lambda tolerance: MultiheadAttention(32, 4, method="near_far", tolerance=tolerance).new_cache(1),
        lambda tolerance: layer(*torch.zeros(3, 1, 9, 32), need_weights=True, weight_queries=rows),
    ):
        with pytest.raises(ValueError, match=r"tolerance is 0\.1, and|is_causal is True, and tolerance is 0\.1"):
            call(tolerance=0.1)
    within = nystrom_attention(q, k, v, num_landmarks=8, tolerance=0.0)
    torch.testing.assert_close(depthwise_skip(v, skip, to=within), softmax_attention(q, k, v))
