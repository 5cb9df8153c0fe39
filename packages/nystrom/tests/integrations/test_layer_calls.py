"""Another attention in the place of a layer's own, which does not run meanwhile."""

import pytest
import torch

from nystrom import Alibi, MultiheadAttention
from nystrom.attention.heads import AttentionHeads
from nystrom.integrations.layer_calls import attend_by, intercepted


def by_nystrom(call):
    return attend_by("nystrom", call, {"num_landmarks": 4})


def counted(layer):
    """The heads of a layer, whose class counts its calls."""
    heads = next(module for module in layer.modules() if isinstance(module, AttentionHeads))
    kind, calls = type(heads), []

    class Counted(kind):
        def forward(self, *tensors, **named):
            calls.append(self)
            return super().forward(*tensors, **named)

    heads.__class__ = Counted
    return heads, calls


@torch.no_grad()
def test_the_own_attention_does_not_run():
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 2, method="softmax").eval()
    heads, calls = counted(layer)
    x = torch.randn(1, 20, 16)
    with intercepted(layer, by_nystrom):
        other, _ = layer(x)
    assert not calls
    assert "forward" not in vars(heads)
    same = MultiheadAttention(16, 2, method="nystrom", num_landmarks=4).eval()
    same.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other, same(x)[0], rtol=0, atol=0)
    assert (layer(x)[0] - other).norm() > 0
    assert len(calls) == 1


@torch.no_grad()
def test_a_forward_pass_that_was_put_in_stays():
    layer = MultiheadAttention(16, 2, method="softmax").eval()
    heads, _ = counted(layer)
    heads.forward = wrapped = heads.forward

    def stop(call):
        raise RuntimeError("stop")

    with intercepted(layer, stop), pytest.raises(RuntimeError, match="stop"):
        layer(torch.randn(1, 20, 16))
    assert vars(heads)["forward"] is wrapped


def test_causal_packed_and_biased_calls_are_refused():
    layer = MultiheadAttention(16, 2, method="near_far").eval()
    x = torch.randn(1, 20, 16)
    with intercepted(layer, by_nystrom):
        with pytest.raises(ValueError, match="causal"):
            layer(x, is_causal=True)
        with pytest.raises(ValueError, match="packed"):
            layer(x, cu_seqlens=torch.tensor([0, 12, 20]))
        with pytest.raises(ValueError, match="has a bias of positions, which is not looked at"):
            layer(x, bias=Alibi(torch.ones(4)))
