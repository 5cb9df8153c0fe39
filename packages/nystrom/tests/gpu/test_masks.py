"""Masks of kernels are booleans in Triton's interpreter, too, which refuses others from Triton 3.9 on.

There a block combined with a condition on one number is of that number's type, so kernels have such a condition as a
bound of the block: `rows < tl.where(kind == 1, M, 0)`.
"""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder

from nystrom import near_far_attention, nystrom_attention, skyformer_attention

# Kernels in the interpreter.
pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")]

FEW = {"num_landmarks": 4}
CASES = {
    "nystrom": (nystrom_attention, 11, FEW),
    # More landmarks than the kernel of one small matrix takes; forward alone, as the interpreter takes long.
    "blocks": (nystrom_attention, 70, {"num_landmarks": 65, "pinv_steps": 1}),
    "skyformer": (skyformer_attention, 11, FEW),
    "near_far": (near_far_attention, 11, {"block_size": 4, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}),
}


@pytest.fixture
def dtypes(monkeypatch):
    """The dtypes of the masks that the interpreter is given."""
    found = set()

    def watch(name, place):
        own = getattr(InterpreterBuilder, name)

        def called(self, *given):
            found.add(given[place].data.dtype.name)
            return own(self, *given)

        monkeypatch.setattr(InterpreterBuilder, name, called)

    watch("create_masked_load", 1)
    watch("create_masked_store", 2)
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_mask_is_boolean(case, dtypes):
    attend, n, options = CASES[case]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, 8, generator=g, requires_grad=case != "blocks") for _ in range(3))
    # One sequence with few tokens.
    keep = torch.arange(n) < torch.tensor([[n], [3]])
    out = attend(q, k, v, keep=keep, backend="triton", **options)
    if out.requires_grad:
        out.sum().backward()
    assert dtypes == {"bool"}
