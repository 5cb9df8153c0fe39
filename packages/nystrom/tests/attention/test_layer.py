import itertools
import re

import pytest
import torch
from torch import nn

from nystrom import MultiheadAttention, NystromAttention, nystrom_attention
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.heads import merge_heads, split_heads
from nystrom.attention.registry import METHODS

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def layer_and_input(n=20, **options):
    torch.manual_seed(0)
    layer = NystromAttention(12, 3, dtype=torch.float64, **options)
    return layer, torch.randn(2, n, 12, dtype=torch.float64)


def padding(n=20):
    ignore = torch.zeros(2, n, dtype=torch.bool)
    ignore[0, 15:] = True
    ignore[1, :3] = True
    return ignore


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_it_replaces_the_layer_of_torch(bias, masked):
    """With a landmark per token and no skip it equals nn.MultiheadAttention, whose state dict it loads."""
    layer, x = layer_and_input(num_landmarks=20, conv_kernel_size=None, bias=bias)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, bias=bias, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_weight)
    layer.load_state_dict(theirs.state_dict())
    ignore = padding() if masked else None
    out, weights = layer(x, x, x, ignore)
    expected = theirs(x, x, x, key_padding_mask=ignore, need_weights=False)[0]
    real = ~padding() if masked else torch.ones(2, 20, dtype=torch.bool)
    torch.testing.assert_close(out[real], expected[real], **CLOSE)
    assert weights is None


def test_start_values_are_those_of_torch():
    torch.manual_seed(1)
    ours = NystromAttention(12, 3, conv_kernel_size=None)
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    # torch draws one Xavier bound for the stacked matrix (sqrt(6 / 4E)); so do we.
    bound = (6 / (4 * 12)) ** 0.5
    for weight in (ours.in_proj_weight, theirs.in_proj_weight):
        assert 0.95 * bound < weight.abs().max() <= bound
    assert not ours.in_proj_bias.any()
    assert not ours.out_proj.bias.any()


def test_cross_attention_with_other_widths():
    torch.manual_seed(0)
    layer = NystromAttention(12, 3, kdim=5, vdim=7, num_landmarks=30, conv_kernel_size=None, dtype=torch.float64)
    theirs = nn.MultiheadAttention(12, 3, kdim=5, vdim=7, batch_first=True, dtype=torch.float64)
    layer.load_state_dict(theirs.state_dict())
    q, k, v = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((6, 12), (20, 5), (20, 7)))
    out = layer(q, k, v, key_padding_mask=padding())[0]
    expected = theirs(q, k, v, key_padding_mask=padding(), need_weights=False)[0]
    torch.testing.assert_close(out, expected, **CLOSE)


def test_padding_and_neighbours_change_nothing():
    layer, x = layer_and_input(num_landmarks=4, conv_kernel_size=5)
    ignore = padding()
    out = layer(x, x, x, key_padding_mask=ignore)[0]
    for i in range(2):
        alone = x[i : i + 1, ~ignore[i]]
        torch.testing.assert_close(out[i : i + 1, ~ignore[i]], layer(alone, alone, alone)[0], **CLOSE)


def test_float_masks_of_zero_and_minus_infinity_are_masks():
    layer, x = layer_and_input(num_landmarks=4)
    ignore = padding()
    floats = torch.zeros(2, 20, dtype=torch.float64).masked_fill(ignore, -torch.inf)
    torch.testing.assert_close(layer(x, x, x, floats)[0], layer(x, x, x, ignore)[0], rtol=0, atol=0)


def test_one_sequence_without_a_batch():
    layer, x = layer_and_input(num_landmarks=4)
    ignore = padding()[0]
    one, batch = x[0], x[:1]
    out, rows = layer(one, one, one, ignore, need_weights=True, weight_queries=torch.tensor([1]))
    expected, expected_rows = layer(
        batch, batch, batch, ignore[None], need_weights=True, weight_queries=torch.tensor([1])
    )
    torch.testing.assert_close(out, expected[0], **CLOSE)
    torch.testing.assert_close(rows, expected_rows[0], **CLOSE)


