"""A plain training loop that keeps the loss and the gradient norm of every step, and evaluates at intervals.

A step does what it does in the papers' code: AdamW, a linear warm-up and decay of the learning rate, gradients clipped
entry by entry. The gradient norm is that of all weights together, before clipping. Training ends early when the loss or
the gradient is no longer finite; the missing steps then have the value NaN.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from nystrom_lab.studies.stability.arena import ArenaTask, Batch, new_optimizer, preset_of, random_batches
from nystrom_lab.studies.training_step import TrainingStep
from nystrom_lab.training.data.tasks import LabelledSplit, Model


class Trace(NamedTuple):
    """The record of a training.

    Attributes:
        loss: Loss of each step, on its batch.
        norm: Gradient norm of each step.
        step: Steps before each evaluation; the first is 0.
        seconds: Seconds of training up to each evaluation, without the evaluations.
        validation_loss: Validation loss at each evaluation.
        accuracy: Accuracy on the validation samples at each evaluation.
    """

    loss: Float[np.ndarray, " steps"]
    norm: Float[np.ndarray, " steps"]
    step: Float[np.ndarray, " evaluations"]
    seconds: Float[np.ndarray, " evaluations"]
    validation_loss: Float[np.ndarray, " evaluations"]
    accuracy: Float[np.ndarray, " evaluations"]


def train_plainly(
    model: Model,
    source: ArenaTask,
    split: LabelledSplit,
    validation: Sequence[Batch],
    *,
    learning_rate: float,
    steps: int,
    batch: int,
    every: int,
    seed: int,
) -> Trace:
    """Train a model, and record its training.

    Args:
        model: The model; it is trained in place, on its device.
        source: The task.
        split: Its training samples.
        validation: Batches to evaluate on; none for no evaluation.
        learning_rate: Learning rate at the end of the warm-up, which is a tenth of the steps.
        steps: Steps.
        batch: Samples per step.
        every: Steps between evaluations.
        seed: Seed of the batches, dropout and the method's draws.
    """
    preset = preset_of(source.task)
    optimizer = new_optimizer(model, preset, learning_rate)
    training = TrainingStep(model, optimizer, clip_value=preset.clip_value)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    loss, norm = np.full(steps, np.nan), np.full(steps, np.nan)
    points: list[tuple[float, float, float, float]] = []
    seconds = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step, samples in enumerate(random_batches(source, split, batch=batch, count=steps, seed=seed)):
            if validation and step % every == 0:
                points.append((step, seconds, *evaluate(model, validation)))
            began = time.perf_counter()
            model.train()
            now = training.backward({name: x.to(training.device) for name, x in samples.items()})
            loss[step], norm[step] = now.item(), _norm(model)
            if not np.isfinite(loss[step] + norm[step]):
                break
            training.update()
            schedule.step()
            seconds += time.perf_counter() - began
        else:
            if validation:
                points.append((steps, seconds, *evaluate(model, validation)))
    return Trace(loss, norm, *np.array(points, dtype=np.float64).reshape(-1, 4).T)


def validation_batches(source: ArenaTask, split: LabelledSplit, *, batch: int, count: int) -> list[Batch]:
    """Batches to evaluate on, the same for all methods."""
    return list(random_batches(source, split, batch=batch, count=count, seed=0))


@torch.no_grad()
def evaluate(model: Model, batches: Sequence[Batch]) -> tuple[float, float]:
    """Mean loss and accuracy over the batches, without dropout."""
    model.eval()
    device, loss, right, count = next(model.parameters()).device, 0.0, 0, 0
    for samples in batches:
        samples = {name: x.to(device) for name, x in samples.items()}
        out, labels = model(**samples), samples["labels"]
        loss += out.loss.item() * len(labels)
        right, count = right + int((out.logits.argmax(dim=-1) == labels).sum()), count + len(labels)
    return loss / count, right / count


def _norm(model: Model) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).item()
