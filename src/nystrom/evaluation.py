"""A model as it is in evaluation, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a block without dropout and random draws; then the model is in the mode that it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
