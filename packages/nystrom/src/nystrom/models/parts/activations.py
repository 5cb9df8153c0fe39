r"""Activations by their names in transformers; GELU as one operator where transformers' own module takes eight.

On a CPU, each of the eight reads and writes all numbers. Up to rounding, the formula is that of `gelu_new`:
$$\mathrm{gelu}(x) \approx \tfrac12 x \left(1 + \tanh\left(\sqrt{2 / \pi}\,(x + 0.044715\, x^3)\right)\right).$$
"""

from torch import nn
from transformers.activations import ACT2FN

# Other names of that formula, and of the exact GELU.
_TANH = ("gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_pytorch_tanh")
_EXACT = ("gelu", "gelu_python")


def activation(name: str) -> nn.Module:
    """The activation with a name that transformers knows."""
    if name in _TANH:
        return nn.GELU(approximate="tanh")
    return nn.GELU() if name in _EXACT else ACT2FN[name]
