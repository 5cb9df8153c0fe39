"""The trainer of runs on a task.

- The best checkpoint is chosen by validation accuracy, after the share of the steps that the preset says.
- Samples are augmented and inputs denoised if the settings say so (`nystrom_lab.training.batches`,
  `nystrom_lab.training.denoising`).
- A compiled model gets batches of one shape, see `nystrom_lab.training.compiling`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, TrainingArguments

from nystrom.models import EncoderModel
from nystrom.parallel import parallelize
from nystrom_lab.data.store.split import Split
from nystrom_lab.training.batches import AugmentedSplit, PassOrder, Vary
from nystrom_lab.training.results import Provenance, accuracy_row, result_row, setting_facts
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import QUANTITIES
from nystrom_lab.training.run_settings import Settings
from nystrom_lab.training.run_trainer import RunResults, RunTrainer
from nystrom_lab.training.scoring import accuracy, is_right, load_model
from nystrom_lab.training.tasks import Model, Splits, find_task


class EncoderTrainer(RunTrainer[Settings]):
    """Trains one model by settings, in one run folder."""

    # Logged quantities, and their names in the curves and lines.
    logged = QUANTITIES

    def __init__(
        self,
        model: Model | EncoderModel,
        arguments: TrainingArguments,
        *,
        settings: Settings,
        splits: Splits,
        run: RunFolder,
    ):
        self.splits = splits
        if settings.denoise or settings.mask_share:
            from nystrom_lab.training.denoising import Denoiser

            model.denoiser = Denoiser(model.config)
            model.denoiser.apply(model._init_weights)
        extent = {"length" if settings.compile else "most": settings.longest}
        collate = partial(find_task(settings.task).collate, **extent)
        if settings.compile:
            from nystrom_lab.training.compiling import compile_model

            compile_model(model)
        super().__init__(
            model,
            arguments,
            settings=settings,
            train=splits.train,
            validation=splits.val,
            collate=collate,
            run=run,
            clip_value=settings.base.clip_value,
            quantities=self.logged,
            compute_metrics=self.sum_up,
            preprocess_logits_for_metrics=self.judge,
        )

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The mean cross entropy, in training with smoothed labels and the loss of the tokens if the run has them."""
        smoothing, weight = self.settings.label_smoothing, self.settings.denoise
        if not model.training or not (smoothing or weight):
            return super().compute_loss(model, inputs, *args, **kwargs)
        if weight:
            outputs, of_tokens = self._denoise(model, inputs)
        else:
            outputs, of_tokens = model(**inputs), 0.0
        loss = F.cross_entropy(outputs.logits.float(), inputs["labels"], label_smoothing=smoothing)
        return loss + weight * of_tokens

    def _denoise(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """The output for a corrupted input, and the loss of its tokens."""
        denoiser: Any = self.network.denoiser
        ids, keep = inputs["input_ids"], inputs.get("attention_mask")
        corrupted = denoiser.corrupt(ids, keep, self.network.get_input_embeddings())
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
        if not self.settings.augment:
            return super().get_train_dataloader()
        return self.varied_loader(find_task(self.settings.task).vary)

    def varied_loader(self, vary: Vary) -> DataLoader:
        """The batches of the whole run, with samples augmented anew in each pass."""
        samples = self.splits.train
        varied = AugmentedSplit(samples, vary, seed=self.settings.seed)
        return self._whole_run(varied, partial(PassOrder, samples.lengths))

    def selection(self, metrics: Mapping[str, float]) -> float:
        """The value that selects the best checkpoint."""
        counts = self.state.global_step > self.settings.base.best_after * self.settings.steps
        return metrics["eval_accuracy"] if counts else -1.0

    def judge(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        """For each sample, whether it is classified correctly, and its loss."""
        return is_right(logits, labels), F.cross_entropy(logits.float(), labels, reduction="none")

    def sum_up(self, prediction: EvalPrediction) -> dict[str, float]:
        """Means over the samples; the Trainer's own loss also counts what fills the last batch of several processes."""
        right, losses = tuple(prediction.predictions)
        return {"accuracy": float(np.mean(right)), "loss": float(np.mean(losses))}

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best model, and its accuracy on the test split."""
        settings, test = self.settings, self._test()
        task = find_task(settings.task)
        best = load_model(self.run.checkpoint(step), settings.task, classes=test.classes)
        if self.pieces is not None:
            parallelize(best, self.pieces.tokens)
            task = replace(task, collate=self.pieces.collate(task.collate))
        share = accuracy(
            best, test, task, batch_size=settings.part_size, device=settings.device, precision=settings.precision
        )
        return best, share

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The accuracies on the test and validation splits, and those of guesses without a model."""
        settings, test, val, reached = self.settings, self._test(), self.splits.val, self.state.best_metric
        assert reached is not None, "the last step is evaluated"
        guesses, guess = {"largest class": test.majority_share}, find_task(settings.task).guess
        if guess is not None:
            guesses[guess.name] = guess.share(self.splits.train, test)
        provenance = self.provenance(command)
        rows = [
            accuracy_row(model.config, "test accuracy", scores, len(test), provenance),
            accuracy_row(model.config, "validation accuracy", reached, len(val), provenance),
            *(result_row(model.config, f"{name} of test", told, "", provenance) for name, told in guesses.items()),
        ]
        beside = ", ".join(f"{name} {told:.1%}" for name, told in guesses.items())
        text = (
            f"test accuracy {scores:.1%} ({rows[0].low:.1%} to {rows[0].high:.1%} on {len(test)} samples), {beside}; "
            f"best after step {self.state.best_global_step} with validation accuracy {reached:.1%}"
        )
        return RunResults(rows, partial(result_row, model.config, provenance=provenance), text, self.run.drawn)

    def provenance(self, command: str) -> Provenance:
        """The provenance of the results."""
        settings = self.settings
        return Provenance(settings.device, settings.precision, settings.seed, setting_facts(settings), command)

    def _test(self) -> Split:
        assert self.splits.test is not None, "a run that classifies opens the test split"
        return self.splits.test
