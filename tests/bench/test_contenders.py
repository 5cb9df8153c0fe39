import dataclasses

import pytest
import torch

from nystrom.attention.nystrom import nystrom_attention
from nystrom.attention.softmax import softmax_attention
from nystrom.bench import contenders
from nystrom.bench.contenders import CONTENDERS, DEFAULT, available, find_contender, installed
from nystrom.bench.inputs import Sizes, make_inputs

NAMES = ("softmax-materialised", "softmax", "nystrom-8", "kernelized", "skyformer-8", "authors-8", "transformers-8")
NAMES += ("nystrom-attention-8",)


def sizes(**changes):
    plain = Sizes(2, 3, 16, 5, torch.float64, torch.device("cpu"), "tokens")
    return dataclasses.replace(plain, **changes)


def build(name, inputs, skip=False):
    if not installed(CONTENDERS[name.rstrip("-0123456789")]):
        pytest.skip("not installed")
    contender, number = find_contender(name)
    return contender.build(inputs, number, skip)


def test_every_contender_is_tried_here():
    assert {name.rstrip("-0123456789") for name in NAMES} == set(CONTENDERS)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_go_in_and_come_out_and_everything_gets_a_gradient(name, skip):
    inputs = make_inputs(32, sizes(), seed=0)
    call = build(name, inputs, skip and CONTENDERS[name.rstrip("-0123456789")].skip)
    out = call.forward()
    assert out.shape == inputs.grad.shape == (2, 32, 48)
    out.backward(inputs.grad)
    assert all(leaf.grad.abs().max() > 0 for leaf in call.leaves)


@pytest.mark.parametrize("name", [name for name in NAMES if CONTENDERS[name.rstrip("-0123456789")].package is None])
def test_the_layout_changes_no_number(name):
    tokens = make_inputs(32, sizes(), seed=0)
    leaves = [x.detach().unflatten(-1, (3, 16)).transpose(1, 2).contiguous() for x in (*tokens.leaves, tokens.grad)]
    heads = dataclasses.replace(tokens, sizes=sizes(layout="heads"), leaves=tuple(leaves[:3]), grad=leaves[3])
    out = build(name, heads).forward()
    assert out.shape == heads.grad.shape == make_inputs(32, sizes(layout="heads"), seed=0).grad.shape
    # float64 rounding
    torch.testing.assert_close(build(name, tokens).forward(), out.transpose(1, 2).flatten(2), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["authors-8", "transformers-8", "nystrom-attention-8"])
def test_the_peers_compute_nystrom_attention_with_the_authors_start_value(name):
    inputs = make_inputs(32, sizes(), seed=0)
    expected = inputs.merged(nystrom_attention(*inputs.heads(), num_landmarks=8, z0="authors"))
    # float64 rounding, amplified by the iterations of the inverse; row sums, 1 to rounding, enter one Z0
    torch.testing.assert_close(build(name, inputs).forward(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["nystrom-8", "authors-8", "transformers-8", "nystrom-attention-8"])
def test_a_skip_adds_a_convolution_of_the_values(name):
    inputs = make_inputs(32, sizes(), seed=0)
    alone, skip = build(name, inputs), build(name, inputs, skip=True)
    weight = next(leaf for leaf in skip.leaves if leaf.shape == (3, 1, 5, 1))
    v = inputs.heads()[2]
    convolved = torch.nn.functional.conv2d(v, weight, padding=(2, 0), groups=3)
    # float64 rounding
    torch.testing.assert_close(skip.forward(), alone.forward() + inputs.merged(convolved), rtol=0, atol=1e-11)


def test_both_softmaxes_are_exact_attention():
    inputs = make_inputs(32, sizes(), seed=0)
    expected = inputs.merged(softmax_attention(*inputs.heads()))
    for name in ("softmax", "softmax-materialised"):
        # float64 rounding
        torch.testing.assert_close(build(name, inputs).forward(), expected, rtol=0, atol=1e-12)


def test_inputs_are_the_same_for_the_same_seed():
    first, again, other = (make_inputs(8, sizes(), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(first.leaves, again.leaves, strict=True))
    assert torch.equal(first.grad, again.grad)
    assert not torch.equal(first.leaves[0], other.leaves[0])


@pytest.mark.parametrize(("name", "n"), [("authors-8", 36), ("transformers-8", 36), ("transformers-8", 8)])
def test_lengths_that_segments_do_not_divide_are_refused(name, n):
    with pytest.raises(ValueError, match="wants a length that is a multiple of 8 and longer"):
        build(name, make_inputs(n, sizes(), seed=0))


@pytest.mark.parametrize("name", ["transformers-8", "nystrom-attention-8"])
def test_peers_refuse_head_split_inputs(name):
    with pytest.raises(ValueError, match="takes the layout 'tokens' only"):
        build(name, make_inputs(32, sizes(layout="heads"), seed=0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nystroem-64", r"method 'nystroem' is unknown; expected one of .*softmax.* Perhaps you meant 'nystrom'"),
        ("", "is unknown"),
        ("64", "is unknown"),
        ("nystrom", "lacks its number of landmarks, at least 1: write 'nystrom-64'"),
        ("nystrom-0", "lacks its number of landmarks"),
        ("softmax-64", "ends in a number, but 'softmax' takes none"),
    ],
)
def test_names_that_do_not_fit_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_contender(name)


def test_what_is_not_installed_is_left_out_and_refused_by_name(monkeypatch):
    absent = dataclasses.replace(CONTENDERS["transformers"], package="no_such_package_anywhere")
    monkeypatch.setitem(CONTENDERS, "transformers", absent)
    assert set(DEFAULT) - set(available()) >= {"transformers-64"}
    assert {"softmax", "nystrom-64", "authors-64"} <= set(available())
    with pytest.raises(ValueError, match=r"'transformers-64' needs a package .*nystrom\[peers\]"):
        find_contender("transformers-64")
    with pytest.raises(ValueError, match=r"Not installed: .*transformers"):
        find_contender("other")


def test_every_default_method_is_known():
    assert {contenders._parsed(name)[0] for name in DEFAULT} == set(CONTENDERS)
