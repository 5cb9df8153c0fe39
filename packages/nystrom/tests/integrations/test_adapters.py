"""Adapters of PEFT and replaced attention: adapters come first, then `replace_attention`."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from nystrom import replace_attention

peft = pytest.importorskip("peft")

X = torch.randn(2, 21, 32, generator=torch.Generator().manual_seed(2))


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


def adapted(model, *targets):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False))


def step(model):
    out = model(X)
    out.square().sum().backward()
    return out, [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def test_adapters_of_attention_stay_where_it_is_replaced_afterwards():
    # In training mode: in evaluation torch's fused path runs the attention of the bare layer, without its adapters.
    wanted, gradients = step(adapted(encoder(), "self_attn"))
    model = adapted(encoder(), "self_attn")
    assert len(replace_attention(model, "nystrom", {"num_landmarks": 21})) == 2
    out, came = step(model)
    # float32 through two layers.
    assert_close(out, wanted, rtol=0, atol=1e-5)
    assert_close(came, gradients, rtol=1e-4, atol=1e-4)
    assert len(came) == 8
    assert all(gradient.abs().max() > 0 for gradient in came)
    model.eval()
    with torch.no_grad():
        assert_close(model(X), wanted, rtol=0, atol=1e-5)
        assert_close(copy.deepcopy(model).merge_and_unload()(X), wanted, rtol=0, atol=1e-5)
    few = adapted(encoder(), "self_attn")
    replace_attention(few, "nystrom", {"num_landmarks": 3})
    assert (few(X) - wanted).abs().max() > 1e-3


class Timm(nn.Module):
    """The layers of timm's Attention."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(32, 96), nn.Linear(32, 32)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)


Timm.__name__, Timm.__module__ = "Attention", "timm.layers.attention"


def test_attention_of_timm_takes_adapters_before_and_after():
    torch.manual_seed(0)
    first, after = nn.Sequential(Timm()), nn.Sequential(Timm())
    after.load_state_dict(first.state_dict())
    first = adapted(first, "qkv")
    replace_attention(first, "nystrom", {"num_landmarks": 4})
    replace_attention(after, "nystrom", {"num_landmarks": 4})
    out = after(X)
    after = adapted(after, "qkv")
    assert_close(first(X), after(X), rtol=0, atol=0)
    assert (after(X) - out).abs().max() > 1e-3


class Block(nn.Module):
    """A block that reads no attribute of its attention, as nn.TransformerEncoder does."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


def test_replaced_attention_takes_adapters_of_its_parameters():
    torch.manual_seed(0)
    exact = nn.Sequential(Block(), Block())
    model = copy.deepcopy(exact)
    replace_attention(model, "nystrom", {"num_landmarks": 21}, self_attention=True)
    config = peft.LoraConfig(r=4, target_parameters=["attn.in_proj_weight"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    out, gradients = step(model)
    assert (out - exact(X)).abs().max() > 1e-3
    assert len(gradients) == 4
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    with torch.no_grad():
        # Merging adds the adapters to the exact model's weights; float32 through two layers.
        exact.load_state_dict(copy.deepcopy(model).merge_and_unload().state_dict())
        assert_close(model.eval()(X), exact.eval()(X), rtol=0, atol=1e-5)


@pytest.mark.refuses
def test_replaced_attention_takes_adapters_of_its_output_alone():
    model = encoder()
    replace_attention(model, "nystrom", {"num_landmarks": 21})
    with pytest.raises(ValueError, match="Target module MultiheadReplacement"):
        adapted(copy.deepcopy(model), "self_attn")
    exact = encoder()
    with torch.no_grad():
        assert_close(model(X), exact(X), rtol=0, atol=1e-5)
    out, gradients = step(adapted(model, "out_proj", "linear1"))
    assert (out - exact(X)).abs().max() > 1e-3
    assert len(gradients) == 8
    assert all(gradient.abs().max() > 0 for gradient in gradients)
