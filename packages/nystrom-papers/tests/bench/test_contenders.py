import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from nystrom.attention.method_names import split_name
from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.options import NearFarOptions, near_far_sizes
from nystrom.attention.parts.clusters import choose
from nystrom_papers.bench.contenders import CONTENDERS, DEFAULT, available, check_kernels, find_contender, installed
from nystrom_papers.bench.inputs import Sizes, make_inputs
from nystrom_papers.bench.peers import AuthorsAttention

# Each with a length that it takes.
SHORT = """softmax-materialised softmax nystrom-8 nystrom-triton-8 kernelized skyformer-8 linear
    skyformer-triton-8 skyformer_softmax-8 linformer-8 longformer-9 performer-8 informer-8 authors-8 transformers-8
    nystrom-attention-8 linformer-package-8 transformers-longformer-9 performer-pytorch-8"""
NAMES = dict.fromkeys(SHORT.split(), 32) | {"near_far": 128, "near_far-8": 96, "near_far-triton": 96}
NAMES |= {"near_far-triton-8": 72, "near_far-growing": 200, "near_far-growing-triton": 152}
NAMES |= {name: 96 for name in ("near_far-selected", "near_far-heads-triton") if name in CONTENDERS}
NAMES |= {"reformer-2": 128, "reformer-pytorch-2": 128, "bigbird-1": 512, "transformers-bigbird-1": 512}
PEERS = ["authors-8", "transformers-8", "nystrom-attention-8"]
OURS = [name for name in NAMES if CONTENDERS[name.rstrip("-0123456789")].package is None]


def each(names):
    """Names as parameters; kernels that Triton interprets for seconds are left to the longer tests."""
    return [pytest.param(name, marks=pytest.mark.long if "triton" in name else ()) for name in names]


def sizes(**changes):
    plain = Sizes(2, 3, 16, 5, torch.float64, torch.device("cpu"), "tokens")
    return dataclasses.replace(plain, **changes)


def build(name, inputs, skip=False):
    if not installed(CONTENDERS[name.rstrip("-0123456789")]):
        pytest.skip("not installed")
    contender, number = find_contender(name)
    if contender.kernels:
        pytest.importorskip("triton")
    return contender.build(inputs, number, skip)


def test_every_contender_is_tried_here():
    assert {name.rstrip("-0123456789") for name in NAMES} == set(CONTENDERS) - {"near_far-growing-choice"}


def test_the_choice_alone_is_that_of_near_far():
    inputs = make_inputs(600, sizes(batch=1, heads=1), seed=0)
    options = NearFarOptions(**near_far_sizes(600, selects=False))
    q, k, _ = (x.detach() for x in inputs.heads())
    assert torch.equal(
        build("near_far-growing-choice", inputs).forward(), choose(q, k, None, None, options).cluster.int()
    )


