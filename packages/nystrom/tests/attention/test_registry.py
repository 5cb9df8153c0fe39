"""The abilities of methods in the table, beside the inputs that they take."""

from importlib import import_module

import pytest
import torch

from nystrom import build_attention
from nystrom.attention.registry import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_each_ability_is_said_once(name):
    can, cannot = METHODS[name].abilities()
    assert "masks per pair of tokens" in cannot
    for ability in (
        "causal masks",
        "a bias of positions",
        "cross-attention",
        "rows of its matrix",
        "ranks of a process group",
        "Triton kernels",
    ):
        assert (ability in can) != (ability in cannot)
    assert sum(said.startswith("second derivatives") for said in (*can, *cannot)) == 1


@pytest.mark.parametrize("name", METHODS)
def test_rows_and_cross_attention_are_where_the_table_says(name):
    can, _ = METHODS[name].abilities()
    home = import_module(f"nystrom.attention.methods.{name}")
    assert hasattr(home, f"{name}_rows") or "rows of its matrix" not in can
    if "cross-attention" in can:
        q, k = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 9, 4)
        keys = torch.ones(1, 9, dtype=torch.bool)
        assert build_attention(name, num_heads=2, head_dim=4)(q, k, k, key_keep=keys).shape == q.shape


@pytest.mark.refuses
@pytest.mark.parametrize("name", [name for name in METHODS if "cross-attention" in METHODS[name].abilities()[1]])
def test_cross_attention_raises_where_the_table_says(name):
    q, k = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match="is self-attention"):
        build_attention(name, num_heads=2, head_dim=4)(q, k, k)


def test_what_differs_by_an_option_is_said():
    assert "second derivatives (those of form='materialised' excepted)" in METHODS["softmax"].abilities()[1]
    assert "more keys than max_length" in METHODS["linformer"].abilities()[1]
