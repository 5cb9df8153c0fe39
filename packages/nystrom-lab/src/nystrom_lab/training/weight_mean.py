r"""A running average of the weights during training, which is evaluated and saved in their place.

After step t
$$m_t = d_t\, m_{t-1} + (1 - d_t)\, w_t, \qquad d_t = \min\left(d, \frac{1 + t}{10 + t}\right), \qquad m_0 = w_0,$$
in float32. The slow start forgets the initial weights. The mean is part of every checkpoint, so a resumed run has the
same mean as an uninterrupted one.

Source: Polyak and Juditsky (1992), as exponential moving average with the start of TensorFlow's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nystrom.whole_files import whole_file

FILE = "mean.safetensors"


class WeightMean:
    """The mean of a model's weights.

    Args:
        model: The model, with its initial weights.
        decay: Decay d.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.mean: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update with the weights after a step, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, weight in self.model.named_parameters():
            self.mean[name] = self.mean[name].to(weight.device).lerp_(weight.float(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run a block with the mean as the model's weights."""
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        _put(self.model, self.mean)
        try:
            yield
        finally:
            _put(self.model, own)

    def save(self, folder: Path) -> None:
        """Save the mean in the folder of a checkpoint."""
        with whole_file(folder / FILE) as partial:
            save_file({name: tensor.cpu().contiguous() for name, tensor in self.mean.items()}, partial)

    def load(self, folder: Path) -> None:
        """Load the mean of a checkpoint."""
        self.mean = load_file(folder / FILE)


def load_mean(model: nn.Module, folder: Path) -> None:
    """Load the mean of a checkpoint as a model's weights."""
    _put(model, load_file(folder / FILE))


@torch.no_grad()
def _put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])
