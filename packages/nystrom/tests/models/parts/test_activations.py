import pytest
import torch
from transformers.activations import ACT2FN

from nystrom.models.parts.activations import activation


@pytest.mark.parametrize("name", list(ACT2FN))
def test_every_activation_and_its_gradient_are_those_of_transformers(name):
    x = (5 * torch.randn(2, 3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).requires_grad_()
    found, wanted = (act.double()(x) for act in (activation(name), ACT2FN[name]))
    # gelu_fast has sqrt(2 / pi) to ten digits.
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    if wanted.requires_grad:
        grads = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (found, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)
