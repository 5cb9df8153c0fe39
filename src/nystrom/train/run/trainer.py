"""Training of a task by a preset: `nystrom.train.run.run_trainer` on the splits of a task.

- The best checkpoint is chosen by validation accuracy, after the share of the steps that the preset says.
- A model that is compiled gets batches of one shape, see `nystrom.train.run.compiling`.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import EvalPrediction, TrainingArguments

from nystrom.train.data.tasks import Model, Splits, find_task
from nystrom.train.presets.published import Preset
from nystrom.train.run.compiling import compile_model
from nystrom.train.run.folder import RunFolder
from nystrom.train.run.run_trainer import RunTrainer
from nystrom.train.scoring import is_right
from nystrom.train.settings import Settings


class EncoderTrainer(RunTrainer):
    """Trains one model by settings, in one run folder.

    Args:
        model: The model.
        arguments: From `training_arguments`.
        settings: Settings of the run.
        preset: The preset that they come from.
        splits: Data.
        run: The folder.
    """

    def __init__(
        self,
        model: Model,
        arguments: TrainingArguments,
        *,
        settings: Settings,
        preset: Preset,
        splits: Splits,
        run: RunFolder,
    ):
        self.preset, self.chosen, self.splits = preset, settings, splits
        collate = find_task(settings.task).collate
        if settings.compile:
            collate = partial(collate, length=settings.max_length)
            compile_model(model)
        super().__init__(
            model,
            arguments,
            settings=settings,
            train=splits.train,
            validation=splits.val,
            collate=collate,
            run=run,
            clip_value=preset.clip_value,
            compute_metrics=_means,
            preprocess_logits_for_metrics=_judge,
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean cross entropy, in training with smoothed labels if the run has them."""
        smoothing = self.chosen.label_smoothing
        if not model.training or not smoothing:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.float(), inputs["labels"], label_smoothing=smoothing)
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the validation split, and name what the best checkpoint is chosen by."""
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        counts = self.state.global_step > self.preset.best_after * self.settings.steps
        return {**metrics, "eval_selection": metrics["eval_accuracy"] if counts else -1.0}


def _judge(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each sample, whether it is classified correctly, and its loss."""
    return is_right(logits, labels), F.cross_entropy(logits.float(), labels, reduction="none")


def _means(prediction: EvalPrediction) -> dict[str, float]:
    """Means over the samples; the Trainer's own loss also counts what fills the last batch of several processes."""
    right, losses = tuple(prediction.predictions)
    return {"accuracy": float(np.mean(right)), "loss": float(np.mean(losses))}
