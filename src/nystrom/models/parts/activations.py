r"""Activations by their names in transformers, in one operator where transformers' own module takes eight.

On a CPU each of the eight reads and writes all numbers. The formula of `gelu_new` is the same, but for rounding:
$$\mathrm{gelu}(x) \approx \tfrac12 x \left(1 + \tanh\left(\sqrt{2 / \pi}\,(x + 0.044715\, x^3)\right)\right).$$
"""

from torch import nn
from transformers.activations import ACT2FN

# Other spellings of that formula, and of gelu itself.
_TANH = ("gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_pytorch_tanh")
_EXACT = ("gelu", "gelu_python")


def activation(name: str) -> nn.Module:
    """The activation of a name that transformers knows."""
    if name in _TANH:
        return nn.GELU(approximate="tanh")
    return nn.GELU() if name in _EXACT else ACT2FN[name]
