"""Heads of a layer that attend exactly: they, and the others, give what each would give alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from nystrom import MultiheadAttention, NystromAttention, build_attention, near_far_rows, nystrom_rows
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.options import NearFarOptions
from nystrom.attention.plan import AttentionPlan, LayerChoice, read_plan
from nystrom.attention.registry import METHODS

SMALL = {
    "nystrom": {"num_landmarks": 5},
    "near_far": {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
    "reformer": {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4},
    "longformer": {"window": 5},
    "bigbird": {"block_size": 2, "num_random_blocks": 1},
    "linformer": {"num_features": 5, "max_length": 64},
    "performer": {"num_features": 6},
    "skyformer": {"num_landmarks": 6},
    "skyformer_softmax": {"num_landmarks": 6},
    "informer": {"num_queries": 5, "num_samples": 7},
}
WITH_HEADS = [name for name in METHODS if name != "softmax"]
every_method = pytest.mark.parametrize("name", WITH_HEADS)
both = pytest.mark.parametrize("name", ["nystrom", "near_far"])
HEADS, OTHERS = [2, 0], [1, 3]
NEAR = {torch.float64: 1e-12, torch.float32: 1e-6}


def draw(n=23, s=None, dtype=torch.float64, e=6):
    g = torch.Generator().manual_seed(n)
    sizes = ((n, 6), (s or n, 6), (s or n, e))
    return [torch.randn(2, rows, 4, width, generator=g, dtype=dtype).transpose(1, 2) for rows, width in sizes]


def of_heads(heads, *tensors):
    """Some heads, in the layout of a layer, on which the order of additions may depend."""
    return [x.transpose(1, 2)[:, :, heads].transpose(1, 2) for x in tensors]


def build(name, heads=HEADS):
    torch.manual_seed(0)
    return build_attention(name, num_heads=4, head_dim=6, exact_heads=heads, **SMALL.get(name, {})).double().eval()


def call(name, attend, *tensors, **named):
    weights = () if attend.weights is None else attend.weights()
    return FUNCTIONS[name](*tensors, *weights, **SMALL.get(name, {}) if attend.weights is None else {}, **named)


KEEP = torch.ones(2, 23, dtype=torch.bool)
KEEP[0, :4] = KEEP[1, 15:] = KEEP[1, 3] = False


@pytest.mark.parametrize("keep", [None, KEEP], ids=["open", "masked"])
@every_method
def test_exact_heads_are_exact_and_the_others_the_methods_to_the_bit(name, keep):
    attend, (q, k, v) = build(name), draw()
    out = attend(q, k, v, keep=keep)
    exact = softmax_attention(q, k, v, keep=keep)
    torch.testing.assert_close(out[:, HEADS], exact[:, HEADS], rtol=1e-12, atol=1e-12)
    assert torch.equal(out[:, OTHERS], call(name, attend, *of_heads(OTHERS, q, k, v), keep=keep))
    assert (out[:, OTHERS] - exact[:, OTHERS]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", NEAR)
@both
def test_cross_attention_and_every_dtype(name, dtype):
    q, k, v = draw(19, 31, dtype)
    masks = {"key_keep": torch.arange(31) < torch.tensor([[31], [20]]), "query_keep": torch.arange(19) < 17}
    masks["query_keep"] = masks["query_keep"].expand(2, -1)
    out, exact = build(name)(q, k, v, **masks), softmax_attention(q, k, v, **masks)
    torch.testing.assert_close(out[:, HEADS], exact[:, HEADS], rtol=NEAR[dtype], atol=NEAR[dtype])
    assert torch.equal(out[:, OTHERS], call(name, build(name), *of_heads(OTHERS, q, k, v), **masks))
    assert not out[:, :, 17:].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keep", [None, KEEP], ids=["open", "masked"])
def test_causal_heads_are_exact_and_causal(packed, keep):
    if packed and keep is not None:
        pytest.skip("packed sequences have no padding")
    q, k, v = (x[:1] for x in draw()) if packed else draw()
    ends = torch.tensor([0, 9, 23]) if packed else None
    may = torch.ones(23, 23, dtype=torch.bool).tril()
    if packed:
        may[9:, :9] = False
    may = may if keep is None else (may & keep[:, None, None]) | torch.eye(23, dtype=torch.bool)
    out = build("near_far")(q, k, v, keep=keep, cu_seqlens=ends, is_causal=True)[:, HEADS]
    exact = scaled_dot_product_attention(q, k, v, attn_mask=may)[:, HEADS]
    exact = exact if keep is None else torch.where(keep[:, None, :, None], exact, 0.0)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


@both
def test_packed_sequences_attend_to_themselves(name):
    q, k, v = (x[:1] for x in draw())
    out = build(name)(q, k, v, cu_seqlens=torch.tensor([0, 9, 23]))
    parts = [build(name)(*(x[:, :, some] for x in (q, k, v))) for some in (slice(9), slice(9, 23))]
    torch.testing.assert_close(out, torch.cat(parts, dim=2), rtol=1e-12, atol=1e-12)


@both
def test_gradients_are_those_of_the_parts_and_masked_tokens_reach_nothing(name):
    attend, tensors = build(name), [x.requires_grad_() for x in draw()]
    junk = [torch.where(KEEP[:, None, :, None], x, math.nan) for x in tensors]
    out = attend(*junk, keep=KEEP)
    came = torch.autograd.grad(out.square().sum(), tensors)
    exact, other = ([x[:, some] for x in tensors] for some in (HEADS, OTHERS))
    wanted = softmax_attention(*exact, keep=KEEP).square().sum() + call(name, attend, *other, keep=KEEP).square().sum()
    for got, gradient in zip(came, torch.autograd.grad(wanted, tensors), strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-12)


@both
def test_the_skip_is_that_of_each_head(name):
    attend, (q, k, v) = build(name), draw(e=6)
    skip = torch.randn(4, 1, 3, 1, dtype=torch.float64)
    out, bare = attend(q, k, v, skip=skip, keep=KEEP), attend(q, k, v, keep=KEEP)
    values = torch.where(KEEP[:, None, :, None], v, 0.0)
    wanted = F.conv2d(values, skip, padding=(1, 0), groups=4) * KEEP[:, None, :, None]
    torch.testing.assert_close(out - bare, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "rows"), [("nystrom", nystrom_rows), ("near_far", near_far_rows)])
def test_rows_of_exact_heads_are_of_exact_attention(name, rows):
    layer = MultiheadAttention(24, 4, method=name, exact_heads=HEADS, dtype=torch.float64, **SMALL[name]).eval()
    x, queries = torch.randn(2, 23, 24, dtype=torch.float64), torch.tensor([3, 20])
    _, came = layer(x, need_weights=True, weight_queries=queries, average_attn_weights=False, key_padding_mask=~KEEP)
    kept = torch.where(KEEP[..., None], x, 0.0)
    q, k = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (kept @ layer.in_proj_weight.mT).chunk(3, -1)[:2])
    scores = (q[:, :, queries] @ k.mT / 6**0.5).masked_fill(~KEEP[:, None, None], -torch.inf)
    exact = torch.where(KEEP[:, None, queries, None], scores.softmax(-1), 0.0)
    torch.testing.assert_close(came[:, HEADS], exact[:, HEADS], rtol=1e-10, atol=1e-12)
    others = rows(q[:, OTHERS], k[:, OTHERS], queries, keep=KEEP, **SMALL[name])
    torch.testing.assert_close(came[:, OTHERS], others, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@both
def test_one_graph_is_compiled(name):
    q, k, v = draw(dtype=torch.float32)
    attend = build(name).float()
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, keep=KEEP)
    torch.testing.assert_close(out, attend(q, k, v, keep=KEEP), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@both
def test_a_program_is_exported_for_every_length(name):
    layer = MultiheadAttention(24, 4, method=name, exact_heads=HEADS, **SMALL[name]).eval()
    lengths = {"query": {1: torch.export.Dim("n", min=8, max=64)}}
    program = torch.export.export(layer, (torch.randn(1, 20, 24),), dynamic_shapes=lengths)
    x = torch.randn(1, 33, 24)
    torch.testing.assert_close(program.module()(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.refuses
@pytest.mark.parametrize("heads", [[True], [0, 0], [-1], [1.0], "1", 1, None])
@every_method
def test_what_names_no_heads_raises(name, heads):
    with pytest.raises(ValueError, match=r"exact_heads is .*; expected the numbers of heads, each once, from 0"):
        build(name, heads)


@pytest.mark.refuses
def test_heads_that_a_layer_lacks_or_that_leave_none_raise():
    with pytest.raises(ValueError, match="exact_heads names head 4; the layer has heads 0 to 3"):
        build("nystrom", [1, 4])
    with pytest.raises(ValueError, match="all heads of the layer: use exact attention"):
        build("nystrom", [0, 1, 2, 3])
    with pytest.raises(ValueError, match="option of softmax 'exact_heads' is unknown"):
        build("softmax")
    with pytest.raises(ValueError, match="exact_heads' is unknown"):
        FUNCTIONS["nystrom"](*draw(), exact_heads=[1])
    with pytest.raises(ValueError, match=r"exact_heads is \(1,\) and per_head is True"):
        build_attention("linformer", num_heads=4, head_dim=6, exact_heads=[1], per_head=True)


@pytest.mark.refuses
def test_what_cannot_have_exact_heads_says_so():
    options = SMALL["near_far"] | {"exact_heads": [1]}
    with pytest.raises(ValueError, match=r"exact_heads is \(1,\), and exact heads need all keys"):
        MultiheadAttention(24, 4, method="near_far", **options).new_cache(1)
    with pytest.raises(ValueError, match=r"exact_heads is \(1,\), and exact heads need all keys"):
        MultiheadAttention(24, 4, method="near_far", self_attention=False, **options).context(torch.randn(1, 9, 24))


@pytest.mark.refuses
def test_heads_of_another_number_are_refused_by_the_method():
    q, k, v = draw()
    with pytest.raises(ValueError, match="repeat grouped heads before the call"):
        build("nystrom")(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="expected four axes"):
        build("nystrom")(q, k[0], v)


def test_the_paper_s_layer_takes_them():
    x = torch.randn(1, 40, 24)
    layer = NystromAttention(24, 4, num_landmarks=4, conv_kernel_size=3, exact_heads=[1]).eval()
    plain = NystromAttention(24, 4, num_landmarks=4, conv_kernel_size=3).eval()
    plain.load_state_dict(layer.state_dict())
    assert layer.heads.options.exact_heads == (1,)
    assert not torch.allclose(layer(x)[0], plain(x)[0], atol=1e-5)


@pytest.mark.refuses
def test_a_plan_names_its_heads_and_keeps_them(tmp_path):
    plan = AttentionPlan((LayerChoice("near_far", {"exact_heads": [9, 1]}), LayerChoice("nystrom", {})))
    assert str(plan) == "near_far with exact heads 1 9 in layer 0; nystrom-64 in layer 1"
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert plan.exact_heads == {0: (9, 1)}
    with pytest.raises(ValueError, match="exact_heads is"):
        AttentionPlan((LayerChoice("near_far", {"exact_heads": [-1]}),))
    with pytest.raises(ValueError, match="option of softmax"):
        AttentionPlan((LayerChoice("softmax", {"exact_heads": [1]}),))


def test_options_are_values():
    assert NearFarOptions(exact_heads=[1, 9]) == NearFarOptions(exact_heads=(1, 9))
