"""A model whose attention was replaced keeps its parameters, runs the method, and equals itself at the exact limit."""

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from nystrom import NystromAttention, replace_attention
from nystrom.attention.registry import WEIGHTLESS

# The padded path of torch makes nested tensors, which warn; float32 rounding of two layers.
nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
CLOSE = {"rtol": 0, "atol": 1e-5}


def padding(n=20):
    ignore = torch.zeros(2, n, dtype=torch.bool)
    ignore[1, 13:] = True
    return ignore


def encoder(*, batch_first=True, norm_first=False, dropout=0.0):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first).eval()
    for name, parameter in model.named_parameters():
        if "in_proj_weight" in name:
            # Scores far from zero: otherwise every token is the mean of all, with any method.
            nn.init.normal_(parameter, std=0.6)
    return model


def tokens(batch_first=True, n=20):
    x = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(1))
    return x if batch_first else x.transpose(0, 1)


def replaced(model, num_landmarks, method="nystrom"):
    model = copy.deepcopy(model)
    replace_attention(model, method, {"num_landmarks": num_landmarks})
    return model


@nested
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_with_a_landmark_per_token_a_transformer_encoder_equals_its_source(batch_first, norm_first, training):
    source, x = encoder(batch_first=batch_first, norm_first=norm_first).train(training), tokens(batch_first)
    ours = replaced(source, 20)
    assert ours.training == training
    with torch.no_grad():
        results = [model(x, src_key_padding_mask=padding()) for model in (ours, source)]
    ours_out, theirs = (out if batch_first else out.transpose(0, 1) for out in results)
    assert_close(ours_out[~padding()], theirs[~padding()], **CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_causal_transformer_encoder_is_called_as_before(batch_first, training):
    source, x = encoder(batch_first=batch_first).train(training), tokens(batch_first)
    ours = copy.deepcopy(source)
    replace_attention(ours, "near_far", {"num_heavy": 4, "num_clusters": 4, "block_size": 4})
    mask = nn.Transformer.generate_square_subsequent_mask(20)
    with torch.no_grad():
        # near_far is exact for so few tokens.
        out = ours(x, mask=mask, is_causal=True)
        assert_close(out, source(x, mask=mask, is_causal=True), **CLOSE)
        # torch finds out by itself that a mask is the causal one.
        assert torch.equal(ours(x, mask=mask), out)
        assert torch.equal(ours(x, is_causal=True), out)
        assert torch.equal(ours(x, mask=mask.isinf(), is_causal=True), out)
        with pytest.raises(ValueError, match=r"attn_mask of shape \(19, 19\) is not the causal mask of 20 tokens"):
            ours.layers[0].self_attn(x, x, x, attn_mask=mask[1:, 1:], is_causal=True)
        with pytest.raises(ValueError, match="attn_mask cannot be honoured"):
            ours.layers[0].self_attn(x, x, x, attn_mask=mask)
        with pytest.raises(ValueError, match="attn_mask cannot be honoured"):
            replaced(source, 4)(x, mask=mask, is_causal=True)


@nested
@pytest.mark.parametrize("masked", [True, False])
def test_evaluation_runs_the_method_and_not_the_fused_path_of_torch(masked):
    source, x = encoder(), tokens()
    ours, real = replaced(source, 4), ~padding()
    ran = []
    for layer in ours.layers:
        layer.self_attn.heads.register_forward_hook(lambda *_: ran.append(1))
    ignore = padding() if masked else None
    with torch.no_grad():
        evaluated, exact = ours(x, src_key_padding_mask=ignore), source(x, src_key_padding_mask=ignore)
        assert len(ran) == 2
        trained = ours.train()(x, src_key_padding_mask=ignore)
    assert_close(evaluated[real], trained[real], **CLOSE)
    assert (evaluated[real] - exact[real]).abs().max() > 0.01


@nested
def test_without_the_hooks_evaluation_runs_the_method_too():
    """A hook on a module turns torch's fused path off, so the method must be visible without one."""
    source, x = encoder(), tokens()
    ours = replaced(source, 4)
    with torch.no_grad():
        assert_close(ours(x, src_key_padding_mask=padding())[0], ours.train()(x)[0], **CLOSE)
        assert (ours.eval()(x) - source(x)).abs().max() > 0.01


def test_padding_and_neighbours_change_nothing_at_real_tokens():
    ours, x = replaced(encoder(), 4), tokens()
    with torch.no_grad():
        together = ours(x, src_key_padding_mask=padding())
        assert_close(together[1:, :13], ours(x[1:, :13]), **CLOSE)
        assert_close(together[:1], ours(x[:1]), **CLOSE)


def test_parameters_are_the_same_objects_under_the_same_names():
    source = encoder()
    before = dict(source.named_parameters())
    assert len(replace_attention(source)) == 2
    after = dict(source.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    encoder().load_state_dict(source.state_dict())


@pytest.mark.parametrize("method", WEIGHTLESS)
def test_every_method_without_weights_can_replace_it_and_learns(method):
    torch.manual_seed(0)
    model = encoder()
    assert len(replace_attention(model, method)) == 2
    model(tokens(), src_key_padding_mask=padding())[~padding()].square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads)


class NormsThrice(nn.Module):
    """A block whose own words leave open whether its three tensors are one."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x, mask):
        return self.attn(self.norm(x), self.norm(x), self.norm(x), key_padding_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("method", WEIGHTLESS)
def test_a_block_that_normalises_three_times_is_what_it_is_declared_to_be(method):
    torch.manual_seed(0)
    model, x, mask, results = NormsThrice().eval(), tokens(), padding(), []
    assert replace_attention(model, method, self_attention=True).self_attention == ("attn",)
    for junk in (0.0, 7.0):
        model.zero_grad()
        out = model(x.masked_fill(mask[..., None], junk), mask)[~mask]
        out.square().sum().backward()
        results.append([out.detach(), *(weight.grad for weight in model.attn.parameters())])
    for clean, soiled in zip(*results, strict=True):
        assert torch.equal(clean, soiled)


def test_an_undeclared_block_that_normalises_three_times_raises_and_the_report_names_it():
    model = NormsThrice()
    report = replace_attention(model)
    assert report.undeclared == ("attn",)
    assert "undeclared (pass self_attention=True or False) in attn" in str(report)
    with pytest.raises(ValueError, match=r"nothing says whether these are the same.*self_attention=True"):
        model(tokens(), padding())


def test_layers_of_a_decoder_are_declared_by_their_parent():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 1).eval()
    report = replace_attention(model, options={"num_landmarks": 20})
    assert report.self_attention == ("layers.0.self_attn",)
    assert report.cross_attention == ("layers.0.multihead_attn",)
    # The number of targets is that of the keys, some of them padding: the queries are all real.
    with torch.no_grad():
        out = model(tokens(), 2 * tokens(), memory_key_padding_mask=padding())
        fewer = model(tokens()[:, :19], 2 * tokens(), memory_key_padding_mask=padding())
    assert out[padding()].abs().sum() > 1
    assert (out[:, 0] - fewer[:, 0]).abs().max() > 0
    with pytest.raises(
        ValueError, match=r"layers.0.multihead_attn is cross-attention, and longformer only takes .*use"
    ):
        replace_attention(nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 1), "longformer")


def test_modules_of_transformers_are_declared_by_their_names():
    from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

    head = SiglipMultiheadAttentionPoolingHead(SiglipVisionConfig(hidden_size=16, num_attention_heads=4))
    assert replace_attention(head).cross_attention == ("attention",)


@pytest.mark.parametrize("method", WEIGHTLESS)
def test_what_padding_holds_reaches_no_gradient_of_a_replacement(method):
    """NaN included: the projections see none of it."""
    torch.manual_seed(0)
    model, mask, results = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), padding(), []
    replace_attention(model, method)
    attention = model.self_attn.eval()
    for junk in (0.0, torch.nan):
        attention.zero_grad()
        x = tokens().masked_fill(mask[..., None], junk).requires_grad_()
        out = attention(x, x, x, key_padding_mask=mask)[0][~mask]
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(weight.grad for weight in attention.parameters())])
    for clean, soiled in zip(*results, strict=True):
        assert torch.equal(clean, soiled)


def test_keys_that_were_trained_are_used_by_the_reformer():
    model = encoder()
    replace_attention(model, "reformer")
    assert not model.layers[0].self_attn.heads.options.shared_qk


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_with_other_widths_equals_its_source(batch_first, bias):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"x": nn.MultiheadAttention(16, 4, kdim=5, vdim=7, bias=bias, batch_first=batch_first)}
    ).eval()
    q, k, v = (torch.randn(2, 20, width) for width in (16, 5, 7))
    q, k, v = (x if batch_first else x.transpose(0, 1) for x in (q, k, v))
    expected = model["x"](q, k, v, key_padding_mask=padding())[0]
    assert replace_attention(model, options={"num_landmarks": 20}, self_attention=False).cross_attention == ("x",)
    # Queries as many as the keys are real even at the positions of padded keys.
    assert_close(model["x"](q, k, v, key_padding_mask=padding())[0], expected, **CLOSE)


def test_one_sequence_without_a_batch_and_one_module_in_two_places():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4)
    model = nn.ModuleDict({"a": attention, "b": nn.ModuleDict({"again": attention, "and again": attention})}).eval()
    x, k = torch.randn(9, 16), torch.randn(9, 16)
    ignore = torch.arange(9) > 6
    expected = model["a"](x, k, k, key_padding_mask=ignore)[0]
    assert len(replace_attention(model, self_attention=False)) == 1
    assert model["a"] is model["b"]["again"] is model["b"]["and again"]
    assert_close(model["a"](x, k, k, key_padding_mask=ignore)[0], expected, **CLOSE)


class StandIn(nn.Module):
    """The structure of timm's Attention, with attention in its plain form."""

    def __init__(self, dim, num_heads, norm=nn.Identity, gated=False):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = num_heads, dim // num_heads, True
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm, self.norm = norm(self.head_dim), norm(self.head_dim), norm(dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.gate = nn.Linear(dim, dim) if gated else None

    def forward(self, x, attn_mask=None, is_causal=False):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = self.q_norm(q) @ self.k_norm(k).mT / self.head_dim**0.5
        out = self.norm((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))
        return self.proj_drop(self.proj(out if self.gate is None else out * self.gate(x).sigmoid()))


StandIn.__name__, StandIn.__module__ = "Attention", "timm.layers.attention"


def attention_of_timm(**options):
    attention = pytest.importorskip("timm.layers", exc_type=ImportError).Attention
    norm = options.pop("norm", None)
    return attention(16, 4, qk_norm=norm is not None, scale_norm=norm is not None, norm_layer=norm, **options)


@pytest.mark.parametrize("make", [lambda **options: StandIn(16, 4, **options), attention_of_timm])
@pytest.mark.parametrize("options", [{}, {"norm": nn.LayerNorm}, {"gated": True}])
def test_attention_of_timm_equals_its_source_at_a_landmark_per_token(make, options):
    torch.manual_seed(0)
    source, x = nn.Sequential(make(**options)).eval(), tokens()
    nn.init.normal_(source[0].qkv.weight, std=0.6)
    exact, few = copy.deepcopy(source), copy.deepcopy(source)
    assert len(replace_attention(exact, options={"num_landmarks": 20})) == 1
    replace_attention(few, options={"num_landmarks": 4})
    assert list(exact.state_dict()) == list(source.state_dict())
    assert_close(exact(x), source(x), **CLOSE)
    assert (few(x) - source(x)).abs().max() > 0.01


class Eva(nn.Module):
    """The structure of timm's EvaAttention and AttentionRope: rotary positions, biases apart, grouped keys."""

    def __init__(self, dim, num_heads, *, joint, num_kv_heads=4):
        super().__init__()
        self.num_heads, self.num_prefix_tokens, self.rotate_half = num_heads, 2, True
        self.head_dim = d = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False) if joint else None
        if joint:
            self.q_bias, self.v_bias = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(dim))
            self.register_buffer("k_bias", torch.zeros(dim), persistent=False)
        else:
            self.q_proj = nn.Linear(dim, dim)
            self.k_proj, self.v_proj = nn.Linear(dim, num_kv_heads * d), nn.Linear(dim, num_kv_heads * d)
        self.proj, self.gate = nn.Linear(dim, dim), None
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x, rope=None, attn_mask=None, is_causal=False):
        b, n, _ = x.shape
        if self.qkv is None:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            q, k, v = (self.qkv(x) + torch.cat([self.q_bias, self.k_bias, self.v_bias])).chunk(3, dim=-1)
        q, k, v = (part.reshape(b, n, -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (torch.cat([p[:, :, :2], rotated(p[:, :, 2:], rope, half=True)], dim=2) for p in (q, k))
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(self.norm(out.transpose(1, 2).flatten(2)))


Eva.__name__, Eva.__module__ = "EvaAttention", "timm.models.eva"


def rotated(x, rope, half):
    assert half
    sin, cos = rope.chunk(2, -1)
    return x * cos + torch.cat([-x[..., 2:], x[..., :2]], dim=-1) * sin


@pytest.mark.parametrize("options", [{"joint": True}, {"joint": False}, {"joint": False, "num_kv_heads": 2}])
@pytest.mark.parametrize("rope", [None, torch.randn(18, 8, generator=torch.Generator().manual_seed(3))])
def test_rotary_attention_of_timm_equals_its_source_at_a_landmark_per_token(monkeypatch, options, rope):
    layers = types.ModuleType("timm.layers")
    layers.apply_rot_embed_cat = rotated  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", types.ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.layers", layers)
    torch.manual_seed(0)
    source, x = nn.ModuleDict({"attn": Eva(16, 4, **options)}), tokens()
    exact, few = copy.deepcopy(source), copy.deepcopy(source)
    assert replace_attention(exact, options={"num_landmarks": 20}).self_attention == ("attn",)
    replace_attention(few, options={"num_landmarks": 4})
    assert list(exact.state_dict()) == list(source.state_dict())
    assert_close(exact["attn"](x, rope=rope), source["attn"](x, rope=rope), **CLOSE)
    assert (few["attn"](x, rope=rope) - source["attn"](x, rope=rope)).abs().max() > 0.01
    exact["attn"](x, rope=rope).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in exact.parameters())
    with pytest.raises(ValueError, match="attn_mask cannot be honoured"):
        exact["attn"](x, rope=rope, attn_mask=torch.ones(20, 20))