def test_rows_of_weights_can_be_had_for_asked_queries():
    layer, x = layer_and_input(num_landmarks=20, conv_kernel_size=None)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    layer.load_state_dict(theirs.state_dict())
    asked = torch.tensor([0, 11])
    for average in (True, False):
        rows = layer(x, x, x, padding(), need_weights=True, average_attn_weights=average, weight_queries=asked)[1]
        expected = theirs(x, x, x, padding(), average_attn_weights=average)[1][..., asked, :]
        real = ~padding()[:, asked]
        rows, expected = (w if average else w.transpose(1, 2) for w in (rows, expected))
        torch.testing.assert_close(rows[real], expected[real], **CLOSE)


@pytest.mark.parametrize("norm_first", [True, False])
def test_it_works_inside_a_transformer_encoder_in_evaluation_too(norm_first):
    """The fused path of the encoder layer would silently run exact attention instead."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    block.self_attn = NystromAttention(12, 3, num_landmarks=4)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    x = torch.randn(2, 20, 12)
    trained = encoder.train()(x, src_key_padding_mask=padding())
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=padding())
    real = ~padding()
    torch.testing.assert_close(evaluated[real], trained[real], rtol=1e-5, atol=1e-5)


def test_the_skip_is_added():
    layer, x = layer_and_input(num_landmarks=4, conv_kernel_size=5)
    with_skip = layer(x, x, x)[0]
    nn.init.zeros_(layer.conv.weight)
    without = layer(x, x, x)[0]
    bare = NystromAttention(12, 3, num_landmarks=4, conv_kernel_size=None, dtype=torch.float64)
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("conv")})
    torch.testing.assert_close(without, bare(x, x, x)[0], **CLOSE)
    assert not torch.allclose(with_skip, without)


def test_it_compiles_to_one_graph():
    layer, x = layer_and_input(num_landmarks=4, conv_kernel_size=5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, padding())[0], layer(x, x, x, padding())[0], **CLOSE)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.zeros(20, 20)}, "attn_mask cannot be honoured.*Use nn.MultiheadAttention"),
        ({"is_causal": True}, "is_causal cannot be honoured"),
        ({"need_weights": True}, "need_weights is True, but n x s weights do not exist.*pass weight_queries"),
        ({"weight_queries": torch.tensor([0])}, "weight_queries is given but need_weights is False"),
        ({"key_padding_mask": torch.zeros(2, 20, dtype=torch.long)}, "key_padding_mask has dtype torch.int64"),
        ({"key_padding_mask": torch.full((2, 20), 0.5)}, "key_padding_mask holds floats other than 0 and -inf"),
        ({"key_padding_mask": torch.zeros(2, 19, dtype=torch.bool)}, r"key_padding_mask has shape \(2, 19\)"),
        ({"key_padding_mask": torch.zeros(2, 1, 1, 20)}, r"pass key_padding_mask.reshape\(2, 20\)"),
        ({"key_padding_mask": torch.zeros(20)}, r"pass key_padding_mask.reshape\(1, 20\).expand\(2, 20\)"),
        ({"mask": torch.ones(2, 20)}, "mask is an argument of the package .* pass key_padding_mask=~mask"),
        (
            {"query_padding_mask": torch.zeros(2, 20, dtype=torch.bool)},
            "query_padding_mask is given for self-attention.*key_padding_mask alone, or .*self_attention=False",
        ),
    ],
)
def test_arguments_that_cannot_be_honoured_raise(arguments, message):
    layer, x = layer_and_input()
    with pytest.raises(ValueError, match=message):
        layer(x, x, x, **arguments)


@pytest.mark.refuses
@pytest.mark.parametrize("arguments", [{"dim": 64, "heads": 4}, {"embed_dim": 64, "num_heads": 4, "dim_head": 8}])
def test_arguments_of_the_package_raise_with_ours(arguments):
    with pytest.raises(ValueError, match=r"^dim\w* is an argument of the package .*: pass \w+_dim here"):
        NystromAttention(**arguments)


@pytest.mark.refuses
@pytest.mark.parametrize(("name", "ours"), [("context", "context(query)"), ("cache", "cache(x)")])
def test_contexts_and_caches_are_called_themselves(name, ours):
    layer, x = layer_and_input()
    with pytest.raises(ValueError, match=rf"{name} is no argument of a layer.* call {re.escape(ours)}"):
        layer(x, **{name: object()})


@pytest.mark.refuses
def test_bad_inputs_raise():
    layer, x = layer_and_input(conv_kernel_size=None)
    with pytest.raises(ValueError, match="query is a NoneType; expected a tensor"):
        layer(None, x, x)
    with pytest.raises(ValueError, match="weight_queries is a list; expected a tensor"):
        layer(x, x, x, need_weights=True, weight_queries=[1, 2])
    with pytest.raises(ValueError, match="key has width 11; expected 12"):
        layer(x, x[..., :11], x)
    layer, x = layer_and_input()
    for some, missing in (({"key": x}, "value"), ({"value": x}, "key")):
        with pytest.raises(ValueError, match=f"{missing} is missing: pass query alone, or all three"):
            layer(x, **some)
    with pytest.raises(ValueError, match=r"query and key are different tokens, .* skip .*conv_kernel_size=None"):
        layer(x, x[:, :9], x[:, :9])
    with pytest.raises(ValueError, match=r"query has shape \(12,\)"):
        layer(x[0, 0], x[0, 0], x[0, 0])


def built(method, **options):
    """A layer of any method, in float32, and its input."""
    torch.manual_seed(0)
    options |= {"max_length": 40} if method == "linformer" else {}
    return MultiheadAttention(12, 3, method=method, **options), torch.randn(2, 20, 12)


@pytest.mark.refuses
@pytest.mark.parametrize("method", METHODS)
def test_an_input_of_another_dtype_is_named_with_the_way_out(method):
    layer, x = built(method)
    out = r"query has dtype {0}, but the weights of the layer have torch.float32: call "
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=(out + r"layer.to\({0}\) or .* under torch.autocast").format(dtype)):
            layer(x.to(dtype))
    double = (out + r"layer.to\({0}\) or query.to\(torch.float32\)\.$").format(torch.float64)
    with pytest.raises(ValueError, match=double):
        layer(x.double())
    with pytest.raises(ValueError, match=(out + r"query.to\(torch.float32\)\.$").format(torch.int64)):
        layer(x.long())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x, x.half(), x.bfloat16()):
            assert layer(given)[0].dtype == torch.bfloat16
        # Autocast leaves it alone.
        with pytest.raises(ValueError, match=double):
            layer(x.double())
    assert layer.double()(x.double())[0].dtype == torch.float64


@pytest.mark.refuses
def test_key_value_and_context_are_named_too():
    layer, x = built("near_far", self_attention=False)
    for name, calls in {
        "key": (lambda: layer(x, x.double(), x), lambda: layer.context(x.double(), x)),
        "value": (lambda: layer(x, x, x.double()), lambda: layer.context(x, x.double())),
        "query": (lambda: layer.context(x)(x.double()), lambda: layer.context(x, queries=x.double())),
    }.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"{name} has dtype torch.float64, but the weights"):
                call()


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.long] * (name != "nystrom")) for name in METHODS]
)
def test_autocast_of_a_layer_compiles_and_exports(method):
    torch.compiler.reset()
    layer, x = built(method)
    layer.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x.half())[0]
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x.half())[0]
        program = torch.export.export(layer, (x.half(),), strict=False).module()
        exported = program(x.half())[0]
    torch.testing.assert_close(compiled, expected, rtol=0, atol=0)
    torch.testing.assert_close(exported, expected, rtol=0, atol=0)


@pytest.mark.refuses
@pytest.mark.parametrize("method", METHODS)
def test_a_width_that_does_not_fit_is_named_before_anything_else(method):
    layer, x = built(method)
    for call in (lambda: layer(x[..., :8]), lambda: layer(x[..., :8], x, x)):
        with pytest.raises(
            ValueError,
            match=r"^query has width 8; expected 12, the layer's embed_dim: .*build the layer with embed_dim=8",
        ):
            call()
    with pytest.raises(ValueError, match=r"^key has width 8; expected 12, the layer's kdim"):
        layer(x, x[..., :8], x)
    with pytest.raises(ValueError, match=r"^value has width 8; expected 12, the layer's vdim"):
        layer(x, x, x[..., :8])


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_is_ignored_as_a_whole_gives_zeros_before_the_output_projection(method):
    layer, x = built(method)
    torch.nn.init.normal_(layer.out_proj.bias)
    ignore = torch.zeros(2, 20, dtype=torch.bool)
    ignore[0] = True
    out = layer(x, key_padding_mask=ignore)[0]
    assert torch.equal(out[0], layer.out_proj.bias.expand(20, 12))
    assert not torch.equal(out[1], layer.out_proj.bias.expand(20, 12))


def test_each_mask_names_the_other_meaning():
    assert "True = real" in nystrom_attention.__doc__
    assert "key_padding_mask` of layers is the other way" in " ".join(nystrom_attention.__doc__.split())
    assert "True = ignore" in MultiheadAttention.forward.__doc__
    assert "`keep` is the other way round" in " ".join(MultiheadAttention.forward.__doc__.split())


@pytest.mark.refuses
@pytest.mark.parametrize("method", METHODS)
def test_the_masks_of_layers_and_of_transformers_are_named_where_a_function_gets_them(method):
    q, mask = torch.randn(1, 2, 9, 8), torch.ones(1, 9, dtype=torch.bool)
    for name, way in (
        ("key_padding_mask", "keep=~key_padding_mask"),
        ("attention_mask", r"keep=attention_mask.bool\(\)"),
        ("mask", "keep=mask if it is so"),
    ):
        with pytest.raises(ValueError, match=f"{name} cannot be honoured: .* True for real tokens. Pass {way}"):
            FUNCTIONS[method](q, q, q, **{name: mask})


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "embed_dim 12 is not a multiple of num_heads 5"),
        ({"bias": "x"}, "bias is 'x'; expected True or False"),
        ({"batch_first": 1}, "batch_first is 1; expected True or False"),
        ({"self_attention": 1}, "self_attention is 1; expected True or False"),
        ({"self_attention": False}, "self_attention is False, .* skip convolution .*conv_kernel_size=None"),
        ({"dropout": 0.1}, r"dropout is 0\.1"),
        ({"kdim": -1}, "kdim is -1"),
        ({"num_landmarks": 0}, "num_landmarks is 0"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
    ],
)
def test_bad_settings_raise(options, message):
    with pytest.raises(ValueError, match=message):
        NystromAttention(**{"embed_dim": 12, "num_heads": 3, **options})


@pytest.mark.parametrize("queries", [19, 20, 21])
def test_equal_lengths_are_no_self_attention(queries):
    """A mask of the keys does not concern queries that are other tokens, as in nn.MultiheadAttention."""
    layer, z = layer_and_input(num_landmarks=21, conv_kernel_size=None, self_attention=False)
    x = torch.randn(2, queries, 12, dtype=torch.float64)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    layer.load_state_dict(theirs.state_dict())
    out, expected = layer(x, z, z, padding())[0], theirs(x, z, z, padding(), need_weights=False)[0]
    torch.testing.assert_close(out, expected, **CLOSE)


def test_tokens_may_come_first():
    layer, x = layer_and_input(num_landmarks=4)
    other = NystromAttention(12, 3, num_landmarks=4, batch_first=False, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    swapped = x.transpose(0, 1)
    out = other(swapped, swapped, swapped, padding())[0].transpose(0, 1)
    torch.testing.assert_close(out, layer(x, x, x, padding())[0], **CLOSE)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "linformer"])
def test_every_method_is_a_layer(method):
    torch.manual_seed(0)
    layer = MultiheadAttention(12, 3, method=method, conv_kernel_size=3, dtype=torch.float64).eval()
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    out = layer(x, x, x, padding())[0]
    assert f"method={method!r}" in repr(layer)
    real = ~padding()[0]
    alone = x[:1, real]
    torch.testing.assert_close(out[:1, real], layer(alone, alone, alone)[0], **CLOSE)


def test_the_nystrom_layer_is_the_layer_with_that_method():
    torch.manual_seed(0)
    nystrom = NystromAttention(12, 3, num_landmarks=4)
    torch.manual_seed(0)
    layer = MultiheadAttention(12, 3, method="nystrom", conv_kernel_size=33, num_landmarks=4)
    x = torch.randn(2, 20, 12)
    assert torch.equal(nystrom(x, x, x)[0], layer(x, x, x)[0])


def test_an_empty_batch_and_no_token_give_empty_results():
    layer, _ = layer_and_input()
    for shape in ((0, 20, 12), (2, 0, 12)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        out = layer(x, x, x)[0]
        out.sum().backward()
        assert out.shape == x.grad.shape == shape


@pytest.mark.refuses
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_put_into_an_encoder_by_hand_names_the_nested_tensor():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 1).eval()
    encoder.layers[0].self_attn = NystromAttention(12, 2)
    x = torch.randn(2, 20, 12)
    ignore = torch.arange(20) >= torch.tensor([[20], [15]])
    # Without gradients the encoder packs sequences that are padded at the end.
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"query is a nested tensor.*use_nested_tensor = False"):
            encoder(x, src_key_padding_mask=ignore)
        encoder.use_nested_tensor = False
        assert encoder(x, src_key_padding_mask=ignore).isfinite().all()


@pytest.mark.long
def test_a_layer_that_compiles_checks_the_floats_of_a_mask():
    layer, x = layer_and_input(num_landmarks=4, conv_kernel_size=None)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    floats = torch.zeros(2, 20, dtype=torch.float64).masked_fill(padding(), -torch.inf)
    torch.testing.assert_close(compiled(x, x, x, floats)[0], layer(x, x, x, floats)[0], **CLOSE)
    with pytest.raises(RuntimeError, match="key_padding_mask holds floats other than 0 and -inf"):
        compiled(x, x, x, torch.full((2, 20), 0.5, dtype=torch.float64))
    torch.compiler.reset()


@pytest.mark.parametrize("conv_kernel_size", [None, 5])
# A warning of torch: its fused attention has no rule for vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_single_samples(conv_kernel_size):
    layer = NystromAttention(8, 2, num_landmarks=4, conv_kernel_size=conv_kernel_size).double()
    weights = dict(layer.named_parameters())
    x = torch.randn(3, 2, 21, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x, x, x))[0].square().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i in range(3):
        alone = torch.autograd.grad(loss(weights, x[i]), list(weights.values()))
        torch.testing.assert_close([grad[i] for grad in together.values()], list(alone), rtol=1e-9, atol=1e-10)


@pytest.mark.refuses
def test_rows_of_landmarks_that_are_drawn_anew_raise_in_training():
    layer, x = (
        NystromAttention(16, 2, num_landmarks=4, landmarks="uniform", conv_kernel_size=None),
        torch.randn(1, 40, 16),
    )
    with pytest.raises(ValueError, match=r"weight_queries is given in training, .* Call eval\(\) first"):
        layer(x, x, x, need_weights=True, weight_queries=torch.arange(3))
    layer.eval()
    assert layer(x, x, x, need_weights=True, weight_queries=torch.arange(3))[1].shape == (1, 3, 40)


def test_positions_outside_the_tokens_raise_by_the_name_of_the_argument():
    layer, x = layer_and_input()
    with pytest.raises(ValueError, match="weight_queries holds positions outside 0"):
        layer(x, need_weights=True, weight_queries=torch.tensor([20]))


# torch.jit itself is deprecated, and warns of each size that becomes a number.
@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_trace_of_torch_jit_is_right_or_refused_by_name(method):
    options = {"max_length": 300} if method == "linformer" else {}
    layer = MultiheadAttention(8, 2, method=method, conv_kernel_size=3, dtype=torch.float64, **options)
    # A trace holds the weights as constants.
    layer.eval().requires_grad_(False)
    x, other = torch.randn(1, 280, 8, dtype=torch.float64), torch.randn(1, 260, 8, dtype=torch.float64)

    def attend(x):
        return layer(x)[0]

    if method in ("near_far", "skyformer", "skyformer_softmax", "linformer", "longformer", "bigbird"):
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace.*use torch\.export"):
            torch.jit.trace(attend, x)
    else:
        torch.testing.assert_close(torch.jit.trace(attend, x)(other), attend(other), **CLOSE)


@pytest.mark.long
def test_rows_of_weights_compile_to_one_graph():
    layer, x = layer_and_input(num_landmarks=4)
    asked = torch.tensor([0, 19, 7])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, found = (f(x, x, x, need_weights=True, weight_queries=asked) for f in (layer, compiled))
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.compiler.reset()


@pytest.mark.parametrize("kdim", [None, 10])
def test_heads_of_another_width_are_those_of_a_wider_layer(kdim):
    """Heads of width 5 in a layer of width 12: what a projection into 3 x 5 channels, attention and one back give."""
    layer = MultiheadAttention(
        12, 3, method="nystrom", head_dim=5, kdim=kdim, self_attention=kdim is None, num_landmarks=4
    ).double()
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    key = x if kdim is None else torch.randn(2, 30, kdim, dtype=torch.float64)
    q, k, v = (split_heads(part, 3) for part in layer._project(query=x, key=key, value=x))
    assert q.shape == k.shape == v.shape == (2, 3, 30, 5)
    expected = layer.out_proj(merge_heads(nystrom_attention(q, k, v, num_landmarks=4)))
    torch.testing.assert_close(layer(x, key, x)[0], expected)
    assert layer.out_proj.weight.shape == (12, 15)


@pytest.mark.refuses
def test_a_head_without_width_raises():
    with pytest.raises(ValueError, match="head_dim is 0"):
        NystromAttention(12, 3, head_dim=0)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (lambda: NystromAttention(12, 3, num_landmarks=4, conv_kernel_size=5), {}),
        (lambda: NystromAttention(12, 3, num_landmarks=4, batch_first=False), {}),
        (lambda: MultiheadAttention(12, 3, method="linear", conv_kernel_size=5, head_dim=8), {}),
        (
            lambda: MultiheadAttention(12, 3, method="near_far", exact_up_to=0, num_heavy=2, num_clusters=2),
            {"is_causal": True},
        ),
    ],
)
def test_packed_sequences_are_each_alone(layer, named):
    torch.manual_seed(0)
    layer, x = layer().double(), torch.randn(40, 12, dtype=torch.float64, requires_grad=True)
    edges = torch.tensor([0, 11, 11, 22, 40])
    alone = torch.cat([layer(x[a:b], **named)[0] for a, b in itertools.pairwise(edges) if a < b])
    out, weights = layer(x, cu_seqlens=edges, **named)
    assert weights is None
    in_a_batch, there = (x[None], 0) if layer.batch_first else (x[:, None], 1)
    for found in (out, layer(in_a_batch, cu_seqlens=edges, **named)[0].squeeze(there)):
        torch.testing.assert_close(found, alone)
        ours, theirs = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, alone))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.refuses
def test_packed_sequences_are_whole_and_their_own():
    edges, x = torch.tensor([0, 3, 6]), torch.randn(1, 6, 8)
    layer = NystromAttention(8, 2, self_attention=None)
    with pytest.raises(ValueError, match="cu_seqlens is given, of packed sequences without padding: leave out key_pad"):
        layer(x, cu_seqlens=edges, key_padding_mask=torch.zeros(1, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="leave out key_padding_mask, query_padding_mask and weight_"):
        layer(x, cu_seqlens=edges, weight_queries=torch.tensor([0]), need_weights=True)
    with pytest.raises(ValueError, match="query and key are different tokens: leave it out, or call layer"):
        MultiheadAttention(8, 2, method="linear", self_attention=False)(x, x + 1, x + 1, cu_seqlens=edges)