@pytest.mark.parametrize("skip", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", each(NAMES))
def test_tokens_go_in_and_come_out_and_everything_gets_a_gradient(name, skip):
    inputs = make_inputs(NAMES[name], sizes(), seed=0)
    call = build(name, inputs, skip and CONTENDERS[name.rstrip("-0123456789")].skip)
    out = call.forward()
    assert out.shape == inputs.grad.shape == (2, NAMES[name], 48)
    out.backward(inputs.grad)
    # The Reformer has no separate keys.
    idle = [inputs.leaves[1]] if name.startswith("reformer") else []
    assert all(leaf.grad.abs().max() > 0 for leaf in call.leaves if not any(leaf is x for x in idle))


@pytest.mark.parametrize("name", each(OURS))
def test_the_layout_changes_no_number(name):
    tokens = make_inputs(NAMES[name], sizes(), seed=0)
    leaves = [x.detach().unflatten(-1, (3, 16)).transpose(1, 2).contiguous() for x in (*tokens.leaves, tokens.grad)]
    heads = dataclasses.replace(tokens, sizes=sizes(layout="heads"), leaves=tuple(leaves[:3]), grad=leaves[3])
    torch.manual_seed(0)
    out = build(name, heads).forward()
    assert out.shape == heads.grad.shape == make_inputs(NAMES[name], sizes(layout="heads"), seed=0).grad.shape
    torch.manual_seed(0)
    # float64 rounding
    torch.testing.assert_close(build(name, tokens).forward(), out.transpose(1, 2).flatten(2), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", PEERS)
def test_the_peers_compute_nystrom_attention_with_the_authors_start_value(name):
    inputs = make_inputs(32, sizes(), seed=0)
    expected = inputs.merged(nystrom_attention(*inputs.heads(), num_landmarks=8, z0="authors"))
    # float64 rounding, amplified by the iterations of the inverse; row sums, 1 to rounding, enter one Z0
    torch.testing.assert_close(build(name, inputs).forward(), expected, rtol=0, atol=1e-10)


def test_both_longformers_attend_to_the_same_window():
    inputs = make_inputs(32, sizes(), seed=0)
    ours, theirs = (build(name, inputs).forward() for name in ("longformer-9", "transformers-longformer-9"))
    # theirs takes its softmax in float32
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-6)


def test_both_linformers_mix_the_tokens_alike():
    inputs = make_inputs(32, sizes(), seed=0)
    ours, theirs = build("linformer-8", inputs), build("linformer-package-8", inputs)
    for mine, other in zip(ours.leaves[3:], theirs.leaves[3:], strict=True):
        mine.data.copy_(other.detach().mT)
    # float64 rounding
    torch.testing.assert_close(theirs.forward(), ours.forward(), rtol=0, atol=1e-11)


def test_both_performers_estimate_softmax_attention():
    inputs = make_inputs(32, sizes(), seed=0)
    inputs.leaves[0].data.mul_(0.3)
    inputs.leaves[1].data.mul_(0.3)
    torch.manual_seed(0)
    exact = inputs.merged(softmax_attention(*inputs.heads()))
    mean = inputs.merged(inputs.heads()[2].mean(dim=2, keepdim=True).expand(-1, -1, 32, -1))
    for name in ("performer-4096", "performer-pytorch-4096"):
        # Relative to what attention adds to the mean of the values, 4096 features leave an error of 0.13, and the
        # package, whose constant is a bias, 0.27; the mean alone would leave 1.
        assert (build(name, inputs).forward() - exact).norm() < 0.4 * (exact - mean).norm()


@pytest.mark.parametrize(
    ("name", "n", "layout", "message"),
    [
        ("authors-8", 36, "tokens", "needs a length that is a multiple of 8 and longer"),
        ("transformers-8", 8, "tokens", "needs a length that is a multiple of 8 and longer"),
        ("transformers-longformer-8", 36, "tokens", "needs a window of an odd number of tokens"),
        ("transformers-longformer-9", 36, "tokens", "needs a length that is a multiple of 8"),
        ("reformer-pytorch-2", 36, "tokens", "needs a length that is a multiple of 128"),
        ("transformers-bigbird-1", 36, "tokens", "needs a length that is a multiple of 64"),
        ("nystrom-attention-8", 32, "heads", "takes the layout 'tokens' only"),
    ],
)
def test_what_a_peer_cannot_take_raises(name, n, layout, message):
    with pytest.raises(ValueError, match=message):
        build(name, make_inputs(n, sizes(layout=layout), seed=0))


@pytest.mark.parametrize("name", ["nystrom-8", "nystrom-triton-8", *PEERS])
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
def test_names_that_do_not_fit_raise(name, message):
    with pytest.raises(ValueError, match=message):
        find_contender(name)


def test_packages_that_are_not_installed_are_left_out_and_raise_by_name():
    assert {split_name(name)[0] for name in DEFAULT} <= set(CONTENDERS)
    absent = dataclasses.replace(CONTENDERS["transformers"], package="no_such_package_anywhere")
    contenders = CONTENDERS | {"transformers": absent}
    found = set(available(contenders=contenders))
    assert set(DEFAULT) - found >= {"transformers-64"}
    assert {"softmax", "nystrom-64", "authors-64"} <= found
    with pytest.raises(ValueError, match=r"'transformers-64' needs a package .*nystrom-papers\[peers\]"):
        find_contender("transformers-64", contenders)
    with pytest.raises(ValueError, match=r"Not installed: .*transformers"):
        find_contender("other", contenders)


@pytest.mark.long
def test_kernels_change_no_number():
    inputs = make_inputs(32, sizes(), seed=0)
    for skip in (False, True):
        results = []
        for name in ("nystrom-triton-8", "nystrom-8"):
            torch.manual_seed(0)
            call = build(name, inputs, skip)
            out = call.forward()
            results.append((out, *torch.autograd.grad(out, call.leaves, inputs.grad)))
        # float64 rounding, amplified by the iterations of the inverse
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-9)


@pytest.mark.long
def test_kernels_are_for_a_gpu_or_for_the_interpreter():
    pytest.importorskip("triton")
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    check_kernels("softmax", CONTENDERS["softmax"], cpu)
    check_kernels("nystrom-triton-8", CONTENDERS["nystrom-triton"], gpu)
    code = (
        "import torch; from nystrom_papers.bench.contenders import CONTENDERS, check_kernels\n"
        "check_kernels('nystrom-triton-8', CONTENDERS['nystrom-triton'], torch.device('cpu'))"
    )
    for interpret, message in (("1", ""), ("0", "'nystrom-triton-8' needs a CUDA device but device is 'cpu'")):
        env = {**os.environ, "TRITON_INTERPRET": interpret}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert message in done.stderr
        assert done.returncode == (1 if message else 0)


def test_the_start_value_of_the_formula_is_taken_over_batch_and_heads():
    qkv = torch.randn(3, 2, 3, 48, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = AuthorsAttention(3, num_landmarks=8)
    assert (layer(*qkv)[:1] - layer(*qkv[:, :1])).abs().max() > 1e-6
