"""The library with only torch and jaxtyping; run by `make bare`, in an environment without anything else."""

import importlib.util
import re
import warnings
from pathlib import Path

for name in ("transformers", "accelerate", "numpy", "matplotlib", "tyro", "rich", "tqdm"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed: this environment is not bare"

# torch says that numpy is missing.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402

import nystrom  # noqa: E402
from nystrom.attention.registry import METHODS  # noqa: E402

for method in METHODS:
    q, k, v = (torch.randn(2, 3, 150, 8, requires_grad=True) for _ in range(3))
    keep = torch.arange(150) < torch.tensor([[150], [70]])
    out = nystrom.build_attention(method, num_heads=3, head_dim=8)(q, k, v, keep=keep)
    out.sum().backward()
    assert out.isfinite().all()
layer = nystrom.NystromAttention(24, 3)
x = torch.randn(2, 150, 24)
assert layer(x, x, x)[0].shape == x.shape
readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
exec(re.search(r"```python\n(.*?)```", readme, flags=re.DOTALL)[1])
print("1 passed, 0 failed")
