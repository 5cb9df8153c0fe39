"""Training of a task by a preset: `nystrom_lab.training.run.run_trainer` on the splits of a task.

- The best checkpoint is chosen by validation accuracy, after the share of the steps that the preset says.
- Samples are augmented, inputs denoised and weights averaged if the settings say so
  (`nystrom_lab.training.data.augmented`, `nystrom_lab.training.additions.denoising`,
  `nystrom_lab.training.additions.weight_mean`).
- A compiled model gets batches of one shape, see `nystrom_lab.training.additions.compiling`.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nystrom.models import EncoderModel
from nystrom_lab.training.additions.compiling import compile_model
from nystrom_lab.training.additions.denoising import Denoiser
from nystrom_lab.training.additions.weight_mean import WeightMean
from nystrom_lab.training.data.augmented import AugmentedSplit, PassOrder, Vary
from nystrom_lab.training.data.tasks import Model, Splits, find_task
from nystrom_lab.training.presets.published import Preset
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import QUANTITIES
from nystrom_lab.training.run.run_trainer import RunTrainer
from nystrom_lab.training.run.writing import written
from nystrom_lab.training.run_settings import Settings
from nystrom_lab.training.scoring import is_right


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

    # What is logged, and its name in the curves and lines.
    logged = QUANTITIES

    def __init__(
        self,
        model: Model | EncoderModel,
        arguments: TrainingArguments,
        *,
        settings: Settings,
        preset: Preset,
        splits: Splits,
        run: RunFolder,
    ):
        self.preset, self.chosen, self.splits = preset, settings, splits
        if settings.denoise:
            model.denoiser = Denoiser(model.config)
            model.denoiser.apply(model._init_weights)
        extent = {"length" if settings.compile else "most": settings.max_length}
        collate = partial(find_task(settings.task).collate, **extent)
        if settings.compile:
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
            quantities=self.logged,
            compute_metrics=self.sum_up,
            preprocess_logits_for_metrics=self.judge,
        )
        self.mean = WeightMean(model, settings.ema) if settings.ema else None
        if self.mean is not None:
            self.add_callback(_AfterStep(self.mean))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean cross entropy, in training with smoothed labels and the loss of the tokens if the run has them."""
        smoothing, weight = self.chosen.label_smoothing, self.chosen.denoise
        if not model.training or not (smoothing or weight):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if weight:
            outputs, of_tokens = self._denoise(model, inputs)
        else:
            outputs, of_tokens = model(**inputs), 0.0
        loss = F.cross_entropy(outputs.logits.float(), inputs["labels"], label_smoothing=smoothing)
        loss = loss + weight * of_tokens
        return (loss, outputs) if return_outputs else loss

    def _denoise(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """The output for a corrupted input, and the loss of its tokens."""
        denoiser, words = self.network.denoiser, self.network.get_input_embeddings()
        assert isinstance(denoiser, Denoiser)
        assert isinstance(words, nn.Embedding)
        ids, keep = inputs["input_ids"], inputs.get("attention_mask")
        corrupted = denoiser.corrupt(ids, keep, words)
        outputs = model(inputs_embeds=corrupted, attention_mask=keep, output_hidden_states=True)
        # The documents of a pair follow each other.
        ids = ids.flatten(0, -2)
        keep = None if keep is None else keep.flatten(0, -2)
        x = outputs.hidden_states[-1]
        # Behind a class token, where the model has one.
        x = x[:, x.shape[1] - ids.shape[1] :]
        return outputs, denoiser.loss(x, ids, keep, group=self.network.group)

    def get_train_dataloader(self) -> DataLoader:
        """The batches of the whole run, with samples augmented if the run does so."""
        if not self.chosen.augment:
            return super().get_train_dataloader()
        return self.varied_loader(find_task(self.chosen.task).vary)

    def varied_loader(self, vary: Vary) -> DataLoader:
        """The batches of the whole run, with samples augmented anew in each pass."""
        settings, samples = self.chosen, self.splits.train
        order = PassOrder(samples.lengths, batch_size=settings.batch_size, steps=settings.steps, seed=settings.seed)
        return self._loader(AugmentedSplit(samples, vary, seed=settings.seed), order, settings.part_size)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, with the mean of the weights if there is one."""
        super()._save_checkpoint(model, trial)
        if self.mean is not None and self.is_world_process_zero():
            folder = self.run.unfinished / self.run.checkpoint(self.state.global_step).name
            with written(folder, self.remedy()):
                self.mean.save(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read a checkpoint, with the mean of the weights if there is one."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.mean is not None:
            self.mean.load(Path(resume_from_checkpoint))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the validation split, and add the value that selects the best checkpoint."""
        with nullcontext() if self.mean is None else self.mean.in_place():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return {**metrics, "eval_selection": self.selection(metrics)}

    def selection(self, metrics: Mapping[str, float]) -> float:
        """The value that selects the best checkpoint."""
        counts = self.state.global_step > self.preset.best_after * self.settings.steps
        return metrics["eval_accuracy"] if counts else -1.0

    def judge(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        """For each sample, whether it is classified correctly, and its loss."""
        return is_right(logits, labels), F.cross_entropy(logits.float(), labels, reduction="none")

    def sum_up(self, prediction: EvalPrediction) -> dict[str, float]:
        """Means over the samples; the Trainer's own loss also counts what fills the last batch of several processes."""
        right, losses = tuple(prediction.predictions)
        return {"accuracy": float(np.mean(right)), "loss": float(np.mean(losses))}


class _AfterStep(TrainerCallback):
    def __init__(self, mean: WeightMean):
        self.mean = mean

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.mean.update(state.global_step)
