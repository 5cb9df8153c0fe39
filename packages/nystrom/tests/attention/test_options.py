"""Signature, options class and documentation of each method say the same."""

import dataclasses
import inspect
import math
import re

import pytest
import torch

from nystrom import build_attention, nystrom_attention, nystrom_factors, nystrom_rows
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.options import MASK_DOCS, LayerOptions
from nystrom.attention.registry import METHODS
from nystrom.command_options import option_docs

CALL = {*MASK_DOCS, "generator", "skip", "group", "is_causal", "bias"}
OF_LAYERS = [field.name for field in dataclasses.fields(LayerOptions)]


def keywords(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in CALL}


@pytest.mark.parametrize("name", METHODS)
def test_the_function_takes_the_fields_of_its_options(name):
    method, function = METHODS[name], FUNCTIONS[name]
    own = {f.name: f for f in dataclasses.fields(method.options) if f.name not in method.weight_options}
    # A layer's options are no arguments of its function.
    fields = {option: field for option, field in own.items() if option not in OF_LAYERS}
    assert [option for option in own if option not in fields] == ([] if name == "softmax" else OF_LAYERS)
    taken = keywords(function)
    # Options of weights that the function takes as tensors are not among its arguments.
    assert list(taken) == [field for field in fields if field in taken]
    assert method.weights or list(taken) == list(fields)
    for option, parameter in taken.items():
        assert parameter.default == fields[option].default
        assert parameter.annotation == fields[option].type
    assert ("generator" in inspect.signature(function).parameters) == method.random


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_documented_once_and_reaches_the_function(name):
    method, function = METHODS[name], FUNCTIONS[name]
    docs = option_docs(method.options)
    assert list(docs) == [f.name for f in dataclasses.fields(method.options) if f.name not in OF_LAYERS]
    assert list(option_docs(LayerOptions)) == OF_LAYERS
    text = inspect.getdoc(function)
    assert "**" not in text
    for mask in [mask for mask in MASK_DOCS if mask in inspect.signature(function).parameters]:
        assert text.count(f"\n    {mask}: ") == 1
    for option in keywords(function):
        assert text.count(f"\n    {option}: ") == 1
        assert " ".join(docs[option].split()) in " ".join(text.split())


@pytest.mark.refuses
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"attn_mask": torch.zeros(9, 9)}, "Use torch"),
        ({"attn_bias": torch.zeros(9, 9)}, "Use torch"),
        ({"dropout_p": 0.1}, "Put nn.Dropout on the output"),
        ({"enable_gqa": True}, "Repeat grouped heads"),
    ],
    ids=["mask", "bias", "dropout", "gqa"],
)
def test_what_no_method_can_do_raises_by_name(name, argument, instead):
    q = torch.randn(1, 2, 9, 4)
    layer = build_attention(name, num_heads=2, head_dim=4)
    for call, known in ((FUNCTIONS[name], f"{name}_attention"), (layer, "AttentionHeads.forward")):
        with pytest.raises(ValueError, match=rf"{next(iter(argument))} cannot be honoured: {known}.*{instead}"):
            call(q, q, q, **argument)


@pytest.mark.refuses
@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].causal])
def test_what_is_not_causal_says_what_is(name):
    q = torch.randn(1, 2, 9, 4)
    for call in (FUNCTIONS[name], build_attention(name, num_heads=2, head_dim=4)):
        with pytest.raises(ValueError, match=r"is_causal cannot be honoured: .*near_far"):
            call(q, q, q, is_causal=True)


@pytest.mark.refuses
@pytest.mark.parametrize("name", METHODS)
def test_unknown_arguments_and_masks_by_position_raise_by_name(name):
    q, keep = torch.randn(1, 2, 9, 4), torch.ones(1, 9, dtype=torch.bool)
    attend, layer = FUNCTIONS[name], build_attention(name, num_heads=2, head_dim=4)
    weights = () if layer.weights is None else layer.weights()
    for call, inputs in ((attend, (q, q, q, *weights)), (layer, (q, q, q))):
        with pytest.raises(ValueError, match=r"argument 'kep' is unknown.*Perhaps you meant 'keep'") as raised:
            call(*inputs, kep=keep)
        # The error lists each option that can be passed once, and none that would be refused.
        listed = re.search(r"expected one of (.*?)\.", str(raised.value))[1].split(", ")
        assert len(set(listed)) == len(listed)
        assert not {"self", "attn_mask", "key_padding_mask"} & set(listed)
        with pytest.raises(ValueError, match=rf"{len(inputs) + 1} positional arguments.*expected q, k, v.*keep says"):
            call(*inputs, keep)


@pytest.mark.refuses
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].random])
def test_what_is_no_generator_raises_though_nothing_is_drawn(name):
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"generator is 3; expected None, 'global' or a torch\.Generator"):
        FUNCTIONS[name](q, q, q, generator=3)


@pytest.mark.parametrize("name", METHODS)
def test_what_asks_for_nothing_is_taken(name):
    q = torch.randn(1, 2, 9, 4)
    attend = FUNCTIONS[name]
    weights = build_attention(name, num_heads=2, head_dim=4).weights
    inputs = (q, q, q, *(() if weights is None else weights()))
    nothing = {"is_causal": False, "attn_mask": None, "dropout_p": 0.0, "enable_gqa": False}
    assert torch.equal(attend(*inputs, **nothing), attend(*inputs))


@pytest.mark.parametrize("name", METHODS)
def test_options_are_keyword_only(name):
    with pytest.raises(TypeError):
        METHODS[name].options(3)


@pytest.mark.parametrize("function", [nystrom_factors, nystrom_rows])
def test_what_looks_into_nystrom_attention_takes_its_arguments(function):
    theirs = keywords(nystrom_attention)
    assert {name: p.default for name, p in keywords(function).items()} == {
        name: p.default for name, p in theirs.items() if name != "backend"
    }


@pytest.mark.refuses
@pytest.mark.parametrize("name", [name for name in METHODS if name != "linear"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 0.0, True, torch.tensor(0.5), "2"])
def test_a_scale_that_is_no_positive_number_raises(name, scale):
    with pytest.raises(ValueError, match=r"scale is .*expected a positive, finite number"):
        build_attention(name, num_heads=2, head_dim=4, scale=scale)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("skyformer", {"gamma": math.inf}, "gamma is inf; expected a positive, finite number"),
        ("reformer", {"shared_qk": "no"}, "shared_qk is 'no'; expected True or False"),
        ("linformer", {"per_head": 1}, "per_head is 1; expected True or False"),
        ("linformer", {"init_std": 0.0}, "init_std is 0.0; expected a positive"),
        ("skyformer_softmax", {"backend": "triton"}, "option of skyformer_softmax 'backend' is unknown"),
    ],
)
def test_other_values_that_do_not_fit_raise(name, option, message):
    with pytest.raises(ValueError, match=message):
        build_attention(name, num_heads=2, head_dim=4, **option)