@pytest.mark.refuses
def test_biases_of_pairs_of_timms_beit_raise_and_leave_the_model():
    class Attention(StandIn):
        pass

    class RelativePositionBias(nn.Module):
        pass

    Attention.__module__ = RelativePositionBias.__module__ = "timm.models.beit"
    RelativePositionBias.__qualname__ = "RelativePositionBias"
    model = nn.Sequential(Attention(16, 4))
    assert len(replace_attention(copy.deepcopy(model))) == 1
    for part, biased in ((model[0], model), (RelativePositionBias(), nn.Sequential(model[0], RelativePositionBias()))):
        part.relative_position_bias_table = nn.Parameter(torch.zeros(3, 4))
        with pytest.raises(ValueError, match="0 adds a learned bias for each pair of positions"):
            replace_attention(biased)
        assert type(model[0]) is Attention
        part.relative_position_bias_table = None
    replace_attention(model)
    with pytest.raises(ValueError, match="shared_rel_pos_bias cannot be honoured"):
        model[0](tokens(), shared_rel_pos_bias=torch.zeros(1, 4, 20, 20))


def test_a_module_of_that_name_that_is_not_timms_stays():
    class Attention(StandIn):
        pass

    Attention.__module__ = "elsewhere"
    with pytest.raises(ValueError, match=r"Sequential holds no .* and no attention of timm or nystrom-attention"):
        replace_attention(nn.Sequential(Attention(16, 4)))


