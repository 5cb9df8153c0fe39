"""Modules of the package nystrom-attention: by its rule to rounding, by ours under our laws, and inside of a model."""

import pytest
import torch
from nystrom_attention import NystromAttention as Package
from torch import nn
from torch.testing import assert_close

from nystrom.integrations import from_nystrom_attention, replace_attention


def package(**options):
    torch.manual_seed(0)
    return Package(
        **{"dim": 24, "dim_head": 5, "heads": 3, "num_landmarks": 8, "residual_conv_kernel": 7} | options
    ).eval()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("n", [1, 5, 8, 9, 24, 61])
def test_with_zeros_in_front_outputs_are_the_packages(n, residual):
    theirs, x = package(residual=residual), torch.randn(2, n, 24)
    ours = from_nystrom_attention(theirs, zeros_in_front=True)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)
    # Another rule gives others, so that the comparison could fail.
    if n % 8:
        assert not torch.allclose(from_nystrom_attention(theirs)(x), theirs(x), atol=1e-4)


def test_rows_are_those_of_the_packages_matrix():
    for n in (5, 61):
        theirs, x = package(residual=False), torch.randn(2, n, 24)
        rows = from_nystrom_attention(theirs, zeros_in_front=True)(x, weight_queries=torch.tensor([0, n - 1]))[1]
        matrix = theirs(x, return_attn=True)[1][:, :, -n:, -n:]
        assert_close(rows, matrix[:, :, [0, n - 1]], rtol=0, atol=1e-6)


def test_gradients_are_the_packages():
    theirs, grads = package(), []
    x = torch.randn(1, 21, 24)
    for module in (theirs, from_nystrom_attention(theirs, zeros_in_front=True)):
        theirs.zero_grad()
        module(x).square().sum().backward()
        grads.append([weight.grad.clone() for weight in theirs.parameters()])
    for ours, of_theirs in zip(*grads, strict=True):
        assert_close(ours, of_theirs, rtol=1e-4, atol=1e-5)


def test_weights_and_their_names_stay():
    theirs = package()
    ours = from_nystrom_attention(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.to_qkv.weight is theirs.to_qkv.weight
    other = package(num_landmarks=4)
    nn.init.ones_(other.to_qkv.weight)
    ours.load_state_dict(other.state_dict())
    assert (theirs.to_qkv.weight == 1).all()


def test_padding_and_neighbours_change_nothing_by_our_rule():
    ours, x = from_nystrom_attention(package()), torch.randn(2, 40, 24)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 29:] = False
    soiled = x.masked_fill(~mask[..., None], torch.nan)
    assert_close(ours(soiled, mask=mask)[0, :29], ours(x[:1, :29])[0])
    assert_close(ours(soiled, mask=mask)[1], ours(x[1:])[0])


@pytest.mark.parametrize(("method", "options"), [("near_far", {"exact_up_to": 0}), ("softmax", {}), ("performer", {})])
def test_other_methods_take_its_place(method, options):
    ours = from_nystrom_attention(package(), method, options)
    assert ours(torch.randn(1, 200, 24)).shape == (1, 200, 24)
    assert ours.method_heads.method == method


def test_they_are_found_in_a_model():
    class Slide(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(24), package()

        def forward(self, x):
            return x + self.attn(self.norm(x))

    model, x = Slide().eval(), torch.randn(1, 64, 24)
    before = model(x)
    done = replace_attention(model)
    assert done.self_attention == ("attn",)
    # A multiple of the landmarks: no zeros in front, and the start values differ by the columns of one sequence alone.
    assert_close(model(x), before, rtol=0, atol=1e-2)
    assert model.attn.method_heads.options.num_landmarks == 8


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, x: from_nystrom_attention(nn.Linear(2, 2)), "expected a NystromAttention of the package"),
        (lambda m, x: from_nystrom_attention(m, "nystorm"), "Perhaps you meant 'nystrom'"),
        (lambda m, x: from_nystrom_attention(m, "linformer"), "would have to be learned"),
        (lambda m, x: from_nystrom_attention(m, "softmax", zeros_in_front=True), "method is 'softmax'"),
        (
            lambda m, x: from_nystrom_attention(m, options={"z0": "paper"}, zeros_in_front=True),
            "options are {'z0': 'paper'}: leave one",
        ),
        (
            lambda m, x: from_nystrom_attention(m, zeros_in_front=True)(x, weight_queries=torch.tensor([-1])),
            "weight_queries holds positions outside 0 ... 8",
        ),
        (lambda m, x: from_nystrom_attention(m)(x, weight_queries=[0]), "weight_queries is a list"),
        (lambda m, x: from_nystrom_attention(m)(x.half()), "x has dtype torch.float16, but the weights of the layer"),
        (
            lambda m, x: from_nystrom_attention(m, options={"landmarks": "uniform"}).train()(
                x, weight_queries=torch.tensor([0])
            ),
            "Call eval",
        ),
        (lambda m, x: from_nystrom_attention(m, zeros_in_front=1), "zeros_in_front is 1"),
        (lambda m, x: from_nystrom_attention(m)(x[0]), "x has shape"),
        (lambda m, x: from_nystrom_attention(m)(x[..., :3]), "width 24"),
        (lambda m, x: from_nystrom_attention(m)(x, return_attn=True), "weight_queries"),
        (lambda m, x: from_nystrom_attention(m)(x, mask=torch.ones(1, 3, dtype=torch.bool)), "mask has shape"),
        (
            lambda m, x: from_nystrom_attention(m, zeros_in_front=True)(x, mask=torch.ones(1, 9, dtype=torch.bool)),
            "mask is given, and zeros_in_front is True",
        ),
        (
            lambda m, x: from_nystrom_attention(m, "performer")(x, weight_queries=torch.tensor([0])),
            "performer has no rows",
        ),
        (lambda m, x: replace_attention(m), "cannot be replaced in place"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call(package(), torch.randn(1, 9, 24))
