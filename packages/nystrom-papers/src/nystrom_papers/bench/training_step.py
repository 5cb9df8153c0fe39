"""One step of a plain training loop: forward, backward, clipping, update."""

import torch
from torch import Tensor, nn

from nystrom.clock import seconds
from nystrom_lab.measure.peak import peak_bytes
from nystrom_lab.training.scoring import DTYPES

Batch = dict[str, Tensor]


class TrainingStep:
    """A model in training mode with its optimizer, and its training steps.

    The output of the model has a loss; `precision` is float32 or the dtype of autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "float32",
        clip_value: float | None = None,
    ):
        self.model, self.optimizer, self.precision = model.train(), optimizer, precision
        self.clip_value = clip_value
        self.device = next(model.parameters()).device

    def step(self, batch: Batch) -> Tensor:
        """Compute the gradients of a batch on the device, clip them, change the weights, and return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, DTYPES[self.precision], enabled=self.precision != "float32"):
            loss = self.model(**batch).loss
        loss.backward()
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.clip_value)
        self.optimizer.step()
        return loss.detach()

    def seconds(self, batch: Batch) -> float:
        """The time of a step."""
        self.optimizer.zero_grad(set_to_none=True)
        return seconds(lambda: self.step(batch), self.device)

    def peak_bytes(self, batch: Batch) -> int:
        """The peak memory of a step, beyond weights, optimizer and batch."""
        self.optimizer.zero_grad(set_to_none=True)
        return peak_bytes(lambda: self.step(batch), self.device)