def test_dropout_of_weights_is_reported_in_training_and_not_in_evaluation():
    model = encoder(dropout=0.1)
    replace_attention(model)
    model.eval()(tokens())
    with pytest.warns(UserWarning, match=r"a dropout of 0\.1 on them has no effect"):
        model.train()(tokens())


@pytest.mark.refuses
def test_masks_per_pair_of_tokens_raise_by_the_replaced_model():
    model = encoder()
    replace_attention(model)
    with pytest.raises(ValueError, match="attn_mask cannot be honoured"):
        model(tokens(), mask=nn.Transformer.generate_square_subsequent_mask(20))
    timm = nn.Sequential(StandIn(16, 4))
    replace_attention(timm)
    with pytest.raises(ValueError, match="is_causal cannot be honoured"):
        timm[0](tokens(), is_causal=True)
    with pytest.raises(ValueError, match="attn_mask cannot be honoured"):
        timm[0](tokens(), attn_mask=torch.ones(20, 20, dtype=torch.bool))


@pytest.mark.refuses
@nested
def test_nested_tensors_and_rows_that_do_not_exist_raise():
    model = encoder()
    replace_attention(model, "linear")
    attention, x = model.layers[0].self_attn, tokens()
    with pytest.raises(ValueError, match="weight_queries is given, but linear attention has no rows"):
        attention(x, x, x, need_weights=True, weight_queries=torch.tensor([0]))
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with pytest.raises(ValueError, match="query is a nested tensor"):
        attention(x, x, x)


