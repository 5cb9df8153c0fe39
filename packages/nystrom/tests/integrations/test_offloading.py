"""Weights are there only while their own module is called: under hooks that offload, gather, cast or adapt them."""

import copy

import pytest
import torch
from torch import nn
from transformers import T5Config, T5EncoderModel

from nystrom import MultiheadAttention, replace_attention
from nystrom.attention.registry import METHODS
from nystrom.integrations.nystrom_attention import from_nystrom_attention
from nystrom.models import EncoderConfig, EncoderForMaskedLM, EncoderModel

SMALL = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 64, "conv_kernel_size": 5,
}  # fmt: skip
LINFORMER = {"attention": "linformer", "attention_options": {"max_length": 64}, "share_attention_weights": True}
ENCODERS = {
    "encoder": (EncoderModel, {}),
    "encoder with a class token": (EncoderModel, {"pooling": "cls"}),
    "encoder with rotary positions": (EncoderModel, {"positions": "rotary", "short_conv_kernel_size": 3}),
    "encoder with shared projections": (EncoderModel, LINFORMER),
    "language model": (EncoderForMaskedLM, {}),
}


def layer_of(method):
    options = {"max_length": 64} if method == "linformer" else {}
    return MultiheadAttention(16, 2, method=method, conv_kernel_size=5, **options)


def of_the_package(**how):
    package = pytest.importorskip("nystrom_attention")
    return from_nystrom_attention(package.NystromAttention(16, dim_head=8, heads=2, num_landmarks=8), **how)


def of_torch():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2, batch_first=True)})
    replace_attention(model, "near_far", self_attention=True)
    return model["attention"]


def of_t5():
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 16, "d_kv": 8, "vocab_size": 30}
    options = {"block_size": 8, "num_heavy": 2, "num_clusters": 2, "exact_up_to": 0}
    return T5EncoderModel._from_config(T5Config(**sizes), attn_implementation="near_far", attention_options=options)


MODELS = {
    **{f"layer of {method}": lambda method=method: layer_of(method) for method in METHODS},
    **{
        name: lambda kind=kind, more=more: kind(EncoderConfig(**SMALL, **more))
        for name, (kind, more) in ENCODERS.items()
    },
    "nystrom-attention": of_the_package,
    "nystrom-attention, zeros in front": lambda: of_the_package(zeros_in_front=True),
    "nn.MultiheadAttention": of_torch,
    "T5": of_t5,
}
READS_IDS = (*ENCODERS, "T5")


def offload(model):
    """Weights are NaN outside of the calls of their own modules."""
    kept = {weight: weight.detach().clone() for weight in model.parameters()}

    def bring(module, *_):
        for weight in module.parameters(recurse=False):
            weight.copy_(kept[weight])

    def drop(module, *_):
        for weight in module.parameters(recurse=False):
            weight.fill_(torch.nan)

    for module in model.modules():
        module.register_forward_pre_hook(bring)
        module.register_forward_hook(drop)
        drop(module)
    return model


def by_accelerate(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("away", [offload, by_accelerate])
@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_offloaded_weights_give_the_same(name, n, away):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    x = torch.randint(5, 30, (2, n)) if name in READS_IDS else torch.randn(2, n, 16)
    expected, out = (each(x) for each in (model, away(copy.deepcopy(model))))
    expected, out = (y if isinstance(y, torch.Tensor) else y[0] for y in (expected, out))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_skip_on_another_device_raises_by_name(method):
    layer = layer_of(method).eval()
    layer.conv.to("meta")
    for n in (5, 40):
        with pytest.raises(ValueError, match="weight is on meta but the tokens are on cpu"):
            layer(torch.randn(1, n, 16))


@pytest.mark.parametrize("method", ["linformer", "performer"])
def test_weights_of_a_method_on_another_device_raise_by_name(method):
    layer = layer_of(method).eval()
    layer.heads.to("meta")
    with pytest.raises(ValueError, match="projection is on meta but the tokens are on cpu"):
        layer(torch.randn(1, 40, 16))


def test_what_runs_no_hooks_raises_by_name():
    x = torch.randn(1, 9, 16)
    asked = MultiheadAttention(16, 2, method="near_far", self_attention=False)
    context = asked.context(x)
    by_accelerate(asked)
    for call in (asked.context, context):
        with pytest.raises(ValueError, match=r"weight is on meta.*only while it is called"):
            call(x)
    with pytest.raises(ValueError, match=r"weights are offloaded.*take the hooks off"):
        by_accelerate(MultiheadAttention(16, 2, method="near_far")).new_cache(1)


def test_hooks_of_the_skip_run():
    layer, x = layer_of("nystrom"), torch.randn(1, 40, 16)
    seen = []
    layer.conv.register_full_backward_hook(lambda module, of_inputs, of_out: seen.append(of_inputs[0].shape))
    layer(x)[0].sum().backward()
    assert seen == [(1, 2, 40, 8)]
    layer.conv.register_forward_hook(lambda module, inputs, out: 0 * out)
    torch.testing.assert_close(layer(x)[0], layer.out_proj.bias.expand(1, 40, 16), rtol=0, atol=0)


def adapted(conv):
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"conv": conv})
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["conv"], r=2))
    return model["conv"]


def hooked(conv):
    conv.register_forward_hook(lambda *_: None)
    return conv


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer:UserWarning")
@pytest.mark.parametrize(
    ("change", "came"),
    [
        (adapted, "a Conv2d, which"),
        (hooked, "an nn.Conv2d with hooks"),
        (lambda conv: by_accelerate(conv), "an nn.Conv2d with hooks"),
        (lambda conv: nn.utils.parametrizations.weight_norm(conv), "a ParametrizedConv2d"),
    ],
)
def test_a_convolution_that_a_replacement_would_lose_raises(change, came):
    module = pytest.importorskip("nystrom_attention").NystromAttention(16, dim_head=8, heads=2, num_landmarks=8)
    module.res_conv = change(module.res_conv)
    with pytest.raises(ValueError, match=f"res_conv is {came}.*leave it out of adapters"):
        from_nystrom_attention(module)


def test_an_offloaded_module_is_not_replaced():
    model = nn.ModuleDict({"attention": by_accelerate(nn.MultiheadAttention(16, 2))})
    with pytest.raises(ValueError, match="attention has hooks"):
        replace_attention(model, "near_far")