@pytest.mark.refuses
@pytest.mark.parametrize(
    "make", [lambda: nn.TransformerEncoderLayer(16, 4, batch_first=True), lambda: nn.Sequential(StandIn(16, 4))]
)
@pytest.mark.parametrize("method", ["nystrom", "near_far"])
def test_an_input_of_another_dtype_or_width_is_named_where_attention_was_replaced(make, method):
    model, x = make().eval(), torch.randn(2, 20, 16)
    replace_attention(model, method)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ValueError, match=rf"has dtype {dtype}, but the weights of the layer have torch.float32"):
            model(x.to(dtype))
        model(x.to(dtype).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).isfinite().all()
    with pytest.raises(ValueError, match=r"has width 8; expected 16|has shape \(2, 20, 8\).* with width 16"):
        model(x[..., :8])


class Quantizable(nn.MultiheadAttention):
    pass


def hooked():
    attention = nn.MultiheadAttention(16, 4)
    attention.register_forward_hook(lambda *_: None)
    return attention


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: encoder(), {"method": "linformer"}, "method is 'linformer', whose projections"),
        (lambda: encoder(), {"method": "nystorm"}, "'nystorm' is unknown.*Perhaps you meant 'nystrom'"),
        (lambda: encoder(), {"options": {"landmark": 3}}, "option of nystrom 'landmark' is unknown"),
        (lambda: encoder(), {"options": {"num_landmarks": 0}}, "num_landmarks is 0"),
        (lambda: nn.MultiheadAttention(16, 4), {}, "model is itself MultiheadAttention"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "Sequential holds no nn.MultiheadAttention"),
        (lambda: nn.Sequential(NystromAttention(16, 4)), {}, "holds no nn.MultiheadAttention"),
        (lambda: nn.Sequential(Quantizable(16, 4)), {}, "0 is a Quantizable, a subclass"),
        (lambda: nn.Sequential(nn.MultiheadAttention(16, 4, add_bias_kv=True)), {}, "0 was built with add_bias_kv"),
        (lambda: nn.Sequential(nn.MultiheadAttention(16, 4, add_zero_attn=True)), {}, "built with add_zero_attn"),
        (lambda: nn.Sequential(hooked()), {}, "0 has hooks"),
    ],
)
def test_what_cannot_be_replaced_raises(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        replace_attention(make(), **arguments)


@pytest.mark.refuses
def test_an_error_leaves_the_model_unchanged():
    model = nn.Sequential(nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4, add_zero_attn=True))
    with pytest.raises(ValueError, match="add_zero_attn"):
        replace_attention(model)
    assert all(type(child) is nn.MultiheadAttention for child in model)
